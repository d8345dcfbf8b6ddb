"""The native transport: a gRPC server on asyncio alone. See ADR 0016.

The server listens, keeps the table of connections, and runs their one common timer. A connection moves octets between
its socket and the HTTP/2 core: each read is handled in slices, the events of one slice, then one write. The rest waits
for the next event-loop iteration, so that a peer that sends without pause takes no more than its share.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, cast

from ratelimitd.counters import CheckStats
from ratelimitd.fair_queue import FairQueue
from ratelimitd.http2.connection import Connection
from ratelimitd.http2.errors import Cause
from ratelimitd.http2.events import Event
from ratelimitd.http2.limits import Limits
from ratelimitd.rpc.acceptor import (
    Acceptor,
    bound_address,
    demand_free,
    listening_sockets,
    room_for,
)
from ratelimitd.rpc.dispatch import ConnectionCalls
from ratelimitd.rpc.interface import (
    InProgress,
    Methods,
    RpcError,
    StatusCode,
    TransportError,
    TransportLimits,
)
from ratelimitd.rpc.keepalive import MS_PER_S, Keepalive, Snapshot, Step
from ratelimitd.rpc.routing import peer_of
from ratelimitd.rpc.state import ServerState
from ratelimitd.rpc.tls import CertificateSource, TlsContexts
from ratelimitd_wire.codes import ErrorCode

TICK_S: Final = 0.1
"""Longest delay in noticing a deadline; the caller has its own timer."""

TICKS_PER_LOOK: Final = 10
"""Connections are checked once a second, a tenth of them at a time: all 10,000 take 30 ms."""

CLOSE_S: Final = 0.5
"""Time for connections to read the cause of their end."""

WRITE_BUFFER_BYTES: Final = 262_144
"""Unsent octets above which reading from the peer is paused: one slice of answers to batches."""

LINGER_S: Final = 2.0
"""Time for a peer to close after the last octet was handed to the kernel. Closing a socket with unread input resets it,
and the peer loses what it has not read."""

MAX_CLOSE_S: Final = 60.0
"""Longest time from the end of a connection to its close, for a peer that reads the last answers slowly."""

KEEPALIVE_PING: Final = b"keepaliv"

_STOPPING: Final = RpcError(StatusCode.UNAVAILABLE, "the node is stopping")


class NativeConnection(asyncio.Protocol):
    """One connection: reads, writes, timeouts and the end."""

    def __init__(self, server: NativeServer) -> None:
        self._server = server
        self._shared = server.shared
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
        self._lifetime = Keepalive(self._shared.limits, self._monotonic_s(), self._server.jitter())
        self.calls = ConnectionCalls(
            self._shared, self._http2, peer_of(self._transport), self._wake
        )
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        if not self._server.joined(self):
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
        self.calls.answers.blocked = True
        self._pause_reading()

    def resume_writing(self) -> None:
        """Resume after the peer has read."""
        self._writing_paused = False
        self._count_unread()
        self._wake()  # the last answer may have been written
        self.calls.answers.unblock()
        self._loop.call_soon(self._go_on)

    def connection_lost(self, _error: Exception | None) -> None:
        """Drop all calls of the closed connection."""
        self._ended_at_s = self._ended_at_s or self._monotonic_s()
        self._left, self._backlog = None, b""
        self.calls.lose_all()
        self._shared.unread_bytes -= self._unread_bytes
        self._unread_bytes = 0
        self._server.left(self)

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


class NativeServer:
    """A :class:`ratelimitd.rpc.interface.Server` on ``listen``: ``host:port``, ``[ipv6]:port`` or ``unix:path``.

    ``tls`` turns TLS on, and its client CA mTLS. Causes of broken calls and connections are counted in ``stats``.
    ``reuse_port`` shares the port with other processes; its owner has checked that it is free.
    """

    def __init__(
        self,
        methods: Methods,
        *,
        listen: str,
        stats: CheckStats,
        tls: CertificateSource | None = None,
        limits: TransportLimits | None = None,
        reuse_port: bool = False,
        monotonic_s: Callable[[], float] | None = None,
        queue: FairQueue | None = None,
    ) -> None:
        self._listen = listen
        self._tls = None if tls is None else TlsContexts(tls).listening
        self._reuse_port = reuse_port
        loop = asyncio.get_running_loop()
        self.shared = ServerState(
            methods, limits or TransportLimits(), stats, monotonic_s or loop.time, queue=queue
        )
        self._acceptor: Acceptor[NativeConnection] | None = None
        self._connections: dict[NativeConnection, int] = {}
        """Connections, each with the tick of ten at which it is checked."""
        self._joined_total = 0
        self._none_left = asyncio.Event()
        self._none_left.set()
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._ticks = 0

    async def start(self) -> str:
        """Bind and listen; returns the bound address. See :class:`ratelimitd.rpc.interface.Server`."""
        if not self._reuse_port:
            await demand_free(self._listen)
        loop = asyncio.get_running_loop()
        sockets = await listening_sockets(self._listen, reuse_port=self._reuse_port)
        self._acceptor = Acceptor(
            partial(NativeConnection, self),
            self.shared.count,
            self.shared.monotonic_s,
            max_connections=room_for(self.shared.limits.max_connections),
            tls=self._tls,
        )
        for sock in sockets:
            self._acceptor.listen(sock)
        name = sockets[0].getsockname()
        port = name[1] if isinstance(name, tuple) else 0
        self._timer = loop.call_later(TICK_S, self._tick)
        return bound_address(self._listen, port)

    @property
    def in_progress(self) -> InProgress:
        """Calls and connections in progress."""
        return InProgress(
            self.shared.unary_in_progress,
            self.shared.streams_in_progress,
            0 if self._acceptor is None else len(self._acceptor.places),
            sum(connection.open_streams for connection in self._connections),
        )

    async def stop_accepting(self) -> None:
        """Refuse new connections and new calls; calls in flight go on."""
        self._closed = True
        if self._acceptor is not None:
            await self._acceptor.close()
            for connection in self._connections.keys() - self._acceptor.places:
                # It was closed with its handshake, which uvloop does not tell it.
                connection.connection_lost(None)
        for connection in list(self._connections):
            connection.go_away()

    async def stop(self, grace_s: float) -> None:
        """End streams at once, wait at most ``grace_s`` seconds for other calls in flight, then close everything."""
        if not self._closed:
            await self.stop_accepting()
        # Handlers that have been woken answer first: a health watch reports that the node stops.
        await asyncio.sleep(0)
        for connection in list(self._connections):
            connection.calls.end_streams(_STOPPING)
            connection.go_away()  # the final GOAWAY, without waiting for the first to be read
        await self._connections_gone(grace_s)
        for connection in list(self._connections):
            connection.end_calls(_STOPPING)
        await self._connections_gone(CLOSE_S)
        for connection in list(self._connections):
            connection.abort()
        await self.shared.all_ended()
        await self._none_left.wait()
        if self._timer is not None:
            self._timer.cancel()

    # What connections need

    def joined(self, connection: NativeConnection) -> bool:
        """Register a connection, unless the server has closed; return whether it is registered."""
        if self._closed:
            return False
        self._connections[connection] = self._joined_total % TICKS_PER_LOOK
        self._joined_total += 1
        self.shared.connections = len(self._connections)
        self._none_left.clear()
        return True

    def left(self, connection: NativeConnection) -> None:
        """Remove a closed connection."""
        self._connections.pop(connection, None)
        self.shared.connections = len(self._connections)
        if self._acceptor is not None:
            self._acceptor.leave(connection)
        if not self._connections:
            self._none_left.set()

    def jitter(self) -> float:
        """Return a random number from −1 to 1."""
        return random.uniform(-1, 1)  # noqa: S311 -- spreads the load, keeps no secret

    async def _connections_gone(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._none_left.wait()
        except TimeoutError:
            return

    def _tick(self) -> None:
        """Check deadlines ten times a second, and each connection once."""
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        self._ticks += 1
        now_s = self.shared.monotonic_s()
        tick = self._ticks % TICKS_PER_LOOK
        for connection, check_tick in list(self._connections.items()):
            if connection.calls.open:
                connection.calls.expire(now_s)
            if check_tick == tick:
                connection.look(now_s)
        if tick == 0 and self._acceptor is not None:
            self._acceptor.expire(now_s)
