"""Decisions of a limiter on its own buckets, and its counters."""

import random
from dataclasses import replace

import pytest

from ratelimitd.buckets.snapshot_format import unpack
from ratelimitd.buckets.table import BucketTable
from ratelimitd.counters import MAX_RULE_LABELS, OTHER_RULES
from ratelimitd.errors import CheckInvalidError
from ratelimitd.limiter import scopes as scopes_module
from ratelimitd.limiter.scopes import MAX_SCOPES
from ratelimitd.model import MAX_TIME_US, Algorithm, Check, Decision, Limit, Reason, Rule
from ratelimitd.rules.book import RuleBook
from tests.unit.limiter.nodes import (
    EVERYWHERE,
    FAIL_OPEN,
    IP,
    NO_RULE,
    NOW_S,
    ORDERS,
    SECOND,
    USER,
    Node,
    limiter_of,
)


class TestDeciding:
    def test_an_answer_is_that_of_the_algorithm_with_the_deciding_rule(self, node):
        assert node.check(cost=4) == Decision(
            allowed=True,
            remaining=6,
            reset_time=NOW_S + 60,
            retry_after=0,
            reason=Reason.WITHIN_LIMIT,
            rule=ORDERS,
            limit=ORDERS,
        )
        assert node.check(cost=7)[:5] == (False, 6, NOW_S + 60, 60, Reason.LIMIT_EXCEEDED)
        assert node.check(cost=11).reason is Reason.COST_EXCEEDS_LIMIT

    def test_a_rule_for_the_endpoint_precedes_the_global_rule(self, node):
        assert node.check().rule is ORDERS
        assert node.check(endpoint="/carts").rule is EVERYWHERE

    def test_buckets_of_the_global_rule_are_kept_per_endpoint_and_identifier(self, node):
        for name, endpoint in ((b"ada", "/carts"), (b"ada", "/pages"), (b"bob", "/carts")):
            assert [node.check(name, endpoint).allowed for _ in range(4)] == [True] * 3 + [False]

    def test_identifier_types_do_not_share_buckets(self):
        node = Node(EVERYWHERE, replace(EVERYWHERE, id="ip", identifier_type=IP))
        for kind in (USER, IP):
            checks = [node.limiter.check(Check(b"::1", kind, "/e")) for _ in range(4)]
            assert [answer.allowed for answer in checks] == [True] * 3 + [False]

    def test_a_check_without_a_rule_is_allowed_and_leaves_no_bucket(self):
        node = Node(replace(ORDERS, enabled=False))
        assert node.check(cost=2**31 - 1) == NO_RULE
        assert len(node.table) == 0
        assert (node.stats.allowed_total, node.stats.no_rule_total) == (1, 1)
        assert node.stats.by_rule == {}
        assert node.unmatched == ["/orders"]

    def test_a_peek_gets_the_same_answer_and_charges_nothing(self, node):
        for cost in (3, 11, 8):
            peeked = node.check(cost=cost, peek=True)
            assert node.check(cost=cost, peek=True) == peeked
            assert node.check(cost=cost) == peeked


class TestRules:
    def test_a_new_book_applies_from_the_next_check_on(self, node):
        assert node.check(cost=8).remaining == 2
        node.put(replace(ORDERS, limit=20))
        assert node.check().remaining == 11
        node.put(replace(ORDERS, limit=5))
        assert node.check()[:2] == (False, 0)
        node.put()
        assert node.check() == NO_RULE

    def test_a_disabled_rule_is_ignored_and_keeps_its_buckets(self, node):
        node.check(cost=10)
        node.put(replace(ORDERS, enabled=False), EVERYWHERE)
        assert node.check().rule is EVERYWHERE
        node.put(ORDERS, EVERYWHERE)
        assert not node.check().allowed

    @pytest.mark.parametrize(
        "change", [{"algorithm": Algorithm.TOKEN_BUCKET}, {"window_seconds": 61}], ids=str
    )
    def test_another_algorithm_or_window_starts_with_a_fresh_bucket(self, node, change):
        node.check(cost=10)
        node.put(replace(ORDERS, **change))
        assert node.check().remaining == 9
        node.put(ORDERS)
        assert not node.check().allowed

    def test_the_book_in_force_is_readable(self):
        node = Node(book=False)
        assert node.limiter.book is None
        book = RuleBook.of([ORDERS], 7)
        node.limiter.replace_book(book)
        assert node.limiter.book is book

    def test_cached_endpoints_are_bounded(self, node, monkeypatch):
        assert MAX_SCOPES == 4_096
        monkeypatch.setattr(scopes_module, "MAX_SCOPES", 3)
        for number in range(20):
            assert node.check(endpoint=f"/{number % 7}").rule is EVERYWHERE
            assert len(node.limiter.scopes._known) <= 3
        assert node.remaining(endpoint="/0") == 0
        assert node.remaining(endpoint="/6") == 1


