"""A node's side of holds on shared buckets, with a store whose answers the test decides."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ratelimitd.algorithms import DECIDE
from ratelimitd.cluster.holds import SharedHolds
from ratelimitd.errors import (
    BreakerOpenError,
    CheckInvalidError,
    HoldEndedError,
    HoldSettledError,
    HoldsFullError,
    StoreCorruptError,
    StoreMisconfiguredError,
    StoreUnavailableError,
)
from ratelimitd.ledger.holds import GRACE_S, MIN_ENDS, STEP, Hold
from ratelimitd.ledger.shared_holds import Step
from ratelimitd.ledger.shared_state import OBSERVES, STORE_TIME
from ratelimitd.model import Algorithm, Calendar, Enforcement, Period
from ratelimitd.testing import ManualClock
from tests.unit.cluster.test_strict_buckets import StoreServer
from tests.unit.cluster.world import MS, RULE, SECOND, FakeStore, ManualTimers, name_of

NUMBER = b"a number of 16 B"
DIGEST = b"digest01"
SLOTS = replace(RULE, algorithm=Algorithm.CONCURRENCY, limit=2, window_seconds=30)
OBSERVED = replace(RULE, enforcement=Enforcement.OBSERVE)


class Scene:
    """A node's holds, over one server or a Cluster."""

    def __init__(self, *, in_cluster=False, store_time=False, **options):
        self.clock = ManualClock()
        self.timers = ManualTimers(self.clock)
        self.store = FakeStore(self.timers)
        self.store.decides_together = not in_cluster
        self.servers = [StoreServer() for _ in range(256)] if in_cluster else [StoreServer()] * 256
        self.changed = []
        self.holds = SharedHolds(
            store=self.store,
            tags=[SimpleNamespace(server=server) for server in self.servers],
            stored_name=name_of,
            clock=self.clock,
            timers=self.timers,
            store_time=store_time,
            changed=lambda name, is_low: self.changed.append((name[:1], is_low)),
            **options,
        )

    def asked(self, *keys, cost=1, number=NUMBER, digest=DIGEST, ttl_s=60, limits=None):
        """Return a hold to be made."""
        charges = [
            (key, limit, DECIDE[limit.algorithm])
            for key, limit in zip(keys, limits or [RULE] * len(keys), strict=True)
        ]
        return Hold(number, digest, charges, self.clock.now_us(), cost, ttl_s * SECOND)

    async def run(self, call, us=MS):
        """Return the result of a call, advancing the clock until it is done."""
        task = asyncio.ensure_future(call)
        for _ in range(100):
            await asyncio.sleep(0)
            if task.done():
                break
            self.timers.run(us)
        self.timers.run(MS)
        return await task

    async def hold(self, *keys, **what):
        return await self.run(self.holds.hold(self.asked(*keys, **what)))

    async def settle(self, actual, *keys, number=NUMBER):
        limits = dict.fromkeys(map(name_of, keys))
        return await self.run(self.holds.settle(number, limits, actual, self.clock.now_us()))

    async def extend(self, ttl_s, *keys, number=NUMBER):
        names = [*map(name_of, keys)]
        now_us = self.clock.now_us()
        return await self.run(self.holds.extend(number, names, ttl_s * SECOND, now_us))

    def spent(self, key):
        """Return the count of a fixed window."""
        kept = self.store.keeper(key[0]).buckets.get(name_of(key))
        return kept.shared.state[0] if kept is not None and kept.shared.state else 0

    def withdrawn(self):
        """Return the buckets of withdrawn attempts."""
        steps = self.store.asked("step")
        return [[name[:1] for name in one.names] for one in steps if one.step is Step.WITHDRAW]

    async def deny(self):
        """Make a hold that the server of ``b`` denies; the refund at that of ``a`` is in flight."""
        await self.hold(b"b", cost=600)
        self.store.mode = "held"
        asked = self.asked(b"a", b"b", cost=600, number=b"another number..")
        task = asyncio.ensure_future(self.holds.hold(asked))
        await asyncio.sleep(0)
        held, self.store.held = self.store.held, []
        for request in held:
            request.answer()
        assert not (await task).expire_us

    @property
    def now_us(self):
        return self.store.time_us + self.clock.monotonic_us()


@pytest.fixture
async def scene():
    return Scene()


@pytest.fixture
async def cluster():
    return Scene(in_cluster=True)


