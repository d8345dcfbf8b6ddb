"""The HTTP server: uvicorn inside the node's own event loop, with a bound on everything a peer can hold.

Takes no signals and logs no requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Self, cast

import h11
import uvicorn
from h11._receivebuffer import ReceiveBuffer, blank_line_regex
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import CLOSE_HEADER, FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from ratelimitd.errors import StartupError
from ratelimitd.fair_queue import FairQueue
from ratelimitd.rpc.acceptor import Acceptor
from ratelimitd.settings.parsing import Address


@contextlib.contextmanager
def short_name(path: Path) -> Iterator[str]:
    """Return a short name of ``path`` that is valid within the context.

    Raises:
        OSError: its directory cannot be opened.
    """
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def listening_at(path: Path) -> socket.socket:
    """Return a socket that listens at ``path``, for this user only; a leftover socket is replaced.

    Raises:
        StartupError: it cannot be made there; the message says why.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        with short_name(path) as name:
            sock.bind(name)
        path.chmod(0o600)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        message = f"cannot listen at {path}: {error.strerror or error}"
        raise StartupError(message) from error
    return sock


MAX_STREAMS: Final = 20
"""Event streams at a time: pages that show live numbers. Further ones are answered 503."""

EVENT_STREAM: Final = "text/event-stream"

LASTING: Final = "ratelimitd.lasting"
"""Key in the scope of a request that is answered with an event stream."""


class _TooManyError(Exception):
    """Ends an answer before it begins."""


class EventStreams:
    """Bounds the event streams of an application, which may outlive CONNECTION_LIFE_S.

    Counted when an answer begins, so that requests at once do not pass the bound together.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start" and _is_stream(message):
                if self._open >= MAX_STREAMS:
                    raise _TooManyError
                self._open += 1
                scope[LASTING] = True
            await send(message)

        try:
            await self._app(scope, receive, send_counted)
        except _TooManyError:
            refusal = PlainTextResponse(
                "too many live views are open\n", 503, headers={"Retry-After": "30"}
            )
            await refusal(scope, receive, send)
        finally:
            if LASTING in scope:
                self._open -= 1


def _is_stream(message: Message) -> bool:
    content_type = Headers(raw=message.get("headers", [])).get("content-type", "")
    return content_type.partition(";")[0].strip().lower() == EVENT_STREAM


MAX_CONNECTIONS: Final = 500
"""Limit of connections; one more closes one that waits for its peer. Probes, scrapers and a browser need few, proxies
that ask for each of their requests more."""

MAX_PLACES: Final = 2 * MAX_CONNECTIONS
"""Limit of connections over TLS with those in their handshake; one more ends the oldest handshake."""

CONNECTION_LIFE_S: Final = 30.0
"""Longest life of a connection, ended between two requests if possible; bounds slow senders."""

STREAM_LIFE_S: Final = 3_600.0
"""A connection that streams events may live that long; the browser then reconnects."""

CLOSING_GRACE_S: Final = 10.0
"""Extra life of a connection to finish its answer."""

KEEP_ALIVE_S: Final = 5
"""How long a connection may idle between two requests."""

STOP_GRACE_S: Final = 1.0
"""Longest wait of a stopping server for answers in progress."""

IDLE_GRACE_S: Final = 0.5
"""Its wait for the last request of an idle connection, which may be on its way; delays the stop by as much."""

STOP_POLL_S: Final = 0.01
"""Interval of its checks."""

DATE_S: Final = 1.0
"""Interval at which the header ``Date`` is renewed."""

MAX_HEADER_BYTES: Final = 65_536
"""Limit of request line and headers together: above what nginx (32 KiB) and HAProxy (16 KiB) take of a client, so that
no client of theirs can make the request for its check fail."""

MAX_HEADER_LINES: Final = 128
"""Limit of lines before the body, and of lines behind a chunked one: h11 takes 2 µs for each, however short."""

EVENTS_PER_STEP: Final = 32
"""Events of one connection that are handled in a row, in about 0.3 ms, as long as a request takes. Each chunk of a body
is one. Small chunks are not refused: clients that encode JSON piece by piece send them."""

BACKLOG: Final = 1_024


class _ServerState(ServerState):
    """What the connections share, with their turns at received events."""

    is_over = False
    """The server's time is over: an answer that has not begun says that it is the last of its connection."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue(time.monotonic)


