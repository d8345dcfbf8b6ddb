"""What a connection tells its owner: values, never callbacks.

A request that came whole, the common case by far, is a bare tuple (:data:`CompleteRequest`), because a tuple is made in
18 ns and a NamedTuple in 140. ``type(event) is tuple`` tells it from all others, which are classes of their own.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from ratelimitd.http2.errors import Cause
from ratelimitd.http2.headers import RequestHead
from ratelimitd_wire.static_table import Field

CompleteRequest: TypeAlias = tuple[int, RequestHead, bytes]
"""(stream, head, body) of a request that ended with its first frame of DATA. Nothing more comes for it but StreamReset,
and there is nothing to acknowledge."""


class RequestReceived(NamedTuple):
    """A request has begun. Unless it ``ended`` with its head, DataReceived follow."""

    stream_id: int
    head: RequestHead
    ended: bool


class HeadTooLarge(NamedTuple):
    """A request has begun whose header list is over the limit. It waits for an answer that says so."""

    stream_id: int
    ended: bool


class DataReceived(NamedTuple):
    """A part of a body. ``flow_bytes`` is what to acknowledge when it has been dealt with; padding counts."""

    stream_id: int
    data: bytes
    flow_bytes: int
    ended: bool


class TrailersReceived(NamedTuple):
    """A request has ended with trailers."""

    stream_id: int
    fields: tuple[Field, ...]


class StreamReset(NamedTuple):
    """A stream is gone: by the peer (PEER_RESET), or by us because of what the peer sent.

    It may be one that was never announced, or is over: for those there is nothing to do but to count the cause.
    """

    stream_id: int
    code: int
    cause: Cause


class WindowOpened(NamedTuple):
    """Everything that was sent on a stream has left for the peer; there is room for more."""

    stream_id: int


class ConnectionEnded(NamedTuple):
    """Nothing more comes and nothing more can be sent but what ``data_to_send`` still has. All streams are gone."""

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
