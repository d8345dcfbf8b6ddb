"""The checks of one node on buckets that it shares, and a store of which the test says what becomes of requests."""

import asyncio
from contextlib import suppress

import pytest

from ratelimitd.cluster import sync
from ratelimitd.cluster.pending import HASH_TAGS
from ratelimitd.cluster.refresh import REREADS_PER_STEP
from ratelimitd.cluster.shared_buckets import MAX_MISSED
from ratelimitd.errors import BreakerOpenError, StoreMovingError, StoreUnavailableError
from ratelimitd.ledger.shared_state import YEAR_2025_S
from ratelimitd.model import COST_EXCEEDS_LIMIT, LIMIT_EXCEEDED, WITHIN_LIMIT
from tests.ledger_model import reset
from tests.unit.cluster.world import MS, RULE, SECOND, World, limited, name_of

TEN = limited(10)


def done_later(world, done):
    """A request that fails."""
    world.timers.call_later(0.001, done, StoreUnavailableError("out of memory"))


@pytest.fixture
async def world():
    return World()


class TestMisses:
    async def test_a_check_of_a_bucket_that_the_node_does_not_know_is_decided_by_the_store(
        self, world
    ):
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

    async def test_all_that_wait_for_one_bucket_wait_for_the_first_and_are_charged_in_order(
        self, world
    ):
        answers = [world.wait(cost=cost) for cost in (1, 2, 3)]
        world.run(MS)
        assert [answer.result()[1] for answer in answers] == [999, 997, 994]
        assert len(world.store.asked("first_check")) == world.stats.bucket_missed_total == 1

    async def test_five_that_fail_open_the_breaker(self, world):
        world.store.mode = "down"
        for _ in range(5):
            assert not world.server.is_open
            world.check()
        assert world.server.is_open

    async def test_a_caller_that_has_left_was_charged_and_one_behind_it_was_not(self, world):
        world.wait(cost=100).cancel()
        world.wait(cost=50).cancel()
        world.run(MS)
        assert world.at_once()[:2] == (True, 899)

    async def test_the_name_of_a_bucket_is_worked_out_once_for_a_check_that_waits(
        self, world, monkeypatch
    ):
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

    async def test_under_another_rule_than_the_one_that_was_read_for_the_newer_one_holds(
        self, world
    ):
        answers = [world.wait(), world.wait(rule=limited(5, revision=2))]
        world.run(MS)
        assert [answer.result()[1] for answer in answers] == [999, 3]


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
        assert world.buckets.asked_total == 2  # more than there is left for do not even ask
        assert world.buckets.late_total == 0

    async def test_a_check_is_answered_once_and_within_20_ms(self):
        world = World(TEN)
        world.know()
        world.check(cost=5)
        world.settle()
        world.store.mode = "deaf"
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

    async def test_what_was_granted_late_is_charged_once(self):
        world = World(TEN)
        world.know()
        world.check(cost=5)
        world.settle()
        world.store.mode = "deaf"
        world.wait(cost=4)
        world.run(SECOND)
        world.store.mode = "up"
        world.run(2 * SECOND)
        world.settle()
        assert world.store.spent(b"a") == 9
        assert world.accuracy.forgiven_total == 0

    async def test_what_was_given_up_before_a_batch_took_it_is_charged_once(self):
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

    async def test_a_caller_that_leaves_is_not_given_up_on(self):
        world = World(TEN)
        world.know()
        world.store.mode = "deaf"
        answer = world.wait(cost=9)
        answer.cancel()
        world.run(SECOND)
        assert world.buckets.late_total == 0


