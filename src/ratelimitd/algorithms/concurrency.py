"""Concurrency: at most ``limit`` holds at once; each owns a slot until it is settled or ends.

Pure. The state is the slots in use. Holds take and free slots; checks only need a free one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import Final

from ratelimitd.model import (
    ALLOWED,
    DENIED,
    INT32_MAX,
    LIMIT_EXCEEDED,
    US_PER_S,
    WITHIN_LIMIT,
    Limit,
    Outcome,
    Reason,
)

_AFTER_ANY_NUMBER: Final = b"\xff" * 17


class Slots:
    """Slots in use, by the number of the hold that owns each until its end."""

    __slots__ = ("_by_end", "_ends")

    def __init__(self) -> None:
        self._ends: dict[bytes, int] = {}
        self._by_end: list[tuple[int, bytes]] = []

    def __len__(self) -> int:
        """Return the number of slots, including ended ones that were not freed yet."""
        return len(self._ends)

    def __contains__(self, number: bytes) -> bool:
        """Return whether the hold of this number has a slot."""
        return number in self._ends

    def take(self, number: bytes, end_us: int) -> None:
        """Give a hold a slot until ``end_us``, replacing the one it has."""
        self.free(number)
        self._ends[number] = end_us
        insort(self._by_end, (end_us, number))

    def free(self, number: bytes) -> bool:
        """Free the slot of a hold; return whether it had one."""
        end_us = self._ends.pop(number, None)
        if end_us is None:
            return False
        del self._by_end[bisect_left(self._by_end, (end_us, number))]
        return True

    def expire(self, now_us: int) -> None:
        """Free the slots that have ended."""
        ended = self._ended(now_us)
        for _, number in self._by_end[:ended]:
            del self._ends[number]
        del self._by_end[:ended]

    def items(self) -> list[tuple[int, bytes]]:
        """Return (end in µs, number of the hold) of each slot, by end."""
        return self._by_end.copy()

    def answer(self, limit: int, now_us: int) -> tuple[bool, int, int, int, Reason]:
        """Return the answer to a check where at most ``limit`` slots may be in use."""
        by_end = self._by_end
        first = self._ended(now_us)
        free = limit - (len(by_end) - first)
        reset_us = by_end[-1][0] if first < len(by_end) else now_us
        reset_time = -(-reset_us // US_PER_S)
        if free > 0:
            return ALLOWED, free, reset_time, 0, WITHIN_LIMIT
        # At the end of this slot fewer than `limit` are in use.
        free_us, _ = by_end[first - free]
        retry_after = min(-(-(free_us - now_us) // US_PER_S), INT32_MAX)
        return DENIED, 0, reset_time, retry_after, LIMIT_EXCEEDED

    def _ended(self, now_us: int) -> int:
        return bisect_right(self._by_end, (now_us, _AFTER_ANY_NUMBER))


def decide(state: Slots | None, rule: Limit, now_us: int, _cost: int) -> Outcome:
    """Decide one check at ``now_us`` (µs since the Unix epoch): it passes if a slot is free, at any cost.

    Returns:
        The outcome; its state is the given object. ``remaining`` is the number of free slots.
    """
    if state is None:
        return (ALLOWED, rule.limit, -(-now_us // US_PER_S), 0, WITHIN_LIMIT, None)
    return (*state.answer(rule.limit, now_us), state)  # type: ignore[return-value]  # states are data elsewhere


def held(state: Slots, rule: Limit, now_us: int) -> Outcome:
    """Return the outcome of a hold that has just taken a slot; ``remaining`` is the number of slots left."""
    _, remaining, reset_time, retry_after, _ = state.answer(rule.limit, now_us)
    return (ALLOWED, remaining, reset_time, retry_after, WITHIN_LIMIT, None)
