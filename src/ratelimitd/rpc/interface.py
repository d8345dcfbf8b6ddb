"""The interface between transports and services: calls, handlers, status codes and errors.

Services import this module alone, so the same handlers run behind every transport. A unary handler takes the bytes of
one message and the call, and returns the bytes of the answer, or an awaitable of them: an immediate answer costs no
task. Imports no transport.
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
    """Malformed headers or message framing. Invalid content of a message is not counted here."""
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
    """Failed: no common parameters, a missing or untrusted client certificate, or octets that are not TLS."""
    SLOW_HANDSHAKE = "slow_handshake"
    """The TLS handshake took too long."""
    SLOW_REQUEST = "slow_request"
    """The rest of a request did not arrive in time."""
    PLAINTEXT = "plaintext"
    """A client sent plaintext to a TLS port."""


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
        """Subject alternative names of the peer's verified client certificate; empty without one.

        Of the kinds DNS, URI, email and IP, the last as :mod:`ipaddress` writes them.
        """

    def metadata(self, key: str) -> str | None:
        """The first value of a lower-case ASCII metadata key, or ``None``."""

    def values(self, key: str) -> Sequence[str]:
        """All values of a lower-case ASCII metadata key, in order of arrival."""

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
    """The methods a transport serves, by full path. A path is in exactly one of the first three tables.

    A transport does not call a handler after the call's deadline, so that an answer without a reader charges nothing.
    It cancels the handler when the caller leaves. An ``RpcError`` from the handler becomes the status of the call; any
    other exception becomes INTERNAL with a fixed text.
    """

    unary: Mapping[str, UnaryHandler] = field(default_factory=dict)
    server_stream: Mapping[str, ServerStreamHandler] = field(default_factory=dict)
    bidi_stream: Mapping[str, BidiStreamHandler] = field(default_factory=dict)
    bulk: Mapping[str, BulkHandler] = field(default_factory=dict)
    """Optional fast path of unary methods: decides messages that arrived together. Answer i belongs to message i; on
    ``None`` the transport calls the unary handler. A bulk handler needs only the messages, does not wait, and does not
    raise. Answers are the same without it."""
    bulk_unless_sampled: bool = False
    """Calls with a sampled ``traceparent`` (W3C Trace Context) skip the bulk handler."""


class InProgress(NamedTuple):
    """Work in progress of a transport; ``None`` where it is unknown."""

    unary: int
    """Unary calls whose handler is waiting; calls answered at once are never counted."""
    streams: int
    """Calls that answer with a stream."""
    connections: int | None = None
    http2_streams: int | None = None
    """Open streams over all connections, including requests still arriving and answers not completely sent."""


class Server(Protocol):
    """A running transport."""

    @property
    def in_progress(self) -> InProgress:
        """Work in progress now; takes time in proportion to the connections."""

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
    """Streaming calls (health watches, reflection), counted apart: idle watchers must not take the room of checks."""
    max_streams_per_connection: int = 256
    """gRPC's default, unlimited, makes a flood of resets on one connection cost ten times the CPU (measured)."""
    min_ping_interval_ms: int = 5_000
    """Clients ping every 10 s, with or without calls; half of that allows for jitter. gRPC's default, 5 min, would
    close their connections."""
    keepalive_interval_ms: int = 60_000
    keepalive_timeout_ms: int = 20_000
    """Detects peers that disappeared without closing the connection."""
    stall_timeout_ms: int = 20_000
    """Timeout for input that blocks the connection: the preface, the rest of a frame or header block, window for
    answers."""
    request_timeout_ms: int = 60_000
    """From the head of a unary request to its end: allows the largest message at 70 KB/s. Clients that withhold the
    rest of many requests must not take the room of others."""
    max_connection_age_ms: int = 3_600_000
    """Behind a connection balancer, old connections must end before a new node gets its share. Jitter: ±10 %."""
    max_connection_age_grace_ms: int = 60_000
    max_connections: int = 10_000
    """About 10 KiB each while idle. Further ones are closed on accept."""
    max_request_bytes_per_connection: int = 16 * 1024 * 1024
    """Bytes of incomplete requests: four of the largest messages."""
    max_request_bytes: int = 256 * 1024 * 1024
    """The same over all connections. Flow control bounds unread octets; these two bound octets read too early."""
    max_open_requests: int = 10_000
    """Over all connections, including requests still arriving. Each may hold a header list of 16 KiB; the streams of
    all connections together could hold 40 GB."""
    max_unread_bytes: int = 256 * 1024 * 1024
    """Answers that peers have not read, over all connections; above it, connections that hold more than their share
    are closed. If each held the 4 MiB at which it refuses requests, they would hold 40 GB together."""