class HttpServer(uvicorn.Server):
    """One listening HTTP address; ``tls`` is ``None`` for plaintext.

    uvicorn without signal handlers. Over TLS the node's own acceptor bounds handshakes.
    """

    def __init__(
        self, app: ASGIApp, host: str, port: int, *, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(
            uvicorn.Config(
                self._until_stopped(EventStreams(app)),
                http=BoundedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )
        self.server_state: _ServerState = _ServerState()
        self._address = host, port
        self._path: Path | None = None
        self._socket: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        self._tls = tls
        self._acceptor: Acceptor[BoundedProtocol] | None = None

    @classmethod
    def at(cls, app: ASGIApp, path: Path) -> Self:
        """Return a server at a Unix socket, for the parent process."""
        server = cls(app, "", 0)
        server._path = path
        return server

    async def start(self) -> str:
        """Bind and listen; returns the bound address as ``host:port``, or the path of the socket.

        Raises:
            StartupError: the address cannot be bound; the message says why.
        """
        # uvicorn would end the process if it bound the address itself and failed.
        self._socket = listening_at(self._path) if self._path else await bind(*self._address)
        self._serving = asyncio.create_task(self.serve([self._socket]), name="http")
        while not self.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(0)
        return str(self._path or address_of(self._socket))

    async def stop(self) -> None:
        """Close the address and every connection. Safe to call at any time, also more than once."""
        if self._serving is not None:
            self.should_exit = True
            self._stopped.set()
            await self._serving
            self._serving = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            if self._path is not None:
                self._path.unlink(missing_ok=True)

    def _until_stopped(self, app: ASGIApp) -> ASGIApp:
        """Run the application; answers that the end of the server cuts off are not logged."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await app(scope, receive, send)
            except asyncio.CancelledError:
                if not self.should_exit:
                    raise

        return answer

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the node."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections."""
        if self._tls is None or sockets is None:
            await super().startup(sockets)
            return
        loop = asyncio.get_running_loop()
        self.servers = []
        self._acceptor = Acceptor(
            self._connection,
            lambda _cause: None,
            loop.time,
            max_connections=MAX_PLACES,
            tls=self._tls,
            ends_handshakes=True,
        )
        for sock in sockets:
            self._acceptor.listen(sock)
        self.started = True

    def _connection(self) -> BoundedProtocol:
        assert self._acceptor is not None  # noqa: S101 -- it asks for it
        connection = BoundedProtocol(self.config, self.server_state, self.lifespan.state)
        connection.leave = self._acceptor.leave
        return connection

    async def main_loop(self) -> None:
        """Renew the headers of all answers, and end slow handshakes, until the server is stopped."""
        while not await self.on_tick(0):
            if self._acceptor is not None:
                self._acceptor.expire(asyncio.get_running_loop().time())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATE_S):
                    await self._stopped.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002
        """Let short answers end and idle connections send a last request, and cut off others.

        uvicorn's own closes idle connections at once, and so loses requests that are on their way. It logs a traceback
        of each answer that it cuts off, and its caller closes the sockets.
        """
        state = self.server_state
        for server in self.servers:
            server.close()
        if self._acceptor is not None:
            await self._acceptor.close()
        state.is_over = True
        # In its next iteration uvloop reports the connections that it has accepted in this one.
        await asyncio.sleep(0)
        for connection in self._connections:
            connection.announce_end()
        closing_idle = asyncio.get_running_loop().call_later(IDLE_GRACE_S, self._close_idle)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE_S):
                while state.connections or state.tasks:  # noqa: ASYNC110 -- uvicorn keeps two sets
                    await asyncio.sleep(STOP_POLL_S)
        closing_idle.cancel()
        for connection in self._connections:
            connection.transport.abort()
        await asyncio.sleep(0)  # now they know that they are gone
        if left := [*state.tasks]:
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=STOP_GRACE_S)

    @property
    def _connections(self) -> list[BoundedProtocol]:
        return cast("list[BoundedProtocol]", [*self.server_state.connections])

    def _close_idle(self) -> None:
        for connection in self._connections:
            if not connection.transport.is_closing():
                connection.shutdown()


