"""Calendar windows: the days, weeks and months of a time zone.

Each window has a bucket of its own, whose key has the window's start: nodes whose time zones differ share no wrong
count, and the shared state knows no time zones. They come from the pinned package ``tzdata`` alone, so that they do not
depend on the machine. See ADR 0048.

Pure, except that a time zone is read from that package when it is first used.
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

# equivalent: what is not remembered is worked out again
REMEMBERED_STARTS: Final = 4_096
"""Dates whose start is remembered: two for each calendar in use. About 1 MB."""


class Window(NamedTuple):
    """One calendar window: from ``start_s`` on, before ``end_s``, in Unix seconds."""

    start_s: int
    end_s: int


@lru_cache(1)
def time_zones() -> frozenset[str]:
    """Return the names of all time zones."""
    return frozenset((files("tzdata") / "zones").read_text(encoding="utf-8").split())


def is_time_zone(name: str) -> bool:
    """Return whether there is such a time zone, and read it, so that no check waits for a file."""
    return name in time_zones() and _zone(name).key == name


def window_at(calendar: Calendar, now_us: int) -> Window:
    """Return the window of a time in µs since the Unix epoch. Windows cover all times and do not overlap."""
    now_s = now_us // US_PER_S
    today = dt.datetime.fromtimestamp(now_s, _zone(calendar.time_zone)).date()
    first = _first_day(calendar, today)
    following = _following(calendar, first)
    start_s, end_s = (_start_of(calendar.time_zone, day) for day in (first, following))
    while end_s <= now_s:
        # The clocks went back over midnight: the day before comes again, and belongs to the new window.
        following = _following(calendar, following)
        start_s, end_s = end_s, _start_of(calendar.time_zone, following)
    return Window(start_s, end_s)


def in_force(limit: Limit, window: Window) -> Limit:
    """Return the limit of one window of a calendar, as a fixed window that holds no time of another.

    The fixed windows of a limit are multiples of its length. The end of a calendar window is such a multiple of itself,
    so the window from the epoch to there has the right end; of later ends it is a part of that time, since lengths have
    31 bits.
    """
    parts = window.end_s // (INT32_MAX + 1) + 1
    while window.end_s % parts:
        parts += 1
    found = replace(limit, window_seconds=window.end_s // parts)
    # A bucket of it is dropped after the length of the calendar window, not after the decades since the epoch.
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
    """Return the first instant at which it is ``day`` or later there, in Unix seconds."""
    zone = _zone(time_zone)
    midnight = dt.datetime(day.year, day.month, day.day, tzinfo=zone)  # of two, the first
    start_s = int(midnight.timestamp())
    if dt.datetime.fromtimestamp(start_s, zone).replace(tzinfo=None) == midnight.replace(
        tzinfo=None
    ):
        return start_s
    # The clocks skip this midnight: between a day before and here there is one instant at which they do.
    before_s = start_s - _DAY_S
    while start_s - before_s > 1:
        middle_s = (before_s + start_s) // 2
        if dt.datetime.fromtimestamp(middle_s, zone).date() < day:
            before_s = middle_s
        else:
            start_s = middle_s
    return start_s


@lru_cache(1_024)  # equivalent: more than there are
def _zone(name: str) -> ZoneInfo:
    # By its own file: what zoneinfo finds by name can be the machine's.
    with (files("tzdata") / "zoneinfo").joinpath(*name.split("/")).open("rb") as file:
        return ZoneInfo.from_file(file, key=name)
