import asyncio
import random
from dataclasses import replace
from datetime import datetime

import pytest

from ratelimitd.buckets.keys import BucketKeys, joined
from ratelimitd.buckets.snapshot_format import unpack
from ratelimitd.buckets.table import BucketTable, RestoredBuckets
from ratelimitd.counters import MAX_RULE_LABELS, OTHER_RULES, CheckStats
from ratelimitd.errors import (
    BreakerOpenError,
    CheckInvalidError,
    StoreCorruptError,
    StoreOverloadedError,
    StoreUnavailableError,
)
from ratelimitd.limiter import dry_run as dry_run_module
from ratelimitd.limiter import scopes as scopes_module
from ratelimitd.limiter.dry_run import DryRun
from ratelimitd.limiter.limiter import ASKED_PER_TURN, Limiter
from ratelimitd.limiter.scopes import MAX_SCOPES
from ratelimitd.model import (
    INT32_MAX,
    MAX_TIME_US,
    NO_RULE_REMAINING,
    Algorithm,
    Calendar,
    Check,
    Decision,
    Enforcement,
    IdentifierType,
    Limit,
    Match,
    Period,
    Reason,
    Rule,
)
from ratelimitd.rules.book import RuleBook
from ratelimitd.testing import ManualClock

USER, IP = IdentifierType.USER, IdentifierType.IP
NOW_S = 1_700_006_400
SECOND = 1_000_000
KEYS = BucketKeys(b"k" * 32)
ORDERS = Rule(
    "orders", "/orders", USER, limit=10, window_seconds=60, algorithm=Algorithm.FIXED_WINDOW
)
EVERYWHERE = Rule(
    "everywhere", "*", USER, limit=3, window_seconds=60, algorithm=Algorithm.FIXED_WINDOW
)
DAY = Limit(limit=12, window_seconds=86_400, algorithm=Algorithm.FIXED_WINDOW, name="day")
SEVERAL = replace(ORDERS, more=(DAY,))
NO_RULE = Decision(True, NO_RULE_REMAINING, 0, 0, Reason.NO_RULE)
FAIL_OPEN = Decision(True, 1, 0, 0, Reason.FAIL_OPEN_ERROR)


class FaultyJournal:
    """Keeps what it is told to reset; fails when told to, after running ``meanwhile``."""

    def __init__(self):
        self.resets, self.fails, self.meanwhile = [], False, lambda: None

    async def reset(self, keys):
        self.meanwhile()
        if self.fails:
            message = "the disk is full"
            raise StoreUnavailableError(message)
        self.resets.append(list(keys))


def limiter_of(clock=None, stats=None, timestamps="bounded", **options):
    clock, stats = clock or ManualClock(), stats or CheckStats()
    return Limiter(clock=clock, stats=stats, timestamps=timestamps, keys=KEYS, **options)


class Node:
    """A limiter and all that it works with."""

    def __init__(self, *rules, timestamps="bounded", max_entries=100, book=True):
        self.clock, self.stats, self.journal = ManualClock(), CheckStats(), FaultyJournal()
        self.errors, self.denied, self.unmatched = [], [], []
        self.table = BucketTable(max_entries, callers_time=timestamps == "caller")
        self.limiter = limiter_of(
            self.clock,
            self.stats,
            timestamps,
            buckets=self.table,
            journal=self.journal,
            on_error=self.errors.append,
            on_denied=self.denied.append,
            on_unmatched=self.unmatched.append,
        )
        self.dry_run = DryRun(self.limiter)
        if book:
            self.put(*rules)

    def put(self, *rules):
        self.limiter.replace_book(RuleBook.of(rules, 1))

    def check(self, name=b"ada", endpoint="/orders", **fields):
        return self.limiter.check(Check(name, USER, endpoint, **fields))

    def remaining(self, name=b"ada", endpoint="/orders"):
        return self.check(name, endpoint, cost=2**31 - 1, peek=True).remaining

    async def reset(self, name=b"ada", endpoint="/orders"):
        await self.limiter.reset(name, USER, endpoint)


@pytest.fixture
def node():
    return Node(ORDERS, EVERYWHERE)


class TestDeciding:
    def test_an_answer_is_the_algorithms_with_the_rule_that_decided(self, node):
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

    def test_the_endpoints_own_rule_comes_before_the_global_one(self, node):
        assert node.check().rule is ORDERS
        assert node.check(endpoint="/carts").rule is EVERYWHERE

    def test_buckets_of_the_global_rule_are_kept_per_endpoint_and_identifier(self, node):
        for name, endpoint in ((b"ada", "/carts"), (b"ada", "/pages"), (b"bob", "/carts")):
            assert [node.check(name, endpoint).allowed for _ in range(4)] == [True] * 3 + [False]

    def test_identifier_types_do_not_share(self):
        node = Node(EVERYWHERE, replace(EVERYWHERE, id="ip", identifier_type=IP))
        for kind in (USER, IP):
            checks = [node.limiter.check(Check(b"::1", kind, "/e")) for _ in range(4)]
            assert [answer.allowed for answer in checks] == [True] * 3 + [False]

    def test_without_a_rule_everything_is_allowed_and_nothing_is_kept(self):
        node = Node(replace(ORDERS, enabled=False))
        assert node.check(cost=2**31 - 1) == NO_RULE
        assert len(node.table) == 0
        assert (node.stats.allowed_total, node.stats.no_rule_total) == (1, 1)
        assert node.stats.by_rule == {}
        assert node.unmatched == ["/orders"]

    def test_a_peek_is_the_same_answer_and_spends_nothing(self, node):
        for cost in (3, 11, 8):
            peeked = node.check(cost=cost, peek=True)
            assert node.check(cost=cost, peek=True) == peeked
            assert node.check(cost=cost) == peeked


class TestRules:
    def test_a_new_book_acts_from_the_next_check_on(self, node):
        assert node.check(cost=8).remaining == 2
        node.put(replace(ORDERS, limit=20))
        assert node.check().remaining == 11
        node.put(replace(ORDERS, limit=5))
        assert node.check()[:2] == (False, 0)
        node.put()
        assert node.check() == NO_RULE

    def test_a_disabled_rule_is_as_if_absent_and_finds_its_buckets_when_enabled(self, node):
        node.check(cost=10)
        node.put(replace(ORDERS, enabled=False), EVERYWHERE)
        assert node.check().rule is EVERYWHERE
        node.put(ORDERS, EVERYWHERE)
        assert not node.check().allowed

    @pytest.mark.parametrize(
        "change", [{"algorithm": Algorithm.TOKEN_BUCKET}, {"window_seconds": 61}], ids=str
    )
    def test_another_algorithm_or_window_starts_afresh_and_the_old_one_is_not_met(
        self, node, change
    ):
        node.check(cost=10)
        node.put(replace(ORDERS, **change))
        assert node.check().remaining == 9
        node.put(ORDERS)
        assert not node.check().allowed

    def test_the_book_can_be_asked_for(self):
        node = Node(book=False)
        assert node.limiter.book is None
        book = RuleBook.of([ORDERS], 7)
        node.limiter.replace_book(book)
        assert node.limiter.book is book

    def test_endpoints_that_are_remembered_are_bounded(self, node, monkeypatch):
        assert MAX_SCOPES == 4_096
        monkeypatch.setattr(scopes_module, "MAX_SCOPES", 3)
        for number in range(20):
            assert node.check(endpoint=f"/{number % 7}").rule is EVERYWHERE
            assert len(node.limiter.scopes._known) <= 3
        assert node.remaining(endpoint="/0") == 0
        assert node.remaining(endpoint="/6") == 1


