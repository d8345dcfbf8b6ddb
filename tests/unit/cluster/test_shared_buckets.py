"""The checks of one node on shared buckets, with a store whose answers the test decides."""

import asyncio
from contextlib import suppress

import pytest

from ratelimitd.cluster import refresh, sync
from ratelimitd.cluster.pending import HASH_TAGS
from ratelimitd.cluster.refresh import REREADS_PER_STEP
from ratelimitd.cluster.shared_buckets import MAX_MISSED
from ratelimitd.errors import (
    BreakerOpenError,
    StoreMovingError,
    StoreSlowError,
    StoreUnavailableError,
)
from ratelimitd.ledger.shared_state import YEAR_2025_S
from ratelimitd.model import COST_EXCEEDS_LIMIT, LIMIT_EXCEEDED, WITHIN_LIMIT
from tests.ledger_model import reset
from tests.unit.cluster.world import MS, RULE, SECOND, World, limited, name_of

TEN = limited(10)


def half_spent_beside_a_deaf_store():
    """Return a world whose bucket has 5 of its 10 tokens left, settled, and whose store no longer answers."""
    world = World(TEN)
    world.know()
    world.check(cost=5)
    world.settle()
    world.store.mode = "deaf"
    return world


def done_later(world, done):
    """Fail a request after the timeout."""
    world.timers.call_later(0.001, done, StoreUnavailableError("out of memory"))


@pytest.fixture
async def world():
    return World()


class TestMisses:
    async def test_the_store_decides_the_check_of_an_unknown_bucket(self, world):
        world.store.spend(b"a", RULE, 100, world.clock.now_us())
        assert world.at_once() is None
        answer = world.wait()
        world.run(MS)
        assert answer.result()[:2] == (True, RULE.limit - 101)
        assert world.store.asked("first_check") == [name_of(b"a")]
        assert world.stats.bucket_missed_total == 1

    async def test_the_next_check_is_answered_at_once(self, world):
        world.check()
        assert world.at_once()[:2] == (True, RULE.limit - 2)
        assert len(world.store.requests) == 1

    async def test_checks_of_one_bucket_wait_for_the_first_and_are_charged_in_order(self, world):
        answers = [world.wait(cost=cost) for cost in (1, 2, 3)]
        world.run(MS)
        assert [answer.result()[1] for answer in answers] == [999, 997, 994]
        assert len(world.store.asked("first_check")) == world.stats.bucket_missed_total == 1

    async def test_five_failed_checks_open_the_breaker(self, world):
        world.store.mode = "down"
        for _ in range(5):
            assert not world.server.is_open
            world.check()
        assert world.server.is_open

    async def test_a_first_check_whose_caller_left_is_charged_and_one_behind_it_is_not(self, world):
        world.wait(cost=100).cancel()
        world.wait(cost=50).cancel()
        world.run(MS)
        assert world.at_once()[:2] == (True, 899)

    async def test_a_waiting_check_computes_the_name_of_its_bucket_once(self, world, monkeypatch):
        named = []
        monkeypatch.setattr(
            world.buckets, "_stored_name", lambda key: named.append(key) or name_of(key)
        )
        world.check(b"a")
        assert named == [b"a"]
        for number in range(MAX_MISSED + 1):
            world.at_once(b"%d" % number)
        assert len(world.buckets._missed) <= MAX_MISSED
        world.at_once(b"a")
        assert named.count(b"a") == 2

    async def test_the_newer_rule_of_two_waiting_checks_is_applied(self, world):
        answers = [world.wait(), world.wait(rule=limited(5, revision=2))]
        world.run(MS)
        assert [answer.result()[1] for answer in answers] == [999, 3]

    async def test_a_first_check_fails_before_its_caller_stops_waiting_and_the_bucket_is_known_then(
        self, world
    ):
        world.store.mode = "held"
        answer = world.wait(cost=900, remaining_s=0.012)
        world.run(9 * MS - 1)
        assert not answer.done()
        world.run(1)
        assert isinstance(answer.result(), StoreSlowError)
        world.store.held_one().answer()
        world.store.mode = "down"
        assert world.check(cost=101)[:2] == (False, 100)

    async def test_a_caller_who_waits_longer_than_the_node_costs_no_timer(self, world):
        before = world.timers.set_total
        world.wait(b"a")
        timers = world.timers.set_total - before
        world.wait(b"b", remaining_s=0.06)
        assert world.timers.set_total - before == 2 * timers

    async def test_a_first_check_without_time_left_fails_at_once(self, world):
        world.store.mode = "held"
        answer = world.wait(remaining_s=0.0)
        world.run()
        assert isinstance(answer.result(), StoreSlowError)

    async def test_a_bucket_whose_first_check_was_late_is_read_and_known_then(self, world):
        world.store.mode = "held"
        answers = [world.wait(cost=900)]
        first = world.store.held_one()
        first.run()
        first.done(StoreSlowError("too slow"))
        read = world.store.held_one()
        answers.append(world.wait())
        world.store.held_one().done(StoreSlowError("too slow"))
        assert [type(answer.result()) for answer in answers] == [StoreSlowError] * 2
        assert world.store.held == []  # it is being read
        read.answer()
        world.store.mode = "down"
        assert world.check(cost=101)[:2] == (False, 100)

    @pytest.mark.parametrize("answer", [None, StoreUnavailableError("the connection was lost")])
    async def test_a_bucket_that_could_not_be_read_is_read_after_the_next_late_answer(
        self, world, answer
    ):
        world.store.mode = "held"
        for _ in range(2):
            world.wait()
            world.store.held_one().done(StoreSlowError("too slow"))
            world.store.held_one().done(answer)
        assert world.at_once() is None
        assert len(world.store.asked("read")) == 2

    async def test_a_bucket_in_use_adopts_the_read_of_its_late_first_check(self, world):
        world.store.mode = "held"
        world.wait()
        world.store.held_one().done(StoreSlowError("too slow"))
        read = world.store.held_one()
        world.store.mode = "up"
        world.know()
        world.store.spend(b"a", RULE, 900, world.clock.now_us())
        read.answer()
        assert world.peek()[1] == 99


