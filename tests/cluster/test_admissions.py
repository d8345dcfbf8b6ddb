"""The checker of over-admission reports certain excess, and nothing else."""

import math
import random

import pytest

from ratelimitd.algorithms import DECIDE
from ratelimitd.ledger.accounts import ACCOUNTS
from ratelimitd.model import Algorithm, Reason
from tests import outcomes
from tests.cluster.admissions import Asked, Log, entitled, excess, tokens

WALL_S = 1_700_000_000.0
ALGORITHMS = [*ACCOUNTS]
BUCKET, SLIDING, FIXED = Algorithm.TOKEN_BUCKET, Algorithm.SLIDING_WINDOW, Algorithm.FIXED_WINDOW


def rule_of(algorithm, limit=10):
    return outcomes.rule_of(algorithm, limit, window_seconds=1)


def admitted(*times_s, key="k", cost=1, late_s=0.0):
    """Return admissions at these times, answered ``late_s`` later."""
    return [
        Asked(key, cost, 0, at_s, at_s + late_s, allowed=True, reason=Reason.WITHIN_LIMIT)
        for at_s in times_s
    ]


def log_of(entries):
    return Log(sorted(entries, key=lambda entry: entry.sent_s), WALL_S)


def played(rule, seed, *, nodes=1, load=3.0, seconds=5.0, latency_s=0.0, most_cost=1):
    """Return the log of callers on nodes that each decide alone; answers take up to ``latency_s``."""
    source = random.Random(seed)
    states, entries, at_s = [None] * nodes, [], 100.0
    while at_s < 100.0 + seconds:
        at_s += source.expovariate(rule.limit / rule.window_seconds * load)
        node, cost = source.randrange(nodes), source.randint(1, most_cost)
        sent_s = at_s - source.uniform(0, latency_s)
        now_us = int((at_s + WALL_S) * 1_000_000)
        outcome = DECIDE[rule.algorithm](states[node], rule, now_us, cost)
        states[node] = outcome[5]
        received_s = at_s + source.uniform(0, latency_s)
        entries.append(Asked("k", cost, node, sent_s, received_s, outcome[0], outcome[4]))
    return log_of(entries)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("latency_s", [0.0, 0.02, 2.5])
@pytest.mark.parametrize("seed", range(5))
def test_one_node_never_has_an_excess(algorithm, latency_s, seed):
    rule = rule_of(algorithm, limit=50)
    log = played(rule, seed, latency_s=latency_s, most_cost=3)
    assert len(log.admitted) > 50
    assert excess(log, rule, slack_s=0.000_01) <= 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("nodes", [2, 5])
def test_unshared_nodes_have_an_excess(algorithm, nodes):
    rule = rule_of(algorithm, limit=50)
    log = played(rule, 1, nodes=nodes, load=20, latency_s=0.005)
    assert excess(log, rule) > 0.9 * (nodes - 1) * rule.limit


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_excess_token_is_an_excess_of_one(algorithm):
    rule = rule_of(algorithm)
    enough = [101.0 + 0.000_1 * n for n in range(10)]
    # The refill of 0.9 ms is less than a token.
    assert excess(log_of(admitted(*enough)), rule) <= 0
    assert excess(log_of(admitted(*enough, 101.001)), rule) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_costs_are_counted(algorithm):
    rule = rule_of(algorithm)
    log = log_of(admitted(101.0, cost=10) + admitted(101.0, cost=5))
    assert excess(log, rule) == pytest.approx(5)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_admissions_with_uncertain_times_are_no_excess(algorithm):
    rule = rule_of(algorithm)
    burst = [101.5] * 20
    assert excess(log_of(admitted(*burst)), rule) == pytest.approx(10)
    # Any of the later ones might have been decided in the next window, or when the bucket was full again.
    late = admitted(*burst[:10]) + admitted(*burst[10:], late_s=1.5)
    assert excess(log_of(late), rule) <= 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_slack_allows_for_differing_clocks(algorithm):
    rule = rule_of(algorithm)
    log = log_of(admitted(*[101.0 - 0.001] * 10, *[102.0 - 0.002] * 10))
    assert excess(log, rule, slack_s=0.002) <= 0


def test_a_bucket_allows_its_limit_once_then_its_rate():
    rule = rule_of(BUCKET)
    steady = [102.0 + 0.1 * n for n in range(40)]
    assert excess(log_of(admitted(*[101.99] * 10, *steady)), rule) == pytest.approx(0.9, abs=0.01)
    again = [104.0] * 5
    assert excess(log_of(admitted(*[101.99] * 10, *steady, *again)), rule) > 5


def test_an_interval_in_the_middle_is_checked():
    rule = rule_of(BUCKET)
    log = log_of(admitted(101.0, *[150.0] * 25, 199.0))
    assert excess(log, rule) == pytest.approx(15)


def test_a_fixed_window_may_be_used_up_at_its_end_and_the_next_at_its_start():
    log = log_of(admitted(*[101.99] * 10, *[102.0] * 10))
    assert excess(log, rule_of(FIXED)) == 0
    assert excess(log, rule_of(SLIDING)) == 10


def test_the_excess_of_consecutive_windows_adds_up():
    one_too_many = [101.5 + n for n in range(8) for _ in range(11)]
    for algorithm in (FIXED, SLIDING):
        assert excess(log_of(admitted(*one_too_many)), rule_of(algorithm)) == 8


def test_the_start_of_a_sliding_window_is_exclusive():
    rule = rule_of(SLIDING)
    log = log_of(admitted(*[101.0] * 10, *[102.0] * 10))
    assert excess(log, rule) == 0
    assert excess(log_of(admitted(*[101.0] * 10, *[101.999] * 10)), rule) == 10


def test_the_worst_of_separate_keys_counts():
    rule = rule_of(BUCKET)
    entries = admitted(*[101.0] * 10, key="a") + admitted(*[101.0] * 12, key="b")
    assert excess(log_of(entries), rule) == pytest.approx(2)


def test_fail_open_denied_and_unknown_checks_are_not_admissions():
    rule = rule_of(BUCKET)
    entries = admitted(*[101.0] * 10)
    entries += [Asked("k", 1, 0, 101.0, 101.0, True, Reason.FAIL_OPEN_BREAKER)] * 5
    entries += [Asked("k", 1, 0, 101.0, 101.0, False, Reason.LIMIT_EXCEEDED)] * 5
    entries += [Asked("k", 1, 0, 101.0)] * 3
    log = log_of(entries)
    assert excess(log, rule) == pytest.approx(0)
    assert (tokens(log.admitted), tokens(log.unknown)) == (10, 3)
    assert log.reasons == {
        "FAIL_OPEN_BREAKER": 5, "LIMIT_EXCEEDED": 5, "NO_ANSWER": 3, "WITHIN_LIMIT": 10,
    }  # fmt: skip
    assert len(log.between(101.0, 101.0).entries) == 0
    assert len(log.between(101.0).entries) == 23


def test_without_admissions_there_is_no_excess():
    for algorithm in ALGORITHMS:
        denied = Asked("k", 1, 0, 101.0, 101.1, False, Reason.LIMIT_EXCEEDED)
        assert excess(log_of([denied]), rule_of(algorithm)) == -math.inf


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_entitled_is_what_one_node_would_have_allowed(algorithm):
    rule = rule_of(algorithm, limit=50)
    log = played(rule, 3, most_cost=3)
    assert entitled(log, rule) == tokens(log.admitted)
    assert entitled(played(rule, 3, nodes=5, load=20), rule) < 6 * 50 + 50
