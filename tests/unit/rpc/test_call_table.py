"""Open calls: added, removed, listed by state, and counted per connection and over all."""

import asyncio
import gzip

import pytest

from ratelimitd.counters import CheckStats
from ratelimitd.rpc.interface import Methods, RpcError, StatusCode, TransportError, TransportLimits
from ratelimitd.rpc.messages import Encoding, Part, framed
from ratelimitd.rpc.routing import HttpFallback, NativeCall, Peer, Route
from ratelimitd.rpc.state import (
    MAX_UNREAD_MESSAGES,
    CallTable,
    MessageStream,
    OpenCall,
    ServerState,
    TickGate,
)

PLAIN = HttpFallback(b"head", b"body")
BOUNDS = {"max_open_requests": 3, "max_request_bytes_per_connection": 20, "max_request_bytes": 30}


def call():
    return NativeCall("/s/m", (), Peer(""), lambda: 0.0)


@pytest.fixture
def shared():
    return ServerState(Methods(), TransportLimits(**BOUNDS), CheckStats(), lambda: 0.0)


@pytest.fixture
def table(shared):
    return CallTable(shared)


def test_a_call_is_open_until_it_leaves(table, shared):
    entered = table.enter(1, Route(), call(), 5.0)
    assert (table.open, entered.began_s, shared.open_requests) == ({1: entered}, 5.0, 1)
    assert table.leave(1) is entered
    assert table.leave(1) is None
    assert (table.open, shared.open_requests) == ({}, 0)


def test_an_http_request_is_open_until_it_leaves(table, shared):
    table.enter_plain(1, PLAIN, 5.0)
    assert (table.open, table.plain, shared.open_requests) == ({}, {1: (PLAIN, 5.0)}, 1)
    assert table.leave_plain(1) is PLAIN
    assert table.leave_plain(1) is None
    assert (table.plain, shared.open_requests) == ({}, 0)


def test_open_requests_are_bounded_over_all_connections(table, shared):
    other = CallTable(shared)
    table.enter(1, Route(), call(), 0.0)
    other.enter(1, Route(), call(), 0.0)
    assert table.has_room
    other.enter_plain(3, PLAIN, 0.0)
    assert not table.has_room
    assert not other.has_room
    other.leave(1)
    assert table.has_room


def test_held_bytes_of_a_call_are_counted_once_and_released(table, shared):
    entered = table.enter(1, Route(), call(), 0.0)
    for data in (b"\0\0\0\0\x0a", b"12345", b"67890"):
        entered.take(data)
        assert table.may_hold(entered)
        assert table.request_bytes == shared.request_bytes == entered.waiting_bytes
    assert table.request_bytes == 10
    table.leave(1)
    assert table.request_bytes == shared.request_bytes == 0


def held(table, stream_id, size):
    """Return whether a call may hold an unfinished message of ``size`` bytes, including its prefix."""
    entered = table.enter(stream_id, Route(), call(), 0.0)
    entered.take(b"\0\0\0\0\xff" + bytes(size - 5))
    return table.may_hold(entered)


def test_held_bytes_are_bounded_per_connection_and_over_all(table, shared):
    other = CallTable(shared)
    assert held(table, 1, 20)
    assert not held(table, 3, 5)
    table.leave(3)
    assert held(other, 1, 10)
    assert not held(other, 3, 5)


def test_leave_all_resets_the_counts(table, shared):
    assert held(table, 1, 10)
    [entered] = table.open.values()
    table.enter_plain(3, PLAIN, 0.0)
    assert table.leave_all() == [entered]
    assert (table.open, table.plain, table.request_bytes) == ({}, {}, 0)
    assert (shared.open_requests, shared.request_bytes) == (0, 0)


@pytest.fixture
def open_call():
    return OpenCall(Route(), call(), 100)


def test_a_call_is_whole_with_its_only_message(open_call):
    open_call.take(framed(b"hello")[:7])
    assert open_call.waiting_bytes == 7
    with pytest.raises(RpcError, match="ended before its message"):
        open_call.whole()
    open_call.take(framed(b"hello")[7:])
    assert open_call.whole() == Part(False, b"hello")
    assert open_call.waiting_bytes == 5


@pytest.mark.parametrize("octets", [b"", b"\x00", framed(b"hello") + b"\x00"])
def test_a_request_that_ends_early_has_no_message(open_call, octets):
    open_call.take(octets)
    with pytest.raises(RpcError) as caught:
        open_call.whole()
    assert caught.value.code is StatusCode.INTERNAL


def test_a_second_message_is_refused(open_call):
    with pytest.raises(RpcError, match="more than one message"):
        open_call.take(framed(b"a") + framed(b"b"))


def test_only_an_end_within_a_message_is_an_error(open_call):
    assert open_call.cut_off() is None
    open_call.take(b"\x00\x00")
    assert open_call.cut_off().code is StatusCode.INTERNAL


async def test_a_handler_is_cancelled_with_its_call_but_not_before_it_has_started(open_call):
    seen = []

    async def handler():
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("ended")

    open_call.cancel()
    open_call.task = asyncio.ensure_future(handler())
    open_call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await open_call.task
    assert seen == ["ended"]


async def test_messages_are_read_in_order_and_acknowledged_when_read():
    acknowledged = []
    messages = MessageStream(Encoding.GZIP, 100, acknowledged.append, TickGate().passed)
    messages.put(Part(False, b"a"), 6)
    messages.put(Part(True, gzip.compress(b"b")), 0)
    messages.end()
    messages.end(RpcError(StatusCode.INTERNAL, "too late to matter"))
    assert acknowledged == []
    assert await anext(messages) == b"a"
    assert acknowledged == [6]
    assert [question async for question in messages] == [b"b"]
    assert acknowledged == [6]


@pytest.fixture
def messages():
    return MessageStream(Encoding.IDENTITY, 100, lambda _size: None, TickGate().passed)


def test_unread_messages_are_bounded_in_number(messages):
    for _ in range(MAX_UNREAD_MESSAGES):
        messages.put(Part(False, b""), 5)
    with pytest.raises(RpcError, match="unread") as caught:
        messages.put(Part(False, b""), 5)
    assert caught.value.code is StatusCode.RESOURCE_EXHAUSTED


async def test_a_reader_waits_for_the_next_message(messages):
    reading = asyncio.ensure_future(anext(messages))
    await asyncio.sleep(0)
    assert not reading.done()
    messages.put(Part(False, b"late"), 9)
    assert await reading == b"late"


async def test_the_error_of_a_stream_is_raised_after_its_valid_messages(messages):
    messages.put(Part(False, b"good"), 9)
    messages.end(RpcError(StatusCode.RESOURCE_EXHAUSTED, "too large"))
    assert await anext(messages) == b"good"
    with pytest.raises(RpcError, match="too large"):
        await anext(messages)


def test_any_other_error_is_internal_without_details_and_counted(shared):
    error = shared.status_of(KeyError("secret"))
    assert (error.code, error.message) == (StatusCode.INTERNAL, "unexpected error")
    assert shared.stats.errors_by_transport == {TransportError.UNEXPECTED: 1}


async def test_all_ended_waits_for_every_started_task(shared):
    done = []

    async def work(number):
        await asyncio.sleep(0)
        done.append(number)
        if number:
            shared.start(work(number - 1))

    shared.start(work(2))
    await shared.all_ended()
    assert done == [2, 1, 0]
