"""Which time a check is judged at: the caller's timestamp, the node's clock, or a refusal. See ADR 0005.

Pure: the node's time is an argument.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

from ratelimitd.errors import CheckInvalidError, FieldViolation
from ratelimitd.model import MAX_TIME_US, US_PER_S

TOLERANCE_US: Final = 5 * US_PER_S
"""A caller's clock may differ by that much, and by a tenth of the window at most."""

# A timestamp's unit follows its magnitude: seconds below 10^11 (the year 5138), then ms, µs, ns.
_SECONDS_BELOW: Final = 10**11
_MILLISECONDS_BELOW: Final = 10**14
_MICROSECONDS_BELOW: Final = 10**17


class TimestampPolicy(enum.StrEnum):
    """What a caller's timestamp is worth (setting TIMESTAMPS)."""

    BOUNDED = "bounded"
    SERVER = "server"
    CALLER = "caller"


class CallerTime(NamedTuple):
    """A timestamp in µs since the Unix epoch, and the resolution it was sent in, in µs."""

    at_us: int
    resolution_us: int


def caller_time(timestamp: int) -> CallerTime:
    """Read a timestamp, whose unit is told by its magnitude. Negative ones stay negative."""
    if timestamp < _SECONDS_BELOW:
        return CallerTime(timestamp * US_PER_S, US_PER_S)
    if timestamp < _MILLISECONDS_BELOW:
        return CallerTime(timestamp * 1000, 1000)
    if timestamp < _MICROSECONDS_BELOW:
        return CallerTime(timestamp, 1)
    return CallerTime(timestamp // 1000, 1)


def trusted(timestamp: int) -> int:
    """The time to judge at under the policy ``caller``, in µs.

    Raises:
        CheckInvalidError: the timestamp is before 1970 or after 2255.
    """
    at_us = caller_time(timestamp).at_us
    if 0 <= at_us <= MAX_TIME_US:
        return at_us
    raise CheckInvalidError(FieldViolation("timestamp", "must be from 1970 to 2255"))


def bounded(timestamp: int, now_us: int, window_us: int) -> int | None:
    """The time to judge at under the policy ``bounded``, in µs; ``None`` when the timestamp is out of tolerance.

    Where the node's clock agrees within the timestamp's resolution, the node's finer reading is the better one.
    """
    at_us, resolution_us = caller_time(timestamp)
    error_us = abs(at_us - now_us)
    if error_us <= resolution_us:
        return now_us
    if error_us <= min(TOLERANCE_US, window_us // 10):
        return at_us
    return None
