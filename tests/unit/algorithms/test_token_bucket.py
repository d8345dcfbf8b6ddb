from dataclasses import replace
from functools import partial

import pytest

from ratelimitd.algorithms import token_bucket
from ratelimitd.ledger.accounts import ACCOUNTS
from ratelimitd.model import (
    INT32_MAX,
    MAX_TIME_US,
    Algorithm,
    Reason,
)
from tests.outcomes import Outcome, named, rule_of

decide = named(token_bucket.decide)
rule = partial(rule_of, Algorithm.TOKEN_BUCKET)

T_S = 1_700_006_400
T = T_S * 1_000_000
SECOND = 1_000_000


def spend(a_rule, at_us, cost, state=None):
    outcome = decide(state, a_rule, at_us, cost)
    assert outcome.allowed
    return outcome.state


def test_a_bucket_starts_full():
    outcome = decide(None, rule(10, 60), T, 10)
    assert outcome == Outcome(
        allowed=True,
        remaining=0,
        reset_time=T_S + 60,
        retry_after=6,
        reason=Reason.WITHIN_LIMIT,
        state=(10 * 60 * SECOND, T),
    )


def test_the_retry_delay_is_0_while_a_token_is_left():
    outcome = decide(None, rule(10, 60), T, 9)
    assert (outcome.remaining, outcome.retry_after) == (1, 0)
    assert outcome.reset_time == T_S + 54


def test_a_bucket_refills_at_limit_per_window():
    state = spend(rule(10, 60), T, 10)
    for elapsed_s, tokens in ((5, 0), (6, 1), (35, 5), (60, 10), (3600, 10)):
        outcome = decide(state, rule(10, 60), T + elapsed_s * SECOND, 1)
        assert outcome.allowed == (tokens > 0)
        assert outcome.remaining == max(tokens - 1, 0)


