"""Finds the smallest limit that denies most identities nothing, by the algorithm itself. Pure.

Each limit is considered alone. With the same window, a larger limit allows all that a smaller one allows, so doubling
and bisection find the smallest; each step leaves fewer identities to examine.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, TypeAlias

from ratelimitd.algorithms import DECIDE
from ratelimitd.model import INT32_MAX, Limit

SPARED_PERCENT: Final = 99

_NONE: Final = INT32_MAX + 1
"""Above every limit."""

Demand: TypeAlias = "array[int]"
"""The checks of one bucket, in order: alternating time, in µs since the Unix epoch, and cost."""


def sparing(limit: Limit, demands: Collection[Demand], percent: int = SPARED_PERCENT) -> int:
    """Return the smallest limit that denies nothing to ``percent`` of the buckets, in tokens per window.

    A burst keeps its ratio to the limit. 0: there is no such limit, or no bucket has checks.
    """
    wanted = -(-len(demands) * percent // 100)
    if not wanted:
        return 0
    left = [
        _Asked(sum(costs), max(costs), one) for one, costs in ((one, one[1::2]) for one in demands)
    ]
    # A bucket whose whole demand fits at once denies nothing; a burst may be below its limit.
    total = sorted([one.total for one in left])[wanted - 1]
    low, high = 1, min(-(-total * limit.limit // limit.capacity), _NONE)
    spared = 0
    while low < high:
        # Double first: a small limit denies early in a demand, so failed attempts are cheap.
        # equivalent: the order of attempts does not change the result
        middle = min((low + high) // 2, 2 * low)
        passed, denied = _divided(_scaled(limit, middle), left)
        if spared + len(passed) >= wanted:
            high, left = middle, passed
        else:
            low, left = middle + 1, denied
            spared += len(passed)
    return low if low < _NONE else 0


class _Asked(NamedTuple):
    """A demand, with the total cost of its checks and the highest one."""

    total: int
    most: int
    demand: Demand


def _scaled(limit: Limit, tokens: int) -> Limit:
    burst = limit.burst and min(-(-limit.burst * tokens // limit.limit), INT32_MAX)
    return replace(limit, limit=tokens, burst=burst)


def _divided(limit: Limit, asked: Sequence[_Asked]) -> tuple[list[_Asked], list[_Asked]]:
    """Return the demands to which a limit denies nothing, and the others."""
    capacity = limit.capacity
    passed: list[_Asked] = []
    denied: list[_Asked] = []
    for one in asked:
        total, most, demand = one
        passes = total <= capacity or (most <= capacity and _passes(limit, demand))
        (passed if passes else denied).append(one)
    return passed, denied


def _passes(limit: Limit, demand: Demand) -> bool:
    decide, state = DECIDE[limit.algorithm], None
    for at_us, cost in zip(demand[::2], demand[1::2], strict=True):
        outcome = decide(state, limit, at_us, cost)
        if not outcome[0]:
            return False
        state = outcome[5]
    return True
