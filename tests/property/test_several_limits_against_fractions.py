"""Several limits on a check match exact fractions in every field of every status."""

import math
import random
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from fractions import Fraction
from itertools import combinations

import pytest

from ratelimitd.buckets.table import BucketTable
from ratelimitd.ledger.accounts import ACCOUNTS
from ratelimitd.limiter.dry_run import DryRun
from ratelimitd.model import (
    INT32_MAX,
    NOMINAL_SECONDS,
    Algorithm,
    Calendar,
    Check,
    IdentifierType,
    Limit,
    Period,
    Plan,
    Rule,
)
from ratelimitd.rules.assignments import Assignments
from ratelimitd.rules.book import RuleBook
from ratelimitd.testing import ManualClock
from tests.unit.limiter.nodes import limiter_of

from .fraction_model import Model

START_US = 1_700_006_400_000_000
CHECKS_PER_POLICY = 50
USER = IdentifierType.USER
ZONES = {"UTC": 0, "Asia/Kathmandu": 20_700, "America/Phoenix": -25_200}
KINDS = ("user", "tenant", "tenant+user", "ip+tenant", "ip+tenant+user", "all")


class Policies:
    """Rules by (endpoint, identifier type), the plans of identities, and the model of the buckets."""

    def __init__(self, rules):
        self.rules = {(rule.endpoint, rule.identifier_type): rule for rule in rules}
        self.models = {}
        self.assigned = {}

    def plans(self, check, now_us):
        """Return {identity type: (plan, end)} of the current assignments."""
        identities = [(check.identifier_type, check.identifier), *check.also]
        found = {
            kind: self.assigned[kind, who]
            for kind, who in identities
            if (kind, who) in self.assigned
        }
        return {
            kind: (plan, end_s)
            for kind, (plan, end_s) in found.items()
            if not end_s or now_us < end_s * 1_000_000
        }

    def judging(self, check, now_us):
        """Return (rule, limit, bucket) of all limits of a check, in the order of the answers.

        The limit is ``None`` if the rule is passed over for an unlimited identity; these are last.
        """
        found = [*self._judging(check, self.plans(check, now_us))]
        return sorted(found, key=lambda one: one[1] is None)

    def _judging(self, check, plans):
        identities = [(check.identifier_type, check.identifier), *check.also]
        made = [
            ("+".join(sorted(kind for kind, _ in some)), tuple(sorted(some)))
            for count in range(1, len(identities) + 1)
            for some in combinations(identities, count)
        ]
        for kind, who in [*made, ("all", ())]:
            own = self.rules.get((check.endpoint, kind)) or self.rules.get(("*", kind))
            for rule, place in ((own, check.endpoint), (self.rules.get(("**", kind)), "**")):
                if rule is None:
                    continue
                named = {plan.name: plan.limits for plan in rule.plans} | {"unlimited": ()}
                parts = [] if kind == "all" else kind.split("+")
                mine = [plans[part][0] for part in parts if part in plans]
                limits = next((named[plan] for plan in mine if plan in named), rule.limits)
                if not limits:
                    yield rule, None, (rule.id, "")
                for limit in limits:
                    like = limit.algorithm, limit.window_seconds
                    yield rule, limit, (kind, who, place, *like, rule.id, limit.name)

    def check(self, check, now_us):
        """Return ((rule id, name), answer) of all limits, the deciding one first."""
        plans = self.plans(check, now_us)
        ends_s = [end_s for plan, end_s in plans.values() if plan == "blocked"]
        if ends_s:
            end_s = 0 if 0 in ends_s else max(ends_s)  # 0: for ever
            wait_s = min(INT32_MAX, math.ceil(end_s - Fraction(now_us, 1_000_000)))
            wait_s = wait_s if end_s else INT32_MAX
            return [((), (False, 0, end_s, wait_s, "BLOCKED"))]
        judging = self.judging(check, now_us)
        unlimited = True, INT32_MAX, 0, 0, "UNLIMITED"
        passed_over = [(bucket, unlimited) for _, limit, bucket in judging if limit is None]
        found = self._charge(check, now_us, [one for one in judging if one[1] is not None])
        if not found and not passed_over and any(plan == "unlimited" for plan, _ in plans.values()):
            return [((), unlimited)]
        return [*found, *passed_over]

    def _charge(self, check, now_us, judging):
        models = {}
        for _, limit, bucket in judging:
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
                for _, limit, bucket in judging:
                    self.models[*bucket, window_of(limit, now_us)] = kept[bucket]
            first = min(found, key=lambda bucket: Fraction(found[bucket][1], models[bucket].most))
        else:
            return []
        return [
            (bucket[5:], answer) for bucket, answer in ((first, found.pop(first)), *found.items())
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
    """Return the calendar window in a zone without daylight saving time."""
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
        while start.day != anchor_day:  # every month has the days that are drawn
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
    """Return one rule with several limits, or several rules for the identities of a check."""
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
            algorithm=rng.choice(list(ACCOUNTS)),
            name=name,
        )
        for name in names[:count]
    ]
    limits = [with_burst(rng, limit) if rng.random() < 0.3 else limit for limit in limits]
    limits = [with_calendar(rng, limit) if rng.random() < 0.1 else limit for limit in limits]
    return as_rule(f"rule {number}", place, limits, random_plans(rng, limits))


