"""Rate limit of a warning: at most one per interval, with the number of events since the last."""

from __future__ import annotations

import threading
from typing import Final

from ratelimitd_client.clock import Clock

INTERVAL_S: Final = 1.0


class LogThrottle:
    """Counts events and decides when to log them. Threads may share it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._next_s = clock.monotonic_s()
        self._unlogged = 0

    def count(self) -> int:
        """Count an event. Return the number to log, or 0 within the interval after the last.

        An event that comes while another thread is counting is not counted.
        """
        # Never block for a warning: a lock that was held during a fork is never released.
        if not self._lock.acquire(blocking=False):
            return 0
        try:
            self._unlogged += 1
            now_s = self._clock.monotonic_s()
            if now_s < self._next_s:
                return 0
            self._next_s = now_s + INTERVAL_S
            events, self._unlogged = self._unlogged, 0
            return events
        finally:
            self._lock.release()
