"""When checks are due."""

from itertools import islice, pairwise
from statistics import mean, stdev

import pytest

from ratelimitd.cli.bench.workload import Arrival, Arrivals


def due_s(count, **changes):
    return list(islice(Arrivals(**{"rate": 50.0, **changes}).due_s(), count))


def test_evenly_they_are_due_at_multiples_of_the_pause():
    assert due_s(4) == [0.0, 0.02, 0.04, 0.06]
    # Not a sum of pauses, which would drift.
    assert due_s(1_000_001, rate=3.0)[-1] == 1_000_000 / 3


def test_at_random_pauses_are_exponential_with_the_mean_of_the_rate():
    pauses_s = [
        later - earlier for earlier, later in pairwise(due_s(20_000, arrival=Arrival.POISSON))
    ]
    assert min(pauses_s) >= 0
    assert mean(pauses_s) == pytest.approx(0.02, rel=0.03)
    assert stdev(pauses_s) == pytest.approx(0.02, rel=0.05)


def test_the_same_seed_gives_the_same_times_and_another_one_others():
    first, again, other = (due_s(50, arrival=Arrival.POISSON, seed=seed) for seed in (7, 7, 8))
    assert first == again != other
