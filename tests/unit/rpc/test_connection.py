"""The asyncio protocol between a transport and a connection, with a transport that records its calls."""

import asyncio
import gc
import weakref

import pytest

from ratelimitd.counters import CheckStats
from ratelimitd.fair_queue import FairQueue
from ratelimitd.http2.limits import Limits
from ratelimitd.rpc import server as native_server
from ratelimitd.rpc.dispatch import ConnectionCalls
from ratelimitd.rpc.interface import Methods, RpcError, StatusCode, TransportLimits
from ratelimitd.rpc.messages import framed
from ratelimitd.rpc.server import NativeConnection
from ratelimitd.rpc.state import ServerState
from ratelimitd_wire.codes import ErrorCode
from tests.http2_peer import (
    GOAWAY,
    GREETING,
    PING,
    POST,
    RST_STREAM,
    SETTINGS_ACK,
    WINDOW_UPDATE,
    Peer,
    frame,
    frames_of,
    settings,
    window_update,
)


class Transport:
    """A transport that accepts and records all octets."""

    def __init__(self, eof=True, peername=None):
        self.octets = b""
        self.peername = peername
        self.eof = eof
        self.unread = 0
        self.recorded = []

    def get_extra_info(self, name):
        return self.peername if name == "peername" else None

    def set_write_buffer_limits(self, high):
        assert high == native_server.WRITE_BUFFER_BYTES

    def write(self, octets):
        assert octets
        self.octets += octets

    def can_write_eof(self):
        return self.eof

    def get_write_buffer_size(self):
        return self.unread

    def is_closing(self):
        return "close" in self.recorded or "abort" in self.recorded

    def __getattr__(self, name):
        return lambda: self.recorded.append(name)

    def frames(self):
        octets, self.octets = self.octets, b""
        return [sent.type for sent in frames_of(octets)]


class Owner:
    """The part of a server that connections use."""

    def __init__(self, room=True, **limits):
        self.now_s = 100.0
        self.room = room
        self.gone = []

        async def wait(_data, _call):
            await asyncio.Event().wait()

        def slow(_data, _call):
            self.now_s += 3
            return b""

        def left(_data, call):
            return str(call.time_remaining_s()).encode()

        unary = {"/": lambda data, _call: data, "/wait": wait, "/slow": slow, "/left": left}
        methods = Methods(unary)
        limits = TransportLimits(**limits)
        self.shared = ServerState(methods, limits, CheckStats(), lambda: self.now_s)

    def joined(self, _connection):
        return self.room

    def left(self, connection):
        self.gone.append(connection)

    def jitter(self):
        return 0.0

    def connection(self, transport, greeting=GREETING + SETTINGS_ACK):
        connection = NativeConnection(self)
        connection.connection_made(transport)
        if greeting:
            connection.data_received(greeting)
            transport.frames()
        return connection

    @property
    def errors(self):
        return {str(cause): count for cause, count in self.shared.stats.errors_by_transport.items()}


@pytest.fixture
def owner():
    return Owner()


@pytest.fixture
def transport():
    return Transport()


@pytest.fixture
def peer():
    return Peer(greeting=b"")


def post(peer, stream_id, path="/", message=b"hi", **more):
    fields = [(name, path if name == ":path" else value) for name, value in POST]
    fields += [(name.replace("_", "-"), value) for name, value in more.items()]
    return peer.head(stream_id, fields) + frame(0, 1, stream_id, framed(message))


async def turns(number=10):
    for _ in range(number):
        await asyncio.sleep(0)


async def test_a_read_is_answered_by_one_write(owner, transport, peer):
    connection = owner.connection(transport)
    connection.data_received(post(peer, 1) + post(peer, 3))
    assert len(transport.frames()) == 6
    connection.data_received(b"\x00")
    assert (transport.octets, transport.recorded) == (b"", [])


async def test_input_beyond_a_slice_waits_for_the_next_iteration(owner, transport, peer):
    connection = owner.connection(transport)
    calls = Limits().frames_per_slice // 2 + 1
    posts = [post(peer, 2 * number + 1) for number in range(calls)]
    connection.data_received(b"".join(posts))
    assert len(transport.frames()) < 3 * calls
    assert transport.recorded == ["pause_reading"]
    connection.data_received(post(peer, 2 * calls + 1))  # was in flight when reading was paused
    await turns()
    assert len(transport.frames()) >= 3
    assert transport.recorded == ["pause_reading", "resume_reading"]
    connection.data_received(post(peer, 2 * calls + 3))
    assert len(transport.frames()) == 3