class TestTime:
    def test_a_timestamp_within_the_tolerance_is_used(self, node):
        ahead_us = node.clock.now_us() + 5 * SECOND
        node.check(timestamp=ahead_us)
        (key,) = node.table.keys(0)
        assert unpack(node.table.value(key)) == (1, ahead_us)
        assert node.stats.clock_rejected_total == 0

    @pytest.mark.parametrize("timestamp", [1, -1, 2**63 - 1, NOW_S + 7])
    def test_a_timestamp_out_of_tolerance_is_replaced_by_the_nodes_clock_and_counted(
        self, node, timestamp
    ):
        node.check(timestamp=timestamp)
        (key,) = node.table.keys(0)
        assert unpack(node.table.value(key)) == (1, node.clock.now_us())
        assert node.stats.clock_rejected_total == 1

    def test_a_timestamp_without_a_rule_is_never_out_of_tolerance(self):
        node = Node()
        assert node.check(timestamp=1) == NO_RULE
        assert node.stats.clock_rejected_total == 0

    def test_the_server_policy_ignores_timestamps(self):
        node = Node(ORDERS, timestamps="server")
        for timestamp in (NOW_S + 3, 1, 2**63 - 1):
            assert node.check(timestamp=timestamp).reset_time == NOW_S + 60
        assert node.stats.clock_rejected_total == 0

    def test_the_caller_policy_trusts_timestamps(self):
        node = Node(ORDERS, timestamps="caller")
        assert node.check(timestamp=59).reset_time == 60
        assert node.check(timestamp=3_600).reset_time == 3_660
        assert node.check().reset_time == NOW_S + 60

    @pytest.mark.parametrize("rules", [[ORDERS], []], ids=["a rule", "no rule"])
    @pytest.mark.parametrize("timestamp", [-1, MAX_TIME_US + 1, 2**63 - 1])
    def test_the_caller_policy_refuses_a_timestamp_out_of_range_without_a_charge(
        self, rules, timestamp
    ):
        node = Node(*rules, timestamps="caller")
        with pytest.raises(CheckInvalidError, match="timestamp"):
            node.check(timestamp=timestamp)
        assert len(node.table) == node.stats.allowed_total == node.stats.fail_open_error_total == 0
        assert node.errors == []

    def test_an_unknown_policy_is_refused(self):
        with pytest.raises(ValueError, match="sometimes"):
            Node(timestamps="sometimes")


class TestFailingOpen:
    def test_without_a_book_checks_fail_open(self):
        node = Node(book=False)
        assert node.check() == FAIL_OPEN
        assert (node.stats.allowed_total, node.stats.fail_open_error_total) == (1, 1)
        assert node.errors == []

    def test_an_unexpected_error_fails_open_and_is_reported(self, node, monkeypatch):
        def broken(*_args):
            raise ZeroDivisionError

        monkeypatch.setattr(node.table, "apply", broken)
        assert node.check() == FAIL_OPEN
        assert [type(error) for error in node.errors] == [ZeroDivisionError]
        assert (node.stats.allowed_total, node.stats.fail_open_error_total) == (1, 1)
        assert (node.stats.blocked_total, node.stats.by_rule) == (0, {"orders": [0, 0]})

    def test_a_failing_check_does_not_affect_the_others_of_its_batch(self, node, monkeypatch):
        original = node.table.apply

        def broken_for_bob(key, *args):
            if key.startswith(b"bob"):
                raise ZeroDivisionError
            return original(key, *args)

        monkeypatch.setattr(node.table, "apply", broken_for_bob)
        names = [b"ada", b"bob", b"ada"]
        answers = node.limiter.check_batch([Check(name, USER, "/orders") for name in names])
        assert [answer.reason for answer in answers] == [
            Reason.WITHIN_LIMIT,
            Reason.FAIL_OPEN_ERROR,
            Reason.WITHIN_LIMIT,
        ]

    def test_an_interrupt_is_not_caught(self, node, monkeypatch):
        def stopped(*_args):
            raise KeyboardInterrupt

        monkeypatch.setattr(node.table, "apply", stopped)
        with pytest.raises(KeyboardInterrupt):
            node.check()

    def test_the_error_callback_is_optional(self):
        limiter = limiter_of(object(), buckets=BucketTable(1))  # object() is not a clock
        assert limiter.check(Check(b"ada", USER, "/e")) == FAIL_OPEN


