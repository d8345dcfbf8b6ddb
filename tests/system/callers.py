"""Callers for the soak: connections of raw HTTP/2 that count what they are answered.

A check counts as *lost* when it was sent whole and its answer was not waited for: the node may have charged it.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import hpack

from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests import http2_peer as h2

WAIT_S = 30.0
"""Longest wait for an answer: far above what it takes, so that only a hang fails."""

USERS = 1_000
BATCH = 50
IN_FLIGHT = 128
"""Half of the streams that a connection may have open."""

WINDOW_BACK = 16_384
"""A quarter of the connection's window, which the node must never have to wait for."""

CHECK = "/ratelimiter.v1.RateLimiter/CheckRateLimit"
CHECKS = "/ratelimiter.v1.RateLimiter/CheckRateLimitBatch"
RULES = "/ratelimiter.v1.RateLimiterConfig/ListRateLimits"
WATCH = "/grpc.health.v1.Health/Watch"


def block(path: str, **more: str) -> bytes:
    """A header block that neither uses nor changes the dynamic table, so that it can be sent again."""
    fields = [
        (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "node"),
        ("content-type", "application/grpc"), ("te", "trailers"), *more.items(),
    ]  # fmt: skip
    return b"".join(
        b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()
        for name, value in fields
    )


def framed(message: bytes) -> bytes:
    """A message of gRPC."""
    return b"\0" + len(message).to_bytes(4, "big") + message


EMPTY = framed(b"")


@lru_cache
def status_of(trailers: bytes) -> str:
    """``grpc-status`` of a block; those of the node do not depend on what was sent before."""
    fields = dict(hpack.Decoder().decode(trailers, raw=True))
    return bytes(fields.get(b"grpc-status", b"none")).decode()


@dataclass
class Tally:
    """What a group of callers sent and was answered, in checks unless said otherwise."""

    endpoints: tuple[str, str]
    allowed: int = 0
    blocked: int = 0
    lost: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """Calls by another status than 0."""
    refused: int = 0
    """Streams that the node reset."""
    goaways: Counter[int] = field(default_factory=Counter)
    acts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        requests = [
            pb.RateLimitRequest(identifier=f"user-{n}", identifier_type="user", endpoint=endpoint)
            for n in range(USERS)
            for endpoint in self.endpoints
        ]
        self.checks = [framed(request.SerializeToString()) for request in requests]
        self.batch = framed(pb.BatchRateLimitRequest(requests=requests[:BATCH]).SerializeToString())

    @property
    def answered(self) -> int:
        return self.allowed + self.blocked

    def count(self, decision: pb.RateLimitResponse) -> None:
        if decision.allowed:
            self.allowed += 1
        else:
            self.blocked += 1


def take_check(tally: Tally, message: bytes) -> None:
    tally.count(pb.RateLimitResponse.FromString(message[5:]))


def take_batch(tally: Tally, message: bytes) -> None:
    for decision in pb.BatchRateLimitResponse.FromString(message[5:]).responses:
        tally.count(decision)


def take_nothing(_tally: Tally, _message: bytes) -> None:
    pass


class Kind(NamedTuple):
    """A kind of call: its head, how many checks it charges, and who reads its answer."""

    name: str
    block: bytes
    checks: int = 0
    take: Callable[[Tally, bytes], None] = take_nothing


ONE_CHECK = Kind("check", block(CHECK), 1, take_check)
BATCH_OF_CHECKS = Kind("batch", block(CHECKS), BATCH, take_batch)
LIST = Kind("list", block(RULES))
LASTING = Kind("watch", block(WATCH))
EXPIRING = Kind("expiring watch", block(WATCH, **{"grpc-timeout": "50m"}))


