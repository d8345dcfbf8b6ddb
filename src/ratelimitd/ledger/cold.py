"""Spends of known buckets that are not in use: charged without a view, one for each bucket until it is settled. Pure.

Most callers come seldom, and a view is several objects. A cold bucket is charged on its last known state, and only the
spend is kept. Anything else that happens to the bucket before the spend is settled makes it a view first, so the rules
of the ledger need no exception: a cold spend is one that a view would allow within its share, where more than half of
the capacity is left. See ADR 0053.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ratelimitd.algorithms import Decide
from ratelimitd.ledger.accounts import BucketState
from ratelimitd.ledger.local_view import SHARES_OF_REMAINING
from ratelimitd.model import Algorithm, Limit, Outcome


class ColdSpend(NamedTuple):
    """A spend: the rule it was made under, the state it was made on, its time in µs, and its tokens."""

    rule: Limit
    base: Any
    at_us: int
    cost: int


def has_plenty(state: BucketState, rule: Limit) -> bool:
    """Whether at least half of the capacity was left at the latest spend; a log is taken for one that has less."""
    if state is None:
        return True
    if isinstance(state, bytes):
        return False
    full = (
        rule.window_us * rule.capacity if rule.algorithm is Algorithm.TOKEN_BUCKET else rule.limit
    )
    return 2 * state[0] <= full


def spend(  # noqa: PLR0917 -- called once a check
    state: BucketState, rule: Limit, decide: Decide, now_us: int, members: int, cost: int
) -> Outcome | None:
    """Decide a check on the state of a cold bucket, with the limit and burst of ``rule`` and nothing unsettled.

    ``None``: a view has to decide, because the bucket has not plenty, or its spends would have to be settled at once.
    """
    if not has_plenty(state, rule):
        return None
    outcome = decide(state, rule, now_us, cost)
    remaining = outcome[1] + cost
    is_low = 2 * remaining <= rule.capacity or cost * members >= remaining // SHARES_OF_REMAINING
    return None if is_low or not outcome[0] else outcome
