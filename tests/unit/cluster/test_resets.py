import asyncio

import pytest

from ratelimitd.cluster.gossip import reset_buckets
from ratelimitd.errors import StoreMovingError, StoreOverloadedError, StoreUnavailableError
from ratelimitd.testing import ManualClock
from tests.unit.cluster.world import RULE, FakeStore, ManualTimers, limited, name_of


@pytest.fixture
def store():
    store = FakeStore(ManualTimers(ManualClock()))
    store.mode = "held"
    return store


@pytest.fixture
def states():
    """Buckets reported as reset, with their new states."""
    return {}


@pytest.fixture
def begin(store, states):
    async def begin(*keys):
        rules = [limited(limit) for limit in range(1, len(keys) + 1)]
        names = [*map(name_of, keys)]
        task = asyncio.create_task(reset_buckets(store, names, rules, states.__setitem__, now_us=0))
        await asyncio.sleep(0)
        return task

    return begin


async def test_all_resets_are_sent_together_and_reported_as_they_are_answered(store, begin, states):
    store.spend(b"a", RULE, 5, 7)
    task = await begin(b"a", b"b")
    assert store.asked("reset") == [name_of(b"a"), name_of(b"b")]
    for request in reversed(store.held):
        request.answer()
    await task
    assert [*states] == [name_of(b"b"), name_of(b"a")]
    assert [(each.generation, each.limit, each.state) for each in states.values()] == [
        (1, 2, None),
        (1, 1, None),
    ]


async def test_an_empty_reset_returns_at_once(store, states):
    await reset_buckets(store, [], [], states.__setitem__, now_us=0)
    assert states == {}


@pytest.mark.parametrize("lost", [0, 1])
async def test_one_unanswered_reset_fails_the_call_and_the_others_are_reported(
    store, begin, states, lost
):
    task = await begin(b"a", b"b")
    other = store.held[1 - lost]
    store.held[lost].lose()
    other.answer()
    with pytest.raises(StoreUnavailableError, match="the bucket may not have been reset"):
        await task
    assert states.keys() == {other.subject}


async def test_a_refused_reset_says_why(store, begin):
    task = await begin(b"a")
    store.held[0].done(StoreMovingError("the shared state answered TRYAGAIN"))
    cause = "^the bucket may not have been reset: the shared state answered TRYAGAIN$"
    with pytest.raises(StoreUnavailableError, match=cause):
        await task


async def test_a_reset_that_was_not_sent_raises_overload(store, begin):
    task = await begin(b"a")
    store.held[0].done(StoreOverloadedError("full"))
    with pytest.raises(StoreOverloadedError):
        await task


async def test_an_answer_after_the_caller_left_is_ignored(store, begin):
    task = await begin(b"a")
    task.cancel()
    await asyncio.wait([task])
    store.held[0].answer()
    assert task.cancelled()