def left(outcomes):
    return [outcome and outcome[:2] for outcome in outcomes]


# One server


async def test_a_hold_is_charged_and_ends_by_the_stores_clock(scene):
    made_us = scene.now_us + MS
    held = await scene.hold(b"a", b"b", cost=600)
    assert left(held.outcomes) == [(True, 400)] * 2
    assert held.expire_us == made_us + 60 * SECOND
    assert (scene.spent(b"a"), scene.spent(b"b")) == (600, 600)
    assert len(scene.store.asked("hold")) == 1
    assert scene.servers[0].recorded == ["answered"]


async def test_a_settle_charges_the_actual_cost(scene):
    await scene.hold(b"a", b"b", cost=600)
    settled = await scene.settle(100, b"a", b"b")
    assert settled[:2] == (True, True)
    assert left(settled.outcomes) == [(True, 900)] * 2
    again = await scene.settle(100, b"a", b"b")
    assert again == settled._replace(is_first=False)
    assert scene.spent(b"a") == 100


async def test_a_settle_above_the_held_tokens_charges_the_rest(scene):
    await scene.hold(b"a", cost=600)
    settled = await scene.settle(1_500, b"a")
    assert (scene.spent(b"a"), left(settled.outcomes)) == (1_500, [(True, 0)])


async def test_a_second_settle_with_another_cost_is_refused(scene):
    await scene.hold(b"a")
    await scene.settle(0, b"a")
    with pytest.raises(HoldSettledError, match=r"^actual:"):
        await scene.settle(1, b"a")
    with pytest.raises(HoldSettledError, match=r"^hold: the hold was settled before$"):
        await scene.extend(60, b"a")


async def test_a_settle_of_an_ended_hold_is_refused(scene):
    await scene.hold(b"a", ttl_s=1)
    scene.timers.run(2 * SECOND)
    for call in (scene.settle(0, b"a"), scene.extend(60, b"a")):
        with pytest.raises(HoldEndedError):
            await call


async def test_a_missing_hold_is_unknown(scene):
    assert await scene.settle(0, b"a") == (False, False, ())
    assert await scene.extend(60, b"a") is None


async def test_a_repeated_hold_gets_the_first_answer(scene):
    held = await scene.hold(b"a", cost=600)
    assert await scene.hold(b"a", cost=600) == held._replace(is_first=False)
    assert scene.spent(b"a") == 600
    await scene.settle(0, b"a")
    with pytest.raises(CheckInvalidError, match="was settled"):
        await scene.hold(b"a", cost=600)
    assert scene.spent(b"a") == 0


async def test_a_repeated_hold_returns_its_original_buckets(scene):
    held = await scene.hold(b"a", b"b", cost=600)
    assert await scene.hold(b"c", b"b", cost=600) == held._replace(
        names=[*reversed(held.names)], is_first=False
    )
    assert (scene.spent(b"b"), scene.spent(b"c")) == (600, 0)
    settled = await scene.settle(100, *(name[:1] for name in held.names))
    assert (settled.is_first, scene.spent(b"a"), scene.spent(b"b")) == (True, 100, 100)


async def test_the_number_of_another_check_is_refused(scene):
    await scene.hold(b"a", cost=600)
    with pytest.raises(CheckInvalidError):
        await scene.hold(b"a", cost=5, digest=b"digest02")
    assert scene.spent(b"a") == 600


async def test_a_hold_that_is_denied_changes_nothing(scene):
    await scene.hold(b"a", cost=600)
    held = await scene.hold(b"a", b"b", cost=600, number=b"another number..")
    assert (left(held.outcomes), held.expire_us) == ([(False, 400), (True, 1_000)], 0)
    assert (scene.spent(b"a"), scene.spent(b"b")) == (600, 0)
    assert not scene.withdrawn()


async def test_an_observing_limit_denies_no_hold(scene):
    held = await scene.hold(b"a", b"b", cost=2_000, limits=[OBSERVED, replace(RULE, limit=3_000)])
    assert left(held.outcomes) == [(False, 1_000), (True, 1_000)]
    assert [check.peek for check in scene.store.asked("hold")[0].checks] == [OBSERVES, 0]
    # A settle names only the charged buckets.
    assert (await scene.settle(0, b"b")).is_first


