"""The parts of a load: its keys, its arrival times, and the latencies of its answers. Pure."""

from __future__ import annotations

import enum
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, count, cycle, takewhile
from random import Random
from typing import Final, NamedTuple, TypeVar, assert_never

T = TypeVar("T")


class Distribution(enum.StrEnum):
    """Distribution of checks over keys."""

    IN_TURN = "in-turn"
    UNIFORM = "uniform"
    ZIPF = "zipf"
    HOT = "hot"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """A number of keys, numbered from 0.

    ``exponent`` applies to ``ZIPF``: key n is drawn in proportion to 1 / (n + 1) ** exponent. ``hot_share`` applies to
    ``HOT``: key 0 gets this share of all checks, and the others share the rest equally.
    """

    count: int
    distribution: Distribution = Distribution.IN_TURN
    exponent: float = 1.0
    hot_share: float = 0.5
    seed: int = 1

    def drawn(self) -> Iterator[int]:
        """Yield keys endlessly. Holds 8 bytes per key for ``ZIPF``, else none."""
        chance = Random(f"keys {self.seed}")  # noqa: S311 -- load, no secret
        match self.distribution:
            case Distribution.IN_TURN:
                return cycle(range(self.count))
            case Distribution.UNIFORM:
                return _endless(lambda: chance.randrange(self.count))
            case Distribution.ZIPF:
                weights = ((rank + 1) ** -self.exponent for rank in range(self.count))
                up_to = array("d", accumulate(weights))
                return _endless(lambda: chance.choices(range(self.count), cum_weights=up_to)[0])
            case Distribution.HOT:
                return _endless(
                    lambda: (
                        0
                        if self.count == 1 or chance.random() < self.hot_share
                        else chance.randrange(1, self.count)
                    )
                )
        assert_never(self.distribution)


def _endless(draw: Callable[[], T]) -> Iterator[T]:
    while True:
        yield draw()


class Arrival(enum.StrEnum):
    """Distribution of checks over time."""

    CONSTANT = "constant"
    POISSON = "poisson"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Arrivals of ``rate`` checks per second on average."""

    rate: float
    arrival: Arrival = Arrival.CONSTANT
    seed: int = 1

    def due_s(self) -> Iterator[float]:
        """Yield the due time of each check, in seconds from the start, endlessly."""
        if self.arrival is Arrival.CONSTANT:
            return (number / self.rate for number in count())
        chance = Random(f"arrivals {self.seed}")  # noqa: S311 -- load, no secret
        return accumulate(_endless(lambda: chance.expovariate(self.rate)))


DIGITS: Final = 6
"""Binary digits of a latency that are kept: the reported value is too high by at most 1/32."""

QUANTILES: Final = (0.5, 0.9, 0.95, 0.99, 0.999)

_STEPS: Final = (1, 2, 5)


class Bar(NamedTuple):
    """Number of answers up to a latency, above that of the previous bar."""

    up_to_us: int
    checks: int


class Latencies:
    """Latencies in µs."""

    def __init__(self) -> None:
        self.count = 0
        self.max_us = 0
        self.min_us = 0
        self._sum_us = 0
        self._counts: Counter[int] = Counter()
        """By the highest latency of each bucket."""

    def add(self, latency_us: int) -> None:
        """Count one answer."""
        shift = max(0, latency_us.bit_length() - DIGITS)
        self._counts[((latency_us >> shift) + 1 << shift) - 1] += 1
        self.min_us = min(self.min_us, latency_us) if self.count else latency_us
        self.max_us = max(self.max_us, latency_us)
        self._sum_us += latency_us
        self.count += 1

    @property
    def mean_us(self) -> float:
        """Return the mean, 0 without answers."""
        return self._sum_us / self.count if self.count else 0.0

    def quantile_us(self, share: float) -> int:
        """Return the latency that ``share`` of the answers did not exceed, 0 without answers."""
        wanted = math.ceil(share * self.count)
        return next((up_to_us for seen, up_to_us in self._cumulative() if seen >= wanted), 0)

    def curve(self) -> list[tuple[float, int]]:
        """Return the share of the answers up to the latency of each non-empty bucket."""
        return [(seen / self.count, up_to_us) for seen, up_to_us in self._cumulative()]

    def _cumulative(self) -> Iterator[tuple[int, int]]:
        """Yield the number of answers up to each latency."""
        buckets = sorted(self._counts)
        up_to = (min(bucket, self.max_us) for bucket in buckets)
        return zip(accumulate(self._counts[bucket] for bucket in buckets), up_to, strict=True)

    def bars(self) -> list[Bar]:
        """Return coarse buckets of 1, 2, 5, 10 … µs, from the first to the last non-empty one."""
        counts = Counter[int]()
        for up_to_us, number in self._counts.items():
            counts[next(step for step in _steps() if step >= up_to_us)] += number
        if not counts:
            return []
        steps = takewhile(lambda step: step <= max(counts), _steps())
        return [Bar(step, counts[step]) for step in steps if step >= min(counts)]


def _steps() -> Iterator[int]:
    scale = 1
    while True:
        yield from (step * scale for step in _STEPS)
        scale *= 10


SLOTS: Final = 100
"""Slots of the planned time; at most as many again for answers after its end."""


class Slot(NamedTuple):
    """Answers between two moments, in seconds from the start."""

    from_s: float
    to_s: float
    answers: int
    errors: int
    max_us: int
    """The highest latency, in µs."""

    @property
    def rate(self) -> float:
        """Answers per second."""
        return self.answers / (self.to_s - self.from_s)


class Timeline:
    """Answers over ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._width_s = seconds / SLOTS
        self._answers = [0] * (2 * SLOTS)
        self._errors = [0] * (2 * SLOTS)
        self._max_us = [0] * (2 * SLOTS)

    def answered(self, at_s: float, latency_us: int) -> None:
        """Count an answer."""
        slot = self._slot(at_s)
        self._answers[slot] += 1
        self._max_us[slot] = max(self._max_us[slot], latency_us)

    def failed(self, at_s: float) -> None:
        """Count a failed call."""
        self._errors[self._slot(at_s)] += 1

    def slots(self, ended_s: float) -> list[Slot]:
        """Return all slots up to the end, including empty ones. The last one includes the remainder."""
        last = max(0, self._slot(ended_s) - 1)
        slots = []
        for number in range(last + 1):
            until = None if number == last else number + 1
            from_s = number * self._width_s
            slots.append(
                Slot(
                    from_s,
                    ended_s if until is None else until * self._width_s,
                    sum(self._answers[number:until]),
                    sum(self._errors[number:until]),
                    max(self._max_us[number:until]),
                )
            )
        return slots if ended_s else []

    def _slot(self, at_s: float) -> int:
        return min(int(at_s / self._width_s), 2 * SLOTS - 1)
