"""Accepts connections. Each counts from accept, not from the end of its TLS handshake.

asyncio's servers report a connection only after a successful TLS handshake, so silent connections could not be counted.
Handles nothing after the handshake.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, Generic, TypeVar

from ratelimitd.errors import StartupError
from ratelimitd.http2.errors import Cause
from ratelimitd.http2.settings import PREFACE, mistaken_protocol, undecided
from ratelimitd.rpc.interface import TransportError
from ratelimitd.rpc.state import TickGate
from ratelimitd_wire import frames
from ratelimitd_wire.codes import ErrorCode

TLS_RECORD: Final = b"\x16"
"""First octet of TLS: a handshake record."""

_TEXT: Final = b"This port speaks TLS only.\n"
_TO_HTTP1: Final = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_TEXT), _TEXT)
)
_TO_HTTP2: Final = frames.go_away(0, ErrorCode.INADEQUATE_SECURITY, b"this port speaks TLS")
"""Omits the SETTINGS that should come first: with them, grpc's core counts as connected and retries at once, 400 times
a second; without them it backs off."""


def answer_to(octets: bytes) -> bytes | None:
    """Return an answer in the peer's protocol, empty if it is unknown; ``None`` while more octets are needed."""
    if octets.startswith(PREFACE):
        return _TO_HTTP2
    if undecided(octets):
        return None
    return _TO_HTTP1 if mistaken_protocol(octets)[0] is Cause.HTTP1 else b""


BACKLOG: Final = 1_024

ACCEPTS_PER_ITERATION: Final = 32
"""Connections accepted per iteration and socket, 50 µs each: 2 ms."""

RETRY_S: Final = 1.0
"""Pause of accepting after the system ran out of descriptors or memory."""

NO_ROOM: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors of exhausted descriptors or memory. Any other error of accept(2) concerns one connection."""

HANDSHAKE_TIMEOUT_S: Final = 10.0
"""From accept to the end of the TLS handshake. Honest ones take some round trips."""

_LONGER_THAN_OURS_S: Final = 2 * HANDSHAKE_TIMEOUT_S
"""Timeout for asyncio's own handshake timer, which uses another clock."""

_PLAINTEXT_READS: Final = 16
_PLAINTEXT_BYTES: Final = 4_096
"""Octets read from a peer that does not speak TLS, so that it can read the answer before a reset."""

Connection = TypeVar("Connection", bound=asyncio.BaseProtocol)


class Acceptor(Generic[Connection]):
    """Accepts connections, at most ``max_connections`` at a time.

    ``make`` makes the protocol of a connection; ``count`` counts failures. ``tls`` is None for plaintext. With
    ``ends_handshakes`` a connection above the maximum ends the oldest handshake instead of being refused. Call
    :meth:`leave` when a connection is lost.

    Attributes:
        places: connections, including those in their handshake.
    """

    def __init__(
        self,
        make: Callable[[], Connection],
        count: Callable[[TransportError], None],
        monotonic_s: Callable[[], float],
        *,
        max_connections: int,
        tls: ssl.SSLContext | None = None,
        ends_handshakes: bool = False,
    ) -> None:
        self._ends_handshakes = ends_handshakes and tls is not None
        self.places: set[Connection] = set()
        self._make = make
        self._count = count
        self._monotonic_s = monotonic_s
        self._max_connections = max_connections
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._listening: list[socket.socket] = []
        self._coming: dict[asyncio.Task[bool], float] = {}
        self._handshake_gate = TickGate(monotonic_s)

    def listen(self, sock: socket.socket) -> None:
        """Accept from a bound socket, and own it."""
        sock.settimeout(0)
        sock.listen(BACKLOG)
        self._listening.append(sock)
        self._loop.add_reader(sock, self._accept, sock)

    def leave(self, connection: Connection) -> None:
        """Remove a closed connection."""
        self.places.discard(connection)

    def expire(self, now_s: float) -> None:
        """End overdue handshakes; called about once a second."""
        for task, since_s in list(self._coming.items()):
            if now_s - since_s >= HANDSHAKE_TIMEOUT_S:
                self._end(task)

    async def close(self) -> None:
        """Stop accepting, and end handshakes in progress."""
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
        for _ in range(ACCEPTS_PER_ITERATION):
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
        if len(self.places) >= self._max_connections and not self._make_room():
            self._count(TransportError.TOO_MANY_CONNECTIONS)
            sock.close()
            return
        sock.settimeout(0)
        connection = self._make()
        self.places.add(connection)
        task = self._loop.create_task(self._bring_up(sock, connection))
        self._coming[task] = self._monotonic_s()
        task.add_done_callback(partial(self._came, sock, connection))

    def _make_room(self) -> bool:
        """End the oldest handshake; false if there is none to end."""
        return self._ends_handshakes and any(self._end(task) for task in list(self._coming))

    def _end(self, task: asyncio.Task[bool]) -> bool:
        """End a handshake, unless it has just ended."""
        if not task.cancel():
            return False
        self._count(TransportError.SLOW_HANDSHAKE)
        del self._coming[task]
        return True

    def _came(self, sock: socket.socket, connection: Connection, task: asyncio.Task[bool]) -> None:
        """Clean up after a handshake. A callback, since a task may be cancelled before its first step."""
        self._coming.pop(task, None)
        failed = not task.cancelled() and task.exception() is not None
        if failed:
            self._count(TransportError.UNEXPECTED)
        if failed or task.cancelled() or not task.result():
            self.places.discard(connection)
            sock.close()

    async def _bring_up(self, sock: socket.socket, connection: Connection) -> bool:
        """Create a connection from an accepted socket; return whether that succeeded."""
        try:
            if self._tls is None or await self._begins_with_tls(sock):
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

    async def _begins_with_tls(self, sock: socket.socket) -> bool:
        """Return whether a peer begins with TLS; others are answered in plaintext."""
        first = await self._first_octet(sock)
        if first == TLS_RECORD:
            # A handshake takes 1 ms of CPU or more.
            await self._handshake_gate.passed()
            return True
        if first:
            self._count(TransportError.PLAINTEXT)
            await self._answer_plaintext(sock)
        return False

    async def _first_octet(self, sock: socket.socket) -> bytes:
        """Peek at the first octets, which the handshake reads again; empty if the peer closes."""
        while True:
            readable = self._loop.create_future()
            self._loop.add_reader(sock, _set, readable)
            try:
                await readable
            finally:
                self._loop.remove_reader(sock)
            # A spurious wake-up, see select(2): there is nothing to read yet.
            with contextlib.suppress(BlockingIOError):
                return sock.recv(1, socket.MSG_PEEK)

    async def _answer_plaintext(self, sock: socket.socket) -> None:
        octets = b""
        while (answer := answer_to(octets)) is None:
            more = await self._loop.sock_recv(sock, _PLAINTEXT_BYTES)
            if not more:
                return
            octets += more
        await self._loop.sock_sendall(sock, answer)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        for _ in range(_PLAINTEXT_READS):
            if not await self._loop.sock_recv(sock, _PLAINTEXT_BYTES):
                return


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


