"""Pauses between attempts at something that fails: longer from failure to failure, and not in step with other nodes.

Never waits, and never knows what is attempted.
"""

from __future__ import annotations

import random as random_source
from collections.abc import Callable


class Backoff:
    """The pauses of one thing that is tried again and again: doubled from ``first_s`` up to ``longest_s``.

    ``random`` (0 to 1) is there for tests.
    """

    __slots__ = ("_first_s", "_longest_s", "_pause_s", "_random")

    def __init__(
        self,
        first_s: float,
        longest_s: float,
        random: Callable[[], float] = random_source.random,
    ) -> None:
        self._first_s = self._pause_s = first_s
        self._longest_s = longest_s
        self._random = random

    def next_s(self) -> float:
        """Seconds to wait now, less than the whole pause by up to a half at random."""
        pause_s = self._pause_s
        self._pause_s = min(self._longest_s, 2 * pause_s)
        return pause_s * (1 - self._random() / 2)

    def reset(self) -> None:
        """It worked: begin with the first pause again."""
        self._pause_s = self._first_s