class TestAsking:
    async def test_near_its_limit_the_store_decides_and_charges(self):
        world = World(TEN, members=5)
        world.store.spend(b"a", TEN, 8, world.clock.now_us())
        world.know()
        assert world.at_once(cost=2) is None
        answers = [world.wait(), world.wait(), world.wait()]
        world.run(MS)
        assert [answer.result()[0] for answer in answers] == [True, True, False]
        assert world.store.spent(b"a") == 10
        assert world.buckets.asked_total == 2  # the view denies costs above the remaining tokens
        assert world.buckets.late_total == 0

    async def test_a_check_is_answered_once_and_within_20_ms(self):
        world = half_spent_beside_a_deaf_store()
        answer = world.wait(cost=4)
        world.run(20 * MS - 1)
        assert not answer.done()
        world.run(1)
        outcome = answer.result()
        assert outcome[:2] == (True, 1)
        assert world.buckets.late_total == 1
        world.store.mode = "up"
        world.run(SECOND)
        world.settle()
        assert answer.result() is outcome

    async def test_a_check_is_answered_before_its_caller_stops_waiting(self):
        world = half_spent_beside_a_deaf_store()
        answer = world.wait(cost=4, remaining_s=0.012)
        world.run(9 * MS - 1)
        assert not answer.done()
        world.run(1)
        assert answer.result()[:2] == (True, 1)

    async def test_a_check_decided_after_a_timeout_counts_once_for_the_next_ones(self):
        world = half_spent_beside_a_deaf_store()
        assert world.check(cost=2)[:2] == (True, 3)
        view = world.cache.get(b"a").view
        assert (view.asked_tokens, view.asked_in_flight) == (0, 0)
        assert world.check(cost=3)[:2] == (True, 0)
        assert (view.asked_tokens, view.asked_in_flight) == (0, 0)  # this one was not sent
        world.store.mode = "up"
        world.run(2 * SECOND)
        world.settle()
        assert world.store.spent(b"a") == 10

    async def test_a_late_grant_is_charged_once(self):
        world = half_spent_beside_a_deaf_store()
        world.wait(cost=4)
        world.run(SECOND)
        world.store.mode = "up"
        world.run(2 * SECOND)
        world.settle()
        assert world.store.spent(b"a") == 9
        assert world.accuracy.forgiven_total == 0

    async def test_a_check_that_times_out_before_it_is_sent_is_charged_once(self):
        world = World(TEN)
        world.know()
        world.check(cost=5)
        world.store.mode = "held"
        world.sync()
        answer = world.wait(cost=1)
        world.run(20 * MS)
        assert answer.result()[0]
        held = world.store.held_one()
        world.store.mode = "up"
        held.answer()
        world.settle()
        assert world.store.spent(b"a") == 6

    async def test_an_abandoned_check_does_not_count_as_late(self):
        world = World(TEN)
        world.know()
        world.store.mode = "deaf"
        answer = world.wait(cost=9)
        answer.cancel()
        world.run(SECOND)
        assert world.buckets.late_total == 0


