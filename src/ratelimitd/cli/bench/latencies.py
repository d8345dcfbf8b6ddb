"""How long answers took: counted in buckets that are 3 % wide, so that memory does not grow with the load. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple

DIGITS: Final = 6
"""Binary digits of a latency that are kept: it is told too high by 1/32 at most."""

QUANTILES: Final = (0.5, 0.9, 0.95, 0.99, 0.999)

US_PER_MS: Final = 1_000

_STEPS: Final = (1, 2, 5)


class Bar(NamedTuple):
    """Answers that took up to so long, and longer than the bar before."""

    up_to_us: int
    checks: int


class Point(NamedTuple):
    """The share of answers that took up to so long."""

    share: float
    up_to_us: int


class Latencies:
    """Latencies in µs."""

    def __init__(self) -> None:
        self.count = 0
        self.max_us = 0
        self.min_us = 0
        self._sum_us = 0
        self._counts: Counter[int] = Counter()
        """By the highest latency of the bucket."""

    def add(self, latency_us: int) -> None:
        """One answer came after so long."""
        shift = max(0, latency_us.bit_length() - DIGITS)
        self._counts[((latency_us >> shift) + 1 << shift) - 1] += 1
        self.min_us = min(self.min_us, latency_us) if self.count else latency_us
        self.max_us = max(self.max_us, latency_us)
        self._sum_us += latency_us
        self.count += 1

    @property
    def mean_us(self) -> float:
        """The mean, 0 without answers."""
        return self._sum_us / self.count if self.count else 0.0

    def quantile_us(self, share: float) -> int:
        """What ``share`` of the answers took at most, 0 without answers."""
        wanted, seen = math.ceil(share * self.count), 0
        for up_to_us, count in sorted(self._counts.items()):
            seen += count
            if seen >= wanted:
                return min(up_to_us, self.max_us)
        return 0

    def curve(self) -> list[Point]:
        """All buckets with something in them, from the shortest latencies to the longest."""
        points, seen = [], 0
        for up_to_us, count in sorted(self._counts.items()):
            seen += count
            points.append(Point(seen / self.count, min(up_to_us, self.max_us)))
        return points

    def bars(self) -> list[Bar]:
        """Coarse buckets of 1, 2, 5, 10 … µs, from the first that is not empty to the last."""
        counts = Counter[int]()
        for up_to_us, count in self._counts.items():
            counts[next(step for step in _steps() if step >= up_to_us)] += count
        if not counts:
            return []
        within = (step for step in _steps() if step >= min(counts))
        bars = []
        for step in within:
            bars.append(Bar(step, counts[step]))
            if step >= max(counts):
                break
        return bars


def _steps() -> Iterator[int]:
    scale = 1
    while True:
        yield from (step * scale for step in _STEPS)
        scale *= 10