class TestCounters:
    def test_decisions_are_counted_together_and_by_rule(self, node):
        for _ in range(12):
            node.check()
        node.check(endpoint="/carts", peek=True)
        assert (node.stats.allowed_total, node.stats.blocked_total) == (11, 2)
        assert node.stats.by_rule == {"orders": [10, 2], "everywhere": [1, 0]}

    def test_a_denied_identifier_and_its_endpoint_are_reported(self, node):
        for endpoint in ("/orders", "/carts"):
            node.check(endpoint=endpoint)
            assert not node.check(endpoint=endpoint, cost=10).allowed
        node.check(b"bob", cost=11, peek=True)
        told = [
            (identifier, scope.identifier_type, scope.endpoint, scope.rule.id)
            for identifier, scope in node.denied
        ]
        assert told == [
            (b"ada", USER, "/orders", "orders"),
            (b"ada", USER, "/carts", "everywhere"),
            (b"bob", USER, "/orders", "orders"),
        ]

    def test_a_rule_keeps_its_counters_when_the_book_is_replaced(self, node):
        node.check()
        node.put(replace(ORDERS, limit=99))
        node.check()
        assert node.stats.by_rule["orders"] == [2, 0]

    def test_counters_by_rule_are_bounded(self):
        rules = [replace(ORDERS, id=f"{n}", endpoint=f"/{n}") for n in range(MAX_RULE_LABELS + 9)]
        node = Node(*rules)
        for rule in rules:
            node.check(endpoint=rule.endpoint)
        assert len(node.stats.by_rule) == MAX_RULE_LABELS + 1
        assert [*node.stats.labelled_rules()][-1] == (OTHER_RULES, 9, 0)

    @pytest.mark.parametrize("seed", range(3))
    def test_allowed_and_blocked_add_up_to_the_decisions(self, seed):
        """I19."""
        rng, node = random.Random(seed), Node(ORDERS, EVERYWHERE)
        answers = []
        for _ in range(500):
            endpoint = rng.choice(["/orders", "/a", "/b"])
            answers.append(node.check(endpoint=endpoint, cost=rng.randint(1, 12)))
            if rng.random() < 0.02:
                node.put(*rng.choice([[ORDERS], [EVERYWHERE], [ORDERS, EVERYWHERE], []]))
            node.clock.advance(seconds=rng.randint(0, 3))
        allowed = sum(answer.allowed for answer in answers)
        assert (node.stats.allowed_total, node.stats.blocked_total) == (allowed, 500 - allowed)


class TestBulk:
    """The interface for callers that look up the scope themselves."""

    def test_checks_of_a_scope_are_answered_charged_and_counted_like_others(self, node):
        scope = node.limiter.scopes.find("/orders", USER)
        assert (scope.rule, node.limiter.now_us()) == (ORDERS, node.clock.now_us())
        costs = (4, 6, 1, 11)
        charged = [node.limiter.charge(b"ada", scope, node.limiter.now_us(), n) for n in costs]
        other = Node(ORDERS, EVERYWHERE)
        expected = [other.check(cost=n) for n in costs]
        assert [
            (*outcome[:5], scope.rule, scope.rule_limit, (), 0, "") for outcome in charged
        ] == expected
        assert node.remaining() == other.remaining() == 0
        for name in ("allowed_total", "blocked_total", "by_rule", "bucket_missed_total"):
            assert getattr(node.stats, name) == getattr(other.stats, name)
        assert [name for name, _ in node.denied] == [b"ada"] * node.stats.blocked_total

    def test_a_scope_shares_buckets_and_counters_with_checks(self, node):
        node.check(cost=4)
        scope = node.limiter.scopes.find("/orders", USER)
        assert node.limiter.charge(b"ada", scope, node.clock.now_us(), 1)[:2] == (True, 5)
        assert node.check().remaining == 4
        assert node.stats.by_rule == {"orders": [3, 0]}

    def test_a_scope_is_made_once(self, node):
        scope = node.limiter.scopes.find("/orders", USER)
        assert node.limiter.scopes.find("/orders", USER) is scope
        assert (
            node.limiter.scopes.find("/orders", IP)
            is node.limiter.scopes.find("/orders", IP)
            is None
        )

    def test_the_global_rules_scope_differs_by_endpoint(self, node):
        first, second = (node.limiter.scopes.find(name, USER) for name in ("/carts", "/pages"))
        assert first.rule is second.rule is EVERYWHERE
        assert first.key_suffix != second.key_suffix

    def test_there_is_no_scope_without_a_rule_or_a_book(self, node):
        assert node.limiter.scopes.find("/orders", IP) is None
        assert Node(book=False).limiter.scopes.find("/orders", USER) is None

    def test_a_new_book_invalidates_scopes(self, node):
        before = node.limiter.book
        node.put(replace(ORDERS, limit=5))
        assert node.limiter.book is not before
        assert node.limiter.scopes.find("/orders", USER).rule.limit == 5
        assert Node(book=False).limiter.book is None

    def test_a_charge_that_raises_has_charged_and_counted_nothing(self, node):
        scope = node.limiter.scopes.find("/orders", USER)

        def fail(*_):
            raise ZeroDivisionError

        broken = replace(scope, decide=fail)
        with pytest.raises(ZeroDivisionError):
            node.limiter.charge(b"ada", broken, node.clock.now_us(), 1)
        stats = node.stats
        assert (stats.allowed_total, stats.fail_open_error_total, len(node.table)) == (0, 0, 0)
        assert node.errors == []
        assert node.remaining() == 10


