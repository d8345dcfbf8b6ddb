"""The native transport: a gRPC server on asyncio alone. See ADR 0016.

Listens, keeps the table of connections, and runs their one common timer. Handles no frames and no calls.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from functools import partial
from typing import Final

from ratelimitd.counters import CheckStats
from ratelimitd.fair_queue import FairQueue
from ratelimitd.rpc.acceptor import (
    Acceptor,
    bound_address,
    demand_free,
    listening_sockets,
    room_for,
)
from ratelimitd.rpc.connection import NativeConnection
from ratelimitd.rpc.interface import (
    InProgress,
    Methods,
    RpcError,
    StatusCode,
    TransportError,
    TransportLimits,
)
from ratelimitd.rpc.state import ServerState
from ratelimitd.rpc.tls import CertificateSource, TlsContexts, TlsFiles

TICK_S: Final = 0.1
"""Longest delay in noticing a deadline; the caller has its own timer."""

TICKS_PER_LOOK: Final = 10
"""Connections are checked once a second, a tenth of them at a time: all 10,000 take 30 ms."""

CLOSE_S: Final = 0.5
"""Time for connections to read the cause of their end."""

_STOPPING: Final = RpcError(StatusCode.UNAVAILABLE, "the node is stopping")

_log = logging.getLogger(__name__)


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
        tls: TlsFiles | None = None,
        limits: TransportLimits | None = None,
        reuse_port: bool = False,
        monotonic_s: Callable[[], float] | None = None,
        queue: FairQueue | None = None,
    ) -> None:
        self._listen = listen
        self._tls = tls
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
        context = None if self._tls is None else self._contexts(self._tls).listening
        if not self._reuse_port:
            await demand_free(self._listen)
        loop = asyncio.get_running_loop()
        sockets = await listening_sockets(self._listen, reuse_port=self._reuse_port)
        self._acceptor = Acceptor(
            partial(NativeConnection, self),
            self.shared.count,
            self.shared.monotonic_s,
            max_connections=room_for(self.shared.limits.max_connections),
            tls=context,
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

    # What connections need; see ratelimitd.rpc.connection.Registry

    def joined(self, connection: NativeConnection) -> bool:
        """Register a connection; false if the server has closed."""
        self._connections[connection] = self._joined_total % TICKS_PER_LOOK
        self._joined_total += 1
        self.shared.connections = len(self._connections)
        self._none_left.clear()
        return not self._closed

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

    def _contexts(self, files: TlsFiles) -> TlsContexts:
        def report(line: str) -> None:
            _log.error("%s", line)
            self.shared.count(TransportError.TLS_FILES)

        return TlsContexts(files, CertificateSource(files, report))
