"""Bulk answers of a real limiter, parsed with the generated classes."""

import itertools
from dataclasses import replace

import pytest

from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.table import BucketTable
from ratelimitd.counters import CheckStats
from ratelimitd.limiter.limiter import Limiter
from ratelimitd.model import Algorithm, Enforcement, IdentifierType, Limit, Plan, Rule
from ratelimitd.rules.assignments import Assignments
from ratelimitd.rules.book import RuleBook
from ratelimitd.services import bulk_checks
from ratelimitd.services.bulk_checks import (
    MAX_ANSWER_BYTES,
    MAX_KNOWN,
    MAX_KNOWN_BYTES,
    MAX_LEARNED,
    MAX_RESET_TIMES,
    BulkChecks,
)
from ratelimitd.testing import ManualClock
from ratelimiter.v1 import ratelimiter_pb2 as pb

USER, IP = IdentifierType.USER, IdentifierType.IP
NOW_S = 1_700_006_400
ID = "0b6e4f6e-5f0e-4c51-9c5e-0d1f4f2a9b11"
ORDERS = Rule(ID, "/orders", USER, limit=3, window_seconds=60, algorithm=Algorithm.FIXED_WINDOW)
EVERYWHERE = Rule(
    "everywhere", "*", USER, limit=2**31 - 1, window_seconds=60, algorithm=Algorithm.FIXED_WINDOW
)
ADDRESSES = Rule("addresses", "*", IP, limit=3, window_seconds=60, algorithm=Algorithm.FIXED_WINDOW)


class CountingLimiter(Limiter):
    """A limiter that counts its look-ups of scopes, and fails for ``broken`` keys."""

    found = 0
    broken = ()

    def __init__(self, **parts):
        super().__init__(**parts)
        self._find, self.scopes.find = self.scopes.find, self.find

    def find(self, endpoint, identifier_type, also=()):
        self.found += 1
        if endpoint in self.broken:
            raise KeyError(endpoint)
        return self._find(endpoint, identifier_type, also)

    def charge(self, identifier, scope, now_us, cost):
        if identifier in self.broken:
            raise KeyError(identifier)
        return super().charge(identifier, scope, now_us, cost)


class Bench:
    """Bulk checks with their dependencies."""

    def __init__(self, *rules):
        self.clock, self.stats = ManualClock(), CheckStats()
        self.table, self.assignments = BucketTable(10_000), Assignments()
        self.limiter = CountingLimiter(
            buckets=self.table,
            clock=self.clock,
            stats=self.stats,
            timestamps="bounded",
            keys=BucketKeys(b"k" * 32),
            assignments=self.assignments,
        )
        seconds = itertools.count(0.0, 0.003)
        self.checks = BulkChecks(self.limiter, self.stats, lambda: next(seconds))
        if rules:
            self.put(*rules)

    def put(self, *rules):
        self.limiter.replace_book(RuleBook.of(rules, 1))

    def answers(self, *messages):
        """Return the answer to each message, ``None`` for those left to the general path."""
        octets = self.checks.answer_calls(messages)
        assert len(octets) == len(messages)
        return [answer and pb.RateLimitResponse.FromString(answer) for answer in octets]

    def takes(self, message):
        """Return whether a message is answered in bulk, not left to the general path."""
        [answer] = self.answers(message)
        return answer is not None


@pytest.fixture
def bench():
    return Bench(ORDERS, EVERYWHERE, ADDRESSES)


def check(identifier="ada", endpoint="/orders", identifier_type="user", **fields):
    return pb.RateLimitRequest(
        identifier=identifier, identifier_type=identifier_type, endpoint=endpoint, **fields
    ).SerializeToString()


