"""Concurrency: at most ``limit`` slots at once, each owned by a hold until that is settled or ends.

Pure. The state is the slots in use. Holds take and free them, one each, whatever they cost; a check takes none.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import Any, Final

from ratelimitd.model import (
    ALLOWED,
    DENIED,
    INT32_MAX,
    LIMIT_EXCEEDED,
    US_PER_S,
    WITHIN_LIMIT,
    Limit,
    Outcome,
)

_ROUND_UP: Final = US_PER_S - 1
_AFTER_ALL: Final = b"\xff" * 17
"""Greater than the number of any hold."""


class Slots:
    """Slots in use: (end in µs, number of the hold) in this order."""

    __slots__ = ("_end_of", "_ends")

    def __init__(self) -> None:
        self._ends: list[tuple[int, bytes]] = []
        self._end_of: dict[bytes, int] = {}

    def __len__(self) -> int:
        """Return how many slots are taken, those included whose hold has ended and was not dropped."""
        return len(self._ends)

    def take(self, number: bytes, end_us: int) -> None:
        """Give a hold a slot until ``end_us``, in place of the one it has."""
        self.free(number)
        self._end_of[number] = end_us
        insort(self._ends, (end_us, number))

    def free(self, number: bytes) -> None:
        """Free the slot of a hold, if it has one."""
        end_us = self._end_of.pop(number, None)
        if end_us is not None:
            del self._ends[bisect_right(self._ends, (end_us, number)) - 1]

    def ends_us(self, now_us: int) -> list[int]:
        """Return when the slots that are in use at ``now_us`` end, in ascending order."""
        ended = bisect_right(self._ends, (now_us, _AFTER_ALL))
        return [end_us for end_us, _ in self._ends[ended:]]


def decide(state: Any, rule: Limit, now_us: int, cost: int) -> Outcome:  # noqa: ARG001 - one slot, whatever it costs
    """Decide at ``now_us`` (µs since the Unix epoch) whether a slot is free; ``state`` are :class:`Slots` or ``None``.

    Returns:
        The outcome; its state is the given object. ``remaining`` are the slots free without this check.
    """
    return outcome(state.ends_us(now_us) if state is not None else (), rule, now_us, state)


def outcome(
    ends_us: Any, rule: Limit, now_us: int, state: Any = None, *, taken: int = 0
) -> Outcome:
    """Return what is said where slots end at these times; of a hold ``taken`` of them is its own."""
    used = len(ends_us)
    remaining = max(0, rule.limit - used)
    reset_time = ((ends_us[-1] if used else now_us) + _ROUND_UP) // US_PER_S
    retry_after = 0
    if not remaining:
        # The first of those that have to end for one to be free.
        free_us = ends_us[used - rule.limit]
        retry_after = min(-(-(free_us - now_us) // US_PER_S), INT32_MAX)
    if used - taken < rule.limit:
        return (ALLOWED, remaining, reset_time, retry_after, WITHIN_LIMIT, state)
    return (DENIED, 0, reset_time, max(1, retry_after), LIMIT_EXCEEDED, state)
