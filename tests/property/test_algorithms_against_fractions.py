"""The integer algorithms give, in all five fields, what exact fractions give."""

import os
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ratelimitd.algorithms import DECIDE
from ratelimitd.model import Algorithm, IdentifierType, Rule

from .fraction_model import Model

START_US = 1_700_006_400_000_000
INT32_MAX = 2**31 - 1


def rule_of(algorithm, limit, window_seconds):
    return Rule("id", "/e", IdentifierType.USER, limit, window_seconds, Algorithm(algorithm))


def agree(algorithm, limit, window_seconds, steps):
    model = Model(algorithm, limit, window_seconds)
    rule, state = rule_of(algorithm, limit, window_seconds), None
    for now_us, cost in steps:
        outcome = DECIDE[rule.algorithm](state, rule, now_us, cost)
        got = (*outcome[:4], outcome.reason.name)
        assert got == model.check(now_us, cost), (algorithm, limit, window_seconds, now_us, cost)
        assert 0 <= outcome.remaining <= limit  # I6
        if not outcome.allowed:
            assert outcome.state is state  # I6: a denial returns the state it was given
        state = outcome.state


algorithms = st.sampled_from([algorithm.value for algorithm in Algorithm])
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
    now_us, steps = START_US + draw(st.integers(0, 10**7)), []
    for gap, cost in draw(st.lists(st.tuples(gaps, costs), min_size=1, max_size=25)):
        now_us = min(max(now_us + gap, 0), 2**53 - 1)
        steps.append((now_us, cost))
    return limit, window_seconds, steps


@given(algorithms, histories())
@example("token_bucket", (INT32_MAX, INT32_MAX, [(0, INT32_MAX), (2**53 - 1, INT32_MAX)]))
@example("sliding_window", (INT32_MAX, INT32_MAX, [(0, INT32_MAX), (2**53 - 1, 1), (0, 1)]))
@example("fixed_window", (INT32_MAX, INT32_MAX, [(2**53 - 1, INT32_MAX), (0, 1)]))
def test_every_history_gets_the_exact_answers(algorithm, history):
    agree(algorithm, *history)


def random_history(rng, length):
    limit = rng.choice(
        [1, 2, 3, 7, 10, 100, 1000, rng.randint(1, 10**6), rng.randint(1, INT32_MAX)]
    )
    window_seconds = rng.choice(
        [1, 2, 7, 60, 3600, rng.randint(1, 10**5), rng.randint(1, INT32_MAX)]
    )
    step_us = max(1, window_seconds * 10**6 // rng.choice([1, 3, 10, limit, 3 * limit]))
    now_us, steps = START_US + rng.randint(0, 10**9), []
    for _ in range(length):
        now_us += rng.randint(0, min(step_us, 10**13))
        if rng.random() < 0.1:
            now_us -= rng.randint(0, 2 * min(step_us, 10**13))
        now_us = min(max(now_us, 0), 2**53 - 1)
        cost = 1 if rng.random() < 0.5 else rng.randint(1, max(1, min(limit, INT32_MAX - 1) + 1))
        steps.append((now_us, cost))
    return limit, window_seconds, steps


@pytest.mark.parametrize("algorithm", [algorithm.value for algorithm in Algorithm])
def test_many_random_histories_get_the_exact_answers(algorithm):
    """20,000 checks each here; CHECKS=200000 for the long run."""
    rng = random.Random(f"{algorithm} 1")
    for _ in range(int(os.environ.get("CHECKS", "20000")) // 40):
        agree(algorithm, *random_history(rng, 40))