class TestSpending:
    async def test_spends_are_charged_once_when_replies_are_lost(self, world):
        world.check(cost=7)
        world.store.mode = "deaf"
        world.sync()
        world.run(3 * SECOND)
        world.store.mode = "up"
        world.run(2 * SECOND)
        world.settle()
        assert world.store.spent(b"a") == 7

    async def test_a_used_up_share_is_sent_before_the_sync(self):
        world = World(limited(100), members=2)
        world.know()
        for _ in range(24):
            world.check()
        assert world.store.asked("settle") == []
        world.check()
        assert len(world.store.asked("settle")) == 1
        world.run(MS)
        assert world.store.spent(b"a") == 25

    async def test_a_share_used_up_by_a_waiting_check_is_sent_before_the_sync(self):
        world = World(TEN)
        world.wait(cost=1)
        world.wait(cost=4)
        world.run(MS)
        assert len(world.store.asked("settle")) == 1

    async def test_a_check_of_a_packed_bucket_is_answered_at_once(self):
        world = World(TEN)
        world.store.spend(b"a", TEN, 1, world.clock.now_us())
        world.know()
        world.pack()
        assert world.wait().result()[:2] == (True, 8)

    async def test_a_cost_above_the_limit_is_denied_at_once(self, world):
        world.know()
        assert world.at_once(cost=1_001)[4] is COST_EXCEEDS_LIMIT

    async def test_a_peek_charges_nothing(self, world):
        assert world.peek() is None
        world.know()
        for _ in range(2):
            assert world.peek(cost=3)[:2] == (True, 997)
        world.settle()
        assert world.store.asked("settle") == []
        answer = world.wait(cost=3, peek=True)
        assert answer.result()[:2] == (True, 997)
        assert world.view().is_clean

    async def test_a_bucket_that_runs_low_is_published(self):
        world = World(limited(100))
        world.know()
        world.check(cost=49)
        world.settle()
        world.check(cost=10)
        world.settle()
        world.gossip.publish()
        ((sync, payload),) = world.bus.published
        assert (sync, payload[:1]) == (97, b"S")


class TestOutage:
    async def test_an_open_breaker_decides_no_check_of_cached_or_unknown_buckets(self, world):
        world.know(b"a", b"packed")
        world.pack(but=b"a")
        world.open_breaker()
        for key in (b"a", b"packed", b"unknown"):
            for ask in (world.at_once, world.peek):
                with pytest.raises(BreakerOpenError):
                    ask(key)
        for key in (b"packed", b"unknown"):
            with pytest.raises(BreakerOpenError):
                world.wait(key)
        assert isinstance(world.wait(b"a").result(), BreakerOpenError)

    async def test_a_node_that_decides_alone_uses_its_views(self):
        world = World(TEN, members=5, decides_alone=True)
        world.store.spend(b"a", TEN, 8, world.clock.now_us())
        world.know()
        world.open_breaker()
        assert [world.at_once()[0] for _ in range(3)] == [True, True, False]
        assert world.peek()[0] is False
        assert world.wait().result()[4] is LIMIT_EXCEEDED
        world.settle()
        assert world.store.spent(b"a") == 10

    async def test_a_node_that_decides_alone_starts_an_unknown_bucket_full_and_settles_it_later(
        self,
    ):
        world = World(TEN, decides_alone=True)
        world.open_breaker()
        assert world.peek()[:2] == (True, 9)
        assert world.at_once(cost=3)[:2] == (True, 7)
        assert world.wait(cost=3).result()[:2] == (True, 4)
        world.store.spend(b"a", TEN, 1, world.clock.now_us())
        world.settle()
        assert world.store.spent(b"a") == 7
        assert world.view().peek(world.clock.now_us(), 1)[1] == 2

    @pytest.mark.parametrize(("limit", "least"), [(10, 4), (1, 1)])
    async def test_a_node_that_decides_alone_allows_its_share_of_an_unknown_bucket(
        self, limit, least
    ):
        rule = limited(limit)
        world = World(rule, members=3, decides_alone=True)
        world.open_breaker()
        assert world.peek()[1] == least - 1
        assert [world.at_once()[0] for _ in range(least + 1)] == [True] * least + [False]
        world.settle()
        assert world.store.spent(b"a") == least
        assert world.view().peek(world.clock.now_us(), 1)[0] == (limit > 1)

    async def test_a_node_that_decides_alone_bounds_its_unsettled_buckets(self, monkeypatch):
        monkeypatch.setattr(sync, "MAX_UNSETTLED", 1)
        world = World(TEN, decides_alone=True)
        world.open_breaker()
        assert world.at_once(b"a")[0]
        with pytest.raises(BreakerOpenError):
            world.at_once(b"another of its hash tag")
        assert world.at_once(b"a")[0]

    async def test_failing_batches_bound_the_unsettled_buckets_even_if_checks_succeed(
        self, monkeypatch
    ):
        monkeypatch.setattr(sync, "MAX_UNSETTLED", 5)
        world = World()
        monkeypatch.setattr(
            world.store, "settle", lambda _tag, _batch, done: done_later(world, done)
        )
        for number in range(1_000):
            with suppress(BreakerOpenError):
                world.check(b"a%d" % number)
                world.check(b"a%d" % number)
            world.sync()
            world.run(50 * MS)
        assert world.tags[ord("a")].unsettled_buckets < 200
        assert world.server.is_open

    async def test_a_node_that_decides_alone_uses_packed_states(self):
        world = World(TEN, decides_alone=True)
        world.store.spend(b"a", TEN, 8, world.clock.now_us())
        world.know()
        world.pack()
        world.open_breaker()
        assert world.at_once(cost=3)[4] is LIMIT_EXCEEDED
        assert world.at_once(cost=2)[0]

    @pytest.mark.parametrize("decides_alone", [True, False])
    async def test_checks_behind_a_first_check_are_answered_after_the_breaker_has_opened(
        self, decides_alone
    ):
        world = World(TEN, decides_alone=decides_alone)
        world.store.mode = "held"
        first, answer, peek = world.wait(), world.wait(), world.wait(peek=True)
        world.open_breaker()
        world.store.held_one().answer()
        assert first.result()[:2] == (True, 9)
        if decides_alone:
            assert answer.result()[:2] == (True, 8)
        else:
            assert isinstance(answer.result(), BreakerOpenError)
        assert peek.done()

    async def test_a_late_first_check_answer_creates_no_second_bucket(
        self,
    ):
        world = World(TEN, decides_alone=True)
        world.store.spend(b"a", TEN, 5, world.clock.now_us())
        world.store.mode = "held"
        answer = world.wait()
        world.open_breaker()
        world.at_once(cost=2)
        world.store.held_one().answer()
        assert answer.result()[:2] == (True, 10 - 5 - 1)
        assert world.peek()[1] == 10 - 5 - 1 - 2 - 1
        world.store.mode = "up"
        world.settle()
        assert world.store.spent(b"a") == 8

    async def test_a_late_first_check_answer_creates_no_second_bucket_beside_an_evicted_unsettled_one(
        self,
    ):
        world = World(TEN, decides_alone=True, max_entries=1)
        world.store.mode = "held"
        answer = world.wait()
        world.open_breaker()
        world.at_once(cost=2)
        for other in (b"b", b"c"):
            world.at_once(other)
            world.refresh.step()
        assert world.cache.get(b"a") is None
        world.store.held_one().answer()
        assert answer.result()[:2] == (True, 9)
        world.store.mode = "up"
        world.settle()
        assert world.store.spent(b"a") == 3

    async def test_spends_refilled_during_an_outage_are_forgiven(self):
        world = World(limited(10, window_seconds=1), decides_alone=True)
        world.know()
        world.check(cost=4)
        world.store.mode = "down"
        world.sync()
        world.open_breaker()
        for _ in range(3):
            world.run(SECOND)
            assert world.at_once(cost=10)[0]
        world.run(SECOND)
        world.store.mode = "up"
        world.run(2 * SECOND)
        world.settle()
        assert world.accuracy.forgiven_total == 30

    async def test_refilled_spends_are_forgiven_before_any_state_is_adopted(self):
        world = World(limited(10, window_seconds=1), decides_alone=True)
        world.know()
        world.check(cost=4)
        world.store.mode = "held"
        world.sync()
        world.open_breaker()
        world.run(2 * SECOND)
        assert world.at_once(cost=10)[0]
        world.run(SECOND)
        world.store.spend(b"a", world.rule, 1, world.clock.now_us())
        world.refresh.adopt_by_name(name_of(b"a"), world.store.ledger.buckets[name_of(b"a")])
        assert world.accuracy.forgiven_total == 10

    async def test_a_half_moved_slot_opens_no_breaker_and_views_decide_after_the_timeout(self):
        world = World(TEN)
        world.store.spend(b"a", TEN, 8, world.clock.now_us())
        world.know()
        world.store.mode = "held"
        taken = world.wait()
        world.run()
        waiting = world.wait()
        for _ in range(4):
            world.store.held_one().fail(StoreMovingError("TRYAGAIN"))
            world.run(SECOND)
        assert [answer.result()[:2] for answer in (taken, waiting)] == [(True, 1), (True, 0)]
        assert (world.buckets.late_total, world.server.is_open) == (2, False)
        world.store.mode = "up"
        world.store.held_one().answer()
        world.settle()
        assert world.store.spent(b"a") == 10

    async def test_failures_of_the_sync_open_no_breaker(self, world):
        world.know()
        world.check()
        world.store.mode = "down"
        world.sync()
        world.run(20 * SECOND)
        assert not world.server.is_open
        assert world.stats.shared_state_errors_total > 10


