"""A limiter on buckets that nodes share."""

import asyncio
from dataclasses import replace

import pytest

from ratelimitd.buckets.table import BucketTable
from ratelimitd.errors import (
    BreakerOpenError,
    CheckInvalidError,
    StoreCorruptError,
    StoreOverloadedError,
    StoreUnavailableError,
)
from ratelimitd.limiter.limiter import CHECKS_PER_ITERATION
from ratelimitd.model import Decision, Enforcement, Reason
from tests.unit.limiter.nodes import (
    AWAY,
    DAY,
    EVERYWHERE,
    FAIL_OPEN,
    GRANTED,
    KEYS,
    NO_RULE,
    NOW_S,
    ORDERS,
    REFUSED,
    SECOND,
    SEVERAL,
    USER,
    FakeSharedBuckets,
    Sharing,
    check_of,
    limiter_of,
)


def test_a_limiter_has_either_its_own_buckets_or_shared_ones():
    for both in ({}, {"buckets": BucketTable(1), "shared": FakeSharedBuckets()}):
        with pytest.raises(ValueError, match="its own buckets or on shared ones"):
            limiter_of(**both)


class TestSharedBuckets:
    @pytest.fixture
    def node(self):
        return Sharing(ORDERS)

    @pytest.mark.parametrize("peek", [False, True])
    def test_a_check_that_the_node_can_decide_is_answered_without_waiting(self, node, peek):
        node.shared.at_once = GRANTED
        answer = node.limiter.check(check_of(peek=peek))
        assert answer[:5] == GRANTED[:5]
        assert answer.limit == replace(ORDERS, revision=7)
        assert (node.stats.allowed_total, node.stats.by_rule) == (1, {"orders": [1, 0]})

    def test_no_check_waits_to_be_allowed(self, node):
        node.shared.at_once = REFUSED
        answer = node.limiter.check(check_of(max_wait_ms=60_000))
        assert (answer[:5], answer.wait_ms) == (REFUSED[:5], 0)

    @pytest.mark.parametrize("peek", [False, True])
    async def test_an_undecided_check_waits_and_is_counted_when_it_is_answered(self, node, peek):
        assert node.limiter.check(check_of(cost=3, peek=peek)) is None
        assert node.stats.allowed_total == 0
        answer = await node.wait(GRANTED, cost=3, peek=peek)
        assert answer[:5] == GRANTED[:5]
        [(name, limit, *rest)] = node.shared.asked
        assert (name, *rest) == (b"ada", node.clock.now_us(), 3, peek)
        assert (limit.limit, limit.window_seconds, limit.revision) == (10, 60, 7)
        assert (await node.wait(REFUSED))[:5] == REFUSED[:5]
        assert (node.stats.allowed_total, node.stats.blocked_total) == (1, 1)
        assert node.stats.by_rule == {"orders": [1, 1]}
        assert [(name, scope.endpoint) for name, scope in node.denied] == [(b"ada", "/orders")]

    async def test_no_more_is_left_than_the_limit_that_is_answered(self, node):
        # The shared state has learned of a higher limit before the node.
        by_a_newer_limit = (True, 989, *GRANTED[2:])
        answer = await node.wait(by_a_newer_limit)
        assert (answer.remaining, answer.limit.limit) == (10, 10)
        node.shared.at_once = by_a_newer_limit
        assert node.limiter.check(check_of(peek=True)).remaining == 10

    async def test_an_undecided_check_is_recorded_once_when_it_is_answered(self):
        recorded = []

        class Recorder:
            seed, below = 0, 1 << 32

            def record(self, *what, allowed):
                recorded.append((*what, allowed))

        node = Sharing(ORDERS, recorder=Recorder())
        assert node.limiter.check(check_of()) is None
        assert recorded == []
        await node.wait(REFUSED)
        await node.wait(AWAY)
        now_us = node.clock.now_us()
        assert recorded == [
            (b"ada", check_of(), now_us, False),
            (b"ada", check_of(), now_us, True),
        ]

    def test_an_undecided_bulk_check_is_not_counted(self, node):
        scope = node.limiter.scopes.find("/orders", USER)
        assert node.limiter.charge(b"ada", scope, 0, 1) is None
        assert (node.stats.allowed_total, node.stats.by_rule) == (0, {"orders": [0, 0]})

    def test_a_batch_returns_none_for_each_undecided_check(self, node):
        assert node.limiter.check_batch([check_of(), check_of(b"bob")]) == [None, None]

    async def test_all_checks_of_a_batch_are_sent_before_the_first_answer(self, node):
        checks = [check_of(b"%d" % number) for number in range(3)]
        waiting = asyncio.create_task(node.limiter.wait(checks))
        await asyncio.sleep(0)
        assert [key for key, *_ in node.shared.asked] == [b"0", b"1", b"2"]
        waiting.cancel()
        await asyncio.wait([waiting])

    async def test_an_unexpected_error_of_an_answer_fails_open_and_is_reported(self, node):
        error = ValueError("defect")
        waiting = asyncio.create_task(node.limiter.wait([check_of(), check_of(b"bob")]))
        node.shared.answers = [error, GRANTED]
        answers = await waiting
        assert [answer.reason for answer in answers] == [
            Reason.FAIL_OPEN_ERROR,
            Reason.WITHIN_LIMIT,
        ]
        assert node.errors == [error]

    async def test_a_long_batch_is_sent_over_several_event_loop_iterations(self, node):
        node.shared.answers = [GRANTED] * (CHECKS_PER_ITERATION + 1)
        waiting = asyncio.create_task(node.limiter.wait([check_of()] * (CHECKS_PER_ITERATION + 1)))
        await asyncio.sleep(0)
        assert len(node.shared.asked) == CHECKS_PER_ITERATION
        assert len(await waiting) == CHECKS_PER_ITERATION + 1

    async def test_answers_come_in_the_order_of_the_checks(self, node):
        node.shared.answers = [GRANTED, AWAY, REFUSED]
        answers = await node.limiter.wait([check_of() for _ in range(3)])
        assert [answer.reason for answer in answers] == [
            Reason.WITHIN_LIMIT,
            Reason.FAIL_OPEN_ERROR,
            Reason.LIMIT_EXCEEDED,
        ]

    @pytest.mark.parametrize(
        ("error", "is_told"),
        [
            (AWAY, False),
            (StoreOverloadedError("full"), False),
            (StoreCorruptError("not ours"), True),
        ],
        ids=["away", "overloaded", "corrupt"],
    )
    async def test_a_check_without_an_answer_fails_open(self, node, error, is_told):
        assert await node.wait(error) == FAIL_OPEN
        assert node.errors == ([error] if is_told else [])
        assert (node.stats.allowed_total, node.stats.fail_open_error_total) == (1, 1)
        assert node.stats.by_rule == {"orders": [0, 0]}

    async def test_an_unexpected_error_of_the_call_fails_open_and_is_reported(
        self, node, monkeypatch
    ):
        monkeypatch.setattr(node.shared, "wait", None)
        assert await node.wait() == FAIL_OPEN
        assert [type(error) for error in node.errors] == [TypeError]

    async def test_an_open_breaker_allows_checks_as_specified(self, node):
        node.clock.advance(us=1)
        node.shared.at_once = BreakerOpenError(5 * SECOND)
        at_once = node.limiter.check(check_of())
        assert at_once == Decision(True, 1, NOW_S + 1 + 60, 0, Reason.FAIL_OPEN_BREAKER)
        assert await node.wait(node.shared.at_once) == at_once
        assert (node.stats.allowed_total, node.stats.fail_open_breaker_total) == (2, 2)
        assert (node.stats.fail_open_error_total, node.errors) == (0, [])

    @pytest.mark.parametrize(
        ("retry_after_us", "retry_after_s"), [(0, 1), (5 * SECOND, 5), (5 * SECOND + 1, 6)]
    )
    async def test_an_open_breaker_denies_until_the_next_probe_if_configured(
        self, retry_after_us, retry_after_s
    ):
        node = Sharing(breaker_denies=True)
        answer = await node.wait(BreakerOpenError(retry_after_us))
        reset_time = NOW_S + retry_after_s
        assert answer == Decision(False, 0, reset_time, retry_after_s, Reason.FAIL_OPEN_BREAKER)
        stats = node.stats
        assert (stats.blocked_total, stats.breaker_denied_total) == (1, 1)
        assert (stats.allowed_total, stats.bucket_looked_total) == (0, 0)

    async def test_a_waiting_check_is_judged_by_rules_that_changed_meanwhile(self, node):
        assert node.limiter.check(check_of()) is None
        node.put(replace(ORDERS, limit=3))
        answer = await node.wait(GRANTED)
        assert answer.limit == replace(ORDERS, limit=3, revision=8)
        node.put()
        assert await node.wait() == NO_RULE
        assert len(node.shared.asked) == 1

    async def test_without_a_book_the_shared_state_is_not_called(self):
        node = Sharing(book=False)
        assert await node.wait() == FAIL_OPEN
        assert node.shared.asked == []

    async def test_a_refused_timestamp_does_not_affect_other_waiting_checks(self):
        node = Sharing(timestamps="caller")
        node.shared.answers = [GRANTED]
        refused, answer = await node.limiter.wait([check_of(timestamp=-1), check_of(timestamp=60)])
        assert isinstance(refused, CheckInvalidError)
        assert answer[:5] == GRANTED[:5]
        assert [now_us for _, _, now_us, *_ in node.shared.asked] == [60 * SECOND]

    async def test_a_timestamp_within_the_tolerance_is_used(self, node):
        await node.wait(GRANTED, timestamp=node.clock.now_us() + 5 * SECOND)
        ((_, _, now_us, *_),) = node.shared.asked
        assert now_us == node.clock.now_us() + 5 * SECOND

    async def test_a_reset_affects_all_candidate_rules_with_the_revision_of_the_book(self, node):
        node.put(replace(ORDERS, enabled=False), EVERYWHERE, revision=9)
        rules = await node.limiter.reset(b"ada", USER, "/orders")
        ((keys, ruling),) = node.shared.resets
        assert ruling == [replace(rule, revision=9) for rule in rules]
        assert keys == [b"ada" + KEYS.scope(rule, "/orders") for rule in rules]
        assert len(rules) == 2

    async def test_a_reset_with_an_unknown_result_is_an_error(self, node):
        node.shared.reset_error = AWAY
        with pytest.raises(StoreUnavailableError, match="no answer"):
            await node.limiter.reset(b"ada", USER, "/orders")

    async def test_a_reset_does_not_wait_for_one_whose_server_is_silent(self, node):
        node.shared.acknowledges.clear()
        silent = asyncio.create_task(node.limiter.reset(b"ada", USER, "/orders"))
        other = asyncio.create_task(node.limiter.reset(b"bob", USER, "/orders"))
        for _ in range(10):
            await asyncio.sleep(0)
        assert [keys[0][:3] for keys, _ in node.shared.resets] == [b"ada", b"bob"]
        node.shared.acknowledges.set()
        await asyncio.gather(silent, other)


