"""Forward auth for HAProxy, which has no HTTP subrequests: an agent of its stream processing offload, SPOP 2.0.

Each NOTIFY frame is one request to :class:`ratelimitd.web.api.forward_auth.ForwardAuth`: its arguments are the headers,
except ``query``, the query. The answer sets variables: ``status`` and the header fields. See ADR 0061, and doc/SPOE.txt
of HAProxy for the protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import fcntl
import ipaddress
import sys
import termios
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from ratelimitd.fair_queue import FairQueue
from ratelimitd.web.api.forward_auth import AUTH_PATH, URI, ForwardAuth
from ratelimitd.web.server import BACKLOG, STOP_GRACE_S, STOP_POLL_S, address_of, bind

VERSION: Final = b"2.0"

MAX_FRAME_BYTES: Final = 65_536
"""Longest frame. HAProxy's own bound is its buffer, 16 KiB by default."""
MIN_FRAME_BYTES: Final = 256
"""HAProxy's own minimum."""
MAX_DIGITS: Final = 10
"""Digits of the frame size that HAProxy announces."""
_LENGTH_BYTES: Final = 4
_MAX_VARINT_BYTES: Final = 10

MAX_CONNECTIONS: Final = 500
"""A further one closes the connection that has been silent for the longest time."""
CLOSING_GRACE_S: Final = 5.0
"""Time for a peer to read the last output before its connection is closed."""
STOP_SPREAD_S: Final = 0.2
"""Time over which a stop ends connections. HAProxy sends on one until it has read its end, after those of others."""
MAX_ARGUMENTS: Final = 64
"""Arguments per frame: each takes 1 µs."""
FRAMES_PER_ITERATION: Final = 16
"""Frames of all connections handled per event-loop iteration. Their answers take about 2 ms of the next one."""
MAX_PENDING: Final = 200
"""Requests per connection that wait for the shared state; beyond that, reading stops."""

_URI_ARGUMENT: Final = URI.lower().encode()

_FIN: Final = 1
_TRANSACTION: Final = 2
"""Scope of the variables: request and response."""
_SET_VAR: Final = 1
_BIG_VARINT: Final = 240
_CONTINUED: Final = 128
_TRUE: Final = 0x10


class FrameType(enum.IntEnum):
    """The types of frames."""

    HAPROXY_HELLO = 1
    HAPROXY_DISCONNECT = 2
    NOTIFY = 3
    AGENT_HELLO = 101
    AGENT_DISCONNECT = 102
    ACK = 103


class Status(enum.IntEnum):
    """Why a connection ends, as sent in AGENT-DISCONNECT."""

    NORMAL = 0
    TOO_BIG = 3
    INVALID = 4
    NO_VERSION = 5
    NO_FRAME_SIZE = 6
    NO_CAPABILITIES = 7
    BAD_VERSION = 8
    BAD_FRAME_SIZE = 9
    FRAGMENTED = 10


_MANDATORY: Final[Mapping[bytes, Status]] = {
    b"supported-versions": Status.NO_VERSION,
    b"max-frame-size": Status.NO_FRAME_SIZE,
    b"capabilities": Status.NO_CAPABILITIES,
}
"""Items of a HELLO, and the status if one is missing."""


class SpopError(Exception):
    """Ends a connection."""

    def __init__(self, status: Status) -> None:
        super().__init__(status)
        self.status = status


class Frame(NamedTuple):
    """One whole frame."""

    kind: int
    stream_id: int
    frame_id: int
    payload: bytes


