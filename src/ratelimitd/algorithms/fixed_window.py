"""Fixed window: at most ``limit`` tokens per window; windows are aligned to the Unix epoch.

Pure; never raises on a state of its own. See ADR 0004 and 0006.

The state is ``(count, latest_us)``: the tokens accepted in the window that holds ``latest_us``, the time of the last
accepted check. The effective time of a check is never before it (I8), so a late timestamp counts into the current
window. Around a boundary up to twice the limit may pass (I2); the sliding window prevents that.

A window of :mod:`ratelimitd.algorithms.calendar_window` is a fixed window with a bucket of its own.
"""

from __future__ import annotations

from ratelimitd.model import (
    ALLOWED,
    COST_EXCEEDS_LIMIT,
    DENIED,
    INT32_MAX,
    LIMIT_EXCEEDED,
    US_PER_S,
    WITHIN_LIMIT,
    Limit,
    Outcome,
)

State = tuple[int, ...]
"""(count, latest_us); the ledger appends the count of the previous window unless it is 0."""


def decide(state: State | None, rule: Limit, now_us: int, cost: int) -> Outcome:
    """Decide one check of ``cost`` tokens at ``now_us`` (µs since the Unix epoch).

    Returns:
        The outcome; after a denial its state is the given object (I6).
    """
    limit = rule.limit
    window_us = rule.window_us
    if state is None:
        count, at_us = 0, now_us
        start_us = at_us - at_us % window_us
    else:
        count, latest_us = state[0], state[1]  # states of the ledger are longer
        at_us = max(latest_us, now_us)
        start_us = at_us - at_us % window_us
        if latest_us < start_us:
            count = 0
        # equivalent: >= assigns the value it has; above a lowered limit the window counts as used up
        elif count > limit:
            count = limit

    end_us = start_us + window_us
    reset_time = end_us // US_PER_S  # windows begin and end on whole seconds
    wanted = count + cost
    if wanted <= limit:
        remaining = limit - wanted
        retry_after = 0 if remaining else min(-(-(end_us - now_us) // US_PER_S), INT32_MAX)
        return (ALLOWED, remaining, reset_time, retry_after, WITHIN_LIMIT, (wanted, at_us))
    if cost > limit:
        return (DENIED, limit - count, reset_time, rule.full_after_s, COST_EXCEEDS_LIMIT, state)
    # The end of a window is later than every time inside it, so this is at least 1.
    retry_after = min(-(-(end_us - now_us) // US_PER_S), INT32_MAX)
    return (DENIED, limit - count, reset_time, retry_after, LIMIT_EXCEEDED, state)
