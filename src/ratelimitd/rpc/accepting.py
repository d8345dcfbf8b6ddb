"""Accepting connections: each has a place from the moment the kernel hands it over, not only once TLS has greeted it.

asyncio's own servers tell nobody of a connection before its TLS handshake has ended, nor of one whose handshake fails;
so whoever opens connections and says nothing could not be counted. Never sees what comes after the handshake.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Final, Generic, TypeVar

from ratelimitd.rpc.interface import TransportError
from ratelimitd.rpc.strangers import TLS_RECORD, answer_to
from ratelimitd.rpc.turnstile import Turnstile

BACKLOG: Final = 1_024

ACCEPTS_PER_TURN: Final = 32
"""Of one listening socket; each costs about 50 µs until it is a connection: a slice of 2 ms."""

RETRY_S: Final = 1.0
"""How long nothing is accepted after the system had no room for a connection."""

NO_ROOM: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""No descriptor or no memory is left. Any other error of accept(2) is that of one connection, which is lost."""

HANDSHAKE_TIMEOUT_S: Final = 10.0
"""From the connection to the end of its TLS handshake. Honest ones take some round trips."""

_LONGER_THAN_OURS_S: Final = 2 * HANDSHAKE_TIMEOUT_S
"""asyncio has a timer of its own for handshakes, by another clock."""

_STRANGER_READS: Final = 16
_STRANGER_BYTES: Final = 4_096
"""What is read of a peer that does not speak TLS, so that it can read why before the kernel resets it."""

Connection = TypeVar("Connection", bound=asyncio.BaseProtocol)


class Acceptor(Generic[Connection]):
    """Accepts connections, at most ``max_connections`` at a time.

    ``make`` makes the protocol of one; ``count`` counts what goes wrong. ``tls`` is None for plaintext. Whoever hears
    that a connection is lost calls :meth:`leave`.

    Attributes:
        places: connections that there are, those still in their handshake among them.
    """

    def __init__(
        self,
        make: Callable[[], Connection],
        count: Callable[[TransportError], None],
        monotonic_s: Callable[[], float],
        *,
        max_connections: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.places: set[Connection] = set()
        self._make = make
        self._count = count
        self._monotonic_s = monotonic_s
        self._max_connections = max_connections
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._listening: list[socket.socket] = []
        self._coming: dict[asyncio.Task[bool], float] = {}
        self._turnstile = Turnstile(monotonic_s)

    def listen(self, sock: socket.socket) -> None:
        """Accept from a socket that is bound; it is this object's from now on."""
        sock.settimeout(0)
        sock.listen(BACKLOG)
        self._listening.append(sock)
        self._loop.add_reader(sock, self._accept, sock)

    def leave(self, connection: Connection) -> None:
        """A connection is gone."""
        self.places.discard(connection)

    def expire(self, now_s: float) -> None:
        """Give up on handshakes that take too long; to be called about once a second."""
        for task, since_s in list(self._coming.items()):
            if now_s - since_s >= HANDSHAKE_TIMEOUT_S and task.cancel():
                self._count(TransportError.SLOW_HANDSHAKE)
                del self._coming[task]

    async def close(self) -> None:
        """Accept no more, and give up what is not made yet."""
        for sock in self._listening:
            self._loop.remove_reader(sock)
            sock.close()
        self._listening.clear()
        coming = list(self._coming)
        for task in coming:
            task.cancel()
        if coming:
            await asyncio.wait(coming)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, _ = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in NO_ROOM:
                    continue
                self._count(TransportError.TOO_MANY_CONNECTIONS)
                self._loop.remove_reader(listening)
                self._loop.call_later(RETRY_S, self._accept_again, listening)
                return
            self._admit(sock)

    def _accept_again(self, listening: socket.socket) -> None:
        if listening in self._listening:
            self._loop.add_reader(listening, self._accept, listening)

    def _admit(self, sock: socket.socket) -> None:
        if len(self.places) >= self._max_connections:
            self._count(TransportError.TOO_MANY_CONNECTIONS)
            sock.close()
            return
        sock.settimeout(0)
        connection = self._make()
        self.places.add(connection)
        task = self._loop.create_task(self._bring_up(sock, connection))
        self._coming[task] = self._monotonic_s()
        task.add_done_callback(partial(self._came, sock, connection))

    def _came(self, sock: socket.socket, connection: Connection, task: asyncio.Task[bool]) -> None:
        """A connection is made, or never will be. Not in the task: one may be cancelled before its first step."""
        self._coming.pop(task, None)
        failed = not task.cancelled() and task.exception() is not None
        if failed:
            self._count(TransportError.UNEXPECTED)
        if failed or task.cancelled() or not task.result():
            self.places.discard(connection)
            sock.close()

    async def _bring_up(self, sock: socket.socket, connection: Connection) -> bool:
        """Make a connection of an accepted socket; return whether it was."""
        try:
            if self._tls is None or await self._greet(sock):
                await self._connect(sock, connection)
                return True
        except ssl.SSLError:
            self._count(TransportError.TLS_HANDSHAKE)
        except OSError:  # the peer is gone
            pass
        return False

    async def _connect(self, sock: socket.socket, connection: Connection) -> None:
        timeout_s = None if self._tls is None else _LONGER_THAN_OURS_S
        await self._loop.connect_accepted_socket(
            lambda: connection, sock, ssl=self._tls, ssl_handshake_timeout=timeout_s
        )

    async def _greet(self, sock: socket.socket) -> bool:
        """Whether a peer begins with TLS; one that does not is told so."""
        first = await self._first_octet(sock)
        if first == TLS_RECORD:
            # A handshake is 1 ms of arithmetic and more.
            await self._turnstile.passed()
            return True
        if first:
            self._count(TransportError.PLAINTEXT)
            await self._turn_away(sock)
        return False

    async def _first_octet(self, sock: socket.socket) -> bytes:
        """What comes first, which is left for the handshake to read; empty when the peer closes before it."""
        while True:
            readable = self._loop.create_future()
            self._loop.add_reader(sock, _set, readable)
            try:
                await readable
            finally:
                self._loop.remove_reader(sock)
            # Woken for nothing, as select(2) says may happen: there is nothing to read yet.
            with contextlib.suppress(BlockingIOError):
                return sock.recv(1, socket.MSG_PEEK)

    async def _turn_away(self, sock: socket.socket) -> None:
        octets = b""
        while (answer := answer_to(octets)) is None:
            more = await self._loop.sock_recv(sock, _STRANGER_BYTES)
            if not more:
                return
            octets += more
        await self._loop.sock_sendall(sock, answer)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        for _ in range(_STRANGER_READS):
            if not await self._loop.sock_recv(sock, _STRANGER_BYTES):
                return


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