class _Reader:
    """Reads one frame. Its methods raise :class:`SpopError` if it is malformed."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        end = self._at + count
        if end > len(self._data):
            raise SpopError(Status.INVALID)
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def rest(self) -> bytes:
        """Return all remaining bytes."""
        return self.take(len(self._data) - self._at)

    def varint(self) -> int:
        """Return an integer of variable length."""
        value = self.take(1)[0]
        if value < _BIG_VARINT:
            return value
        for shift in range(4, 4 + 7 * _MAX_VARINT_BYTES, 7):
            octet = self.take(1)[0]
            value += octet << shift
            if octet < _CONTINUED:
                return value
        raise SpopError(Status.INVALID)

    def text(self) -> bytes:
        """Return a string with its length prefix."""
        return self.take(self.varint())

    def pairs(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield names and values up to the end."""
        while self:
            yield self.text(), self.value()

    def value(self) -> bytes:
        """Return typed data as text; empty for NULL."""
        kind = self.take(1)[0]
        match kind & 0x0F:
            case 0:
                return b""
            case 1:
                return b"true" if kind & _TRUE else b"false"
            case 2 | 3 | 4 | 5:
                return str(self.varint()).encode()
            case 6:
                return str(ipaddress.IPv4Address(self.take(4))).encode()
            case 7:
                return str(ipaddress.IPv6Address(self.take(16))).encode()
            case 8 | 9:
                return self.text()
            case _:
                raise SpopError(Status.INVALID)


def read_frame(data: bytes) -> Frame:
    """Return the frame in ``data``, which excludes the length prefix.

    Raises:
        SpopError: it is malformed, or one of several fragments.
    """
    reader = _Reader(data)
    kind = reader.take(1)[0]
    flags = int.from_bytes(reader.take(4))
    if not flags & _FIN:
        raise SpopError(Status.FRAGMENTED)
    return Frame(kind, reader.varint(), reader.varint(), reader.rest())


def arguments_of(payload: bytes) -> dict[bytes, bytes]:
    """Return the arguments of all messages of a NOTIFY frame.

    Raises:
        SpopError: it is malformed.
    """
    reader = _Reader(payload)
    found: dict[bytes, bytes] = {}
    count = 0
    while reader:
        reader.text()
        arguments = reader.take(1)[0]
        count += 1 + arguments
        if count > MAX_ARGUMENTS:
            raise SpopError(Status.TOO_BIG)
        for _ in range(arguments):
            name = reader.text()
            found[name.lower()] = reader.value()
    return found


def varint(value: int) -> bytes:
    """Encode an integer in variable length."""
    if value < _BIG_VARINT:
        return bytes([value])
    octets = [value & 0xFF | _BIG_VARINT]
    value = (value - _BIG_VARINT) >> 4
    while value >= _CONTINUED:
        octets.append(value & 0xFF | _CONTINUED)
        value = (value - _CONTINUED) >> 7
    return bytes([*octets, value])


def _text(value: bytes) -> bytes:
    return varint(len(value)) + value


def _typed(value: bytes | int) -> bytes:
    return b"\x03" + varint(value) if isinstance(value, int) else b"\x08" + _text(value)


def frame(kind: FrameType, payload: bytes, stream_id: int = 0, frame_id: int = 0) -> bytes:
    """Encode a frame with its length prefix."""
    head = bytes([kind]) + _FIN.to_bytes(4) + varint(stream_id) + varint(frame_id)
    return (len(head) + len(payload)).to_bytes(_LENGTH_BYTES) + head + payload


def pairs(values: Mapping[bytes, bytes | int], head: bytes = b"") -> bytes:
    """Encode a list of names and values, each after ``head``."""
    return b"".join(head + _text(name) + _typed(value) for name, value in values.items())


def variables(values: Mapping[bytes, bytes | int]) -> bytes:
    """Encode the payload of an ACK that sets these variables."""
    return pairs(values, bytes([_SET_VAR, 3, _TRANSACTION]))


def hello_answer(payload: bytes) -> tuple[bytes, bool]:
    """Return the answer to a HELLO, and whether it is a health check, after which the connection ends.

    Raises:
        SpopError: it is malformed, incomplete, or of another version.
    """
    given = dict(_Reader(payload).pairs())
    for name, status in _MANDATORY.items():
        if name not in given:
            raise SpopError(status)
    if VERSION not in [one.strip() for one in given[b"supported-versions"].split(b",")]:
        raise SpopError(Status.BAD_VERSION)
    size = given[b"max-frame-size"]
    if not size.isdigit():
        raise SpopError(Status.INVALID)
    if len(size) > MAX_DIGITS or int(size) < MIN_FRAME_BYTES:
        raise SpopError(Status.BAD_FRAME_SIZE)
    fields: dict[bytes, bytes | int] = {
        b"version": VERSION,
        b"max-frame-size": min(int(size), MAX_FRAME_BYTES),
        b"capabilities": b"pipelining",
    }
    return frame(FrameType.AGENT_HELLO, pairs(fields)), given.get(b"healthcheck") == b"true"


