"""Checks on several shared buckets under everything that can happen to a cluster, by seeds; and that the demands bite.

A seed decides a run to the last bit: ``several_violations(play_several(several(seed)))`` plays any of them again.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from itertools import chain

import pytest

from tests.simulation.several_runs import play_several, several, several_violations
from tests.simulation.several_twins import TWINS

SEEDS, CALM_SEEDS, CHUNK = 1_000, 200, 50
LONG_SEEDS = int(os.environ.get("SIMULATION_SEEDS", "10000"))
TWIN_SEEDS = 200


def chunks(seeds, chunk=CHUNK):
    """First seeds of the chunks; the first chunk is a slice."""
    first, *others = range(0, seeds, chunk)
    return [pytest.param(first, marks=pytest.mark.slice), *others]


def found(seeds, *, calm=False, patch=None, **parts):
    """What does not hold, by seed."""
    for seed in seeds:
        if patch is None:
            played = play_several(several(seed, calm=calm), **parts)
        else:
            with patch():
                played = play_several(several(seed, calm=calm), **parts)
        problems = several_violations(played)
        if problems:
            yield seed, problems


def found_in_chunk(first, chunk=500):
    return list(found(range(first, first + chunk)))


@pytest.mark.parametrize("first", chunks(SEEDS))
def test_whatever_goes_wrong_all_are_charged_or_none(first):
    assert dict(found(range(first, first + CHUNK))) == {}


@pytest.mark.parametrize("first", chunks(CALM_SEEDS))
def test_where_nothing_goes_wrong_nothing_is_lost_to_a_denied_check(first):
    assert dict(found(range(first, first + CHUNK), calm=True)) == {}


@pytest.mark.parametrize("name", TWINS)
def test_a_wrong_way_is_caught(name):
    parts, patch = TWINS[name]
    faulty = found(range(TWIN_SEEDS), patch=patch, **parts)
    calm = found(range(TWIN_SEEDS // 4), calm=True, patch=patch, **parts)
    assert next(chain(calm, faulty), None) is not None


def test_runs_are_what_they_are_meant_to_be():
    """What is to be simulated does happen: refunds, also late ones, charges that stay, limits that only observe."""
    seen = set()
    for seed in range(60):
        played = play_several(several(seed))
        for shard in played.shards:
            world = shard.world
            buckets = world.ledger.buckets.values()
            seen.update(
                name
                for name, value in {
                    "refund": world.refunds,
                    "given back": any(shared.refunded for shared in buckets),
                    "stays": world.stay,
                    "let through": world.books.admissions
                    and any(
                        one.unchecked for some in world.books.admissions.values() for one in some
                    ),
                    "observed": played.told.observed is not None,
                    "resets": played.told.resets,
                }.items()
                if value
            )
    assert seen == {"refund", "given back", "stays", "let through", "observed", "resets"}


@pytest.mark.long
@pytest.mark.timeout(4 * 3_600)
def test_all_are_charged_or_none_over_very_many_seeds():
    firsts = range(SEEDS, LONG_SEEDS, 500)
    with ProcessPoolExecutor() as pool:
        assert dict(chain.from_iterable(pool.map(found_in_chunk, firsts))) == {}
