"""Which key each check has: one after the other, or drawn from a distribution, the same for the same seed. Pure."""

from __future__ import annotations

import enum
from array import array
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, count, cycle
from random import Random
from typing import assert_never


class Distribution(enum.StrEnum):
    """How checks are spread over keys."""

    IN_TURN = "in-turn"
    UNIFORM = "uniform"
    ZIPF = "zipf"
    HOT = "hot"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """So many keys, numbered from 0.

    ``exponent`` is of ``ZIPF``: key n is asked for in proportion to 1 / (n + 1) ** exponent. ``hot_share`` is of
    ``HOT``: key 0 has that share of all checks, and the others have the rest alike.
    """

    count: int
    distribution: Distribution = Distribution.IN_TURN
    exponent: float = 1.0
    hot_share: float = 0.5
    seed: int = 1

    def drawn(self) -> Iterator[int]:
        """Yield keys without end. Holds 8 bytes for each key where the distribution is ``ZIPF``, and nothing else."""
        chance = Random(f"keys {self.seed}")  # noqa: S311 -- load, no secret
        match self.distribution:
            case Distribution.IN_TURN:
                return cycle(range(self.count))
            case Distribution.UNIFORM:
                return _uniform(chance, self.count)
            case Distribution.ZIPF:
                return _zipf(chance, self.count, self.exponent)
            case Distribution.HOT:
                return _hot(chance, self.count, self.hot_share)
        assert_never(self.distribution)


def _uniform(chance: Random, count: int) -> Iterator[int]:
    while True:
        yield chance.randrange(count)


def _zipf(chance: Random, count: int, exponent: float) -> Iterator[int]:
    up_to = array("d", accumulate((rank + 1) ** -exponent for rank in range(count)))
    total = up_to[-1]
    while True:
        # random() is below 1, but the product may be rounded up to the total.
        yield min(bisect(up_to, chance.random() * total), count - 1)


def _hot(chance: Random, count: int, hot_share: float) -> Iterator[int]:
    while True:
        is_hot = count == 1 or chance.random() < hot_share
        yield 0 if is_hot else chance.randrange(1, count)


# When checks are due at a rate: evenly, or at random as independent callers come. Pure.
#
# Never looks at what became of the checks before: that is what makes it an open loop.


class Arrival(enum.StrEnum):
    """How checks are spread over time."""

    CONSTANT = "constant"
    POISSON = "poisson"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """``rate`` checks a second on average."""

    rate: float
    arrival: Arrival = Arrival.CONSTANT
    seed: int = 1

    def due_s(self) -> Iterator[float]:
        """Yield when each check is due, in seconds from the beginning, without end."""
        if self.arrival is Arrival.CONSTANT:
            return (number / self.rate for number in count())
        return _poisson(Random(f"arrivals {self.seed}"), self.rate)  # noqa: S311 -- load, no secret


def _poisson(chance: Random, rate: float) -> Iterator[float]:
    due_s = 0.0
    while True:
        due_s += chance.expovariate(rate)
        yield due_s
