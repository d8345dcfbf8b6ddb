import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ratelimitd.cluster.redis.codec import JOINED
from ratelimitd.cluster.strict_buckets import StrictBuckets
from ratelimitd.errors import BreakerOpenError, RateLimitdError, StoreUnavailableError
from ratelimitd.ledger import local_view
from ratelimitd.ledger.shared_state import OBSERVES, STORE_TIME
from ratelimitd.model import Enforcement
from ratelimitd.testing import ManualClock
from tests.unit.cluster.world import MS, RULE, FakeStore, ManualTimers, World, name_of


class StoreServer:
    def __init__(self):
        self.is_open, self.recorded = False, []

    def open_error(self):
        return BreakerOpenError(7)

    def report(self, result):
        self.recorded.append(result if isinstance(result, RateLimitdError) else "answered")


class Scene:
    def __init__(self, *, callers_time=False):
        self.clock, self.server = ManualClock(), StoreServer()
        self.timers = ManualTimers(self.clock)
        self.store = FakeStore(self.timers)
        self.buckets = StrictBuckets(
            store=self.store,
            tags=[SimpleNamespace(server=self.server)] * 256,
            stored_name=name_of,
            timers=self.timers,
            callers_time=callers_time,
        )

    def wait(self, cost=1, *, peek=False):
        return self.buckets.wait(b"a", RULE, self.clock.now_us(), cost, peek=peek)


@pytest.fixture
async def scene():
    return Scene(callers_time=True)


async def test_the_node_decides_no_check(scene):
    for ask in (scene.buckets.apply, scene.buckets.peek):
        assert ask(b"a", RULE, None, 0, 1) is None


async def test_a_check_is_decided_and_charged_by_the_store(scene):
    answers = [scene.wait(600), scene.wait(600)]
    scene.timers.run(MS)
    assert [answer.result()[:2] for answer in answers] == [(True, 400), (False, 400)]
    assert (scene.buckets.asked_total, scene.buckets.late_total) == (2, 0)
    assert scene.server.recorded == ["answered", "answered"]


async def test_a_peek_charges_nothing(scene):
    answer = scene.wait(600, peek=True)
    scene.timers.run(MS)
    assert answer.result()[:2] == (True, 400)
    assert scene.store.spent(b"a") == 0


@pytest.mark.parametrize("callers_time", [True, False])
async def test_checks_use_the_stores_time_unless_the_callers_is_set(callers_time):
    scene = Scene(callers_time=callers_time)
    scene.store.mode = "held"
    scene.wait()
    (check,) = scene.store.asked("decide")
    assert check.now_us == (scene.clock.now_us() if callers_time else STORE_TIME)


async def test_an_error_is_reported_to_the_check_and_the_breaker(scene):
    scene.store.mode = "down"
    answer = scene.wait()
    scene.timers.run(20 * MS)
    assert isinstance(answer.result(), StoreUnavailableError)
    assert scene.server.recorded == [answer.result()]


async def test_an_open_breaker_sends_no_request(scene):
    scene.server.is_open = True
    assert scene.wait().result().retry_after_us == 7
    assert (scene.store.requests, scene.buckets.asked_total) == ([], 0)


async def test_an_answer_after_the_caller_left_is_ignored(scene):
    answer = scene.wait()
    answer.cancel()
    scene.timers.run(MS)
    assert scene.server.recorded == ["answered"]


async def test_a_reset_makes_the_bucket_full(scene):
    scene.wait(600)
    scene.timers.run(MS)
    resetting = asyncio.create_task(scene.buckets.reset([b"a"], [RULE]))
    await asyncio.sleep(0)
    scene.timers.run(MS)
    await resetting
    assert scene.store.ledger.buckets[name_of(b"a")].generation == 1


# Several buckets


class SharingScene(World):
    """A strict node with real hash tags."""

    def __init__(self, **options):
        super().__init__(RULE)
        self.buckets = StrictBuckets(
            store=self.store,
            tags=self.tags,
            stored_name=name_of,
            timers=self.timers,
            callers_time=True,
            **options,
        )

    def all_of(self, *keys, cost=1, peek=False):
        charges = [(key, RULE, None) for key in keys]
        answer = self.buckets.wait_all(
            charges, self.clock.now_us(), [cost] * len(charges), peek=peek
        )
        self.run(2 * MS)
        return answer.result()


