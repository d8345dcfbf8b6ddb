"""Holds on shared buckets under all faults of a cluster, by seeds; wrong variants are detected.

A seed determines a run completely: ``violations(play(scenario(seed)))`` repeats any of them.
"""

import os
from contextlib import nullcontext

import pytest

from tests.simulation.holds import play, scenario
from tests.simulation.holds_demands import seen, violations
from tests.simulation.holds_twins import TWINS
from tests.simulation.seeds import chunks, found, found_in_processes

SEEDS, CALM_SEEDS, CHUNK = 1_000, 500, 100
LONG_SEEDS = int(os.environ.get("SIMULATION_SEEDS", "10000"))
TWIN_SEEDS = 600


def problems(seed, *, calm=False, patch=nullcontext, **parts):
    """Return the violated invariants in the run of a seed."""
    with patch():
        return violations(play(scenario(seed, calm=calm), **parts))


@pytest.mark.parametrize("first", chunks(SEEDS, CHUNK))
def test_no_hold_mints_under_any_fault(first):
    assert dict(found(range(first, first + CHUNK), problems)) == {}


@pytest.mark.parametrize("first", chunks(CALM_SEEDS, CHUNK))
def test_a_denied_hold_changes_nothing_without_faults(first):
    assert dict(found(range(first, first + CHUNK), problems, calm=True)) == {}


@pytest.mark.parametrize("name", TWINS)
def test_a_wrong_variant_is_detected(name):
    parts, patch = TWINS[name]
    assert any(
        problems(seed, calm=calm, patch=patch, **parts)
        for seed in range(TWIN_SEEDS)
        for calm in (True, False)
    )


def test_all_intended_events_occur():
    """All intended events occur."""
    happened = {}
    for seed in range(60):
        for name, value in seen(play(scenario(seed))).items():
            happened[name] = happened.get(name, False) or value
    assert all(happened.values()), happened


@pytest.mark.long
@pytest.mark.timeout(3_600)
def test_no_hold_mints_over_very_many_seeds():
    assert found_in_processes(range(SEEDS, LONG_SEEDS, 500), problems) == {}
