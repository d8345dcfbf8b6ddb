"""A limiter answers like exact fractions in any sequence of checks, edits, resets and clock steps."""

import asyncio
import copy
import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ratelimitd.buckets.table import LATE_US, BucketTable
from ratelimitd.counters import CheckStats
from ratelimitd.ledger.accounts import ACCOUNTS
from ratelimitd.model import NO_RULE_REMAINING, Algorithm, Check, IdentifierType, Rule
from ratelimitd.rules.book import RuleBook
from ratelimitd.testing import ManualClock
from tests.unit.limiter.nodes import limiter_of

from .fraction_model import Model

USER = IdentifierType.USER
SECOND = 1_000_000

MET: Counter[str] = Counter()

identifiers = st.sampled_from([b"ada", b"bob"])
endpoints = st.sampled_from(["/a", "/b"])
rule_ids = st.sampled_from(["/a", "*"])
limits = st.one_of(st.integers(1, 5), st.integers(1, 100))
windows = st.sampled_from([1, 3, 7, 60])
costs = st.one_of(st.just(1), st.integers(1, 6), st.integers(1, 101))


class LimiterMachine(RuleBasedStateMachine):
    """A limiter and its table beside one exact bucket for each (identifier, endpoint, algorithm, window)."""

    @initialize(own=st.sampled_from(list(ACCOUNTS)), everywhere=st.sampled_from(list(ACCOUNTS)))
    def start(self, own, everywhere):
        self.clock, self.stats, self.decisions = ManualClock(), CheckStats(), Counter[bool]()
        self.table = BucketTable(1_000)
        self.limiter = limiter_of(self.clock, self.stats, "server", buckets=self.table)
        self.models: dict[tuple, Model] = {}
        self.rules = {
            "/a": Rule("1", "/a", USER, limit=3, window_seconds=3, algorithm=own),
            "*": Rule("2", "*", USER, limit=5, window_seconds=7, algorithm=everywhere),
        }
        self.swept_at_us = 0
        self.replace_book()

    def replace_book(self):
        self.limiter.replace_book(RuleBook.of(self.rules.values(), 1))

    def edit(self, name, **changes):
        self.rules[name] = replace(self.rules[name], **changes)
        self.replace_book()

    def rule_for(self, endpoint):
        own, everywhere = self.rules.get(endpoint), self.rules["*"]
        candidates = [found for found in (own, everywhere) if found and found.enabled]
        return candidates[0] if candidates else None

    def model(self, found, identifier, endpoint):
        place = (identifier, endpoint, found.algorithm, found.window_seconds)
        model = self.models.setdefault(
            place, Model(found.algorithm, found.limit, found.window_seconds, found.burst)
        )
        MET["a bucket meets another burst"] += model.burst != found.burst
        model.burst = found.burst
        if model.limit != found.limit:
            MET["a bucket meets another limit"] += 1
            if model.limit > found.limit and model.left(self.now()) < model.limit - found.limit:
                MET["a bucket holds more than a lowered limit"] += 1
            model.limit = found.limit
        return model

    def now(self):
        return Fraction(self.clock.now_us(), SECOND)

    @rule(cost=costs, peek=st.booleans(), identifier=identifiers, endpoint=endpoints)
    def check(self, identifier, endpoint, cost, peek):
        answer = self.limiter.check(Check(identifier, USER, endpoint, cost, 0, peek))
        self.decisions[answer.allowed] += 1
        found = self.rule_for(endpoint)
        assert answer.rule is found
        if found is None:
            MET["no rule"] += 1
            assert answer[:5] == (True, NO_RULE_REMAINING, 0, 0, answer.reason)
            return
        model = self.model(found, identifier, endpoint)
        if model.latest is not None and self.now() < model.latest:
            MET["a check before the latest"] += 1
        if peek:
            MET["peek"] += 1
            model = copy.copy(model)
            model.log = model.log.copy()
        else:
            # A bucket expires by the rule of its last use.
            model.full_after = Fraction(model.most * found.window_seconds, found.limit)
        expected = model.check(self.clock.now_us(), cost)
        MET[f"{found.algorithm} {expected[4]}"] += 1
        assert (*answer[:4], answer.reason.name) == expected

    @rule(checks=st.integers(2, 6), cost=st.integers(1, 3), us=st.sampled_from([0, 1, 100_000]))
    def use(self, checks, cost, us):
        for _ in range(checks):
            self.check(b"ada", "/a", cost, peek=False)
            self.clock.advance(us=us)

    @rule(us=st.one_of(st.integers(0, 200_000), st.sampled_from([SECOND, 3 * SECOND, 7 * SECOND])))
    def advance(self, us):
        self.clock.advance(us=us)

    @rule(seconds=st.sampled_from([60, 3600]))
    def advance_far(self, seconds):
        self.clock.advance(seconds=seconds)

    @rule(us=st.integers(1, 20 * SECOND))
    def step_back(self, us):
        self.clock.step(-us)

    @rule(name=rule_ids, limit=limits)
    def edit_limit(self, name, limit):
        self.edit(name, limit=limit)

    @rule(name=rule_ids, burst=st.one_of(st.just(0), st.integers(1, 10), st.integers(1, 1_000)))
    def edit_burst(self, name, burst):
        if self.rules[name].algorithm is Algorithm.TOKEN_BUCKET:
            self.edit(name, burst=burst)

    @rule(name=rule_ids, algorithm=st.sampled_from(list(ACCOUNTS)))
    def edit_algorithm(self, name, algorithm):
        MET["another algorithm"] += self.rules[name].algorithm is not algorithm
        self.edit(name, algorithm=algorithm, burst=0)

    @rule(name=rule_ids, window_seconds=windows)
    def edit_window(self, name, window_seconds):
        MET["another window"] += self.rules[name].window_seconds != window_seconds
        self.edit(name, window_seconds=window_seconds)

    @rule(name=rule_ids)
    def switch(self, name):
        self.edit(name, enabled=not self.rules[name].enabled)

    @rule(identifier=identifiers, endpoint=endpoints)
    def reset(self, identifier, endpoint):
        asyncio.run(self.limiter.reset(identifier, USER, endpoint))
        for name in {endpoint, "*"} & self.rules.keys():
            found = self.rules[name]
            place = (identifier, endpoint, found.algorithm, found.window_seconds)
            model = self.models.pop(place, None)
            MET["a spent bucket is reset"] += model is not None and model.latest is not None
            MET["a disabled rule's bucket is reset"] += model is not None and not found.enabled

    @precondition(lambda self: self.clock.now_us() >= self.swept_at_us)
    @rule()
    def sweep(self):
        """The node's own clock does not step back, and checks are late by at most ``LATE_US``."""
        self.swept_at_us = self.clock.now_us()
        self.table.sweep(self.swept_at_us, 1_000)
        for place, model in list(self.models.items()):
            over = (
                model.latest is None
                or model.latest + math.ceil(model.full_after) <= self.now() - LATE_US // SECOND
            )
            if over:
                del self.models[place]
                MET["a bucket expires"] += model.latest is not None
                MET["a burst expires"] += model.latest is not None and bool(model.burst)

    def teardown(self):
        if hasattr(self, "limiter"):
            spent = sum(model.latest is not None for model in self.models.values())
            assert len(self.table) == spent
            assert self.stats.allowed_total == self.decisions[True]  # I19
            assert self.stats.blocked_total == self.decisions[False]


RARE = {
    "no rule",
    "peek",
    "another algorithm",
    "another window",
    "a bucket meets another limit",
    "a bucket holds more than a lowered limit",
    "a check before the latest",
    "a spent bucket is reset",
    "a disabled rule's bucket is reset",
    "a bucket expires",
    "a bucket meets another burst",
    "a burst expires",
    *(
        f"{algorithm} {reason}"
        for algorithm in ACCOUNTS
        for reason in ("WITHIN_LIMIT", "LIMIT_EXCEEDED", "COST_EXCEEDS_LIMIT")
    ),
}


def run(examples, *, derandomize):
    MET.clear()
    run_state_machine_as_test(
        LimiterMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=60,
            derandomize=derandomize,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    # Without the rare cases the agreement would mean little: each must have occurred.
    assert {case for case in RARE if not MET[case]} == set()


@pytest.mark.timeout(300)  # shrinking a failing course takes longer than finding one
def test_any_sequence_of_events_gets_the_answers_of_exact_fractions():
    run(400, derandomize=True)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_very_many_sequences_of_events_get_the_answers_of_exact_fractions():
    run(5_000, derandomize=False)
