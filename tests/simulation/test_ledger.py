"""The ledger under all faults of a cluster, by seeds; wrong variants are detected.

A seed determines a run completely: ``violations(play(scenario(seed)))`` repeats any of them.
"""

import os
from functools import partial

import pytest

from ratelimitd.ledger.local_view import LocalView, TightView
from ratelimitd.ledger.protocol import MAX_UPDATES, Batch
from tests.ledger_model import Ledger
from tests.simulation.demands import violations
from tests.simulation.node import Node
from tests.simulation.play import play
from tests.simulation.scenario import calm_scenario, draining_scenario, late_scenario, scenario
from tests.simulation.seeds import chunks, found, found_in_processes
from tests.simulation.twins import TWINS

SEEDS, CALM_SEEDS, LATE_SEEDS, CHUNK = 1_500, 400, 50, 50
LONG_SEEDS = int(os.environ.get("SIMULATION_SEEDS", "100000"))
TWIN_SEEDS = 200


def problems(seed, scenario=scenario, **parts):
    """Return the violated invariants in the run of a seed."""
    return violations(play(scenario(seed), **parts))


@pytest.mark.parametrize("first", chunks(SEEDS, CHUNK))
def test_one_limit_is_held_under_any_fault(first):
    assert dict(found(range(first, first + CHUNK), problems)) == {}


@pytest.mark.parametrize("first", chunks(CALM_SEEDS, CHUNK))
def test_one_limit_is_held_more_closely_without_faults(first):
    assert dict(found(range(first, first + CHUNK), problems, scenario=calm_scenario)) == {}


@pytest.mark.parametrize("first", chunks(LATE_SEEDS, 5))
def test_the_excess_does_not_grow_with_any_delay(first):
    assert dict(found(range(first, first + 5), problems, scenario=late_scenario)) == {}


@pytest.mark.parametrize("view", [LocalView, TightView])
@pytest.mark.parametrize("first", chunks(100, 20))
def test_callers_that_exploit_the_shares_stay_within_the_bound(first, view):
    assert (
        dict(found(range(first, first + 20), problems, scenario=draining_scenario, view=view)) == {}
    )


@pytest.mark.parametrize("first", chunks(400, CHUNK))
def test_tight_shares_hold_one_limit_under_any_fault(first):
    assert dict(found(range(first, first + CHUNK), problems, view=TightView)) == {}


@pytest.mark.parametrize("name", TWINS)
def test_a_wrong_variant_is_detected(name):
    assert any(problems(seed, **TWINS[name]) for seed in range(TWIN_SEEDS))


def test_an_endless_run_is_ended_and_reported():
    class NeverWaits(Node):
        def _sync(self, incarnation):
            self.world.after(0, self._sync, incarnation)

    assert violations(play(scenario(0), node=NeverWaits)) == ["does not come to an end"]


def test_all_intended_events_occur():
    """All intended events occur: full batches, evictions, late grants, open breakers."""
    intended = {
        "full batch",
        "ask",
        "met",
        "met and denied",
        "let through",
        "given up",
        "news",
        "gap",
        "evicted unsettled",
        "wasted",
        "lost",
        "forgiven",
        "alone",
        "wrong number of members",
        "false positive",
    }
    seen = set()

    class Seeing(Ledger):
        def apply(self, batch: Batch):
            if len(batch.updates) == MAX_UPDATES:
                seen.add("full batch")
            seen.update("ask" for update in batch.updates.values() if update.asks)
            return super().apply(batch)

        def first_check(self, check):
            outcome, shared = super().first_check(check)
            seen.add("met" if outcome[0] else "met and denied")
            return outcome, shared

    for seed in range(150):
        if seen == intended:
            break
        played = play(scenario(seed), ledger=Seeing)
        world, parameters = played.world, played.scenario
        seen.update(
            name
            for name, value in {
                "news": any(node.published for node in world.nodes),
                "gap": any(node.gaps for node in world.nodes),
                "evicted unsettled": any(node.evicted_unsettled for node in world.nodes),
                "wasted": world.books.wasted,
                "lost": world.books.lost,
                "forgiven": played.forgiven,
                "alone": any(one.alone for one in played.checked),
                "let through": any(one.unchecked for one in played.admissions),
                "given up": any(node.giving_up.times for node in world.nodes),
                "wrong number of members": parameters.wrong_members == 0
                and world.books.most_held > 1.01,
                "false positive": any(node.false_positives for node in world.nodes),
            }.items()
            if value
        )
    assert seen == intended


@pytest.mark.long
@pytest.mark.timeout(4 * 3_600)
def test_one_limit_is_held_over_very_many_seeds():
    assert found_in_processes(range(SEEDS, LONG_SEEDS, 1_000), problems) == {}
    late = partial(problems, scenario=late_scenario)
    assert found_in_processes(range(LATE_SEEDS, LONG_SEEDS // 100, 10), late) == {}
