"""The effect of spends on buckets that may be overdrawn."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimitd.algorithms import DECIDE
from ratelimitd.algorithms.calendar_window import in_force, window_at
from ratelimitd.ledger.accounts import ACCOUNTS
from ratelimitd.model import (
    COST_EXCEEDS_LIMIT,
    INT32_MAX,
    LIMIT_EXCEEDED,
    MAX_TIME_US,
    Algorithm,
    Calendar,
    Period,
)
from tests.outcomes import rule_of, runs_of

NOW = 1_700_000_000_000_000
S = 1_000_000


BUCKET = rule_of(Algorithm.TOKEN_BUCKET)
WINDOW = rule_of(Algorithm.FIXED_WINDOW)
LOG = rule_of(Algorithm.SLIDING_WINDOW)
TOKEN = BUCKET.window_us


def account(of):
    return ACCOUNTS[of.algorithm]


def content(state):
    """Return a state without the base of a log's running sums, which is not observable."""
    return runs_of(state) if isinstance(state, bytes) else state


def known_to(decide, outcome):
    """Return an outcome without the previous count, which the algorithm does not keep."""
    *others, state = outcome
    return (*others, state[:2] if decide is DECIDE[Algorithm.FIXED_WINDOW] and state else state)


@pytest.mark.parametrize("algorithm", ACCOUNTS)
def test_answers_on_the_largest_debts_are_within_bounds(algorithm):
    of = replace(rule_of(algorithm), limit=1, window_seconds=INT32_MAX)
    state = account(of).charged(None, of, [(MAX_TIME_US, INT32_MAX)] * 10)
    for cost in (1, 2):
        _, remaining, reset_time, retry_after, *_ = account(of).judge(state, of, MAX_TIME_US, cost)
        assert (remaining, retry_after <= INT32_MAX, reset_time <= MAX_TIME_US) == (0, True, True)


@pytest.mark.parametrize("algorithm", ACCOUNTS)
@given(checks=st.lists(st.tuples(st.integers(0, 3 * S), st.integers(1, 4)), max_size=30))
def test_charging_allowed_checks_gives_the_state_of_the_algorithm(algorithm, checks):
    of, state, charged, now_us = rule_of(algorithm), None, None, NOW
    for step_us, cost in checks:
        now_us += step_us
        outcome = account(of).judge(state, of, now_us, cost)
        decide = DECIDE[algorithm]
        assert known_to(decide, outcome) == known_to(decide, decide(state, of, now_us, cost))
        if outcome[0]:
            charged = account(of).charged(charged, of, [(now_us, cost)])
        state = outcome[5]
        assert content(charged) == content(state)
        assert account(of).used(state, of, now_us) == of.limit - outcome[1]


# Token bucket


def test_an_overdrawn_token_bucket_owes_all_of_it():
    state = account(BUCKET).charged(None, BUCKET, [(NOW + 1, 15), (NOW + 1, 5)])
    assert state == (20 * TOKEN, NOW + 1)
    assert account(BUCKET).used(state, BUCKET, NOW + 1) == 20
    assert account(BUCKET).used(state, BUCKET, NOW + 5 * S + 1) == 15
    assert account(BUCKET).used(None, BUCKET, NOW) == 0


def test_a_debt_is_refilled_before_a_check_is_allowed():
    state = (20 * TOKEN, NOW)
    allowed, remaining, reset_time, retry_after, reason, after = account(BUCKET).judge(
        state, BUCKET, NOW + S, 1
    )
    assert (allowed, remaining, reason) == (False, 0, LIMIT_EXCEEDED)
    assert reset_time * S == NOW + 20 * S
    assert retry_after == 10
    assert after is state
    assert account(BUCKET).judge(state, BUCKET, NOW + 11 * S, 1)[0]
    later = account(BUCKET).judge(state, BUCKET, NOW + 11 * S, 2)
    assert (later[0], later[5]) == (False, state)


def test_a_cost_above_the_limit_is_reported_on_an_overdrawn_bucket():
    outcome = account(BUCKET).judge((20 * TOKEN, NOW), BUCKET, NOW, 11)
    assert outcome[3:5] == (BUCKET.window_seconds, COST_EXCEEDS_LIMIT)


def test_a_late_spend_is_charged_without_refilling():
    assert account(BUCKET).charged((TOKEN, NOW), BUCKET, [(NOW - S, 2)]) == (3 * TOKEN, NOW)


# Fixed window


