from functools import partial

import pytest

from ratelimitd.algorithms import fixed_window
from ratelimitd.model import (
    INT32_MAX,
    MAX_TIME_US,
    Algorithm,
    Reason,
)
from tests.outcomes import Outcome, named, rule_of

decide = named(fixed_window.decide)
rule = partial(rule_of, Algorithm.FIXED_WINDOW)

T_S = 1_700_006_400  # a whole minute and a whole hour
T = T_S * 1_000_000
SECOND = 1_000_000


def spend(a_rule, at_us, cost, state=None):
    outcome = decide(state, a_rule, at_us, cost)
    assert outcome.allowed
    return outcome.state


def test_a_window_starts_unspent():
    assert decide(None, rule(10, 60), T + 5 * SECOND, 3) == Outcome(
        allowed=True,
        remaining=7,
        reset_time=T_S + 60,
        retry_after=0,
        reason=Reason.WITHIN_LIMIT,
        state=(3, T + 5 * SECOND),
    )


def test_windows_are_aligned_to_the_epoch():
    assert decide(None, rule(1, 60), T + 59 * SECOND, 1).reset_time == T_S + 60
    assert decide(None, rule(1, 60), T + 60 * SECOND, 1).reset_time == T_S + 120
    assert decide(None, rule(1, 7), T, 1).reset_time == -(-T_S // 7) * 7


def test_the_last_token_reports_the_end_of_the_window_as_retry_delay():
    outcome = decide(None, rule(10, 60), T + 20 * SECOND, 10)
    assert outcome[:5] == (True, 0, T_S + 60, 40, Reason.WITHIN_LIMIT)


def test_a_denied_check_changes_nothing_and_waits_for_the_end_of_the_window():
    state = spend(rule(10, 60), T, 8)
    outcome = decide(state, rule(10, 60), T + 59 * SECOND + 999_999, 3)
    assert outcome[:5] == (False, 2, T_S + 60, 1, Reason.LIMIT_EXCEEDED)
    assert outcome.state is state


def test_the_next_window_starts_unspent_at_its_first_microsecond():
    state = spend(rule(1, 60), T, 1)
    assert not decide(state, rule(1, 60), T + 60 * SECOND - 1, 1).allowed
    assert spend(rule(1, 60), T + 60 * SECOND, 1, state) == (1, T + 60 * SECOND)


def test_twice_the_limit_may_pass_around_a_boundary_and_no_more():
    state = spend(rule(10, 60), T + 60 * SECOND - 1, 10)
    state = spend(rule(10, 60), T + 60 * SECOND, 10, state)
    assert not decide(state, rule(10, 60), T + 60 * SECOND, 1).allowed


@pytest.mark.parametrize("state", [None, (8, T)])
def test_a_cost_above_the_limit_never_passes_and_gets_the_window_as_retry_delay(state):
    outcome = decide(state, rule(10, 60), T, 11)
    left = 10 if state is None else 2
    assert outcome == (False, left, T_S + 60, 60, Reason.COST_EXCEEDS_LIMIT, state)


def test_a_late_check_counts_in_the_window_of_the_latest():
    state = spend(rule(2, 60), T + SECOND, 1)
    state = spend(rule(2, 60), T - 30 * SECOND, 1, state)
    assert state == (2, T + SECOND)
    outcome = decide(state, rule(2, 60), T - 30 * SECOND, 1)
    assert outcome[:5] == (False, 0, T_S + 60, 90, Reason.LIMIT_EXCEEDED)


def test_a_raised_limit_keeps_the_spends():
    state = spend(rule(10, 60), T, 10)
    assert decide(state, rule(15, 60), T, 5)[:2] == (True, 0)


def test_a_lowered_limit_applies_at_once_and_owes_nothing_beyond_the_window():
    state = spend(rule(100, 60), T, 50)
    outcome = decide(state, rule(10, 60), T + SECOND, 1)
    assert outcome[:5] == (False, 0, T_S + 60, 59, Reason.LIMIT_EXCEEDED)
    assert decide(state, rule(10, 60), T + 60 * SECOND, 10).allowed


def test_delays_are_clamped_to_the_contracts_int32():
    a_rule = rule(1, INT32_MAX)
    start_us = T - T % a_rule.window_us + a_rule.window_us
    state = spend(a_rule, start_us, 1)
    assert decide(state, a_rule, start_us - 10 * SECOND, 1).retry_after == INT32_MAX
    assert decide((0, start_us), a_rule, start_us - 10 * SECOND, 1).retry_after == INT32_MAX


def test_the_latest_supported_time_has_a_window():
    outcome = decide(None, rule(INT32_MAX, INT32_MAX), MAX_TIME_US, INT32_MAX)
    assert outcome.allowed
    assert outcome.reset_time == (MAX_TIME_US // (INT32_MAX * SECOND) + 1) * INT32_MAX