class TestTime:
    def test_a_bounded_timestamp_within_the_tolerance_holds(self, node):
        ahead_us = node.clock.now_us() + 5 * SECOND
        node.check(timestamp=ahead_us)
        (key,) = node.table.keys(0)
        assert unpack(node.table.value(key)) == (1, ahead_us)
        assert node.stats.clock_rejected_total == 0

    @pytest.mark.parametrize("timestamp", [1, -1, 2**63 - 1, NOW_S + 7])
    def test_a_timestamp_out_of_tolerance_gives_way_to_the_nodes_clock_and_is_counted(
        self, node, timestamp
    ):
        node.check(timestamp=timestamp)
        (key,) = node.table.keys(0)
        assert unpack(node.table.value(key)) == (1, node.clock.now_us())
        assert node.stats.clock_rejected_total == 1

    def test_without_a_rule_there_is_no_window_to_be_out_of(self):
        node = Node()
        assert node.check(timestamp=1) == NO_RULE
        assert node.stats.clock_rejected_total == 0

    def test_the_server_policy_ignores_timestamps(self):
        node = Node(ORDERS, timestamps="server")
        for timestamp in (NOW_S + 3, 1, 2**63 - 1):
            assert node.check(timestamp=timestamp).reset_time == NOW_S + 60
        assert node.stats.clock_rejected_total == 0

    def test_the_caller_policy_believes_timestamps(self):
        node = Node(ORDERS, timestamps="caller")
        assert node.check(timestamp=59).reset_time == 60
        assert node.check(timestamp=3_600).reset_time == 3_660
        assert node.check().reset_time == NOW_S + 60

    @pytest.mark.parametrize("rules", [[ORDERS], []], ids=["a rule", "no rule"])
    @pytest.mark.parametrize("timestamp", [-1, MAX_TIME_US + 1, 2**63 - 1])
    def test_the_caller_policy_refuses_what_is_out_of_range_and_charges_nothing(
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
    def test_without_a_book_checks_are_allowed_and_never_called_unruled(self):
        node = Node(book=False)
        assert node.check() == FAIL_OPEN
        assert (node.stats.allowed_total, node.stats.fail_open_error_total) == (1, 1)
        assert node.errors == []

    def test_an_unexpected_error_allows_and_is_told(self, node, monkeypatch):
        def broken(*_args):
            raise ZeroDivisionError

        monkeypatch.setattr(node.table, "apply", broken)
        assert node.check() == FAIL_OPEN
        assert [type(error) for error in node.errors] == [ZeroDivisionError]
        assert (node.stats.allowed_total, node.stats.fail_open_error_total) == (1, 1)
        assert (node.stats.blocked_total, node.stats.by_rule) == (0, {"orders": [0, 0]})

    def test_one_failing_check_does_not_touch_its_neighbours(self, node, monkeypatch):
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

    def test_what_is_no_error_passes_through(self, node, monkeypatch):
        def stopped(*_args):
            raise KeyboardInterrupt

        monkeypatch.setattr(node.table, "apply", stopped)
        with pytest.raises(KeyboardInterrupt):
            node.check()

    def test_errors_need_not_be_listened_to(self):
        limiter = limiter_of(object(), buckets=BucketTable(1))  # the clock has no time to tell
        assert limiter.check(Check(b"ada", USER, "/e")) == FAIL_OPEN


class TestCounters:
    def test_decisions_are_counted_together_and_by_rule(self, node):
        for _ in range(12):
            node.check()
        node.check(endpoint="/carts", peek=True)
        assert (node.stats.allowed_total, node.stats.blocked_total) == (11, 2)
        assert node.stats.by_rule == {"orders": [10, 2], "everywhere": [1, 0]}

    def test_who_was_denied_and_where_is_told(self, node):
        for endpoint in ("/orders", "/carts"):
            node.check(endpoint=endpoint)
            assert not node.check(endpoint=endpoint, cost=10).allowed
        node.check(b"bob", cost=11, peek=True)
        told = [(identifier, scope.endpoint, scope.rule.id) for identifier, scope in node.denied]
        assert told == [
            (b"ada", "/orders", "orders"),
            (b"ada", "/carts", "everywhere"),
            (b"bob", "/orders", "orders"),
        ]

    def test_a_rule_keeps_its_counters_over_a_new_book(self, node):
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
    """What those use who ask for the scope themselves."""

    def test_checks_of_a_scope_are_answered_charged_and_counted_like_others(self, node):
        scope = node.limiter.scopes.find("/orders", USER)
        assert (scope.rule, node.limiter.now_us()) == (ORDERS, node.clock.now_us())
        costs = (4, 6, 1, 11)
        charged = [node.limiter.charge(b"ada", scope, node.limiter.now_us(), n) for n in costs]
        other = Node(ORDERS, EVERYWHERE)
        expected = [other.check(cost=n) for n in costs]
        assert [
            (*outcome[:5], scope.rule, scope.told, (), 0, "") for outcome in charged
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

    def test_a_scope_is_made_once_for_all_who_ask(self, node):
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

    def test_the_book_tells_when_scopes_are_out_of_date(self, node):
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
    def test_no_checks_have_no_answers(self, node):
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

    def test_a_refused_timestamp_has_its_error_and_its_neighbours_do_not_notice(self):
        node = Node(ORDERS, timestamps="caller")
        checks = [Check(b"ada", USER, "/orders", 1, stamp) for stamp in (60, -1, 60)]
        first, refused, last = node.limiter.check_batch(checks)
        assert isinstance(refused, CheckInvalidError)
        assert (first.remaining, last.remaining) == (9, 8)


class TestReset:
    async def test_a_reset_bucket_starts_afresh_and_others_do_not(self, node):
        for name, endpoint in ((b"ada", "/orders"), (b"ada", "/carts"), (b"bob", "/orders")):
            node.check(name, endpoint, cost=2)
        await node.reset()
        assert node.remaining() == 10
        assert (node.remaining(b"bob"), node.remaining(endpoint="/carts")) == (8, 1)

    async def test_a_bucket_that_does_not_exist_is_as_good_as_reset(self, node):
        await node.reset(b"nobody")
        assert len(node.table) == 0
        assert len(node.journal.resets) == 1

    async def test_buckets_of_a_disabled_rule_and_of_the_global_one_are_reset_too(self, node):
        everywhere = replace(EVERYWHERE, window_seconds=7)
        node.put(ORDERS, everywhere)
        node.check(cost=10)
        node.put(everywhere)
        node.check(cost=3)
        node.put(replace(ORDERS, enabled=False), everywhere)
        await node.reset()
        assert node.remaining() == 3
        node.put(ORDERS)
        assert node.remaining() == 10

    async def test_the_journal_hears_of_the_very_keys(self, node):
        node.check()
        keys = node.table.keys(0)
        await node.reset()
        (written,) = node.journal.resets
        assert len(keys) == 1
        assert keys[0] in written

    async def test_with_no_rule_there_is_nothing_to_reset_or_to_write(self):
        node = Node()
        await node.reset()
        assert node.journal.resets == []

    async def test_a_limiter_without_a_journal_resets_in_memory(self):
        table = BucketTable(10)
        limiter = limiter_of(buckets=table)
        limiter.replace_book(RuleBook.of([ORDERS], 1))
        limiter.check(Check(b"ada", USER, "/orders"))
        await limiter.reset(b"ada", USER, "/orders")
        assert len(table) == 0

    async def test_without_a_book_a_reset_is_refused(self):
        with pytest.raises(StoreUnavailableError, match="no rules"):
            await Node(book=False).reset()

    async def test_a_reset_that_cannot_be_written_leaves_the_bucket_as_it_was(self, node):
        node.check(cost=7)
        node.journal.fails = True
        with pytest.raises(StoreUnavailableError):
            await node.reset()
        assert node.remaining() == 3
        with pytest.raises(StoreUnavailableError):
            await node.reset(b"nobody")
        assert len(node.table) == 1

    async def test_a_reset_that_fails_does_not_undo_a_later_one_that_is_answered(self, node):
        gate, fails = asyncio.Event(), iter([True, False])

        async def reset(keys):
            failing = next(fails)
            await gate.wait()
            if failing:
                message = "the disk is full"
                raise StoreUnavailableError(message)

        node.journal.reset = reset
        node.check(cost=7)
        resets = [asyncio.create_task(node.reset()) for _ in range(2)]
        await asyncio.sleep(0)
        gate.set()
        refused, answered = await asyncio.gather(*resets, return_exceptions=True)
        assert (type(refused), answered) == (StoreUnavailableError, None)
        assert node.remaining() == 10

    async def test_a_reset_whose_caller_gives_up_is_written_all_the_same(self, node):
        may_write, written = asyncio.Event(), asyncio.Event()

        async def reset(_keys):
            await may_write.wait()
            written.set()

        node.journal.reset = reset
        node.check()
        caller = asyncio.create_task(node.reset())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.wait([caller])
        assert caller.cancelled()
        may_write.set()
        await written.wait()

    async def test_a_reset_that_waited_for_another_acts_under_the_rules_of_its_turn(self, node):
        begun, first_may_end, written = asyncio.Event(), asyncio.Event(), []

        async def reset(keys):
            written.append(keys)
            begun.set()
            await first_may_end.wait()

        node.journal.reset = reset
        resets = [asyncio.create_task(node.reset()) for _ in range(2)]
        await begun.wait()
        node.put(replace(ORDERS, window_seconds=120))
        first_may_end.set()
        await asyncio.gather(*resets)
        first, second = written
        assert first != second

    async def test_nobody_profits_from_a_reset_that_failed_by_checking_meanwhile(self, node):
        node.check(cost=7)
        node.journal.fails, node.journal.meanwhile = True, node.check
        with pytest.raises(StoreUnavailableError):
            await node.reset()
        assert node.remaining() == 3

    async def test_resets_that_fail_never_get_the_table_beyond_its_bound(self):
        node = Node(ORDERS, max_entries=2)
        node.journal.fails = True

        def flood():
            for _ in range(3):
                node.check(b"%d" % random.randrange(10**9))

        node.journal.meanwhile = flood
        for number in range(20):
            node.check(b"ada %d" % number)
            with pytest.raises(StoreUnavailableError):
                await node.reset(b"ada %d" % number)
            assert len(node.table) <= 2


class TestForeseeing:
    def test_checks_pass_together_when_each_does_and_nothing_is_spent_or_counted(self, node):
        node.check(cost=9)
        before = node.stats.allowed_total, node.stats.bucket_missed_total
        one, bob = check_of(), check_of(b"bob", cost=10)
        assert node.dry_run.all_pass([one, bob, check_of(endpoint="/none")], node.limiter.now_us())
        assert not node.dry_run.all_pass([bob, check_of(cost=2)], node.limiter.now_us())
        assert (node.stats.allowed_total, node.stats.bucket_missed_total) == before
        assert node.denied == []
        assert (node.remaining(), node.remaining(b"bob")) == (1, 10)

    def test_checks_that_share_a_bucket_pass_only_if_it_has_the_tokens_of_all(self):
        node = Node(replace(ORDERS, endpoint="**", limit=10))
        now_us = node.limiter.now_us()
        one, other = check_of(cost=5), check_of(endpoint="/none", cost=5)
        assert node.dry_run.all_pass([one, other], now_us)
        assert not node.dry_run.all_pass([one, other, check_of(endpoint="/c")], now_us)
        assert node.dry_run.all_pass([one, other, check_of(endpoint="/c", peek=True)], now_us)
        most = check_of(cost=INT32_MAX)
        assert not node.dry_run.all_pass([most, most._replace(endpoint="/none")], now_us)

    def test_without_a_rule_or_an_answer_a_check_passes(self, monkeypatch):
        assert Node(book=False).dry_run.all_pass([check_of()], 0)
        assert Node().dry_run.all_pass([check_of()], 0)
        node = Node(ORDERS)
        monkeypatch.setattr(node.table, "peek_all", None)
        assert node.dry_run.all_pass([check_of()], node.limiter.now_us())
        monkeypatch.setattr(node.limiter.scopes, "judging_of", None)
        assert node.dry_run.all_pass([check_of()], node.limiter.now_us())
        assert node.errors == []


class FakeSharedBuckets:
    """Has nothing to answer at once: each check waits until the test, or ``answers``, has an answer."""

    def __init__(self):
        self.asked, self.resets, self.answers = [], [], []
        self.at_once = None
        self.reset_error = None

    def apply(self, _key, _rule, _decide, _now_us, _cost):
        if isinstance(self.at_once, Exception):
            raise self.at_once
        return self.at_once

    peek = apply

    def wait(self, key, rule, now_us, cost, *, peek):
        self.asked.append((key[:-9], rule, now_us, cost, peek))
        answer = asyncio.get_running_loop().create_future()
        if self.answers:
            ready = self.answers.pop(0)
            if isinstance(ready, ValueError):
                answer.set_exception(ready)
            else:
                answer.set_result(ready)
        return answer

    def apply_all(self, charges, _now_us, _cost):
        if isinstance(self.at_once, Exception):
            raise self.at_once
        return self.at_once and [self.at_once] * len(charges)

    peek_all = apply_all

    def wait_all(self, charges, now_us, cost, *, peek, is_counted=True):
        answers = [self.wait(key, rule, now_us, cost, peek=peek) for key, rule, _ in charges]
        return asyncio.ensure_future(self._all(answers))

    @staticmethod
    async def _all(answers):
        return [await answer for answer in answers]

    async def reset(self, keys, rules):
        if self.reset_error is not None:
            raise self.reset_error
        self.resets.append((keys, rules))


class Sharing:
    """A limiter on buckets that nodes share."""

    def __init__(self, *rules, timestamps="bounded", book=True, **options):
        self.clock, self.stats, self.shared = ManualClock(), CheckStats(), FakeSharedBuckets()
        self.errors, self.denied = [], []
        self.limiter = limiter_of(
            self.clock,
            self.stats,
            timestamps,
            shared=self.shared,
            on_error=self.errors.append,
            on_denied=self.denied.append,
            **options,
        )
        self.dry_run = DryRun(self.limiter)
        if book:
            self.put(*rules or (ORDERS,), revision=7)

    def put(self, *rules, revision=8):
        self.limiter.replace_book(RuleBook.of(rules, revision))

    async def wait(self, *answers, **fields):
        """The answer to a check for which the shared state has one of ``answers``."""
        self.shared.answers += answers
        (answer,) = await self.limiter.wait([check_of(**fields)])
        return answer


GRANTED = (True, 4, 60, 0, Reason.WITHIN_LIMIT, None)
REFUSED = (False, 0, 60, 9, Reason.LIMIT_EXCEEDED, None)
AWAY = StoreUnavailableError("no answer")


def check_of(name=b"ada", endpoint="/orders", **fields):
    return Check(name, USER, endpoint, **fields)


def test_a_limiter_decides_on_its_own_buckets_or_on_shared_ones():
    for both in ({}, {"buckets": BucketTable(1), "shared": FakeSharedBuckets()}):
        with pytest.raises(ValueError, match="its own buckets or on shared ones"):
            limiter_of(**both)


class TestSharedBuckets:
    @pytest.fixture
    def node(self):
        return Sharing(ORDERS)

    @pytest.mark.parametrize("peek", [False, True])
    def test_what_the_node_knows_is_answered_at_once(self, node, peek):
        node.shared.at_once = GRANTED
        answer = node.limiter.check(check_of(peek=peek))
        assert answer[:5] == GRANTED[:5]
        assert answer.limit == replace(ORDERS, revision=7)
        assert (node.stats.allowed_total, node.stats.by_rule) == (1, {"orders": [1, 0]})

    def test_nobody_waits(self, node):
        node.shared.at_once = REFUSED
        answer = node.limiter.check(check_of(max_wait_ms=60_000))
        assert (answer[:5], answer.wait_ms) == (REFUSED[:5], 0)

    @pytest.mark.parametrize("peek", [False, True])
    async def test_what_it_does_not_waits_and_is_counted_when_it_is_answered(self, node, peek):
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

    async def test_what_waits_is_noted_once_when_it_is_answered(self):
        noted = []

        class Recorder:
            seed, below = 0, 1 << 32

            def note(self, *what, allowed):
                noted.append((*what, allowed))

        node = Sharing(ORDERS, recorder=Recorder())
        assert node.limiter.check(check_of()) is None
        assert noted == []
        await node.wait(REFUSED)
        await node.wait(AWAY)
        now_us = node.clock.now_us()
        assert noted == [
            (b"ada", check_of(), now_us, False),
            (b"ada", check_of(), now_us, True),
        ]

    def test_in_bulk_nothing_is_counted_before_it_is_answered(self, node):
        scope = node.limiter.scopes.find("/orders", USER)
        assert node.limiter.charge(b"ada", scope, 0, 1) is None
        assert (node.stats.allowed_total, node.stats.by_rule) == (0, {"orders": [0, 0]})

    def test_a_batch_has_none_for_each_that_waits(self, node):
        assert node.limiter.check_batch([check_of(), check_of(b"bob")]) == [None, None]

    async def test_all_of_a_batch_are_asked_for_before_any_is_waited_for(self, node):
        checks = [check_of(b"%d" % number) for number in range(3)]
        waiting = asyncio.create_task(node.limiter.wait(checks))
        await asyncio.sleep(0)
        assert [key for key, *_ in node.shared.asked] == [b"0", b"1", b"2"]
        waiting.cancel()
        await asyncio.wait([waiting])

    async def test_an_error_that_nobody_expected_is_answered_fail_open_and_told(self, node):
        error = ValueError("defect")
        waiting = asyncio.create_task(node.limiter.wait([check_of(), check_of(b"bob")]))
        node.shared.answers = [error, GRANTED]
        answers = await waiting
        assert [answer.reason for answer in answers] == [
            Reason.FAIL_OPEN_ERROR,
            Reason.WITHIN_LIMIT,
        ]
        assert node.errors == [error]

    async def test_a_long_batch_is_asked_for_in_several_turns(self, node):
        node.shared.answers = [GRANTED] * (ASKED_PER_TURN + 1)
        waiting = asyncio.create_task(node.limiter.wait([check_of()] * (ASKED_PER_TURN + 1)))
        await asyncio.sleep(0)
        assert len(node.shared.asked) == ASKED_PER_TURN
        assert len(await waiting) == ASKED_PER_TURN + 1

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
    async def test_without_an_answer_a_check_is_allowed(self, node, error, is_told):
        assert await node.wait(error) == FAIL_OPEN
        assert node.errors == ([error] if is_told else [])
        assert (node.stats.allowed_total, node.stats.fail_open_error_total) == (1, 1)
        assert node.stats.by_rule == {"orders": [0, 0]}

    async def test_an_unexpected_error_allows_and_is_told(self, node, monkeypatch):
        monkeypatch.setattr(node.shared, "wait", None)
        assert await node.wait() == FAIL_OPEN
        assert [type(error) for error in node.errors] == [TypeError]

    async def test_while_the_breaker_is_open_checks_are_allowed_as_the_specification_says(
        self, node
    ):
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
    async def test_or_denied_until_the_next_probe_if_that_is_wanted(
        self, retry_after_us, retry_after_s
    ):
        node = Sharing(breaker_denies=True)
        answer = await node.wait(BreakerOpenError(retry_after_us))
        reset_time = NOW_S + retry_after_s
        assert answer == Decision(False, 0, reset_time, retry_after_s, Reason.FAIL_OPEN_BREAKER)
        stats = node.stats
        assert (stats.blocked_total, stats.breaker_denied_total) == (1, 1)
        assert (stats.allowed_total, stats.bucket_looked_total) == (0, 0)

    async def test_rules_that_change_in_between_hold(self, node):
        assert node.limiter.check(check_of()) is None
        node.put(replace(ORDERS, limit=3))
        answer = await node.wait(GRANTED)
        assert answer.limit == replace(ORDERS, limit=3, revision=8)
        node.put()
        assert await node.wait() == NO_RULE
        assert len(node.shared.asked) == 1

    async def test_without_a_book_nobody_is_asked(self):
        node = Sharing(book=False)
        assert await node.wait() == FAIL_OPEN
        assert node.shared.asked == []

    async def test_the_caller_policy_refuses_timestamps_and_the_others_do_not_notice(self):
        node = Sharing(timestamps="caller")
        node.shared.answers = [GRANTED]
        refused, answer = await node.limiter.wait([check_of(timestamp=-1), check_of(timestamp=60)])
        assert isinstance(refused, CheckInvalidError)
        assert answer[:5] == GRANTED[:5]
        assert [now_us for _, _, now_us, *_ in node.shared.asked] == [60 * SECOND]

    async def test_a_timestamp_within_the_tolerance_is_that_of_the_check(self, node):
        await node.wait(GRANTED, timestamp=node.clock.now_us() + 5 * SECOND)
        ((_, _, now_us, *_),) = node.shared.asked
        assert now_us == node.clock.now_us() + 5 * SECOND

    async def test_a_reset_is_of_all_rules_that_may_decide_each_as_of_the_book(self, node):
        node.put(replace(ORDERS, enabled=False), EVERYWHERE, revision=9)
        rules = await node.limiter.reset(b"ada", USER, "/orders")
        ((keys, ruling),) = node.shared.resets
        assert ruling == [replace(rule, revision=9) for rule in rules]
        assert keys == [b"ada" + KEYS.scope(rule, "/orders") for rule in rules]
        assert len(rules) == 2

    async def test_a_reset_that_is_not_known_to_be_done_is_refused(self, node):
        node.shared.reset_error = AWAY
        with pytest.raises(StoreUnavailableError, match="no answer"):
            await node.limiter.reset(b"ada", USER, "/orders")

    @pytest.mark.parametrize(
        ("answers", "passes"),
        [
            ([GRANTED, GRANTED], True),
            ([REFUSED, GRANTED], False),
            ([GRANTED, REFUSED], False),
            ([AWAY, GRANTED], True),
            ([BreakerOpenError(1), GRANTED], True),
            ([ValueError("defect"), GRANTED], True),
            ([REFUSED, ValueError("defect")], False),
        ],
    )
    async def test_the_shared_state_foresees_what_the_node_cannot(self, node, answers, passes):
        node.shared.answers = answers
        foreseen = node.dry_run.all_pass(
            [check_of(), check_of(b"bob", cost=2)], node.limiter.now_us()
        )
        assert await foreseen is passes
        assert [(key, *asked[2:]) for key, *asked in node.shared.asked] == [
            (b"ada", 1, True),
            (b"bob", 2, True),
        ]
        assert (node.stats.allowed_total, node.errors) == (0, [])

    async def test_an_open_breaker_that_denies_lets_no_checks_pass(self):
        node = Sharing(breaker_denies=True)
        node.shared.answers = [BreakerOpenError(1)]
        assert not await node.dry_run.all_pass([check_of()], node.limiter.now_us())
        node.shared.at_once = BreakerOpenError(1)
        assert not node.dry_run.all_pass([check_of()], node.limiter.now_us())


class TestSeveralSharedLimits:
    SEEN = replace(DAY, name="seen", enforcement=Enforcement.OBSERVE)

    @pytest.fixture
    def node(self):
        return Sharing(SEVERAL)

    def test_what_the_node_knows_is_answered_at_once(self, node):
        node.shared.at_once = GRANTED
        answer = node.limiter.check(check_of())
        assert (answer.allowed, [one.limit.name for one in answer.limits]) == (
            True, ["day", "default"],
        )  # fmt: skip

    @pytest.mark.parametrize("peek", [False, True])
    async def test_what_it_does_not_is_asked_of_all_buckets(self, node, peek):
        assert node.limiter.check(check_of(peek=peek)) is None
        answer = await node.wait(GRANTED, REFUSED, peek=peek)
        assert (answer[:5], answer.limit.name) == (REFUSED[:5], "day")
        assert [(one.limit.name, one.allowed) for one in answer.limits] == [
            ("day", False), ("default", True),
        ]  # fmt: skip
        assert [asked[-1] for asked in node.shared.asked] == [peek, peek]
        assert (node.stats.allowed_total, node.stats.blocked_total) == (0, 1)

    async def test_in_bulk_such_a_check_has_to_wait(self, node):
        scope = node.limiter.scopes.find("/orders", USER)
        assert node.limiter.judge((b"ada",), scope, 0, 1) is None
        assert node.stats.allowed_total == 0

    async def test_a_limit_that_cannot_be_reached_makes_an_allowed_check_fail_open(self, node):
        answer = await node.wait(GRANTED, AWAY)
        assert (answer.allowed, answer.reason) == (True, Reason.FAIL_OPEN_ERROR)
        answer = await node.wait(AWAY, BreakerOpenError(1))
        assert (answer.allowed, answer.reason) == (True, Reason.FAIL_OPEN_BREAKER)
        answer = await node.wait(BreakerOpenError(1), REFUSED)
        assert (answer.allowed, answer.reason, answer.limits) == (False, Reason.LIMIT_EXCEEDED, ())
        assert node.stats.fail_open_error_total == node.stats.fail_open_breaker_total == 1

    async def test_an_open_breaker_that_denies_denies(self):
        node = Sharing(SEVERAL, breaker_denies=True)
        answer = await node.wait(GRANTED, BreakerOpenError(2_000_000))
        assert (answer.allowed, answer.retry_after) == (False, 2)

    async def test_one_that_only_observes_does_not_matter_when_it_cannot_be_reached(self):
        node = Sharing(replace(ORDERS, more=(self.SEEN,)))
        answer = await node.wait(GRANTED, AWAY)
        assert (answer[:5], answer.limits) == (GRANTED[:5], ())
        answer = await node.wait(AWAY, AWAY)
        assert answer.reason is Reason.FAIL_OPEN_ERROR
        answer = await node.wait(GRANTED, REFUSED)
        assert (answer[:5], len(answer.limits)) == (GRANTED[:5], 2)
        assert node.stats.would_deny == {"orders,seen": [1]}

    async def test_it_does_not_matter_to_what_is_foreseen_either(self):
        node = Sharing(replace(ORDERS, more=(self.SEEN,)))
        node.shared.answers = [GRANTED, REFUSED]
        assert await node.dry_run.all_pass([check_of()], 0)
        node.shared.at_once = GRANTED
        assert node.dry_run.all_pass([check_of()], 0)

    async def test_a_reset_is_of_all_its_buckets(self, node):
        await node.limiter.reset(b"ada", USER, "/orders")
        ((keys, limits),) = node.shared.resets
        assert len(set(keys)) == 2
        assert [(limit.name, limit.revision) for limit in limits] == [("default", 7), ("day", 7)]

    async def test_a_defect_is_told_and_fails_open(self, node):
        answer = await node.wait(GRANTED, ValueError("defect"))
        assert answer.reason is Reason.FAIL_OPEN_ERROR
        assert [str(error) for error in node.errors] == ["defect"]


class TestSeveralLimits:
    @pytest.fixture
    def node(self):
        return Node(SEVERAL)

    def test_all_are_charged_and_the_tightest_answers(self, node):
        answer = node.check(cost=4)
        assert (answer.allowed, answer.remaining, answer.limit) == (True, 6, SEVERAL)
        assert [(one.limit.name, one.remaining) for one in answer.limits] == [
            ("default", 6), ("day", 8),
        ]  # fmt: skip
        node.clock.advance(seconds=60)
        answer = node.check()
        assert (answer.remaining, answer.limit) == (7, DAY)
        assert [one.limit.name for one in answer.limits] == ["day", "default"]
        assert {one.rule for one in answer.limits} == {SEVERAL}

    def test_a_denial_charges_none(self, node):
        node.check(cost=9)
        node.clock.advance(seconds=60)
        answer = node.check(cost=4)
        assert (answer.allowed, answer.limit, answer.remaining) == (False, DAY, 3)
        assert [(one.allowed, one.remaining) for one in answer.limits] == [(False, 3), (True, 10)]
        assert node.check(cost=3).allowed

    def test_a_peek_charges_none(self, node):
        first = node.check(cost=4, peek=True)
        assert node.check(cost=4, peek=True) == first
        assert node.check(cost=4) == first

    def test_a_rule_counts_a_check_once(self, node):
        node.check(cost=9)
        node.check(cost=9)
        assert (node.stats.allowed_total, node.stats.blocked_total) == (1, 1)
        assert node.stats.by_rule == {"orders": [1, 1]}
        [(identifier, scope)] = node.denied
        assert (identifier, scope.rule, scope.limit) == (b"ada", SEVERAL, DAY)
        assert node.stats.bucket_looked_total == 2

    def test_an_edit_of_a_number_keeps_what_was_spent_and_a_new_name_begins_anew(self, node):
        node.check(cost=4)
        node.put(replace(SEVERAL, limit=5, more=(replace(DAY, name="daily"),)))
        answer = node.check(cost=1)
        assert [(one.limit.name, one.remaining) for one in answer.limits] == [
            ("default", 0), ("daily", 11),
        ]  # fmt: skip

    async def test_a_reset_is_of_all_of_them(self, node):
        node.check(cost=10)
        await node.reset()
        assert len(node.table) == 0
        [keys] = node.journal.resets
        assert len(keys) == 2
        assert node.check(cost=10).allowed

    def test_a_check_in_bulk_is_judged_by_several_only_where_there_are(self, node):
        scope = node.limiter.scopes.find("/orders", USER)
        assert [one.told for one in scope.several] == [SEVERAL, DAY]
        node.put(ORDERS)
        assert node.limiter.scopes.find("/orders", USER).several == ()

    def test_foreseeing_looks_at_all_and_charges_none(self, node):
        check = Check(b"ada", USER, "/orders", 4)
        node.check(cost=9)
        node.clock.advance(seconds=60)
        missed = node.stats.bucket_missed_total
        assert not node.dry_run.all_pass([check], node.limiter.now_us())
        assert node.dry_run.all_pass([check._replace(cost=3)], node.limiter.now_us())
        assert node.stats.bucket_missed_total == missed
        assert node.check(cost=3).allowed

    def test_a_callers_time_is_near_enough_for_the_shortest_window(self):
        node = Node(replace(SEVERAL, more=(replace(DAY, window_seconds=10),)))
        node.check(timestamp=NOW_S * 1_000 - 1_001)
        assert node.stats.clock_rejected_total == 1
        node.check(timestamp=NOW_S * 1_000 - 1_000)
        assert node.stats.clock_rejected_total == 1

    def test_in_a_batch_a_denied_check_leaves_all_to_the_next(self, node):
        checks = [Check(b"ada", USER, "/orders", cost) for cost in (9, 4, 1)]
        answers = node.limiter.check_batch(checks)
        assert [answer.allowed for answer in answers] == [True, False, True]
        assert [(one.limit.name, one.remaining) for one in answers[2].limits] == [
            ("default", 0), ("day", 2),
        ]  # fmt: skip

    def test_one_that_observes_counts_what_it_would_deny_and_denies_nothing(self):
        observed = replace(DAY, limit=3, enforcement=Enforcement.OBSERVE)
        node = Node(replace(ORDERS, more=(observed,)))
        answers = [node.check(cost=2) for _ in range(6)]
        assert [answer.allowed for answer in answers] == [True] * 5 + [False]
        assert [answer.limits[1].allowed for answer in answers] == [True, *[False] * 5]
        assert {answer.limit.name for answer in answers} == {"default"}
        # The last was denied by the limit itself.
        assert node.stats.would_deny == {"orders,day": [4]}
        assert node.stats.by_rule == {"orders": [5, 1]}
        missed = node.stats.bucket_missed_total
        assert not node.dry_run.all_pass([Check(b"ada", USER, "/orders", 2)], 0)
        assert node.stats.bucket_missed_total == missed
        assert node.stats.would_deny == {"orders,day": [4]}

    def test_a_rule_that_only_observes_allows_with_what_it_counted(self):
        node = Node(replace(ORDERS, limit=3, enforcement=Enforcement.OBSERVE))
        answers = [node.check(cost=2) for _ in range(2)]
        assert [answer[:5] for answer in answers] == [
            (True, 1, NOW_S + 60, 0, Reason.WITHIN_LIMIT),
            (True, 1, NOW_S + 60, 0, Reason.WITHIN_LIMIT),
        ]
        assert [answer.limits for answer in answers] == [(), ()]
        assert node.stats.would_deny == {"orders,default": [1]}
        assert node.dry_run.all_pass([Check(b"ada", USER, "/orders", 9)], node.limiter.now_us())

    def test_promoting_keeps_what_was_counted(self):
        node = Node(replace(ORDERS, more=(replace(DAY, enforcement=Enforcement.OBSERVE),)))
        node.check(cost=9)
        node.put(replace(ORDERS, name="day", limit=12, window_seconds=86_400))
        assert node.check(cost=3).remaining == 0
        assert not node.check().allowed


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

    def test_what_is_left_and_when_it_is_whole_again_is_told_of_the_month(self, node):
        answer = node.check(cost=4)
        assert answer == Decision(
            True, 6, self.APRIL, 0, Reason.WITHIN_LIMIT, self.MONTHLY, self.MONTHLY
        )
        self.at(node, self.APRIL - 5)
        assert node.check(cost=6)[1:4] == (0, self.APRIL, 5)
        assert node.check()[:5] == (False, 0, self.APRIL, 5, Reason.LIMIT_EXCEEDED)
        self.at(node, self.APRIL)
        assert node.check()[1:4] == (9, self.MAY, 0)

    def test_a_cost_above_the_limit_is_told_the_length_of_the_window(self, node):
        answer = node.check(cost=11)
        assert answer.reason is Reason.COST_EXCEEDS_LIMIT
        assert (answer.reset_time, answer.retry_after) == (self.APRIL, self.APRIL - self.MARCH)

    def test_a_check_that_comes_late_is_judged_in_its_own_window(self, node):
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

    def test_a_new_limit_keeps_what_was_spent_and_another_calendar_does_not(self, node):
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

    async def test_a_reset_frees_the_window_of_its_time(self, node):
        node.check(cost=4)
        await node.reset()
        assert node.remaining() == 10

    def test_it_is_one_of_several_limits(self, node):
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

    def test_a_batch_and_a_foreseen_check_are_judged_by_it(self, node):
        batch = node.limiter.check_batch([check_of(cost=6), check_of(cost=6)])
        assert [one.allowed for one in batch] == [True, False]
        now_us = node.clock.now_us()
        assert node.dry_run.all_pass([check_of(cost=4)], now_us) is True
        assert node.dry_run.all_pass([check_of(cost=5)], now_us) is False

    def test_in_bulk_it_is_the_window_of_the_time(self, node):
        scope = node.limiter.scopes.find("/orders", USER)
        for now_s, end_s in ((self.MARCH, self.APRIL), (self.APRIL, self.MAY)):
            first, outcome, outcomes = node.limiter.judge((b"ada",), scope, now_s * SECOND, 10)
            assert (first, outcome[:3], list(outcomes)) == (0, (True, 0, end_s), [outcome])
        assert not node.limiter.judge((b"ada",), scope, self.MARCH * SECOND, 1)[1][0]

    def test_a_bucket_that_was_restored_goes_on_in_its_window(self, node):
        node.check(cost=4)
        restored = RestoredBuckets(KEYS)
        for shard in range(node.table.shard_count):
            for key in node.table.keys(shard):
                restored.put(KEYS.stored(key), node.table.value(key))
        other = self.at(Node(self.MONTHLY), self.APRIL - 1)
        other.table.adopt(restored)
        assert other.remaining() == 6
        assert self.at(other, self.APRIL).remaining() == 10

    async def test_it_is_explained(self, node):
        node.check(cost=4)
        decision, [looked_at], *_ = await node.dry_run.explain(check_of(cost=7))
        assert decision == node.check(cost=7, peek=True)
        assert looked_at.limits[0][:4] == (False, 6, self.APRIL, self.APRIL - self.MARCH)

    async def test_nodes_share_a_bucket_of_each_window(self):
        node = self.at(Sharing(self.MONTHLY), self.MARCH)
        for now_s, end_s in ((self.MARCH, self.APRIL), (self.APRIL, self.MAY)):
            self.at(node, now_s)
            answer = await node.wait((True, 4, end_s, 0, Reason.WITHIN_LIMIT, None))
            assert (answer.reset_time, answer.limit) == (end_s, replace(self.MONTHLY, revision=7))
        (_, march, *_), (_, april, *_) = node.shared.asked
        assert (march.window_seconds, april.window_seconds) == (self.APRIL, self.MAY)
        assert march.revision == april.revision == 7

    async def test_shared_it_is_judged_by_one_limit_while_the_window_lasts(self):
        node = self.at(Sharing(self.MONTHLY), self.MARCH)
        for _ in range(2):
            await node.wait(GRANTED)
        (_, one, *_), (_, other, *_) = node.shared.asked
        assert one is other

    @pytest.mark.parametrize("peek", [False, True])
    async def test_shared_a_cost_above_the_limit_is_told_the_length_of_the_window(self, peek):
        node = self.at(Sharing(self.MONTHLY), self.MARCH)
        too_much = (False, 10, self.APRIL, self.APRIL, Reason.COST_EXCEEDS_LIMIT, None)
        answer = await node.wait(too_much, cost=11, peek=peek)
        assert answer.retry_after == self.APRIL - self.MARCH
        node.shared.at_once = too_much
        assert node.limiter.check(check_of(cost=11, peek=peek)).retry_after == answer.retry_after
        decision, [looked_at], *_ = await node.dry_run.explain(check_of(cost=11))
        assert decision.retry_after == looked_at.limits[0].retry_after == answer.retry_after

    async def test_shared_a_reset_frees_the_window_of_its_time(self):
        node = self.at(Sharing(self.MONTHLY), self.MARCH)
        await node.limiter.reset(b"ada", USER, "/orders")
        [(keys, [limit])] = node.shared.resets
        assert limit.window_seconds == self.APRIL
        scope = node.limiter.scopes.find("/orders", USER).at(node.clock.now_us())
        assert scope.several[0].key_suffix in keys[0]

    async def test_shared_a_check_is_foreseen(self):
        node = self.at(Sharing(self.MONTHLY), self.MARCH)
        node.shared.at_once = REFUSED
        assert node.dry_run.all_pass([check_of()], node.clock.now_us()) is False


class TestSeveralIdentities:
    """A check counts for the identities it names, and for everybody."""

    TENANT = replace(ORDERS, id="tenant", identifier_type="tenant", limit=15)
    BOTH = replace(ORDERS, id="both", identifier_type="tenant+user", limit=2)
    EVERYBODY = replace(ORDERS, id="everybody", identifier_type="all", limit=18)
    OVERALL = replace(ORDERS, id="overall", endpoint="**", limit=12)
    ACME, OTHER = (("tenant", b"acme"),), (("tenant", b"other"),)

    def judged(self, answer):
        return [one.rule.id for one in answer.limits]

    def test_every_rule_that_the_identities_make_judges_it(self):
        node = Node(ORDERS, self.TENANT, self.BOTH, self.EVERYBODY, self.OVERALL)
        answer = node.check(also=(*self.ACME, ("ip", b"::1")))
        assert self.judged(answer) == ["both", "orders", "overall", "tenant", "everybody"]
        assert self.judged(node.check()) == ["orders", "overall", "everybody"]

    def test_what_one_denies_is_charged_to_none(self):
        node = Node(ORDERS, self.TENANT, self.EVERYBODY)
        assert node.check(b"ada", cost=9, also=self.ACME).allowed
        denied = node.check(b"bob", cost=7, also=self.ACME)
        assert (denied.allowed, denied.rule, denied.remaining) == (False, self.TENANT, 6)
        assert node.check(b"bob", cost=9, also=self.OTHER).allowed
        assert node.check(b"bob", also=self.OTHER).rule is self.EVERYBODY

    def test_a_combination_has_a_bucket_of_its_own(self):
        node = Node(self.BOTH)
        for user, tenant in ((b"ada", b"acme"), (b"ada", b"other"), (b"bob", b"acme")):
            asked = [node.check(user, also=(("tenant", tenant),)).allowed for _ in range(3)]
            assert asked == [True, True, False]
        assert node.check(b"ada").reason is Reason.NO_RULE
        turned = Check(b"acme", "tenant", "/orders", also=((USER, b"ada"),))
        assert not node.limiter.check(turned).allowed

    def test_the_rule_over_all_endpoints_has_one_bucket(self):
        node = Node(self.OVERALL)
        assert [node.check(endpoint=f"/{number}").remaining for number in range(3)] == [11, 10, 9]

    def test_everybody_shares_one_bucket_on_each_endpoint(self):
        node = Node(replace(self.EVERYBODY, endpoint="*"))
        assert [node.check(name).remaining for name in (b"ada", b"bob")] == [17, 16]
        assert node.check(endpoint="/else").remaining == 17

    def test_a_disabled_rule_judges_nothing(self):
        node = Node(
            ORDERS, replace(self.EVERYBODY, enabled=False), replace(self.OVERALL, enabled=False)
        )
        assert node.check().limits == ()

    async def test_a_reset_is_of_one_bucket(self):
        node = Node(ORDERS, self.BOTH, self.EVERYBODY, self.OVERALL)
        node.check(also=self.ACME)
        for kind, identifier, endpoint, rule in (
            ("tenant+user", joined([b"acme", b"ada"]), "/orders", self.BOTH),
            ("all", b"", "/orders", self.EVERYBODY),
            (USER, b"ada", "**", self.OVERALL),
        ):
            assert await node.limiter.reset(identifier, kind, endpoint) == (rule,)
        answer = node.check(cost=2, also=self.ACME)
        assert {one.rule.id: one.remaining for one in answer.limits} == {
            "both": 0, "orders": 7, "everybody": 16, "overall": 10,
        }  # fmt: skip

    def test_who_is_denied_is_told_by_the_identifier_of_the_bucket(self):
        node = Node(
            replace(ORDERS, limit=3), replace(self.BOTH, limit=1), replace(self.EVERYBODY, limit=4)
        )
        for _ in range(2):
            node.check(also=self.ACME)
        node.check(cost=3)
        node.check(b"bob", cost=3)
        node.check(b"eve")
        assert [(identifier, scope.rule.id) for identifier, scope in node.denied] == [
            (joined([b"acme", b"ada"]), "both"), (b"ada", "orders"), (b"", "everybody"),
        ]  # fmt: skip

    def test_a_batch_is_answered_in_its_order_where_identifiers_share_a_bucket(self):
        eve, ada = (Check(name, USER, "/orders", 10, also=self.ACME) for name in (b"eve", b"ada"))
        for node in (Node(self.TENANT), Node(replace(self.EVERYBODY, limit=10))):
            answers = node.limiter.check_batch([eve, ada])
            assert [answer.allowed for answer in answers] == [True, False]

    def test_a_check_of_many_identities_can_be_foreseen(self):
        node = Node(ORDERS, self.TENANT)
        node.check(b"ada", cost=9, also=self.ACME)
        check = Check(b"bob", USER, "/orders", 7, also=self.ACME)
        assert node.dry_run.all_pass([check], node.clock.now_us()) is False
        assert node.dry_run.all_pass([check._replace(cost=6)], node.clock.now_us()) is True


class TestExplaining:
    """What a check would be answered, and every rule that was looked at."""

    TENANT = replace(ORDERS, id="tenant", identifier_type="tenant", limit=15)

    async def test_each_rule_says_whether_it_judges(self):
        overall = replace(ORDERS, id="overall", endpoint="**", enabled=False)
        elsewhere = replace(ORDERS, id="elsewhere", endpoint="/else")
        node = Node(ORDERS, EVERYWHERE, self.TENANT, overall, elsewhere)
        decision, looked_at, *_ = await node.dry_run.explain(Check(b"ada", USER, "/orders", 4))
        assert decision == node.check(cost=4, peek=True)
        assert [(one.rule.id, one.match, len(one.limits)) for one in looked_at] == [
            ("orders", Match.JUDGES, 1),
            ("everywhere", Match.OVERRIDDEN, 0),
            ("overall", Match.DISABLED, 0),
            ("tenant", Match.NOT_NAMED, 0),
        ]
        assert looked_at[0].limits[0][:5] == decision[:5]

    async def test_several_limits_say_each_what_they_would(self):
        node = Node(ORDERS, self.TENANT)
        node.check(cost=9, also=(("tenant", b"t"),))
        before = node.stats.allowed_total, node.stats.blocked_total, node.stats.bucket_missed_total
        check = Check(b"ada", USER, "/orders", 4, also=(("tenant", b"t"),))
        decision, looked_at, *_ = await node.dry_run.explain(check)
        assert (decision.allowed, decision.rule) == (False, ORDERS)
        assert [[one.allowed for one in rule.limits] for rule in looked_at] == [[False], [True]]
        after = node.stats.allowed_total, node.stats.blocked_total, node.stats.bucket_missed_total
        assert (after, node.denied) == (before, [])

    async def test_a_limit_that_only_observes_lets_the_check_pass(self):
        node = Node(replace(ORDERS, enforcement=Enforcement.OBSERVE))
        node.check(cost=10)
        decision, (one,), *_ = await node.dry_run.explain(Check(b"ada", USER, "/orders"))
        assert (decision.allowed, one.limits[0].allowed) == (True, False)

    async def test_without_a_rule_it_says_so(self, node):
        node.put(self.TENANT)
        decision, (one,), *_ = await node.dry_run.explain(Check(b"ada", USER, "/orders"))
        assert (decision, one.match) == (NO_RULE, Match.NOT_NAMED)

    async def test_without_a_book_there_is_nothing_to_tell(self):
        with pytest.raises(StoreUnavailableError, match="no rules are loaded"):
            await Sharing(book=False).dry_run.explain(check_of())

    async def test_a_callers_time_is_used(self, node):
        node.check(cost=10)
        later = node.clock.now_us() + 1_000_000
        decision, *_ = await node.dry_run.explain(Check(b"ada", USER, "/orders", timestamp=later))
        assert decision.retry_after == 59

    async def test_a_timestamp_that_is_not_used_does_not_count(self, node):
        decision, *_ = await node.dry_run.explain(Check(b"ada", USER, "/orders", timestamp=5))
        assert (decision.allowed, node.stats.clock_rejected_total) == (True, 0)

    async def test_shared_buckets_are_asked_and_judge_by_all_rules(self):
        overall = replace(ORDERS, id="overall", endpoint="**")
        node = Sharing(ORDERS, overall)
        check = check_of(cost=3)
        node.shared.answers += [GRANTED, REFUSED]
        decision, looked_at, *_ = await node.dry_run.explain(check)
        assert (decision[:5], decision.rule) == (REFUSED[:5], overall)
        assert [(one.rule, one.limits[0].allowed) for one in looked_at] == [
            (ORDERS, True), (overall, False),
        ]  # fmt: skip
        node.shared.at_once = REFUSED
        assert (await node.dry_run.explain(check))[0][:5] == REFUSED[:5]
        assert (node.stats.allowed_total, node.stats.blocked_total) == (0, 0)
        assert [peek for *_, peek in node.shared.asked] == [True, True]

    async def test_shared_buckets_that_do_not_answer_are_an_error(self):
        node = Sharing(ORDERS)
        node.shared.answers.append(AWAY)
        with pytest.raises(StoreUnavailableError):
            await node.dry_run.explain(check_of())


class TestWaiting:
    SMOOTH = Rule(
        "smooth", "/orders", USER, limit=10, window_seconds=1, algorithm=Algorithm.TOKEN_BUCKET,
        burst=1,
    )  # fmt: skip

    def test_who_would_wait_is_allowed_ahead_and_counted_as_allowed(self):
        node = Node(self.SMOOTH)
        answers = [node.check(max_wait_ms=250) for _ in range(4)]
        assert [(one.allowed, one.wait_ms) for one in answers] == [
            (True, 0), (True, 100), (True, 200), (False, 0),
        ]  # fmt: skip
        assert [one.limits for one in answers] == [()] * 4
        assert (answers[1].reason, answers[1].rule) == (Reason.WITHIN_LIMIT, self.SMOOTH)
        assert node.stats.by_rule == {"smooth": [3, 1]}
        assert not node.check().allowed

    async def test_a_peek_and_an_explanation_say_the_same_and_charge_nothing(self):
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

    async def test_a_reset_frees_what_waits(self):
        node = Node(self.SMOOTH)
        for _ in range(5):
            node.check(max_wait_ms=1_000)
        await node.reset()
        assert node.check().allowed

    def test_an_edit_keeps_what_waits(self):
        node = Node(self.SMOOTH)
        for _ in range(3):
            node.check(max_wait_ms=1_000)
        node.put(replace(self.SMOOTH, burst=2))
        node.clock.advance(us=100_000)
        assert node.check(cost=2, max_wait_ms=1_000).wait_ms == 200

    def test_a_wait_for_no_rule_is_none(self):
        assert Node().check(max_wait_ms=250).wait_ms == 0


class TestRulesThatAreUsed:
    """Which rules have judged a check, and which a check without one may have meant."""

    async def test_a_rule_is_used_when_a_check_is_judged_by_it_also_if_another_decides(self):
        everywhere = replace(EVERYWHERE, endpoint="**", limit=1_000)
        node = Node(ORDERS, everywhere, replace(ORDERS, id="carts", endpoint="/carts"))
        assert node.stats.used_rules == set()
        node.limiter.check(Check(b"ada", USER, "/orders"))
        assert node.stats.used_rules == {"orders", "everywhere"}

    async def test_to_explain_a_check_uses_no_rule_and_takes_no_counter(self):
        node = Node(ORDERS)
        decision, *_ = await node.dry_run.explain(Check(b"ada", USER, "/orders"))
        assert decision.rule is ORDERS
        assert (node.stats.used_rules, node.stats.by_rule) == (set(), {})
        node.limiter.check(Check(b"ada", USER, "/orders"))
        assert node.stats.used_rules == {"orders"}

    async def test_a_check_without_a_rule_is_told_of_the_nearest(self):
        many = [replace(ORDERS, id=f"{n}", endpoint=f"/carts/{n}") for n in range(300)]
        node = Node(ORDERS, *many)
        explained = await node.dry_run.explain(Check(b"ada", USER, "/Orders/"))
        assert explained.nearest == ((ORDERS, "differs in case, differs in slashes"),)
        assert explained.decision.reason is Reason.NO_RULE

    async def test_a_check_with_a_rule_is_told_of_no_other(self):
        node = Node(ORDERS, replace(ORDERS, id="other", endpoint="/Orders"))
        assert (await node.dry_run.explain(Check(b"ada", USER, "/orders"))).nearest == ()

    async def test_a_check_that_a_rule_for_all_others_judges_is_told_of_another_spelling(self):
        every = replace(ORDERS, id="every", endpoint="*")
        node = Node(ORDERS, every, replace(ORDERS, id="below", endpoint="/orders/{id}"))
        explained = await node.dry_run.explain(Check(b"ada", USER, "/Orders"))
        assert explained.decision.rule is every
        assert explained.nearest == ((ORDERS, "differs in case"),)
        explained = await node.dry_run.explain(Check(b"ada", USER, "/orders/42"))
        assert (explained.decision.rule, explained.nearest) == (every, ())

    async def test_of_a_long_book_a_bounded_number_of_rules_is_looked_at(self, monkeypatch):
        monkeypatch.setattr(dry_run_module, "MAX_LOOKED_AT", 0)
        assert (await Node(ORDERS).dry_run.explain(Check(b"ada", USER, "/Orders"))).nearest == ()
