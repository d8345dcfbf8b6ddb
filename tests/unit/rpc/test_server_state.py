"""What connections share: counts, tasks, and what an error means."""

import asyncio

import pytest

from ratelimitd.counters import CheckStats
from ratelimitd.rpc.interface import Methods, RpcError, StatusCode, TransportError, TransportLimits
from ratelimitd.rpc.state import ServerState


@pytest.fixture
def shared():
    return ServerState(Methods(), TransportLimits(), CheckStats(), lambda: 0.0)


def test_an_rpc_error_is_its_own_status(shared):
    error = RpcError(StatusCode.NOT_FOUND, "gone")
    assert shared.status_of(error) is error
    assert shared.stats.errors_by_transport == {}


def test_any_other_error_is_internal_tells_nothing_and_is_counted(shared):
    error = shared.status_of(KeyError("secret"))
    assert (error.code, error.message) == (StatusCode.INTERNAL, "unexpected error")
    assert shared.stats.errors_by_transport == {TransportError.UNEXPECTED: 1}


async def test_everything_that_was_started_is_waited_for(shared):
    done = []

    async def work(number):
        await asyncio.sleep(0)
        done.append(number)
        if number:
            shared.start(work(number - 1))

    shared.start(work(2))
    await shared.all_ended()
    assert done == [2, 1, 0]
