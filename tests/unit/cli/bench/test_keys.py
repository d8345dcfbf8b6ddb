"""Which keys are drawn: as often as their distribution says, and the same for the same seed."""

import tracemalloc
from collections import Counter
from itertools import islice

import pytest

from ratelimitd.cli.bench.workload import Distribution, Keys

DRAWS = 20_000


def drawn(count, distribution, **changes):
    keys = Keys(count=count, distribution=distribution, **changes)
    return Counter(islice(keys.drawn(), DRAWS))


def test_in_turn_each_key_follows_the_one_before():
    assert list(islice(Keys(count=3).drawn(), 5)) == [0, 1, 2, 0, 1]


def test_uniform_every_key_is_drawn_about_as_often():
    counts = drawn(10, Distribution.UNIFORM)
    assert set(counts) == set(range(10))
    assert all(1_800 < count < 2_200 for count in counts.values())


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_zipf_a_key_is_drawn_in_proportion_to_its_rank(exponent):
    counts = drawn(100, Distribution.ZIPF, exponent=exponent)
    weights = [(rank + 1) ** -exponent for rank in range(100)]
    for rank in (0, 1, 9):
        expected = DRAWS * weights[rank] / sum(weights)
        assert counts[rank] == pytest.approx(expected, abs=5 * expected**0.5)
    assert max(counts) < 100


def test_hot_one_key_has_its_share_and_the_others_have_the_rest_alike():
    counts = drawn(5, Distribution.HOT, hot_share=0.8)
    assert counts[0] == pytest.approx(16_000, abs=300)
    assert all(850 < counts[key] < 1_150 for key in range(1, 5))


@pytest.mark.parametrize("distribution", Distribution)
def test_of_one_key_it_is_that_one(distribution):
    assert set(drawn(1, distribution, hot_share=0.1)) == {0}


@pytest.mark.parametrize(
    "distribution", [Distribution.UNIFORM, Distribution.ZIPF, Distribution.HOT]
)
def test_the_same_seed_draws_the_same_keys_and_another_one_others(distribution):
    first, again, other = (
        list(islice(Keys(count=1_000, distribution=distribution, seed=seed).drawn(), 100))
        for seed in (7, 7, 8)
    )
    assert first == again != other


def test_memory_does_not_grow_with_what_is_drawn():
    keys = Keys(count=10_000, distribution=Distribution.ZIPF).drawn()
    next(keys)
    tracemalloc.start()
    try:
        Counter(key < 0 for key in islice(keys, 10_000))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