class TestRules:
    async def test_a_lower_limit_applies_to_the_next_check(self, world):
        world.know()
        world.check(cost=4)
        lower = limited(5, revision=2)
        assert world.peek(rule=lower)[1] == 0
        assert world.check(rule=lower)[0]
        assert not world.check(rule=lower)[0]

    async def test_a_denial_under_a_new_limit_sends_it_to_the_store_once(self):
        world = World(TEN)
        world.store.spend(b"a", TEN, 10, world.clock.now_us())
        world.know()
        lower = limited(5, revision=2)
        for _ in range(3):
            assert not world.at_once(rule=lower)[0]
        world.settle()
        assert world.store.ledger.buckets[name_of(b"a")].limit == 5
        assert not world.at_once(rule=lower)[0]
        world.settle()
        assert len(world.store.asked("settle")) == 1

    async def test_a_denial_under_the_limit_of_the_store_sends_nothing(self):
        world = World(TEN)
        world.store.spend(b"a", TEN, 10, world.clock.now_us())
        world.know()
        assert not world.at_once()[0]
        assert not world.at_once(rule=limited(10, revision=2))[0]
        world.settle()
        assert world.store.asked("settle") == []

    async def test_a_rule_older_than_the_state_of_the_store_is_not_applied(self, world):
        world.know()
        world.store.spend(b"a", limited(5, revision=9), 1, world.clock.now_us())
        world.check()
        world.settle()
        assert world.at_once(rule=limited(500, revision=3), cost=10)[4] is COST_EXCEEDS_LIMIT

    @pytest.mark.parametrize("is_open", [False, True])
    async def test_no_more_is_left_than_the_limit_of_the_check_by_a_newer_one_of_the_store(
        self, is_open
    ):
        world = World(TEN, decides_alone=True)
        world.know()
        world.store.spend(b"a", limited(1_000, revision=9), 1, world.clock.now_us())
        world.at_once()
        world.settle()
        if is_open:
            world.open_breaker()
        assert world.view().peek(world.clock.now_us(), 1)[1] > TEN.limit
        assert world.at_once()[:2] == (True, TEN.limit)

    async def test_a_waiting_peek_uses_its_own_rule(self, world):
        world.know()
        assert world.wait(rule=limited(5, revision=2), peek=True).result()[1] == 4


