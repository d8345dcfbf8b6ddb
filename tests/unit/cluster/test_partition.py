"""Batches of a partition: content, time, retries, and loss."""

import asyncio
from dataclasses import replace

import pytest

from ratelimitd.cluster import sync
from ratelimitd.cluster.pending import Bucket, PendingCheck
from ratelimitd.cluster.sync import MAX_KEPT_US, Partition
from ratelimitd.counters import CheckStats
from ratelimitd.errors import StoreCorruptError, StoreMovingError
from ratelimitd.ledger.local_view import LocalView
from ratelimitd.ledger.protocol import MAX_UPDATES
from ratelimitd.model import LIMIT_EXCEEDED, Algorithm
from ratelimitd.testing import ManualClock
from tests.unit.cluster.world import (
    MS,
    RULE,
    SECOND,
    FakeStore,
    ManualTimers,
    limited,
    name_of,
    state,
)


class StoreServer:
    """Records what is reported to it."""

    def __init__(self):
        self.recorded = []

    def answered(self):
        self.recorded.append("answered")

    def refused(self, _error):
        self.recorded.append("failed")

    def synced(self):
        """Ignored by the tests."""

    def sync_failed(self, _error):
        self.recorded.append("sync failed")


class Scene:
    """One partition, its store, and its node."""

    def __init__(self, rule=RULE):
        self.rule, self.clock, self.stats = rule, ManualClock(), CheckStats()
        self.timers = ManualTimers(self.clock)
        self.store, self.server = FakeStore(self.timers), StoreServer()
        self.settled_buckets, self.lost_tokens, self.defects = [], 0, []
        self.make_view = LocalView
        self.tag = Partition(97, self.server, "node/1", self)

    def settled(self, bucket, tokens, before):
        self.settled_buckets.append((bucket.key, tokens, before))

    def lost(self, tokens):
        self.lost_tokens += tokens

    def defect(self, error):
        self.defects.append(error)

    def bucket(self, key=b"a", base=None, *, is_cached=True):
        bucket = Bucket(key, name_of(key), self.tag, self.rule, base)
        bucket.is_cached = is_cached
        self.tag.buckets[bucket.name] = bucket
        return bucket

    def spend(self, bucket, tokens=1):
        assert bucket.view.check_alone(self.clock.now_us(), tokens)[0]
        if not bucket.is_dirty:
            self.tag.touch(bucket)

    def ask(self, bucket, cost=1):
        answer = asyncio.get_running_loop().create_future()
        question = PendingCheck(self.rule, self.clock.now_us(), cost, peek=False, answer=answer)
        self.tag.ask(bucket, question)
        return question

    def batches(self):
        return self.store.asked("settle")

    def run(self, us=0):
        self.timers.run(us)


@pytest.fixture
def scene():
    return Scene()


