"""What is allowed and not settled."""

import pytest

from ratelimitd.algorithms.sliding_window import MAX_RUNS
from ratelimitd.ledger.spends import Spends
from ratelimitd.model import Algorithm, IdentifierType, Rule

NOW = 1_700_000_000_000_000
S = 1_000_000


def rule(algorithm):
    return Rule("r", "/a", IdentifierType.USER, 10, 10, algorithm)


def spends(algorithm, *runs):
    made = Spends(rule(algorithm))
    for at_us, tokens in runs:
        made.add(at_us, tokens)
    return made


@pytest.mark.parametrize("algorithm", Algorithm)
def test_nothing_is_spent_at_first(algorithm):
    nothing = spends(algorithm)
    assert (nothing.tokens, len(nothing), nothing.runs(), nothing.runs_for_view()) == (0, 0, (), ())


@pytest.mark.parametrize(
    ("algorithm", "runs"),
    [
        (Algorithm.TOKEN_BUCKET, ((NOW + 10 * S, 9),)),
        (Algorithm.FIXED_WINDOW, ((NOW + S, 4), (NOW + 10 * S, 5))),
        (Algorithm.SLIDING_WINDOW, ((NOW, 1), (NOW + S, 3), (NOW + 10 * S, 5))),
    ],
)
def test_spends_that_the_algorithm_does_not_tell_apart_are_one(algorithm, runs):
    several = spends(algorithm, (NOW, 1), (NOW + S, 2), (NOW + S, 1), (NOW + 10 * S, 5))
    assert several.runs() == runs
    assert (len(several), several.tokens) == (len(runs), 9)
    assert (several.oldest_us, several.latest_us) == (NOW, NOW + 10 * S)


@pytest.mark.parametrize("algorithm", Algorithm)
def test_a_spend_that_comes_late_is_taken_for_one_of_the_latest_time(algorithm):
    assert spends(algorithm, (NOW + S, 1), (NOW, 2)).runs() == ((NOW + S, 3),)


def test_the_view_of_a_token_bucket_counts_from_the_first():
    several = ((NOW, 1), (NOW + S, 2))
    assert spends(Algorithm.TOKEN_BUCKET, *several).runs_for_view() == ((NOW, 3),)
    assert spends(Algorithm.FIXED_WINDOW, *several).runs_for_view() == ((NOW + S, 3),)


SEVERAL = ((NOW, 2), (NOW + S, 3))


@pytest.mark.parametrize(
    ("tokens", "removed", "left"),
    [(0, 0, SEVERAL), (-1, 0, SEVERAL), (1, 1, ((NOW, 2), (NOW + S, 2))), (3, 3, ((NOW, 2),)), (4, 4, ((NOW, 1),)),
     (5, 5, ()), (9, 5, ())],
)  # fmt: skip
def test_the_latest_can_be_taken_back(tokens, removed, left):
    several = spends(Algorithm.SLIDING_WINDOW, *SEVERAL)
    assert several.remove_latest(tokens) == removed
    assert (several.tokens, several.runs()) == (5 - removed, left)


@pytest.mark.parametrize(
    ("tokens", "removed", "left"),
    [(0, 0, SEVERAL), (-1, 0, SEVERAL), (1, 1, ((NOW, 1), (NOW + S, 3))), (2, 2, ((NOW + S, 3),)),
     (4, 4, ((NOW + S, 1),)), (5, 5, ()), (9, 5, ())],
)  # fmt: skip
def test_the_oldest_can_be_taken_back(tokens, removed, left):
    several = spends(Algorithm.SLIDING_WINDOW, *SEVERAL)
    assert several.remove_oldest(tokens) == removed
    assert (several.tokens, several.runs()) == (5 - removed, left)


@pytest.mark.parametrize("remove", [Spends.remove_latest, Spends.remove_oldest])
@pytest.mark.parametrize("tokens", [2, 3, 5])
def test_after_something_was_taken_back_it_goes_on_as_before(remove, tokens):
    several = spends(Algorithm.SLIDING_WINDOW, *SEVERAL)
    remove(several, tokens)
    before = several.runs()
    several.add(NOW + 2 * S, 7)
    assert several.runs() == (*before, (NOW + 2 * S, 7))
    several.add(NOW + 2 * S, 1)
    assert several.runs() == (*before, (NOW + 2 * S, 8))


def test_too_many_runs_become_half_as_many_at_the_later_times():
    many = spends(Algorithm.SLIDING_WINDOW, *((NOW + number, 1) for number in range(MAX_RUNS + 1)))
    assert len(many) == MAX_RUNS // 2 + 1
    assert many.tokens == MAX_RUNS + 1
    assert many.runs()[:2] == ((NOW + 1, 2), (NOW + 3, 2))
    assert many.runs()[-1] == (NOW + MAX_RUNS, 1)
    assert sum(tokens for _, tokens in many.runs()) == many.tokens