class TestGossip:
    async def test_a_state_from_another_node_becomes_the_base(self, world):
        world.know()
        world.store.spend(b"a", RULE, 900, world.clock.now_us())
        world.refresh.adopt_by_name(name_of(b"a"), world.store.ledger.buckets[name_of(b"a")])
        assert world.peek()[1] == 99

    async def test_a_state_of_an_unknown_bucket_is_ignored(self, world):
        world.refresh.adopt_by_name(name_of(b"a"), reset(None, RULE))
        world.refresh.reread(name_of(b"a"))
        assert (len(world.cache), world.store.requests) == (0, [])

    @pytest.mark.parametrize("tell", ["adopt_by_name", "reread"])
    async def test_a_state_of_a_packed_bucket_makes_its_next_check_read_it(self, world, tell):
        world.know()
        world.store.spend(b"a", RULE, 900, world.clock.now_us())
        world.check(cost=1)
        world.settle()
        world.pack()
        assert len(world.cache) == 1
        shared = world.store.ledger.buckets[name_of(b"a")] = reset(None, RULE)
        arguments = [name_of(b"a"), shared][: 2 if tell == "adopt_by_name" else 1]
        getattr(world.refresh, tell)(*arguments)
        assert world.at_once() is None
        assert world.check()[1] == 999

    async def test_a_changed_bucket_in_use_is_read_again(self, world):
        world.check(cost=900)
        world.settle()
        world.store.ledger.buckets[name_of(b"a")] = reset(None, RULE)
        world.refresh.reread(name_of(b"a"))
        world.run(MS)
        assert world.at_once()[1] == 999

    def hold_reread(self, world):
        """Re-read a bucket in use that another node has reset, and leave the answer to the test."""
        world.check(cost=900)
        world.settle()
        world.store.ledger.buckets[name_of(b"a")] = reset(None, RULE)
        world.store.mode = "held"
        world.refresh.reread(name_of(b"a"))

    async def test_a_bucket_packed_during_its_read_gets_the_answer(self, world):
        self.hold_reread(world)
        world.pack()
        assert world.peek()[1] == 99  # unpacked, as another object
        world.store.held_one().answer()
        assert world.peek()[1] == 999

    async def test_an_answer_about_a_packed_bucket_makes_its_next_check_read_it(self, world):
        self.hold_reread(world)
        world.pack()
        world.store.held_one().answer()
        assert world.at_once() is None

    async def test_a_failed_read_is_repeated_after_a_second(self, world):
        self.hold_reread(world)
        world.store.held_one().done(StoreUnavailableError("no answer"))
        world.store.mode = "up"
        reads = len(world.store.asked("read"))
        world.run(SECOND - 1)
        world.at_once()
        world.refresh.step()
        assert len(world.store.asked("read")) == reads
        world.run(1)
        world.refresh.step()
        world.run(MS)
        assert world.at_once()[1] == 999

    async def test_a_read_that_failed_with_the_breaker_is_repeated_when_it_has_closed(self, world):
        self.hold_reread(world)
        world.open_breaker()
        world.store.held_one().done(StoreUnavailableError("no answer"))
        world.store.mode = "up"
        reads = len(world.store.asked("read"))
        world.run(SECOND)
        world.refresh.step()
        world.run(MS)
        assert len(world.store.asked("read")) == reads
        world.run(60 * SECOND)
        assert world.server.begins_probe()
        world.server.answered()
        world.at_once()  # in use
        world.refresh.step()
        world.run(MS)
        assert world.at_once()[1] == 999

    async def test_failed_reads_are_remembered_up_to_a_bound(self, world, monkeypatch):
        monkeypatch.setattr(refresh, "MAX_BUCKETS", 1)
        world.know(b"a", b"b")
        world.store.mode = "down"
        for key in (b"a", b"b"):
            world.refresh.reread(name_of(key))
        world.run(2 * SECOND)
        world.store.mode = "up"
        reads = len(world.store.asked("read"))
        world.refresh.step()
        assert len(world.store.asked("read")) == reads + 1

    @pytest.mark.parametrize("answer", [None, StoreUnavailableError("no answer")])
    async def test_a_read_of_a_full_bucket_changes_nothing(self, world, answer):
        world.check(cost=900)
        world.settle()
        world.store.mode = "held"
        world.refresh.reread(name_of(b"a"))
        world.store.held_one().done(answer)
        assert world.peek()[1] == 99

    async def test_a_gap_re_reads_buckets_in_use_a_few_at_a_time(self, world):
        keys = [b"%d" % number for number in range(REREADS_PER_STEP + 1)]
        world.know(*keys)
        known = len(world.store.asked("read"))
        world.refresh.resync()
        reads = []
        for _ in range(3):
            world.refresh.step()
            reads.append(len(world.store.asked("read")) - known)
        assert reads == [REREADS_PER_STEP, REREADS_PER_STEP + 1, REREADS_PER_STEP + 1]
        assert {*world.store.asked("read")[known:]} == {*map(name_of, keys)}

    async def test_a_gap_is_processed_one_hash_tag_at_a_time(self, world):
        class Watched(dict):
            looked_at = 0

            def __iter__(self):
                Watched.looked_at += 1
                return super().__iter__()

        keys = [b"%c%d" % (tag, number) for tag in b"abc" for number in range(REREADS_PER_STEP)]
        world.know(*keys)
        for tag in world.tags:
            tag.buckets = Watched(tag.buckets)
        world.refresh.resync()
        assert Watched.looked_at == 0
        known, filled = len(world.store.asked("read")), {name_of(key)[0] for key in keys}
        for _ in range(len(filled)):
            before = Watched.looked_at
            world.refresh.step()
            assert Watched.looked_at - before <= HASH_TAGS
            assert len(world.store.asked("read")) - known <= REREADS_PER_STEP * len(filled)
        world.refresh.step()
        assert {*world.store.asked("read")[known:]} >= {*map(name_of, keys)}

    async def test_a_gap_during_the_reads_of_another_goes_on_with_the_next_hash_tag(self, world):
        keys = [b"%d" % number for number in range(5 * REREADS_PER_STEP)]
        world.know(*keys)
        known = len(world.store.asked("read"))
        for _ in range(10):
            world.refresh.resync()
            world.refresh.step()
        assert {*world.store.asked("read")[known:]} == {*map(name_of, keys)}

    async def test_buckets_packed_before_a_gap_is_processed_are_stale(self, world):
        world.know()
        world.refresh.resync()
        bucket = world.cache.get(b"a")
        world.cache._retire(world.cache.young.pop(b"a"))
        assert world.cache.take_packed(bucket.name) is not None
        world.cache.put_packed(bucket.name, bucket.view.base)
        world.refresh.step()
        assert world.cache.take_packed(bucket.name) is None

    async def test_after_a_gap_the_store_decides_the_next_check_of_a_packed_bucket(self, world):
        self.gap(world)
        world.store.spend(b"a", RULE, 990, world.clock.now_us())  # the message of it was lost
        assert world.at_once() is None
        assert world.check(cost=5)[:2] == (True, 4)
        assert world.check(cost=5)[:2] == (False, 4)
        assert world.store.spent(b"a") == 996

    async def test_after_a_gap_what_a_packed_bucket_had_left_is_known_while_answers_are_late(
        self, world
    ):
        world.check(cost=900)
        self.gap(world)
        world.store.mode = "deaf"
        answers = [world.wait(cost=cost) for cost in (60, 60, 30)]
        world.run(40 * MS)  # then the last ones, near the limit, have asked, too
        assert [answer.result()[:2] for answer in answers] == [(True, 39), (False, 39), (True, 9)]
        world.store.mode = "up"
        world.run(2 * SECOND)
        world.settle()
        assert world.store.spent(b"a") == 991

    async def test_what_the_store_may_have_charged_to_a_stale_bucket_ends_with_its_state(
        self, world
    ):
        world.check(cost=900)
        self.gap(world)
        world.store.mode = "down"
        assert world.check(cost=60)[:2] == (True, 39)
        assert world.check(cost=40)[:2] == (False, 39)
        world.store.mode = "up"
        world.run(SECOND)
        world.refresh.step()
        world.run(MS)
        assert world.check(cost=40)[:2] == (True, 59)

    async def test_after_a_gap_a_late_peek_and_the_check_behind_it_are_decided_by_what_was_known(
        self, world
    ):
        world.check(cost=900)
        self.gap(world)
        world.store.spend(b"a", RULE, 20, world.clock.now_us())
        world.store.mode = "down"
        late = world.wait(cost=99, peek=True), world.wait(cost=99)
        world.run(40 * MS)
        assert [answer.result()[:2] for answer in late] == [(True, 0), (True, 0)]

    async def test_a_stale_bucket_that_a_late_answer_left_undecided_is_read(self, world):
        world.check(cost=998)
        self.gap(world)
        self.reset_elsewhere(world)  # the message of it was lost
        world.store.mode = "held"
        answer = world.wait(cost=5)
        world.store.held_one().fail(StoreSlowError("too slow"))
        assert not answer.result()[0]
        world.pack()
        world.store.held_one().answer()
        world.store.mode = "deaf"
        assert world.check(cost=5)[0]

    async def test_a_read_that_is_answered_after_its_bucket_was_packed_is_adopted(self, world):
        world.know()
        assert world.check(cost=1_000)[0]
        world.settle()
        assert not world.check()[0]
        self.reset_elsewhere(world)
        world.store.mode = "held"
        world.pack()
        world.store.held_one().answer()
        world.store.mode = "up"
        assert world.check()[0]

    @staticmethod
    def reset_elsewhere(world):
        buckets = world.store.ledger.buckets
        buckets[name_of(b"a")] = reset(buckets[name_of(b"a")], RULE, 1)

    async def test_after_a_gap_a_peek_is_decided_by_the_store(self, world):
        world.check(cost=900)
        self.gap(world)
        world.store.spend(b"a", RULE, 20, world.clock.now_us())
        answer = world.wait(cost=100, peek=True)
        world.run(MS)
        assert answer.result()[:2] == (False, 79)

    async def test_a_bucket_that_could_not_be_read_after_a_gap_stays_known(self, world):
        world.know()
        world.check(cost=900)
        world.settle()
        world.refresh.resync()
        world.store.mode = "down"
        world.pack()
        assert world.cache.get(b"a") is None
        assert world.check(cost=101)[:2] == (False, 100)

    async def test_after_a_gap_a_node_alone_knows_what_a_packed_bucket_had_left(self):
        world = World(decides_alone=True)
        world.check(cost=900)
        self.gap(world)
        world.server.is_open = True
        assert world.at_once(cost=100)[:2] == (False, 99)

    def gap(self, world):
        """Pack a bucket that was checked, and lose messages."""
        world.check()
        world.settle()
        world.pack()
        world.lose_messages()


