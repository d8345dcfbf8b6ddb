"""All methods of the node: their paths, their required roles, and their handlers with guards.

A method without a role prevents the start, so none is open by mistake. See ADR 0016 and ADR 0017.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Final, TypeVar

from ratelimitd.errors import StartupError
from ratelimitd.rpc.interface import (
    BidiStreamHandler,
    BulkHandler,
    Call,
    Methods,
    RpcError,
    ServerStreamHandler,
    StatusCode,
    UnaryHandler,
)
from ratelimitd.services import (
    config,
    envoy,
    grpc_health,
    health,
    holds,
    plans,
    rate_limiter,
    reflection,
)
from ratelimitd.services.auth import Access, Requirement, Role
from ratelimitd.services.errors import ErrorEdge
from ratelimitd.tracing import TRACEPARENT, Span, Tracer, is_sampled
from ratelimiter.v1 import ratelimiter_pb2

Source = TypeVar("Source")

PACKAGE: Final = "ratelimiter.v1."
"""The contract's package. Its services are also reachable without it, as the specification addresses them."""

ROLES: Final[Mapping[str, Role]] = MappingProxyType(
    {
        f"/{rate_limiter.SERVICE}/CheckRateLimit": Role.CHECK,
        f"/{rate_limiter.SERVICE}/CheckRateLimitBatch": Role.CHECK,
        envoy.METHOD: Role.CHECK,
        f"/{holds.SERVICE}/Hold": Role.CHECK,
        f"/{holds.SERVICE}/Settle": Role.CHECK,
        f"/{holds.SERVICE}/Extend": Role.CHECK,
        f"/{holds.SERVICE}/ListHolds": Role.READ,
        f"/{config.SERVICE}/CreateRateLimit": Role.ADMIN,
        f"/{config.SERVICE}/UpdateRateLimit": Role.ADMIN,
        f"/{config.SERVICE}/DeleteRateLimit": Role.ADMIN,
        f"/{config.SERVICE}/ListRateLimits": Role.READ,
        f"/{config.SERVICE}/GetRateLimit": Role.READ,
        f"/{config.SERVICE}/ApplyRateLimits": Role.ADMIN,
        f"/{health.SERVICE}/GetHealthStatus": Role.READ,
        f"/{health.SERVICE}/GetMetrics": Role.READ,
        f"/{health.SERVICE}/ResetRateLimit": Role.ADMIN,
        f"/{health.SERVICE}/ExplainRateLimit": Role.READ,
        f"/{health.SERVICE}/ListUnmatched": Role.READ,
        f"/{plans.SERVICE}/AssignPlan": Role.ADMIN,
        f"/{plans.SERVICE}/UnassignPlan": Role.ADMIN,
        f"/{plans.SERVICE}/GetAssignment": Role.READ,
        f"/{plans.SERVICE}/ListAssignments": Role.READ,
        f"/{plans.SERVICE}/BatchAssignPlans": Role.ADMIN,
        f"/{grpc_health.SERVICE}/Check": Role.OPEN,
        f"/{grpc_health.SERVICE}/List": Role.OPEN,
        f"/{grpc_health.SERVICE}/Watch": Role.OPEN,
        f"/{reflection.V1}/ServerReflectionInfo": Role.OPEN,
        f"/{reflection.V1ALPHA}/ServerReflectionInfo": Role.OPEN,
    }
)
"""Full path, with package → role, for every method."""

OUR_SERVICES: Final = (
    rate_limiter.SERVICE,
    config.SERVICE,
    health.SERVICE,
    plans.SERVICE,
    holds.SERVICE,
)
"""The services of the contract."""


def names_of(services: Iterable[str]) -> frozenset[str]:
    """Return the names of these services, with and without the contract's package."""
    return frozenset(name for service in services for name in (service, _bare(service)))


def guarded(offers: Iterable[Methods], access: Access, edge: ErrorEdge) -> Methods:
    """Return the methods of all services under all their paths, each guarded by its role.

    Raises:
        StartupError: a method has no role.
    """
    unary: dict[str, UnaryHandler] = {}
    server_stream: dict[str, ServerStreamHandler] = {}
    bidi_stream: dict[str, BidiStreamHandler] = {}
    bulk: dict[str, BulkHandler] = {}
    for offer in offers:
        for path, handler in offer.unary.items():
            required = access.requirement(_role_of(path))
            unary |= dict.fromkeys(_paths(path), _guarded_unary(handler, required, edge))
        for path, stream in offer.server_stream.items():
            required = access.requirement(_role_of(path))
            server_stream |= dict.fromkeys(_paths(path), _guarded_stream(stream, required, edge))
        for path, bidi in offer.bidi_stream.items():
            required = access.requirement(_role_of(path))
            bidi_stream |= dict.fromkeys(_paths(path), _guarded_stream(bidi, required, edge))
        for path, shortcut in offer.bulk.items():
            # A bulk handler does not receive the call, so it serves a method only while that needs no credentials.
            role = _role_of(path)
            if access.requirement(role) is None:
                bulk |= dict.fromkeys(_paths(path), shortcut)
            elif access.is_open(role):
                while_open = _while_open(shortcut, partial(access.is_open, role))
                bulk |= dict.fromkeys(_paths(path), while_open)
    return Methods(unary, server_stream, bidi_stream, bulk)


