"""Checks on concurrency limits: decided by the shared state under any CONSISTENCY, without taking a slot."""

from dataclasses import replace

import pytest

from ratelimitd.algorithms import DECIDE
from ratelimitd.cluster.strict_buckets import StrictBuckets
from ratelimitd.errors import BreakerOpenError, StoreUnavailableError
from ratelimitd.ledger.shared_holds import HoldCall
from ratelimitd.ledger.shared_state import STORE_TIME, StoreCheck
from ratelimitd.model import Algorithm
from tests.unit.cluster.world import MS, RULE, SECOND, World, name_of

SLOTS = replace(RULE, algorithm=Algorithm.CONCURRENCY, limit=2)
A, S = b"a", b"s"


class Scene(World):
    """A node as ``CONSISTENCY=eventual`` makes it."""

    def take(self, slots=1):
        """Take slots by a hold."""
        keeper = self.store.keeper(S[0])
        for one in range(slots):
            check = StoreCheck(name_of(S), SLOTS, STORE_TIME, 1, 0)
            number = bytes([one]) * 16
            keeper.hold(HoldCall(number, b"digest01", b"attempt1", [check], 60 * SECOND, 100))

    def slots(self, *, peek=False):
        """Return the answer to a check on slots."""
        at_once = self.peek(S, 1, SLOTS) if peek else self.at_once(S, 1, SLOTS)
        assert at_once is None
        answer = self.wait(S, 1, SLOTS, peek=peek)
        self.run(20 * MS)
        return answer.result()

    def both(self, cost=1, *, peek=False):
        """Return the answers of a bucket of tokens and one of slots."""
        charges = [(A, RULE, DECIDE[RULE.algorithm]), (S, SLOTS, DECIDE[SLOTS.algorithm])]
        now_us = self.clock.now_us()
        judge = self.buckets.peek_each if peek else self.buckets.apply_each
        assert judge(charges, now_us, [cost] * 2) is None
        answer = self.buckets.wait_all(charges, now_us, [cost] * 2, peek=peek)
        for _ in range(10):
            self.run(5 * MS)
        return answer.result()


class StrictScene(Scene):
    """A node as ``CONSISTENCY=strict`` makes it."""

    def __init__(self, **options):
        super().__init__(**options)
        self.buckets = StrictBuckets(
            store=self.store,
            tags=self.tags,
            stored_name=name_of,
            timers=self.timers,
            callers_time=True,
        )


@pytest.fixture(params=[Scene, StrictScene])
async def scene(request):
    return request.param()


async def test_each_check_asks_the_store_and_takes_no_slot(scene):
    for _ in range(3):
        assert scene.slots()[:2] == (True, 2)
    scene.take()
    assert scene.slots(peek=True)[:2] == (True, 1)
    scene.take(2)
    assert scene.slots()[:2] == (False, 0)
    assert len(scene.store.asked("decide")) == 5


async def test_no_view_of_slots_is_made(scene):
    scene.slots()
    assert (len(scene.cache), scene.stats.bucket_missed_total) == (0, 0)
    assert not any(tag.buckets for tag in scene.tags)


async def test_two_concurrent_checks_are_both_answered(scene):
    answers = [scene.wait(S, 1, SLOTS) for _ in range(2)]
    scene.run(MS)
    assert [answer.result()[:2] for answer in answers] == [(True, 2)] * 2


async def test_a_denial_by_slots_charges_no_token(scene):
    assert [one[:2] for one in scene.both(3)] == [(True, 997), (True, 2)]
    scene.settle()
    assert scene.store.spent(A) == 3
    scene.take(2)
    assert [one[:2] for one in scene.both(3)] == [(True, 997), (False, 0)]
    scene.settle()
    assert scene.store.spent(A) == 3
    assert scene.buckets.kept_total == 0


async def test_a_denial_by_tokens_reports_the_slots_unchanged(scene):
    scene.take()
    scene.store.spend(A, RULE, 1_000, scene.clock.now_us())
    tokens, slots = scene.both(7)
    assert (tokens[0], slots[:2], slots[3]) == (False, (True, 1), 0)


async def test_an_unavailable_store_is_an_error_even_on_a_node_that_decides_alone():
    scene = Scene(decides_alone=True)
    scene.store.mode = "down"
    assert isinstance(scene.slots(), StoreUnavailableError)
    scene.open_breaker()
    for ask in (scene.at_once, scene.peek, scene.wait):
        with pytest.raises(BreakerOpenError):
            ask(S, 1, SLOTS)


async def test_a_known_bucket_that_a_hold_changed_is_read_again():
    scene = Scene()
    scene.know(A)
    scene.store.spend(A, RULE, 600, scene.clock.now_us())
    scene.refresh.was_changed(name_of(A), True)
    scene.refresh.was_changed(name_of(A), True)
    scene.run(2 * MS)
    assert scene.at_once(A)[:2] == (True, 399)
    assert scene.bus.published == [(A[0], b"D" + name_of(A))]
    scene.gossip.publish()
    scene.refresh.was_changed(name_of(A), False)
    assert len(scene.bus.published) == 1