def random_plans(rng, own):
    """Return plans, some of whose limits are the rule's with other numbers."""
    plans = rng.sample(["free", "pro"], rng.choice([0, 0, 1, 2]))
    return tuple(
        Plan(
            name,
            tuple(
                replace(limit, limit=rng.choice([limit.limit, 2, 50]), burst=0, name=named)
                for limit, named in zip(own, [own[0].name, "x", "y"], strict=False)
            ),
        )
        for name in sorted(plans)
    )


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


def as_rule(rule_id, place, limits, plans=()):
    first, *more = limits
    return Rule(
        rule_id, *place, limit=first.limit, window_seconds=first.window_seconds,
        algorithm=first.algorithm, name=first.name, burst=first.burst, calendar=first.calendar, more=tuple(more),
        plans=plans,
    )  # fmt: skip


def edited(rng, policies):
    """Change the number of one limit, which keeps its spends."""
    place, rule = rng.choice(list(policies.rules.items()))
    limits = list(rule.limits)
    at = rng.randrange(len(limits))
    number = rng.randint(1, 2 * limits[at].limit) if rng.random() < 0.9 else 1
    limits[at] = replace(limits[at], limit=min(number, INT32_MAX), burst=0)
    if rng.random() < 0.3:
        limits[at] = with_burst(rng, limits[at])
    policies.rules[place] = as_rule(rule.id, place, limits, rule.plans)


