"""Holds on shared buckets under everything that can happen to a cluster, by seeds; and that the demands bite.

A seed decides a run to the last bit: ``violations(play(scenario(seed)))`` plays any of them again.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from itertools import chain

import pytest

from tests.simulation.holds import play, scenario
from tests.simulation.holds_demands import seen, violations
from tests.simulation.holds_twins import TWINS

SEEDS, CALM_SEEDS, CHUNK = 2_000, 500, 100
LONG_SEEDS = int(os.environ.get("SIMULATION_SEEDS", "10000"))
TWIN_SEEDS = 600


def chunks(seeds, chunk=CHUNK):
    """First seeds of the chunks; the first chunk is a slice."""
    first, *others = range(0, seeds, chunk)
    return [pytest.param(first, marks=pytest.mark.slice), *others]


def found(seeds, *, calm=False, patch=None, **parts):
    """What does not hold, by seed."""
    for seed in seeds:
        if patch is None:
            problems = violations(play(scenario(seed, calm=calm), **parts))
        else:
            with patch():
                problems = violations(play(scenario(seed, calm=calm), **parts))
        if problems:
            yield seed, problems


def found_in_chunk(first, chunk=500):
    return list(found(range(first, first + chunk)))


@pytest.mark.parametrize("first", chunks(SEEDS))
def test_whatever_goes_wrong_no_hold_mints(first):
    assert dict(found(range(first, first + CHUNK))) == {}


@pytest.mark.parametrize("first", chunks(CALM_SEEDS))
def test_where_nothing_goes_wrong_a_denied_hold_changes_nothing(first):
    assert dict(found(range(first, first + CHUNK), calm=True)) == {}


@pytest.mark.parametrize("name", TWINS)
def test_a_wrong_way_is_caught(name):
    parts, patch = TWINS[name]
    calm = found(range(TWIN_SEEDS // 4), calm=True, patch=patch, **parts)
    faulty = found(range(TWIN_SEEDS), patch=patch, **parts)
    assert next(chain(calm, faulty), None) is not None


def test_runs_are_what_they_are_meant_to_be():
    """What is to be simulated does happen."""
    happened = {}
    for seed in range(60):
        for name, value in seen(play(scenario(seed))).items():
            happened[name] = happened.get(name, False) or value
    assert all(happened.values()), happened


@pytest.mark.long
@pytest.mark.timeout(3_600)
def test_no_hold_mints_over_very_many_seeds():
    firsts = range(SEEDS, LONG_SEEDS, 500)
    with ProcessPoolExecutor() as pool:
        assert dict(chain.from_iterable(pool.map(found_in_chunk, firsts))) == {}
