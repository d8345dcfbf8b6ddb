"""Concurrency: at most ``limit`` slots at once, each owned by a hold until that is settled or ends.

Pure. The state is the slots in use; holds take and free them, a check is judged by them and takes none.
"""

from __future__ import annotations

from bisect import bisect_right, insort
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

_ROUND_UP: Final = US_PER_S - 1


class Slots:
    """Slots in use, by (end in µs, number of the hold); a hold has at least one."""

    __slots__ = ("_ends", "_taken", "used")

    def __init__(self) -> None:
        self.used = 0
        self._ends: list[tuple[int, bytes]] = []
        self._taken: dict[bytes, tuple[int, int]] = {}

    def __len__(self) -> int:
        """Return the number of holds."""
        return len(self._taken)

    def take(self, number: bytes, end_us: int, slots: int) -> None:
        """Give a hold ``slots`` until ``end_us``, in place of those it has."""
        self.free(number)
        self._taken[number] = end_us, slots
        insort(self._ends, (end_us, number))
        self.used += slots

    def free(self, number: bytes) -> int:
        """Free the slots of a hold, and return how many there were."""
        end_us, slots = self._taken.pop(number, (0, 0))
        if slots:
            del self._ends[bisect_right(self._ends, (end_us, number)) - 1]
            self.used -= slots
        return slots

    def expire(self, now_us: int) -> list[bytes]:
        """Free the slots of the holds that have ended, and return these."""
        ended = bisect_right(self._ends, (now_us, b"\xff" * 17))
        numbers = [number for _, number in self._ends[:ended]]
        for number in numbers:
            self.used -= self._taken.pop(number)[1]
        del self._ends[:ended]
        return numbers

    @property
    def latest_us(self) -> int:
        """When the last slot ends; 0 if none is in use."""
        return self._ends[-1][0] if self._ends else 0

    def free_at_us(self, slots: int) -> int:
        """Return when so many of the slots in use, at least one and at most all, have ended."""
        for end_us, number in self._ends:
            slots -= self._taken[number][1]
            if slots <= 0:
                return end_us
        return self.latest_us

    def used_at(self, now_us: int) -> int:
        """Return how many slots are in use at ``now_us``."""
        ended = bisect_right(self._ends, (now_us, b"\xff" * 17))
        return self.used - sum(self._taken[number][1] for _, number in self._ends[:ended])


def decide(state: Slots | None, rule: Limit, now_us: int, cost: int) -> Outcome:
    """Decide one check of ``cost`` slots at ``now_us`` (µs since the Unix epoch).

    Returns:
        The outcome; its state is the given object: a check takes no slot. ``remaining`` are the slots free without it.
    """
    used = 0 if state is None else state.used_at(now_us)
    return outcome(state, rule, now_us, cost, used=used, remaining=max(0, rule.limit - used))


def outcome(
    state: Slots | None, rule: Limit, now_us: int, cost: int, *, used: int, remaining: int
) -> Outcome:
    """Return what is said of a check of ``cost`` slots where ``used`` are in use; ``remaining`` is told."""
    latest_us = max(now_us, state.latest_us) if state is not None else now_us
    reset_time = (latest_us + _ROUND_UP) // US_PER_S
    if cost > rule.limit:
        return DENIED, remaining, reset_time, rule.window_seconds, COST_EXCEEDS_LIMIT, state  # type: ignore[return-value]
    if used + cost > rule.limit:
        retry_after = _until(state, now_us, rule.limit, used, cost)
        return DENIED, remaining, reset_time, max(1, retry_after), LIMIT_EXCEEDED, state  # type: ignore[return-value]
    retry_after = 0 if remaining else _until(state, now_us, rule.limit, used, 1)
    return ALLOWED, remaining, reset_time, retry_after, WITHIN_LIMIT, state  # type: ignore[return-value]


def _until(state: Slots | None, now_us: int, limit: int, used: int, cost: int) -> int:
    """Return in how many seconds, rounded up, so many of ``used`` slots have ended that ``cost`` are free."""
    if state is None or used <= 0:
        return 0
    freed = used + cost - limit + (state.used - used)
    free_us = state.free_at_us(max(1, freed))
    return min(max(0, -(-(free_us - now_us) // US_PER_S)), INT32_MAX)