def assign(rng, policies, assignments, now_us):
    """Assign an identity to a plan, for good or for some seconds, or remove its assignment."""
    kind, who = rng.choice([(USER, b"ada"), (USER, b"bob"), ("tenant", b"t"), ("ip", b"::1")])
    policies.assigned.pop((kind, who), None)
    assignments.remove(kind, who)
    plan = rng.choice(["free", "pro", "pro", "unnamed", "unlimited", "blocked", ""])
    if plan:
        end_s = rng.choice([0, now_us // 1_000_000 + rng.randint(1, 10**5)])
        policies.assigned[kind, who] = plan, end_s
        assignments.put(kind, who, plan, end_s)


def random_check(rng, cost):
    also = rng.sample([("tenant", rng.choice([b"t", b"u"])), ("ip", b"::1")], rng.randint(0, 2))
    return Check(
        rng.choice([b"ada", b"bob"]), USER, "/e", cost, peek=rng.random() < 0.1, also=tuple(also)
    )


def at_once(coroutine):
    """Run a coroutine that only yields, as on a node's own buckets."""
    try:
        while coroutine.send(None) is None:
            pass
    except StopIteration as done:
        return done.value
    raise AssertionError


def check_policy(rng, met):
    clock, table, assignments = ManualClock(), BucketTable(1_000), Assignments()
    limiter = limiter_of(clock, timestamps="server", buckets=table, assignments=assignments)
    assigns = rng.random() < 0.5
    policies = Policies(random_rules(rng))
    limiter.replace_book(RuleBook.of(policies.rules.values(), 1))
    now_us = START_US + rng.randint(0, 10**9)
    for number in range(CHECKS_PER_POLICY):
        if rng.random() < 0.04:
            edited(rng, policies)
            limiter.replace_book(RuleBook.of(policies.rules.values(), number + 2))
            met["edited"] += 1
        if assigns and rng.random() < 0.2:
            assign(rng, policies, assignments, now_us)
        limits = [limit for rule in policies.rules.values() for limit in rule.limits]
        scarce = min(limits, key=lambda limit: limit.limit)
        now_us += rng.randint(0, max(1, scarce.window_us // rng.choice([1, 3, scarce.limit])))
        if rng.random() < 0.1:
            now_us -= rng.randint(0, 10**6)
        most = scarce.capacity
        cost = rng.choice([1, 1, rng.randint(1, most), min(most + 1, INT32_MAX)])
        check = random_check(rng, cost)
        judging = [(rule.id, limit) for rule, limit, _ in policies.judging(check, now_us) if limit]
        before = held(table)
        clock.step(now_us - clock.now_us())
        explained, considered, *_ = at_once(DryRun(limiter).explain(check))
        assert held(table) == before
        decision = limiter.check(check, now_us)
        assert explained == decision
        by_rule = [one for rule in considered for one in rule.limits]
        if decision.reason.name == "BLOCKED":
            judging = []
        if decision.limits:
            assert {*by_rule} == {one for one in decision.limits if one.limit}
        assert len(by_rule) == len(judging)
        expected = policies.check(check, now_us)
        met[decision.reason.name] += 1
        if len(expected) < 2:
            assert not decision.limits
            alone = (*decision[:4], decision.reason.name)
            answers = [answer for _, answer in expected]
            assert answers == ([] if decision.reason.name == "NO_RULE" else [alone])
            continue
        got = [
            ((one.rule.id, one.limit.name if one.limit else ""), (*one[:4], one.reason.name))
            for one in decision.limits
        ]
        # The others follow in the order of the rules, as in the model.
        assert got == expected, (policies.rules, check, now_us)
        assert decision[:5] == decision.limits[0][:5]
        assert (decision.rule, decision.limit) == decision.limits[0][5:7]
        if check.peek or not decision.allowed:
            assert held(table) == before
        met["peeked"] += check.peek
        note(met, decision, judging)


def note(met, decision, judging):
    """Count the rare cases."""
    denials = [status.allowed for status in decision.limits].count(False)
    of_last = not decision.allowed and (decision.rule.id, decision.limit) == judging[-1]
    limits = [one.limit for one in decision.limits]
    met["others allow a denied check"] += not decision.allowed and denials < len(limits)
    met["only the last denies"] += denials == 1 and of_last
    met["one is passed over"] += None in limits and any(limits)
    met["of several plans"] += len({one.plan for one in decision.limits}) > 1
    met["of several rules"] += len({rule_id for rule_id, _ in judging}) > 1
    met["with a burst"] += any(limit.burst for _, limit in judging)
    met["of the calendar"] += any(limit.calendar for _, limit in judging)


def check_many(checks):
    rng, met = random.Random(1), Counter[str]()
    for _ in range(checks // CHECKS_PER_POLICY):
        check_policy(rng, met)
    # Without the rare cases the agreement would mean little.
    assert set(met) == {
        "WITHIN_LIMIT", "LIMIT_EXCEEDED", "COST_EXCEEDS_LIMIT", "edited", "peeked",
        "others allow a denied check", "only the last denies", "of several rules", "NO_RULE",
        "UNLIMITED", "BLOCKED", "one is passed over", "of several plans", "with a burst", "of the calendar",
    }  # fmt: skip
    assert min(met.values()) >= checks // 100, met


def test_6_000_random_checks_get_the_exact_answers():
    check_many(6_000)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_200_000_random_checks_get_the_exact_answers():
    check_many(200_000)
