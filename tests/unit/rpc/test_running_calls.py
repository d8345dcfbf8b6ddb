"""Handlers that take their time, and how their calls end."""

import asyncio

import pytest

from ratelimitd.counters import CheckStats
from ratelimitd.rpc.interface import Methods, RpcError, StatusCode, TransportLimits
from ratelimitd.rpc.requests import run_stream, run_unary
from ratelimitd.rpc.routing import NativeCall, Peer, Route
from ratelimitd.rpc.state import OpenCall, ServerState


class Calls:
    """Writes down what becomes of the one call there is."""

    def __init__(self):
        self.shared = ServerState(Methods(), TransportLimits(), CheckStats(), lambda: 0.0)
        self.shared.unary_in_progress = self.shared.streams_in_progress = 1
        self.call = OpenCall(Route(), NativeCall("/s/m", (), Peer(""), lambda: 0.0), 100)
        self.open = True
        self.room = True
        self.told = []

    def leave_place(self):
        self.shared.unary_in_progress -= 1

    def is_open(self, stream_id, open_call):
        return self.open and (stream_id, open_call) == (1, self.call)

    def answer(self, stream_id, message):
        self.told.append(("answer", stream_id, message))

    def send(self, stream_id, open_call, message):
        self.told.append(("send", stream_id, message))
        return self.room

    def finish(self, stream_id):
        self.told.append(("finish", stream_id))

    def fail(self, stream_id, error):
        self.told.append(("fail", stream_id, error.code))


@pytest.fixture
def calls():
    return Calls()


async def raising(error):
    raise error


async def test_an_answer_that_was_waited_for_is_given(calls):
    async def answer():
        await asyncio.sleep(0)
        return b"done"

    await run_unary(calls, 1, calls.call, answer())
    assert calls.told == [("answer", 1, b"done")]
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
    assert calls.told == [("fail", 1, code)]
    assert calls.shared.unary_in_progress == 0


async def test_a_call_that_was_ended_meanwhile_is_not_answered_again(calls):
    calls.open = False
    await run_unary(calls, 1, calls.call, raising(asyncio.CancelledError()))
    assert calls.told == []
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
    assert calls.told == [("send", 1, b"1"), ("send", 1, b"2"), ("finish", 1)]
    assert calls.shared.streams_in_progress == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [(RpcError(StatusCode.ABORTED, "no"), StatusCode.ABORTED), (KeyError(), StatusCode.INTERNAL)],
)
async def test_a_stream_that_fails_ends_with_its_status(calls, error, code):
    await run_stream(calls, 1, calls.call, numbers(error=error))
    assert calls.told[2:] == [("fail", 1, code)]


async def test_a_stream_waits_for_room(calls):
    calls.room = False
    running = asyncio.ensure_future(run_stream(calls, 1, calls.call, numbers()))
    await asyncio.sleep(0)
    assert calls.told == [("send", 1, b"1")]
    calls.call.room.set()
    await running
    assert calls.told[1:] == [("send", 1, b"2"), ("finish", 1)]


async def test_a_stream_that_is_cancelled_closes_its_handler(calls):
    calls.room = False
    closed = asyncio.Event()
    running = asyncio.ensure_future(run_stream(calls, 1, calls.call, numbers(closed)))
    await asyncio.sleep(0)
    running.cancel()
    await running
    assert closed.is_set()
    assert calls.told[1:] == [("fail", 1, StatusCode.CANCELLED)]
    assert calls.shared.streams_in_progress == 0


async def test_a_stream_that_was_ended_meanwhile_is_not_finished_again(calls):
    calls.open = False
    await run_stream(calls, 1, calls.call, numbers())
    assert ("finish", 1) not in calls.told


async def test_an_iterator_that_cannot_be_closed_need_not_be(calls):
    class Nothing:
        def __aiter__(self):
            return self

        async def __anext__(self):
            raise StopAsyncIteration

    await run_stream(calls, 1, calls.call, Nothing())
    assert calls.told == [("finish", 1)]
