"""Forwards requests for pages and JSON from the parent to a worker; interprets the codes of login links only.

Requests of a client address go to the same worker while it responds, so a caller sees its own changes. See ADR 0025.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Final
from zlib import crc32

import h11
from starlette.datastructures import Address, Headers, QueryParams
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ratelimitd.buckets.state_dir import LOCK_NAME
from ratelimitd.retry import cancel_all
from ratelimitd.web.server import short_name

PEER_HEADER: Final = b"x-ratelimitd-peer"
"""Host and port, separated by a space. The parent removes it from incoming requests."""


def from_parent(app: ASGIApp, scheme: str = "http") -> ASGIApp:
    """Set the client address and the scheme of requests that the parent forwards."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope["headers"]).get(PEER_HEADER, b"")
        host, _, port = given.decode("ascii", "replace").rpartition(" ")
        headers = [(name, value) for name, value in scope["headers"] if name != PEER_HEADER]
        client = (host, int(port)) if host and port.isdigit() else None
        given_scope = {**scope, "client": client, "headers": headers, "scheme": scheme}
        await app(given_scope, receive, send)

    return answer


CONNECT_TIMEOUT_S: Final = 1.0

ANSWER_TIMEOUT_S: Final = 15.0
"""Longest time a worker may take to read a request, and to begin its answer once the request is complete. A page that
waits for an unavailable rule database takes 6 s."""

READ_BYTES: Final = 65_536

_HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Connection-specific fields (RFC 9110 section 7.6.1)."""

_OWN: Final = frozenset({PEER_HEADER, b"date", b"server"})
"""Fields that this side sets."""

_GONE: Final = (OSError, h11.RemoteProtocolError)
"""Errors of a connection to a worker that ended."""

_log = logging.getLogger(__name__)


class PassingOn:
    """An ASGI application that forwards requests to workers.

    ``sockets`` are the paths at which running workers listen. ``answers`` returns whether the worker of that number
    responds: the kernel accepts connections for a hanging one. ``opened_by`` returns whether the code of a login link
    may open a session on a host, and consumes it: a worker forgets used codes when it is replaced.
    """

    def __init__(
        self,
        sockets: Sequence[Path],
        answers: Callable[[int], Awaitable[bool]],
        opened_by: Callable[[str, str], bool],
    ) -> None:
        self._sockets = sockets
        self._answers = answers
        self._opened_by = opened_by
        self._reported = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        exchange = await self._exchange(scope)
        if exchange is None:
            await PlainTextResponse("no worker answers at the moment\n", 503)(scope, receive, send)
            return
        try:
            await _pass(exchange, self._with_fresh_code(scope), receive, send)
        finally:
            exchange.close()

    def _with_fresh_code(self, scope: Scope) -> Scope:
        """Return ``scope``, with an empty code, which a worker refuses, for a login link that is used or wrong."""
        if scope["path"] != "/login" or scope["method"] != "GET":
            return scope
        code = QueryParams(scope["query_string"]).get("code")
        if code is None or self._opened_by(code, Headers(scope=scope).get("host", "")):
            return scope
        return {**scope, "query_string": b"code="}

    async def _exchange(self, scope: Scope) -> _Exchange | None:
        """Return a connection to a responding worker; prefers the caller's own."""
        sockets = self._sockets
        client = Address(*(scope.get("client") or ("", 0)))
        # One worker counts login attempts.
        first = 0 if scope["path"] == "/login" else crc32(client.host.encode()) % len(sockets)
        for offset in range(len(sockets)):
            number = (first + offset) % len(sockets)
            if not await self._answers(number):
                continue
            path = sockets[number]
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    with short_name(path) as name:
                        streams = await asyncio.open_unix_connection(name)
            except FileNotFoundError:
                # A worker that ends removes its socket, and nothing else.
                if not path.with_name(LOCK_NAME).exists():
                    self._report_missing()
            except (OSError, TimeoutError):
                pass
            else:
                return _Exchange(*streams)
        return None

    def _report_missing(self) -> None:
        """Log, once, that a worker runs without its socket file."""
        if not self._reported:
            self._reported = True
            _log.error(
                "HTTP cannot reach a worker: STATE_DIR was emptied while the node ran; restart it"
            )