class TestAnswers:
    def test_answers_match_the_contract_from_the_first_check(self, bench):
        assert bench.answers(check(), check(tokens_requested=2), check(), check()) == [
            pb.RateLimitResponse(
                allowed=allowed,
                remaining_tokens=remaining,
                reset_time=NOW_S + 60,
                retry_after_seconds=retry_after,
                reason=reason,
                limit=3,
                window_seconds=60,
                rule_id=ID,
                limit_name="default",
            )
            for allowed, remaining, retry_after, reason in (
                (True, 2, 0, pb.WITHIN_LIMIT),
                (True, 0, 60, pb.WITHIN_LIMIT),
                (False, 0, 60, pb.LIMIT_EXCEEDED),
                (False, 0, 60, pb.LIMIT_EXCEEDED),
            )
        ]

    def test_the_deciding_one_of_several_limits_comes_first(self):
        hour, day = (
            Limit(limit=limit, window_seconds=3_600, algorithm=ORDERS.algorithm, name=name)
            for name, limit in (("hour", 10), ("day", 20))
        )
        bench = Bench(replace(ORDERS, limit=30, more=(hour, day)))
        for remaining in (9, 8):
            [answer] = bench.answers(check())
            assert (answer.limit_name, answer.remaining_tokens) == ("hour", remaining)
            assert [(one.name, one.remaining_tokens) for one in answer.limits] == [
                ("hour", remaining), ("default", remaining + 20), ("day", remaining + 10),
            ]  # fmt: skip
        [answer] = bench.answers(check(tokens_requested=19))
        assert [(one.name, one.allowed, one.remaining_tokens) for one in answer.limits] == [
            ("hour", False, 8), ("default", True, 28), ("day", False, 18),
        ]  # fmt: skip

    def test_an_observing_limit_alone_answers_as_the_only_one(self):
        bench = Bench(replace(ORDERS, limit=1, enforcement=Enforcement.OBSERVE))
        for answer in bench.answers(check(), check()):
            assert (answer.allowed, answer.remaining_tokens) == (True, 0)
            assert (answer.limit_name, [*answer.limits]) == ("default", [])

    def test_a_denied_check_may_have_remaining_tokens(self, bench):
        bench.answers(check())
        [answer] = bench.answers(check(tokens_requested=4))
        assert (answer.allowed, answer.remaining_tokens) == (False, 2)
        assert answer.reason == pb.COST_EXCEEDS_LIMIT

    @pytest.mark.parametrize("limit", [2, 128, 129, 2**14, 2**14 + 1, 2**31 - 1])
    def test_numbers_of_every_length_are_encoded(self, bench, limit):
        bench.put(replace(ORDERS, limit=limit, window_seconds=limit))
        [answer] = bench.answers(check())
        assert (answer.remaining_tokens, answer.limit, answer.window_seconds) == (
            limit - 1, limit, limit,
        )  # fmt: skip

    @pytest.mark.parametrize("left", [1, 127, 128, 2**14 - 1, 2**14, 2**28 - 1, 2**28, 2**31 - 3])
    def test_remaining_tokens_of_several_limits_are_encoded(self, left):
        hour = Limit(limit=left + 2, window_seconds=3_600, algorithm=ORDERS.algorithm, name="hour")
        bench = Bench(replace(ORDERS, limit=left + 2, more=(hour,)))
        bench.answers(check())  # caches the reset times
        [answer] = bench.answers(check())
        assert answer.remaining_tokens == left
        assert [one.remaining_tokens for one in answer.limits] == [left, left]

    def test_zeros_are_not_encoded(self, bench):
        bench.clock.step(-NOW_S * 1_000_000)
        bench.put(replace(ORDERS, algorithm=Algorithm.SLIDING_WINDOW))
        [octets] = bench.checks.answer_calls([check(tokens_requested=4)])
        answer = pb.RateLimitResponse.FromString(octets)
        assert (answer.allowed, answer.reset_time) == (False, 0)
        assert octets == answer.SerializeToString()

    @pytest.mark.parametrize("id_bytes", range(80, 104))
    def test_answers_do_not_exceed_their_maximum_length_for_any_id(self, bench, id_bytes):
        longest = {"id": "i" * id_bytes, "limit": 2**31 - 1, "window_seconds": 2**31 - 1}
        bench.put(replace(ORDERS, **longest))
        for octets in bench.checks.answer_calls([check()]):
            assert octets is None or len(octets) <= MAX_ANSWER_BYTES

    def test_a_rule_with_a_foreign_id_takes_the_general_path(self, bench):
        bench.put(replace(ORDERS, id="i" * 1_000))
        assert bench.answers(check(), check()) == [None, None]

    def test_an_empty_call_has_no_answers_and_no_latency(self, bench):
        assert bench.answers() == []
        assert sum(bench.stats.latency_counts) == 0


