"""A bucket as it lies in the store: bytes to the ledger's state. Only scripts write such bytes. Pure.

Little-endian; of a full bucket the head is all (``scripts/bucket.lua`` and those of the algorithms):

    head:            format (1 byte) · algorithm (1) · generation (4) · revision (8) · limit (4)
    token bucket:    whole tokens spent (8) · units beyond them (8) · latest_us (8)
    fixed window:    count (8) · latest_us (8)
    sliding window:  sum before the first entry (8) · {time in µs (8) · sum up to here (8)} …
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping
from struct import Struct
from types import MappingProxyType
from typing import Any, Final

from ratelimitd.algorithms.sliding_window import MAX_RUNS
from ratelimitd.errors import StoreCorruptError
from ratelimitd.ledger.accounts import BucketState
from ratelimitd.ledger.shared_state import SharedState
from ratelimitd.model import INT32_MAX, MAX_TIME_US, Algorithm, Rule

FORMAT: Final = 1
"""Of the bytes. A value of another format is not ours."""

NUMBERS: Final[Mapping[Algorithm, int]] = MappingProxyType(
    {
        Algorithm.TOKEN_BUCKET: 1,
        Algorithm.FIXED_WINDOW: 2,
        Algorithm.SLIDING_WINDOW: 3,
    }
)
"""What stands for an algorithm in the store; never changes."""

_LARGEST: Final = MAX_TIME_US  # of every number there: they are doubles in the scripts

_HEAD: Final = Struct("<BBIQI")
_TOKEN_BUCKET: Final = Struct(f"<{_HEAD.size}xQQQ")
_FIXED_WINDOW: Final = Struct(f"<{_HEAD.size}xQQ")
_LOG_HEAD_BYTES: Final = _HEAD.size + 8
_ENTRY_BYTES: Final = 16


def state_of(value: Any, rule: Rule) -> SharedState | None:
    """The state that a value of the store holds, of a bucket of ``rule``; ``None`` when the store holds none.

    Raises:
        StoreCorruptError: the value is no bucket of this algorithm.
    """
    return None if value is None else bucket_of(value, rule)


def bucket_of(value: Any, rule: Rule) -> SharedState:
    """The same of a value that has to be there."""
    if isinstance(value, bytes) and len(value) >= _HEAD.size:
        form, number, generation, revision, limit = _HEAD.unpack_from(value)
        is_ours = form == FORMAT and number == NUMBERS[rule.algorithm]
        is_sound = 1 <= limit <= INT32_MAX and revision <= _LARGEST and generation <= INT32_MAX
        if is_ours and is_sound:
            if len(value) == _HEAD.size:
                return SharedState(generation, revision, limit)
            state = _STATES[rule.algorithm](value, rule)
            if state is not None:
                # To call the class itself takes 0.4 µs longer, and this is done for every bucket of every reply.
                return tuple.__new__(SharedState, (generation, revision, limit, state))
    message = "the shared state holds something else where a bucket should be"
    raise StoreCorruptError(message)


def _token_bucket(value: bytes, rule: Rule) -> BucketState:
    if len(value) != _TOKEN_BUCKET.size:
        return None
    tokens, units, latest_us = _TOKEN_BUCKET.unpack(value)
    if tokens > _LARGEST or units >= rule.window_us or latest_us > _LARGEST:
        return None
    return tokens * rule.window_us + units, latest_us


def _fixed_window(value: bytes, _rule: Rule) -> BucketState:
    if len(value) != _FIXED_WINDOW.size:
        return None
    count, latest_us = _FIXED_WINDOW.unpack(value)
    return (count, latest_us) if count <= _LARGEST and latest_us <= _LARGEST else None


def _sliding_window(value: bytes, _rule: Rule) -> BucketState:
    """The log as :mod:`ratelimitd.algorithms.sliding_window` has it: all times, then all sums.

    Only the ends are looked at: enough that no check of the log can fail.
    """
    runs, rest = divmod(len(value) - _LOG_HEAD_BYTES, _ENTRY_BYTES)
    if rest or not 1 <= runs <= MAX_RUNS:
        return None
    cells = array("q", value[_HEAD.size :])
    if sys.byteorder == "big":
        cells.byteswap()
    times, sums = cells[1::2], cells[::2]
    if 0 <= times[0] <= times[-1] <= _LARGEST and 0 <= sums[0] < sums[-1] <= _LARGEST:
        return times.tobytes() + sums.tobytes()
    return None


_STATES: Final = MappingProxyType(
    {
        Algorithm.TOKEN_BUCKET: _token_bucket,
        Algorithm.FIXED_WINDOW: _fixed_window,
        Algorithm.SLIDING_WINDOW: _sliding_window,
    }
)