def test_no_fraction_of_a_token_is_lost_by_frequent_checks():
    a_rule = rule(10, 6)  # 5 tokens in 3 s
    state, admitted = spend(a_rule, T, 10), 0
    for third in range(1, 1801):  # every third of a second, in whole µs, for 600 s
        outcome = decide(state, a_rule, T + third * SECOND // 3, 1)
        state, admitted = outcome.state, admitted + outcome.allowed
    assert admitted == 1000


def test_a_denied_check_changes_nothing():
    state = spend(rule(1, 60), T, 1)
    outcome = decide(state, rule(1, 60), T + SECOND, 1)
    assert not outcome.allowed
    assert outcome.state is state


def test_a_denied_check_waits_for_its_own_cost():
    state = spend(rule(10, 60), T, 8)
    outcome = decide(state, rule(10, 60), T, 5)
    assert outcome[:5] == (False, 2, T_S + 48, 18, Reason.LIMIT_EXCEEDED)
    assert not decide(state, rule(10, 60), T + 18 * SECOND - 1, 5).allowed
    assert decide(state, rule(10, 60), T + 18 * SECOND, 5).allowed


def test_a_delay_is_rounded_up_to_at_least_one_second():
    state = spend(rule(1000, 1), T, 1000)
    assert decide(state, rule(1000, 1), T, 1).retry_after == 1
    assert decide(state, rule(1000, 1), T + 999, 1).retry_after == 1
    assert decide(state, rule(1000, 1), T + 1000, 1).allowed


@pytest.mark.parametrize("state", [None, (8 * 60 * SECOND, T)])
def test_a_cost_above_the_limit_never_passes_and_gets_the_window_as_retry_delay(state):
    outcome = decide(state, rule(10, 60), T, 11)
    left, full_at = (10, T_S) if state is None else (2, T_S + 48)
    assert outcome == (False, left, full_at, 60, Reason.COST_EXCEEDS_LIMIT, state)


def test_a_clock_step_back_mints_nothing_and_delays_by_the_step():
    state = spend(rule(10, 60), T, 10)
    outcome = decide(state, rule(10, 60), T - 100 * SECOND, 1)
    assert outcome[:5] == (False, 0, T_S + 60, 106, Reason.LIMIT_EXCEEDED)
    state = spend(rule(10, 60), T - 100 * SECOND, 1, spend(rule(10, 60), T, 1))
    assert state == (2 * 60 * SECOND, T)


def test_the_retry_delay_of_a_late_check_counts_from_its_own_time():
    state = spend(rule(1, 60), T, 1)
    outcome = decide(state, rule(1, 60), T + 60 * SECOND, 1)
    assert outcome.retry_after == 60
    assert decide(state, rule(2, 60), T - 10 * SECOND, 1).retry_after == 40


def test_a_raised_limit_keeps_the_spends():
    state = spend(rule(10, 60), T, 10)
    outcome = decide(state, rule(100, 60), T, 90)
    assert (outcome.allowed, outcome.remaining) == (True, 0)


def test_a_lowered_limit_applies_at_once_and_owes_at_most_one_capacity():
    state = spend(rule(100, 60), T, 50)
    outcome = decide(state, rule(10, 60), T, 1)
    assert outcome[:5] == (False, 0, T_S + 60, 6, Reason.LIMIT_EXCEEDED)
    assert decide(state, rule(10, 60), T + 60 * SECOND, 10).allowed


def test_a_new_rate_applies_from_the_latest_check_on():
    state = spend(rule(60, 60), T, 60)
    assert decide(state, rule(120, 60), T + SECOND, 1).remaining == 61


def test_a_bucket_that_a_lowered_limit_makes_less_than_full_stays_so():
    state = spend(rule(100, 60), T, 50)
    assert decide(state, rule(10, 60), T + 3 * SECOND, 1).allowed is False
    assert decide(state, rule(10, 60), T + 6 * SECOND, 1).allowed is True


def test_delays_are_clamped_to_the_contracts_int32():
    a_rule = rule(1, INT32_MAX)
    state = spend(a_rule, T + 10 * SECOND, 1)
    assert decide(None, a_rule, T, 1).retry_after == INT32_MAX
    assert decide(state, a_rule, T + 10 * SECOND, 1).retry_after == INT32_MAX
    assert decide(state, a_rule, T, 1).retry_after == INT32_MAX
    assert decide((0, T + 10 * SECOND), a_rule, T, 1).retry_after == INT32_MAX


@pytest.mark.parametrize("limit", [1, INT32_MAX])
@pytest.mark.parametrize("window_seconds", [1, INT32_MAX])
def test_extreme_rules_are_exact_to_the_microsecond(limit, window_seconds):
    a_rule = rule(limit, window_seconds)
    state = spend(a_rule, 0, limit)
    assert state == (limit * window_seconds * SECOND, 0)
    due_us = -(-window_seconds * SECOND // limit)
    assert not decide(state, a_rule, due_us - 1, 1).allowed
    assert decide(state, a_rule, due_us, 1).allowed
    assert decide(state, a_rule, MAX_TIME_US, limit).reset_time == -(
        -(MAX_TIME_US + window_seconds * SECOND) // SECOND
    )


class TestBurst:
    def test_a_full_bucket_holds_the_burst_and_is_refilled_by_the_limit(self):
        bursting = replace(rule(10, 60), burst=50)
        outcome = decide(None, bursting, T, 50)
        assert outcome[:4] == (True, 0, T_S + 300, 6)
        for elapsed_s, tokens in ((5, 0), (6, 1), (60, 10), (300, 50), (3600, 50)):
            later = decide(outcome.state, bursting, T + elapsed_s * SECOND, 1)
            assert later.remaining == max(0, tokens - 1)

    def test_a_burst_below_the_limit_smooths_it(self):
        smooth = replace(rule(600, 60), burst=1)
        state = spend(smooth, T, 1)
        denied = decide(state, smooth, T + SECOND // 10 - 1, 1)
        assert denied[:4] == (False, 0, T_S + 1, 1)
        assert decide(state, smooth, T + SECOND // 10, 1).allowed

    def test_a_cost_passes_up_to_the_burst_and_never_above(self):
        bursting = replace(rule(10, 60), burst=50)
        assert decide(None, bursting, T, 50).allowed
        above = decide(None, bursting, T, 51)
        assert above[:5] == (False, 50, T_S, 60, Reason.COST_EXCEEDS_LIMIT)
        below = decide(None, replace(rule(10, 60), burst=5), T, 6)
        assert below[:5] == (False, 5, T_S, 60, Reason.COST_EXCEEDS_LIMIT)

    def test_an_edit_keeps_the_spends_up_to_the_new_burst(self):
        state = spend(replace(rule(10, 60), burst=50), T, 30)
        assert decide(state, replace(rule(10, 60), burst=40), T, 1).remaining == 9
        assert decide(state, rule(10, 60), T, 1)[:4] == (False, 0, T_S + 60, 6)
        assert decide(state, replace(rule(10, 60), burst=100), T, 1).remaining == 69

    @pytest.mark.parametrize("burst", [1, INT32_MAX])
    def test_the_largest_numbers_are_exact(self, burst):
        widest = replace(rule(INT32_MAX, INT32_MAX), burst=burst)
        outcome = decide(None, widest, T, burst)
        assert outcome[:4] == (True, 0, T_S + burst, 1)
        assert decide(outcome.state, widest, T + SECOND - 1, 1).allowed is False
        assert decide(outcome.state, widest, T + SECOND, 1).allowed is True


class TestAhead:
    RULE = replace(rule(10, 1), burst=5)

    def test_a_check_passes_as_soon_as_its_cost_is_refilled(self):
        state = spend(self.RULE, T, 5)
        assert token_bucket.passes_at_us(None, self.RULE, T, 5) == T
        assert token_bucket.passes_at_us(None, self.RULE, T, 6) is None
        for cost in (1, 5):
            at_us = token_bucket.passes_at_us(state, self.RULE, T, cost)
            assert at_us == T + cost * SECOND // 10
            assert decide(state, self.RULE, at_us, cost).allowed
            assert not decide(state, self.RULE, at_us - 1, cost).allowed
        assert token_bucket.passes_at_us(state, self.RULE, T + SECOND, 1) == T + SECOND
        owed = (9 * state[0], T)  # after the burst was lowered, one capacity is owed
        assert token_bucket.passes_at_us(owed, self.RULE, T, 1) == T + SECOND // 10

    def test_a_check_waits_once_a_debt_is_paid(self):
        judge = ACCOUNTS[Algorithm.TOKEN_BUCKET].judge
        state = (9 * SECOND, T)  # 4 tokens more than the burst
        paid_us, passes_us = T + 4 * SECOND // 10, T + 5 * SECOND // 10
        assert token_bucket.passes_at_us(state, self.RULE, paid_us - 1, 1, judge) is None
        assert token_bucket.passes_at_us(state, self.RULE, paid_us, 1, judge) == passes_us

        def ahead(now_us):
            ahead_us = passes_us - now_us
            return token_bucket.decide_ahead(
                state, self.RULE, now_us, 1, ahead_us=ahead_us, judge=judge
            )

        assert ahead(paid_us - 1)[::5] == (False, state)
        assert ahead(paid_us)[::5] == (True, (5 * SECOND, passes_us))

    def test_a_check_that_proceeds_later_is_answered_as_of_that_time(self):
        state = spend(self.RULE, T, 5)
        ahead = token_bucket.decide_ahead(state, self.RULE, T, 2, ahead_us=SECOND // 5)
        assert ahead[:5] == decide(state, self.RULE, T + SECOND // 5, 2)[:5]
        assert ahead[5] == (state[0], T + SECOND // 5)
        denied = token_bucket.decide_ahead(state, self.RULE, T, 3, ahead_us=SECOND // 5)
        assert (denied[0], denied[5]) == (False, state)

    def test_a_check_that_proceeds_later_loses_no_part_of_a_microsecond(self):
        thirds = replace(rule(3, 7), burst=5)
        state = spend(thirds, T, 5)
        # A token takes 2 333 333 1/3 µs, three of them 7 s.
        for ahead_us in (2_333_334, 4_666_667, 7 * SECOND):
            assert token_bucket.passes_at_us(state, thirds, T, 1) == T + ahead_us
            state = token_bucket.decide_ahead(state, thirds, T, 1, ahead_us=ahead_us)[5]
        assert state == (5 * 7 * SECOND, T + 7 * SECOND)

    def test_whole_tokens_of_a_part_of_a_microsecond_are_given_to_no_earlier_check(self):
        fast = replace(rule(10_000_000, 1), burst=5)  # 10 tokens a µs
        state = token_bucket.decide_ahead(spend(fast, T, 5), fast, T, 2, ahead_us=1)[5]
        assert decide(state, fast, T, 1).allowed is False

    def test_a_bucket_with_enough_tokens_reserves_those_of_a_later_check(self):
        outcome = token_bucket.decide_ahead(None, self.RULE, T, 2, ahead_us=SECOND // 5)
        assert outcome[:2] == (True, 3)
        # The check takes two tokens of the refill until then, which are not available before.
        assert decide(outcome[5], self.RULE, T, 1).remaining == 0
        assert decide(outcome[5], self.RULE, T + SECOND // 5, 1).remaining == 2