class TestSettling:
    def test_a_sync_sends_spends_and_the_view_continues_from_the_reply(self, scene):
        bucket = scene.bucket()
        scene.store.spend(b"a", RULE, 5, scene.clock.now_us())
        scene.spend(bucket, 3)
        scene.tag.sync()
        assert (scene.tag.is_settled, scene.tag.unsettled_buckets) == (False, 1)
        scene.run(MS)
        assert scene.store.spent(b"a") == 8
        assert bucket.view.peek(scene.clock.now_us(), 1)[1] == RULE.limit - 8 - 1
        assert (scene.tag.is_settled, scene.tag.unsettled_buckets) == (True, 0)
        assert scene.settled_buckets == [(b"a", 3, None)]

    def test_without_spends_nothing_is_sent(self, scene):
        scene.bucket()
        scene.tag.flush()
        scene.tag.sync()
        scene.run(SECOND)
        assert scene.store.requests == []

    def test_all_buckets_of_a_sync_are_one_batch(self, scene):
        for number in range(3):
            scene.spend(scene.bucket(b"a%d" % number))
        scene.tag.sync()
        scene.run(SECOND)
        assert [len(batch.updates) for batch in scene.batches()] == [3]

    def test_more_buckets_than_a_batch_takes_are_sent_in_several_batches_at_once(self, scene):
        keys = [b"a%d" % number for number in range(2 * MAX_UPDATES + 1)]
        for key in keys:
            scene.spend(scene.bucket(key))
        scene.tag.sync()
        scene.run(50 * MS)
        assert [len(batch.updates) for batch in scene.batches()] == [MAX_UPDATES, MAX_UPDATES, 1]
        assert {scene.store.spent(key) for key in keys} == {1}
        assert scene.tag.is_settled

    def test_logs_with_many_entries_take_several_batches(self, monkeypatch):
        monkeypatch.setattr(sync, "MAX_RUNS", 5)
        scene = Scene(replace(RULE, algorithm=Algorithm.SLIDING_WINDOW))
        for number in range(4):
            bucket = scene.bucket(b"a%d" % number)
            for _ in range(2 if number else 9):
                scene.spend(bucket)
                scene.clock.advance(us=1)
        scene.tag.sync()
        scene.run(50 * MS)
        runs = [
            [len(update.runs) for update in batch.updates.values()] for batch in scene.batches()
        ]
        assert runs == [[9], [2, 2], [2]]

    def test_spends_during_a_batch_in_flight_wait_for_the_next_sync(self, scene):
        bucket = scene.bucket()
        scene.spend(bucket)
        scene.tag.sync()
        scene.spend(bucket, 2)
        scene.tag.sync()
        scene.run(50 * MS)
        assert (len(scene.batches()), scene.store.spent(b"a")) == (1, 1)
        scene.tag.sync()
        scene.run(MS)
        assert (len(scene.batches()), scene.store.spent(b"a")) == (2, 3)

    def test_a_flush_sends_once_the_previous_batch_is_acknowledged_and_10_ms_old(self, scene):
        bucket = scene.bucket()
        scene.spend(bucket)
        scene.tag.flush()
        scene.spend(bucket)
        scene.tag.flush()
        scene.run(10 * MS - 1)
        assert len(scene.batches()) == 1
        scene.run(1)
        assert len(scene.batches()) == 2

    def test_batches_are_at_least_10_ms_apart(self, scene):
        bucket = scene.bucket()
        for _ in range(195):
            scene.spend(bucket)
            scene.tag.flush()
            scene.run(MS)
        assert len(scene.batches()) == 20

    def test_an_evicted_bucket_is_dropped_once_it_is_settled(self, scene):
        bucket = scene.bucket(is_cached=False)
        scene.spend(bucket)
        scene.tag.sync()
        scene.spend(bucket)
        scene.run(MS)
        assert bucket.name in scene.tag.buckets
        scene.run(10 * MS)
        scene.tag.sync()
        scene.run(MS)
        assert (scene.tag.buckets, scene.store.spent(b"a")) == ({}, 2)

    def test_the_time_of_the_unacknowledged_batch_is_reported(self, scene):
        assert scene.tag.oldest_us is None
        scene.spend(scene.bucket())
        frozen_at_us = scene.clock.now_us()
        scene.tag.sync()
        scene.clock.advance(us=3)
        assert scene.tag.oldest_us == frozen_at_us


