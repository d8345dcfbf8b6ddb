"""Checks that wait: no interval admits more than its buckets hold and refill, and no check waits too long."""

import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import chain

import pytest

from ratelimitd.buckets.holds import OwnHolds
from ratelimitd.buckets.table import BucketTable
from ratelimitd.ledger.holds import Hold
from ratelimitd.limiter.scopes import charges_of
from ratelimitd.model import Algorithm, Check, Enforcement, IdentifierType, Limit, Reason, Rule
from ratelimitd.rules.book import RuleBook
from tests.unit.limiter.nodes import KEYS, limiter_of

pytestmark = pytest.mark.slice

START_US = 1_700_006_400_000_000
CHECKS = 60
USER = IdentifierType.USER


def random_rule(rng):
    limits = [
        Limit(
            limit=rng.choice([1, 3, 10, 100, 1_000, rng.randint(1, 10**6), 10**8]),
            window_seconds=rng.choice([1, 1, 2, 7, 60]),
            algorithm=Algorithm.TOKEN_BUCKET,
            name=name,
            burst=rng.choice([0, 1, 2, 5, rng.randint(1, 1_000)]),
        )
        for name in ["default", "b", "c"][: rng.choice([1, 1, 2, 3])]
    ]
    first, *more = limits
    return Rule(
        "r", "/e", USER, limit=first.limit, window_seconds=first.window_seconds,
        algorithm=first.algorithm, burst=first.burst, more=tuple(more),
    )  # fmt: skip


class Node:
    """The decisions of one node, and the times at which allowed checks proceed."""

    def __init__(self, rule):
        self.limiter = limiter_of(timestamps="server", buckets=BucketTable(1_000))
        self.limiter.replace_book(RuleBook.of([rule], 1))
        self.proceeds = []

    def check(self, now_us, cost, max_wait_ms, *, peek=False):
        check = Check(b"ada", USER, "/e", cost, 0, peek, (), max_wait_ms)
        decision = self.limiter.check(check, now_us)
        if decision.allowed and not peek:
            self.proceeds.append((now_us + 1_000 * decision.wait_ms, cost))
        return decision


def most_at_once(proceeds, limit):
    """Return the highest level of a leaky bucket filled by these checks, in tokens."""
    level, before, worst = Fraction(0), 0, Fraction(0)
    for at_us, cost in sorted(proceeds):
        level = max(Fraction(0), level - Fraction((at_us - before) * limit.limit, limit.window_us))
        level, before = level + cost, at_us
        worst = max(worst, level)
    return worst


class HoldingNode(Node):
    """A node whose allowed checks and holds, with what they have been settled with, are its charges."""

    def __init__(self, rule):
        super().__init__(rule)
        self.limiter = limiter_of(timestamps="server", buckets=(table := BucketTable(1_000)))
        self.limiter.replace_book(RuleBook.of([rule], 1))
        self.now_us = START_US
        self.holds = OwnHolds(table, KEYS, lambda: self.now_us)
        self.open = {}
        self.has_owed = False

    async def hold(self, number, cost):
        prepared = self.limiter.prepare(Check(b"ada", USER, "/e", cost), self.now_us)
        charges = charges_of(prepared.identifiers, prepared.scope)
        number = number.to_bytes(16, "big")
        held = await self.holds.hold(Hold(number, b"d", charges, self.now_us, cost, 10**12))
        if held.expire_us:
            self.open[number] = len(self.proceeds)
            self.proceeds.append((self.now_us, cost))

    async def settle(self, number, actual):
        place = self.open.pop(number)
        await self.holds.settle(number, {}, actual, self.now_us)
        at_us, held = self.proceeds[place]
        self.proceeds[place] = at_us, actual
        self.has_owed |= actual > held


def excess(proceeds, limit, from_us):
    """Return the tokens above the capacity at each time from ``from_us`` on at which something proceeds."""
    level, before, found = Fraction(0), 0, {}
    for at_us, cost in sorted(proceeds):
        level = max(Fraction(0), level - Fraction((at_us - before) * limit.limit, limit.window_us))
        level, before = level + cost, at_us
        if at_us >= from_us:
            found[at_us] = max(Fraction(0), level - limit.capacity)
    return found