async def test_the_slot_of_a_hold_is_free_when_it_is_settled(scene):
    numbers = [bytes([one]) * 16 for one in range(3)]
    made = [await scene.hold(b"s", limits=[SLOTS], cost=9, number=one) for one in numbers]
    assert [left(held.outcomes) for held in made] == [[(True, 1)], [(True, 0)], [(False, 0)]]
    settled = await scene.settle(5, b"s", number=numbers[0])
    assert left(settled.outcomes) == [(True, 1)]
    assert (await scene.hold(b"s", limits=[SLOTS], number=numbers[2])).expire_us


async def test_a_slot_is_kept_for_a_window_at_most(scene):
    made_us = scene.now_us + MS
    held = await scene.hold(b"s", limits=[SLOTS], ttl_s=20)
    assert held.expire_us == made_us + 20 * SECOND
    scene.timers.run(15 * SECOND)
    assert await scene.extend(60, b"s") == made_us + 30 * SECOND


async def test_buckets_are_charged_at_the_time_of_the_hold_or_of_the_store():
    monthly = replace(RULE, calendar=Calendar(Period.MONTH, "UTC"))
    for store_time, times in ((False, {0}), (True, {STORE_TIME, 0})):
        scene = Scene(store_time=store_time)
        asked = scene.asked(b"a", b"b", limits=[RULE, monthly])._replace(now_us=0)
        await scene.run(scene.holds.hold(asked))
        await scene.settle(1, b"a")
        [call], [step] = scene.store.asked("hold"), scene.store.asked("step")
        assert {check.now_us for check in call.checks} == times
        assert call.checks[1].now_us == 0
        assert step.at_us == (STORE_TIME if store_time else scene.clock.now_us() - 2 * MS)


async def test_changes_by_holds_are_reported(scene):
    await scene.hold(b"a", b"s", cost=600, limits=[RULE, SLOTS])
    assert scene.changed == [(b"a", True)]
    await scene.settle(600, b"a", b"s")
    assert scene.changed == [(b"a", True)]
    await scene.hold(b"b", number=b"another number..")
    await scene.settle(700, b"b", number=b"another number..")
    assert scene.changed[1:] == [(b"b", False), (b"b", True)]


async def test_an_unanswered_call_is_repeated_and_applied_once(scene):
    scene.store.mode = "held"
    task = asyncio.ensure_future(scene.holds.hold(scene.asked(b"a", cost=600)))
    await asyncio.sleep(0)
    scene.store.held_one().lose()
    scene.store.mode = "up"
    [again] = scene.store.held
    again.answer()
    assert left((await task).outcomes) == [(True, 400)]
    assert scene.spent(b"a") == 600
    assert [type(one) for one in scene.servers[0].recorded] == [StoreUnavailableError, str]


async def test_a_hold_whose_answer_is_lost_is_withdrawn(scene):
    scene.store.mode = "deaf"
    task = asyncio.ensure_future(scene.holds.hold(scene.asked(b"a", cost=600)))
    await asyncio.sleep(0)
    scene.timers.run(39 * MS)
    scene.store.mode = "up"
    with pytest.raises(StoreUnavailableError):
        await scene.run(task)
    scene.timers.run(10 * MS)
    assert (scene.spent(b"a"), scene.withdrawn()) == (0, [[b"a"]])