class TestResets:
    async def reset(self, world, *keys):
        resetting = asyncio.create_task(world.buckets.reset(keys, [world.rule] * len(keys)))
        await asyncio.sleep(0)
        world.run(20 * MS)
        await resetting

    async def test_a_reset_makes_the_bucket_full_and_is_published(self, world):
        world.know()
        world.check(cost=900)
        world.settle()
        world.check(cost=25)
        await self.reset(world, b"a", b"unknown")
        assert world.at_once()[:2] == (True, 999)
        assert world.bus.published == [(key[0], b"D" + name_of(key)) for key in (b"a", b"unknown")]
        world.settle()
        assert world.store.spent(b"a") == 1
        assert world.accuracy.forgiven_total == 25  # of the former bucket

    async def test_a_reset_takes_effect_after_the_store_has_lost_the_previous_one(self, world):
        world.run((YEAR_2025_S - 1_700_000_000) * SECOND)
        world.know()
        await self.reset(world, b"a")
        world.check(cost=1_000)
        world.settle()
        assert world.at_once()[0] is False
        world.store.ledger.buckets.clear()
        world.run(SECOND)
        await self.reset(world, b"a")
        assert world.at_once()[:2] == (True, 999)

    async def test_the_answered_ones_of_several_resets_are_published(self, world):
        world.store.mode = "held"
        resetting = asyncio.create_task(world.buckets.reset([b"a", b"b"], [world.rule] * 2))
        await asyncio.sleep(0)
        world.store.held[0].lose()
        world.store.held[1].answer()
        with pytest.raises(StoreUnavailableError):
            await resetting
        assert world.bus.published == [(ord("b"), b"D" + name_of(b"b"))]

    async def test_nodes_that_miss_a_reset_find_it_with_their_next_batch(self, world):
        world.check(cost=100)
        world.settle()
        world.store.ledger.buckets[name_of(b"a")] = reset(
            world.store.ledger.buckets[name_of(b"a")], RULE
        )
        world.check(cost=7)
        world.settle()
        assert world.store.spent(b"a") == 0
        assert world.at_once()[:2] == (True, 999)
        assert world.accuracy.forgiven_total == 7