async def play_with_holds(rng, met):
    rule = random_rule(rng)
    node = HoldingNode(rule)
    slowest = max(limit.window_us // limit.limit for limit in rule.limits)
    least = min(limit.capacity for limit in rule.limits)
    for number in range(CHECKS):
        node.now_us += rng.choice([0, 0, rng.randint(0, slowest), rng.randint(0, 10 * slowest + 1)])
        cost = rng.choice([1, 1, rng.randint(1, least)])
        if rng.random() < 0.3:
            await node.hold(number, cost)
            continue
        if node.open and rng.random() < 0.4:
            actual = rng.choice([0, 1, rng.randint(0, 3 * least), rng.randint(0, 10)])
            await node.settle(rng.choice([*node.open]), actual)
            continue
        now_us, max_wait_ms = node.now_us, rng.choice([0, 50, 500, 5_000, 60_000])
        at_once = node.check(now_us, cost, 0, peek=True)
        before = [excess(node.proceeds, limit, now_us) for limit in rule.limits]
        at_now = [excess([*node.proceeds, (now_us, 0)], limit, now_us) for limit in rule.limits]
        is_paid = max(node.proceeds, default=(0, 0))[0] <= now_us and not any(
            one[now_us] for one in at_now
        )
        decision = node.check(now_us, cost, max_wait_ms)
        met[f"{at_once.allowed} {decision.allowed}"] += 1
        if not decision.allowed:
            later_us = now_us + 1_000 * max_wait_ms
            assert not is_paid or not node.check(later_us, cost, 0, peek=True).allowed
            met["denied, no debt"] += is_paid
            continue
        met["waits after a debt"] += decision.wait_ms > 0 and node.has_owed
        proceeds_us = now_us + 1_000 * decision.wait_ms
        for limit, earlier in zip(rule.limits, before, strict=True):
            after = excess(node.proceeds, limit, now_us)
            assert not after[proceeds_us], (rule, node.proceeds)
            for at_us, tokens in after.items():
                assert tokens <= earlier.get(at_us, 0), (rule, node.proceeds)


def play(rng, met):
    rule = random_rule(rng)
    node, now_us = Node(rule), START_US
    slowest = max(limit.window_us // limit.limit for limit in rule.limits)
    for _ in range(CHECKS):
        now_us += rng.choice([0, 0, rng.randint(0, slowest), rng.randint(0, 10 * slowest + 1)])
        least = min(limit.capacity for limit in rule.limits)
        cost = rng.choice([1, 1, 1, rng.randint(1, least), least + 1])
        max_wait_ms = rng.choice([0, 1, 50, 500, 5_000, 60_000])
        at_once = node.check(now_us, cost, 0, peek=True)
        peeked = node.check(now_us, cost, max_wait_ms, peek=True)
        wait_ms = peeked.wait_ms
        if wait_ms:
            # It would pass at that time, and not a millisecond earlier.
            assert node.check(now_us + 1_000 * wait_ms, cost, 0, peek=True).allowed
            assert not node.check(now_us + 1_000 * (wait_ms - 1), cost, 0, peek=True).allowed
        elif not at_once.allowed and at_once.reason is Reason.LIMIT_EXCEEDED:
            assert not node.check(now_us + 1_000 * max_wait_ms, cost, 0, peek=True).allowed
        decision = node.check(now_us, cost, max_wait_ms)
        assert decision == peeked
        assert wait_ms <= max_wait_ms
        if at_once.allowed:
            assert (decision, wait_ms) == (at_once, 0)
        met[decision.reason.name] += 1
        met["waits"] += wait_ms > 0
        met["waits for several"] += wait_ms > 0 and len(rule.limits) > 1
        met["waits behind one that waits"] += (
            wait_ms > 0 and max(node.proceeds[:-1], default=(0, 0))[0] > now_us
        )
    for limit in rule.limits:
        assert most_at_once(node.proceeds, limit) <= limit.capacity, (rule, node.proceeds)


def test_no_interval_admits_more_than_the_bucket_and_its_refill():
    rng, met = random.Random(1), Counter[str]()
    for _ in range(300):
        play(rng, met)
    assert min(met.values()) > 300, met
    assert set(met) == {
        "WITHIN_LIMIT", "LIMIT_EXCEEDED", "COST_EXCEEDS_LIMIT", "waits", "waits for several",
        "waits behind one that waits",
    }  # fmt: skip


async def test_no_check_waits_for_tokens_of_a_debt_or_of_a_hold():
    rng, met = random.Random(2), Counter[str]()
    for _ in range(100):
        await play_with_holds(rng, met)
    assert min(met.values()) > 100, met
    assert set(met) == {
        "True True", "False True", "False False", "denied, no debt", "waits after a debt",
    }  # fmt: skip


def test_callers_that_wait_use_the_whole_refill():
    rule = Rule(
        "r", "/e", USER, limit=100, window_seconds=1, algorithm=Algorithm.TOKEN_BUCKET, burst=5
    )
    node = Node(rule)
    for step in range(10_000):
        node.check(START_US + step * 1_000, 1, 50)
    # 10 s of refill, the initial tokens, and those promised for the next 50 ms.
    assert len(node.proceeds) == 1_000 + 5 + 5 - 1


def test_checks_at_one_instant_wait_no_longer_than_the_refill_takes():
    rule = Rule(
        "r", "/e", USER, limit=300_000, window_seconds=1, algorithm=Algorithm.TOKEN_BUCKET, burst=1_000
    )  # fmt: skip
    node = Node(rule)
    waits = [node.check(START_US, 1, 50).wait_ms for _ in range(5_000)]
    # A token comes back in 3 1/3 µs.
    assert waits == [0] * 1_000 + [-(-number // 300) for number in range(1, 4_001)]


def test_an_observing_limit_causes_no_wait_and_is_charged_if_it_passes():
    observed = Limit(
        limit=1, window_seconds=60, algorithm=Algorithm.TOKEN_BUCKET, name="candidate",
        enforcement=Enforcement.OBSERVE,
    )  # fmt: skip
    rule = Rule(
        "r", "/e", USER, limit=10, window_seconds=1, algorithm=Algorithm.TOKEN_BUCKET, burst=1,
        more=(observed,),
    )  # fmt: skip
    node = Node(rule)
    waits = [node.check(START_US, 1, 1_000).wait_ms for _ in range(3)]
    assert waits == [0, 100, 200]
    assert [one.allowed for one in node.check(START_US, 1, 1_000).limits] == [True, False]


@pytest.mark.parametrize("algorithm", [Algorithm.SLIDING_WINDOW, Algorithm.FIXED_WINDOW])
def test_an_observing_window_keeps_no_check_from_waiting_and_is_charged_at_once(algorithm):
    window = Limit(
        limit=3, window_seconds=60, algorithm=algorithm, name="candidate",
        enforcement=Enforcement.OBSERVE,
    )  # fmt: skip
    rule = Rule(
        "r", "/e", USER, limit=10, window_seconds=1, algorithm=Algorithm.TOKEN_BUCKET, burst=1,
        more=(window,),
    )  # fmt: skip
    node = Node(rule)
    answers = [node.check(START_US, 1, 1_000) for _ in range(4)]
    assert [one.wait_ms for one in answers] == [0, 100, 200, 300]
    assert [one.limits[1][:2] for one in answers] == [(True, 2), (True, 1), (True, 0), (False, 0)]
    # The window's time is that of the checks, not when they proceed.
    assert node.check(START_US + 60_000_000, 1, 0).limits[1][:2] == (True, 2)


@pytest.mark.parametrize("algorithm", [Algorithm.SLIDING_WINDOW, Algorithm.FIXED_WINDOW])
@pytest.mark.parametrize("place", [0, 1])
def test_no_check_waits_on_a_window(algorithm, place):
    bucket = Limit(limit=1, window_seconds=1, algorithm=Algorithm.TOKEN_BUCKET, name="a")
    window = replace(bucket, limit=9, window_seconds=60, algorithm=algorithm, name="b")
    first, second = (bucket, window)[:: 1 if place else -1]
    rule = Rule(
        "r", "/e", USER, limit=first.limit, window_seconds=first.window_seconds,
        algorithm=first.algorithm, more=(second,),
    )  # fmt: skip
    node = Node(rule)
    answers = [node.check(START_US, 1, 60_000) for _ in range(2)]
    assert [(one.allowed, one.wait_ms) for one in answers] == [(True, 0), (False, 0)]


def test_a_check_that_waits_leaves_no_tokens_to_others():
    rule = Rule("r", "/e", USER, limit=10, window_seconds=1, algorithm=Algorithm.TOKEN_BUCKET)
    node = Node(rule)
    assert node.check(START_US, 8, 0).allowed
    waiting = node.check(START_US, 5, 500)
    assert (waiting.allowed, waiting.wait_ms, waiting.remaining) == (True, 300, 0)
    # Two tokens are refilled, but promised.
    denied = node.check(START_US, 1, 0)
    assert (denied.allowed, denied.retry_after) == (False, 1)
    behind = node.check(START_US + 100_000, 1, 500)
    assert behind.wait_ms == 300
    assert [*chain(*node.proceeds)][::2] == [START_US, START_US + 300_000, START_US + 400_000]