async def test_large_calls_of_all_connections_share_an_iteration_behind_small_ones(owner):
    clock = iter(range(1_000))
    owner.shared.queue = FairQueue(lambda: next(clock))  # each step takes the whole budget
    transports = [Transport(peername=("::1", port)) for port in (1, 2)]
    for transport in transports:
        connection, peer = owner.connection(transport), Peer()
        octets = b"".join(post(peer, 2 * n + 1, message=bytes(3_000)) for n in range(2))
        connection.data_received(octets + post(peer, 5))
    # The small call of each connection, and one large call, which uses the budget.
    assert [len(transport.frames()) for transport in transports] == [6, 3]
    answered = []
    for _ in range(6):
        await asyncio.sleep(0)
        answered.append(tuple(len(transport.frames()) for transport in transports))
    assert [each for each in answered if any(each)] == [(3, 0), (0, 3), (0, 3)]


async def test_a_large_call_cancelled_in_the_queue_is_not_started(owner, peer):
    transport = Transport()
    owner.shared.queue.submit("other:1", lambda: None)
    connection = owner.connection(transport)
    large = post(peer, 1, message=bytes(3_000))
    connection.data_received(large + frame(RST_STREAM, 0, 1, bytes(4)))
    assert owner.shared.open_requests == 0
    await turns()
    assert transport.frames() == []


async def test_a_later_answer_is_written_when_it_is_ready(owner, transport, peer):
    connection = owner.connection(transport)
    connection.data_received(post(peer, 1, "/wait"))
    assert transport.frames() == []
    await turns()
    error = RpcError(StatusCode.ABORTED, "")
    connection.calls.answers.fail(1, error)
    connection.calls.answers.fail(1, error)
    assert transport.octets == b""
    await turns()
    assert transport.frames() == [1]


async def test_nothing_is_read_from_a_peer_that_does_not_read(owner, transport, peer):
    connection = owner.connection(transport)
    connection.pause_writing()
    assert connection.calls.answers.blocked
    connection.data_received(post(peer, 1))
    await turns()
    assert transport.octets == b""
    connection.resume_writing()
    assert not connection.calls.answers.blocked
    await turns()
    assert len(transport.frames()) == 3
    assert transport.recorded == ["pause_reading", "resume_reading"]


async def test_a_connection_is_aborted_if_the_server_has_closed(transport):
    owner = Owner(room=False)
    connection = owner.connection(transport, b"")
    assert transport.recorded == ["abort"]
    connection.data_received(GREETING)
    connection.connection_lost(None)
    assert owner.gone == [connection]


async def test_a_lost_connection_cancels_its_handlers(owner, transport, peer):
    connection = owner.connection(transport)
    connection.data_received(post(peer, 1, "/wait"))
    assert connection.eof_received() is False
    connection.connection_lost(OSError())
    await owner.shared.all_ended()
    assert (owner.gone, owner.errors) == ([connection], {"cancelled": 1})
    connection.resume_writing()
    connection.go_away()
    await turns()
    assert transport.octets == b""


@pytest.fixture
def no_collector():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
async def test_a_lost_connection_is_freed_without_the_garbage_collector(owner, transport, peer):
    connection = owner.connection(transport)
    connection.data_received(post(peer, 1) + post(peer, 3, "/wait"))
    connection.connection_lost(None)
    await owner.shared.all_ended()
    kept = weakref.ref(connection)
    owner.gone.clear()
    del connection
    assert kept() is None


@pytest.mark.parametrize(("eof", "recorded"), [(True, "write_eof"), (False, "close")])
async def test_a_broken_peer_can_read_the_reason_before_the_close(owner, eof, recorded):
    transport = Transport(eof=eof)
    connection = owner.connection(transport)
    connection.data_received(frame(PING, 0, 1, bytes(8)))
    assert transport.frames() == [GOAWAY]
    assert transport.recorded == [recorded]
    assert owner.errors == {"protocol": 1}
    connection.data_received(b"more")
    owner.now_s += native_server.LINGER_S
    connection.look(owner.now_s)
    assert transport.recorded == [recorded]
    owner.now_s += 0.1
    connection.look(owner.now_s)
    assert transport.recorded == [recorded, "abort"]


