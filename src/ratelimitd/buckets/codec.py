"""How a bucket lies in memory: one object, invisible to the cyclic garbage collector.

``(spent, latest_us)`` becomes one integer, a log stays ``bytes``. Both also carry the rule's window, so that an expired
bucket is told by its value alone, and the tick at which they were last used, which is the order of use.
Pure: no clock, no I/O. See ADR 0014.

    integer:  spent · window_seconds (31 bits) · tick (28 bits) · latest_us (53 bits)
    bytes:    the log of ``algorithms/sliding_window.py`` · window_seconds and tick (8 bytes)

An integer of up to 180 bits is an object of 48 bytes, so that spent may take 68 bits (a limit of 2 million a day)
before a bucket grows by 16 bytes.
"""

from __future__ import annotations

from array import array
from struct import Struct
from typing import Final

from ratelimitd.algorithms.sliding_window import MAX_RUNS, MAX_SUM
from ratelimitd.model import US_PER_S, Rule

Value = int | bytes
State = tuple[int, int] | bytes

MAX_TICK: Final = (1 << 28) - 1
"""Ticks are seconds since the node's start: enough for eight years."""

TICK_SHIFT: Final = 53
_TICK_BITS: Final = 28
WINDOW_SHIFT: Final = TICK_SHIFT + _TICK_BITS
SPENT_SHIFT: Final = WINDOW_SHIFT + 31
LATEST_MASK: Final = (1 << TICK_SHIFT) - 1
_WINDOW_MASK: Final = (1 << 31) - 1

_CELL: Final = 8
_TAIL: Final = Struct("=q")


def pack(state: State, rule: Rule, tick: int) -> Value:
    """The value that holds ``state`` under ``rule``, last used at ``tick``."""
    if isinstance(state, bytes):
        return state + _TAIL.pack(rule.window_seconds << _TICK_BITS | tick)
    spent, latest_us = state
    return (
        spent << SPENT_SHIFT | rule.window_seconds << WINDOW_SHIFT | tick << TICK_SHIFT | latest_us
    )


def unpack(value: Value) -> State:
    """The state that ``value`` holds."""
    if isinstance(value, bytes):
        return value[:-_CELL]
    return value >> SPENT_SHIFT, value & LATEST_MASK


def tick_of(value: Value) -> int:
    """When the bucket was last used, in ticks."""
    if isinstance(value, bytes):
        return int(_TAIL.unpack_from(value, len(value) - _CELL)[0]) & MAX_TICK
    return value >> TICK_SHIFT & MAX_TICK


def latest_us(value: Value) -> int:
    """Time of the last accepted check, in µs since the Unix epoch."""
    if isinstance(value, bytes):
        runs = (len(value) - 2 * _CELL) // (2 * _CELL)
        return int(_TAIL.unpack_from(value, (runs - 1) * _CELL)[0])
    return value & LATEST_MASK


def window_seconds(value: Value) -> int:
    """The window of the bucket's rule, in seconds."""
    if isinstance(value, bytes):
        return int(_TAIL.unpack_from(value, len(value) - _CELL)[0]) >> _TICK_BITS
    return value >> WINDOW_SHIFT & _WINDOW_MASK


def is_over(value: Value, now_us: int) -> bool:
    """Whether the bucket equals a fresh one at ``now_us``.

    One window after the last accepted check a token bucket is full, a log empty and a fixed window over, whatever the
    limit: so one test serves all three, and never drops a bucket that is not full again.
    """
    if isinstance(value, bytes):
        return latest_us(value) + window_seconds(value) * US_PER_S <= now_us
    # The same, without two calls: the sweeper asks this of thousands of buckets in one turn of the event loop.
    return (value & LATEST_MASK) + (value >> WINDOW_SHIFT & _WINDOW_MASK) * US_PER_S <= now_us


def with_tick(value: Value, tick: int) -> Value:
    """The value as last used at ``tick``; at tick 0 it is older than everything that this process used."""
    if tick_of(value) == tick:
        return value
    if isinstance(value, bytes):
        return value[:-_CELL] + _TAIL.pack(window_seconds(value) << _TICK_BITS | tick)
    return value & ~(MAX_TICK << TICK_SHIFT) | tick << TICK_SHIFT


def clamp(value: Value, now_us: int) -> Value:
    """The value without times after ``now_us``: a state from the future would lock its caller out (I8)."""
    if latest_us(value) <= now_us:
        return value
    if isinstance(value, bytes):
        cells = array("q", value)
        runs = (len(cells) - 2) >> 1
        times = array("q", [min(time_us, now_us) for time_us in cells[:runs]])
        return times.tobytes() + value[runs * _CELL :]
    return value & ~LATEST_MASK | now_us


def is_log(value: bytes) -> bool:
    """Whether ``value`` has the form of a packed log, told by its length and its ends: about 1 µs, however long it is.

    Enough that no check of it can fail. That times and sums ascend in between is not looked at: what comes from a file
    has passed a checksum (``chunks.py``), and is as the node that wrote it had it in use.
    """
    runs = (len(value) - 2 * _CELL) // (2 * _CELL)
    if not 1 <= runs <= MAX_RUNS or len(value) % (2 * _CELL):
        return False
    cells = memoryview(value).cast("q")
    return (
        0 <= cells[0] <= cells[runs - 1] <= LATEST_MASK
        and 0 <= cells[runs] < cells[-2] <= MAX_SUM
        and 0 < cells[-1] >> _TICK_BITS <= _WINDOW_MASK
    )
