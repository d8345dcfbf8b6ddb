"""How long to wait before the next attempt: longer from failure to failure, and not in step with other nodes."""

from __future__ import annotations

import random as random_source
from collections.abc import Callable
from typing import Final

FIRST_S: Final = 0.05
LONGEST_S: Final = 1.0
"""A server that is back is found within a second; the attempts of a whole cluster are nothing for it."""


class Backoff:
    """The pauses of one thing that is tried again and again. ``random`` (0 to 1) is there for tests."""

    __slots__ = ("_pause_s", "_random")

    def __init__(self, random: Callable[[], float] = random_source.random) -> None:
        self._random = random
        self._pause_s = FIRST_S

    def next_s(self) -> float:
        """Seconds to wait now: doubled from call to call up to ``LONGEST_S``, less up to a half at random."""
        pause_s = self._pause_s
        self._pause_s = min(LONGEST_S, 2 * pause_s)
        return pause_s * (1 - self._random() / 2)

    def reset(self) -> None:
        """It worked: begin with the first pause again."""
        self._pause_s = FIRST_S
