"""The most frequent of ever so many things, in bounded memory.

The sketch of Misra and Gries ("Finding repeated elements", 1982) in the form that makes an addition cheap (Anderson et
al., "A high-performance algorithm for identifying frequent items in data streams", IMC 2017): counters are added until
there are twice as many as ``size``; then the count of the middle one is taken off all, and those that come to nothing
go. So no count is too high, and none is too low by more than the sum of all divided by ``size``.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import nlargest
from typing import Final, Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)

FADED: Final = 0.01
"""A count that has faded to this is dropped."""


class FrequentItems(Generic[Item]):
    """Counts of the most frequent items; of fewer than twice ``size`` of them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._counts: dict[Item, float] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, item: Item, count: float = 1.0) -> None:
        """Count an item ``count`` times."""
        counts = self._counts
        counts[item] = counts.get(item, 0.0) + count
        if len(counts) >= 2 * self._size:
            self._drop(sorted(counts.values())[-self._size])

    def fade(self, factor: float) -> None:
        """Multiply every count by ``factor``, so that what was long ago counts for less."""
        self._counts = {
            item: count * factor for item, count in self._counts.items() if count * factor > FADED
        }

    def top(self, most: int) -> list[tuple[Item, float]]:
        """The ``most`` frequent ones with their counts, the most frequent first."""
        return nlargest(most, self._counts.items(), key=lambda entry: entry[1])

    def _drop(self, middle: float) -> None:
        self._counts = {
            item: count - middle for item, count in self._counts.items() if count > middle
        }