async def test_a_connection_reset_by_the_peer_is_aborted_at_once(owner):
    class Reset(Transport):
        def write_eof(self):
            raise OSError(107, "Transport endpoint is not connected")

    transport = Reset()
    connection = owner.connection(transport)
    connection.data_received(frame(PING, 0, 1, bytes(8)))
    assert transport.recorded == ["abort"]


async def test_the_linger_time_begins_after_the_last_answer_was_sent(owner, transport, peer):
    connection = owner.connection(transport)
    connection.go_away()
    transport.unread = 100_000
    connection.go_away()
    for left in (90_000, 10, 0):
        transport.unread = left
        owner.now_s += 10
        connection.look(owner.now_s)
        assert transport.recorded == ["write_eof"]
    owner.now_s += native_server.LINGER_S + 0.1
    connection.look(owner.now_s)
    assert transport.recorded == ["write_eof", "abort"]


@pytest.mark.parametrize("reads", [False, True])
async def test_a_peer_that_stops_reading_or_reads_too_slowly_is_aborted(owner, transport, reads):
    connection = owner.connection(transport)
    connection.go_away()
    transport.unread = 100_000
    connection.go_away()
    connection.look(owner.now_s)
    for _ in range(4 if reads else 1):
        transport.unread -= reads
        owner.now_s += 15
        connection.look(owner.now_s)
        assert transport.recorded == ["write_eof"]
    owner.now_s += 6
    connection.look(owner.now_s)
    assert transport.recorded == ["write_eof", "abort"]


async def test_reading_resumes_so_that_a_broken_peer_can_read_the_reason(owner, transport, peer):
    connection = owner.connection(transport)
    connection.pause_writing()
    connection.look(owner.now_s)
    owner.now_s += 21
    connection.look(owner.now_s)
    assert transport.recorded == ["pause_reading", "write_eof", "resume_reading"]
    assert owner.errors == {"stalled_window": 1}


