"""Open requests: entered, left, found by what is to become of them, and counted over one connection and over all."""

import asyncio

import pytest

from ratelimitd.counters import CheckStats
from ratelimitd.rpc.interface import Methods, TransportLimits
from ratelimitd.rpc.routing import HttpFallback, NativeCall, Peer, Route
from ratelimitd.rpc.state import CallTable, ServerState

PLAIN = HttpFallback(b"head", b"body")
BOUNDS = {"max_open_requests": 3, "max_request_bytes_per_connection": 20, "max_request_bytes": 30}


def plan(unary=None):
    made = Route()
    made.unary = unary
    return made


def call(deadline_s=None):
    return NativeCall("/s/m", (), Peer(""), lambda: 0.0, deadline_s)


@pytest.fixture
def shared():
    return ServerState(Methods(), TransportLimits(**BOUNDS), CheckStats(), lambda: 0.0)


@pytest.fixture
def table(shared):
    return CallTable(shared)


def test_a_call_is_there_until_it_leaves(table, shared):
    entered = table.enter(1, plan(), call(), 5.0)
    assert (table.open, entered.began_s, shared.open_requests) == ({1: entered}, 5.0, 1)
    assert table.leave(1) is entered
    assert table.leave(1) is None
    assert (table.open, shared.open_requests) == ({}, 0)


def test_a_request_that_is_not_of_grpc_is_there_until_it_leaves(table, shared):
    table.enter_plain(1, PLAIN, 5.0)
    assert (table.open, table.plain, shared.open_requests) == ({}, {1: (PLAIN, 5.0)}, 1)
    assert table.leave_plain(1) is PLAIN
    assert table.leave_plain(1) is None
    assert (table.plain, shared.open_requests) == ({}, 0)


def test_there_is_room_for_so_many_requests_over_all_connections(table, shared):
    other = CallTable(shared)
    table.enter(1, plan(), call(), 0.0)
    other.enter(1, plan(), call(), 0.0)
    assert table.has_room
    other.enter_plain(3, PLAIN, 0.0)
    assert not table.has_room
    assert not other.has_room
    other.leave(1)
    assert table.has_room


def test_what_a_call_holds_is_counted_once_and_given_back(table, shared):
    entered = table.enter(1, plan(), call(), 0.0)
    for data in (b"\0\0\0\0\x0a", b"12345", b"67890"):
        entered.take(data)
        assert table.may_hold(entered)
        assert table.request_bytes == shared.request_bytes == entered.waiting_bytes
    assert table.request_bytes == 10
    table.leave(1)
    assert table.request_bytes == shared.request_bytes == 0


def held(table, stream_id, size):
    """Whether a call may hold the unfinished message of so many bytes, its prefix among them."""
    entered = table.enter(stream_id, plan(), call(), 0.0)
    entered.take(b"\0\0\0\0\xff" + bytes(size - 5))
    return table.may_hold(entered)


def test_what_calls_hold_is_bounded_on_one_connection_and_over_all(table, shared):
    other = CallTable(shared)
    assert held(table, 1, 20)
    assert not held(table, 3, 5)
    table.leave(3)
    assert held(other, 1, 10)
    assert not held(other, 3, 5)


def test_calls_are_expired_from_their_deadline_on(table):
    for stream_id, deadline_s in ((1, None), (3, 2.0), (5, 1.0)):
        table.enter(stream_id, plan(), call(deadline_s), 0.0)
    assert [table.expired(now_s) for now_s in (0.9, 1.0, 2.0)] == [[], [5], [3, 5]]


async def test_requests_are_unfinished_until_a_handler_has_them(table):
    with_handler = table.enter(1, plan(), call(), 1.0)
    with_handler.task = asyncio.current_task()
    table.enter(3, plan(), call(), 1.0)
    table.enter_plain(5, PLAIN, 2.0)
    assert [table.unfinished(began_s) for began_s in (0.9, 1.0, 2.0)] == [[], [3], [3, 5]]


def test_streams_are_the_calls_without_a_unary_handler(table):
    table.enter(1, plan(unary=lambda message, _call: message), call(), 0.0)
    table.enter(3, plan(), call(), 0.0)
    assert table.streams() == [3]


def test_when_all_leave_nothing_is_counted_any_more(table, shared):
    assert held(table, 1, 10)
    [entered] = table.open.values()
    table.enter_plain(3, PLAIN, 0.0)
    assert table.leave_all() == [entered]
    assert (table.open, table.plain, table.request_bytes) == ({}, {}, 0)
    assert (shared.open_requests, shared.request_bytes) == (0, 0)