class SpopServer:
    """Listens for HAProxy."""

    def __init__(self, auth: ForwardAuth, host: str, port: int, *, reuse_port: bool) -> None:
        self._auth = auth
        self._address = host, port
        self._reuse_port = reuse_port
        self._server: asyncio.Server | None = None
        self.connections: dict[SpopConnection, None] = {}
        """Ordered by last activity, the longest silent first."""
        self._frames = FairQueue(time.monotonic, FRAMES_PER_ITERATION)

    async def start(self) -> str:
        """Bind and listen; return the bound address as ``host:port``.

        Raises:
            StartupError: the address cannot be bound; the message says why.
        """
        sock = await bind(*self._address, setting="SPOE_LISTEN", reuse_port=self._reuse_port)
        self._server = await asyncio.get_running_loop().create_server(
            lambda: SpopConnection(self._auth, self.connections, self._frames),
            sock=sock,
            backlog=BACKLOG,
        )
        return address_of(sock)

    async def stop(self) -> None:
        """Stop listening, answer what was received, and close each connection when it waits for no answer."""
        if self._server is None:
            return
        self._server.close()
        # In its next iteration uvloop reports the connections that it has accepted in this one.
        await asyncio.sleep(0)
        left = deque(self.connections)
        pause_s = min(STOP_POLL_S, STOP_SPREAD_S / max(1, len(left)))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE_S):
                while left:
                    one = left.popleft()
                    if one in self.connections and one.is_busy:
                        left.append(one)
                    else:
                        one.end(Status.NORMAL)
                    await asyncio.sleep(pause_s)
        for one in left:
            one.end(Status.NORMAL)
        await asyncio.sleep(0)
        self._server = None