async def test_http1_on_the_port_gets_an_answer(owner, transport):
    connection = owner.connection(transport, b"")
    connection.data_received(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert transport.octets.startswith(b"HTTP/1.1 ")
    assert transport.recorded == ["write_eof"]
    assert owner.errors == {"http1": 1}


async def test_a_silent_peer_is_pinged_then_ended(owner, transport):
    connection = owner.connection(transport)
    for passed_s, sent in ((1, []), (60, [PING]), (20, [GOAWAY])):
        owner.now_s += passed_s
        connection.look(owner.now_s)
        assert transport.frames() == sent
    assert owner.errors == {"keepalive_timeout": 1}


async def test_an_old_connection_drains(transport, peer):
    owner = Owner(max_connection_age_ms=1_000)
    connection = owner.connection(transport)
    owner.now_s += 1
    connection.look(owner.now_s)
    assert transport.frames() == [GOAWAY, PING]
    assert transport.recorded == []
    connection.data_received(frame(PING, 1, 0, b"draining"))
    assert transport.frames() == [GOAWAY]
    assert (transport.recorded, owner.errors) == (["write_eof"], {})


async def test_a_draining_connection_ends_with_its_last_call(owner, transport, peer):
    connection = owner.connection(transport)
    connection.data_received(post(peer, 1, "/wait"))
    connection.go_away()
    connection.go_away()
    assert transport.frames() == [GOAWAY, PING, GOAWAY]
    assert transport.recorded == []
    connection.end_calls(RpcError(StatusCode.UNAVAILABLE, "stopping"))
    assert transport.frames() == [1, GOAWAY]
    assert (transport.recorded, owner.errors) == (["write_eof"], {})
    connection.abort()
    assert transport.recorded == ["write_eof", "abort"]
    await owner.shared.all_ended()


async def test_window_updates_for_messages_read_later_are_written(owner, transport):
    connection = owner.connection(transport)
    connection._http2._sender.frame(window_update(0, 1))
    connection._wake()
    connection._wake()
    await turns()
    assert transport.frames() == [WINDOW_UPDATE]


async def test_a_pause_of_writing_within_a_slice_defers_the_rest(owner, transport, peer):
    connection = owner.connection(transport)
    count = Limits().frames_per_slice // 2 + 1
    connection.data_received(b"".join(post(peer, 2 * number + 1) for number in range(count)))
    connection.pause_writing()
    transport.octets = b""
    await turns()
    assert transport.octets == b""
    connection.resume_writing()
    await turns()
    assert transport.octets != b""


async def test_an_unfinished_request_is_timed_out(owner, transport, peer):
    connection = owner.connection(transport)
    connection.data_received(post(peer, 1)[:-11])
    owner.now_s += 61
    connection.look(owner.now_s)
    assert owner.errors["slow_request"] == 1


async def test_too_many_unread_answers_end_the_connection_that_holds_most(peer):
    owner = Owner(max_unread_bytes=1_000)
    owner.shared.connections = 2
    modest, greedy = Transport(), Transport()
    first, second = owner.connection(modest), owner.connection(greedy)
    modest.unread, greedy.unread = 400, 600
    first._flush()
    second._flush()
    assert owner.shared.unread_bytes == 1_000
    assert owner.errors == {}
    greedy.unread = 601
    first._flush()
    second._flush()
    assert (modest.recorded, greedy.recorded) == ([], ["abort"])
    assert owner.errors == {"unread_answers": 1}
    second.connection_lost(None)
    modest.unread = 0
    first.resume_writing()
    assert owner.shared.unread_bytes == 0


async def test_octets_that_wait_for_windows_count_as_unread(owner, transport, peer):
    connection = owner.connection(transport, GREETING + settings(s4=0))
    connection.data_received(post(peer, 1, message=bytes(500)))
    assert owner.shared.unread_bytes == 505
    connection.connection_lost(None)
    assert owner.shared.unread_bytes == 0


def slow(peer, stream_id):
    """A call in pieces, after which the clock is read; its handler takes longer than the time budget."""
    whole = post(peer, stream_id, "/slow")
    return (
        whole[: -len(framed(b"hi")) - 9]
        + frame(0, 0, stream_id, framed(b"hi"))
        + frame(0, 1, stream_id)
    )


SLICE = Limits().frames_per_slice // 2
"""Calls that fill a slice."""


@pytest.mark.parametrize("before", [1, SLICE], ids=["an expensive call", "a slice full of calls"])
async def test_a_deadline_begins_with_the_arrival_of_its_call_not_its_handling(
    owner, transport, peer, before
):
    connection = owner.connection(transport)
    calls = [slow(peer, 1)]
    calls += [post(peer, 2 * number + 1) for number in range(1, before)]
    connection.data_received(b"".join(calls) + post(peer, 2_001, "/left", grpc_timeout="5S"))
    assert framed(b"2.0") not in transport.octets
    await turns()
    assert framed(b"2.0") in transport.octets


async def test_a_deadline_begins_with_the_arrival_of_its_call_behind_deferred_ones(
    owner, transport, peer
):
    connection = owner.connection(transport)
    connection.data_received(slow(peer, 1) + post(peer, 3, "/left", grpc_timeout="9S"))
    owner.now_s += 1
    connection.data_received(post(peer, 5, "/left", grpc_timeout="9S"))
    owner.now_s += 1
    await turns()
    octets = transport.octets
    assert framed(b"4.0") in octets  # arrived 3 + 1 + 1 s ago
    assert framed(b"8.0") in octets


@pytest.fixture
def defect(monkeypatch):
    """Break the handler of events."""
    return lambda: monkeypatch.setattr(ConnectionCalls, "handle", None)


async def test_a_defect_ends_its_connection_and_is_counted(owner, transport, peer, defect):
    connection = owner.connection(transport)
    defect()
    connection.data_received(post(peer, 1))
    [sent] = frames_of(transport.octets)
    assert (sent.type, sent.code) == (GOAWAY, ErrorCode.INTERNAL_ERROR)
    connection.data_received(post(peer, 3))
    connection._wake()
    await turns()
    assert (transport.recorded, owner.errors) == (["write_eof"], {"unexpected": 1})


async def test_a_defect_in_a_later_slice_ends_its_connection(owner, transport, peer, defect):
    connection = owner.connection(transport)
    connection.data_received(slow(peer, 1) + post(peer, 3))
    defect()
    await turns()
    assert transport.frames()[-1] == GOAWAY
    assert (transport.recorded, owner.errors) == (
        ["pause_reading", "close"],
        {"unexpected": 1},
    )


async def test_too_many_unread_answers_end_the_connection_on_resume_writing(transport):
    owner = Owner(max_unread_bytes=1_000)
    owner.shared.connections = 1
    connection = owner.connection(transport)
    connection.pause_writing()
    transport.unread = 1_001
    connection.resume_writing()
    await turns()
    assert transport.recorded[:2] == ["pause_reading", "abort"]
    assert owner.errors == {"unread_answers": 1}