def test_a_spend_counts_in_its_own_window():
    state = account(WINDOW).charged(None, WINDOW, [(NOW + 11 * S, 4)])
    assert account(WINDOW).charged(state, WINDOW, [(NOW, 5)]) == (4, NOW + 11 * S, 5)
    assert account(WINDOW).charged(state, WINDOW, [(NOW + 10 * S, 20)]) == (24, NOW + 11 * S)
    assert account(WINDOW).charged(state, WINDOW, [(NOW + 20 * S, 5)]) == (5, NOW + 20 * S, 4)
    assert account(WINDOW).charged(state, WINDOW, [(NOW + 30 * S, 5)]) == (5, NOW + 30 * S)


def test_the_overdraft_of_a_window_counts_in_the_next_ones():
    state = account(WINDOW).charged(None, WINDOW, [(NOW + S, 24)])
    ends = [account(WINDOW).used(state, WINDOW, NOW + windows * 10 * S) for windows in range(4)]
    assert ends == [24, 14, 4, 0]
    assert account(WINDOW).used(None, WINDOW, NOW) == 0
    assert not account(WINDOW).judge(state, WINDOW, NOW + 10 * S, 1)[0]
    outcome = account(WINDOW).judge(state, WINDOW, NOW + 20 * S, 6)
    assert (outcome[:2], outcome[5]) == ((True, 0), (10, NOW + 20 * S, 14))
    refused = account(WINDOW).judge(state, WINDOW, NOW + 20 * S, 7)
    assert refused == (False, 6, (NOW + 30 * S) // S, 10, LIMIT_EXCEEDED, state)
    assert account(WINDOW).charged(state, WINDOW, [(NOW + 20 * S, 3)]) == (7, NOW + 20 * S, 14)


def test_a_denial_of_an_overdrawn_window_waits_for_the_window_that_has_paid_the_debt_off():
    state = account(WINDOW).charged(None, WINDOW, [(NOW + S, 35)])
    judge = partial(account(WINDOW).judge, state, WINDOW)
    assert judge(NOW + S, 1)[1:4] == (0, NOW // S + 40, 29)
    assert judge(NOW + S, 6)[1:4] == (0, NOW // S + 40, 39)
    assert judge(NOW + S, 11)[2:5] == (NOW // S + 40, 10, COST_EXCEEDS_LIMIT)
    assert judge(NOW + 12 * S, 5)[1:4] == (0, NOW // S + 40, 18)
    assert not judge(NOW + 30 * S - 1, 5)[0]
    assert judge(NOW + 30 * S, 5)[:2] == (True, 0)


def test_no_later_window_pays_the_debt_of_a_calendar_window_off():
    calendar = Calendar(Period.DAY, "UTC")
    day = replace(WINDOW, window_seconds=86_400, calendar=calendar)
    window = in_force(day, window_at(calendar, NOW))
    end_s = NOW // S - NOW // S % 86_400 + 86_400
    state = account(window).charged(None, window, [(NOW, 35)])
    assert account(window).judge(state, window, NOW, 1)[1:4] == (0, end_s, end_s - NOW // S)


def test_the_times_of_a_huge_debt_are_capped():
    slow = rule_of(Algorithm.FIXED_WINDOW, 1, 2**30 - 1)
    state = account(slow).charged(None, slow, [(NOW, INT32_MAX)])
    outcome = account(slow).judge(state, slow, NOW, 1)
    assert outcome[2:5] == (MAX_TIME_US, INT32_MAX, LIMIT_EXCEEDED)


def test_late_spends_count_their_overdraft_of_the_previous_window():
    state = (4, NOW + 11 * S, 7)
    charged = account(WINDOW).charged
    assert charged(state, WINDOW, [(NOW + 9 * S, 3)]) == (4, NOW + 11 * S, 10)
    assert charged(state, WINDOW, [(NOW + 9 * S, 5)]) == (6, NOW + 11 * S, 12)
    assert charged(state, WINDOW, [(NOW - 30 * S, 5), (NOW, 1)]) == (7, NOW + 11 * S, 13)


# Log


def test_spends_of_a_log_are_inserted_at_their_times():
    state = account(LOG).charged(None, LOG, [(NOW, 2), (NOW + 4 * S, 1)])
    state = account(LOG).charged(state, LOG, [(NOW + 2 * S, 9), (NOW + 4 * S, 1)])
    assert runs_of(state) == [(NOW, 2), (NOW + 2 * S, 9), (NOW + 4 * S, 2)]
    assert account(LOG).used(state, LOG, NOW + 4 * S) == 13
    assert account(LOG).used(state, LOG, NOW + 10 * S) == 11
    assert account(LOG).used(None, LOG, NOW) == 0


def test_expired_entries_are_dropped():
    state = account(LOG).charged(None, LOG, [(NOW, 2), (NOW + 10 * S, 1)])
    assert runs_of(state) == [(NOW + 10 * S, 1)]


# All algorithms


@pytest.mark.parametrize("of", [BUCKET, WINDOW, LOG], ids=lambda of: of.algorithm)
def test_the_fastest_decide_function_decides_alike(of):
    for tokens in (4, 10, 15):
        state = account(of).charged(None, of, [(NOW, tokens)])
        judge = account(of).judge_of(state, of)
        for after_us in (0, 7 * S, 20 * S):
            outcome = account(of).judge(state, of, NOW + after_us, 3)
            assert known_to(judge, judge(state, of, NOW + after_us, 3)) == known_to(judge, outcome)
    assert account(of).judge_of(None, of) is DECIDE[of.algorithm]


def test_a_bucket_that_is_not_overdrawn_is_judged_by_the_algorithm_itself():
    for spent in (0, 10 * TOKEN):
        assert account(BUCKET).judge_of((spent, NOW), BUCKET) is DECIDE[BUCKET.algorithm]


def test_a_vast_capacity_is_overdrawn_like_any_other():
    vast = rule_of(Algorithm.TOKEN_BUCKET, limit=2**31 - 1, window_seconds=60)
    state = account(vast).charged(None, vast, [(NOW, vast.limit), (NOW, 10)])
    judge = account(vast).judge_of(state, vast)
    assert judge(state, vast, NOW, 1) == account(vast).judge(state, vast, NOW, 1)
    assert judge(state, vast, NOW, 1)[2] == DECIDE[vast.algorithm](None, vast, NOW, 1)[2] + 60


def test_tokens_freed_between_two_times():
    assert [account(BUCKET).freed(BUCKET, NOW, NOW + us) for us in (-S, 0, 1, S)] == [0, 0, 1, 1]
    assert [account(LOG).freed(LOG, NOW, NOW + us) for us in (-S, 0, 1, S)] == [0, 0, 1, 1]
    frees = [account(WINDOW).freed(WINDOW, NOW, NOW + us) for us in (-S, 10 * S - 1, 10 * S)]
    assert frees == [0, 0, 10]


@pytest.mark.parametrize("of", [BUCKET, WINDOW, LOG], ids=lambda of: of.algorithm)
def test_later_states_have_a_higher_standing(of):
    states = [None]
    for at_us, tokens in ((NOW, 2), (NOW, 1), (NOW + S, 1)):
        states.append(account(of).charged(states[-1], of, [(at_us, tokens)]))
    standings = [account(of).standing(state) for state in states]
    assert standings == sorted(set(standings))


def test_at_most_one_capacity_is_owed_after_a_limit_was_lowered():
    lower = rule_of(Algorithm.TOKEN_BUCKET, 3)
    assert account(lower).capped((9 * TOKEN, NOW), lower) == (3 * TOKEN, NOW)
    assert account(lower).capped((2 * TOKEN, NOW), lower) == (2 * TOKEN, NOW)
    lower = rule_of(Algorithm.FIXED_WINDOW, 3)
    assert account(lower).capped((9, NOW), lower) == (3, NOW)
    assert account(lower).capped((9, NOW, 4), lower) == (3, NOW, 3)
    log = account(LOG).charged(None, LOG, [(NOW, 9)])
    assert account(LOG).capped(log, rule_of(Algorithm.SLIDING_WINDOW, 3)) == log
    for of in (BUCKET, WINDOW, LOG):
        assert account(of).capped(None, of) is None


def test_a_token_bucket_is_overdrawn_beyond_its_burst():
    bursting = replace(BUCKET, burst=30)
    ledger = account(bursting)
    state = ledger.charged(None, bursting, [(NOW, 20)])
    assert ledger.judge_of(state, bursting) is DECIDE[bursting.algorithm]
    assert ledger.judge(state, bursting, NOW, 10)[:2] == (True, 0)
    overdrawn = ledger.charged(state, bursting, [(NOW, 15)])
    assert ledger.judge(overdrawn, bursting, NOW, 1)[:2] == (False, 0)
    assert ledger.judge(overdrawn, bursting, NOW, 31)[4] is COST_EXCEEDS_LIMIT
    assert ledger.capped(overdrawn, bursting) == (30 * TOKEN, NOW)
    assert ledger.capped(overdrawn, BUCKET) == (10 * TOKEN, NOW)
