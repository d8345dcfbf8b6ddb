"""The integer algorithms match exact fractions in all five fields."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ratelimitd.ledger.accounts import ACCOUNTS
from ratelimitd.model import INT32_MAX, MAX_TIME_US, Algorithm, IdentifierType, Rule
from tests.outcomes import NAMED_DECIDE

from .fraction_model import Model

pytestmark = pytest.mark.slice

START_US = 1_700_006_400_000_000


def agree(algorithm, limit, window_seconds, steps, *, burst=0, met=None):
    """Compare both on ``steps``: (time in µs, cost), or a new limit. ``met`` counts the cases that occur.

    ``burst`` is the initial one; each edit of the limit removes or restores it.
    """
    met = Counter() if met is None else met
    model = Model(algorithm, limit, window_seconds, burst)
    rule = Rule(
        "id",
        "/e",
        IdentifierType.USER,
        limit=limit,
        window_seconds=window_seconds,
        algorithm=Algorithm(algorithm),
        burst=burst,
    )
    state, last_us = None, 0
    for step in steps:
        if isinstance(step, int):
            model.limit, model.burst = step, 0 if model.burst else burst
            rule = replace(rule, limit=step, burst=model.burst)
            met["limit edited"] += 1
            continue
        now_us, cost = step
        outcome = NAMED_DECIDE[rule.algorithm](state, rule, now_us, cost)
        got = (*outcome[:4], outcome.reason.name)
        assert got == model.check(now_us, cost), (rule, now_us, cost)
        assert 0 <= outcome.remaining <= rule.capacity  # I6
        if not outcome.allowed:
            assert outcome.state is state  # I6: a denial returns the state it was given
        state = outcome.state
        met[outcome.reason.name] += 1
        met["stepped back"] += now_us < last_us
        met["above the limit"] += outcome.allowed and cost > rule.limit
        last_us = now_us


algorithms = st.sampled_from([algorithm.value for algorithm in ACCOUNTS])
numbers = st.one_of(st.integers(1, 12), st.integers(1, 10_000), st.integers(1, INT32_MAX))


@st.composite
def histories(draw):
    limit, window_seconds = draw(numbers), draw(numbers)
    window_us = window_seconds * 10**6
    gaps = st.one_of(
        st.sampled_from([0, 1, window_us, window_us - 1, window_us + 1, window_us // limit, -1]),
        st.integers(-2 * min(window_us, 10**13), 3 * min(window_us, 10**13)),
        st.integers(0, max(1, 4 * min(window_us, 10**13) // limit)),
    )
    costs = st.one_of(st.just(1), st.integers(1, limit), st.integers(1, min(2 * limit, INT32_MAX)))
    edits = st.one_of(*[st.none()] * 9, numbers, st.integers(1, limit))
    now_us = START_US + draw(st.integers(0, 10**7))
    steps: list[tuple[int, int] | int] = []
    for gap, cost, edit in draw(st.lists(st.tuples(gaps, costs, edits), min_size=1, max_size=25)):
        if edit is not None:
            steps.append(edit)
        now_us = min(max(now_us + gap, 0), MAX_TIME_US)
        steps.append((now_us, cost))
    return limit, window_seconds, steps


@given(algorithms, histories())
@example("token_bucket", (INT32_MAX, INT32_MAX, [(0, INT32_MAX), (MAX_TIME_US, INT32_MAX)]))
@example("sliding_window", (INT32_MAX, INT32_MAX, [(0, INT32_MAX), (MAX_TIME_US, 1), (0, 1)]))
@example("fixed_window", (INT32_MAX, INT32_MAX, [(MAX_TIME_US, INT32_MAX), (0, 1)]))
def test_any_history_gets_the_exact_answers(algorithm, history):
    agree(algorithm, *history)


@given(histories(), numbers)
@example((1, 1, [(0, INT32_MAX), (MAX_TIME_US, INT32_MAX)]), INT32_MAX)
@example((INT32_MAX, INT32_MAX, [(0, 1), (1, 1), (MAX_TIME_US, 1)]), 1)
def test_any_history_with_a_burst_gets_the_exact_answers(history, burst):
    agree("token_bucket", *history, burst=burst)


def random_history(rng, length):
    limit = rng.choice([1, 2, 3, 7, 10, 100, 1000, rng.randint(1, 10**6), rng.randint(1, INT32_MAX)])  # fmt: skip
    window_seconds = rng.choice([1, 2, 7, 60, 3600, rng.randint(1, 10**5), rng.randint(1, INT32_MAX)])  # fmt: skip
    step_us = max(1, window_seconds * 10**6 // rng.choice([1, 3, 10, limit, 3 * limit]))
    now_us = START_US + rng.randint(0, 10**9)
    steps: list[tuple[int, int] | int] = []
    for _ in range(length):
        now_us += rng.randint(0, min(step_us, 10**13))
        if rng.random() < 0.1:
            now_us -= rng.randint(0, 2 * min(step_us, 10**13))
        now_us = min(max(now_us, 0), MAX_TIME_US)
        cost = 1 if rng.random() < 0.5 else rng.randint(1, limit)
        if rng.random() < 0.05:
            cost = min(limit + rng.choice([1, rng.randint(1, limit)]), INT32_MAX)
        steps.append((now_us, cost))
    return limit, window_seconds, steps


def with_edits(rng, history):
    limit, window_seconds, steps = history
    for place in sorted(rng.sample(range(1, len(steps)), 2), reverse=True):
        steps.insert(
            place, rng.choice([1, limit, rng.randint(1, limit), rng.randint(1, INT32_MAX)])
        )
    return limit, window_seconds, steps


def check_many(algorithm, checks):
    rng, met = random.Random(f"{algorithm} 1"), Counter[str]()
    for number in range(checks // 40):
        history = random_history(rng, 40)
        burst = 0
        if algorithm == "token_bucket" and number % 3 == 0:
            burst = rng.choice([1, 2 * history[0], rng.randint(1, INT32_MAX)])
        history = with_edits(rng, history) if number % 4 == 0 else history
        agree(algorithm, *history, burst=min(burst, INT32_MAX), met=met)
    assert bool(met.pop("above the limit")) is (algorithm == "token_bucket")
    # Without the rare cases the agreement would mean little.
    assert min(met.values()) >= checks // 100
    assert {"WITHIN_LIMIT", "LIMIT_EXCEEDED", "COST_EXCEEDS_LIMIT"} <= met.keys()
    assert {"limit edited", "stepped back"} <= met.keys()


@pytest.mark.parametrize("algorithm", ACCOUNTS)
def test_20_000_random_checks_get_the_exact_answers(algorithm):
    check_many(algorithm, 20_000)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("algorithm", ACCOUNTS)
def test_200_000_random_checks_get_the_exact_answers(algorithm):
    check_many(algorithm, 200_000)