class TestDenials:
    def reads_while_denied(self, world, us, cost=1):
        """Return the times of reads, in ms, while checks stay denied."""
        return self.reads_while(lambda: world.at_once(cost=cost), world, us)

    def reads_while(self, checks, world, us):
        began_us, reads = world.clock.monotonic_us(), []
        while world.clock.monotonic_us() - began_us < us:
            checks()
            known = len(world.store.asked("read"))
            world.refresh.step()
            if len(world.store.asked("read")) > known:
                reads.append((world.clock.monotonic_us() - began_us) // MS)
            world.run(10 * MS)
        return reads

    async def test_a_bucket_that_is_peeked_at_is_read_at_growing_intervals(self, world):
        world.know()
        reads = self.reads_while(world.peek, world, 4 * SECOND)
        assert reads == [100, 410, 1_120, 2_130, 3_140]

    async def test_a_peek_of_one_that_has_changed_sees_it_after_the_next_read(self, world):
        world.know()
        world.store.spend(b"a", RULE, 900, world.clock.now_us())
        assert world.peek()[1] == 999
        world.run(SECOND)
        world.refresh.step()
        world.run(2 * MS)
        assert world.peek()[1] == 99

    async def test_a_denied_bucket_is_read_at_growing_intervals(self):
        world = World(TEN)
        world.store.spend(b"a", TEN, 10, world.clock.now_us())
        world.know()
        assert self.reads_while_denied(world, 4 * SECOND) == [100, 410, 1_120, 2_130, 3_140]

    async def test_refresh_finds_a_bucket_that_another_node_reset(self):
        world = World(TEN)
        world.store.spend(b"a", TEN, 10, world.clock.now_us())
        world.know()
        assert not world.at_once()[0]
        world.store.ledger.buckets[name_of(b"a")] = reset(None, TEN)
        assert self.reads_while_denied(world, 150 * MS) == [100]
        assert world.at_once()[4] is WITHIN_LIMIT
        assert world.stats.false_positives_total > 0

    async def test_a_failed_read_of_a_denied_bucket_is_repeated(self):
        world = World(TEN)
        world.store.spend(b"a", TEN, 10, world.clock.now_us())
        world.know()
        world.store.mode = "down"
        assert self.reads_while_denied(world, SECOND) == [100, 420]
        assert not world.at_once()[0]

    async def test_a_cost_above_the_limit_is_no_reason_to_read(self):
        world = World(TEN)
        assert not world.check(b"new", cost=11)[0]
        world.know()
        assert not world.at_once(cost=11)[0]
        assert len(world.refresh.queue) == 0

    async def test_a_bucket_that_the_store_has_lost_stays_denied(self):
        world = World(TEN)
        world.store.spend(b"a", TEN, 10, world.clock.now_us())
        world.know()
        world.store.ledger.buckets.clear()
        assert self.reads_while_denied(world, 150 * MS) == [100]
        assert not world.at_once()[0]

    async def test_parts_of_other_nodes_end_when_the_store_has_the_bucket_full(self):
        world = World(TEN, members=3, decides_alone=True)
        world.open_breaker()
        assert not world.at_once(cost=5)[0]  # it has 4 of its own
        world.run(60 * SECOND)
        assert world.server.begins_probe()
        world.server.answered()
        assert self.reads_while_denied(world, 150 * MS, cost=5) == [100]
        assert world.check(cost=5)[0]

    async def test_an_open_breaker_stops_the_reads(self):
        world = World(TEN, decides_alone=True)
        world.store.spend(b"a", TEN, 10, world.clock.now_us())
        world.know()
        world.at_once()
        world.open_breaker()
        known = len(world.store.requests)
        world.run(SECOND)
        world.refresh.step()
        assert len(world.store.requests) == known


class TestEviction:
    async def test_a_bucket_evicted_before_it_is_settled_is_settled_and_found_again(
        self,
    ):
        world = World(max_entries=1)
        world.know(b"a")
        world.check(b"a", cost=100)
        for _ in range(3):  # others come until it is evicted
            world.know(b"b", b"c")
            world.refresh.step()
        assert world.cache.get(b"a") is None
        assert world.at_once(b"a")[:2] == (True, RULE.limit - 101)
        assert len(world.cache) <= 3
        world.settle()
        assert world.store.spent(b"a") == 101
        assert world.store.asked("first_check").count(name_of(b"a")) == 1

    async def test_a_bucket_evicted_and_settled_is_read_by_its_next_check(self):
        world = World(max_entries=1)
        world.know(b"a")
        world.check(b"a", cost=100)
        for _ in range(3):
            world.know(b"b", b"c")
            world.refresh.step()
        world.settle()
        assert world.at_once(b"a") is None
        assert world.check(b"a")[:2] == (True, RULE.limit - 101)


class TestRefresh:
    """What a node knows of a bucket, when another node has spent from it."""

    async def renewed(self, world, mode="up"):
        world.store.mode = mode
        task = asyncio.create_task(world.buckets.refresh([b"a"]))
        await asyncio.sleep(0)
        world.run(SECOND)
        await task

    async def test_a_bucket_in_use_is_read(self, world):
        world.know()
        world.store.spend(b"a", RULE, 900, world.clock.now_us())
        assert world.peek()[1] == 999
        await self.renewed(world)
        assert world.peek()[1] == 99

    async def test_the_next_check_of_a_packed_bucket_is_decided_by_the_store(self, world):
        world.know()
        world.pack()
        world.store.spend(b"a", RULE, 900, world.clock.now_us())
        await self.renewed(world)
        assert world.peek() is None
        assert world.check(cost=1)[1] == 99

    async def test_a_failed_read_leaves_the_view(self, world):
        world.know()
        await self.renewed(world, "down")
        assert world.peek()[1] == 999

    async def test_a_caller_that_leaves_is_no_error(self, world):
        world.know()
        task = asyncio.create_task(world.buckets.refresh([b"a"]))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        world.run(SECOND)
        assert world.peek()[1] == 999

    async def test_a_server_with_an_open_breaker_is_not_asked(self):
        world = World(decides_alone=True)
        world.know()
        world.open_breaker()
        await self.renewed(world)
        assert world.store.asked("read") == []
        assert world.peek()[1] == 999
