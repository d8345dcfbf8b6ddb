"""Calls of handlers: not after the deadline, and not above the bounds on work in progress."""

import asyncio

import pytest

from ratelimitd.counters import CheckStats
from ratelimitd.rpc.interface import Methods, RpcError, StatusCode, TransportLimits
from ratelimitd.rpc.messages import framed
from ratelimitd.rpc.requests import run_stream, run_unary
from ratelimitd.rpc.routing import NativeCall, Peer, Route
from ratelimitd.rpc.state import CallTable, OpenCall, ServerState
from tests.http2_peer import data, last_data
from tests.native_caller import Caller


@pytest.mark.parametrize("path", ["/s/m", "/s/count", "/s/upper"])
def test_a_call_late_on_arrival_is_not_started(caller, path):
    caller.feed(caller.call(1, path, grpc_timeout="0S"))
    assert caller.outcome(1) == (StatusCode.DEADLINE_EXCEEDED, b"")
    assert caller.errors == {"deadline_exceeded": 1}


async def test_waiting_calls_are_bounded():
    caller = Caller(max_concurrent_rpcs=1)
    caller.feed(caller.call(1, "/s/wait"), caller.call(3, "/s/wait"), caller.call(5))
    assert caller.outcome(3)[0] is StatusCode.RESOURCE_EXHAUSTED
    assert caller.outcome(5)[0] is StatusCode.OK  # it does not wait
    assert caller.errors == {"too_many_calls": 1}
    caller.calls.end_all(RpcError(StatusCode.UNAVAILABLE, "stopping"))
    caller.collect()
    assert caller.outcome(1)[0] is StatusCode.UNAVAILABLE
    await caller.shared.all_ended()
    assert caller.shared.unary_in_progress == 0
    caller.feed(caller.call(7, "/s/wait"))
    assert list(caller.calls.open) == [7]
    caller.calls.lose_all()
    await caller.shared.all_ended()


def test_above_the_bound_connections_get_their_share_up_to_twice_the_bound():
    shared = ServerState(
        Methods(), TransportLimits(max_concurrent_rpcs=6), CheckStats(), lambda: 0.0
    )
    greedy, *others = [CallTable(shared) for _ in range(6)]
    assert [greedy.take_place() for _ in range(7)] == [True] * 6 + [False]
    shared.connections = 3
    assert [others[0].take_place() for _ in range(3)] == [True, True, False]  # 6 / 3
    assert not greedy.take_place()
    assert [other.take_place() for other in others[1:] for _ in range(2)] == [True] * 4 + [
        False
    ] * 4
    assert shared.unary_in_progress == 12
    greedy.leave_place()
    assert others[3].take_place()


async def test_streams_are_bounded():
    caller = Caller(max_streams=1)
    caller.feed(caller.call_head(1, "/s/upper"), caller.call_head(3, "/s/upper"))
    assert caller.outcome(3)[0] is StatusCode.RESOURCE_EXHAUSTED
    assert caller.errors == {"too_many_streams": 1}
    caller.feed(last_data(1))
    await caller.settled()
    assert caller.shared.streams_in_progress == 0


async def test_an_exception_in_a_handler_ends_only_its_call(caller):
    caller.feed(caller.call(1, "/s/broken"), caller.call(3, "/s/refuse"), caller.call(5))
    assert caller.outcome(1) == (StatusCode.INTERNAL, b"")
    assert caller.outcome(3) == (StatusCode.ABORTED, b"")
    assert caller.outcome(5) == (StatusCode.OK, framed(b"hi"))
    assert caller.errors == {"unexpected": 1}


async def test_a_call_in_pieces_whose_handler_waits_is_added_once(caller):
    caller.feed(caller.call_head(1, "/s/wait"), data(1, framed(b"hi")))
    [open_call] = caller.calls.open.values()
    caller.feed(last_data(1))
    assert list(caller.calls.open.values()) == [open_call]
    assert open_call.task is not None
    assert (caller.shared.open_requests, caller.shared.unary_in_progress) == (1, 1)
    caller.calls.lose_all()
    await caller.shared.all_ended()


