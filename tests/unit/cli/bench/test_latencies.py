"""Latencies: told too high by 3 % at most, never too low, in bounded memory."""

import random

import pytest

from ratelimitd.cli.bench.workload import Latencies


def of(*latencies_us):
    latencies = Latencies()
    for latency_us in latencies_us:
        latencies.add(latency_us)
    return latencies


def test_without_answers_there_is_nothing_to_tell():
    latencies = of()
    assert (latencies.count, latencies.mean_us, latencies.quantile_us(0.5)) == (0, 0.0, 0)
    assert latencies.bars() == []


@pytest.mark.parametrize("share", [0.001, 0.5, 0.9, 0.99, 0.999, 1.0])
def test_a_quantile_is_that_of_all_latencies_or_a_little_more(share):
    chance = random.Random(7)
    all_us = sorted(round(chance.lognormvariate(6, 2)) for _ in range(5_000))
    exact_us = all_us[max(0, -(-round(share * 5_000_000) // 1_000) - 1)]
    told_us = of(*all_us).quantile_us(share)
    assert exact_us <= told_us <= exact_us * (1 + 1 / 32) + 1


def test_the_mean_and_the_ends_are_exact():
    latencies = of(100, 1_000_001, 7)
    assert latencies.mean_us == pytest.approx(1_000_108 / 3)
    assert (latencies.min_us, latencies.max_us) == (7, 1_000_001)
    assert latencies.quantile_us(1.0) == 1_000_001


def test_memory_does_not_grow_with_the_load():
    assert len(of(*range(0, 10_000_000, 997))._counts) < 700


def test_bars_are_those_from_the_first_to_the_last_with_what_is_between():
    assert of(0, 3, 3, 30).bars() == [(1, 1), (2, 0), (5, 2), (10, 0), (20, 0), (50, 1)]
    assert of(150).bars() == [(200, 1)]


def test_the_curve_goes_up_to_all_answers_and_the_longest_of_them():
    curve = of(3, 3, 30, 1_000).curve()
    assert curve == [(0.5, 3), (0.75, 30), (1.0, 1_000)]
    assert of().curve() == []
