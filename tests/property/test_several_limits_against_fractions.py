"""Several limits on a check give, in every field of every status, what exact fractions give."""

import math
import random
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from fractions import Fraction
from itertools import combinations

import pytest

from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.table import BucketTable
from ratelimitd.counters import CheckStats
from ratelimitd.limiter import Limiter
from ratelimitd.model import (
    INT32_MAX,
    NOMINAL_SECONDS,
    Algorithm,
    Calendar,
    Check,
    IdentifierType,
    Limit,
    Period,
    Rule,
)
from ratelimitd.rules.book import RuleBook
from ratelimitd.testing import ManualClock

from .fraction_model import Model

START_US = 1_700_006_400_000_000
CHECKS_PER_POLICY = 50
USER = IdentifierType.USER
ZONES = {"UTC": 0, "Asia/Kathmandu": 20_700, "America/Phoenix": -25_200}
KINDS = ("user", "tenant", "tenant+user", "ip+tenant", "ip+tenant+user", "all")


class Policies:
    """Rules by (endpoint, identifier type), and what their buckets hold."""

    def __init__(self, rules):
        self.rules = {(rule.endpoint, rule.identifier_type): rule for rule in rules}
        self.models = {}

    def judging(self, check):
        """Return (rule, limit, bucket) of all that judge a check, in the order of the answers."""
        identities = [(check.identifier_type, check.identifier), *check.also]
        made = [
            ("+".join(sorted(kind for kind, _ in some)), tuple(sorted(some)))
            for count in range(1, len(identities) + 1)
            for some in combinations(identities, count)
        ]
        for kind, who in [*made, ("all", ())]:
            own = self.rules.get((check.endpoint, kind)) or self.rules.get(("*", kind))
            for rule, place in ((own, check.endpoint), (self.rules.get(("**", kind)), "**")):
                for limit in rule.limits if rule else ():
                    yield rule, limit, (kind, who, place, rule.id, limit.name)

    def check(self, check, now_us):
        """Return ((rule id, name), its answer) of all limits, the deciding one first."""
        models = {}
        for _, limit, bucket in self.judging(check):
            models[bucket] = self.models.setdefault(
                (*bucket, window_of(limit, now_us)), model_of(limit, now_us)
            )
            models[bucket].limit, models[bucket].burst = limit.limit, limit.burst
        answers = {bucket: model.answer(now_us, check.cost) for bucket, model in models.items()}
        denied = {bucket: answer for bucket, (answer, _) in answers.items() if not answer[0]}
        if denied:
            first = max(denied, key=lambda bucket: denied[bucket][3])  # of equal ones the first
            found = {
                bucket: denied.get(bucket) or untouched(models[bucket], at)
                for bucket, (_, at) in answers.items()
            }
        elif models:
            kept = deepcopy(models)
            found = {bucket: model.check(now_us, check.cost) for bucket, model in models.items()}
            if check.peek:
                for _, limit, bucket in self.judging(check):
                    self.models[*bucket, window_of(limit, now_us)] = kept[bucket]
            first = min(found, key=lambda bucket: Fraction(found[bucket][1], models[bucket].most))
        else:
            return []
        return [
            (bucket[3:], answer) for bucket, answer in ((first, found.pop(first)), *found.items())
        ]


class CalendarModel(Model):
    """The bucket of one calendar window."""

    def __init__(self, limit, window):
        self.start, self.end = window
        super().__init__("fixed_window", limit.limit, self.end - self.start)

    def left(self, at):
        return Fraction(self.limit - sum(cost for _, cost in self.log))

    def _fixed_window(self, at):
        return lambda: self.end, lambda _: self.end


def model_of(limit, now_us):
    window = window_of(limit, now_us)
    if window is not None:
        return CalendarModel(limit, window)
    return Model(limit.algorithm.value, limit.limit, limit.window_seconds)