class TestFailures:
    @pytest.mark.parametrize("mode", ["deaf", "down"])
    def test_a_batch_is_repeated_until_it_is_answered_and_applied_once(self, scene, mode):
        scene.spend(scene.bucket(), 7)
        scene.store.mode = mode
        scene.tag.sync()
        scene.run(5 * SECOND)
        scene.store.mode = "up"
        scene.run(2 * SECOND)
        batches = scene.batches()
        assert len(batches) > 3
        assert {id(batch) for batch in batches} == {id(batches[0])}
        assert scene.store.spent(b"a") == 7
        assert (scene.tag.is_settled, scene.lost_tokens) == (True, 0)

    def test_the_pauses_grow_to_a_second(self, scene):
        scene.spend(scene.bucket())
        scene.store.mode = "held"
        scene.tag.sync()
        pauses = []
        for _ in range(7):
            scene.store.held_one().fail()
            before_us = scene.clock.monotonic_us()
            while not scene.store.held:
                scene.run(MS)
            pauses.append((scene.clock.monotonic_us() - before_us) // MS)
        assert pauses == [60, 120, 240, 480, 960, 1_000, 1_000]

    def test_spends_refilled_during_an_outage_are_forgiven_and_not_settled(self):
        scene = Scene(limited(10, window_seconds=1))
        bucket = scene.bucket()
        scene.spend(bucket, 4)
        scene.store.mode = "down"
        scene.tag.sync()
        for _ in range(3):  # in windows that are over when the store is back
            scene.run(SECOND)
            scene.spend(bucket, 10)
        scene.run(SECOND)
        scene.store.mode = "up"
        scene.run(2 * SECOND)
        scene.tag.sync()
        scene.run(50 * MS)
        assert bucket.view.forgiven == 30
        assert scene.tag.is_settled

    def test_spends_after_the_first_reply_of_an_outage_are_not_forgiven(self):
        scene = Scene(limited(10, window_seconds=1))
        bucket = scene.bucket()
        scene.spend(bucket, 4)
        scene.store.mode = "held"
        scene.tag.sync()
        scene.run(2 * SECOND)
        scene.tag.forgive_outage()
        scene.spend(bucket, 10)
        scene.run(2 * SECOND)
        scene.tag.forgive_outage()
        assert bucket.view.forgiven == 0
        scene.store.held_one().answer()
        assert bucket.view.unsent.tokens == 10

    def test_a_short_silence_forgives_nothing(self):
        scene = Scene(limited(10, window_seconds=1))
        bucket = scene.bucket()
        scene.spend(bucket, 4)
        scene.store.mode = "held"
        scene.tag.sync()
        scene.run(SECOND)
        scene.spend(bucket, 1)
        scene.tag.forgive_outage()
        assert (bucket.view.forgiven, bucket.view.unsent.tokens) == (0, 1)

    def test_a_batch_whose_number_the_store_may_have_forgotten_is_dropped_and_its_tokens_are_lost(
        self, scene
    ):
        kept, gone = scene.bucket(b"a"), scene.bucket(b"ab", is_cached=False)
        scene.spend(kept, 4)
        scene.spend(gone, 2)
        scene.store.mode = "held"
        scene.tag.sync()
        scene.clock.advance(us=MAX_KEPT_US + 1)
        scene.spend(kept, 1)
        scene.store.held_one().fail()
        assert scene.lost_tokens == 6
        assert (kept.view.in_flight_tokens, kept.view.unsent.tokens) == (0, 1)
        assert scene.tag.buckets == {kept.name: kept}
        scene.store.mode = "up"
        scene.tag.sync()
        scene.run(MS)
        assert (scene.store.spent(b"a"), scene.tag.is_settled) == (1, True)

    def test_a_batch_that_cannot_be_sent_is_dropped_and_blocks_nothing(self, scene, monkeypatch):
        error = OverflowError("a number is too large")

        def fails(*_):
            raise error

        bucket = scene.bucket()
        scene.spend(bucket, 5)
        with monkeypatch.context() as patch:
            patch.setattr(scene.store, "settle", fails)
            scene.tag.sync()
        assert (scene.defects, scene.lost_tokens, scene.tag.is_settled) == ([error], 5, True)
        scene.spend(bucket, 2)
        scene.run(SECOND)
        scene.tag.sync()
        scene.run(MS)
        assert scene.store.spent(b"a") == 2

    def test_a_batch_with_a_malformed_answer_is_reported_once_and_repeated(self, scene):
        scene.store.mode = "held"
        scene.spend(scene.bucket(), 5)
        scene.tag.sync()
        error = StoreCorruptError("no answer to this")
        for _ in range(3):
            scene.store.held_one().fail(error)
            scene.run(SECOND)
        assert (scene.defects, scene.server.recorded) == ([error], ["sync failed"] * 3)
        assert len({batch.number for batch in scene.batches()}) == 1
        scene.store.held_one().answer()
        assert (scene.store.spent(b"a"), scene.tag.is_settled) == (5, True)

    def test_a_batch_that_the_store_refuses_as_old_is_dropped(self, scene):
        bucket = scene.bucket()
        scene.spend(bucket, 4)
        scene.store.mode = "held"
        scene.tag.sync()
        scene.store.held_one().done(None)
        assert (scene.lost_tokens, scene.tag.is_settled) == (4, True)
        # The view adopts no state: the next batch is for the current generation, whatever it is.
        assert (bucket.view.base, bucket.view.generation) == (None, None)

    async def test_checks_behind_a_dropped_batch_are_sent_next(self, scene):
        bucket = scene.bucket()
        scene.spend(bucket, 4)
        scene.store.mode = "held"
        scene.tag.sync()
        question = scene.ask(bucket)
        scene.run(10 * MS)
        batch = scene.store.held_one()
        scene.store.mode = "up"
        batch.done(None)
        scene.run(MS)
        assert question.answer.result()[0]


class TestWaitingChecks:
    async def test_the_store_decides_and_charges_them(self):
        scene = Scene(limited(10))
        bucket = scene.bucket()
        scene.store.spend(b"a", scene.rule, 8, scene.clock.now_us())
        questions = [scene.ask(bucket) for _ in range(3)]
        assert scene.store.requests == []
        scene.run(MS)
        outcomes = [question.answer.result() for question in questions]
        assert [outcome[0] for outcome in outcomes] == [True, True, False]
        assert outcomes[2][4] is LIMIT_EXCEEDED
        assert (scene.store.spent(b"a"), len(scene.batches())) == (10, 1)

    async def test_those_of_one_iteration_share_a_batch_with_dirty_buckets(self, scene):
        scene.spend(scene.bucket(b"a"))
        questions = [scene.ask(scene.bucket(b"a%d" % number)) for number in range(3)]
        scene.run()
        assert [len(batch.updates) for batch in scene.batches()] == [4]
        scene.run(MS)
        assert all(question.answer.done() for question in questions)

    async def test_those_behind_a_batch_in_flight_are_sent_when_it_is_acknowledged(self, scene):
        bucket = scene.bucket()
        scene.spend(bucket)
        scene.tag.sync()
        question = scene.ask(bucket)
        scene.run(10 * MS)
        assert len(scene.batches()) == 2
        scene.run(MS)
        assert question.answer.result()[0]

    async def test_a_check_of_an_evicted_bucket_is_answered(self, scene):
        question = scene.ask(scene.bucket(is_cached=False))
        scene.run(MS)
        assert question.answer.result()[0]
        assert scene.tag.buckets == {}

    async def test_a_check_that_times_out_before_it_is_sent_is_withdrawn(self, scene):
        bucket = scene.bucket()
        scene.store.mode = "held"
        scene.spend(bucket)
        scene.tag.sync()
        first, second = scene.ask(bucket), scene.ask(bucket)
        scene.tag.give_up(bucket, first)
        assert first.answer.result()[0]
        batch = scene.store.held_one()
        scene.store.mode = "up"
        batch.answer()
        scene.run(20 * MS)
        # One spent, one charged by the view after its timeout, one granted.
        assert second.answer.result()[0]
        scene.tag.sync()
        scene.run(MS)
        assert scene.store.spent(b"a") == 3
        updates = [update for batch in scene.batches() for update in batch.updates.values()]
        assert [len(update.asks) for update in updates] == [0, 1]

    async def test_no_check_waits_after_the_last_is_withdrawn(self, scene):
        bucket = scene.bucket()
        scene.store.mode = "held"
        scene.spend(bucket)
        scene.tag.sync()
        scene.tag.give_up(bucket, scene.ask(bucket))
        scene.store.held_one().answer()
        scene.run(SECOND)
        updates = [update for batch in scene.batches() for update in batch.updates.values()]
        assert [len(update.asks) for update in updates] == [0, 0]

    async def test_a_late_grant_pays_for_the_charge_of_the_view(self, scene):
        bucket = scene.bucket()
        scene.store.mode = "held"
        question = scene.ask(bucket, 5)
        scene.run()
        scene.tag.give_up(bucket, question)
        assert question.answer.result()[0]
        assert bucket.view.unsent.tokens == 5
        scene.store.held_one().answer()
        assert bucket.view.unsent.tokens == 0
        scene.store.mode = "up"
        scene.run(10 * MS)
        scene.tag.sync()
        scene.run(MS)
        assert scene.store.spent(b"a") == 5

    async def test_a_late_denial_leaves_the_charge_of_the_view(self):
        scene = Scene(limited(10))
        bucket = scene.bucket()
        scene.store.spend(b"a", scene.rule, 10, scene.clock.now_us())
        scene.store.mode = "held"
        question = scene.ask(bucket, 5)
        scene.run()
        scene.tag.give_up(bucket, question)
        scene.store.held_one().answer()
        assert bucket.view.unsent.tokens == 5

    async def test_a_check_that_the_view_denies_is_not_charged_and_its_late_grant_stays(self):
        scene = Scene(limited(10))
        bucket = scene.bucket(base=state(10, scene.clock.now_us(), limit=10))
        scene.store.mode = "held"
        question = scene.ask(bucket, 5)
        scene.run()
        scene.tag.give_up(bucket, question)
        assert not question.answer.result()[0]
        assert not bucket.is_dirty
        scene.store.held_one().answer()
        assert bucket.view.unsent.tokens == 0

    @pytest.mark.parametrize(("is_under_way", "charged"), [(False, 0), (True, 5)])
    async def test_a_check_whose_caller_left_is_charged_only_if_its_batch_was_sent(
        self, scene, is_under_way, charged
    ):
        bucket = scene.bucket()
        question = scene.ask(bucket, 5)
        if is_under_way:
            scene.store.mode = "held"
            scene.run()
        question.answer.cancel()
        scene.tag.give_up(bucket, question)
        if is_under_way:
            scene.store.held_one().answer()
        scene.run(MS)
        assert question.answer.cancelled()
        assert bucket.view.asked_tokens == 0
        assert scene.store.spent(b"a") == charged
        assert scene.tag.is_settled

    async def test_a_check_that_times_out_after_packing_is_charged_to_the_bucket_in_use(
        self, scene
    ):
        first = scene.bucket()
        question = scene.ask(first, 1)
        scene.tag._asked.take(first)  # in a batch that was dropped
        scene.tag._asked.forget_taken()
        scene.tag._dirty.clear()
        first.is_dirty = False
        second = scene.bucket()  # the same, in use again
        scene.spend(second, 2)
        scene.tag.give_up(first, question)
        scene.run(SECOND)
        scene.tag.sync()
        scene.run(SECOND)
        assert scene.store.spent(b"a") == 3
        assert scene.tag.is_settled
        assert second.view.is_clean

    async def test_a_check_that_times_out_after_its_bucket_was_dropped_restores_it(self, scene):
        bucket = scene.bucket()
        question = scene.ask(bucket, 1)
        del scene.tag.buckets[bucket.name]
        scene.tag.give_up(bucket, question)
        assert scene.tag.buckets[bucket.name] is bucket

    async def test_an_answered_check_is_not_decided_again(self, scene):
        bucket = scene.bucket()
        question = scene.ask(bucket)
        scene.run(MS)
        answer = question.answer.result()
        scene.tag.give_up(bucket, question)
        assert question.answer.result() is answer
        assert bucket.view.is_clean


class TestReportsToTheBreaker:
    async def test_an_answered_batch_with_checks_is_reported(self, scene):
        scene.ask(scene.bucket())
        scene.run(MS)
        assert scene.server.recorded == ["answered"]

    def test_only_failures_of_the_sync_are_reported_separately(self, scene):
        scene.spend(scene.bucket())
        scene.store.mode = "down"
        scene.tag.sync()
        scene.run(90 * MS)
        scene.store.mode = "up"
        scene.run(SECOND)
        assert scene.server.recorded == ["sync failed", "sync failed"]

    async def test_only_the_first_failure_of_a_batch_with_checks_counts_for_checks(self, scene):
        bucket = scene.bucket()
        question = scene.ask(bucket)
        scene.store.mode = "down"
        scene.run(21 * MS)
        scene.tag.give_up(bucket, question)
        scene.run(90 * MS)
        assert scene.server.recorded == ["failed", "sync failed"]

    async def test_each_failure_of_a_batch_with_checks_behind_it_counts(self, scene):
        bucket = scene.bucket()
        scene.spend(bucket)
        scene.store.mode = "held"
        scene.tag.sync()
        scene.ask(bucket)
        for _ in range(2):
            scene.store.held_one().fail()
            scene.run(SECOND)
        assert scene.server.recorded == ["failed", "failed"]
        scene.store.held_one().answer()
        assert scene.server.recorded[2:] == ["answered"]


async def test_views_decide_checks_of_a_moving_slot_and_their_spends_are_settled(scene):
    bucket = scene.bucket()
    scene.store.mode = "held"
    taken = scene.ask(bucket)
    scene.run()
    waiting = scene.ask(bucket)
    for _ in range(9):
        scene.store.held_one().fail(StoreMovingError("TRYAGAIN"))
        scene.run(SECOND)
    for question in (taken, waiting):
        scene.tag.give_up(bucket, question)
        assert question.answer.result()[0]
    scene.store.mode = "up"
    scene.store.held_one().answer()
    scene.run(SECOND)
    assert (scene.store.spent(b"a"), scene.tag.is_settled) == (2, True)


async def test_dropping_a_former_object_of_a_bucket_keeps_the_one_in_use(scene):
    scene.store.mode = "held"
    question = scene.ask(scene.bucket(b"b"))
    scene.run()
    before = scene.bucket()
    asked = scene.ask(before, 2_000)
    scene.tag.give_up(before, asked)
    assert before.view.is_clean
    assert before.is_dirty
    before.is_cached = False  # packed, as there is nothing to settle
    again = scene.bucket()
    scene.store.mode = "up"
    scene.store.held_one().answer()
    scene.run(SECOND)
    assert question.answer.done()
    assert scene.tag.is_settled
    assert scene.tag.buckets[again.name] is again


async def test_failed_batches_open_the_breaker_once_the_limit_of_unsettled_buckets_is_reached(
    scene,
):
    scene.store.mode = "down"
    for number in range(sync.MAX_UNSETTLED - 1):
        scene.spend(scene.bucket(b"a%d" % number))
    scene.tag.sync()
    scene.run(SECOND)
    assert set(scene.server.recorded) == {"sync failed"}
    scene.spend(scene.bucket(b"one more"))
    scene.server.recorded.clear()
    scene.run(3 * SECOND)
    assert set(scene.server.recorded) == {"failed"}


async def test_a_moving_slot_does_not_exceed_the_limit_of_unsettled_buckets(scene):
    scene.store.mode = "held"
    for number in range(sync.MAX_UNSETTLED):
        scene.spend(scene.bucket(b"a%d" % number), 2)
    scene.tag.sync()
    scene.store.held_one().fail(StoreMovingError("TRYAGAIN"))
    left = sync.MAX_UNSETTLED - MAX_UPDATES
    assert (scene.lost_tokens, scene.tag.unsettled_buckets) == (2 * MAX_UPDATES, left)
    scene.run(10 * MS)
    for _ in range(3):
        scene.store.held_one().fail(StoreMovingError("TRYAGAIN"))
        scene.run(SECOND)
    assert (scene.lost_tokens, scene.tag.unsettled_buckets) == (2 * MAX_UPDATES, left)
