"""Spends of known buckets that are not in use: charged without a view, one for each bucket until it is settled. Pure.

Most callers come seldom, and a view is several objects. A cold bucket is charged on its last known state, and only the
spend is kept. Anything else that happens to the bucket before the spend is settled makes it a view first, so the rules
of the ledger need no exception: a cold spend is one that a view would allow within its share, where more than half of
the capacity is left. See ADR 0053.
"""

from __future__ import annotations

from collections.abc import Callable

from ratelimitd.algorithms import Decide
from ratelimitd.model import Algorithm, Limit, Outcome


def plenty(rule: Limit) -> int:
    """Return what a bucket may have spent, in the unit of its state, with at least half of the capacity left."""
    if rule.algorithm is Algorithm.TOKEN_BUCKET:
        return rule.capacity * rule.window_us >> 1
    return rule.limit >> 1


def spend(  # noqa: PLR0917 -- called once a check
    state: tuple[int, ...] | None,
    rule: Limit,
    decide: Decide,
    now_us: int,
    members: int,
    cost: int,
    share_of: Callable[[Limit, int], int],
) -> Outcome | None:
    """Decide a check on the state of a cold bucket, with the limit and burst of ``rule`` and nothing unsettled.

    ``share_of`` is that of the view that the bucket would have.
    ``None``: a view has to decide, because the bucket has not plenty, or its spends would have to be settled at once.
    """
    if state is not None and state[0] > plenty(rule):
        return None
    outcome = decide(state, rule, now_us, cost)
    remaining = outcome[1] + cost
    is_low = 2 * remaining <= rule.capacity or cost * members >= share_of(rule, remaining)
    return None if is_low or not outcome[0] else outcome