class Calls:
    """Records the end of the only call."""

    def __init__(self):
        self.shared = ServerState(Methods(), TransportLimits(), CheckStats(), lambda: 0.0)
        self.shared.unary_in_progress = self.shared.streams_in_progress = 1
        self.call = OpenCall(Route(), NativeCall("/s/m", (), Peer(""), lambda: 0.0), 100)
        self.open = True
        self.room = True
        self.recorded = []

    def leave_place(self):
        self.shared.unary_in_progress -= 1

    def is_open(self, stream_id, open_call):
        return self.open and (stream_id, open_call) == (1, self.call)

    def answer(self, stream_id, message):
        self.recorded.append(("answer", stream_id, message))

    def send(self, stream_id, open_call, message):
        self.recorded.append(("send", stream_id, message))
        return self.room

    def finish(self, stream_id):
        self.recorded.append(("finish", stream_id))

    def fail(self, stream_id, error):
        self.recorded.append(("fail", stream_id, error.code))


@pytest.fixture
def calls():
    return Calls()


async def raising(error):
    raise error


async def test_an_awaited_answer_is_sent(calls):
    async def answer():
        await asyncio.sleep(0)
        return b"done"

    await run_unary(calls, 1, calls.call, answer())
    assert calls.recorded == [("answer", 1, b"done")]
    assert calls.shared.unary_in_progress == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RpcError(StatusCode.ABORTED, "no"), StatusCode.ABORTED),
        (KeyError("x"), StatusCode.INTERNAL),
        (asyncio.CancelledError(), StatusCode.CANCELLED),
    ],
)
async def test_a_handler_that_raises_ends_its_call_with_a_status(calls, error, code):
    await run_unary(calls, 1, calls.call, raising(error))
    assert calls.recorded == [("fail", 1, code)]
    assert calls.shared.unary_in_progress == 0


async def test_a_call_ended_meanwhile_is_not_answered_again(calls):
    calls.open = False
    await run_unary(calls, 1, calls.call, raising(asyncio.CancelledError()))
    assert calls.recorded == []
    assert calls.shared.unary_in_progress == 0


async def numbers(closed=None, error=None):
    try:
        yield b"1"
        yield b"2"
        if error is not None:
            raise error
    finally:
        if closed is not None:
            closed.set()


async def test_a_stream_is_sent_message_by_message_and_finished(calls):
    await run_stream(calls, 1, calls.call, numbers())
    assert calls.recorded == [("send", 1, b"1"), ("send", 1, b"2"), ("finish", 1)]
    assert calls.shared.streams_in_progress == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [(RpcError(StatusCode.ABORTED, "no"), StatusCode.ABORTED), (KeyError(), StatusCode.INTERNAL)],
)
async def test_a_stream_that_fails_ends_with_its_status(calls, error, code):
    await run_stream(calls, 1, calls.call, numbers(error=error))
    assert calls.recorded[2:] == [("fail", 1, code)]


async def test_a_stream_waits_for_room(calls):
    calls.room = False
    running = asyncio.ensure_future(run_stream(calls, 1, calls.call, numbers()))
    await asyncio.sleep(0)
    assert calls.recorded == [("send", 1, b"1")]
    calls.call.room.set()
    await running
    assert calls.recorded[1:] == [("send", 1, b"2"), ("finish", 1)]


async def test_a_cancelled_stream_closes_its_handler(calls):
    calls.room = False
    closed = asyncio.Event()
    running = asyncio.ensure_future(run_stream(calls, 1, calls.call, numbers(closed)))
    await asyncio.sleep(0)
    running.cancel()
    await running
    assert closed.is_set()
    assert calls.recorded[1:] == [("fail", 1, StatusCode.CANCELLED)]
    assert calls.shared.streams_in_progress == 0


async def test_a_stream_ended_meanwhile_is_not_finished_again(calls):
    calls.open = False
    await run_stream(calls, 1, calls.call, numbers())
    assert ("finish", 1) not in calls.recorded


async def test_an_iterator_without_aclose_is_accepted(calls):
    class Nothing:
        def __aiter__(self):
            return self

        async def __anext__(self):
            raise StopAsyncIteration

    await run_stream(calls, 1, calls.call, Nothing())
    assert calls.recorded == [("finish", 1)]
