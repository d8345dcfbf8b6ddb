"""Calendar windows: the days, weeks and months of a time zone.

Each window has a bucket of its own, whose key contains the window's start: nodes with different time-zone data never
share a wrong count, and the shared state needs no time zones. Time zones come from the pinned package ``tzdata`` alone,
never from the machine. See ADR 0048.

Pure, except that the first use of a time zone reads it from that package.
"""

from __future__ import annotations

import datetime as dt
from calendar import monthrange
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo

from ratelimitd.model import INT32_MAX, US_PER_S, Calendar, Limit, Period

_ONE_DAY: Final = dt.timedelta(days=1)
_ONE_WEEK: Final = dt.timedelta(days=7)
_DAY_S: Final = 86_400

# equivalent: a start that is not cached is computed again
REMEMBERED_STARTS: Final = 4_096
"""Dates whose start is cached: two for each calendar in use. About 1 MB."""


class Window(NamedTuple):
    """One calendar window: from ``start_s`` on, before ``end_s``, in Unix seconds."""

    start_s: int
    end_s: int


@lru_cache(1)
def time_zones() -> frozenset[str]:
    """Return the names of all time zones."""
    return frozenset((files("tzdata") / "zones").read_text(encoding="utf-8").split())


def is_time_zone(name: str) -> bool:
    """Return whether a time zone exists, and load it, so that no check waits for a file."""
    return name in time_zones() and _zone(name).key == name


def window_at(calendar: Calendar, now_us: int) -> Window:
    """Return the window of a time in µs since the Unix epoch. Windows cover all times and do not overlap."""
    now_s = now_us // US_PER_S
    today = dt.datetime.fromtimestamp(now_s, _zone(calendar.time_zone)).date()
    first = _first_day(calendar, today)
    following = _following(calendar, first)
    start_s, end_s = (_start_of(calendar.time_zone, day) for day in (first, following))
    while end_s <= now_s:
        # The clocks went back over midnight: the previous date begins again, within the new window.
        following = _following(calendar, following)
        start_s, end_s = end_s, _start_of(calendar.time_zone, following)
    return Window(start_s, end_s)


def in_force(limit: Limit, window: Window) -> Limit:
    """Return the limit of one calendar window, as a fixed window with the same end.

    Fixed windows end at multiples of their length. The time from the epoch to the end of a calendar window is such a
    length; if it exceeds 31 bits, the largest equal parts of it that fit are used.
    """
    parts = window.end_s // (INT32_MAX + 1) + 1
    while window.end_s % parts:
        parts += 1
    found = replace(limit, window_seconds=window.end_s // parts)
    # Its bucket expires after the length of the calendar window, not after the decades since the epoch.
    object.__setattr__(found, "full_after_s", window.end_s - window.start_s)
    return found


def _first_day(calendar: Calendar, day: dt.date) -> dt.date:
    """Return the date at which the window of ``day`` begins."""
    if calendar.period is Period.DAY:
        return day
    if calendar.period is Period.WEEK:
        return day - day.weekday() * _ONE_DAY
    first = _anchored(day.year, day.month, calendar.anchor_day)
    if first <= day:
        return first
    last_month = day.replace(day=1) - _ONE_DAY
    return _anchored(last_month.year, last_month.month, calendar.anchor_day)


def _following(calendar: Calendar, first: dt.date) -> dt.date:
    """Return the date at which the window after that of ``first`` begins."""
    if calendar.period is Period.DAY:
        return first + _ONE_DAY
    if calendar.period is Period.WEEK:
        return first + _ONE_WEEK
    return _anchored(first.year + first.month // 12, first.month % 12 + 1, calendar.anchor_day)


def _anchored(year: int, month: int, anchor_day: int) -> dt.date:
    return dt.date(year, month, min(anchor_day, monthrange(year, month)[1]))


@lru_cache(REMEMBERED_STARTS)
def _start_of(time_zone: str, day: dt.date) -> int:
    """Return the first instant of ``day`` or, where the zone skips it, of a later date, in Unix seconds."""
    zone = _zone(time_zone)
    midnight = dt.datetime(day.year, day.month, day.day, tzinfo=zone)  # of two, the first
    start_s = int(midnight.timestamp())
    if dt.datetime.fromtimestamp(start_s, zone).replace(tzinfo=None) == midnight.replace(
        tzinfo=None
    ):
        return start_s
    # The clocks skip this midnight, at one instant within the day before.
    before_s = start_s - _DAY_S
    while start_s - before_s > 1:
        middle_s = (before_s + start_s) // 2
        if dt.datetime.fromtimestamp(middle_s, zone).date() < day:
            before_s = middle_s
        else:
            start_s = middle_s
    return start_s


@lru_cache(1_024)  # equivalent: more than there are time zones
def _zone(name: str) -> ZoneInfo:
    # From the package's file: by name, zoneinfo may find the machine's.
    with (files("tzdata") / "zoneinfo").joinpath(*name.split("/")).open("rb") as file:
        return ZoneInfo.from_file(file, key=name)
