"""Every method of the node: its path or paths, the role it asks for, and the handler with its guards around it.

A method that is not in the table of roles is an error at start, not an open door. Never knows what a method does.
See ADR 0016 and ADR 0017.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final, TypeVar

from ratelimitd.errors import StartupError
from ratelimitd.rpc.interface import (
    BidiStreamHandler,
    BulkHandler,
    Call,
    Methods,
    ServerStreamHandler,
    UnaryHandler,
)
from ratelimitd.services import config, grpc_health, health, rate_limiter, reflection
from ratelimitd.services.auth import Access, Requirement, Role
from ratelimitd.services.envoy import service as envoy
from ratelimitd.services.status import ErrorEdge

Source = TypeVar("Source")

PACKAGE: Final = "ratelimiter.v1."
"""The contract's package: its services are also answered without it, as the specification addresses them."""

ROLES: Final[Mapping[str, Role]] = MappingProxyType(
    {
        f"/{rate_limiter.SERVICE}/CheckRateLimit": Role.CHECK,
        f"/{rate_limiter.SERVICE}/CheckRateLimitBatch": Role.CHECK,
        envoy.METHOD: Role.CHECK,
        f"/{config.SERVICE}/CreateRateLimit": Role.ADMIN,
        f"/{config.SERVICE}/UpdateRateLimit": Role.ADMIN,
        f"/{config.SERVICE}/DeleteRateLimit": Role.ADMIN,
        f"/{config.SERVICE}/ListRateLimits": Role.READ,
        f"/{health.SERVICE}/GetHealthStatus": Role.READ,
        f"/{health.SERVICE}/GetMetrics": Role.READ,
        f"/{health.SERVICE}/ResetRateLimit": Role.ADMIN,
        f"/{grpc_health.SERVICE}/Check": Role.OPEN,
        f"/{grpc_health.SERVICE}/List": Role.OPEN,
        f"/{grpc_health.SERVICE}/Watch": Role.OPEN,
        f"/{reflection.V1}/ServerReflectionInfo": Role.OPEN,
        f"/{reflection.V1ALPHA}/ServerReflectionInfo": Role.OPEN,
    }
)
"""Full path → role, for every method under its name with package."""

OUR_SERVICES: Final = (rate_limiter.SERVICE, config.SERVICE, health.SERVICE)
"""The services of the contract."""


def names_of(services: Iterable[str]) -> frozenset[str]:
    """Every name under which these services are addressed: with the contract's package and without."""
    return frozenset(name for service in services for name in (service, _bare(service)))


def guarded(offers: Iterable[Methods], access: Access, edge: ErrorEdge) -> Methods:
    """The methods of all services as a transport serves them: under all their paths, each behind its role.

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
            # It never sees the call, so it is for methods that ask nothing of their caller.
            if access.requirement(_role_of(path)) is None:
                bulk |= dict.fromkeys(_paths(path), shortcut)
    return Methods(unary, server_stream, bidi_stream, bulk)


def admission(access: Access) -> Callable[[Call], None]:
    """What lets a call pass that may be made, and raises ``RpcError`` for any other: the guards without the handlers.

    For whoever has work of its own before a handler is called, and does it for nobody else.
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
        message = f"{path} has no role: add it to the table in services/catalogue.py"
        raise StartupError(message)
    return role


def _paths(path: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((path, "/" + _bare(path[1:]))))


def _bare(service: str) -> str:
    return service.removeprefix(PACKAGE)


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
