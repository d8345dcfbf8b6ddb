"""The time, as the client needs it: one clock for pauses, one for what answers say of the calendar."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where the client has its time from."""

    def monotonic_s(self) -> float:
        """Seconds that only grow, from wherever they began."""
        ...

    def now_s(self) -> float:
        """Unix time in seconds."""
        ...


class SystemClock:
    """The clocks of the machine."""

    __slots__ = ()

    def monotonic_s(self) -> float:
        """The monotonic clock."""
        return time.monotonic()

    def now_s(self) -> float:
        """The wall clock."""
        return time.time()
