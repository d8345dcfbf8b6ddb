"""The source of time of a client: a monotonic clock for pauses, and the wall clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time: :class:`SystemClock`, or the ``ManualClock`` of :mod:`ratelimitd_client.testing`."""

    def monotonic_s(self) -> float:
        """Return seconds since an arbitrary time; they never decrease."""
        ...

    def now_s(self) -> float:
        """Return the Unix time in seconds."""
        ...


class SystemClock:
    """The clocks of the system."""

    def monotonic_s(self) -> float:
        """Return the monotonic clock."""
        return time.monotonic()

    def now_s(self) -> float:
        """Return the wall clock."""
        return time.time()
