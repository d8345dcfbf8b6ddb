"""Limits with calendar windows."""

from dataclasses import replace
from datetime import datetime

import pytest

from ratelimitd.buckets.table import RestoredBuckets
from ratelimitd.model import Calendar, Decision, Period, Reason
from tests.unit.limiter.nodes import (
    GRANTED,
    KEYS,
    ORDERS,
    SECOND,
    USER,
    Node,
    Sharing,
    check_of,
)


def seconds(text):
    return int(datetime.fromisoformat(text).timestamp())


class TestCalendarLimits:
    MONTHLY = replace(
        ORDERS, window_seconds=2_592_000, calendar=Calendar(Period.MONTH, "Europe/Berlin")
    )
    MARCH, APRIL = seconds("2026-03-01T00:00+01:00"), seconds("2026-04-01T00:00+02:00")
    MAY = seconds("2026-05-01T00:00+02:00")

    @pytest.fixture
    def node(self):
        return self.at(Node(self.MONTHLY), self.MARCH)

    @staticmethod
    def at(node, now_s):
        node.clock.step(now_s * SECOND - node.clock.now_us())
        return node

    def test_remaining_and_reset_time_are_those_of_the_month(self, node):
        answer = node.check(cost=4)
        assert answer == Decision(
            True, 6, self.APRIL, 0, Reason.WITHIN_LIMIT, self.MONTHLY, self.MONTHLY
        )
        self.at(node, self.APRIL - 5)
        assert node.check(cost=6)[1:4] == (0, self.APRIL, 5)
        assert node.check()[:5] == (False, 0, self.APRIL, 5, Reason.LIMIT_EXCEEDED)
        self.at(node, self.APRIL)
        assert node.check()[1:4] == (9, self.MAY, 0)

    def test_a_cost_above_the_limit_gets_the_window_length_as_retry_delay(self, node):
        answer = node.check(cost=11)
        assert answer.reason is Reason.COST_EXCEEDS_LIMIT
        assert (answer.reset_time, answer.retry_after) == (self.APRIL, self.APRIL - self.MARCH)

    def test_a_late_check_is_judged_in_its_own_window(self, node):
        self.at(node, self.APRIL - 1)
        node.check(cost=10)
        self.at(node, self.APRIL + 1)
        assert node.check().remaining == 9
        for _ in range(3):
            assert not node.check(timestamp=self.APRIL - 2).allowed
            assert node.check(timestamp=self.APRIL + 2).allowed
        assert node.remaining() == 6

    def test_a_bucket_is_kept_until_its_window_ends_and_no_longer(self, node):
        node.check(cost=4)
        self.at(node, self.APRIL - 1)
        node.table.sweep(node.clock.now_us(), node.table.shard_count)
        assert node.remaining() == 6
        self.at(node, self.APRIL + 60)
        node.table.sweep(node.clock.now_us(), node.table.shard_count)
        assert len(node.table) == 0

    def test_a_new_limit_keeps_the_spends_and_a_new_calendar_does_not(self, node):
        node.check(cost=4)
        node.put(replace(self.MONTHLY, limit=20))
        assert node.remaining() == 16
        for calendar in (
            Calendar(Period.MONTH, "Europe/London"),
            Calendar(Period.MONTH, "Europe/Berlin", 2),
            Calendar(Period.DAY, "Europe/Berlin"),
            None,
        ):
            node.put(replace(self.MONTHLY, calendar=calendar))
            assert node.remaining() == 10
        node.put(self.MONTHLY)
        assert node.remaining() == 6

    async def test_a_reset_affects_the_current_window(self, node):
        node.check(cost=4)
        await node.reset()
        assert node.remaining() == 10

    def test_a_calendar_limit_is_judged_with_other_limits(self, node):
        node.put(replace(ORDERS, more=(replace(self.MONTHLY, name="month", limit=12),)))
        assert node.check(cost=10).allowed
        self.at(node, self.MARCH + 60)
        answer = node.check(cost=3)
        assert (answer.allowed, answer.limit.name, answer.reset_time) == (
            False, "month", self.APRIL,
        )  # fmt: skip
        assert [one.limit.window_seconds for one in answer.limits] == [2_592_000, 60]
        self.at(node, self.APRIL)
        assert node.check(cost=10).allowed

    def test_a_batch_is_judged_by_a_calendar_limit(self, node):
        batch = node.limiter.check_batch([check_of(cost=6), check_of(cost=6)])
        assert [one.allowed for one in batch] == [True, False]

    def test_bulk_checks_use_the_window_of_their_time(self, node):
        scope = node.limiter.scopes.find("/orders", USER)
        for now_s, end_s in ((self.MARCH, self.APRIL), (self.APRIL, self.MAY)):
            first, outcome, outcomes = node.limiter.judge((b"ada",), scope, now_s * SECOND, 10)
            assert (first, outcome[:3], list(outcomes)) == (0, (True, 0, end_s), [outcome])
        assert not node.limiter.judge((b"ada",), scope, self.MARCH * SECOND, 1)[1][0]

    def test_a_restored_bucket_continues_in_its_window(self, node):
        node.check(cost=4)
        restored = RestoredBuckets(KEYS)
        for shard in range(node.table.shard_count):
            for key in node.table.keys(shard):
                restored.put(KEYS.stored(key), node.table.value(key))
        other = self.at(Node(self.MONTHLY), self.APRIL - 1)
        other.table.adopt(restored)
        assert other.remaining() == 6
        assert self.at(other, self.APRIL).remaining() == 10

    async def test_a_calendar_limit_is_explained(self, node):
        node.check(cost=4)
        decision, [considered], *_ = await node.dry_run.explain(check_of(cost=7))
        assert decision == node.check(cost=7, peek=True)
        assert considered.limits[0][:4] == (False, 6, self.APRIL, self.APRIL - self.MARCH)

    async def test_nodes_share_a_bucket_of_each_window(self):
        node = self.at(Sharing(self.MONTHLY), self.MARCH)
        for now_s, end_s in ((self.MARCH, self.APRIL), (self.APRIL, self.MAY)):
            self.at(node, now_s)
            answer = await node.wait((True, 4, end_s, 0, Reason.WITHIN_LIMIT, None))
            assert (answer.reset_time, answer.limit) == (end_s, replace(self.MONTHLY, revision=7))
        (_, march, *_), (_, april, *_) = node.shared.asked
        assert (march.window_seconds, april.window_seconds) == (self.APRIL, self.MAY)
        assert march.revision == april.revision == 7

    async def test_a_shared_limit_is_the_same_object_throughout_its_window(self):
        node = self.at(Sharing(self.MONTHLY), self.MARCH)
        for _ in range(2):
            await node.wait(GRANTED)
        (_, one, *_), (_, other, *_) = node.shared.asked
        assert one is other

    @pytest.mark.parametrize("peek", [False, True])
    async def test_a_cost_above_a_shared_limit_gets_the_window_length_as_retry_delay(self, peek):
        node = self.at(Sharing(self.MONTHLY), self.MARCH)
        too_much = (False, 10, self.APRIL, self.APRIL, Reason.COST_EXCEEDS_LIMIT, None)
        answer = await node.wait(too_much, cost=11, peek=peek)
        assert answer.retry_after == self.APRIL - self.MARCH
        node.shared.at_once = too_much
        assert node.limiter.check(check_of(cost=11, peek=peek)).retry_after == answer.retry_after
        decision, [considered], *_ = await node.dry_run.explain(check_of(cost=11))
        assert decision.retry_after == considered.limits[0].retry_after == answer.retry_after

    async def test_a_reset_of_shared_buckets_affects_the_current_window(self):
        node = self.at(Sharing(self.MONTHLY), self.MARCH)
        await node.limiter.reset(b"ada", USER, "/orders")
        [(keys, [limit])] = node.shared.resets
        assert limit.window_seconds == self.APRIL
        scope = node.limiter.scopes.find("/orders", USER).at(node.clock.now_us())
        assert scope.several[0].key_suffix in keys[0]
