"""How long one connection is worked for while others wait. Knows a clock, and nothing of the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

TURN_S: Final = 0.002
"""Bounds on frames and octets keep common calls within it; it is for the dear ones, such as a small message that
inflates to a large one."""

LATE_S: Final = 0.1
"""What waits longer for its turn was left by a peer that did not read for some time; few deadlines are shorter."""


class Turn:
    """The turn of one connection: one object for all its turns. Common calls do not ask the clock; dear ones do.

    Attributes:
        began_s: when the turn began, a reading of ``monotonic_s``.
        came_s: when what is worked on came; deadlines count from there. Earlier than ``began_s`` for what is left over
            from another turn.
        dear: something was done that takes many times what a common call takes, and the clock was not asked since.
    """

    __slots__ = ("_monotonic_s", "began_s", "came_s", "dear")

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        self._monotonic_s = monotonic_s
        self.began_s = self.came_s = 0.0
        self.dear = False

    def begin(self, now_s: float, came_s: float) -> None:
        """Begin a turn."""
        self.began_s = now_s
        self.came_s = came_s

    @property
    def is_late(self) -> bool:
        """Whether what is worked on has waited so long that deadlines may have passed meanwhile."""
        return self.began_s - self.came_s > LATE_S

    def is_over(self) -> bool:
        """Whether its time is used up; to be asked after something dear."""
        self.dear = False
        return self._monotonic_s() - self.began_s > TURN_S
