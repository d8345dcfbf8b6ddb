"""What a transport and the services agree on: calls, handlers, status codes and errors.

Services are written against this module alone, so that the same handlers run behind every transport. A unary handler
takes the bytes of one message and the call, and returns the bytes of the answer, or an awaitable of them: an answer
that needs no waiting costs no task. Nothing here imports a transport.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol


class StatusCode(enum.IntEnum):
    """The gRPC status codes, by their number on the wire (grpc/grpc doc/statuscodes.md)."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class TransportError(enum.StrEnum):
    """Why a transport ended a call: the closed set of causes that it counts."""

    BAD_REQUEST = "bad_request"
    """Headers or frames of messages that are not those of a call; not what a message says."""
    CANCELLED = "cancelled"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    TOO_MANY_CONNECTIONS = "too_many_connections"
    TOO_MANY_CALLS = "too_many_calls"
    TOO_MANY_STREAMS = "too_many_streams"
    UNEXPECTED = "unexpected"
    UNKNOWN_METHOD = "unknown_method"
    TLS_FILES = "tls_files"
    """New certificate files could not be used; the old ones stay in service."""
    TLS_HANDSHAKE = "tls_handshake"
    """It failed: nothing in common, a client certificate that is missing or not trusted, or octets that are no TLS."""
    SLOW_HANDSHAKE = "slow_handshake"
    """It took too long."""
    SLOW_REQUEST = "slow_request"
    """The rest of a call's request did not come in time."""
    PLAINTEXT = "plaintext"
    """Somebody spoke it on a port of TLS."""


class RpcError(Exception):
    """Ends a call with a status. ``details`` is a serialised ``google.rpc.Status`` for ``grpc-status-details-bin``."""

    def __init__(self, code: StatusCode, message: str, details: bytes = b"") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details


class Call(Protocol):
    """One call in progress, as its handler sees it."""

    @property
    def method(self) -> str:
        """Full path as the caller sent it, such as ``/ratelimiter.v1.RateLimiter/CheckRateLimit``."""

    @property
    def peer(self) -> str:
        """The address of the peer: ``ipv4:127.0.0.1:50000``, ``ipv6:[::1]:50000`` or ``unix:``."""

    @property
    def peer_sans(self) -> Sequence[str]:
        """Subject alternative names of the peer's verified client certificate; empty without one."""

    def metadata(self, key: str) -> str | None:
        """The first value of a lower-case ASCII metadata key, or ``None``."""

    def values(self, key: str) -> Sequence[str]:
        """All values of a lower-case ASCII metadata key, in the order in which they came."""

    def time_remaining_s(self) -> float | None:
        """Seconds left until the caller's deadline, ``None`` without one, never negative."""


LARGE_BYTES: Final = 2_048
"""Unary calls with a larger request, and compressed ones, go through a ``FairQueue``."""

UnaryHandler = Callable[[bytes, Call], bytes | Awaitable[bytes]]
BulkHandler = Callable[[Sequence[bytes]], Sequence[bytes | None]]
ServerStreamHandler = Callable[[bytes, Call], AsyncIterator[bytes]]
BidiStreamHandler = Callable[[AsyncIterator[bytes], Call], AsyncIterator[bytes]]


@dataclass(frozen=True, slots=True)
class Methods:
    """The methods a transport serves, by full path. A path is in exactly one of the three tables.

    What a transport owes a handler: it is not called once the call's deadline has passed, so that nothing is charged
    for an answer without a reader; it is cancelled when the caller leaves; and an ``RpcError`` it raises becomes
    the status of the call. Anything else it raises becomes INTERNAL with a fixed text.
    """

    unary: Mapping[str, UnaryHandler] = field(default_factory=dict)
    server_stream: Mapping[str, ServerStreamHandler] = field(default_factory=dict)
    bidi_stream: Mapping[str, BidiStreamHandler] = field(default_factory=dict)
    bulk: Mapping[str, BulkHandler] = field(default_factory=dict)
    """Shortcuts of unary methods for messages that came together: answer i is to message i, and ``None`` is for the
    method's own handler. It asks for nothing but the message, waits for nothing, and raises nothing. A transport may
    use it or not: the answers are the same."""
    bulk_unless_sampled: bool = False
    """Calls whose caller records its trace (``traceparent``, W3C Trace Context) are for the method's own handler."""


class InProgress(NamedTuple):
    """What a transport is busy with at the moment; ``None`` where it cannot tell."""

    unary: int
    """Unary calls whose handler has not answered yet; one that answers at once is never seen here."""
    streams: int
    """Calls that answer with a stream."""
    connections: int | None = None
    http2_streams: int | None = None
    """Requests that are not answered to their end, over all connections: those still arriving, too."""


class Server(Protocol):
    """A running transport."""

    @property
    def in_progress(self) -> InProgress:
        """What it is busy with now; takes a look at each connection."""

    async def start(self) -> str:
        """Bind and listen; returns the bound address as ``host:port``.

        Raises:
            StartupError: the address is taken or the TLS files are unusable; the message says which.
        """

    async def stop_accepting(self) -> None:
        """Refuse new calls; calls in flight go on."""

    async def stop(self, grace_s: float) -> None:
        """Wait at most ``grace_s`` seconds for calls in flight, then cancel them and close every connection."""


MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
"""The specification's bound on messages, both ways."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportLimits:
    """The bounds of one server. Times in the unit of the name."""

    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_concurrent_rpcs: int = 1_000
    """Unary calls in progress; more are answered RESOURCE_EXHAUSTED."""
    max_streams: int = 1_000
    """Calls that last (health watches, reflection), counted apart: idle watchers must not use up the room of checks."""
    max_streams_per_connection: int = 256
    """Unlimited by default, which makes a flood of resets on one connection cost ten times the CPU (measured)."""
    min_ping_interval_ms: int = 5_000
    """Callers ping every 10 s, with or without calls; half of that forgives jitter. The default, 5 min, closes them."""
    keepalive_interval_ms: int = 60_000
    keepalive_timeout_ms: int = 20_000
    """Finds callers that vanished without a word."""
    stall_timeout_ms: int = 20_000
    """How long a peer may owe what everything waits for: its preface, the rest of a frame or of a header block, room
    for answers."""
    request_timeout_ms: int = 60_000
    """From the head of a call with one message to its end: the largest message at 70 KB/s. Withholding the rest
    of many requests must not keep others from the room for them."""
    max_connection_age_ms: int = 3_600_000
    """Behind a balancer of connections, old ones must end for a new node to get its share. grpc adds ±10 %."""
    max_connection_age_grace_ms: int = 60_000
    max_connections: int = 10_000
    """At about 10 KiB each while idle. More are closed as soon as they come."""
    max_request_bytes_per_connection: int = 16 * 1024 * 1024
    """Messages that wait for their rest, or for the end of their call: four of the largest."""
    max_request_bytes: int = 256 * 1024 * 1024
    """The same over all connections. Flow control bounds what is unread; these two bound what was read too early."""
    max_open_requests: int = 10_000
    """Over all connections, those that still arrive among them: each may hold a header list of 16 KiB, and a
    connection's share times the number of connections would be 40 GB."""
    max_unread_bytes: int = 256 * 1024 * 1024
    """Answers that peers do not take, over all connections: above it, connections that hold more than their share end.
    What one may hold times the number of connections would be 40 GB, too."""
