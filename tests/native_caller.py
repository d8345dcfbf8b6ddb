"""A client of the native transport's calls, octet for octet: no socket, and a clock that the test moves."""

import asyncio

from ratelimitd.counters import CheckStats
from ratelimitd.http2.limits import Limits
from ratelimitd.rpc.dispatch import ConnectionCalls
from ratelimitd.rpc.interface import Methods, RpcError, StatusCode, TransportLimits
from ratelimitd.rpc.messages import framed
from ratelimitd.rpc.routing import Peer as PeerName
from ratelimitd.rpc.state import ServerState
from tests.http2_peer import DATA, END_HEADERS, HEADERS, POST, Peer, last_data


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 -- what is waited for is a counter
            await asyncio.sleep(0.001)


def echo(message, _call):
    return message


def left(_message, call):
    return str(call.time_remaining_s()).encode()


def refuse(_message, _call):
    raise RpcError(StatusCode.ABORTED, "no", b"details")


def broken(_message, _call):
    raise KeyError("secret")  # noqa: EM101


async def wait(_message, _call):
    await asyncio.Event().wait()


async def count(message, _call):
    for number in range(int(message)):
        yield b"%d" % number


async def upper(questions, _call):
    async for question in questions:
        yield question.upper()


async def large(_message, _call):
    for _ in range(3):
        yield bytes(70_000)


UNARY = {"/s/m": echo, "/s/left": left, "/s/refuse": refuse, "/s/broken": broken, "/s/wait": wait}
METHODS = Methods(UNARY, {"/s/count": count, "/s/large": large}, {"/s/upper": upper})


class Caller(Peer):
    """A peer, and the calls of its connection."""

    def __init__(self, http2=None, methods=METHODS, **limits):
        super().__init__(limits=http2 or Limits())
        self.now_s = 100.0
        self.woken = 0
        self.shared = ServerState(
            methods, TransportLimits(**limits), CheckStats(), lambda: self.now_s
        )
        self.calls = ConnectionCalls(
            self.shared, self.connection, PeerName("ipv4:10.0.0.1:1"), self.wake
        )

    def wake(self):
        self.woken += 1

    def feed(self, *parts):
        events = super().feed(*parts)
        if hasattr(self, "calls"):
            assert self.calls.handle(iter(events), self.now_s)
            self.collect()
        return events

    def call(self, stream_id, path="/s/m", message=b"hi", *, body=None, **fields):
        """A whole request."""
        head = self.call_head(stream_id, path, **fields)
        return head + last_data(stream_id, framed(message) if body is None else body)

    def call_head(self, stream_id, path="/s/m", flags=END_HEADERS, **fields):
        named = {**dict(POST), ":path": path}
        named |= {name.replace("_", "-"): value for name, value in fields.items()}
        return self.head(stream_id, list(named.items()), flags)

    async def settled(self):
        """Let what runs get as far as it can, and read what it has sent."""
        for _ in range(10):
            await asyncio.sleep(0)
            self.collect()

    def outcome(self, stream_id):
        """(status, messages) of an answered call; the status is that of HTTP where there is none of gRPC."""
        body, fields = b"", {}
        for sent in self.sent:
            if sent.stream_id == stream_id and sent.type == HEADERS:
                fields |= dict(self.fields(sent.payload))
            elif sent.stream_id == stream_id and sent.type == DATA:
                body += sent.payload
        self.sent = [sent for sent in self.sent if sent.stream_id != stream_id]
        if b"grpc-status" not in fields:
            return int(fields.get(b":status", b"0")), body
        return StatusCode(int(fields[b"grpc-status"])), body

    @property
    def errors(self):
        return {
            str(cause): number for cause, number in self.shared.stats.errors_by_transport.items()
        }
