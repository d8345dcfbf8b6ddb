"""Any octets to the native transport's calls: a documented outcome, nothing raised, nothing kept."""

import asyncio

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratelimitd.counters import CheckStats
from ratelimitd.http2.connection import Connection
from ratelimitd.rpc.dispatch import ConnectionCalls
from ratelimitd.rpc.interface import Methods, TransportLimits
from ratelimitd.rpc.messages import framed
from ratelimitd.rpc.routing import Peer as PeerName
from ratelimitd.rpc.state import ServerState
from tests.http2_peer import (
    END_HEADERS,
    END_STREAM,
    GREETING,
    POST,
    SETTINGS_ACK,
    Peer,
    data,
    frame,
    rst_stream,
    window_update,
)
from tests.http2_peer import (
    settings as http2_settings,
)

STREAMS = st.sampled_from([1, 3, 5, 7])
FLAGS = st.sampled_from([0, END_STREAM])
FIELDS = st.lists(
    st.sampled_from(
        [
            ("grpc-timeout", "1S"),
            ("grpc-timeout", "0n"),
            ("grpc-timeout", "soon"),
            ("grpc-encoding", "gzip"),
            ("grpc-encoding", "snappy"),
            ("content-type", "text/plain"),
            ("content-length", "7"),
            ("x-bin", "!"),
        ]
    ),
    max_size=2,
)
HEADS = st.tuples(st.just("head"), STREAMS, FLAGS, st.sampled_from(["/u", "/a", "/w", "/b", "/x"]), FIELDS)  # fmt: skip
BODIES = st.one_of(
    st.binary(max_size=12),
    st.binary(max_size=12).map(framed),
    st.lists(st.binary(max_size=4).map(framed), max_size=4).map(b"".join),
    st.binary(max_size=12).map(lambda body: b"\x01" + framed(body)[1:]),
    st.just(b"\x00\xff\xff\xff\xff"),
)
PARTS = st.one_of(
    HEADS,
    st.builds(data, STREAMS, BODIES, FLAGS),
    st.builds(rst_stream, STREAMS),
    st.builds(window_update, st.sampled_from([0, 1, 3]), st.integers(1, 100_000)),
    st.builds(lambda size: http2_settings(s4=size), st.integers(0, 100)),
    st.builds(frame, st.integers(0, 12), st.integers(0, 255), STREAMS, st.binary(max_size=12)),
    st.binary(max_size=12),
    st.just("turn"),
    st.just("expire"),
)


async def waiting(data, _call):
    await asyncio.sleep(0)
    return data


async def watch(data, _call):
    for _ in range(3):
        yield data
        await asyncio.sleep(0)


async def answers(questions, _call):
    async for question in questions:
        yield question


METHODS = Methods(
    unary={"/u": lambda data, _call: data, "/a": waiting},
    server_stream={"/w": watch},
    bidi_stream={"/b": answers},
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(parts=st.lists(PARTS, max_size=25))
async def test_whatever_comes_no_call_outlives_its_connection(parts):
    peer = Peer(greeting=b"")
    shared = ServerState(METHODS, TransportLimits(max_streams=2), CheckStats(), lambda: 5.0)
    connection = Connection()
    calls = ConnectionCalls(shared, connection, PeerName("unix:"), lambda: None)

    def receive(octets):
        events = connection.receive(octets)
        assert calls.handle(iter(events), 5.0)
        while connection.has_more:
            assert calls.handle(iter(connection.receive(b"")), 5.0)
        connection.data_to_send()

    receive(GREETING + SETTINGS_ACK)
    for part in parts:
        if part == "turn":
            await asyncio.sleep(0)
        elif part == "expire":
            calls.expire(1_000.0)
        elif isinstance(part, tuple):
            _, stream_id, flags, path, fields = part
            named = {**dict(POST), ":path": path} | dict(fields)
            receive(peer.head(stream_id, list(named.items()), END_HEADERS | flags))
        else:
            receive(part)
        assert connection.ended or len(calls.open) <= connection.open_streams
    calls.lose_all()
    await shared.all_ended()
    assert (shared.unary_in_progress, shared.streams_in_progress) == (0, 0)
    assert (shared.request_bytes, calls._table.request_bytes, calls.open) == (0, 0, {})
    assert "unexpected" not in map(str, shared.stats.errors_by_transport)
