"""A state of a shared bucket as few objects, none of which the garbage collector looks at for long. Pure.

A tuple of numbers is left alone by the collector once it has been seen; a tuple of tuples is not.
"""

from __future__ import annotations

from typing import TypeAlias, assert_never

from ratelimitd.ledger.shared_state import SharedState

Packed: TypeAlias = (
    tuple[int, int, int] | tuple[int, int, int, bytes] | tuple[int, int, int, int, int]
)
"""(generation, revision, limit), and what the algorithm keeps, spread out."""


def pack(shared: SharedState) -> Packed:
    """The numbers of a state."""
    generation, revision, limit, state = shared
    if state is None:
        return generation, revision, limit
    if isinstance(state, bytes):
        return generation, revision, limit, state
    return generation, revision, limit, state[0], state[1]


def unpack(packed: Packed) -> SharedState:
    """The state of these numbers."""
    match packed:
        case generation, revision, limit:
            return SharedState(generation, revision, limit)
        case generation, revision, limit, log:
            return SharedState(generation, revision, limit, log)
        case generation, revision, limit, spent, latest_us:
            return SharedState(generation, revision, limit, (spent, latest_us))
        case _:
            assert_never(packed)