async def bind(
    host: str, port: int, *, setting: str = "HTTP_LISTEN", reuse_port: bool = False
) -> socket.socket:
    """Return a socket that is bound to the first address of ``host``; ``setting`` is named by an error.

    Raises:
        StartupError: the name is unknown or the address cannot be had.
    """
    loop = asyncio.get_running_loop()
    sock = None
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
        # Bound is not taken: another process may have bound it too, and listened first.
        sock.listen(BACKLOG)
    except OSError as error:
        if sock is not None:
            sock.close()
        message = f"cannot listen on {host}:{port} ({setting}): {error.strerror or error}"
        raise StartupError(message) from error
    return sock


def address_of(sock: socket.socket) -> str:
    """Return the bound address as ``host:port``, an IPv6 host in brackets."""
    return str(Address(*sock.getsockname()[:2]))


class _BoundedBuffer(ReceiveBuffer):
    """h11's buffer of received bytes, with a bound on the lines of a head or a trailer."""

    has_too_many_lines = False

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Extract all lines before the first empty one.

        Raises:
            h11.LocalProtocolError: there are too many.
        """
        if self._data.startswith((b"\r\n", b"\n")):  # an empty trailer; the next head may follow
            return super().maybe_extract_lines()
        end = blank_line_regex.search(self._data, self._multiple_lines_search)
        if end is not None and self._data.count(b"\n", 0, end.start()) > MAX_HEADER_LINES:
            self.has_too_many_lines = True
            message = "too many header lines"
            raise h11.LocalProtocolError(message)
        return super().maybe_extract_lines()


class _BoundedConnection(h11.Connection):
    """h11's connection, with a bound on the events that it returns until ``events_left`` is set again."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEADER_BYTES)
        self.received = self._receive_buffer = _BoundedBuffer()
        self.events_left = EVENTS_PER_STEP

    def next_event(self) -> h11.Event | type[h11.NEED_DATA | h11.PAUSED]:
        """Return the next event, or ``NEED_DATA`` if it has to wait."""
        if not self.events_left:
            return h11.NEED_DATA
        self.events_left -= 1
        return super().next_event()


