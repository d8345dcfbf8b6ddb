"""The parts of a load: due times, keys, latencies and answers over time."""

import random
import tracemalloc
from collections import Counter
from itertools import islice, pairwise
from statistics import mean, stdev

import pytest

from ratelimitd.cli.bench.workload import (
    SLOTS,
    Arrival,
    Arrivals,
    Distribution,
    Keys,
    Latencies,
    Slot,
    Timeline,
)


def due_s(count, **changes):
    return list(islice(Arrivals(**{"rate": 50.0, **changes}).due_s(), count))


def test_even_arrivals_are_due_at_multiples_of_the_interval():
    assert due_s(4) == [0.0, 0.02, 0.04, 0.06]
    # Not a sum of intervals, which would drift.
    assert due_s(1_000_001, rate=3.0)[-1] == 1_000_000 / 3


def test_random_arrivals_have_exponential_intervals_with_the_mean_of_the_rate():
    pauses_s = [
        later - earlier for earlier, later in pairwise(due_s(20_000, arrival=Arrival.POISSON))
    ]
    assert min(pauses_s) >= 0
    assert mean(pauses_s) == pytest.approx(0.02, rel=0.03)
    assert stdev(pauses_s) == pytest.approx(0.02, rel=0.05)


def test_seed_determines_the_times():
    first, again, other = (due_s(50, arrival=Arrival.POISSON, seed=seed) for seed in (7, 7, 8))
    assert first == again != other


DRAWS = 20_000


def drawn(count, distribution, **changes):
    keys = Keys(count=count, distribution=distribution, **changes)
    return Counter(islice(keys.drawn(), DRAWS))


def test_in_turn_draws_keys_in_rotation():
    assert list(islice(Keys(count=3).drawn(), 5)) == [0, 1, 2, 0, 1]


def test_uniform_draws_keys_about_equally_often():
    counts = drawn(10, Distribution.UNIFORM)
    assert set(counts) == set(range(10))
    assert all(1_800 < count < 2_200 for count in counts.values())


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_zipf_draws_keys_in_proportion_to_their_rank(exponent):
    counts = drawn(100, Distribution.ZIPF, exponent=exponent)
    weights = [(rank + 1) ** -exponent for rank in range(100)]
    for rank in (0, 1, 9):
        expected = DRAWS * weights[rank] / sum(weights)
        assert counts[rank] == pytest.approx(expected, abs=5 * expected**0.5)
    assert max(counts) < 100


def test_hot_draws_one_key_with_its_share_and_the_others_equally():
    counts = drawn(5, Distribution.HOT, hot_share=0.8)
    assert counts[0] == pytest.approx(16_000, abs=300)
    assert all(850 < counts[key] < 1_150 for key in range(1, 5))


@pytest.mark.parametrize("distribution", Distribution)
def test_single_key_is_always_drawn(distribution):
    assert set(drawn(1, distribution, hot_share=0.1)) == {0}


@pytest.mark.parametrize(
    "distribution", [Distribution.UNIFORM, Distribution.ZIPF, Distribution.HOT]
)
def test_seed_determines_the_keys(distribution):
    first, again, other = (
        list(islice(Keys(count=1_000, distribution=distribution, seed=seed).drawn(), 100))
        for seed in (7, 7, 8)
    )
    assert first == again != other


def test_memory_does_not_grow_with_the_number_of_draws():
    keys = Keys(count=10_000, distribution=Distribution.ZIPF).drawn()
    next(keys)
    tracemalloc.start()
    try:
        Counter(key < 0 for key in islice(keys, 10_000))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def of(*latencies_us):
    latencies = Latencies()
    for latency_us in latencies_us:
        latencies.add(latency_us)
    return latencies


def test_no_answers_have_no_figures():
    latencies = of()
    assert (latencies.count, latencies.mean_us, latencies.quantile_us(0.5)) == (0, 0.0, 0)
    assert latencies.bars() == []


@pytest.mark.parametrize("share", [0.001, 0.5, 0.9, 0.99, 0.999, 1.0])
def test_quantile_is_exact_or_slightly_too_high(share):
    chance = random.Random(7)
    all_us = sorted(round(chance.lognormvariate(6, 2)) for _ in range(5_000))
    exact_us = all_us[max(0, -(-round(share * 5_000_000) // 1_000) - 1)]
    told_us = of(*all_us).quantile_us(share)
    assert exact_us <= told_us <= exact_us * (1 + 1 / 32) + 1


def test_mean_minimum_and_maximum_are_exact():
    latencies = of(100, 1_000_001, 7)
    assert latencies.mean_us == pytest.approx(1_000_108 / 3)
    assert (latencies.min_us, latencies.max_us) == (7, 1_000_001)
    assert latencies.quantile_us(1.0) == 1_000_001


def test_memory_does_not_grow_with_the_load():
    assert len(of(*range(0, 10_000_000, 997))._counts) < 700


def test_bars_cover_the_range_without_gaps():
    assert of(0, 3, 3, 30).bars() == [(1, 1), (2, 0), (5, 2), (10, 0), (20, 0), (50, 1)]
    assert of(150).bars() == [(200, 1)]


def test_curve_ends_at_all_answers_and_the_highest_latency():
    curve = of(3, 3, 30, 1_000).curve()
    assert curve == [(0.5, 3), (0.75, 30), (1.0, 1_000)]
    assert of().curve() == []


def test_answers_and_errors_are_counted_in_their_slots():
    timeline = Timeline(100.0)
    timeline.answered(0.0, 7)
    timeline.answered(0.999, 5)
    timeline.answered(2.0, 9)
    timeline.failed(2.5)
    assert timeline.slots(3.0) == [
        Slot(0.0, 1.0, 2, 0, 7),
        Slot(1.0, 2.0, 0, 0, 0),
        Slot(2.0, 3.0, 1, 1, 9),
    ]
    assert timeline.slots(3.0)[0].rate == 2.0


def test_remainder_belongs_to_the_last_whole_slot():
    timeline = Timeline(100.0)
    for at_s in (0.5, 1.5, 2.01):
        timeline.answered(at_s, 1)
    assert timeline.slots(2.02) == [Slot(0.0, 1.0, 1, 0, 1), Slot(1.0, 2.02, 2, 0, 1)]


def test_load_within_the_first_slot_has_one_slot():
    timeline = Timeline(100.0)
    timeline.answered(0.1, 3)
    assert timeline.slots(0.5) == [Slot(0.0, 0.5, 1, 0, 3)]


def test_load_without_duration_has_no_slot():
    assert Timeline(100.0).slots(0.0) == []


def test_number_of_slots_is_bounded_for_late_answers():
    timeline = Timeline(1.0)
    timeline.answered(0.5, 1)
    timeline.answered(500.0, 2)
    slots = timeline.slots(500.0)
    assert len(slots) < 2 * SLOTS
    assert slots[-1].to_s == 500.0
    assert sum(slot.answers for slot in slots) == 2
