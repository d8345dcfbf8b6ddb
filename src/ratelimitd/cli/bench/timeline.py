"""How many answers came when: counted in slots of time, so that memory does not grow with the load. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

SLOTS: Final = 100
"""Of the time that was planned; as many again at most for answers that come after its end."""


class Slot(NamedTuple):
    """What came between two moments, in seconds from the beginning."""

    from_s: float
    to_s: float
    answers: int
    errors: int
    max_us: int
    """The longest latency of an answer, in µs."""

    @property
    def rate(self) -> float:
        """Answers a second."""
        return self.answers / (self.to_s - self.from_s)


class Timeline:
    """Answers over ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._width_s = seconds / SLOTS
        self._answers = [0] * (2 * SLOTS)
        self._errors = [0] * (2 * SLOTS)
        self._max_us = [0] * (2 * SLOTS)

    def answered(self, at_s: float, latency_us: int) -> None:
        """An answer came."""
        slot = self._slot(at_s)
        self._answers[slot] += 1
        self._max_us[slot] = max(self._max_us[slot], latency_us)

    def failed(self, at_s: float) -> None:
        """A call ended without one."""
        self._errors[self._slot(at_s)] += 1

    def slots(self, ended_s: float) -> list[Slot]:
        """All slots up to the end, also empty ones. What remains behind the last whole slot is part of that."""
        last = max(0, self._slot(ended_s) - 1)
        slots = []
        for number in range(last + 1):
            until = None if number == last else number + 1
            from_s = number * self._width_s
            slots.append(
                Slot(
                    from_s,
                    ended_s if until is None else until * self._width_s,
                    sum(self._answers[number:until]),
                    sum(self._errors[number:until]),
                    max(self._max_us[number:until]),
                )
            )
        return slots if ended_s else []

    def _slot(self, at_s: float) -> int:
        return min(int(at_s / self._width_s), 2 * SLOTS - 1)