class TestSeveralSharedLimits:
    SEEN = replace(DAY, name="seen", enforcement=Enforcement.OBSERVE)

    @pytest.fixture
    def node(self):
        return Sharing(SEVERAL)

    def test_a_check_that_the_node_can_decide_is_answered_without_waiting(self, node):
        node.shared.at_once = GRANTED
        answer = node.limiter.check(check_of())
        assert (answer.allowed, [one.limit.name for one in answer.limits]) == (
            True, ["day", "default"],
        )  # fmt: skip

    def test_no_check_waits_to_be_allowed(self, node):
        node.shared.at_once = REFUSED
        answer = node.limiter.check(check_of(max_wait_ms=60_000))
        assert (answer[:5], answer.wait_ms, node.errors) == (REFUSED[:5], 0, [])

    @pytest.mark.parametrize("peek", [False, True])
    async def test_an_undecided_check_is_asked_on_all_buckets(self, node, peek):
        assert node.limiter.check(check_of(peek=peek)) is None
        answer = await node.wait(GRANTED, REFUSED, peek=peek)
        assert (answer[:5], answer.limit.name) == (REFUSED[:5], "day")
        assert [(one.limit.name, one.allowed) for one in answer.limits] == [
            ("day", False), ("default", True),
        ]  # fmt: skip
        assert [asked[-1] for asked in node.shared.asked] == [peek, peek]
        assert (node.stats.allowed_total, node.stats.blocked_total) == (0, 1)

    async def test_no_more_is_left_of_each_limit_than_the_node_knows(self, node):
        answer = await node.wait((True, 989, *GRANTED[2:]), (True, 979, *GRANTED[2:]))
        left = {one.limit.name: one.remaining for one in answer.limits}
        assert (answer.remaining, left) == (10, {"default": 10, "day": 12})

    async def test_a_bulk_check_that_the_node_cannot_decide_waits(self, node):
        scope = node.limiter.scopes.find("/orders", USER)
        assert node.limiter.judge((b"ada",), scope, 0, 1) is None
        assert node.stats.allowed_total == 0

    async def test_the_shared_state_is_told_how_long_the_caller_waits(self, node):
        node.shared.answers += [GRANTED] * 2
        await node.limiter.wait([check_of()], 0.02)
        assert node.shared.remaining_s == [0.02] * 2

    async def test_an_allowed_check_fails_open_if_one_limit_is_unreachable(self, node):
        answer = await node.wait(GRANTED, AWAY)
        assert (answer.allowed, answer.reason) == (True, Reason.FAIL_OPEN_ERROR)
        answer = await node.wait(AWAY, BreakerOpenError(1))
        assert (answer.allowed, answer.reason) == (True, Reason.FAIL_OPEN_BREAKER)
        answer = await node.wait(BreakerOpenError(1), REFUSED)
        assert (answer.allowed, answer.reason, answer.limits) == (False, Reason.LIMIT_EXCEEDED, ())
        assert node.stats.fail_open_error_total == node.stats.fail_open_breaker_total == 1

    async def test_an_open_breaker_on_one_limit_denies_if_configured(self):
        node = Sharing(SEVERAL, breaker_denies=True)
        answer = await node.wait(GRANTED, BreakerOpenError(2_000_000))
        assert (answer.allowed, answer.retry_after) == (False, 2)

    async def test_an_unreachable_observing_limit_does_not_affect_the_answer(self):
        node = Sharing(replace(ORDERS, more=(self.SEEN,)))
        answer = await node.wait(GRANTED, AWAY)
        assert (answer[:5], answer.limits) == (GRANTED[:5], ())
        answer = await node.wait(AWAY, AWAY)
        assert answer.reason is Reason.FAIL_OPEN_ERROR
        answer = await node.wait(GRANTED, REFUSED)
        assert (answer[:5], len(answer.limits)) == (GRANTED[:5], 2)
        assert node.stats.would_deny == {"orders,seen": [1]}

    @pytest.mark.parametrize("error", [BreakerOpenError(1), AWAY])
    async def test_an_open_breaker_denies_no_check_that_only_observing_limits_judge(self, error):
        first = replace(ORDERS, enforcement=Enforcement.OBSERVE)
        node = Sharing(replace(first, more=(self.SEEN,)), breaker_denies=True)
        answer = await node.wait(error, BreakerOpenError(1))
        assert (answer.allowed, answer.reason) == (True, Reason.FAIL_OPEN_BREAKER)
        assert (node.stats.blocked_total, node.stats.breaker_denied_total) == (0, 0)

    async def test_an_open_breaker_on_an_observing_limit_does_not_deny_an_unanswered_check(self):
        node = Sharing(replace(ORDERS, more=(self.SEEN,)), breaker_denies=True)
        answer = await node.wait(AWAY, BreakerOpenError(1))
        assert (answer.allowed, answer.reason) == (True, Reason.FAIL_OPEN_ERROR)
        answer = await node.wait(BreakerOpenError(1), AWAY)
        assert (answer.allowed, answer.reason) == (False, Reason.FAIL_OPEN_BREAKER)

    async def test_a_reset_affects_all_buckets(self, node):
        await node.limiter.reset(b"ada", USER, "/orders")
        ((keys, limits),) = node.shared.resets
        assert len(set(keys)) == 2
        assert [(limit.name, limit.revision) for limit in limits] == [("default", 7), ("day", 7)]

    async def test_a_defect_is_reported_and_fails_open(self, node):
        answer = await node.wait(GRANTED, ValueError("defect"))
        assert answer.reason is Reason.FAIL_OPEN_ERROR
        assert [str(error) for error in node.errors] == ["defect"]