def window_of(limit, now_us):
    """The window of a calendar in a zone whose clocks are never set."""
    if limit.calendar is None:
        return None
    period, time_zone, anchor_day = limit.calendar
    zone = timezone(timedelta(seconds=ZONES[time_zone]))
    day = datetime.fromtimestamp(now_us // 10**6, zone).replace(hour=0, minute=0, second=0)
    if period is Period.DAY:
        start, end = day, day + timedelta(days=1)
    elif period is Period.WEEK:
        start = day - timedelta(days=day.weekday())
        end = start + timedelta(days=7)
    else:
        start = day
        while start.day != anchor_day:  # of those drawn every month has
            start -= timedelta(days=1)
        end = start + timedelta(days=1)
        while end.day != anchor_day:
            end += timedelta(days=1)
    return int(start.timestamp()), int(end.timestamp())


def untouched(model, at):
    full_at, _ = getattr(model, "_" + model.algorithm)(at)
    return (True, max(0, math.floor(model.left(at))), math.ceil(full_at()), 0, "WITHIN_LIMIT")


def held(table):
    return {
        key: table.value(key) for shard in range(table.shard_count) for key in table.keys(shard)
    }


def random_rules(rng):
    """Return one rule with several limits, or several rules for what the identities of a check make."""
    places = [(endpoint, kind) for endpoint in ("/e", "*", "**") for kind in KINDS]
    if rng.random() < 0.4:
        return [random_rule(rng, 0, ("/e", USER), rng.randint(2, 8))]
    chosen = rng.sample(places, rng.randint(1, 6))
    return [random_rule(rng, *one, rng.randint(1, 2)) for one in enumerate(chosen)]


def random_rule(rng, number, place, count):
    names = rng.sample(["default", "s", "minute", "hour", "day", "a", "b_c", "d-1"], 8)
    limits = [
        Limit(
            limit=rng.choice([1, 2, 3, 10, 100, rng.randint(1, 10**6), rng.randint(1, INT32_MAX)]),
            window_seconds=rng.choice([1, 2, 60, 3600, rng.randint(1, 10**5)]),
            algorithm=rng.choice(list(Algorithm)),
            name=name,
        )
        for name in names[:count]
    ]
    limits = [with_burst(rng, limit) if rng.random() < 0.3 else limit for limit in limits]
    limits = [with_calendar(rng, limit) if rng.random() < 0.1 else limit for limit in limits]
    return as_rule(f"rule {number}", place, limits)


def with_burst(rng, limit):
    if limit.algorithm is not Algorithm.TOKEN_BUCKET:
        return limit
    most = min(INT32_MAX, INT32_MAX * limit.limit // limit.window_seconds)
    return replace(
        limit, burst=rng.choice([0, 1, rng.randint(1, most), min(most, 2 * limit.limit)])
    )


def with_calendar(rng, limit):
    if limit.algorithm is not Algorithm.FIXED_WINDOW:
        return limit
    period = rng.choice(list(Period))
    anchor_day = rng.choice([1, 15, 28]) if period is Period.MONTH else 1
    calendar = Calendar(period, rng.choice(list(ZONES)), anchor_day)
    return replace(limit, window_seconds=NOMINAL_SECONDS[period], calendar=calendar)


def as_rule(rule_id, place, limits):
    first, *more = limits
    return Rule(
        rule_id, *place, limit=first.limit, window_seconds=first.window_seconds,
        algorithm=first.algorithm, name=first.name, burst=first.burst, calendar=first.calendar, more=tuple(more),
    )  # fmt: skip


def edited(rng, policies):
    """Change the number of one limit: what was spent stays spent."""
    place, rule = rng.choice(list(policies.rules.items()))
    limits = list(rule.limits)
    at = rng.randrange(len(limits))
    number = rng.randint(1, 2 * limits[at].limit) if rng.random() < 0.9 else 1
    limits[at] = replace(limits[at], limit=min(number, INT32_MAX), burst=0)
    if rng.random() < 0.3:
        limits[at] = with_burst(rng, limits[at])
    policies.rules[place] = as_rule(rule.id, place, limits)


def random_check(rng, cost):
    also = rng.sample([("tenant", rng.choice([b"t", b"u"])), ("ip", b"::1")], rng.randint(0, 2))
    return Check(
        rng.choice([b"ada", b"bob"]), USER, "/e", cost, peek=rng.random() < 0.1, also=tuple(also)
    )


def at_once(coroutine):
    """Run what never waits on a node's own buckets."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError


def check_policy(rng, met):
    stats, clock = CheckStats(), ManualClock()
    table = BucketTable(1_000, stats)
    limiter = Limiter(
        buckets=table,
        clock=clock,
        stats=stats,
        timestamps="server",
        keys=BucketKeys(b"k" * 32),
    )
    policies = Policies(random_rules(rng))
    limiter.replace_book(RuleBook.of(policies.rules.values(), 1))
    now_us = START_US + rng.randint(0, 10**9)
    for number in range(CHECKS_PER_POLICY):
        if rng.random() < 0.04:
            edited(rng, policies)
            limiter.replace_book(RuleBook.of(policies.rules.values(), number + 2))
            met["edited"] += 1
        limits = [limit for rule in policies.rules.values() for limit in rule.limits]
        scarce = min(limits, key=lambda limit: limit.limit)
        now_us += rng.randint(0, max(1, scarce.window_us // rng.choice([1, 3, scarce.limit])))
        if rng.random() < 0.1:
            now_us -= rng.randint(0, 10**6)
        most = scarce.capacity
        cost = rng.choice([1, 1, rng.randint(1, most), min(most + 1, INT32_MAX)])
        check = random_check(rng, cost)
        judging = [(rule.id, limit) for rule, limit, _ in policies.judging(check)]
        before = held(table)
        clock.step(now_us - clock.now_us())
        explained, looked_at = at_once(limiter.explain(check))
        assert held(table) == before
        decision = limiter.check(check, now_us)
        assert explained == decision
        by_rule = [one for rule in looked_at for one in rule.limits]
        if decision.limits:
            assert {*by_rule} == {*decision.limits}
        assert len(by_rule) == len(judging)
        expected = policies.check(check, now_us)
        met[decision.reason.name] += 1
        if len(expected) < 2:
            assert not decision.limits
            alone = (*decision[:4], decision.reason.name)
            assert [alone] == [answer for _, answer in expected] or decision.rule is None
            continue
        got = [
            ((one.rule.id, one.limit.name), (*one[:4], one.reason.name)) for one in decision.limits
        ]
        # The others follow in the order of the rules, as in the model.
        assert got == expected, (policies.rules, check, now_us)
        assert decision[:5] == decision.limits[0][:5]
        assert (decision.rule, decision.limit) == decision.limits[0][5:]
        if check.peek or not decision.allowed:
            assert held(table) == before
        met["others allow a denied check"] += not decision.allowed and any(
            status.allowed for status in decision.limits
        )
        met["only the last denies"] += [status.allowed for status in decision.limits].count(
            False
        ) == 1 and not decision.allowed and (decision.rule.id, decision.limit) == judging[-1]  # fmt: skip
        met["of several rules"] += len({rule_id for rule_id, _ in judging}) > 1
        met["peeked"] += check.peek
        met["of the calendar"] += any(limit.calendar for _, limit in judging)
        met["with a burst"] += any(limit.burst for _, limit in judging)


def check_many(checks):
    rng, met = random.Random(1), Counter[str]()
    for _ in range(checks // CHECKS_PER_POLICY):
        check_policy(rng, met)
    # The rare cases must be among them, or the agreement says little.
    assert set(met) == {
        "WITHIN_LIMIT", "LIMIT_EXCEEDED", "COST_EXCEEDS_LIMIT", "edited", "peeked",
        "others allow a denied check", "only the last denies", "of several rules", "NO_RULE", "with a burst",
        "of the calendar",
    }  # fmt: skip
    assert min(met.values()) >= checks // 100, met


@pytest.mark.slice
def test_6_000_random_checks_get_the_exact_answers():
    check_many(6_000)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_200_000_random_checks_get_the_exact_answers():
    check_many(200_000)
