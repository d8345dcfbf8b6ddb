"""The native transport without sockets, fed with arbitrary octets, and its invariants after each step.

Any octets lead to a documented outcome: no exception leaves the protocol, and no table exceeds its bound.
"""

import asyncio
from collections.abc import Iterable, Sequence
from itertools import pairwise

from ratelimitd.counters import CheckStats
from ratelimitd.http2.connection import Connection
from ratelimitd.http2.errors import Cause
from ratelimitd.http2.limits import ALLOWANCES, Limits
from ratelimitd.http2.streams import UNTOUCHED, State
from ratelimitd.rpc.dispatch import ConnectionCalls
from ratelimitd.rpc.interface import Methods, TransportLimits
from ratelimitd.rpc.routing import Peer
from ratelimitd.rpc.state import MAX_UNREAD_MESSAGES, ServerState

HTTP2_LIMITS = Limits(
    max_streams=6,
    stream_window_bytes=2_000,
    connection_window_bytes=70_000,
    max_header_list_bytes=400,
    max_header_block_bytes=300,
    max_buffered_bytes=500,
    max_unread_bytes=5_000,
    frames_per_slice=3,
    bytes_per_slice=300,
)
LIMITS = TransportLimits(
    max_message_bytes=300,
    max_concurrent_rpcs=2,
    max_streams=2,
    max_request_bytes_per_connection=500,
    max_request_bytes=500,
    max_open_requests=4,
)


def echo(message, _call):
    return message


def half(messages):
    """Answer every other message, as if the others could not take the fast path."""
    return [message if place % 2 else None for place, message in enumerate(messages)]


async def later(message, _call):
    await asyncio.sleep(0)
    return message


async def never(_message, _call):
    await asyncio.Event().wait()


async def count(message, _call):
    for _ in range(3):
        yield message


async def endless(message, _call):
    while True:
        yield message


async def ask(questions, _call):
    async for question in questions:
        yield question


async def deaf(_questions, _call):
    yield b"hello"
    await asyncio.Event().wait()


def demand_bounds(connection: Connection, limits: Limits) -> None:
    """Assert the bounds of all state that a peer can fill."""
    streams, sender, receiver = connection._streams, connection._sender, connection._receiver
    assert not streams.opening
    assert len(streams.live) <= limits.max_streams
    assert len(streams._discarded) <= 256
    assert len(streams._gaps) <= 64
    pending = sum(len(stream.pending) for stream in streams.live.values())
    assert sender.buffered_bytes == pending <= limits.max_unread_bytes
    assert len(sender._waiting) <= len(streams.live)
    held = sum(stream.held_bytes for stream in streams.live.values())
    assert held <= limits.connection_window_bytes
    assert receiver.window.left <= limits.connection_window_bytes
    if receiver._block is not None:
        fragments = receiver._block.fragments
        if connection.ended is not None and connection.ended.cause is Cause.HEADER_BLOCK:
            fragments = fragments[:-1]  # the last one exceeded the bound
        assert len(fragments) <= 1 + limits.max_continuations
        assert sum(map(len, fragments)) <= limits.max_header_block_bytes
    assert receiver.reader._decoder._table.used_bytes <= 4_096
    assert len(receiver.reader.kept) <= 64
    assert connection._meter._levels.keys() == ALLOWANCES.keys()
    assert UNTOUCHED.state is State.REMOTE_CLOSED
    assert (UNTOUCHED.send_credit, UNTOUCHED.held_bytes, bytes(UNTOUCHED.pending)) == (0, 0, b"")
    if not connection.has_more:
        assert len(connection._buffer) - connection._at < 16_384 + 9


def cut(octets: bytes, at: Sequence[int]) -> list[bytes]:
    """Split octets at these positions."""
    edges = [0, *sorted({min(edge, len(octets)) for edge in at}), len(octets)]
    return [octets[low:high] for low, high in pairwise(edges)]


class Fuzzed:
    """One connection and its calls, without anything else."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.broken = 0
        methods = Methods(
            unary={
                "/u": echo,
                "/echo": echo,
                "/l": later,
                "/n": never,
                "/wait": never,
                "/x": self._break,
            },
            server_stream={"/c": count, "/e": endless},
            bidi_stream={"/b": ask, "/ask": ask, "/d": deaf},
            bulk={"/u": half, "/echo": half, "/l": half, "/x": half},
        )
        self.shared = ServerState(methods, LIMITS, CheckStats(), lambda: self.now_s)
        self.connection = Connection(HTTP2_LIMITS)
        self.calls = ConnectionCalls(self.shared, self.connection, Peer("unix:"), lambda: None)

    def _break(self, _message, call):
        self.broken += 1
        call.metadata("authorization")
        raise KeyError

    def receive(self, octets: bytes) -> None:
        """Process octets like the owner of a connection, slice by slice."""
        self._slice(octets)
        while self.connection.has_more:
            self._slice(b"")

    def _slice(self, octets: bytes) -> None:
        events = iter(self.connection.receive(octets))
        while not self.calls.handle(events, self.now_s):
            pass
        self.write()

    def write(self) -> bytes:
        octets = self.connection.data_to_send()
        self.demand()
        return octets

    def passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.connection.tick()
        self.calls.expire(self.now_s)
        self.calls.look(self.now_s)
        self.write()

    def demand(self) -> None:
        """Assert all bounds, and that counters match the state."""
        demand_bounds(self.connection, HTTP2_LIMITS)
        calls, shared = self.calls, self.shared
        assert shared.stats.errors_by_transport.get("unexpected", 0) == self.broken
        assert shared.open_requests == len(calls.open) + len(calls._table.plain)
        assert shared.open_requests <= LIMITS.max_open_requests + LIMITS.max_concurrent_rpcs
        assert self.connection.ended or shared.open_requests <= self.connection.open_streams
        assert shared.unary_in_progress <= LIMITS.max_concurrent_rpcs
        assert shared.streams_in_progress <= LIMITS.max_streams
        assert calls._table.request_bytes == shared.request_bytes <= LIMITS.max_request_bytes
        for open_call in calls.open.values():
            if open_call.messages is not None:
                assert len(open_call.messages._parts) <= MAX_UNREAD_MESSAGES
            else:
                assert open_call.waiting_bytes == open_call.held_bytes

    async def end(self) -> None:
        """Lose the connection; no state of it may be left."""
        self.calls.lose_all()
        await self.shared.all_ended()
        shared = self.shared
        assert (shared.unary_in_progress, shared.streams_in_progress) == (0, 0)
        assert (shared.open_requests, shared.request_bytes, self.calls.open) == (0, 0, {})


async def drive(steps: Iterable[bytes | str]) -> Fuzzed:
    """Feed octets; ``turn`` lets handlers run, and ``minute`` lets a minute pass."""
    fuzzed = Fuzzed()
    for step in steps:
        if step == "turn":
            for _ in range(3):
                await asyncio.sleep(0)
                fuzzed.write()
        elif step == "minute":
            fuzzed.passes(61.0)
        else:
            fuzzed.receive(step.encode() if isinstance(step, str) else step)
    await fuzzed.end()
    return fuzzed