class Caller(asyncio.Protocol):
    """One connection. ``pending`` are its calls in flight, by stream."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self.pending: dict[int, Kind] = {}
        self.half_closed = False
        self.transport: asyncio.Transport
        self.ended = asyncio.get_running_loop().create_future()
        self._messages: dict[int, bytes] = {}
        self._waiter: tuple[Callable[[], bool], asyncio.Future[None]] | None = None
        self._stream_id = -1
        self._number = 0
        self._rest = b""
        self._unreturned = 0

    # What a caller does

    def open(self, kind: Kind, body: bytes | None = EMPTY) -> int:
        """Send a call, or, without a ``body``, only its head."""
        self._stream_id += 2
        octets = h2.frame(h2.HEADERS, h2.END_HEADERS, self._stream_id, kind.block)
        if body is not None:
            octets += h2.last_data(self._stream_id, body)
            self.pending[self._stream_id] = kind
        self.transport.write(octets)
        return self._stream_id

    def check(self, count: int = 1) -> int:
        """Send so many checks, each of the next user; returns the last one's stream."""
        for _ in range(count):
            self._number = (self._number + 1) % len(self.tally.checks)
            self.open(ONE_CHECK, self.tally.checks[self._number])
        return self._stream_id

    def cancel(self, stream_id: int) -> None:
        """Take a call back."""
        self._forget(stream_id)
        self.transport.write(h2.rst_stream(stream_id))

    async def wait(self, condition: Callable[[], bool]) -> None:
        """Until ``condition`` holds, which is looked at whenever something came, or the connection has ended."""
        if condition() or self.ended.done():
            return
        future = asyncio.get_running_loop().create_future()
        self._waiter = (condition, future)
        try:
            async with asyncio.timeout(WAIT_S):
                await future
        except TimeoutError:
            streams = {stream: kind.name for stream, kind in self.pending.items()}
            message = f"waited in vain for {streams}, of {self._messages.keys()} there was a part"
            raise AssertionError(message) from None

    async def answered(self) -> None:
        """Until no call is in flight."""
        await self.wait(lambda: not self.pending)

    async def heard(self, streams: list[int]) -> None:
        """Until each stream has had a first message, or has ended."""
        await self.wait(lambda: self.pending.keys() & streams <= self._messages.keys())

    def close_half(self) -> None:
        """Say that nothing more will be said."""
        self.half_closed = True
        self.transport.write_eof()

    async def gone(self) -> None:
        """Until the connection is closed."""
        async with asyncio.timeout(WAIT_S):
            await self.ended

    async def leave(self) -> None:
        """Close in good order."""
        await self.answered()
        self.transport.close()
        await self.gone()

    # What the node does

    def connection_made(self, transport):
        self.transport = transport
        transport.set_write_buffer_limits(high=1 << 20)

    def connection_lost(self, _error):
        for stream_id in list(self.pending):
            self._forget(stream_id)
        self.ended.set_result(None)
        self._look(ended=True)

    def data_received(self, data):
        octets, at = self._rest + data, 0
        while (body := at + 9) <= len(octets):
            end = body + int.from_bytes(octets[at : at + 3], "big")
            if end > len(octets):
                break
            stream_id = int.from_bytes(octets[at + 5 : body], "big")
            self._frame(octets[at + 3], octets[at + 4], stream_id, octets[body:end])
            at = end
        self._rest = octets[at:]
        self._look()

    def _frame(self, kind, flags, stream_id, payload):
        if kind == h2.DATA:
            self._give_back(len(payload))
            if stream_id in self.pending:
                self._messages[stream_id] = self._messages.get(stream_id, b"") + payload
        elif kind == h2.HEADERS:
            if flags & h2.END_STREAM and stream_id in self.pending:
                self._end(stream_id, status_of(payload))
        elif kind == h2.RST_STREAM:
            self.tally.refused += stream_id in self.pending
            self._forget(stream_id)
        elif kind == h2.GOAWAY:
            self.tally.goaways[int.from_bytes(payload[4:8], "big")] += 1
        elif kind in {h2.SETTINGS, h2.PING} and not flags & h2.ACK:
            self._reply(h2.frame(kind, h2.ACK, 0, payload if kind == h2.PING else b""))

    def _end(self, stream_id, status):
        kind, message = self.pending.pop(stream_id), self._messages.pop(stream_id, b"")
        if status == "0":
            kind.take(self.tally, message)
        else:
            self.tally.failed[status] += 1

    def _forget(self, stream_id):
        self._messages.pop(stream_id, None)
        kind = self.pending.pop(stream_id, None)
        self.tally.lost += kind.checks if kind else 0

    def _give_back(self, octets):
        self._unreturned += octets
        if self._unreturned > WINDOW_BACK:
            self._reply(h2.window_update(0, self._unreturned))
            self._unreturned = 0

    def _reply(self, octets):
        if not self.half_closed:
            self.transport.write(octets)

    def _look(self, *, ended=False):
        if self._waiter is not None and (ended or self._waiter[0]()):
            future, self._waiter = self._waiter[1], None
            if not future.done():
                future.set_result(None)


async def connected(address: str, tally: Tally, greeting: bytes = h2.GREETING) -> Caller:
    """A caller who has said ``greeting``."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    _, caller = await loop.create_connection(lambda: Caller(tally), host, int(port))
    caller.transport.write(greeting)
    return caller