class _Exchange:
    """One request and its answer, on a separate connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT)
        self.sent = asyncio.Event()
        """The whole request was forwarded."""
        self.started = False
        """The answer has begun."""

    async def ask(self, scope: Scope, receive: Receive) -> None:
        """Forward the request; return when the caller disconnects.

        Raises:
            TimeoutError: the worker stopped reading.
        """
        await self._write(_request(scope))
        while (message := await receive())["type"] == "http.request":
            await self._write(h11.Data(message.get("body", b"")))
            if not message.get("more_body", False):
                await self._write(h11.EndOfMessage())
                self.sent.set()

    async def overdue(self) -> None:
        """Return when the answer should have begun."""
        await self.sent.wait()
        await asyncio.sleep(ANSWER_TIMEOUT_S)

    async def answer(self, send: Send) -> None:
        """Forward the answer to the caller."""
        while not isinstance(event := await self._next(), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                self.started = True
                headers = _passed(event.headers.raw_items())
                await send(
                    {
                        "type": "http.response.start",
                        "status": event.status_code,
                        "headers": headers,
                    }
                )
            elif isinstance(event, h11.Data):
                body = bytes(event.data)
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()

    async def _write(self, event: h11.Event) -> None:
        self._writer.write(self._http.send(event) or b"")
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await self._writer.drain()

    async def _next(self) -> object:
        """Return the next event of the answer."""
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(READ_BYTES))
        if event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
            # Reading again would return at once each time and starve other tasks.
            message = "the worker has ended the connection and not its answer"
            raise h11.RemoteProtocolError(message)
        return event


async def _pass(exchange: _Exchange, scope: Scope, receive: Receive, send: Send) -> None:
    """Forward in both directions until the answer is complete or the caller disconnects.

    A worker may answer before it has read the whole request, and then stop reading.
    """
    asking = asyncio.create_task(exchange.ask(scope, receive))
    answering = asyncio.create_task(exchange.answer(send))
    overdue = asyncio.create_task(exchange.overdue())
    try:
        await asyncio.wait((asking, answering, overdue), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done() and not exchange.started and _is_late(asking, overdue):
            answering.cancel()
            refusal = PlainTextResponse("the worker does not answer\n", 504)
            await refusal(scope, receive, send)
            return
        await asyncio.wait((asking, answering), return_when=asyncio.FIRST_COMPLETED)
        if asking.done() and asking.exception() is None:
            return  # the caller disconnected
        await answering
    except _GONE:
        if exchange.started:
            raise  # the server ends the connection: the forwarded answer is incomplete
        refusal = PlainTextResponse("the worker ended before it had answered\n", 502)
        await refusal(scope, receive, send)
    finally:
        await cancel_all(asking, answering, overdue)


def _is_late(asking: asyncio.Task[None], overdue: asyncio.Task[None]) -> bool:
    """Return whether the worker took too long to read the request or to begin its answer."""
    return overdue.done() or (asking.done() and isinstance(asking.exception(), TimeoutError))


def _request(scope: Scope) -> h11.Request:
    target: bytes = scope["raw_path"]
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    headers = _passed(scope["headers"])
    if any(name == b"transfer-encoding" for name, _ in scope["headers"]):
        # Chunked encoding overrides any Content-Length: RFC 9112, section 6.3.
        headers = [header for header in headers if header[0] != b"content-length"]
        headers.append((b"transfer-encoding", b"chunked"))
    if not any(name == b"host" for name, _ in headers):
        headers.append((b"host", b""))  # HTTP/1.0 may omit it, HTTP/1.1 may not
    client = scope.get("client")
    if client is not None:
        headers.append((PEER_HEADER, f"{client[0]} {client[1]}".encode()))
    # No Connection: close. A worker that answers early would close, and the body still being written would drop the
    # answer.
    return h11.Request(method=scope["method"], target=target, headers=headers)


def _passed(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers to forward."""
    left_out = _HOP_BY_HOP | _OWN
    return [(name, value) for name, value in headers if name.lower() not in left_out]