class SpopConnection(asyncio.Protocol):
    """One connection of HAProxy; ``connections`` are those of its server, whose ``frames`` are handled in rotation."""

    def __init__(
        self,
        auth: ForwardAuth,
        connections: dict[SpopConnection, None],
        frames: FairQueue,
    ) -> None:
        self._auth = auth
        self._connections = connections
        self._frames = frames
        self._expiry: asyncio.TimerHandle | None = None
        self._received = bytearray()
        self._transport: asyncio.Transport
        self._client: tuple[str, int]
        self._handshake_done = False
        self._is_blocked = False
        self._is_queued = False
        self.pending: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection of a trusted proxy; close others."""
        self._transport = transport
        peer = transport.get_extra_info("peername")  # None under uvloop if the peer has reset it
        if peer is None or not self._auth.trusts(peer[0]):
            transport.abort()
            if peer is not None:
                self._auth.ignore()
            return
        self._client = peer[:2]
        if len(self._connections) >= MAX_CONNECTIONS:
            idle = (one for one in self._connections if not one.is_busy)
            next(idle, next(iter(self._connections))).make_room()
        self._connections[self] = None

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 -- the interface's
        """Remove the connection; its queued frames are not handled any more."""
        self._connections.pop(self, None)
        if self._expiry is not None:
            self._expiry.cancel()
        for task in self.pending:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        """Queue complete frames for handling."""
        self._received += data
        if self._is_queued:
            self._transport.pause_reading()
        self._queue()

    def pause_writing(self) -> None:
        """Stop reading while HAProxy does not read its answers."""
        self._is_blocked = True

    def resume_writing(self) -> None:
        """Resume reading."""
        self._is_blocked = False
        self._queue()

    @property
    def is_busy(self) -> bool:
        """Whether HAProxy waits for an answer: it lets the requests of a closed connection pass."""
        return bool(self.pending or self._received or self._is_queued) or self._has_unread()

    def _has_unread(self) -> bool:
        """Return whether HAProxy has sent bytes that the event loop has not read yet."""
        if self._transport.is_closing():
            return False
        number = fcntl.ioctl(self._transport.get_extra_info("socket"), termios.FIONREAD, bytes(4))
        return int.from_bytes(number, sys.byteorder) > 0

    def make_room(self) -> None:
        """Close to make room for another connection; at once if the peer does not read pending output."""
        del self._connections[self]
        if self._transport.get_write_buffer_size():
            self._transport.abort()
        else:
            self.end(Status.NORMAL)

    def end(self, status: Status) -> None:
        """Send the reason and close. The connection counts until it is lost, at most ``CLOSING_GRACE_S`` later."""
        if not self._transport.is_closing():
            fields: dict[bytes, bytes | int] = {
                b"status-code": int(status),
                b"message": status.name.lower().encode(),
            }
            self._transport.write(frame(FrameType.AGENT_DISCONNECT, pairs(fields)))
            self._transport.close()
            later = asyncio.get_running_loop().call_later
            self._expiry = later(CLOSING_GRACE_S, self._transport.abort)

    def _queue(self) -> None:
        """Handle a frame when it is this connection's turn."""
        if not self._is_queued:
            self._is_queued = True
            self._frames.submit("{}:{}".format(*self._client), self._handle_next)

    def _handle_next(self) -> None:
        """Handle the next frame, if there is one and room for it. Without room nothing is read."""
        self._is_queued = False
        try:
            if self._has_room() and (whole := self._next()) is not None:
                self._handle(read_frame(whole))
                self._queue()
                return
        except SpopError as error:
            self.end(error.status)
        if self._has_room():
            self._transport.resume_reading()
        elif not self._transport.is_closing():
            self._transport.pause_reading()

    def _has_room(self) -> bool:
        is_free = not self._is_blocked and len(self.pending) < MAX_PENDING
        return is_free and not self._transport.is_closing()

    def _next(self) -> bytes | None:
        """Return the next frame without its length prefix, ``None`` until it is complete."""
        if len(self._received) < _LENGTH_BYTES:
            return None
        size = int.from_bytes(self._received[:_LENGTH_BYTES])
        if size > MAX_FRAME_BYTES:
            raise SpopError(Status.TOO_BIG)
        end = _LENGTH_BYTES + size
        if len(self._received) < end:
            return None
        whole = bytes(self._received[_LENGTH_BYTES:end])
        del self._received[:end]
        return whole

    def _handle(self, received: Frame) -> None:
        if received.kind == FrameType.NOTIFY and self._handshake_done:
            self._connections[self] = self._connections.pop(self, None)
            task = asyncio.create_task(self._answer(received, arguments_of(received.payload)))
            self.pending.add(task)
            task.add_done_callback(self._answered)
        elif received.kind == FrameType.HAPROXY_HELLO and not self._handshake_done:
            answer, is_health_check = hello_answer(received.payload)
            self._handshake_done = True
            self._transport.write(answer)
            if is_health_check:
                self._transport.close()
        elif received.kind == FrameType.HAPROXY_DISCONNECT:
            self.end(Status.NORMAL)
        else:
            raise SpopError(Status.INVALID)

    def _answered(self, task: asyncio.Task[None]) -> None:
        self.pending.discard(task)
        if len(self.pending) == MAX_PENDING - 1:
            self._queue()

    async def _answer(self, received: Frame, arguments: dict[bytes, bytes]) -> None:
        query = arguments.pop(b"query", b"")
        if arguments.get(_URI_ARGUMENT) == b"":
            # A target without a path, as in `GET http://shop.example`.
            arguments[_URI_ARGUMENT] = b"/"
        scope = {
            "type": "http",
            "method": "GET",
            "path": AUTH_PATH,
            "query_string": query,
            # Absent values of a request are NULL.
            "headers": [(name, value) for name, value in arguments.items() if value],
            "client": self._client,
        }
        response = await self._auth.answer(Request(scope, _never))
        ack = variables(_variables_of(response))
        self._transport.write(frame(FrameType.ACK, ack, received.stream_id, received.frame_id))


def _variables_of(response: Response) -> dict[bytes, bytes | int]:
    """Return the variables of an answer: its status and the rate-limit fields, with ``_`` for ``-``."""
    fields = {
        name.replace("-", "_").encode(): value.encode()
        for name, value in response.headers.items()
        if name == "retry-after" or name.startswith("ratelimit")
    }
    return {b"status": response.status_code, **fields}


async def _never() -> Message:
    """Wait forever: HAProxy does not report that a client has left."""
    nothing: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    return await nothing
