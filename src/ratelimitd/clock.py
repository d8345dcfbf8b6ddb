"""Time for the node: a clock that never steps back, anchored to the wall clock and slewed towards it.

Every layer takes a :class:`Clock` instead of reading one, so that tests and simulations own time. See ADR 0005.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from ratelimitd.errors import CheckInvalidError, FieldViolation
from ratelimitd.model import MAX_TIME_US, US_PER_S

SLEW_DIVISOR: Final = 100
"""A correction slews the clock by at most 1/100 of the elapsed time: 10 ms per second."""

# equivalent: an error one µs larger is reported, too
SKEW_ALARM_US: Final = 1_000_000
"""An error above one second is reported: the machine's clock was set."""


class Clock(Protocol):
    """Source of time. Both readings, wall and monotonic, never go backwards."""

    def now_us(self) -> int:
        """Wall time in µs since the Unix epoch."""

    def monotonic_us(self) -> int:
        """µs since an arbitrary start, for measuring durations."""

    def remeasure(self) -> int:
        """Compare with the wall clock, about once a second; return its lead in µs (negative: lag)."""


class SystemClock:
    """Monotonic time anchored to the wall clock.

    If every check read the wall clock, a step of it (NTP, an operator, a resumed machine) would mint or lock tokens.
    The wall clock is therefore read once at the start, and by :meth:`remeasure`, which closes the gap gradually.
    """

    __slots__ = ("_anchor_mono_us", "_anchor_us", "_error_us", "_monotonic_ns", "_wall_ns")

    def __init__(
        self,
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._wall_ns = wall_ns
        self._monotonic_ns = monotonic_ns
        self.anchor()

    def anchor(self) -> None:
        """Adopt the wall time at once, even backwards; only for a node that has not answered a call yet."""
        self._anchor_us = self._wall_ns() // 1000
        self._anchor_mono_us = self._monotonic_ns() // 1000
        self._error_us = 0

    def monotonic_us(self) -> int:
        """µs of the system's monotonic clock."""
        return self._monotonic_ns() // 1000

    def now_us(self) -> int:
        """Wall time in µs: the anchor, the time elapsed since, and the part of the correction that is due."""
        elapsed_us = self._monotonic_ns() // 1000 - self._anchor_mono_us
        error_us = self._error_us
        if not error_us:
            return self._anchor_us + elapsed_us
        due_us = elapsed_us // SLEW_DIVISOR
        if error_us > 0:
            return self._anchor_us + elapsed_us + min(error_us, due_us)
        return self._anchor_us + elapsed_us - min(-error_us, due_us)

    def remeasure(self) -> int:
        """Compare with the wall clock and set the correction; call it about once a second.

        Returns:
            The lead of the wall clock over this one in µs (negative: lag).
        """
        now_us = self.now_us()
        self._anchor_us, self._anchor_mono_us = now_us, self.monotonic_us()
        self._error_us = self._wall_ns() // 1000 - now_us
        return self._error_us


TOLERANCE_US: Final = 5 * US_PER_S
"""Tolerated error of a caller's clock; a tenth of the window if that is less."""

# A timestamp's unit follows its magnitude: seconds below 10^11 (the year 5138), then ms, µs, ns.
_SECONDS_BELOW: Final = 10**11
_MILLISECONDS_BELOW: Final = 10**14
_MICROSECONDS_BELOW: Final = 10**17


class TimestampPolicy(enum.StrEnum):
    """Which timestamps of callers are used (setting TIMESTAMPS)."""

    BOUNDED = "bounded"
    SERVER = "server"
    CALLER = "caller"


class CallerTime(NamedTuple):
    """A timestamp in µs since the Unix epoch, and the resolution in which it was sent, in µs."""

    at_us: int
    resolution_us: int


def caller_time(timestamp: int) -> CallerTime:
    """Convert a timestamp, whose unit follows from its magnitude. Negative ones stay negative."""
    if timestamp < _SECONDS_BELOW:
        return CallerTime(timestamp * US_PER_S, US_PER_S)
    if timestamp < _MILLISECONDS_BELOW:
        return CallerTime(timestamp * 1000, 1000)
    if timestamp < _MICROSECONDS_BELOW:
        return CallerTime(timestamp, 1)
    return CallerTime(timestamp // 1000, 1)


def trusted(timestamp: int) -> int:
    """Return the time of a check under the policy ``caller``, in µs.

    Raises:
        CheckInvalidError: the timestamp is before 1970 or after 2255.
    """
    at_us = caller_time(timestamp).at_us
    if 0 <= at_us <= MAX_TIME_US:
        return at_us
    raise CheckInvalidError(FieldViolation("timestamp", "must be from 1970 to 2255"))


def bounded(timestamp: int, now_us: int, window_us: int) -> int | None:
    """Return the time of a check under the policy ``bounded``, in µs; ``None`` if its timestamp is out of tolerance.

    If the node's clock agrees within the timestamp's resolution, its finer reading is used.
    """
    at_us, resolution_us = caller_time(timestamp)
    error_us = abs(at_us - now_us)
    if error_us <= resolution_us:
        return now_us
    if error_us <= min(TOLERANCE_US, window_us // 10):
        return at_us
    return None
