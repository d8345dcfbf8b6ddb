"""Helpers of the abuse tests: a native server with a manual clock, and peers that send octets."""

import asyncio
import contextlib
import ssl
import zlib
from collections.abc import AsyncIterator
from typing import Any

import trustme

from ratelimitd.counters import CheckStats
from ratelimitd.rpc.interface import Methods, TransportLimits
from ratelimitd.rpc.messages import framed
from ratelimitd.rpc.server import NativeServer
from ratelimitd.rpc.tls import CertificateSource, TlsFiles
from tests.http2_peer import (
    END_HEADERS,
    GREETING,
    HEADERS,
    POST,
    SETTINGS_ACK,
    Frame,
    Peer,
    last_data,
)

PATIENCE_S = 30.0
"""Timeout for events on a busy machine; the tests measure no time."""

LINES = ["tcp", "unix", "tls"]

AMPLIFICATION = 20
"""Size of the answer to a batch of empty checks, as a multiple of the batch."""


class Serving:
    """A started native server on TCP, TLS or a socket file.

    Only :meth:`passes` advances its clock and runs its timer.
    """

    def __init__(self, directory, line="tcp", **limits: Any) -> None:
        self.now_s = 100.0
        self.stats = CheckStats()
        self.answered = 0
        self._directory = directory
        self._line = line
        self._limits = TransportLimits(**limits)
        self._lines: list[Line] = []
        self._trust: ssl.SSLContext | None = None

    async def __aenter__(self):
        tls = self._certificates() if self._line == "tls" else None
        unix = self._line == "unix"
        self.server = NativeServer(
            Methods(
                {"/echo": self._echo, "/batch": self._batch, "/wait": _wait},
                {"/endless": _endless},
                {"/ask": _ask},
            ),
            listen=f"unix:{self._directory / 's'}" if unix else "127.0.0.1:0",
            stats=self.stats,
            tls=tls,
            limits=self._limits,
            monotonic_s=lambda: self.now_s,
        )
        self.address = await self.server.start()
        self.server._timer.cancel()
        return self

    async def __aexit__(self, *_):
        for line in self._lines:
            line.writer.transport.abort()
        await self.server.stop(0)

    def passes(self, seconds: int) -> None:
        """Advance the clock, and run the server's timer."""
        for _ in range(seconds * 10):
            self.now_s += 0.1
            self.server._timer.cancel()
            self.server._tick()
        self.server._timer.cancel()

    async def line(self, octets: bytes = GREETING + SETTINGS_ACK, *, tls=True, **options) -> "Line":
        """Open a connection and send ``octets``."""
        if self._line == "unix":
            opened = await asyncio.open_unix_connection(self._directory / "s", **options)
        else:
            host, _, port = self.address.rpartition(":")
            context = self._trust if tls else None
            opened = await asyncio.open_connection(host, int(port), ssl=context, **options)
        line = Line(*opened)
        self._lines.append(line)
        line.writer.write(octets)
        return line

    def drop(self, line: "Line") -> None:
        """Abort a connection, and release it."""
        line.writer.transport.abort()
        self._lines.remove(line)

    @property
    def errors(self) -> dict[str, int]:
        return {str(cause): count for cause, count in self.stats.errors_by_transport.items()}

    @property
    def places(self) -> int:
        """Open connections."""
        return len(self.server._acceptor.places)

    def _echo(self, message, _call):
        self.answered += 1
        return message

    def _batch(self, message, _call):
        self.answered += 1
        return message * AMPLIFICATION

    def _certificates(self) -> CertificateSource:
        ca = trustme.CA()
        certificate = ca.issue_cert("127.0.0.1")
        files = TlsFiles(self._directory / "cert.pem", self._directory / "key.pem")
        certificate.private_key_pem.write_to_path(files.key)
        certificate.cert_chain_pems[0].write_to_path(files.cert)
        self._trust = ssl.create_default_context()
        ca.configure_trust(self._trust)
        self._trust.set_alpn_protocols(["h2"])
        return CertificateSource(files, print)


async def _wait(_message, _call):
    await asyncio.Event().wait()


async def _endless(message, _call):
    while True:
        yield message * 10


async def _ask(questions, _call):
    async for question in questions:
        yield question[:10]


class Line:
    """The peer's side of one connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.peer = Peer(greeting=b"")
        self._next_id = 1

    def send(self, *parts: bytes) -> None:
        """Send octets without waiting for the server to read them."""
        self.writer.write(b"".join(parts))

    def head(self, stream_id: int, path="/echo", flags=END_HEADERS, **fields: str) -> bytes:
        named = {**dict(POST), ":path": path}
        named |= {name.replace("_", "-"): value for name, value in fields.items()}
        return self.peer.head(stream_id, list(named.items()), flags)

    def call_octets(self, stream_id: int, path="/echo", message=b"hi", **fields: str) -> bytes:
        return self.head(stream_id, path, **fields) + last_data(stream_id, framed(message))

    async def frame(self) -> Frame:
        async with asyncio.timeout(PATIENCE_S):
            head = await self.reader.readexactly(9)
            payload = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
        return Frame(head[3], head[4], int.from_bytes(head[5:9], "big"), payload)

    async def rest(self) -> list[Frame]:
        """All frames until the server closes."""
        frames = []
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                frames.append(await self.frame())
        return frames

    async def octets(self) -> bytes:
        """All octets until the server closes."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.read()

    async def outcome(self, stream_id: int) -> dict[bytes, bytes]:
        """Return the fields of a call's answer after its end."""
        fields: dict[bytes, bytes] = {}
        while True:
            sent = await self.frame()
            if sent.type == HEADERS:
                found = self.peer.fields(sent.payload)
                if sent.stream_id == stream_id:
                    fields |= dict(found)
                    if sent.flags & 1:
                        return fields

    async def status(self, path="/echo", message=b"hi", **fields: str) -> int:
        """Make a call, wait for its end, and return its status."""
        stream_id, self._next_id = self._next_id, self._next_id + 2
        self.send(self.call_octets(stream_id, path, message, **fields))
        return int((await self.outcome(stream_id))[b"grpc-status"])


@contextlib.asynccontextmanager
async def line_to(address: str) -> AsyncIterator[Line]:
    """A connection to a server, open for calls."""
    host, _, port = address.rpartition(":")
    line = Line(*await asyncio.open_connection(host, int(port)))
    line.send(GREETING, SETTINGS_ACK)
    yield line
    line.writer.transport.abort()


async def until(condition) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 -- what is waited for is a counter
            await asyncio.sleep(0)


def bomb(size: int) -> bytes:
    """A compressed message that inflates to ``size``."""
    packer = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    packed = b"".join(packer.compress(bytes(1_000_000)) for _ in range(size // 1_000_000))
    packed += packer.flush()
    return b"\x01" + len(packed).to_bytes(4, "big") + packed
