"""When checks are due at a rate: evenly, or at random as independent callers come. Pure.

Never looks at what became of the checks before: that is what makes it an open loop.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from random import Random


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
