"""The smallest limit that spares most identities, by the algorithm itself. Pure.

Each limit is looked at alone. A larger one of the same window denies an identity nothing that a smaller one allows, so
halving finds the smallest, and each step leaves fewer identities to look at.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

from ratelimitd.algorithms import DECIDE
from ratelimitd.model import INT32_MAX, Limit

SPARED_PERCENT: Final = 99

Demand: TypeAlias = "array[int]"
"""What one bucket was asked for: time in µs since the Unix epoch and cost, by turns, in the order of the checks."""


def sparing(limit: Limit, demands: Collection[Demand], percent: int = SPARED_PERCENT) -> int:
    """Return the smallest limit that denies nothing to ``percent`` of the buckets, in tokens per window.

    A burst keeps its ratio to the limit. 0: no limit does, or no bucket was asked for anything.
    """
    wanted = -(-len(demands) * percent // 100)
    if not wanted:
        return 0
    # Nothing is denied by a limit of all that is asked for.
    low, high = 1, sorted([sum(demand[1::2]) for demand in demands])[wanted - 1]
    if high > INT32_MAX:
        return 0
    spared, left = 0, list(demands)
    while low < high:
        middle = (low + high) // 2
        passed, denied = _divided(_scaled(limit, middle), left)
        if spared + len(passed) >= wanted:
            high, left = middle, passed
        else:
            low, left = middle + 1, denied
            spared += len(passed)
    return low


def _scaled(limit: Limit, tokens: int) -> Limit:
    burst = limit.burst and min(-(-limit.burst * tokens // limit.limit), INT32_MAX)
    return replace(limit, limit=tokens, burst=burst)


def _divided(limit: Limit, demands: Sequence[Demand]) -> tuple[list[Demand], list[Demand]]:
    passed: list[Demand] = []
    denied: list[Demand] = []
    for demand in demands:
        (passed if _passes(limit, demand) else denied).append(demand)
    return passed, denied


def _passes(limit: Limit, demand: Demand) -> bool:
    costs = demand[1::2]
    if sum(costs) <= limit.capacity:
        return True
    if max(costs) > limit.capacity:
        return False
    decide, state = DECIDE[limit.algorithm], None
    for at_us, cost in zip(demand[::2], costs, strict=True):
        outcome = decide(state, limit, at_us, cost)
        if not outcome[0]:
            return False
        state = outcome[5]
    return True
