"""Checks that wait: no interval admits more than its buckets hold and refill, and no check waits too long."""

import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import chain

import pytest

from ratelimitd.buckets.table import BucketTable
from ratelimitd.model import Algorithm, Check, Enforcement, IdentifierType, Limit, Reason, Rule
from ratelimitd.rules.book import RuleBook
from tests.unit.limiter.nodes import limiter_of

pytestmark = pytest.mark.slice

START_US = 1_700_006_400_000_000
CHECKS = 60
USER = IdentifierType.USER


def random_rule(rng):
    limits = [
        Limit(
            limit=rng.choice([1, 3, 10, 100, 1_000, rng.randint(1, 10**6)]),
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


def test_callers_that_wait_use_the_whole_refill():
    rule = Rule(
        "r", "/e", USER, limit=100, window_seconds=1, algorithm=Algorithm.TOKEN_BUCKET, burst=5
    )
    node = Node(rule)
    for step in range(10_000):
        node.check(START_US + step * 1_000, 1, 50)
    # 10 s of refill, the initial tokens, and those promised for the next 50 ms.
    assert len(node.proceeds) == 1_000 + 5 + 5 - 1


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
