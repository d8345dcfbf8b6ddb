"""The methods of a node, with a span around each call that is traced.

Changes of rules, listing and resets are traced as the tracer decides; checks only for callers who sampled their trace.
Never looks into a request: there are identifiers in it.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import replace
from typing import Final

from ratelimitd.rpc.interface import Call, Methods, RpcError, StatusCode, UnaryHandler
from ratelimitd.services import config, health, rate_limiter
from ratelimitd.tracing import TRACEPARENT, Span, Tracer, is_sampled
from ratelimiter.v1 import ratelimiter_pb2

_CHECK: Final = f"{rate_limiter.SERVICE}/CheckRateLimit"
_BATCH: Final = f"{rate_limiter.SERVICE}/CheckRateLimitBatch"
_CHECKS: Final = frozenset({_CHECK, _BATCH})

_OTHERS: Final = frozenset(
    {
        f"{config.SERVICE}/CreateRateLimit",
        f"{config.SERVICE}/UpdateRateLimit",
        f"{config.SERVICE}/DeleteRateLimit",
        f"{config.SERVICE}/ListRateLimits",
        f"{health.SERVICE}/ResetRateLimit",
    }
)

_PACKAGE: Final = "ratelimiter.v1."


def traced(methods: Methods, tracer: Tracer) -> Methods:
    """``methods``, where calls of ours are traced; they are to be guarded already, so that errors have their status."""
    unary = {path: _traced(path, handler, tracer) for path, handler in methods.unary.items()}
    return replace(methods, unary=unary, bulk_unless_sampled=True)


def _traced(path: str, handler: UnaryHandler, tracer: Tracer) -> UnaryHandler:
    name = path[1:] if path.startswith(f"/{_PACKAGE}") else _PACKAGE + path[1:]
    if name not in _CHECKS | _OTHERS:
        return handler
    only_sampled = name in _CHECKS

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
    if name == _CHECK:
        decision = ratelimiter_pb2.RateLimitResponse.FromString(answer)
        span.note("ratelimitd.allowed", decision.allowed)
        span.note("ratelimitd.reason", ratelimiter_pb2.Reason.Name(decision.reason))
        span.note("ratelimitd.rule_id", decision.rule_id)
    elif name == _BATCH:
        decisions = ratelimiter_pb2.BatchRateLimitResponse.FromString(answer).responses
        span.note("ratelimitd.checks", len(decisions))
        span.note("ratelimitd.denied", sum(not decision.allowed for decision in decisions))
    _end(span, StatusCode.OK)
    return answer


def _end(span: Span, code: StatusCode) -> None:
    span.note("rpc.grpc.status_code", int(code))
    span.end("" if code is StatusCode.OK else code.name)
