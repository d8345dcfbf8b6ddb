"""Several limits on a check give, in every field of every status, what exact fractions give."""

import math
import random
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from fractions import Fraction

import pytest

from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.table import BucketTable
from ratelimitd.counters import CheckStats
from ratelimitd.limiter import Limiter
from ratelimitd.model import INT32_MAX, Algorithm, Check, IdentifierType, Limit, Rule
from ratelimitd.rules.book import RuleBook
from ratelimitd.testing import ManualClock

from .fraction_model import Model

START_US = 1_700_006_400_000_000
CHECKS_PER_POLICY = 50
USER = IdentifierType.USER


class Policy:
    """The limits of one rule on one identifier, by name."""

    def __init__(self, limits):
        self.models = {
            limit.name: Model(limit.algorithm.value, limit.limit, limit.window_seconds)
            for limit in limits
        }

    def check(self, now_us, cost, *, peek):
        """Return (name, its answer) of all limits, the deciding one first."""
        answers = {name: model.answer(now_us, cost) for name, model in self.models.items()}
        denied = {name: answer for name, (answer, _) in answers.items() if not answer[0]}
        if denied:
            first = max(denied, key=lambda name: denied[name][3])  # of equal ones the first
            found = {
                name: denied.get(name) or self.untouched(name, at)
                for name, (_, at) in answers.items()
            }
        else:
            kept = deepcopy(self.models)
            found = {name: model.check(now_us, cost) for name, model in self.models.items()}
            if peek:
                self.models = kept
            first = min(found, key=lambda name: Fraction(found[name][1], self.models[name].limit))
        return [(first, found.pop(first)), *found.items()]

    def untouched(self, name, at):
        model = self.models[name]
        full_at, _ = getattr(model, "_" + model.algorithm)(at)
        return (True, max(0, math.floor(model.left(at))), math.ceil(full_at()), 0, "WITHIN_LIMIT")


def held(table):
    return {
        key: table.value(key) for shard in range(table.shard_count) for key in table.keys(shard)
    }


def random_rule(rng):
    names = rng.sample(["default", "s", "minute", "hour", "day", "a", "b_c", "d-1"], 8)
    limits = [
        Limit(
            limit=rng.choice([1, 2, 3, 10, 100, rng.randint(1, 10**6), rng.randint(1, INT32_MAX)]),
            window_seconds=rng.choice([1, 2, 60, 3600, rng.randint(1, 10**5)]),
            algorithm=rng.choice(list(Algorithm)),
            name=name,
        )
        for name in names[: rng.randint(2, 8)]
    ]
    return as_rule(limits)


def as_rule(limits):
    first, *more = limits
    return Rule(
        "rule", "/e", USER, limit=first.limit, window_seconds=first.window_seconds,
        algorithm=first.algorithm, name=first.name, more=tuple(more),
    )  # fmt: skip


def edited(rng, rule, policies):
    """Change the number of one limit: what was spent stays spent."""
    place = rng.randrange(len(rule.limits))
    number = rng.randint(1, 2 * rule.limits[place].limit) if rng.random() < 0.9 else 1
    number = min(number, INT32_MAX)
    limits = list(rule.limits)
    limits[place] = replace(limits[place], limit=number)
    for policy in policies.values():
        policy.models[limits[place].name].limit = number
    return as_rule(limits)


def check_policy(rng, met):
    stats = CheckStats()
    table = BucketTable(1_000, stats)
    limiter = Limiter(
        buckets=table,
        clock=ManualClock(),
        stats=stats,
        timestamps="server",
        keys=BucketKeys(b"k" * 32),
    )
    rule = random_rule(rng)
    limiter.replace_book(RuleBook.of([rule], 1))
    policies = {name: Policy(rule.limits) for name in (b"ada", b"bob")}
    now_us = START_US + rng.randint(0, 10**9)
    for number in range(CHECKS_PER_POLICY):
        if rng.random() < 0.04:
            rule = edited(rng, rule, policies)
            limiter.replace_book(RuleBook.of([rule], number + 2))
            met["edited"] += 1
        scarce = min(rule.limits, key=lambda limit: limit.limit)
        now_us += rng.randint(0, max(1, scarce.window_us // rng.choice([1, 3, scarce.limit])))
        if rng.random() < 0.1:
            now_us -= rng.randint(0, 10**6)
        cost = rng.choice([1, 1, rng.randint(1, scarce.limit), min(scarce.limit + 1, INT32_MAX)])
        name, peek = rng.choice(list(policies)), rng.random() < 0.1
        before = held(table)
        decision = limiter.check(Check(name, USER, "/e", cost, peek=peek), now_us)
        expected = policies[name].check(now_us, cost, peek=peek)
        got = [(status.limit.name, (*status[:4], status.reason.name)) for status in decision.limits]
        # The others follow in the rule's order, as in the model.
        assert got == expected, (rule, now_us, cost)
        assert decision[:5] == decision.limits[0][:5]
        assert decision.limit is decision.limits[0].limit
        if peek or not decision.allowed:
            assert held(table) == before
        met[decision.reason.name] += 1
        met["others allow a denied check"] += not decision.allowed and any(
            status.allowed for status in decision.limits
        )
        met["only the last denies"] += [status.allowed for status in decision.limits].count(
            False
        ) == 1 and not decision.allowed and decision.limit is rule.limits[-1]  # fmt: skip
        met["peeked"] += peek


def check_many(checks):
    rng, met = random.Random(1), Counter[str]()
    for _ in range(checks // CHECKS_PER_POLICY):
        check_policy(rng, met)
    # The rare cases must be among them, or the agreement says little.
    assert set(met) == {
        "WITHIN_LIMIT", "LIMIT_EXCEEDED", "COST_EXCEEDS_LIMIT", "edited", "peeked",
        "others allow a denied check", "only the last denies",
    }  # fmt: skip
    assert min(met.values()) >= checks // 100, met


@pytest.mark.slice
def test_6_000_random_checks_get_the_exact_answers():
    check_many(6_000)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_200_000_random_checks_get_the_exact_answers():
    check_many(200_000)
