"""Calls that are not answered yet: their one message, or their many."""

import asyncio
import gzip

import pytest

from ratelimitd.rpc.interface import RpcError, StatusCode
from ratelimitd.rpc.messages import Encoding, Part, framed
from ratelimitd.rpc.routing import NativeCall, Peer, Route
from ratelimitd.rpc.state import MAX_UNREAD_QUESTIONS, OpenCall, Questions, TickGate


@pytest.fixture
def call():
    return OpenCall(Route(), NativeCall("/s/m", (), Peer(""), lambda: 0.0), 100)


def test_a_call_is_whole_when_its_one_message_is(call):
    call.take(framed(b"hello")[:7])
    assert call.waiting_bytes == 7
    with pytest.raises(RpcError, match="ended before its message"):
        call.whole()
    call.take(framed(b"hello")[7:])
    assert call.whole() == Part(False, b"hello")
    assert call.waiting_bytes == 5


@pytest.mark.parametrize("octets", [b"", b"\x00", framed(b"hello") + b"\x00"])
def test_a_request_that_ends_too_early_has_no_message(call, octets):
    call.take(octets)
    with pytest.raises(RpcError) as caught:
        call.whole()
    assert caught.value.code is StatusCode.INTERNAL


def test_a_second_message_is_one_too_many(call):
    with pytest.raises(RpcError, match="more than one message"):
        call.take(framed(b"a") + framed(b"b"))


def test_only_an_end_within_a_message_is_a_cut(call):
    assert call.cut_off() is None
    call.take(b"\x00\x00")
    assert call.cut_off().code is StatusCode.INTERNAL


async def test_what_runs_for_a_call_is_cancelled_with_it_but_not_before_it_has_begun(call):
    seen = []

    async def handler():
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("ended")

    call.cancel()
    call.task = asyncio.ensure_future(handler())
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call.task
    assert seen == ["ended"]


async def test_questions_are_read_in_order_and_acknowledged_as_they_are_read():
    acknowledged = []
    questions = Questions(Encoding.GZIP, 100, acknowledged.append, TickGate().passed)
    questions.put(Part(False, b"a"), 6)
    questions.put(Part(True, gzip.compress(b"b")), 0)
    questions.end()
    questions.end(RpcError(StatusCode.INTERNAL, "too late to matter"))
    assert acknowledged == []
    assert await anext(questions) == b"a"
    assert acknowledged == [6]
    assert [question async for question in questions] == [b"b"]
    assert acknowledged == [6]


def test_what_nobody_reads_is_bounded_in_number():
    questions = Questions(Encoding.IDENTITY, 100, lambda _size: None, TickGate().passed)
    for _ in range(MAX_UNREAD_QUESTIONS):
        questions.put(Part(False, b""), 5)
    with pytest.raises(RpcError, match="unread") as caught:
        questions.put(Part(False, b""), 5)
    assert caught.value.code is StatusCode.RESOURCE_EXHAUSTED


async def test_who_reads_faster_than_is_asked_waits():
    questions = Questions(Encoding.IDENTITY, 100, lambda _size: None, TickGate().passed)
    reading = asyncio.ensure_future(anext(questions))
    await asyncio.sleep(0)
    assert not reading.done()
    questions.put(Part(False, b"late"), 9)
    assert await reading == b"late"


async def test_what_is_wrong_with_a_stream_comes_behind_its_good_messages():
    questions = Questions(Encoding.IDENTITY, 100, lambda _size: None, TickGate().passed)
    questions.put(Part(False, b"good"), 9)
    questions.end(RpcError(StatusCode.RESOURCE_EXHAUSTED, "too large"))
    assert await anext(questions) == b"good"
    with pytest.raises(RpcError, match="too large"):
        await anext(questions)
