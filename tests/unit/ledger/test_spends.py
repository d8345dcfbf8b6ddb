"""What is allowed and not settled."""

import pytest

from ratelimitd.ledger.spends import Spends
from ratelimitd.model import Algorithm, IdentifierType, Rule

NOW = 1_700_000_000_000_000
S = 1_000_000


def rule(algorithm):
    return Rule("r", "/a", IdentifierType.USER, 10, 10, algorithm)


def spends(*runs):
    made = Spends()
    for at_us, tokens in runs:
        made.add(at_us, tokens)
    return made


def test_nothing_is_spent_at_first():
    assert (Spends().tokens, Spends().runs(rule(Algorithm.TOKEN_BUCKET))) == (0, ())
    assert Spends().runs_for_view(rule(Algorithm.TOKEN_BUCKET)) == ()


def test_spends_travel_as_their_algorithm_wants():
    several = ((NOW, 1), (NOW + S, 2), (NOW + S, 1))
    assert spends(*several).runs(rule(Algorithm.TOKEN_BUCKET)) == ((NOW + S, 4),)
    assert spends(*several).runs(rule(Algorithm.SLIDING_WINDOW)) == ((NOW, 1), (NOW + S, 3))
    assert spends(*several).tokens == 4


def test_the_view_of_a_token_bucket_counts_from_the_first():
    several = spends((NOW, 1), (NOW + S, 2))
    assert several.runs_for_view(rule(Algorithm.TOKEN_BUCKET)) == ((NOW, 3),)
    assert several.runs_for_view(rule(Algorithm.SLIDING_WINDOW)) == ((NOW + S, 3),)


@pytest.mark.parametrize(
    ("tokens", "removed", "left"),
    [(0, 0, ((NOW, 2), (NOW + S, 3))), (-1, 0, ((NOW, 2), (NOW + S, 3))), (1, 1, ((NOW, 2), (NOW + S, 2))),
     (3, 3, ((NOW, 2),)), (4, 4, ((NOW, 1),)), (5, 5, ()), (9, 5, ())],
)  # fmt: skip
def test_the_latest_are_taken_back_first(tokens, removed, left):
    several = spends((NOW, 2), (NOW + S, 3))
    assert several.remove(tokens) == removed
    assert several.tokens == 5 - removed
    assert several.runs(rule(Algorithm.SLIDING_WINDOW)) == left
