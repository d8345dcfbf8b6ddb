"""The first checks of buckets that a node does not know."""

import asyncio

import pytest

from ratelimitd.cluster.first_checks import FirstChecks
from ratelimitd.cluster.pending import PendingCheck
from ratelimitd.cluster.sync import RefreshQueue
from ratelimitd.errors import StoreUnavailableError
from ratelimitd.model import LIMIT_EXCEEDED, WITHIN_LIMIT
from tests.unit.cluster.world import MS, World, limited, name_of

RULE = limited(10)
DEFECT = 13
"""The cost of a check that cannot be decided."""


class Scene:
    """The meetings of a node whose other parts are those of a world."""

    def __init__(self):
        world = self.world = World(RULE)
        self.rereading, self.heard, self.decided = RefreshQueue(), [], []
        self.meetings = FirstChecks(
            store=world.store,
            tags=world.tags,
            cache=world.cache,
            clock=world.clock,
            stats=world.stats,
            news=world.news,
            rereading=self.rereading,
            hear=lambda bucket, shared: self.heard.append((bucket.name, shared.state)),
            decide=self.decide,
        )

    def decide(self, bucket, question):
        self.decided.append(bucket.name)
        if question.cost == DEFECT:
            raise ZeroDivisionError
        question.tell(bucket.view.peek(question.now_us, question.cost))

    def ask(self, key=b"a", cost=1, *, peek=False):
        answer = asyncio.get_running_loop().create_future()
        question = PendingCheck(RULE, self.world.clock.now_us(), cost, peek=peek, answer=answer)
        self.meetings.wait(key, name_of(key), question)
        return answer

    def spent(self, tokens):
        self.world.store.spend(b"a", RULE, tokens, self.world.clock.now_us())

    @property
    def buckets(self):
        return self.world.tags[ord("a")].buckets


@pytest.fixture
async def scene():
    return Scene()


async def test_a_bucket_that_is_asked_for_once_is_packed_and_nothing_of_it_is_left_to_settle(scene):
    answer = scene.ask(cost=4)
    scene.world.run(MS)
    assert answer.result()[:2] == (True, 6)
    assert (scene.buckets, len(scene.world.cache)) == ({}, 1)
    assert scene.world.cache.take_packed(name_of(b"a")).state[0] == 4
    assert scene.world.store.spent(b"a") == 4
    assert scene.world.stats.bucket_missed_total == 1


async def test_those_that_come_meanwhile_are_decided_by_what_is_known_then(scene):
    answers = [scene.ask(cost=2), scene.ask(cost=3), scene.ask(cost=4)]
    scene.world.run(MS)
    assert [answer.result()[1] for answer in answers] == [8, 5, 4]
    assert scene.decided == [name_of(b"a")] * 2
    assert scene.world.cache.get(b"a") is not None
    assert scene.world.store.asked("meet") == [name_of(b"a")]


async def test_a_defect_met_by_one_is_not_that_of_those_behind_it(scene):
    answers = [scene.ask(), scene.ask(cost=DEFECT), scene.ask()]
    scene.world.run(MS)
    assert answers[2].result()[0]
    with pytest.raises(ZeroDivisionError):
        await answers[1]


async def test_an_error_is_told_to_all_and_is_one_failure(scene):
    scene.world.store.mode = "down"
    answers = [scene.ask(), scene.ask()]
    scene.world.run(20 * MS)
    assert {type(answer.result()) for answer in answers} == {StoreUnavailableError}
    assert scene.world.stats.shared_state_errors_total == 1
    assert len(scene.world.cache) == 0


@pytest.mark.parametrize("peek", [False, True])
async def test_a_check_that_fails_is_no_miss_since_it_is_none_that_looked(scene, peek):
    scene.world.store.mode = "down"
    scene.ask(peek=peek)
    scene.world.run(20 * MS)
    assert scene.world.stats.bucket_missed_total == 0


async def test_a_peek_is_a_miss_once_it_is_decided(scene):
    scene.ask(peek=True)
    assert scene.world.stats.bucket_missed_total == 0
    scene.world.run(MS)
    assert scene.world.stats.bucket_missed_total == 1


async def test_a_check_whose_caller_left_is_no_miss(scene):
    scene.ask().cancel()
    scene.world.run(MS)
    assert scene.world.stats.bucket_missed_total == 0


async def test_a_bucket_that_is_denied_is_in_use_and_read_again(scene):
    scene.spent(10)
    answer = scene.ask()
    scene.world.run(MS)
    assert answer.result()[4] is LIMIT_EXCEEDED
    assert scene.world.cache.get(b"a").is_denied
    assert len(scene.rereading) == 1


async def test_one_that_is_denied_to_who_only_asks_is_not(scene):
    scene.spent(10)
    answer = scene.ask(peek=True)
    scene.world.run(MS)
    assert answer.result()[4] is LIMIT_EXCEEDED
    assert (scene.world.cache.get(b"a"), len(scene.rereading)) == (None, 0)


@pytest.mark.parametrize(("before", "cost", "told"), [(3, 3, 1), (3, 2, 0), (6, 1, 0), (0, 9, 1)])
async def test_others_are_told_of_one_that_crosses_into_its_last_half(scene, before, cost, told):
    scene.spent(before)
    answer = scene.ask(cost=cost)
    scene.world.run(MS)
    assert answer.result()[4] is WITHIN_LIMIT
    scene.world.news.tell()
    assert len(scene.world.bus.published) == told


async def test_of_one_that_is_in_use_after_all_what_the_store_says_is_heard(scene):
    scene.world.store.mode = "held"
    answer = scene.ask(cost=4)
    held = scene.world.store.held_one()
    scene.world.store.mode = "up"
    scene.world.know()
    known = scene.world.cache.get(b"a")
    held.answer()
    assert answer.result()[:2] == (True, 6)
    assert [(name, state[0]) for name, state in scene.heard] == [(name_of(b"a"), 4)]
    assert scene.world.cache.get(b"a") is known


async def test_one_that_is_denied_and_watched_already_is_watched_once(scene):
    scene.world.store.mode = "held"
    scene.ask()
    held = scene.world.store.held_one()
    scene.spent(10)
    scene.world.store.mode = "up"
    scene.world.know()
    scene.rereading.denied(scene.world.cache.get(b"a"), 0)
    held.answer()
    assert len(scene.rereading) == 1
