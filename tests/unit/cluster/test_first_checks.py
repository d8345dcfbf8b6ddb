"""The first checks of buckets that are unknown to a node."""

import pytest

from ratelimitd.errors import StoreUnavailableError
from ratelimitd.ledger.local_view import LocalView
from ratelimitd.model import LIMIT_EXCEEDED, WITHIN_LIMIT
from tests.unit.cluster.world import MS, World, limited, name_of

RULE = limited(10)
DEFECT = 13
"""The cost of a check that cannot be decided."""


class Scene(World):
    """A node without any bucket."""

    def __init__(self):
        super().__init__(RULE, decides_alone=True)

    def ask(self, key=b"a", cost=1, *, peek=False):
        return self.wait(key, cost, peek=peek)

    def spent(self, tokens):
        self.store.spend(b"a", RULE, tokens, self.clock.now_us())

    @property
    def views(self):
        return self.tags[ord("a")].buckets


@pytest.fixture
async def scene():
    return Scene()


async def test_a_bucket_checked_once_is_packed_and_settled(scene):
    answer = scene.ask(cost=4)
    scene.run(MS)
    assert answer.result()[:2] == (True, 6)
    assert (scene.views, len(scene.cache)) == ({}, 1)
    assert scene.cache.take_packed(name_of(b"a")).state[0] == 4
    assert scene.store.spent(b"a") == 4
    assert scene.stats.bucket_missed_total == 1


async def test_checks_during_a_first_check_are_decided_by_its_result(scene):
    answers = [scene.ask(cost=2), scene.ask(cost=3), scene.ask(cost=4)]
    scene.run(5 * MS)
    assert [answer.result()[1] for answer in answers] == [8, 5, 1]
    assert scene.cache.get(b"a") is not None
    assert scene.store.asked("first_check") == [name_of(b"a")]
    assert scene.stats.bucket_missed_total == 1


async def test_a_defect_in_one_check_does_not_affect_those_behind_it(scene, monkeypatch):
    answers = [scene.ask(), scene.ask(cost=DEFECT), scene.ask()]
    decide = LocalView.check

    def check(view, now_us, members, cost):
        if cost == DEFECT:
            raise ZeroDivisionError
        return decide(view, now_us, members, cost)

    monkeypatch.setattr(LocalView, "check", check)
    scene.run(MS)
    assert answers[2].result()[0]
    with pytest.raises(ZeroDivisionError):
        await answers[1]


async def test_an_error_fails_all_waiting_checks_counts_once_and_the_next_check_asks_again(scene):
    scene.store.mode = "down"
    answers = [scene.ask(), scene.ask()]
    scene.run(20 * MS)
    assert {type(answer.result()) for answer in answers} == {StoreUnavailableError}
    assert scene.stats.shared_state_errors_total == 1
    assert len(scene.cache) == 0
    scene.store.mode = "up"
    assert scene.check()[:2] == (True, 9)


@pytest.mark.parametrize("peek", [False, True])
async def test_a_failed_check_is_no_miss(scene, peek):
    scene.store.mode = "down"
    scene.ask(peek=peek)
    scene.run(20 * MS)
    assert scene.stats.bucket_missed_total == 0


async def test_a_decided_peek_is_a_miss(scene):
    scene.ask(peek=True)
    assert scene.stats.bucket_missed_total == 0
    scene.run(MS)
    assert scene.stats.bucket_missed_total == 1


async def test_a_check_whose_caller_left_is_no_miss(scene):
    scene.ask().cancel()
    scene.run(MS)
    assert scene.stats.bucket_missed_total == 0


async def test_a_denied_bucket_gets_a_view_and_is_read_again(scene):
    scene.spent(10)
    answer = scene.ask()
    scene.run(MS)
    assert answer.result()[4] is LIMIT_EXCEEDED
    assert scene.cache.get(b"a").is_watched
    assert len(scene.refresh.queue) == 1


async def test_a_denied_peek_leaves_the_bucket_packed(scene):
    scene.spent(10)
    answer = scene.ask(peek=True)
    scene.run(MS)
    assert answer.result()[4] is LIMIT_EXCEEDED
    assert (scene.cache.get(b"a"), len(scene.refresh.queue)) == (None, 0)


@pytest.mark.parametrize(("before", "cost", "told"), [(3, 3, 1), (3, 2, 0), (6, 1, 0), (0, 9, 1)])
async def test_a_bucket_that_crosses_into_its_last_half_is_published(scene, before, cost, told):
    scene.spent(before)
    answer = scene.ask(cost=cost)
    scene.run(MS)
    assert answer.result()[4] is WITHIN_LIMIT
    scene.gossip.publish()
    assert len(scene.bus.published) == told


async def test_a_watched_bucket_that_is_denied_again_is_watched_once(scene):
    scene.store.mode = "held"
    scene.ask()
    held = scene.store.held_one()
    scene.spent(10)
    scene.open_breaker()
    scene.at_once()
    scene.refresh.queue.watch(scene.cache.get(b"a"), 0)
    held.answer()
    assert len(scene.refresh.queue) == 1
