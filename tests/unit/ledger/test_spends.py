"""Unsettled spends."""

import random

import pytest

from ratelimitd.algorithms.sliding_window import MAX_RUNS
from ratelimitd.ledger.accounts import ACCOUNTS
from ratelimitd.ledger.protocol import Spends
from ratelimitd.model import Algorithm
from tests.outcomes import rule_of

NOW = 1_700_000_000_000_000
S = 1_000_000


def spends(algorithm, *runs):
    made = Spends(rule_of(algorithm))
    for at_us, tokens in runs:
        made.add(at_us, tokens)
    return made


@pytest.mark.parametrize("algorithm", ACCOUNTS)
def test_there_are_no_spends_at_first(algorithm):
    nothing = spends(algorithm)
    assert (nothing.tokens, len(nothing), nothing.runs()) == (0, 0, ())


@pytest.mark.parametrize(
    ("algorithm", "runs"),
    [
        (Algorithm.TOKEN_BUCKET, ((NOW + 6 * S, 4), (NOW + 10 * S, 5))),
        (Algorithm.FIXED_WINDOW, ((NOW + S, 4), (NOW + 10 * S, 5))),
        (Algorithm.SLIDING_WINDOW, ((NOW, 1), (NOW + S, 3), (NOW + 10 * S, 5))),
    ],
)
def test_spends_that_the_algorithm_does_not_distinguish_are_one_run(algorithm, runs):
    several = spends(algorithm, (NOW, 1), (NOW + S, 2), (NOW + S, 1), (NOW + 10 * S, 5))
    assert several.runs() == runs
    assert several.tokens == 9
    assert several.latest_us == NOW + 10 * S


@pytest.mark.parametrize("algorithm", ACCOUNTS)
def test_a_late_spend_counts_at_the_latest_time(algorithm):
    assert spends(algorithm, (NOW + S, 1), (NOW, 2)).runs() == ((NOW + S, 3),)


@pytest.mark.parametrize("seed", range(200))
def test_two_runs_charge_a_token_bucket_like_single_spends(seed):
    chance, bucket = random.Random(seed), rule_of(Algorithm.TOKEN_BUCKET)
    account, now_us = ACCOUNTS[Algorithm.TOKEN_BUCKET], NOW
    made = [
        (now_us := now_us + chance.choice((0, 1, S // 3, S, 5 * S)), chance.randint(1, 4))
        for _ in range(9)
    ]
    state = chance.choice((None, (0, NOW - S), (chance.randint(0, 30 * S * 10), NOW - S)))
    one_by_one = account.charged(state, bucket, made)
    at_once = account.charged(state, bucket, spends(Algorithm.TOKEN_BUCKET, *made).runs())
    # Equal up to the refill of a microsecond, by which the earlier run may be off.
    assert at_once[1] == one_by_one[1]
    assert 0 <= at_once[0] - one_by_one[0] <= bucket.limit


def test_one_run_is_enough_while_nothing_was_refilled():
    assert spends(Algorithm.TOKEN_BUCKET, (NOW, 1), (NOW, 2)).runs() == ((NOW, 3),)


def test_a_just_refilled_token_is_charged_at_the_time_of_its_spend():
    both = ((NOW, 1), (NOW + S, 1))
    assert spends(Algorithm.TOKEN_BUCKET, *both).runs() == both


def test_removing_the_latest_spends_of_a_token_bucket_keeps_the_earlier_run():
    several = spends(Algorithm.TOKEN_BUCKET, (NOW, 4), (NOW + 10 * S, 5))
    assert several.runs() == ((NOW + 6 * S, 4), (NOW + 10 * S, 5))
    several.remove_latest(2)
    assert several.runs() == ((NOW + 6 * S, 4), (NOW + 10 * S, 3))


def test_removing_the_oldest_spends_of_a_token_bucket_removes_their_refill():
    several = spends(Algorithm.TOKEN_BUCKET, (NOW, 4), (NOW + 10 * S, 5))
    several.remove_oldest(2)
    assert several.runs() == ((NOW + 8 * S, 2), (NOW + 10 * S, 5))


SEVERAL = ((NOW, 2), (NOW + S, 3))


@pytest.mark.parametrize(
    ("tokens", "removed", "left"),
    [(0, 0, SEVERAL), (-1, 0, SEVERAL), (1, 1, ((NOW, 2), (NOW + S, 2))), (3, 3, ((NOW, 2),)), (4, 4, ((NOW, 1),)),
     (5, 5, ()), (9, 5, ())],
)  # fmt: skip
def test_the_latest_spends_can_be_removed(tokens, removed, left):
    several = spends(Algorithm.SLIDING_WINDOW, *SEVERAL)
    assert several.remove_latest(tokens) == removed
    assert (several.tokens, several.runs()) == (5 - removed, left)


@pytest.mark.parametrize(
    ("tokens", "removed", "left"),
    [(0, 0, SEVERAL), (-1, 0, SEVERAL), (1, 1, ((NOW, 1), (NOW + S, 3))), (2, 2, ((NOW + S, 3),)),
     (4, 4, ((NOW + S, 1),)), (5, 5, ()), (9, 5, ())],
)  # fmt: skip
def test_the_oldest_spends_can_be_removed(tokens, removed, left):
    several = spends(Algorithm.SLIDING_WINDOW, *SEVERAL)
    assert several.remove_oldest(tokens) == removed
    assert (several.tokens, several.runs()) == (5 - removed, left)


@pytest.mark.parametrize("remove", [Spends.remove_latest, Spends.remove_oldest])
@pytest.mark.parametrize("tokens", [2, 3, 5])
def test_spends_can_be_added_after_a_removal(remove, tokens):
    several = spends(Algorithm.SLIDING_WINDOW, *SEVERAL)
    remove(several, tokens)
    before = several.runs()
    several.add(NOW + 2 * S, 7)
    assert several.runs() == (*before, (NOW + 2 * S, 7))
    several.add(NOW + 2 * S, 1)
    assert several.runs() == (*before, (NOW + 2 * S, 8))


def test_a_spend_after_a_removal_joins_the_same_run():
    window = spends(Algorithm.FIXED_WINDOW, (NOW + S, 4))
    window.remove_latest(2)
    window.add(NOW + 2 * S, 1)
    assert window.runs() == ((NOW + 2 * S, 3),)
    window.remove_latest(3)
    window.add(NOW + 3 * S, 2)
    assert window.runs() == ((NOW + 3 * S, 2),)
    assert len(window) == 1


def test_too_many_runs_merge_in_pairs_at_the_later_times():
    many = spends(Algorithm.SLIDING_WINDOW, *((NOW + number, 1) for number in range(MAX_RUNS + 1)))
    assert len(many) == MAX_RUNS // 2 + 1
    assert many.tokens == MAX_RUNS + 1
    assert many.runs()[:2] == ((NOW + 1, 2), (NOW + 3, 2))
    assert many.runs()[-1] == (NOW + MAX_RUNS, 1)
    assert sum(tokens for _, tokens in many.runs()) == many.tokens
