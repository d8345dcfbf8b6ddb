"""A node's whole part in a cluster, on a store whose answers the test decides."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from ratelimitd.algorithms import DECIDE
from ratelimitd.cluster import node as cluster_module
from ratelimitd.cluster.membership import SharedTime
from ratelimitd.cluster.node import Cluster
from ratelimitd.cluster.pending import HASH_TAGS
from ratelimitd.counters import CheckStats
from ratelimitd.errors import StoreCorruptError, StoreUnavailableError
from ratelimitd.retry import Background
from ratelimitd.settings.table import Settings
from ratelimitd.testing import ManualClock
from ratelimitd_wire.breaker import State
from tests.ledger_model import reset
from tests.unit.cluster.redis.asking import soon
from tests.unit.cluster.world import MS, RULE, SECOND, FakeBus, FakeStore, limited, name_of

OPTIONS = {
    "redis_url": "redis://127.0.0.1",
    "cache_entries": 1_000,
    "breaker_failures": 2,
    "on_breaker_open": "fail_open",
}

STEPS = 16
"""Of the default interval."""


class Scene:
    """Requests are held until the test, or :meth:`answer`, answers them."""

    def __init__(self, *, tags_per_batch=1, **options):
        self.clock, self.stats, self.bus = ManualClock(), CheckStats(), FakeBus()
        self.store, self.rule_changes = FakeStore(None), 0
        self.store.mode, self.store.tags_per_batch = "held", tags_per_batch
        self.shared_time = SharedTime(
            lambda: self.clock.now_us() * 1_000, lambda: self.clock.monotonic_us() * 1_000
        )
        self.cluster = Cluster(
            self.store,
            self.bus,
            Settings.load({}, {k.upper(): str(v) for k, v in {**OPTIONS, **options}.items()}),
            incarnation="node/1",
            stored_name=name_of,
            fingerprint=lambda: "ours",
            clock=self.clock,
            shared_time=self.shared_time,
            stats=self.stats,
            feed=self,
        )

    async def notify(self):
        """Load new rules, as a feed does."""
        self.rule_changes += 1

    @asynccontextmanager
    async def jobs(self):
        background = Background({})
        self.cluster.start_jobs(background)
        yield
        await background.stop()

    def answer(self):
        held, self.store.held = self.store.held, []
        for request in held:
            request.answer()

    def spend(self, key=b"a", cost=1, rule=RULE):
        buckets, now_us = self.cluster.buckets, self.clock.now_us()
        if buckets.peek(key, rule, DECIDE[rule.algorithm], now_us, cost) is None:
            buckets.wait(key, rule, now_us, cost, peek=True)
            self.answer()
        return buckets.apply(key, rule, DECIDE[rule.algorithm], now_us, cost)

    async def fail(self, times):
        """Fail a check of an unknown bucket in each of so many event-loop iterations."""
        for number in range(times):
            answer = self.cluster.buckets.wait(b"f%d" % number, RULE, 0, 1, peek=False)
            self.store.held.pop().fail()
            assert isinstance(await answer, StoreUnavailableError)
            await asyncio.sleep(0)

    def interval(self):
        for _ in range(STEPS):
            self.cluster.sync_step()


@pytest.fixture
async def scene():
    return Scene()


async def test_a_node_caches_no_bucket_for_longer_than_the_store_keeps_it():
    assert Scene(cache_ttl_s=3_000).cluster.cache._generation_us == 1_500 * SECOND


class TestSync:
    async def test_the_steps_of_an_interval_sync_all_hash_tags(self, scene):
        assert scene.cluster.step_s == pytest.approx(0.1 / STEPS)
        for number in range(HASH_TAGS):
            scene.spend(bytes([number]))
        sent = []
        for _ in range(STEPS):
            scene.cluster.sync_step()
            sent.append(len(scene.store.held))
            scene.answer()
        assert sent == [HASH_TAGS // STEPS] * STEPS
        assert scene.cluster.unsettled_buckets == 0

    async def test_a_long_interval_has_more_steps_of_the_same_length(self):
        assert Scene(sync_interval_ms=10).cluster.step_s == pytest.approx(0.005)
        scene = Scene(sync_interval_ms=2_000)
        assert scene.cluster.step_s == 0.00625
        for number in range(HASH_TAGS):
            scene.spend(bytes([number]))
        sent = []
        for _ in range(320):
            scene.cluster.sync_step()
            sent.append(len(scene.store.held))
            scene.answer()
        assert (sum(sent), max(sent)) == (HASH_TAGS, 1)
        assert scene.cluster.unsettled_buckets == 0

    async def test_batches_of_several_hash_tags_reduce_the_partitions(self):
        scene = Scene(tags_per_batch=HASH_TAGS)
        for number in range(10):
            scene.spend(bytes([number]))
        scene.interval()
        assert [len(batch.cold) for batch in scene.store.asked("settle")] == [10]

    async def test_a_gap_re_reads_a_bucket_once_although_its_tag_shares_a_sender(self):
        scene = Scene(tags_per_batch=HASH_TAGS)
        scene.spend()
        scene.cluster.resync()
        scene.interval()
        assert scene.store.asked("read") == [name_of(b"a")]

    async def test_gossip_is_published_once_per_interval(self, scene):
        scene.spend(cost=400)
        scene.interval()
        scene.answer()
        scene.clock.advance(us=10 * MS)
        scene.spend(cost=200)
        for _ in range(STEPS - 1):
            scene.cluster.sync_step()
        scene.answer()
        assert scene.bus.published == []
        scene.cluster.sync_step()
        assert [payload[:1] for _, payload in scene.bus.published] == [b"S"]

    async def test_sync_lag_is_the_age_of_the_oldest_unacknowledged_batch(self, scene):
        assert scene.cluster.sync_lag_s == 0
        scene.spend(b"a")
        scene.spend(b"b")
        assert (scene.cluster.sync_lag_s, scene.cluster.unsettled_buckets) == (0, 2)
        scene.interval()
        scene.clock.advance(seconds=1.5)
        assert (scene.cluster.sync_lag_s, scene.cluster.unsettled_buckets) == (1.5, 2)
        scene.answer()
        assert (scene.cluster.sync_lag_s, scene.cluster.unsettled_buckets) == (0, 0)

    async def test_a_leaving_node_settles_everything(self, scene):
        for number in range(3):
            scene.spend(bytes([number]))
        settling = asyncio.create_task(scene.cluster.settle(60))
        await asyncio.sleep(0)
        assert len(scene.store.held) == 3
        scene.answer()
        assert await settling

    async def test_a_drain_ends_at_its_timeout(self, scene, monkeypatch):
        monkeypatch.setattr(cluster_module, "WATCH_S", 0)
        scene.spend()
        settling = asyncio.create_task(scene.cluster.settle(2))
        await asyncio.sleep(0)
        scene.clock.advance(seconds=2)
        assert not await settling

    async def test_a_node_with_nothing_to_settle_leaves_at_once(self, scene):
        assert await scene.cluster.settle(0)


class TestBreakers:
    async def test_failed_checks_open_a_breaker_and_a_probe_closes_it(self, scene):
        assert scene.cluster.shared_state == (True, "closed", 0.0)
        await scene.fail(2)
        assert scene.cluster.shared_state[:2] == (False, "open")
        assert scene.cluster.shared_state.retry_s >= 30
        scene.clock.advance(seconds=32)
        scene.cluster.watch()
        assert scene.cluster.breaker_state is State.HALF_OPEN
        assert scene.store.asked("probe") == [HASH_TAGS - 1]
        scene.answer()
        assert scene.cluster.shared_state == (True, "closed", 0.0)


class TestMessages:
    async def test_a_bucket_that_another_node_reset_is_read_again(self, scene):
        scene.spend(cost=900)
        scene.interval()
        scene.answer()
        scene.store.ledger.buckets[name_of(b"a")] = reset(None, RULE)
        scene.cluster.take(b"D" + name_of(b"a"))
        scene.answer()
        assert scene.cluster.buckets.peek(b"a", RULE, None, scene.clock.now_us(), 1)[1] == 999

    @pytest.mark.parametrize("consistency", ["eventual", "strict"])
    async def test_a_message_about_new_rules_notifies_the_feed(self, consistency):
        scene = Scene(consistency=consistency)
        async with scene.jobs():
            scene.cluster.take(b"R" + bytes(8))
            await soon(lambda: scene.rule_changes == 1)

    @pytest.mark.parametrize(("consistency", "reads"), [("eventual", 1), ("strict", 0)])
    async def test_after_a_gap_rules_and_buckets_are_read_again(self, consistency, reads):
        scene = Scene(consistency=consistency)
        if consistency == "eventual":
            scene.spend()  # the second time it has a view
            scene.spend()
        known = len(scene.store.asked("read"))
        scene.cluster.resync()
        scene.cluster.sync_step()
        async with scene.jobs():
            await soon(lambda: scene.rule_changes == 1)
        assert len(scene.store.asked("read")) - known == reads

    async def test_many_gaps_cause_one_resync_a_second(self, scene):
        scene.spend()
        decide, known, reads = DECIDE[RULE.algorithm], len(scene.store.asked("read")), []
        for _ in range(3 * STEPS):
            scene.cluster.buckets.apply(b"a", RULE, decide, scene.clock.now_us(), 1)
            scene.cluster.resync()
            scene.cluster.sync_step()
            scene.answer()
            reads.append(len(scene.store.asked("read")) - known)
            scene.clock.advance(us=100 * MS)
        assert reads == [1 + step // 10 for step in range(3 * STEPS)]

    async def test_a_strict_node_ignores_messages_about_buckets(self):
        scene = Scene(consistency="strict")
        scene.cluster.take(b"D" + name_of(b"a"))
        assert scene.store.requests == []


class TestStrict:
    async def test_each_check_is_decided_by_the_store(self):
        scene = Scene(consistency="strict", timestamps="caller")
        answer = scene.cluster.buckets.wait(b"a", RULE, scene.clock.now_us(), 7, peek=False)
        scene.answer()
        assert (await answer)[:2] == (True, 993)
        scene.interval()
        assert scene.cluster.unsettled_buckets == 0


class TestExactness:
    async def test_the_worst_excess_is_reported_beside_the_promise(self, scene):
        rule = limited(100)
        scene.spend(cost=1, rule=rule)
        scene.store.spend(b"a", rule, 104, scene.clock.now_us())
        scene.interval()
        scene.answer()
        assert scene.cluster.worst_excess == pytest.approx(0.05)
        assert scene.cluster.accuracy.over_admitted_total == 1
        assert scene.cluster.promised_excess == pytest.approx(0.51)

    async def test_a_denial_of_a_bucket_that_was_reset_counts_as_false(self, scene):
        scene.spend(cost=400)
        assert not scene.spend(cost=900)[0]
        scene.store.ledger.buckets[name_of(b"a")] = reset(None, RULE)
        scene.interval()
        scene.answer()
        assert scene.stats.false_positives_total == 1
        assert scene.cluster.accuracy.forgiven_total == 400

    async def test_tight_shares_promise_and_allow_a_tenth_of_the_limit(self):
        scene = Scene(accuracy="tight")
        assert scene.cluster.promised_excess == pytest.approx(0.1)
        answers = [scene.spend(rule=limited(100)) for _ in range(20)]
        assert sum(outcome is not None for outcome in answers) == 9

    async def test_nodes_round_trips_and_skew_raise_the_promise(self, scene):
        scene.cluster.membership.beat()
        scene.clock.advance(us=1_000)
        scene.store.time_us = scene.clock.now_us() - 500 + SECOND  # it is a second ahead
        scene.store.members = ("one", "two")
        scene.answer()
        assert scene.cluster.membership.count == 3
        assert scene.cluster.promised_excess == pytest.approx(0.51 + 3 * (0.001 + 2.0))

    async def test_a_batch_that_cannot_be_settled_is_logged(self, scene):
        told = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        error = StoreCorruptError("no answer to this")
        scene.cluster.defect(error)
        assert [context["exception"] for context in told] == [error]

    async def test_the_tokens_of_a_dropped_batch_are_counted(self, scene):
        scene.spend(cost=5)
        scene.interval()
        scene.store.held_one().done(None)
        assert scene.cluster.accuracy.forgiven_total == 5
