"""Events that a connection returns to its owner.

A request in one piece, by far the common case, is a bare tuple (:data:`CompleteRequest`): making one takes 18 ns, a
NamedTuple 140. ``type(event) is tuple`` distinguishes it from all others, which have classes.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from ratelimitd.http2.errors import Cause
from ratelimitd.http2.headers import RequestHead
from ratelimitd_wire.static_table import Field

CompleteRequest: TypeAlias = tuple[int, RequestHead, bytes]
"""(stream, head, body) of a request that ended with its first DATA frame. Only StreamReset may follow, and there is
nothing to acknowledge."""


class RequestReceived(NamedTuple):
    """A request has begun. Unless it ``ended`` with its head, DataReceived follow."""

    stream_id: int
    head: RequestHead
    ended: bool


class HeadTooLarge(NamedTuple):
    """A request has begun whose header list exceeds the limit. The owner must answer it with an error."""

    stream_id: int
    ended: bool


class DataReceived(NamedTuple):
    """A part of a body. ``flow_bytes``, padding included, are to be acknowledged after handling it."""

    stream_id: int
    data: bytes
    flow_bytes: int
    ended: bool


class TrailersReceived(NamedTuple):
    """A request has ended with trailers."""

    stream_id: int
    fields: tuple[Field, ...]


class StreamReset(NamedTuple):
    """A stream was reset: by the peer (PEER_RESET), or by us after an error of the peer.

    The stream may never have been announced, or may have ended; then the owner only counts the cause.
    """

    stream_id: int
    code: int
    cause: Cause


class WindowOpened(NamedTuple):
    """A stream has no pending octets left; the owner may send more."""

    stream_id: int


class ConnectionEnded(NamedTuple):
    """The connection and all its streams have ended; only the rest of ``data_to_send`` remains to be written."""

    code: int
    cause: Cause
    message: str


Event: TypeAlias = (
    CompleteRequest
    | RequestReceived
    | HeadTooLarge
    | DataReceived
    | TrailersReceived
    | StreamReset
    | WindowOpened
    | ConnectionEnded
)
