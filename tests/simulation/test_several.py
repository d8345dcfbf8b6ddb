"""Checks on several shared buckets under all faults of a cluster, by seeds; wrong variants are detected.

A seed determines a run completely: ``several_violations(play_several(several(seed)))`` repeats any of them.
"""

import os
from contextlib import nullcontext
from itertools import count, islice

import pytest

from tests.simulation.seeds import chunks, found, found_in_processes
from tests.simulation.several_runs import play_several, several, several_violations
from tests.simulation.several_twins import MATTERS, TWINS

SEEDS, CALM_SEEDS, CHUNK = 300, 100, 25
LONG_SEEDS = int(os.environ.get("SIMULATION_SEEDS", "10000"))
TWIN_RUNS = 250


def problems(seed, *, calm=False, patch=nullcontext, **parts):
    """Return the violated invariants in the run of a seed."""
    with patch():
        played = play_several(several(seed, calm=calm), **parts)
    return several_violations(played)


@pytest.mark.parametrize("first", chunks(SEEDS, CHUNK))
def test_all_buckets_are_charged_or_none_under_any_fault(first):
    assert dict(found(range(first, first + CHUNK), problems)) == {}


@pytest.mark.parametrize("first", chunks(CALM_SEEDS, CHUNK))
def test_a_denied_check_loses_nothing_without_faults(first):
    assert dict(found(range(first, first + CHUNK), problems, calm=True)) == {}


@pytest.mark.parametrize("name", TWINS)
def test_a_wrong_variant_is_detected(name):
    parts, patch = TWINS[name]
    matters = MATTERS.get(name, lambda parameters: True)
    runs = (
        (seed, calm)
        for seed in count()
        for calm in (True, False)
        if matters(several(seed, calm=calm))
    )
    assert any(
        problems(seed, calm=calm, patch=patch, **parts) for seed, calm in islice(runs, TWIN_RUNS)
    )


def test_all_intended_events_occur():
    """All intended events occur: refunds, late refunds, charges that stay, observing limits."""
    intended = {"refund", "given back", "stays", "let through", "observed", "resets"}
    seen = set()
    for seed in range(60):
        if seen == intended:
            break
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
                    "observed": played.parameters.observed is not None,
                    "resets": played.parameters.resets,
                }.items()
                if value
            )
    assert seen == intended


@pytest.mark.long
@pytest.mark.timeout(4 * 3_600)
def test_all_buckets_are_charged_or_none_over_very_many_seeds():
    assert found_in_processes(range(SEEDS, LONG_SEEDS, 500), problems) == {}
