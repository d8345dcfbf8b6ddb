"""Several limits on one check: if every enforced limit passes, all limits are charged; else none is.

An observing limit is charged with the others only if it passes, too. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ratelimitd.algorithms import Decide, token_bucket
from ratelimitd.model import (
    ALLOWED,
    INT32_MAX,
    MAX_TIME_US,
    US_PER_MS,
    WITHIN_LIMIT,
    Algorithm,
    Enforcement,
    Limit,
    Outcome,
)

Bucket = tuple[Any, Limit, Decide]
"""The state of a bucket, its limit, and the ``decide`` of the limit's algorithm."""

Charge = tuple[bytes, Limit, Decide]
"""The key of a bucket that a check is charged to, its limit, and the ``decide`` of the limit's algorithm."""

ENFORCE: Final = Enforcement.ENFORCE

MORE_THAN_ANY_LIMIT: Final = INT32_MAX + 1
"""A cost that every bucket denies; the denial reports what the bucket has."""


def decide_all(buckets: Sequence[Bucket], now_us: int, costs: Sequence[int]) -> list[Outcome]:
    """Decide one check at ``now_us`` (µs since the Unix epoch) on all its buckets, which it costs these tokens.

    Returns:
        The outcomes in the order of the buckets. If an enforced limit denies, no bucket is charged: every state is the
        given object, and allowed outcomes report their bucket without this check.
    """
    outcomes, is_denied = [], False
    for (state, limit, decide), cost in zip(buckets, costs, strict=True):
        outcome = decide(state, limit, now_us, cost)
        if not outcome[0] and limit.enforcement is ENFORCE:
            is_denied = True
        outcomes.append(outcome)
    if not is_denied:
        return outcomes
    return [
        uncharged(bucket, now_us) if outcome[0] else outcome
        for bucket, outcome in zip(buckets, outcomes, strict=True)
    ]


def wait_ms(buckets: Sequence[Bucket], now_us: int, cost: int, most_ms: int) -> int:
    """Return the whole ms after which a check passes every enforced limit.

    0: immediately, or not within ``most_ms``, or one of them is not a token bucket: windows do not support waiting.
    """
    latest_us = now_us
    for state, limit, decide in buckets:
        if limit.enforcement is not ENFORCE:
            continue
        if limit.algorithm is not Algorithm.TOKEN_BUCKET:
            return 0
        at_us = token_bucket.passes_at_us(state, limit, now_us, cost, decide)
        if at_us is None:
            return 0
        latest_us = max(latest_us, at_us)
    found_ms = -(-(latest_us - now_us) // US_PER_MS)
    is_near = found_ms <= most_ms and now_us + found_ms * US_PER_MS <= MAX_TIME_US
    return found_ms if is_near else 0


def passes(limits: Sequence[Limit], outcomes: Sequence[Outcome]) -> bool:
    """Whether a check with these outcomes is allowed."""
    for limit, outcome in zip(limits, outcomes, strict=True):
        if not outcome[0] and limit.enforcement is ENFORCE:
            return False
    return True


def deciding(limits: Sequence[Limit], outcomes: Sequence[Outcome]) -> int:
    """Return the index of the outcome that answers the check.

    Enforced limits precede observing ones, and their denials precede allowed outcomes. Then the longest retry delay of
    such a denial decides, or the smallest remaining part of the capacity; among equals the first.
    """
    found, best, best_limit = 0, outcomes[0], limits[0]
    for place in range(1, len(outcomes)):
        outcome, limit = outcomes[place], limits[place]
        if limit.enforcement is not best_limit.enforcement:
            is_before = limit.enforcement is ENFORCE
        elif (outcome[0] and best[0]) or limit.enforcement is not ENFORCE:
            # What only observing limits judge is allowed.
            is_before = outcome[1] * best_limit.capacity < best[1] * limit.capacity
        elif outcome[0] != best[0]:
            is_before = not outcome[0]
        else:
            is_before = outcome[3] > best[3]
        if is_before:
            found, best, best_limit = place, outcome, limit
    return found


def uncharged(bucket: Bucket, now_us: int) -> Outcome:
    """Return the outcome of an allowed check that costs nothing."""
    state, limit, decide = bucket
    # Every bucket denies a cost above the limit, and the denial reports what the bucket has.
    _, remaining, reset_time, _, _, _ = decide(state, limit, now_us, MORE_THAN_ANY_LIMIT)
    return (ALLOWED, remaining, reset_time, 0, WITHIN_LIMIT, state)