class TestCounting:
    def test_checks_of_one_call_share_its_latency_and_others_have_none(self, bench):
        bench.answers(check(), b"", check(peek=True), check())
        assert sum(bench.stats.latency_counts) == 2
        assert bench.stats.latency_sum_s == pytest.approx(0.003)
        bench.answers(b"", b"")
        assert sum(bench.stats.latency_counts) == 2

    def test_only_answered_checks_are_counted(self, bench):
        bench.answers(*[check()] * 5, b"\xff", check(timestamp=NOW_S))
        stats = bench.stats
        assert (stats.allowed_total, stats.blocked_total, stats.invalid_total) == (3, 2, 0)
        assert stats.by_rule == {ID: [3, 2]}


class TestChecksLeftToTheGeneralPath:
    @pytest.mark.parametrize(
        "message",
        [
            b"",
            b"\x0a",
            b"\x0a\x00",
            b"\x0a\x03ad",
            b"\xff" * 20,
            check(identifier=""),
            check(identifier="é"),
            check(identifier="n" * 128),
            check(identifier="n" * 256),
            check(identifier_type="User"),
            check(endpoint="*"),
            check(tokens_requested=-1),
            check(timestamp=NOW_S),
            check(peek=True),
            check().replace(b"ada", b"\xffda"),
            check() + b"\x20\x00",
            check() + b"\x28\x00",
            check() + b"\x78\x01",
            check() + check(),
            b"\x78\x01" + check(),
            check(tokens_requested=1)[:-1] + b"\x81\x00",
            check().replace(b"\x12\x04user", b"\x12\x84\x00user"),
            check().replace(b"\x0a\x03ada", b"") + b"\x0a\x03ada",
        ],
    )
    def test_non_canonical_and_invalid_messages(self, bench, message):
        assert not bench.takes(message)
        assert bench.takes(check())  # may have the same ending
        assert not bench.takes(message)
        assert bench.stats.allowed_total == 1

    def test_an_identifier_of_up_to_127_octets_is_answered_here(self, bench):
        assert bench.takes(check(identifier="n" * 127))
        assert not bench.takes(check(identifier="n" * 128))

    @pytest.mark.parametrize(
        "address",
        ["2001:DB8::1", "::ffff:10.0.0.1", "010.0.0.1", "fe80::1%eth0", "10.0.0.1 ", "ada", "é"],
    )
    def test_addresses_in_non_canonical_form(self, bench, address):
        assert bench.takes(check("10.0.0.1", identifier_type="ip"))
        assert bench.takes(check("2001:db8::1", identifier_type="ip"))
        assert not bench.takes(check(address, identifier_type="ip"))
        assert len(bench.table) == 2

    def test_endpoints_without_a_rule(self):
        bench = Bench(ORDERS)
        assert not bench.takes(check(endpoint="/carts"))
        assert bench.stats.no_rule_total == 0

    def test_all_checks_without_rules(self):
        bench = Bench()
        assert not bench.takes(check())
        bench.put(ORDERS)
        assert bench.takes(check())

    @pytest.mark.parametrize("broken", ["/orders", b"ada"])
    def test_a_check_that_raises_without_effect_on_others(self, bench, broken):
        bench.limiter.broken = (broken,)
        first, second = bench.answers(check(), check("bob", "/carts"))
        assert (first, second.allowed) == (None, True)
        bench.limiter.broken = ()
        assert bench.takes(check())
        assert bench.stats.allowed_total == 2

    def test_all_checks_when_the_clock_fails(self, bench, monkeypatch):
        assert bench.takes(check())
        with monkeypatch.context() as patched:
            patched.setattr(bench.limiter, "now_us", None)
            assert bench.answers(check(), b"", check()) == [None] * 3
        assert bench.answers(check())[0].remaining_tokens == 1