RESERVED: Final = 256
"""Descriptors kept for files, the database and the HTTP port."""

_log = logging.getLogger(__name__)


def room_for(connections: int) -> int:
    """Return how many of the wanted connections to admit: at least one.

    Raises the process's soft limit of open files as far as needed and allowed by the hard limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + RESERVED
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    allowed = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == wanted:
        return connections
    room = max(1, allowed - RESERVED)
    _log.warning("room for %d connections only: the limit of open files is %d", room, allowed)
    return room


UNIX_PREFIX: Final = "unix:"


async def demand_free(listen: str, *, setting: str = "LISTEN") -> None:
    """Raise if the address is in use, so that a taken port is reported in one clear line.

    Raises:
        StartupError: the address is taken, not local, or does not resolve; the message names ``setting``.
    """
    if listen.startswith(UNIX_PREFIX):
        # A file that does not answer is left over from a killed node, and may be replaced.
        if await answers(listen.removeprefix(UNIX_PREFIX)):
            message = f"LISTEN: cannot listen on {listen}: another process does"
            raise StartupError(message)
        return
    host, port = split(listen)
    if port == 0:
        return
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as probe:
                # As servers do: connections in TIME_WAIT do not keep a port taken.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
                probe.listen(1)
    except OSError as error:
        raise _cannot(listen, error, setting) from None


async def listening_sockets(
    listen: str, *, setting: str = "LISTEN", reuse_port: bool = False
) -> list[socket.socket]:
    """Return sockets bound to all addresses of ``listen``; with port 0, all to one free port.

    ``[::]`` includes IPv4, as with grpcio. A left-over socket file is replaced. ``reuse_port`` shares the port with
    other processes of the same user that set it, too.

    Raises:
        StartupError: an address cannot be bound; the message names ``setting``.
    """
    if listen.startswith(UNIX_PREFIX):
        return [_bound_unix(listen)]
    host, port = split(listen)
    loop = asyncio.get_running_loop()
    sockets: list[socket.socket] = []
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            sock = socket.socket(family, kind, protocol)
            sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if reuse_port:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                both = address[0] == "::"
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not both)
            sock.bind((address[0], port, *address[2:]))
            port = sock.getsockname()[1]
    except OSError as error:
        for sock in sockets:
            sock.close()
        raise _cannot(listen, error, setting) from None
    return sockets


def bound_address(listen: str, port: int) -> str:
    """Return the address of a server that listens on ``listen`` with the assigned ``port``."""
    if listen.startswith(UNIX_PREFIX):
        return listen
    return f"{listen.rpartition(':')[0]}:{port}"


def split(listen: str) -> tuple[str, int]:
    """Return host, without brackets, and port of ``host:port``.

    Raises:
        StartupError: ``listen`` has another form.
    """
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal():
        message = f"LISTEN: {listen} is not HOST:PORT"
        raise StartupError(message)
    return host.removeprefix("[").removesuffix("]"), int(port)


async def answers(path: str | Path) -> bool:
    """Return whether a process listens on a Unix socket."""
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return False
    writer.close()
    return True


def _bound_unix(listen: str) -> socket.socket:
    path = Path(listen.removeprefix(UNIX_PREFIX))
    if path.is_socket():
        path.unlink()
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(str(path))
    except OSError as error:
        sock.close()
        raise _cannot(listen, error) from None
    return sock


def _cannot(listen: str, error: OSError, setting: str = "LISTEN") -> StartupError:
    return StartupError(f"{setting}: cannot listen on {listen}: {error.strerror}")
