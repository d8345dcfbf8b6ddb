"""How often a warning is written: at once, and then no more than once in an interval, with how many there were."""

from __future__ import annotations

import threading
from typing import Final

from ratelimitd_client.clock import Clock

INTERVAL_S: Final = 1.0


class LogThrottle:
    """Counts what there is to tell, and says when to tell it. Threads may share it."""

    __slots__ = ("_clock", "_lock", "_next_s", "_untold")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._next_s = clock.monotonic_s()
        self._untold = 0

    def count(self) -> int:
        """Count one more; returns how many there were since the last that was told, or 0 if it is too early to tell.

        One that comes while another thread is counting is not counted.
        """
        # Never block for a warning; a lock held during a fork is never released.
        if not self._lock.acquire(blocking=False):
            return 0
        try:
            self._untold += 1
            now_s = self._clock.monotonic_s()
            if now_s < self._next_s:
                return 0
            self._next_s = now_s + INTERVAL_S
            untold, self._untold = self._untold, 0
            return untold
        finally:
            self._lock.release()
