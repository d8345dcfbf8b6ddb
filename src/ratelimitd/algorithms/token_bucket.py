"""Token bucket: starts full, refills ``limit`` tokens per window, a check takes its cost or nothing.

A full bucket holds the limit's ``capacity``: its burst, or as many tokens as a window refills. See ADR 0047.

Pure; never raises on a state of its own. See ADR 0002 and 0006.

The state is ``(spent, latest_us)``, exact in integers. One token is ``window_us`` units and one µs refills ``limit``
units, so that no refill is rounded: a full bucket is capacity × window_us, at most 2^82. *Spent* is stored instead of
tokens because it depends neither on the limit nor on the burst, and so survives an edit of them.
``latest_us`` is the time of the last accepted check; the effective time of a check is never before it (I8). It is ahead
of the clock while a check that was allowed ahead of its time waits; until then the bucket has nothing to give.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ratelimitd.model import (
    ALLOWED,
    COST_EXCEEDS_LIMIT,
    DENIED,
    INT32_MAX,
    LIMIT_EXCEEDED,
    MAX_TIME_US,
    US_PER_S,
    WITHIN_LIMIT,
    Limit,
    Outcome,
)

if TYPE_CHECKING:
    from ratelimitd.algorithms import Decide

State = tuple[int, int]

_ROUND_UP: Final = US_PER_S - 1


def decide(state: State | None, rule: Limit, now_us: int, cost: int) -> Outcome:
    """Decide one check of ``cost`` tokens at ``now_us`` (µs since the Unix epoch).

    The specification's formulas: tokens = min(capacity, tokens + elapsed × refill rate); retry delay
    = (n − tokens) / refill rate, with the cost of a denied check, or 1 after an accepted one, for n.

    Returns:
        The outcome; after a denial its state is the given object (I6).
    """
    limit = rule.limit
    token = rule.window_us
    capacity = rule.capacity_units
    if state is None:
        spent, at_us = 0, now_us
    else:
        spent, latest_us = state
        # Comparisons, not min() and max(): a call costs 60 ns, a comparison 15.
        # After the capacity was lowered, at most one capacity is owed. equivalent: >= assigns the value it has
        if spent > capacity:  # noqa: PLR1730
            spent = capacity
        if now_us > latest_us:  # equivalent: >= adds 0 µs
            spent -= (now_us - latest_us) * limit
            if spent < 0:  # noqa: PLR1730 - equivalent: <= assigns the value it has
                spent = 0
            at_us = now_us
        else:
            at_us = latest_us

    wanted = spent + cost * token
    if wanted <= capacity:
        remaining = (capacity - wanted) // token
        # Whole seconds, rounded up: -(-a // b) is the ceiling of a / b.
        retry_after = 0
        if not remaining:
            due = at_us * limit + wanted + token - capacity
            retry_after = min(-(-(due - now_us * limit) // (limit * US_PER_S)), INT32_MAX)
        return (
            ALLOWED,
            remaining,
            # When the bucket is full: the ceiling of (at + wanted / limit) / 1 s equals that of the ceiling of its
            # numerator. The numbers stay short, which takes half the time; so does ⌊(a − 1) / b⌋ + 1 for ⌈a / b⌉.
            (at_us + (wanted - 1) // limit) // US_PER_S + 1,
            retry_after,
            WITHIN_LIMIT,
            (wanted, at_us),
        )

    return denied(state, rule, now_us, cost, (spent, at_us))


def passes_at_us(  # noqa: PLR0917 - what decides a check, and who decides it
    state: State | None, rule: Limit, now_us: int, cost: int, judge: Decide = decide
) -> int | None:
    """Return the first time from ``now_us`` on at which a check passes.

    ``None``: it costs more than the capacity, or the bucket is in debt, of which only a ``judge`` other than
    :func:`decide` knows.
    """
    if cost > rule.capacity:
        return None
    outcome = judge(state, rule, now_us, cost)
    if state is None or outcome[0]:
        return now_us
    spent, latest_us = state
    if judge is decide:
        spent = min(spent, rule.capacity_units)
    elif _is_in_debt(state, rule, now_us):
        return None
    excess = spent + (cost - rule.capacity) * rule.window_us
    return latest_us - -excess // rule.limit


def decide_ahead(
    state: State | None,
    rule: Limit,
    now_us: int,
    cost: int,
    *,
    ahead_us: int,
    judge: Decide = decide,
) -> Outcome:
    """Decide at ``now_us`` a check that proceeds ``ahead_us`` later; ``judge`` as in :func:`passes_at_us`.

    The outcome is that of a check at the later time. The state reserves all refill until then, so that no interval
    admits more than if the check were made when it proceeds. A debt denies the check: kept as reserved refill, it would
    not be seen once a hold gives tokens back.
    """
    if judge is not decide and state is not None and _is_in_debt(state, rule, now_us):
        return judge(state, rule, now_us, cost)
    outcome = judge(state, rule, now_us + ahead_us, cost)
    if not outcome[0]:
        return outcome
    at_us = now_us if state is None else max(now_us, state[1])
    spent, until_us = outcome[5]  # type: ignore[misc]  # of an allowed check it is such a pair
    capacity = rule.capacity_units
    beyond = spent + (until_us - at_us) * rule.limit - capacity
    if beyond <= 0:
        return (*outcome[:5], (beyond + capacity, at_us))
    later_us = -(-beyond // rule.limit)
    # The refill of a part of a µs is kept, but not whole tokens, which others could take before it is due.
    spent = capacity - min(later_us * rule.limit - beyond, rule.window_us - 1)
    return (*outcome[:5], (spent, at_us + later_us))


def _is_in_debt(state: State, rule: Limit, now_us: int) -> bool:
    spent, latest_us = state
    return spent - max(0, now_us - latest_us) * rule.limit > rule.capacity_units


def denied(  # noqa: PLR0917 - what both callers know
    state: State | None, rule: Limit, now_us: int, cost: int, refilled: State
) -> Outcome:
    """Return the outcome of a denied check; ``refilled`` is the bucket at its time, and may be overdrawn.

    The outcome's ``reset_time`` is at most ``MAX_TIME_US`` seconds, as in the store.
    """
    limit = rule.limit
    token = rule.window_us
    capacity = rule.capacity_units
    spent, at_us = refilled
    remaining = (capacity - spent) // token if spent < capacity else 0
    reset_time = min((at_us - -spent // limit + _ROUND_UP) // US_PER_S, MAX_TIME_US)
    if cost > rule.capacity:
        return (DENIED, remaining, reset_time, rule.window_seconds, COST_EXCEEDS_LIMIT, state)
    # The cost exceeds what the bucket has, so it is due later than now, and this is at least 1.
    due = at_us * limit + spent + cost * token - capacity
    retry_after = min(-(-(due - now_us * limit) // (limit * US_PER_S)), INT32_MAX)
    return (DENIED, remaining, reset_time, retry_after, LIMIT_EXCEEDED, state)