def admission(access: Access) -> Callable[[Call], None]:
    """Return the guards without the handlers: a function that raises ``RpcError`` for calls that are not permitted.

    For transports that do work for a call before its handler runs.
    """
    requirements = {
        path: access.requirement(role) for name, role in ROLES.items() for path in _paths(name)
    }

    def admit(call: Call) -> None:
        required = requirements[call.method]
        if required is not None:
            required(call)

    return admit


def _role_of(path: str) -> Role:
    role = ROLES.get(path)
    if role is None:
        message = f"{path} has no role: add it to the table in services/methods.py"
        raise StartupError(message)
    return role


def _paths(path: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((path, "/" + _bare(path[1:]))))


def _bare(service: str) -> str:
    return service.removeprefix(PACKAGE)


def _while_open(shortcut: BulkHandler, is_open: Callable[[], bool]) -> BulkHandler:
    """Return ``shortcut``, which returns ``None`` for every message once credentials are needed."""

    def answers(messages: Sequence[bytes]) -> Sequence[bytes | None]:
        return shortcut(messages) if is_open() else [None] * len(messages)

    return answers


def _guarded_unary(
    handler: UnaryHandler, required: Requirement | None, edge: ErrorEdge
) -> UnaryHandler:
    def answer(data: bytes, call: Call) -> bytes | Awaitable[bytes]:
        try:
            if required is not None:
                required(call)
            result = handler(data, call)
        except Exception as error:  # noqa: BLE001 -- the edge: nothing may leave but an RpcError
            raise edge.translate(error, call.method) from None
        return result if isinstance(result, bytes) else edge.awaited(result, call.method)

    return answer


def _guarded_stream(
    handler: Callable[[Source, Call], AsyncIterator[bytes]],
    required: Requirement | None,
    edge: ErrorEdge,
) -> Callable[[Source, Call], AsyncIterator[bytes]]:
    async def answers(source: Source, call: Call) -> AsyncIterator[bytes]:
        if required is not None:
            required(call)
        async for answer in edge.streamed(handler(source, call), call.method):
            yield answer

    return answers


_CHECK: Final = f"{rate_limiter.SERVICE}/CheckRateLimit"
_BATCH: Final = f"{rate_limiter.SERVICE}/CheckRateLimitBatch"
_HOLD: Final = f"{holds.SERVICE}/Hold"

_UNTRACED: Final = frozenset(
    {
        f"{holds.SERVICE}/ListHolds",
        f"{health.SERVICE}/GetHealthStatus",
        f"{health.SERVICE}/GetMetrics",
        f"{health.SERVICE}/ListUnmatched",
    }
)
"""Methods that are polled."""


def traced(methods: Methods, tracer: Tracer) -> Methods:
    """Return ``methods`` with traces of the contract's calls; must be guarded already, so that errors have a status."""
    unary = {path: _traced(path, handler, tracer) for path, handler in methods.unary.items()}
    return replace(methods, unary=unary, bulk_unless_sampled=True)


def _traced(path: str, handler: UnaryHandler, tracer: Tracer) -> UnaryHandler:
    name = path[1:] if path.startswith(f"/{PACKAGE}") else PACKAGE + path[1:]
    if name.rpartition("/")[0] not in OUR_SERVICES or name in _UNTRACED:
        return handler
    only_sampled = ROLES[f"/{name}"] is Role.CHECK

    def answer(data: bytes, call: Call) -> bytes | Awaitable[bytes]:
        parent = call.metadata(TRACEPARENT)
        if only_sampled and not is_sampled(parent):
            return handler(data, call)
        span = tracer.begin(name, parent)
        if span is None:
            return handler(data, call)
        try:
            result = handler(data, call)
        except RpcError as error:
            _end(span, error.code)
            raise
        if isinstance(result, bytes):
            return _answered(span, name, result)
        return _awaited(span, name, result)

    return answer


async def _awaited(span: Span, name: str, answer: Awaitable[bytes]) -> bytes:
    try:
        return _answered(span, name, await answer)
    except RpcError as error:
        _end(span, error.code)
        raise
    except BaseException:  # cancelled: the caller left
        _end(span, StatusCode.CANCELLED)
        raise


def _answered(span: Span, name: str, answer: bytes) -> bytes:
    if name in {_CHECK, _HOLD}:
        decision = (
            ratelimiter_pb2.RateLimitResponse.FromString(answer)
            if name == _CHECK
            else ratelimiter_pb2.HoldResponse.FromString(answer).answer
        )
        span.set_attribute("ratelimitd.allowed", decision.allowed)
        span.set_attribute("ratelimitd.reason", ratelimiter_pb2.Reason.Name(decision.reason))
        span.set_attribute("ratelimitd.rule_id", decision.rule_id)
    elif name == _BATCH:
        decisions = ratelimiter_pb2.BatchRateLimitResponse.FromString(answer).responses
        span.set_attribute("ratelimitd.checks", len(decisions))
        span.set_attribute("ratelimitd.denied", sum(not decision.allowed for decision in decisions))
    _end(span, StatusCode.OK)
    return answer


def _end(span: Span, code: StatusCode) -> None:
    span.set_attribute("rpc.grpc.status_code", int(code))
    span.end("" if code is StatusCode.OK else code.name)
