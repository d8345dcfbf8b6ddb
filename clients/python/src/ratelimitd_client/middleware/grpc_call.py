"""A call to a gRPC server, and what a caller is told of its limit: what both kinds of interceptor have in common.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import grpc

from ratelimitd_client.decision import Decision
from ratelimitd_client.middleware.arrival import RequestInfo
from ratelimitd_client.middleware.guard import Guard

METHOD: Final = "POST"
"""The HTTP method of every call."""

DENIED: Final = grpc.StatusCode.RESOURCE_EXHAUSTED

_HAVE_ADDRESSES: Final = ("ipv4", "ipv6")

Metadata = tuple[tuple[str, str], ...]
Behaviour = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class Call:
    """A call that has arrived: what functions in the options are given."""

    method: str
    """The full name: ``/shop.v1.Orders/Get``."""
    metadata: Sequence[tuple[str, str | bytes]]
    peer: str | None
    """The address of who is connected; ``None`` for a Unix socket."""
    context: Any
    """The ``grpc.ServicerContext``, or that of ``grpc.aio``."""

    def header(self, name: str) -> list[str]:
        """The values of one key of the metadata; the name in lower case."""
        return [value for key, value in self.metadata if key == name and isinstance(value, str)]


class Handler(NamedTuple):
    """What a server has for a method, in one form for all four kinds."""

    behaviour: Behaviour
    """The function or method of the servicer."""
    make: Callable[..., grpc.RpcMethodHandler[Any, Any]]
    """What makes a handler of this kind of another behaviour."""
    given: grpc.RpcMethodHandler[Any, Any]

    def with_behaviour(self, behaviour: Behaviour) -> grpc.RpcMethodHandler[Any, Any]:
        """The same handler, but for what it does."""
        given = self.given
        return self.make(behaviour, given.request_deserializer, given.response_serializer)


def handler_of(given: grpc.RpcMethodHandler[Any, Any]) -> Handler:
    """What a server has for a method."""
    behaviour: Any
    if given.request_streaming:
        if given.response_streaming:
            behaviour, make = given.stream_stream, grpc.stream_stream_rpc_method_handler
        else:
            behaviour, make = given.stream_unary, grpc.stream_unary_rpc_method_handler
    elif given.response_streaming:
        behaviour, make = given.unary_stream, grpc.unary_stream_rpc_method_handler
    else:
        behaviour, make = given.unary_unary, grpc.unary_unary_rpc_method_handler
    return Handler(behaviour, make, given)


def call_of(details: grpc.HandlerCallDetails, context: Any) -> Call:
    """A call that has arrived."""
    return Call(details.method, details.invocation_metadata or (), peer_of(context.peer()), context)


def arrival_of(call: Call, behaviour: object) -> RequestInfo:
    """A call as all middlewares know requests. Its endpoint is its method; it has no user."""
    return RequestInfo(METHOD, call.method, behaviour, lambda: None, call.peer, call.header)


def peer_of(text: str) -> str | None:
    """The address in what gRPC says of a peer (``ipv4:192.0.2.7:40000``); ``None`` if it has none."""
    kind, _, address = text.partition(":")
    return unquote(address) if kind in _HAVE_ADDRESSES else None


def told(guard: Guard[Call], decision: Decision) -> Metadata:
    """The trailing metadata that tells of a decision."""
    return tuple((name.lower(), value) for name, value in guard.headers(decision).items())


def tell(guard: Guard[Call], decision: Decision, context: Any) -> None:
    """Tell the caller of its limit, beside what interceptors before this one have to say."""
    metadata = told(guard, decision)
    if metadata:
        names = {name for name, _ in metadata}
        others = [pair for pair in _trailing(context) if pair[0] not in names]
        context.set_trailing_metadata((*others, *metadata))


def _trailing(context: Any) -> Sequence[tuple[str, str | bytes]]:
    try:
        return context.trailing_metadata() or ()
    except (AttributeError, NotImplementedError):  # a context of somebody else's
        return ()


def details_of(guard: Guard[Call], decision: Decision) -> str:
    """What a denied call ends with, beside its status."""
    return guard.denied(decision).body.decode().rstrip("\n")


def heed(guard: Guard[Call], decision: Decision | None, context: Any) -> None:
    """Tell the caller of its limit; end a denied call, by what gRPC raises for that. For handlers that block."""
    if decision is not None:
        tell(guard, decision, context)
        if not decision.allowed:
            context.abort(DENIED, details_of(guard, decision))