@pytest.mark.parametrize("error", [StoreMisconfiguredError("a password"), StoreCorruptError("?")])
async def test_a_permanent_error_is_not_retried(scene, error):
    scene.store.mode = "held"
    task = asyncio.ensure_future(scene.settle(0, b"a"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    scene.store.held_one().fail(error)
    with pytest.raises(type(error)):
        await task
    assert not scene.store.held


async def test_a_server_whose_breaker_is_open_is_not_asked(scene):
    scene.servers[0].is_open = True
    for call in (scene.hold(b"a"), scene.settle(0, b"a"), scene.extend(1, b"a")):
        with pytest.raises(BreakerOpenError):
            await call
    assert not scene.store.requests


async def test_a_settle_without_buckets_is_unknown(scene):
    assert await scene.settle(0) == (False, False, ())


async def test_a_settle_takes_effect_after_its_caller_left(scene):
    await scene.hold(b"a", cost=600)
    task = asyncio.ensure_future(scene.holds.settle(NUMBER, {name_of(b"a"): None}, 0, 0))
    await asyncio.sleep(0)
    task.cancel()
    scene.timers.run(MS)
    assert scene.spent(b"a") == 0


# A Cluster


async def test_in_a_cluster_each_hash_tag_is_requested_concurrently(cluster):
    held = await cluster.hold(b"a", b"b", b"ab", cost=600)
    assert left(held.outcomes) == [(True, 400)] * 3
    calls = cluster.store.asked("hold")
    assert [[check.name[:2] for check in call.checks] for call in calls] == [
        [b"a\0", b"ab"],
        [b"b\0"],
    ]
    settled = await cluster.settle(0, b"a", b"b", b"ab")
    assert left(settled.outcomes) == [(True, 1_000)] * 3
    assert settled.is_first


async def test_in_a_cluster_all_parts_of_a_hold_end_with_its_slot(cluster):
    made = {"ttl_s": 3_600, "limits": [RULE, SLOTS]}
    held = await cluster.hold(b"a", b"b", cost=5, **made)
    assert await cluster.extend(3_600, b"a", b"b") == held.expire_us
    cluster.clock.advance(seconds=SLOTS.window_seconds + 1)
    with pytest.raises(HoldEndedError):
        await cluster.settle(9, b"a", b"b")
    assert cluster.spent(b"a") == 5
    cluster.clock.advance(seconds=GRACE_S)
    assert (await cluster.hold(b"a", b"b", cost=5, **made)).is_first
    assert cluster.spent(b"a") == 10


async def test_in_a_cluster_charges_of_a_denied_hold_are_refunded(cluster):
    await cluster.hold(b"b", cost=600)
    held = await cluster.hold(b"a", b"b", cost=600, number=b"another number..")
    assert (left(held.outcomes), held.expire_us) == ([(True, 1_000), (False, 400)], 0)
    assert (cluster.spent(b"a"), cluster.withdrawn()) == (0, [[b"a"]])
    assert cluster.changed[1:] == [(b"a", False)]


async def test_in_a_cluster_a_lost_withdrawal_is_repeated(cluster):
    await cluster.deny()
    for _ in range(2):
        cluster.store.held_one().fail()
        cluster.timers.run(SECOND)
    assert cluster.spent(b"a") == 600
    cluster.store.held_one().answer()
    assert cluster.spent(b"a") == 0


async def test_in_a_cluster_a_withdrawal_ends_after_its_retries(cluster):
    await cluster.deny()
    cluster.servers[ord("a")].is_open = True
    cluster.store.held_one().fail()
    cluster.timers.run(SECOND)
    assert not cluster.store.held


async def test_in_a_cluster_an_unavailable_server_withdraws_the_charges_of_the_others(cluster):
    cluster.store.mode = "held"
    task = asyncio.ensure_future(cluster.holds.hold(cluster.asked(b"a", b"b", cost=600)))
    await asyncio.sleep(0)
    of_a, of_b = cluster.store.held
    cluster.store.held = []
    of_a.answer()
    of_b.fail()
    cluster.servers[ord("b")].is_open = True
    cluster.store.held_one().fail()
    cluster.store.mode = "up"
    with pytest.raises(StoreUnavailableError):
        await task
    cluster.timers.run(MS)
    # The unavailable server's state is unknown, and it is not asked.
    assert (cluster.spent(b"a"), cluster.withdrawn()) == (0, [[b"a"]])


async def test_in_a_cluster_an_open_breaker_does_not_hide_the_denial_of_another_server(cluster):
    await cluster.hold(b"a", cost=600)
    cluster.servers[ord("b")].is_open = True
    held = await cluster.hold(b"b", b"a", cost=600, number=b"another number..")
    assert (left(held.outcomes), held.expire_us) == ([None, (False, 400)], 0)
    assert cluster.withdrawn() == []


async def test_in_a_cluster_an_open_breaker_withdraws_the_charges_of_other_servers(cluster):
    cluster.servers[ord("b")].is_open = True
    with pytest.raises(BreakerOpenError):
        await cluster.hold(b"a", b"b", cost=600)
    assert (cluster.spent(b"a"), cluster.withdrawn()) == (0, [[b"a"]])


async def test_in_a_cluster_a_hold_is_made_without_an_observing_limit_behind_a_breaker(cluster):
    cluster.servers[ord("b")].is_open = True
    held = await cluster.hold(b"b", b"a", cost=600, limits=[OBSERVED, RULE])
    assert (left(held.outcomes), held.is_first) == ([None, (True, 400)], True)
    assert (await cluster.settle(100, b"a")).is_first
    assert (cluster.spent(b"a"), cluster.withdrawn()) == (100, [])


async def test_in_a_cluster_an_observing_limit_that_did_not_answer_in_time_is_withdrawn(cluster):
    cluster.store.mode = "held"
    asked = cluster.asked(b"a", b"b", cost=600, limits=[RULE, OBSERVED])
    task = asyncio.ensure_future(cluster.holds.hold(asked))
    await asyncio.sleep(0)
    of_a, of_b = cluster.store.held
    cluster.store.held = []
    of_a.answer()
    of_b.lose()
    cluster.store.held_one().fail()
    cluster.store.mode = "up"
    assert left((await task).outcomes) == [(True, 400), None]
    cluster.timers.run(MS)
    assert (cluster.spent(b"a"), cluster.spent(b"b"), cluster.withdrawn()) == (600, 0, [[b"b"]])


async def test_a_hold_whose_caller_left_is_withdrawn(cluster):
    task = asyncio.ensure_future(cluster.holds.hold(cluster.asked(b"a", b"b", cost=600)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    cluster.timers.run(MS)
    await asyncio.sleep(0)
    cluster.timers.run(MS)
    assert (cluster.spent(b"a"), cluster.spent(b"b")) == (0, 0)
    assert cluster.withdrawn() == [[b"a"], [b"b"]]


# Bounds


async def test_the_holds_of_a_bucket_are_bounded():
    scene = Scene(max_per_bucket=2)
    for one in range(2):
        await scene.hold(b"a", number=bytes([one]) * 16)
    with pytest.raises(HoldsFullError):
        await scene.hold(b"a", b"b", number=b"another number..")
    assert (scene.spent(b"a"), scene.spent(b"b")) == (2, 0)
    await scene.settle(1, b"a", number=bytes(16))
    assert (await scene.hold(b"a", number=b"another number..")).expire_us


async def test_the_holds_in_flight_of_a_node_are_bounded():
    scene = Scene(max_holds=2)
    numbers = [bytes([one]) * 16 for one in range(3)]
    for number in numbers[:2]:
        await scene.hold(b"a", number=number, ttl_s=10)
    with pytest.raises(HoldsFullError, match=r"^the node has 2 holds"):
        await scene.hold(b"a", number=numbers[2])
    # An existing hold is still answered.
    assert (await scene.hold(b"a", number=numbers[0], ttl_s=10)).expire_us
    await scene.settle(1, b"a", number=numbers[0])
    assert (await scene.hold(b"a", number=numbers[2], ttl_s=10)).expire_us


async def test_a_full_node_accepts_holds_after_all_its_holds_ended_together():
    scene = Scene(max_holds=STEP + 1)
    for one in range(STEP + 1):
        await scene.hold(b"a", number=one.to_bytes(16, "big"), ttl_s=10)
    scene.timers.run(11 * SECOND)
    for one in range(STEP + 1):
        await scene.hold(b"a", number=(STEP + 1 + one).to_bytes(16, "big"))


async def test_an_ended_hold_no_longer_counts_and_an_extended_one_does():
    scene = Scene(max_holds=2)
    numbers = [bytes([one]) * 16 for one in range(4)]
    for number in numbers[:2]:
        await scene.hold(b"a", number=number, ttl_s=10)
    assert await scene.extend(60, b"a", number=numbers[0])
    scene.timers.run(11 * SECOND)
    await scene.hold(b"a", number=numbers[2])
    with pytest.raises(HoldsFullError):
        await scene.hold(b"a", number=numbers[3])


async def test_settled_holds_leave_no_entries(scene):
    for one in range(MIN_ENDS + 10):
        number = one.to_bytes(16, "big")
        await scene.hold(b"a", number=number)
        await scene.settle(0, b"a", number=number)
    await scene.hold(b"a")
    assert len(scene.holds._open._ends) <= MIN_ENDS


async def test_a_hold_made_elsewhere_is_settled_and_extended_here(scene):
    other = Scene()
    other.store = scene.store
    held = await scene.hold(b"a", cost=600)
    other.holds._store = scene.store
    other.timers = scene.timers
    assert await other.extend(60, b"a") >= held.expire_us
    assert (await other.settle(0, b"a")).is_first