class TestBatch:
    def test_an_empty_batch_has_no_answers(self, node):
        assert node.limiter.check_batch([]) == []

    def test_answers_come_in_the_order_of_the_checks(self, node):
        names = [b"zoe", b"ada", b"mia", b"ada", b"zoe"]
        checks = [Check(name, USER, "/orders", cost) for cost, name in enumerate(names, 1)]
        answers = node.limiter.check_batch(checks)
        assert [answer.remaining for answer in answers] == [9, 8, 7, 4, 4]

    def test_checks_of_one_bucket_are_charged_in_their_order(self, node):
        checks = [Check(b"ada", USER, "/orders", cost) for cost in (6, 5, 4, 1)]
        answers = node.limiter.check_batch(checks)
        assert [answer.allowed for answer in answers] == [True, False, True, False]

    def test_a_refused_timestamp_does_not_affect_the_others_of_its_batch(self):
        node = Node(ORDERS, timestamps="caller")
        checks = [Check(b"ada", USER, "/orders", 1, stamp) for stamp in (60, -1, 60)]
        first, refused, last = node.limiter.check_batch(checks)
        assert isinstance(refused, CheckInvalidError)
        assert (first.remaining, last.remaining) == (9, 8)


class TestWaiting:
    SMOOTH = Rule(
        "smooth", "/orders", USER, limit=10, window_seconds=1, algorithm=Algorithm.TOKEN_BUCKET,
        burst=1,
    )  # fmt: skip

    def test_a_check_that_waits_is_allowed_ahead_and_counted_as_allowed(self):
        node = Node(self.SMOOTH)
        answers = [node.check(max_wait_ms=250) for _ in range(4)]
        assert [(one.allowed, one.wait_ms) for one in answers] == [
            (True, 0), (True, 100), (True, 200), (False, 0),
        ]  # fmt: skip
        assert [one.limits for one in answers] == [()] * 4
        assert (answers[1].reason, answers[1].rule) == (Reason.WITHIN_LIMIT, self.SMOOTH)
        assert node.stats.by_rule == {"smooth": [3, 1]}
        assert not node.check().allowed

    async def test_a_peek_and_an_explanation_report_the_same_wait_and_charge_nothing(self):
        node = Node(self.SMOOTH)
        node.check()
        peeked = node.check(max_wait_ms=250, peek=True)
        check = Check(b"ada", USER, "/orders", max_wait_ms=250)
        decision, (one,), *_ = await node.dry_run.explain(check)
        assert (decision, decision.wait_ms) == (peeked, 100)
        assert [status.allowed for status in one.limits] == [True]
        assert node.check(max_wait_ms=250) == peeked

    def test_the_wait_is_the_longest_of_all_limits_and_all_are_charged(self):
        slow = Limit(
            limit=60, window_seconds=60, algorithm=Algorithm.TOKEN_BUCKET, name="slow", burst=1
        )
        node = Node(replace(self.SMOOTH, more=(slow,)))
        node.check()
        answer = node.check(max_wait_ms=1_000)
        assert (answer.allowed, answer.wait_ms) == (True, 1_000)
        assert [status.remaining for status in answer.limits] == [0, 0]
        assert not node.check(max_wait_ms=1_000).allowed

    async def test_a_reset_clears_the_charges_of_waiting_checks(self):
        node = Node(self.SMOOTH)
        for _ in range(5):
            node.check(max_wait_ms=1_000)
        await node.reset()
        assert node.check().allowed

    def test_an_edit_keeps_the_charges_of_waiting_checks(self):
        node = Node(self.SMOOTH)
        for _ in range(3):
            node.check(max_wait_ms=1_000)
        node.put(replace(self.SMOOTH, burst=2))
        node.clock.advance(us=100_000)
        assert node.check(cost=2, max_wait_ms=1_000).wait_ms == 200

    def test_a_check_without_a_rule_does_not_wait(self):
        assert Node().check(max_wait_ms=250).wait_ms == 0
