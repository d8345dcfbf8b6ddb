"""A TCP proxy that does to connections what networks do: late, slow, in pieces, one way, not at all.

It runs in a thread of its own, so that it goes on while a test blocks, and its faults may be changed at any moment and
from any thread. Their names are those of toxiproxy where it has one. A connection is always accepted: one that the
network swallows needs ``hold`` or ``drop``, one that is turned away ``refuse``.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
import struct
import threading
from asyncio import StreamReader, StreamWriter
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from tests.servers import free_port

CHUNK_BYTES = 65_536
MOST_CHUNKS = 1_024
"""So much may be on its way before the sender is made to wait."""
FIRST_WORDS_BYTES = 4_096
"""What was said first is remembered, to tell connections apart."""
LOOK_AGAIN_S = 0.002
"""How often it is looked whether a fault has ended."""
SEND_RST = struct.pack("ii", 1, 0)
"""SO_LINGER of a socket whose closing is a reset."""


@dataclass
class Way:
    """What happens to the bytes of one direction."""

    latency_ms: float = 0.0
    """What is on its way when it becomes 0 arrives at once."""
    jitter_ms: float = 0.0
    """Up to so much later; the order stays."""
    bandwidth_bytes_s: float = 0.0
    """0 = as fast as it goes."""
    slice_bytes: int = 0
    """The largest piece that is sent at once; 0 = as it came."""
    hold: bool = False
    """Nothing arrives while it is on, and everything afterwards, as TCP does it when a partition heals: even what a
    caller sent who has given up since."""
    drop: bool = False
    """What is sent is gone, the end of the connection too. Whoever sends something after the fault on a connection that
    lost something gets a reset, as from a machine that has forgotten it."""
    cut_after_bytes: int | None = None
    """So many bytes pass yet; the connection that carries the next one is reset, and the fault is over."""


@dataclass
class _Talk:
    """One connection: both ends, as far as they are there, and what tells it from others."""

    writers: list[StreamWriter] = field(default_factory=list)
    first_words: bytes = b""
    is_silent: bool = False

    def hears(self, chunk: bytes) -> None:
        """One side has said this."""
        self.first_words += chunk[: FIRST_WORDS_BYTES - len(self.first_words)]


class ChaosProxy:
    """Stands before a server at ``port`` of this machine; callers connect to ``self.port``.

    ``up`` is what happens on the way to the server, ``down`` on the way back. With ``tls`` the callers speak TLS, and
    the server hears plain text.
    """

    def __init__(self, port: int, *, tls: ssl.SSLContext | None = None, seed: int = 0) -> None:
        self.target_port = port
        self.port = free_port()
        self.up = Way()
        self.down = Way()
        self.accepted = 0
        """Connections since the start."""
        self._tls = tls
        self._random = random.Random(seed)
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread
        self._listener: socket.socket | None = None
        self._connections: dict[asyncio.Task[None], _Talk] = {}

    @property
    def address(self) -> str:
        """``host:port``, for callers."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """For REDIS_URL."""
        return f"{'rediss' if self._tls else 'redis'}://{self.address}"

    @property
    def connections(self) -> int:
        """How many there are now."""
        return len(self._connections)

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chaos proxy")
        self._thread.start()
        self.accept()
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def accept(self) -> None:
        """Listen, again."""
        self._run(self._accept())

    def refuse(self) -> None:
        """Nobody listens any more; connections stay."""
        self._run(self._refuse())

    def reset(self) -> None:
        """Reset all connections, in both directions."""
        self._run(self._reset())

    def kill(self) -> None:
        """As if the server had died: nobody listens, and connections are reset."""
        self.refuse()
        self.reset()

    def partition(self) -> None:
        """Nothing passes in either direction, until ``heal``."""
        self.up.hold = self.down.hold = True

    def silence(self, word: bytes) -> None:
        """Nothing passes on connections where ``word`` was said at the beginning, by either side, until ``heal``.

        Those that are made later are not concerned.
        """
        for talk in list(self._connections.values()):
            talk.is_silent |= word in talk.first_words

    def heal(self) -> None:
        """End all faults."""
        for way in (self.up, self.down):
            vars(way).update(vars(Way()))
        for talk in list(self._connections.values()):
            talk.is_silent = False
        self.accept()

    def _run(self, what: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result()

    # In the thread of the proxy

    async def _accept(self) -> None:
        if self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", self.port), backlog=1_024)
            self._listener.setblocking(False)
            self._loop.add_reader(self._listener, self._take, self._listener)

    def _take(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the caller has gone again
            caller, _ = listener.accept()
            self.accepted += 1
            task = self._loop.create_task(self._serve(caller))
            self._connections[task] = _Talk()
            task.add_done_callback(partial(self._forget, caller))

    def _forget(self, caller: socket.socket, task: asyncio.Task[None]) -> None:
        if not self._connections.pop(task).writers:  # it was cancelled before it began
            caller.close()

    async def _refuse(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    async def _reset(self) -> None:
        for writer in [one for talk in self._connections.values() for one in talk.writers]:
            _reset(writer)

    async def _close(self) -> None:
        await self._refuse()
        await _end(*self._connections)

    async def _serve(self, caller: socket.socket) -> None:
        """One connection, until both ways have ended, or a fault ends them."""
        task = asyncio.current_task()
        assert task is not None
        talk = self._connections[task]
        both = talk.writers
        try:
            reader, writer = await _streams(caller, self._tls)
            both.append(writer)
            server_reader, server = await asyncio.open_connection("127.0.0.1", self.target_port)
            both.append(server)
            ways = (
                _Carrier(self.up, talk, reader, server, source=self._random),
                _Carrier(self.down, talk, server_reader, writer, source=self._random),
            )
            await _all_or_none(step for way in ways for step in (way.take(), way.bring()))
            for one in both:
                one.close()
                await one.wait_closed()  # what was written goes out first
        except OSError:
            pass  # refused by the server, or reset: the other side is to notice, and nobody else
        finally:
            for one in both:
                _reset(one)


class _Carrier:
    """One way of one connection. What was read waits in between, so that delays do not add up."""

    def __init__(
        self,
        way: Way,
        talk: _Talk,
        reader: StreamReader,
        writer: StreamWriter,
        *,
        source: random.Random,
    ) -> None:
        self._way = way
        self._talk = talk
        self._reader = reader
        self._writer = writer
        self._random = source
        self._waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MOST_CHUNKS)
        self._lost = False

    async def take(self) -> None:
        """Read to the end."""
        chunk = b"first"
        while chunk:
            chunk = await self._reader.read(CHUNK_BYTES)
            self._talk.hears(chunk)
            delay_ms = self._way.latency_ms + self._random.uniform(0, self._way.jitter_ms)
            await self._waiting.put((_now_s() + delay_ms / 1_000, chunk))

    async def bring(self) -> None:
        """Write, when it is due, what was read, and end when that has ended."""
        while True:
            due_s, chunk = await self._waiting.get()
            while (rest_s := self._rest_s(due_s)) > 0:  # noqa: ASYNC110 - it is changed from other threads
                await asyncio.sleep(min(rest_s, LOOK_AGAIN_S))
            if self._way.drop:
                self._lost = True
            elif self._lost:
                raise ConnectionResetError
            elif not chunk:
                break
            else:
                await self._write(chunk)
        if self._writer.can_write_eof():
            self._writer.write_eof()
        else:  # over TLS asyncio cannot end one way alone
            self._writer.close()

    def _rest_s(self, due_s: float) -> float:
        """How much longer a chunk waits by the faults of now."""
        if self._way.hold or self._talk.is_silent:
            return LOOK_AGAIN_S
        if self._way.latency_ms or self._way.jitter_ms:
            return due_s - _now_s()
        return 0.0

    async def _write(self, chunk: bytes) -> None:
        way = self._way
        if way.cut_after_bytes is not None:
            rest, way.cut_after_bytes = way.cut_after_bytes - len(chunk), None
            if rest >= 0:
                way.cut_after_bytes = rest
            else:
                self._writer.write(chunk[:rest])
                await self._writer.drain()
                raise ConnectionResetError
        size = way.slice_bytes or len(chunk)
        for at in range(0, len(chunk), size):
            piece = chunk[at : at + size]
            if way.bandwidth_bytes_s:
                await asyncio.sleep(len(piece) / way.bandwidth_bytes_s)
            self._writer.write(piece)
            await self._writer.drain()


async def _streams(
    caller: socket.socket, tls: ssl.SSLContext | None
) -> tuple[StreamReader, StreamWriter]:
    """What asyncio makes of a connection that was made, for one that was accepted."""
    loop, reader = asyncio.get_running_loop(), StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, caller, ssl=tls)
    return reader, StreamWriter(transport, protocol, reader, loop)


async def _all_or_none(steps: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run them side by side; the first that fails ends the others."""
    tasks = [asyncio.ensure_future(step) for step in steps]
    try:
        await asyncio.gather(*tasks)
    finally:
        await _end(*tasks)


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _reset(writer: StreamWriter) -> None:
    """End a connection at once, with a reset if it is still open."""
    if not writer.is_closing():
        peer = writer.get_extra_info("socket")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, SEND_RST)
    writer.transport.abort()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