class TestSpending:
    async def test_spends_arrive_once_whatever_replies_are_lost(self, world):
        world.check(cost=7)
        world.store.mode = "deaf"
        world.sync()
        world.run(3 * SECOND)
        world.store.mode = "up"
        world.run(2 * SECOND)
        world.settle()
        assert world.store.spent(b"a") == 7

    async def test_a_share_that_is_used_up_does_not_wait_for_the_sync(self):
        world = World(limited(100), members=2)
        world.know()
        for _ in range(24):
            world.check()
        assert world.store.asked("settle") == []
        world.check()
        assert len(world.store.asked("settle")) == 1
        world.run(MS)
        assert world.store.spent(b"a") == 25

    async def test_nor_does_one_that_a_check_uses_up_that_waited_for_another(self):
        world = World(TEN)
        world.wait(cost=1)
        world.wait(cost=4)
        world.run(MS)
        assert len(world.store.asked("settle")) == 1

    async def test_a_check_of_a_packed_bucket_waits_for_nothing(self):
        world = World(TEN)
        world.store.spend(b"a", TEN, 1, world.clock.now_us())
        world.know()
        world.pack()
        assert world.wait().result()[:2] == (True, 8)

    async def test_a_cost_above_the_limit_is_denied_on_the_spot(self, world):
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

    async def test_others_are_told_when_a_bucket_runs_low(self):
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
    async def test_while_a_breaker_is_open_no_check_is_decided_cached_or_not(self, world):
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

    async def test_a_node_that_decides_alone_goes_by_what_it_knows(self):
        world = World(TEN, members=5, decides_alone=True)
        world.store.spend(b"a", TEN, 8, world.clock.now_us())
        world.know()
        world.open_breaker()
        assert [world.at_once()[0] for _ in range(3)] == [True, True, False]
        assert world.peek()[0] is False
        assert world.wait().result()[4] is LIMIT_EXCEEDED
        world.settle()
        assert world.store.spent(b"a") == 10

    async def test_it_takes_an_unknown_bucket_for_full_and_settles_it_later(self):
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
    async def test_of_an_unknown_bucket_it_allows_its_part_until_the_store_is_back(
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

    async def test_it_takes_on_no_more_buckets_than_may_wait_for_the_store(self, monkeypatch):
        monkeypatch.setattr(sync, "MAX_UNSETTLED", 1)
        world = World(TEN, decides_alone=True)
        world.open_breaker()
        assert world.at_once(b"a")[0]
        with pytest.raises(BreakerOpenError):
            world.at_once(b"another of its hash tag")
        assert world.at_once(b"a")[0]

    async def test_where_batches_fail_and_checks_do_not_a_node_does_not_take_on_ever_more_buckets(
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

    async def test_it_goes_on_with_what_was_packed(self):
        world = World(TEN, decides_alone=True)
        world.store.spend(b"a", TEN, 8, world.clock.now_us())
        world.know()
        world.pack()
        world.open_breaker()
        assert world.at_once(cost=3)[4] is LIMIT_EXCEEDED
        assert world.at_once(cost=2)[0]

    @pytest.mark.parametrize("decides_alone", [True, False])
    async def test_a_check_behind_one_that_comes_when_the_breaker_has_opened_is_answered_like_others(
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

    async def test_an_answer_that_comes_when_the_bucket_was_made_without_it_makes_no_second_one(
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

    async def test_nor_when_that_one_has_been_evicted_with_something_to_settle(self):
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

    async def test_after_an_outage_no_more_is_settled_than_is_lacking(self):
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

    async def test_that_is_reckoned_before_anything_is_adopted_by_whatever_way_it_comes(self):
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
        world.refresh.heard(name_of(b"a"), world.store.ledger.buckets[name_of(b"a")])
        assert world.accuracy.forgiven_total == 10

    async def test_a_slot_that_stands_half_moved_opens_none_and_nobody_waits_for_it(self):
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

    async def test_the_sync_opens_no_breaker(self, world):
        world.know()
        world.check()
        world.store.mode = "down"
        world.sync()
        world.run(20 * SECOND)
        assert not world.server.is_open
        assert world.stats.shared_state_errors_total > 10


class TestRules:
    async def test_a_lower_limit_holds_from_the_next_check_on(self, world):
        world.know()
        world.check(cost=4)
        lower = limited(5, revision=2)
        assert world.peek(rule=lower)[1] == 0
        assert world.check(rule=lower)[0]
        assert not world.check(rule=lower)[0]

    async def test_a_denial_under_a_new_limit_tells_the_store_of_it_once(self):
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

    async def test_a_denial_under_the_limit_that_the_store_goes_by_tells_nothing(self):
        world = World(TEN)
        world.store.spend(b"a", TEN, 10, world.clock.now_us())
        world.know()
        assert not world.at_once()[0]
        assert not world.at_once(rule=limited(10, revision=2))[0]
        world.settle()
        assert world.store.asked("settle") == []

    async def test_a_rule_of_an_older_book_than_a_state_has_told_of_changes_nothing(self, world):
        world.know()
        world.store.spend(b"a", limited(5, revision=9), 1, world.clock.now_us())
        world.check()
        world.settle()
        assert world.at_once(rule=limited(500, revision=3), cost=10)[4] is COST_EXCEEDS_LIMIT

    async def test_a_peek_that_waited_goes_by_its_own_rule(self, world):
        world.know()
        assert world.wait(rule=limited(5, revision=2), peek=True).result()[1] == 4


class TestNews:
    async def test_a_state_that_another_node_tells_is_the_base(self, world):
        world.know()
        world.store.spend(b"a", RULE, 900, world.clock.now_us())
        world.refresh.heard(name_of(b"a"), world.store.ledger.buckets[name_of(b"a")])
        assert world.peek()[1] == 99

    async def test_one_of_an_unknown_bucket_changes_nothing(self, world):
        world.refresh.heard(name_of(b"a"), reset(None, RULE))
        world.refresh.doubt(name_of(b"a"))
        assert (len(world.cache), world.store.requests) == (0, [])

    @pytest.mark.parametrize("tell", ["heard", "doubt"])
    async def test_one_of_a_packed_bucket_has_it_read_again_when_it_is_asked_for(self, world, tell):
        world.know()
        world.store.spend(b"a", RULE, 900, world.clock.now_us())
        world.check(cost=1)
        world.settle()
        world.pack()
        assert len(world.cache) == 1
        shared = world.store.ledger.buckets[name_of(b"a")] = reset(None, RULE)
        arguments = [name_of(b"a"), shared][: 2 if tell == "heard" else 1]
        getattr(world.refresh, tell)(*arguments)
        assert len(world.cache) == 0
        assert world.at_once() is None
        assert world.check()[1] == 999

    async def test_a_bucket_in_use_that_is_another_now_is_read_again(self, world):
        world.check(cost=900)
        world.settle()
        world.store.ledger.buckets[name_of(b"a")] = reset(None, RULE)
        world.refresh.doubt(name_of(b"a"))
        world.run(MS)
        assert world.at_once()[1] == 999

    async def test_a_look_that_fails_is_repeated(self, world):
        world.check(cost=900)
        world.settle()
        world.store.ledger.buckets[name_of(b"a")] = reset(None, RULE)
        world.store.mode = "held"
        world.refresh.doubt(name_of(b"a"))
        world.store.held_one().done(StoreUnavailableError("no answer"))
        world.store.mode = "up"
        world.refresh.step()
        world.run(MS)
        assert world.at_once()[1] == 999

    @pytest.mark.parametrize("answer", [None, StoreUnavailableError("no answer")])
    async def test_a_look_that_finds_nothing_changes_nothing(self, world, answer):
        world.check(cost=900)
        world.settle()
        world.store.mode = "held"
        world.refresh.doubt(name_of(b"a"))
        world.store.held_one().done(answer)
        assert world.peek()[1] == 99

    async def test_after_a_gap_what_is_in_use_is_read_again_a_few_at_a_time(self, world):
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

    async def test_a_gap_is_worked_through_one_hash_tag_at_a_time(self, world):
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

    async def test_what_is_packed_between_a_gap_and_its_turn_is_read_again(self, world):
        world.know()
        world.refresh.resync()
        bucket = world.cache.get(b"a")
        world.cache._retire(world.cache.young.pop(b"a"))
        assert world.cache.take_packed(bucket.name) is not None
        world.cache.put_packed(bucket.name, bucket.view.base)
        world.refresh.step()
        assert world.cache.take_packed(bucket.name) is None

    async def test_after_a_gap_what_is_packed_is_read_again_when_it_is_asked_for(self, world):
        world.check()
        world.settle()
        world.pack()
        world.refresh.resync()
        assert world.at_once() is None


class TestResets:
    async def reset(self, world, *keys):
        resetting = asyncio.create_task(world.buckets.reset(keys, [world.rule] * len(keys)))
        await asyncio.sleep(0)
        world.run(20 * MS)
        await resetting

    async def test_a_bucket_starts_afresh_here_and_others_are_told(self, world):
        world.know()
        world.check(cost=900)
        world.settle()
        world.check(cost=25)
        await self.reset(world, b"a", b"unknown")
        assert world.at_once()[:2] == (True, 999)
        assert world.bus.published == [(key[0], b"D" + name_of(key)) for key in (b"a", b"unknown")]
        world.settle()
        assert world.store.spent(b"a") == 1
        assert world.accuracy.forgiven_total == 25  # of the bucket that is no more

    async def test_one_acts_also_where_the_store_has_lost_the_last(self, world):
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

    async def test_of_several_others_are_told_of_those_that_were_answered(self, world):
        world.store.mode = "held"
        resetting = asyncio.create_task(world.buckets.reset([b"a", b"b"], [world.rule] * 2))
        await asyncio.sleep(0)
        world.store.held[0].lose()
        world.store.held[1].answer()
        with pytest.raises(StoreUnavailableError):
            await resetting
        assert world.bus.published == [(ord("b"), b"D" + name_of(b"b"))]

    async def test_others_that_do_not_hear_of_it_find_it_with_their_next_batch(self, world):
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
    def reads_while_denied(self, world, us):
        """When the bucket is read while checks of it go on being denied, in ms."""
        began_us, reads = world.clock.monotonic_us(), []
        while world.clock.monotonic_us() - began_us < us:
            world.at_once()
            known = len(world.store.asked("read"))
            world.refresh.step()
            if len(world.store.asked("read")) > known:
                reads.append((world.clock.monotonic_us() - began_us) // MS)
            world.run(10 * MS)
        return reads

    async def test_a_denied_bucket_is_read_again_less_and_less_often(self):
        world = World(TEN)
        world.store.spend(b"a", TEN, 10, world.clock.now_us())
        world.know()
        assert self.reads_while_denied(world, 4 * SECOND) == [100, 410, 1_120, 2_130, 3_140]

    async def test_what_others_gave_back_is_found_by_that(self):
        world = World(TEN)
        world.store.spend(b"a", TEN, 10, world.clock.now_us())
        world.know()
        assert not world.at_once()[0]
        world.store.ledger.buckets[name_of(b"a")] = reset(None, TEN)
        assert self.reads_while_denied(world, 150 * MS) == [100]
        assert world.at_once()[4] is WITHIN_LIMIT
        assert world.stats.false_positives_total > 0

    async def test_while_the_breaker_is_open_nothing_is_read(self):
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
    async def test_a_bucket_that_is_evicted_before_it_is_settled_is_settled_and_found_by_a_miss(
        self,
    ):
        world = World(max_entries=1)
        world.know(b"a")
        world.check(b"a", cost=100)
        for _ in range(3):  # others come, until it leaves
            world.know(b"b", b"c")
            world.refresh.step()
        assert world.cache.get(b"a") is None
        assert world.at_once(b"a")[:2] == (True, RULE.limit - 101)
        assert len(world.cache) <= 3
        world.settle()
        assert world.store.spent(b"a") == 101
        assert world.store.asked("first_check").count(name_of(b"a")) == 1

    async def test_one_that_is_settled_before_it_is_asked_for_again_is_read(self):
        world = World(max_entries=1)
        world.know(b"a")
        world.check(b"a", cost=100)
        for _ in range(3):
            world.know(b"b", b"c")
            world.refresh.step()
        world.settle()
        assert world.at_once(b"a") is None
        assert world.check(b"a")[:2] == (True, RULE.limit - 101)
