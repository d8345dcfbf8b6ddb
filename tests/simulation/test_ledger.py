"""The ledger under everything that can happen to a cluster, by seeds; and that the oracle bites."""

import pytest

from tests.simulation.scenario import play, scenario, violations
from tests.simulation.twins import TWINS

SEEDS, CHUNK = 400, 50
LONG_SEEDS = 5_000
TWIN_SEEDS = 200


def found(seeds, *, calm=False, **parts):
    """What does not hold, by seed."""
    for seed in seeds:
        problems = violations(play(scenario(seed, calm=calm), **parts))
        if problems:
            yield seed, problems


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_whatever_goes_wrong_one_limit_is_held(first):
    assert dict(found(range(first, first + CHUNK))) == {}


@pytest.mark.parametrize("first", range(0, SEEDS // 2, CHUNK))
def test_where_nothing_goes_wrong_it_is_held_more_closely(first):
    assert dict(found(range(first, first + CHUNK), calm=True)) == {}


@pytest.mark.parametrize("name", TWINS)
def test_a_wrong_ledger_is_caught(name):
    assert next(found(range(TWIN_SEEDS), **TWINS[name]), None) is not None


@pytest.mark.long
@pytest.mark.timeout(3_600)
def test_one_limit_is_held_over_many_seeds():
    assert dict(found(range(SEEDS, LONG_SEEDS))) == {}
