"""Handlers as they are called: not for a caller who no longer waits, and not while too much is in progress."""

import pytest

from ratelimitd.counters import CheckStats
from ratelimitd.rpc.interface import Methods, RpcError, StatusCode, TransportLimits
from ratelimitd.rpc.messages import framed
from ratelimitd.rpc.state import CallTable, ServerState
from tests.http2_peer import data, last_data
from tests.native_caller import Caller


@pytest.fixture
def caller():
    return Caller()


@pytest.mark.parametrize("path", ["/s/m", "/s/count", "/s/upper"])
def test_a_call_that_is_late_on_arrival_is_not_begun(caller, path):
    caller.feed(caller.call(1, path, grpc_timeout="0S"))
    assert caller.outcome(1) == (StatusCode.DEADLINE_EXCEEDED, b"")
    assert caller.errors == {"deadline_exceeded": 1}


async def test_waiting_calls_are_bounded(caller):
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


def test_where_all_places_are_taken_each_connection_may_have_its_share_twice_the_bound_at_most():
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


async def test_streams_are_bounded(caller):
    caller = Caller(max_streams=1)
    caller.feed(caller.call_head(1, "/s/upper"), caller.call_head(3, "/s/upper"))
    assert caller.outcome(3)[0] is StatusCode.RESOURCE_EXHAUSTED
    assert caller.errors == {"too_many_streams": 1}
    caller.feed(last_data(1))
    await caller.settled()
    assert caller.shared.streams_in_progress == 0


async def test_a_handler_that_raises_is_the_end_of_its_call_alone(caller):
    caller.feed(caller.call(1, "/s/broken"), caller.call(3, "/s/refuse"), caller.call(5))
    assert caller.outcome(1) == (StatusCode.INTERNAL, b"")
    assert caller.outcome(3) == (StatusCode.ABORTED, b"")
    assert caller.outcome(5) == (StatusCode.OK, framed(b"hi"))
    assert caller.errors == {"unexpected": 1}


async def test_a_call_in_pieces_whose_handler_waits_is_entered_once(caller):
    caller.feed(caller.call_head(1, "/s/wait"), data(1, framed(b"hi")))
    [open_call] = caller.calls.open.values()
    caller.feed(last_data(1))
    assert list(caller.calls.open.values()) == [open_call]
    assert open_call.task is not None
    assert (caller.shared.open_requests, caller.shared.unary_in_progress) == (1, 1)
    caller.calls.lose_all()
    await caller.shared.all_ended()
