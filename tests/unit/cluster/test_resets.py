import asyncio

import pytest

from ratelimitd.cluster.resets import reset_buckets
from ratelimitd.errors import StoreOverloadedError, StoreUnavailableError
from ratelimitd.testing import ManualClock
from tests.unit.cluster.world import RULE, FakeStore, ManualTimers, limited, name_of


@pytest.fixture
def store():
    store = FakeStore(ManualTimers(ManualClock()))
    store.mode = "held"
    return store


async def begin(store, *keys):
    rules = [limited(limit) for limit in range(1, len(keys) + 1)]
    task = asyncio.create_task(reset_buckets(store, [*map(name_of, keys)], rules))
    await asyncio.sleep(0)
    return task


async def test_all_are_asked_for_together_and_returned_in_order(store):
    store.spend(b"a", RULE, 5, 7)
    task = await begin(store, b"a", b"b")
    assert store.asked("reset") == [name_of(b"a"), name_of(b"b")]
    for request in reversed(store.held):
        request.answer()
    first, second = await task
    assert (first.generation, first.limit, first.state) == (1, 1, None)
    assert (second.generation, second.limit, second.state) == (1, 2, None)


async def test_nothing_to_reset_is_nothing_to_wait_for(store):
    assert await reset_buckets(store, [], []) == []


async def test_one_that_is_not_answered_fails_all_and_says_nothing_of_the_bucket(store):
    task = await begin(store, b"a", b"b")
    store.held[0].answer()
    store.held[1].lose()
    with pytest.raises(StoreUnavailableError, match="the bucket may be as it was"):
        await task


async def test_one_that_was_not_asked_for_is_told_as_such(store):
    task = await begin(store, b"a")
    store.held[0].done(StoreOverloadedError("full"))
    with pytest.raises(StoreOverloadedError):
        await task


async def test_a_caller_that_leaves_does_not_meet_the_answer(store):
    task = await begin(store, b"a")
    task.cancel()
    await asyncio.wait([task])
    store.held[0].answer()
    assert task.cancelled()
