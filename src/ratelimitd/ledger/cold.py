"""Cold spends: charges to known buckets without a view, at most one for each bucket until it is settled. Pure.

Most callers send few checks, and a view is several objects. A cold bucket is charged on its last known state, and only
the spend is kept; the next few checks are added to it. Any other operation on the bucket before the spend is settled
first creates a view, so the rules of the ledger need no exception: a cold spend is one that a view would allow within
its share, where more than half of the capacity is left. See ADR 0053.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ratelimitd.algorithms import Decide
from ratelimitd.ledger.protocol import ColdSpend
from ratelimitd.model import Algorithm, Limit, Outcome

MOST_CHECKS: Final = 4
"""Checks in one spend. Making and settling a view takes the CPU of three, but a check on it less than half."""

SURE_SHARES: Final = 25
"""Less than 1/25 of the capacity is within any share, even a tight one, where more than half is left."""


def plenty(rule: Limit) -> int:
    """Return the most that may be spent, in units of the state, with at least half of the capacity left."""
    if rule.algorithm is Algorithm.TOKEN_BUCKET:
        return rule.capacity_units >> 1
    return rule.limit >> 1


def spend(  # noqa: PLR0917 -- called once a check
    state: tuple[int, ...] | None,
    rule: Limit,
    decide: Decide,
    now_us: int,
    members: int,
    cost: int,
    share_of: Callable[[Limit, int], int],
    unsent: int = 0,
) -> Outcome | None:
    """Decide a check on the state of a cold bucket, with the limit and burst of ``rule``.

    ``share_of`` is that of the view that the bucket would have; ``unsent`` tokens of the state are unsettled.
    ``None``: a view has to decide, because half of the capacity or the share is used up.
    """
    if state is not None and state[0] > plenty(rule):
        return None
    outcome = decide(state, rule, now_us, cost)
    # More remains without the unsettled tokens, so this share is at most that of a view.
    remaining, planned, capacity = outcome[1] + cost, (unsent + cost) * members, rule.capacity
    if 2 * remaining <= capacity or not outcome[0]:
        return None
    if planned * SURE_SHARES >= capacity and planned >= share_of(rule, remaining):
        return None
    return outcome


def add(  # noqa: PLR0917 -- as spend
    spent: ColdSpend,
    base: tuple[int, ...] | None,
    decide: Decide,
    now_us: int,
    members: int,
    cost: int,
    share_of: Callable[[Limit, int], int],
) -> tuple[Outcome, ColdSpend] | None:
    """Decide another check of a bucket with a cold spend that is not in a batch yet, and add it.

    ``base`` is the algorithm's state before the spend; otherwise as :func:`spend`.
    """
    rule, packed, latest_us, tokens, refilled, checks = spent
    if checks >= MOST_CHECKS:
        return None
    at_us = now_us if now_us > latest_us else latest_us  # noqa: FURB136 -- max() takes 100 ns longer
    state: tuple[int, int]
    if rule.algorithm is Algorithm.TOKEN_BUCKET:
        units = tokens * rule.window_us
        # The amount missing at the latest check if the bucket was full at the first one; at least as much is missing.
        lacking = units - refilled
        if base is not None:
            lacking = max(lacking, units + base[0] - (latest_us - base[1]) * rule.limit)
        state = lacking, latest_us
        refilled = min(units, refilled + (at_us - latest_us) * rule.limit)
    elif rule.algorithm is Algorithm.FIXED_WINDOW and at_us // rule.window_us == (
        window := latest_us // rule.window_us
    ):
        before = 0 if base is None or base[1] // rule.window_us < window else base[0]
        state = before + tokens, latest_us
    else:
        return None
    outcome = spend(state, rule, decide, now_us, members, cost, share_of, tokens)
    if outcome is None:
        return None
    fields = rule, packed, at_us, tokens + cost, refilled, checks + 1
    # Calling the class itself takes 0.3 µs longer.
    return outcome, tuple.__new__(ColdSpend, fields)
