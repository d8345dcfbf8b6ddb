"""The asyncio protocol of the native transport, which moves octets between a socket and the HTTP/2 core.

Each read is handled in slices: the events of one slice, then one write. The rest waits for the next event-loop
iteration, so that a peer that sends without pause takes no more than its share.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final, Protocol, cast

from ratelimitd.http2.connection import Connection
from ratelimitd.http2.errors import Cause
from ratelimitd.http2.events import Event
from ratelimitd.http2.limits import Limits
from ratelimitd.rpc.dispatch import ConnectionCalls
from ratelimitd.rpc.interface import RpcError, TransportError
from ratelimitd.rpc.keepalive import MS_PER_S, Keepalive, Snapshot, Step
from ratelimitd.rpc.routing import peer_of
from ratelimitd.rpc.state import ServerState
from ratelimitd_wire.codes import ErrorCode

WRITE_BUFFER_BYTES: Final = 262_144
"""Unsent octets above which reading from the peer is paused: one slice of answers to batches."""

LINGER_S: Final = 2.0
"""Time for a peer to close after the last octet was handed to the kernel. Closing a socket with unread input resets it,
and the peer loses what it has not read."""

MAX_CLOSE_S: Final = 60.0
"""Longest time from the end of a connection to its close, for a peer that reads the last answers slowly."""

KEEPALIVE_PING: Final = b"keepaliv"


class Registry(Protocol):
    """The part of the server that a connection uses."""

    shared: ServerState

    def joined(self, connection: NativeConnection) -> bool:
        """Register a connection; false if the server has closed and the connection must end."""

    def left(self, connection: NativeConnection) -> None:
        """Remove a closed connection."""

    def jitter(self) -> float:
        """Return a random number from −1 to 1."""


class NativeConnection(asyncio.Protocol):
    """One connection: reads, writes, timeouts and the end."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._shared = registry.shared
        self._loop = asyncio.get_running_loop()
        limits = self._shared.limits
        self._http2 = Connection(Limits(max_streams=limits.max_streams_per_connection))
        self._monotonic_s = self._shared.monotonic_s
        self._left: Iterator[Event] | None = None
        self._came_s = 0.0
        self._backlog = b""
        self._backlog_came_s = 0.0
        self._in_slice = False
        self._writing_paused = False
        self._reading_paused = False
        self._flush_due = False
        self._received = 0
        self._ended_at_s: float | None = None
        self._linger_from_s = 0.0
        self._closing_bytes = 0
        self._busy_s = 0.0
        self._unread_bytes = 0
        self._transport: asyncio.Transport
        self._lifetime: Keepalive
        self.calls: ConnectionCalls

    @property
    def open_streams(self) -> int:
        """Streams whose answer has not ended."""
        return self._http2.open_streams

    # Callbacks of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the connection, unless the server is closing."""
        self._transport = cast("asyncio.Transport", transport)
        self._lifetime = Keepalive(
            self._shared.limits, self._monotonic_s(), self._registry.jitter()
        )
        self.calls = ConnectionCalls(
            self._shared, self._http2, peer_of(self._transport), self._wake
        )
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        if not self._registry.joined(self):
            self._ended_at_s = self._monotonic_s()
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Handle one slice of the input at once, unless earlier input waits."""
        self._received += 1
        if self._ended_at_s is not None:
            return  # the peer may still read the reason; its input no longer matters
        if self._reading_paused:
            self._backlog += data  # read before the pause took effect
            self._backlog_came_s = self._monotonic_s()
        else:
            now_s = self._came_s = self._monotonic_s()
            self._handle_slice(data, now_s)

    def eof_received(self) -> bool:
        """Close: a peer that has closed reads no answers."""
        return False

    def pause_writing(self) -> None:
        """Pause reading and streaming while the peer does not read."""
        self._writing_paused = True
        self.calls.block()
        self._pause_reading()

    def resume_writing(self) -> None:
        """Resume after the peer has read."""
        self._writing_paused = False
        self._count_unread()
        self._wake()  # the last answer may have been written
        self.calls.unblock()
        self._loop.call_soon(self._go_on)

    def connection_lost(self, _error: Exception | None) -> None:
        """Drop all calls of the closed connection."""
        self._ended_at_s = self._ended_at_s or self._monotonic_s()
        self._left, self._backlog = None, b""
        self.calls.lose_all()
        self._shared.unread_bytes -= self._unread_bytes
        self._unread_bytes = 0
        self._registry.left(self)

    # Slices
    def _handle_slice(self, data: bytes, now_s: float) -> None:
        """Handle one slice of the input, then write all answers at once."""
        self._in_slice = True
        try:
            events, self._left = self._left, None
            if events is None:
                events = iter(self._http2.receive(data))
            if not self.calls.handle(events, now_s, self._came_s):
                self._left = events
        except Exception:  # noqa: BLE001 -- a defect of ours that leaves this connection in an unknown state
            self._shared.count(TransportError.UNEXPECTED)
            self._http2.end(ErrorCode.INTERNAL_ERROR, Cause.OWNER, "unexpected error")
        finally:
            self._in_slice = False
        self._write()
        if self._left is not None or self._http2.has_more:
            self._pause_reading()
        if self._reading_paused:
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """Handle the next slice, unless the peer does not read."""
        if self._ended_at_s is not None or self._writing_paused:
            return
        if self._left is not None or self._http2.has_more:
            self._handle_slice(b"", self._monotonic_s())
        elif self._backlog:
            data, self._backlog = self._backlog, b""
            self._came_s = self._backlog_came_s
            self._handle_slice(data, self._monotonic_s())
        elif self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()

    def _pause_reading(self) -> None:
        if not self._reading_paused and not self._transport.is_closing():
            self._reading_paused = True
            self._transport.pause_reading()

    def _wake(self) -> None:
        """Schedule one write for everything that is queued in this iteration."""
        if not self._in_slice and not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        if self._ended_at_s is None:
            self._write()

    def _write(self) -> None:
        http2 = self._http2
        octets = http2.data_to_send()
        if octets:
            self._transport.write(octets)
        self._count_unread()
        if http2.ended is not None:
            self._close(http2.ended.cause)
        elif http2.drained and not http2.open_streams:
            self._close(Cause.OWNER)

    def _count_unread(self) -> None:
        """Count octets that the peer has not taken; over the bound of all connections, end those that hold most."""
        unread_bytes = self._http2.buffered_bytes + self._transport.get_write_buffer_size()
        if unread_bytes == self._unread_bytes:
            return
        shared = self._shared
        shared.unread_bytes += unread_bytes - self._unread_bytes
        self._unread_bytes = unread_bytes
        limit = shared.limits.max_unread_bytes
        if shared.unread_bytes > limit and unread_bytes * shared.connections > limit:
            cause = Cause.UNREAD_ANSWERS
            self._http2.end(ErrorCode.ENHANCE_YOUR_CALM, cause, cause.value)

    # The end

    def _close(self, cause: Cause) -> None:
        """Stop; the peer may still read what was written."""
        if self._ended_at_s is not None:
            return
        self._ended_at_s = self._monotonic_s()
        if cause is not Cause.OWNER:
            self._shared.stats.transport_error(cause)
        self.calls.lose_all()
        if cause is Cause.UNREAD_ANSWERS:
            self._transport.abort()  # unread answers are in front of the reason
            return
        self._linger_from_s = self._ended_at_s
        idle_s = self._ended_at_s - max(self._came_s, self._busy_s)
        is_idle = cause is Cause.OWNER and idle_s > LINGER_S
        if is_idle or not self._transport.can_write_eof():
            # What is buffered is sent first. TLS discards input meanwhile, until the peer's close_notify.
            self._transport.close()
            return
        try:
            self._transport.write_eof()
        except OSError:
            # The peer has reset the connection, which the transport has not reported yet.
            self._transport.abort()
            return
        if self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()

    def look(self, now_s: float) -> None:
        """Apply the timeouts; called about once a second."""
        http2 = self._http2
        if self._ended_at_s is not None:
            self._check_closing(self._ended_at_s, now_s)
            return
        if http2.open_streams or self._unread_bytes:
            self._busy_s = now_s
        http2.tick()
        self.calls.look(now_s)
        snapshot = Snapshot(http2.owes, http2.progress, self._received, self._writing_paused)
        step, cause = self._lifetime.look(snapshot, now_s)
        if step is Step.PING:
            http2.ping(KEEPALIVE_PING)
        elif step is Step.GO_AWAY:
            http2.go_away()
        elif step is Step.END:
            http2.end(ErrorCode.NO_ERROR, cause, cause.value)
        self._flush()

    def _check_closing(self, ended_at_s: float, now_s: float) -> None:
        """Abort once the peer had time to read everything, stopped reading, or reads too slowly."""
        buffered = self._transport.get_write_buffer_size()
        if buffered != self._closing_bytes:
            self._closing_bytes, self._linger_from_s = buffered, now_s
            self._count_unread()
        timeout_s = self._shared.limits.stall_timeout_ms / MS_PER_S if buffered else LINGER_S
        if now_s - self._linger_from_s > timeout_s or now_s - ended_at_s > MAX_CLOSE_S:
            self._transport.abort()

    def go_away(self) -> None:
        """Send GOAWAY; close when the calls in flight have ended."""
        if self._ended_at_s is None:
            self._http2.go_away()
            self._flush()

    def end_calls(self, error: RpcError) -> None:
        """End every call, then the connection."""
        self.calls.end_all(error)
        self._http2.end(ErrorCode.NO_ERROR, Cause.OWNER, error.message)
        self._flush()

    def abort(self) -> None:
        """Close without waiting for the peer."""
        self._transport.abort()
