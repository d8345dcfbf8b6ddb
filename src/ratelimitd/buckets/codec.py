"""How a bucket's state lies in memory: one object, invisible to the cyclic garbage collector.

``(spent, latest_us)`` becomes one integer, a log stays ``bytes``. Both carry their window, so that a sweeper can tell
an expired bucket from its value alone. Pure: no clock, no I/O. See ADR 0014.

    integer:  spent (82 bits at most) · window_seconds (31) · latest_us (53)      48 bytes as an object, at any limit
    bytes:    the log of ``algorithms/sliding_window.py`` · window_seconds (8 bytes)
"""

from __future__ import annotations

from array import array
from itertools import pairwise
from struct import Struct
from typing import Final

from ratelimitd.model import US_PER_S, Rule

Value = int | bytes
State = tuple[int, int] | bytes

_LATEST_BITS: Final = 53
_SPENT_SHIFT: Final = _LATEST_BITS + 31
_LATEST_MASK: Final = (1 << _LATEST_BITS) - 1
_WINDOW_MASK: Final = (1 << 31) - 1

_WINDOW: Final = Struct("=q")
_CELL: Final = 8


def pack(state: State, rule: Rule) -> Value:
    """The value that holds ``state`` under ``rule``."""
    if isinstance(state, bytes):
        return state + _WINDOW.pack(rule.window_seconds)
    spent, latest_us = state
    return spent << _SPENT_SHIFT | rule.window_seconds << _LATEST_BITS | latest_us


def unpack(value: Value) -> State:
    """The state that ``value`` holds."""
    if isinstance(value, bytes):
        return value[:-_CELL]
    return value >> _SPENT_SHIFT, value & _LATEST_MASK


def latest_us(value: Value) -> int:
    """Time of the last accepted check, in µs since the Unix epoch."""
    if isinstance(value, bytes):
        runs = (len(value) - 2 * _CELL) // (2 * _CELL)
        return int(_WINDOW.unpack_from(value, (runs - 1) * _CELL)[0])
    return value & _LATEST_MASK


def window_us(value: Value) -> int:
    """The window of the bucket's rule, in µs."""
    if isinstance(value, bytes):
        return int(_WINDOW.unpack_from(value, len(value) - _CELL)[0]) * US_PER_S
    return (value >> _LATEST_BITS & _WINDOW_MASK) * US_PER_S


def is_over(value: Value, now_us: int) -> bool:
    """Whether the bucket equals a fresh one at ``now_us``.

    One window after the last accepted check a token bucket is full, a log empty and a fixed window over, whatever the
    limit: so one test serves all three and never drops a bucket that is not yet full.
    """
    return latest_us(value) + window_us(value) <= now_us


def clamp(value: Value, now_us: int) -> Value:
    """The value without times after ``now_us``: a state from the future would lock its caller out (I8)."""
    if latest_us(value) <= now_us:
        return value
    if isinstance(value, bytes):
        cells = array("q", value)
        runs = (len(cells) - 2) >> 1
        times = array("q", [min(time_us, now_us) for time_us in cells[:runs]])
        return times.tobytes() + value[runs * _CELL :]
    return value & ~_LATEST_MASK | now_us


def is_value(value: bytes) -> bool:
    """Whether ``value`` has the form of a packed log; what was read from a file is not trusted before."""
    if len(value) < 4 * _CELL or len(value) % (2 * _CELL):
        return False
    cells = array("q", value)
    runs = (len(cells) - 2) >> 1
    times, sums = cells[:runs], cells[runs:-1]
    ascending = all(a <= b for a, b in pairwise(times))
    growing = all(a < b for a, b in pairwise(sums))
    return (
        ascending
        and growing
        and sums[0] >= 0
        and 0 <= times[0] <= times[-1] <= _LATEST_MASK
        and 0 < cells[-1] <= _WINDOW_MASK
    )
