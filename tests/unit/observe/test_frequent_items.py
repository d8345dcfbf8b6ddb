import random
from collections import Counter

import pytest

from ratelimitd.observe.denials import FADED, FrequentItems


def test_while_there_are_few_items_the_counts_are_exact():
    items = FrequentItems(4)
    for item in "abracadabra":
        items.add(item)
    assert items.top(2) == [("a", 5), ("b", 2)]
    assert dict(items.top(9)) == Counter("abracadabra")


@pytest.mark.parametrize("seed", range(3))
def test_of_many_items_the_frequent_ones_stay_and_no_count_is_far_off(seed):
    rng, size = random.Random(seed), 20
    items, exact = FrequentItems(size), Counter()
    for _ in range(5_000):
        item = rng.choice([*range(5), rng.randrange(100, 100_000)])
        weight = rng.choice([1, 1, 1, 4])
        items.add(item, weight)
        exact[item] += weight
        assert len(items) < 2 * size
    assert {item for item, _ in items.top(5)} == set(range(5))
    most_lost = exact.total() / size
    for item, count in items.top(2 * size):
        assert exact[item] - most_lost <= count <= exact[item]


def test_counts_fade_until_they_are_dropped():
    items = FrequentItems(4)
    items.add("a", 8)
    items.add("b", 2 * FADED)
    items.fade(0.5)
    assert items.top(9) == [("a", 4.0)]