class _BoundedFlow(FlowControl):
    """uvicorn's flow control. While received events wait, nothing more is read, whatever uvicorn asks for."""

    events_wait = False

    def resume_reading(self) -> None:
        """Read on, now or when no event waits."""
        if self.events_wait:
            self.read_paused = False
        else:
            super().resume_reading()


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 connection with bounds on number, lifetime and work per event-loop iteration."""

    conn: _BoundedConnection
    flow: _BoundedFlow
    server_state: _ServerState
    _expiry: asyncio.TimerHandle | None = None
    _is_over = False
    """Its time is over: an answer that has not begun says that it is the last."""
    opened_s = 0.0
    leave: Callable[[BoundedProtocol], None] | None = None
    """Called when the connection is lost."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection and start its lifetime, unless too many are waiting for answers."""
        super().connection_made(transport)
        self.conn = _BoundedConnection()
        self.flow = _BoundedFlow(transport)
        self.opened_s = self.loop.time()
        if len(self.connections) > MAX_CONNECTIONS and not self._make_room():
            transport.abort()
            return
        self._expiry = self.loop.call_later(CONNECTION_LIFE_S, self._expire)

    def handle_events(self) -> None:
        """Handle received events, in a later iteration if other connections have used this one's budget."""
        queue = self.server_state.queue
        if self.flow.events_wait:
            return  # their turn comes
        if queue.begin():
            self._handle_some()
            queue.end()
        else:
            self._let_events_wait()

    def _handle_some(self) -> None:
        """Handle received events, at most :data:`EVENTS_PER_STEP`; the rest have to wait."""
        self.conn.events_left = EVENTS_PER_STEP
        super().handle_events()
        if self._is_over or self.server_state.is_over:
            self.announce_end()
        if self.transport.is_closing():
            return
        if not self.conn.events_left:
            self._let_events_wait()
        elif self.flow.events_wait:
            self.flow.events_wait = False
            if not self.flow.read_paused:
                self.transport.resume_reading()

    def _let_events_wait(self) -> None:
        self.flow.events_wait = True
        self.transport.pause_reading()
        self.server_state.queue.submit("{}:{}".format(*self.client or ("", 0)), self._handle_next)

    def _handle_next(self) -> None:
        if not self.transport.is_closing():
            self._handle_some()

    def send_400_response(self, msg: str) -> None:
        """Refuse what was received, and close; an answer that has begun is left as it is."""
        if self.conn.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            self.transport.close()
            return
        if self.conn.received.has_too_many_lines:
            msg = "Too many header lines."
        if self.conn.our_state is h11.SEND_RESPONSE:
            self.cycle.disconnected = True  # this is the answer; the application's is dropped
        super().send_400_response(msg)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection."""
        if self._expiry is not None:
            self._expiry.cancel()
        if self.leave is not None:
            self.leave(self)
        super().connection_lost(exc)

    def _make_room(self) -> bool:
        """Close the oldest connection that waits for its peer, so that silent connections do not keep probes out."""
        others = cast("set[BoundedProtocol]", self.connections) - {self}
        waiting = [one for one in others if one.waits_for_peer()]
        if not waiting:
            return False
        oldest = min(waiting, key=lambda one: one.opened_s)
        self.connections.discard(oldest)  # it would count until the loop has told it
        oldest.transport.abort()
        return True

    def waits_for_peer(self) -> bool:
        """Return whether the peer has to act: send a request or its rest, read its answer, or close as we did."""
        if self.conn.their_state is h11.IDLE:
            return not self.flow.events_wait  # a request may have come
        if self.conn.their_state is h11.SEND_BODY:
            return True
        return self.flow.write_paused or self.transport.is_closing()

    def _expire(self) -> None:
        if self._streams() and self.loop.time() - self.opened_s < STREAM_LIFE_S:
            self._expiry = self.loop.call_later(CONNECTION_LIFE_S, self._expire)
            return
        self._expiry = self.loop.call_later(CLOSING_GRACE_S, self.transport.abort)
        if cast("Scope | None", self.scope) is None:  # no request has come
            self.shutdown()
            return
        # To close between two requests would lose one that is on its way. An idle connection ends after KEEP_ALIVE_S.
        self._is_over = True
        self.announce_end()

    def announce_end(self) -> None:
        """Close after the answer in progress, if there is one, and say so in its head."""
        # Before its first request a connection has none.
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is None or cycle.response_complete:
            return
        cycle.keep_alive = False
        if not cycle.response_started and CLOSE_HEADER not in cycle.default_headers:
            cycle.default_headers = [*cycle.default_headers, CLOSE_HEADER]

    def _streams(self) -> bool:
        """Return whether it is reading a stream of events."""
        scope = cast("Scope | None", self.scope)  # before its first request it has none
        if scope is None or LASTING not in scope or self.cycle.response_complete:
            return False
        return not self.flow.write_paused  # a browser that sleeps, or is gone without a word
