"""Packs the states of idle shared buckets into one number each. Pure."""

from __future__ import annotations

from typing import Final, TypeAlias

from ratelimitd.ledger.accounts import BucketState
from ratelimitd.ledger.shared_state import SharedState

# A packed state is one integer, which the garbage collector does not track, or two objects with a log or a burst:
#     spent · generation (31 bits) · revision (63 bits) · limit (31 bits) · latest_us (53 bits) · whether it is not full
Packed: TypeAlias = int | tuple[int, bytes | int]
"""The numbers of a state, with its log or its burst if it has one; the collector stops tracking such a tuple."""

LATEST_SHIFT: Final = 1
_LIMIT_SHIFT: Final = LATEST_SHIFT + 53
_REVISION_SHIFT: Final = _LIMIT_SHIFT + 31
_GENERATION_SHIFT: Final = _REVISION_SHIFT + 63
SPENT_SHIFT: Final = _GENERATION_SHIFT + 31

_LATEST_MASK: Final = (1 << 53) - 1
_LIMIT_MASK: Final = (1 << 31) - 1
_GENERATION_MASK: Final = (1 << 31) - 1
_REVISION_MASK: Final = (1 << 63) - 1
HEAD_MASK: Final = (1 << SPENT_SHIFT) - (1 << _LIMIT_SHIFT)
"""Generation, revision and limit, at their places."""


def pack(shared: SharedState) -> Packed:
    """Pack a state."""
    # Refunds are left out: they only order two states of the same time.
    generation, revision, limit, state, burst, _ = shared
    number = generation << _GENERATION_SHIFT | revision << _REVISION_SHIFT | limit << _LIMIT_SHIFT
    if isinstance(state, bytes):
        return number, state
    if state is not None:
        # The other fields of a fixed window matter to late spends only, and a packed bucket has none.
        number |= state[0] << SPENT_SHIFT | state[1] << LATEST_SHIFT | 1
    return (number, burst) if burst else number


def numbers_of(packed: int) -> tuple[int, tuple[int, int] | None]:
    """Return the limit of a packed state without a log or a burst, and the algorithm's state."""
    limit = packed >> _LIMIT_SHIFT & _LIMIT_MASK
    if packed & 1:
        return limit, (packed >> SPENT_SHIFT, packed >> LATEST_SHIFT & _LATEST_MASK)
    return limit, None


def generation_of(packed: int) -> int:
    """Return the generation of a packed state."""
    return packed >> _GENERATION_SHIFT & _GENERATION_MASK


def unpack(packed: Packed) -> SharedState:
    """Unpack a state."""
    state: BucketState
    number, more = packed if isinstance(packed, tuple) else (packed, 0)
    limit, state = numbers_of(number)
    burst = 0
    if isinstance(more, bytes):
        state = more
    else:
        burst = more
    revision = number >> _REVISION_SHIFT & _REVISION_MASK
    fields = (generation_of(number), revision, limit, state, burst, 0)
    # To call the class itself takes 0.2 µs longer.
    return tuple.__new__(SharedState, fields)