class TestCachedEndings:
    def test_an_ending_is_looked_up_once(self, bench):
        bench.answers(*[check(name) for name in ("ada", "bob", "carol")])
        assert bench.limiter.found == 1

    def test_costs_and_endpoints_are_part_of_an_ending(self, bench):
        bench.answers(check(), check(tokens_requested=1), check(endpoint="/carts"))
        assert bench.limiter.found == 3

    def test_a_long_ending_is_not_cached(self, bench):
        assert bench.takes(check(endpoint="/" + "e" * (MAX_KNOWN_BYTES - 10)))
        assert not bench.takes(check(endpoint="/" + "e" * (MAX_KNOWN_BYTES - 9)))

    @pytest.mark.parametrize(
        "changed",
        [
            {"limit": 1},
            {"window_seconds": 30},
            {"algorithm": Algorithm.TOKEN_BUCKET},
            {"enabled": False},
        ],
    )
    def test_a_changed_rule_applies_from_the_next_check(self, bench, changed):
        bench.answers(check(), check())
        rule = replace(ORDERS, **changed)
        bench.put(rule, EVERYWHERE)
        [answer] = bench.answers(check())
        expected = rule if rule.enabled else EVERYWHERE
        assert (answer.rule_id, answer.limit, answer.window_seconds) == (
            expected.id, expected.limit, expected.window_seconds,
        )  # fmt: skip
        bench.put(EVERYWHERE)
        assert bench.answers(check())[0].rule_id == EVERYWHERE.id
        bench.put()
        assert not bench.takes(check())

    def test_cached_endings_are_bounded(self, bench, monkeypatch):
        assert MAX_KNOWN >= 4_096
        monkeypatch.setattr(bulk_checks, "MAX_KNOWN", 3)
        for number in range(4):
            assert bench.takes(check(endpoint=f"/{number}"))
        assert len(bench.checks._known) == 1
        assert bench.takes(check(endpoint="/0"))

    def test_unknown_endings_per_call_are_bounded_and_the_rest_is_learned_later(self, bench):
        messages = [check(endpoint=f"/{number}") for number in range(MAX_LEARNED + 2)]
        answers = bench.answers(*messages, messages[0])
        assert [answer is None for answer in answers] == [False] * MAX_LEARNED + [True] * 2 + [
            False
        ]
        assert None not in bench.answers(*messages)

    def test_cached_reset_times_are_bounded(self, bench):
        for _ in range(MAX_RESET_TIMES + 2):
            [answer] = bench.answers(check())
            assert answer.reset_time == bench.clock.now_us() // 1_000_000 + 60
            bench.clock.advance(seconds=60)
        assert len(bench.checks._reset_times) == 2


def test_cached_data_of_plans_is_bounded_over_all_endings(monkeypatch):
    monkeypatch.setattr(bulk_checks, "MAX_OF_PLANS", 6)
    bench = Bench(replace(EVERYWHERE, limit=1_000, plans=(Plan("gold", (EVERYWHERE,)),)))
    bench.assignments.put(USER, b"bob", "gold", 0)
    for cost in range(1, 20):
        answers = bench.answers(*[check(name, tokens_requested=cost) for name in ("ada", "bob")])
        assert [answer.plan for answer in answers] == ["", "gold"]
        assert len(bench.checks._known) <= 4
