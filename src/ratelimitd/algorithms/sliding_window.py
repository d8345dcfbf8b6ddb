"""Sliding-window log: at most ``limit`` tokens in any interval of one window, no burst at a boundary.

Pure; never raises on a state of its own. See ADR 0003 and 0006.

The log is a list of runs: one timestamp and the tokens accepted at it. The state is the runs as one ``bytes``
object of 64-bit integers in the machine's order,

    t1 … tn   c0 c1 … cn

where ``ti`` is the time of run i in µs, ascending, and ``ci − c(i−1)`` its tokens. With running sums the tokens in the
window are one subtraction, and the time when k of them have left is one bisection. An immutable ``bytes`` keeps
:func:`decide` pure, takes 16 bytes a run, and is skipped by the cyclic garbage collector.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import sub
from struct import Struct
from typing import Final

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

State = bytes

MAX_RUNS: Final = 16_384
"""Maximum runs of a log; beyond it neighbours merge into the later timestamp. Bounds a bucket to 256 KiB (I17)."""

# equivalent: both ways to insert give the same log
FEW_RUNS: Final = 16
"""Up to this many runs, inserting one by one is faster than a pass over the log."""

MAX_SUM: Final = 2**62
"""Running sums are rebased before they exceed 64 bits."""

_CELL: Final = 8
_pack_one: Final = Struct("=q").pack
_pack_first: Final = Struct("=qqq").pack


def decide(state: State | None, rule: Limit, now_us: int, cost: int) -> Outcome:
    """Decide one check of ``cost`` tokens at ``now_us`` (µs since the Unix epoch).

    The specification's rule: entries at or before timestamp − window are dropped; if what remains and the cost fit into
    the limit, the timestamp is appended ``cost`` times.

    Returns:
        The outcome; after a denial its state is the given object (I6).
    """
    limit, window_us = rule.limit, rule.window_us
    if state is None:
        if cost <= limit:
            return _accepted(rule, now_us, now_us, cost, now_us, _pack_first(now_us, 0, cost))
        reset_time = -(-now_us // US_PER_S)
        return (DENIED, limit, reset_time, rule.window_seconds, COST_EXCEEDS_LIMIT, state)

    cells = memoryview(state).cast("q")
    runs = len(cells) >> 1
    latest_us = cells[runs - 1]
    # Comparisons, not min() and max(): a call costs 60 ns, a comparison 15. equivalent: >= assigns the value it has
    at_us = now_us if now_us > latest_us else latest_us  # noqa: FURB136
    # Runs up to the horizon have left the window. Usually none has since the last accepted check; a probe takes 50 ns.
    horizon_us = at_us - window_us
    first = 0 if cells[0] > horizon_us else bisect_right(cells, horizon_us, 1, runs)
    gone = cells[runs + first]
    used = cells[-1] - gone

    if used + cost <= limit:
        oldest_us = at_us
        if used and used + cost == limit:
            # A refund may leave a run without tokens; skip it.
            oldest_us = cells[bisect_right(cells, gone, runs + first + 1) - runs - 1]
        return _accepted(
            rule, now_us, at_us, used + cost, oldest_us, _appended(cells, first, at_us, cost)
        )

    remaining = limit - used if used < limit else 0  # a lowered limit may be below `used`
    reset_us = at_us
    if used:
        newest_us = latest_us
        if cells[-2] == cells[-1]:
            # A refund has left the latest run without tokens.
            newest_us = cells[bisect_left(cells, cells[-1], runs) - runs - 1]
        reset_us = newest_us + window_us
    reset_time = -(-reset_us // US_PER_S)
    if cost > limit:
        return (DENIED, remaining, reset_time, rule.window_seconds, COST_EXCEEDS_LIMIT, state)
    # The earliest run after whose expiry the cost fits, usually the first.
    too_many, place = cells[-1] + cost - limit, runs + first + 1
    leaving = first
    if cells[place] < too_many:
        leaving = bisect_left(cells, too_many, place + 1) - runs - 1
    retry_after = -(-(cells[leaving] + window_us - now_us) // US_PER_S)
    if retry_after > INT32_MAX:  # noqa: PLR1730 - equivalent: >= assigns the value it has
        retry_after = INT32_MAX
    return (DENIED, remaining, reset_time, retry_after, LIMIT_EXCEEDED, state)


def entered(state: State | None, rule: Limit, runs: Sequence[tuple[int, int]]) -> State:
    """Return the log with ``runs`` inserted by time, at least one, regardless of the limit.

    Drops runs outside the window of the latest time; merges neighbours beyond ``MAX_RUNS``.
    """
    cells = array("q", state or ())
    length = len(cells) >> 1
    times, sums = cells[:length], cells[length:] or array("q", [0])
    if len(runs) <= FEW_RUNS:  # equivalent: both ways give the same log
        _insert(times, sums, runs)
    else:
        times, sums = _merged(times, sums, runs)
    first = bisect_right(times, times[-1] - rule.window_us)
    state = times[first:].tobytes() + sums[first:].tobytes()
    if sums[-1] > MAX_SUM:  # equivalent: at MAX_SUM both ways give a log of the same runs
        state = _compacted(state)
    # equivalent: as a log has an odd number of cells, 2 * MAX_RUNS + 2 is the same bound
    while len(state) > (2 * MAX_RUNS + 1) * _CELL:
        state = _compacted(state)
    return state


def removed(state: State, until_us: int, tokens: int) -> tuple[State, int]:
    """Return the log without its latest ``tokens`` at or before ``until_us``, and the number removed.

    The last run stays, even without tokens, so that the log keeps its latest time.
    """
    cells = array("q", state)
    length = len(cells) >> 1
    times, sums = cells[:length], cells[length:]
    end = bisect_right(times, until_us)
    taken = min(tokens, sums[end] - sums[0])
    if not taken:
        return state, 0
    left = sums[end] - taken
    kept = bisect_left(sums, left)  # runs, the last of which may have lost some of its tokens
    times_left, sums_left = times[:kept], sums[:kept]
    sums_left.append(left)
    if end < length:
        times_left += times[end:]
        sums_left.extend([total - taken for total in sums[end + 1 :]])
    elif kept < length:
        times_left.append(times[-1])
        sums_left.append(left)
    return times_left.tobytes() + sums_left.tobytes(), taken


def _insert(times: array[int], sums: array[int], runs: Sequence[tuple[int, int]]) -> None:
    """Insert few runs; each takes a step per later entry."""
    for at_us, tokens in runs:
        place = bisect_right(times, at_us)
        if place and times[place - 1] == at_us:
            place -= 1
        else:
            times.insert(place, at_us)
            sums.insert(place, sums[place])
        for later in range(place + 1, len(sums)):
            sums[later] += tokens


def _merged(
    times: array[int], sums: array[int], runs: Sequence[tuple[int, int]]
) -> tuple[array[int], array[int]]:
    """Insert many runs, in one pass over the log."""
    tokens_at: dict[int, int] = {}
    there = zip(times, map(sub, sums[1:], sums), strict=True)
    for at_us, tokens in sorted((*there, *runs)):
        tokens_at[at_us] = tokens_at.get(at_us, 0) + tokens
    return array("q", tokens_at), array("q", accumulate(tokens_at.values(), initial=sums[0]))


def used(state: State, rule: Limit, now_us: int) -> int:
    """Return the tokens in the window that ends at ``now_us``, and those after it."""
    cells = memoryview(state).cast("q")
    runs = len(cells) >> 1
    return cells[-1] - cells[runs + bisect_right(cells, now_us - rule.window_us, 0, runs)]


def latest(state: State) -> tuple[int, int]:
    """Return (time of the last run, tokens in all)."""
    cells = memoryview(state).cast("q")
    runs = len(cells) >> 1
    return cells[runs - 1], cells[-1] - cells[runs]


def _accepted(  # noqa: PLR0917 - what both ways of accepting know
    rule: Limit, now_us: int, at_us: int, used: int, oldest_us: int, state: State
) -> Outcome:
    remaining = rule.limit - used
    retry_after = 0
    if not remaining:
        retry_after = min(-(-(oldest_us + rule.window_us - now_us) // US_PER_S), INT32_MAX)
    reset_time = -(-(at_us + rule.window_us) // US_PER_S)
    return (ALLOWED, remaining, reset_time, retry_after, WITHIN_LIMIT, state)


def _appended(cells: memoryview[int], first: int, at_us: int, cost: int) -> State:
    """Return the log without its first ``first`` runs, plus ``cost`` tokens at ``at_us``."""
    runs = len(cells) >> 1
    if first == runs:
        return _pack_first(at_us, 0, cost)
    total = cells[-1] + cost
    # With thousands of runs, another copy of the log takes as long as the rest of a check.
    if cells[runs - 1] == at_us:
        appended = b"".join((cells[first:runs], cells[runs + first : -1], _pack_one(total)))
    else:
        latest = _pack_one(at_us), cells[runs + first :], _pack_one(total)
        appended = b"".join((cells[first:runs], *latest))
    # equivalent: as a log has an odd number of cells, 2 * MAX_RUNS + 2 is the same bound
    if total > MAX_SUM or len(appended) > (2 * MAX_RUNS + 1) * _CELL:
        return _compacted(appended)
    return appended


def _compacted(state: State) -> State:
    """Return the log with sums from 0 and, if it is too long, every two neighbouring runs merged.

    A merged run has the later timestamp: its tokens stay longer, so merging never admits more.
    """
    cells = array("q", state)
    runs = len(cells) >> 1
    times, sums = cells[:runs], cells[runs:]
    if runs > MAX_RUNS:
        # An odd last run has no neighbour and stays as it is.
        times = times[1 : runs - 1 : 2] + times[runs - 1 :]
        sums = sums[0:runs:2] + sums[runs:]
    base = sums[0]
    return times.tobytes() + array("q", [total - base for total in sums]).tobytes()
