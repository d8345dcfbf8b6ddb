"""Middleware for gRPC servers with threads, and what it shares with that for ``grpc.aio``.

Your functions take the :class:`Call`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import QuotaFailure, RetryInfo
from google.rpc.status_pb2 import Status

from ratelimitd_client import RateLimiter
from ratelimitd_client.decision import Decision, LimitStatus, Reason
from ratelimitd_client.fail_open import STATUS_KEY
from ratelimitd_client.middleware.options import Options
from ratelimitd_client.middleware.policy import Policy, require_kind
from ratelimitd_client.middleware.request_info import RequestInfo

METHOD: Final = "POST"
"""The HTTP method of every call."""

DENIED: Final = grpc.StatusCode.RESOURCE_EXHAUSTED
UNAVAILABLE: Final = grpc.StatusCode.UNAVAILABLE

_NOT_ON_RETRY: Final = frozenset({Reason.COST_EXCEEDS_LIMIT, Reason.INVALID_REQUEST})
"""Denials of checks that no delay makes pass."""

_HAVE_ADDRESSES: Final = ("ipv4", "ipv6")

Behaviour = Callable[[Any, Any], Any]
MethodHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class RateLimitInterceptor(grpc.ServerInterceptor):
    """Checks each call before its handler runs; a stream once, when it begins.

    A denied call ends with RESOURCE_EXHAUSTED, or UNAVAILABLE if no limit denied it. Its trailing metadata has
    ``retry-after``, and its status ``google.rpc.RetryInfo`` and ``QuotaFailure`` as details. Allowed calls have the
    fields of the limit in the trailing metadata, unless the handler sets it.

    Args:
        limiter: a blocking client, or a fake. The caller closes it.
        options: how calls are counted and answered. The endpoint is the full name of the method.

    Raises:
        TypeError: ``limiter`` does not block, or a function of the options is a coroutine function.
    """

    def __init__(self, limiter: RateLimiter, options: Options[Call] | None = None) -> None:
        require_kind(limiter, options, asynchronous=False)
        self._limiter = limiter
        self._policy = Policy(options)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], MethodHandler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> MethodHandler | None:
        """Return the handler of a method, with the check before it."""
        handler = continuation(handler_call_details)
        if handler is None:  # unknown method: gRPC answers it
            return None
        behaviour = behaviour_of(handler)

        # The peer is known only here, from the context.
        def checked(request: Any, context: grpc.ServicerContext) -> Any:
            call = call_of(handler_call_details, context)
            info = info_of(call, behaviour)
            enforce(self._policy, self._policy.decide(self._limiter, call, info), context)
            return behaviour(request, context)

        return with_behaviour(handler, checked)


@dataclass(frozen=True, slots=True)
class Call:
    """A call, as functions of the options take it.

    Attributes:
        method: the full name: ``/shop.v1.Orders/Get``.
        metadata: the metadata of the call.
        peer: the address of the peer; ``None`` for a Unix socket.
        context: the ``grpc.ServicerContext``, or that of ``grpc.aio``.
    """

    method: str
    metadata: Sequence[tuple[str, str | bytes]]
    peer: str | None
    context: Any

    def header(self, name: str) -> list[str]:
        """Return the text values of a metadata key, given in lower case."""
        return [value for key, value in self.metadata if key == name and isinstance(value, str)]


def behaviour_of(handler: MethodHandler) -> Behaviour:
    """Return the method of the servicer."""
    behaviour: Behaviour = getattr(handler, _kind_of(handler))
    return behaviour


def with_behaviour(handler: MethodHandler, behaviour: Behaviour) -> MethodHandler:
    """Return a handler of the same kind with another behaviour."""
    make: Callable[..., MethodHandler] = getattr(grpc, f"{_kind_of(handler)}_rpc_method_handler")
    return make(behaviour, handler.request_deserializer, handler.response_serializer)


def _kind_of(handler: MethodHandler) -> str:
    request = "stream" if handler.request_streaming else "unary"
    answer = "stream" if handler.response_streaming else "unary"
    return f"{request}_{answer}"


def call_of(details: grpc.HandlerCallDetails, context: Any) -> Call:
    """Return the call of a context."""
    return Call(details.method, details.invocation_metadata or (), peer_of(context.peer()), context)


def info_of(call: Call, behaviour: object) -> RequestInfo:
    """Return a call in the form of all middlewares: the route is the method, and there is no user."""
    return RequestInfo(METHOD, call.method, behaviour, lambda: None, call.peer, call.header)


def peer_of(text: str) -> str | None:
    """Return the address in gRPC's name of a peer (``ipv4:192.0.2.7:40000``); ``None`` if it has none."""
    kind, _, address = text.partition(":")
    return unquote(address) if kind in _HAVE_ADDRESSES else None


def finish(
    policy: Policy[Call], decision: Decision, context: Any
) -> tuple[grpc.StatusCode, str] | None:
    """Add a decision to the trailing metadata, beside that of interceptors before this one.

    Returns:
        The status of a denied call and its message; ``None`` for an allowed one.
    """
    added: list[tuple[str, str | bytes]] = [
        (name.lower(), value) for name, value in policy.headers(decision).items()
    ]
    denial = None
    if not decision.allowed:
        denial = UNAVAILABLE if decision.fail_closed else DENIED, _message(policy, decision)
        added.append((STATUS_KEY, status_of(decision, *denial).SerializeToString()))
    if added:
        names = {name for name, _ in added}
        others = [pair for pair in _trailing(context) if pair[0] not in names]
        context.set_trailing_metadata((*others, *added))
    return denial


def _message(policy: Policy[Call], decision: Decision) -> str:
    return policy.denied(decision).body.decode().rstrip("\n")


def _trailing(context: Any) -> Sequence[tuple[str, str | bytes]]:
    try:
        return context.trailing_metadata() or ()
    except (AttributeError, NotImplementedError):  # a context of another library
        return ()


def status_of(decision: Decision, code: grpc.StatusCode, message: str) -> Status:
    """Return the status of a denied call: when to retry, if that helps, and which limits were exceeded.

    Identifiers are left out, since errors are logged.
    """
    status = Status(code=code.value[0], message=message)
    denying = [one for one in decision.limits if not (one.allowed or one.observed)]
    reasons = {decision.reason, *(one.reason for one in denying)}
    if decision.retry_after_seconds and reasons.isdisjoint(_NOT_ON_RETRY):
        delay = Duration(seconds=decision.retry_after_seconds)
        status.details.add().Pack(RetryInfo(retry_delay=delay))
    violations = [
        QuotaFailure.Violation(subject=whose, description=what)
        for whose, what in _exceeded(decision, denying)
    ]
    if violations:
        status.details.add().Pack(QuotaFailure(violations=violations))
    return status


def _exceeded(decision: Decision, denying: Sequence[LimitStatus]) -> list[tuple[str, str]]:
    """Return the identifier type and a description of each limit that denied a check; ``denying`` if of several."""
    if not decision.limits:
        # The type is not in the answer of a single limit.
        return [("", _described(decision.limit_name, decision))] if decision.limit else []
    return [(one.identifier_type, _described(one.name, one)) for one in denying]


def _described(name: str, of: Decision | LimitStatus) -> str:
    return f"limit {name or 'default'}: {of.limit} in {of.window_seconds} s"


def enforce(policy: Policy[Call], decision: Decision | None, context: Any) -> None:
    """Add the metadata, and abort a denied call by gRPC's exception. For blocking handlers."""
    if decision is not None and (denial := finish(policy, decision, context)):
        context.abort(*denial)