async def test_several_buckets_are_charged_together():
    scene = SharingScene()
    assert scene.buckets.apply_each([], 0, []) is None
    assert [outcome[:2] for outcome in scene.all_of(b"a", b"b", cost=600)] == [(True, 400)] * 2
    assert [outcome[:2] for outcome in scene.all_of(b"a", b"b", cost=600, peek=True)] == [
        (False, 400), (False, 400),
    ]  # fmt: skip
    assert (scene.store.spent(b"a"), scene.buckets.asked_total) == (600, 4)


async def test_each_bucket_has_its_cost():
    scene = SharingScene()
    charges = [(key, RULE, None) for key in (b"a", b"b")]
    scene.buckets.wait_all(charges, scene.clock.now_us(), [7, 400], peek=False)
    scene.run(2 * MS)
    assert (scene.store.spent(b"a"), scene.store.spent(b"b")) == (7, 400)


async def test_charges_of_a_denied_check_are_refunded():
    scene = SharingScene()
    scene.store.spend(b"b", RULE, 1_000, scene.clock.now_us())
    assert [outcome[:2] for outcome in scene.all_of(b"a", b"b", cost=7)] == [
        (True, 1_000), (False, 0),
    ]  # fmt: skip
    assert [outcome[0] for outcome in scene.all_of(b"a", b"b", cost=5)] == [True, False]
    scene.settle()
    assert (scene.store.spent(b"a"), scene.store.spent(b"b")) == (0, 1_000)
    assert (scene.buckets.given_back_total, scene.buckets.kept_total) == (12, 0)
    assert scene.tags[ord("a")].buckets == {}


async def test_refunds_beyond_a_bound_are_counted_as_kept(monkeypatch):
    monkeypatch.setattr(local_view, "MAX_REFUNDS", 1)
    scene = SharingScene()
    scene.store.spend(b"b", RULE, 1_000, scene.clock.now_us())
    charges = [(key, RULE, None) for key in (b"a", b"b")]
    for _ in range(3):
        scene.buckets.wait_all(charges, scene.clock.now_us(), [7] * len(charges), peek=False)
    scene.run(2 * MS)
    scene.settle()
    buckets = scene.buckets
    assert buckets.given_back_total + buckets.kept_total == 21
    assert buckets.kept_total == scene.store.spent(b"a") > 0


async def test_an_unreachable_bucket_has_its_own_error():
    scene = SharingScene()
    scene.store.mode = "down"
    answer = scene.buckets.wait_all([(b"a", RULE, None)], 0, [1], peek=False)
    scene.run(20 * MS)
    assert [type(one) for one in answer.result()] == [StoreUnavailableError]
    scene.open_breaker()
    assert [type(one) for one in scene.all_of(b"a")] == [BreakerOpenError]


async def test_charges_of_concurrently_denied_checks_are_refunded_together():
    scene = SharingScene()
    scene.store.spend(b"b", RULE, 1_000, scene.clock.now_us())
    charges = [(key, RULE, None) for key in (b"a", b"b")]
    for _ in range(3):
        scene.buckets.wait_all(charges, scene.clock.now_us(), [7] * len(charges), peek=False)
    scene.settle()
    scene.run(30 * MS)
    scene.settle()
    assert (scene.store.spent(b"a"), scene.buckets.given_back_total) == (0, 21)


class TogetherScene(SharingScene):
    """All buckets are on one server."""

    def __init__(self, **options):
        super().__init__(**options)
        self.store.decides_together = True


async def test_one_server_decides_all_buckets_of_a_check_together():
    scene = TogetherScene()
    observed = replace(RULE, enforcement=Enforcement.OBSERVE)
    charges = [(b"a", RULE, None), (b"b", observed, None), (b"c", RULE, None)]
    answer = scene.buckets.wait_all(charges, scene.clock.now_us(), [600] * len(charges), peek=True)
    scene.run(2 * MS)
    assert [outcome[:2] for outcome in answer.result()] == [(True, 400)] * 3
    flags = [check.peek for check in scene.store.asked("decide")]
    assert flags == [1 | JOINED, 1 | JOINED | OBSERVES, 1]
    assert scene.buckets.asked_total == 3


async def test_an_unanswered_check_is_an_error_of_each_bucket():
    scene = TogetherScene()
    scene.store.mode = "down"
    charges = [(key, RULE, None) for key in (b"a", b"b")]
    answers = [scene.buckets.wait_all(charges, 0, [1] * len(charges), peek=False) for _ in range(2)]
    answers[1].cancel()
    scene.run(20 * MS)
    assert [type(one) for one in answers[0].result()] == [StoreUnavailableError] * 2
    scene.open_breaker()
    assert [type(one) for one in scene.all_of(b"a", b"b")] == [BreakerOpenError] * 2
