"""Calendar windows against a brute-force search of the local clock."""

from __future__ import annotations

import datetime as dt
from importlib.resources import files
from io import BytesIO
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest

from ratelimitd.algorithms import fixed_window
from ratelimitd.algorithms.calendar_window import (
    Window,
    in_force,
    is_time_zone,
    time_zones,
    window_at,
)
from ratelimitd.model import (
    INT32_MAX,
    MAX_TIME_US,
    NOMINAL_SECONDS,
    US_PER_S,
    Algorithm,
    Calendar,
    Limit,
    Period,
)

HOUR_S, DAY_S = 3_600, 86_400
SAMPLE = (
    "UTC",
    "Africa/Cairo",  # summer time begins at midnight
    "America/Asuncion",
    "America/Havana",
    "Asia/Beirut",
    "Australia/Lord_Howe",  # by half an hour
    "Europe/Berlin",
    "Pacific/Chatham",  # 45 minutes
)


def at(text):
    return int(dt.datetime.fromisoformat(text).replace(tzinfo=dt.UTC).timestamp())


def windows(calendar, from_s, until_s):
    found = [window_at(calendar, from_s * US_PER_S)]
    while found[-1].end_s < until_s:
        found.append(window_at(calendar, found[-1].end_s * US_PER_S))
    return found


def data_of(name):
    return (files("tzdata") / "zoneinfo").joinpath(*name.split("/")).read_bytes()


def distinct_zones():
    """Return one name of each time zone, because many have several."""
    return list({data_of(name): name for name in sorted(time_zones(), reverse=True)}.values())


def first_instants(zone, from_s, until_s):
    """Return {date: Unix seconds of its first instant}, by reading the local clock."""

    def date(at_s):
        return dt.datetime.fromtimestamp(at_s, zone).date()

    found, latest, before_s = {}, date(from_s), from_s
    for hour_s in range(from_s, until_s, 3 * HOUR_S):
        reached = date(hour_s)
        if reached <= latest:
            before_s = hour_s
            continue
        # Search the first quarter of an hour with the new date, then the second in it.
        quarter_s = next(
            one for one in range(before_s - 2 * HOUR_S, hour_s + 1, 900) if date(one) > latest
        )
        low_s, high_s = quarter_s - 900, quarter_s
        while high_s - low_s > 1:
            middle_s = (low_s + high_s) // 2
            low_s, high_s = (low_s, middle_s) if date(middle_s) > latest else (middle_s, high_s)
        while latest < reached:
            latest += dt.timedelta(days=1)
            found[latest] = high_s
        before_s = hour_s
    return found


def assert_days_are_those_of_the_wall(name, from_s, until_s):
    zone = ZoneInfo.from_file(BytesIO(data_of(name)))
    starts = first_instants(zone, from_s, until_s)
    days = windows(Calendar(Period.DAY, name), from_s, until_s)
    assert {one.start_s for one in days[1:-1]} <= set(starts.values())
    assert set(starts.values()) <= {one.start_s for one in days} | {days[-1].end_s}
    for window in days:
        for at_s in (window.start_s, window.end_s - 1):
            found = window_at(Calendar(Period.DAY, name), at_s * US_PER_S)
            assert found == window
    for period, begins in (
        (Period.WEEK, lambda date: date.weekday() == 0),
        (Period.MONTH, lambda date: date.day == 1),
    ):
        wanted = [start_s for date, start_s in starts.items() if begins(date)]
        found = windows(Calendar(period, name), wanted[0], wanted[-1])
        assert [one.start_s for one in found] == wanted[:-1]


@pytest.mark.parametrize("name", SAMPLE)
def test_windows_match_the_local_clock(name):
    assert_days_are_those_of_the_wall(name, at("2023-01-01"), at("2025-01-01"))


@pytest.mark.deep
@pytest.mark.parametrize("name", distinct_zones())
def test_windows_of_every_time_zone_match_the_local_clock(name):
    assert_days_are_those_of_the_wall(name, at("2020-01-01"), at("2041-01-01"))


@pytest.mark.deep
@pytest.mark.parametrize("period", Period)
@pytest.mark.parametrize("name", [*SAMPLE, "America/Toronto", "Pacific/Apia", "Pacific/Kwajalein"])
def test_windows_have_neither_gaps_nor_overlaps(name, period):
    found = windows(Calendar(period, name, 31), at("1970-01-02"), at("2015-01-01"))
    for window, following in pairwise(found):
        assert window.start_s < window.end_s == following.start_s
    for window in found:
        assert window_at(Calendar(period, name, 31), window.end_s * US_PER_S - 1) == window


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("Europe/Berlin", True), ("europe/berlin", False), ("../zones", False), ("", False)],
)
def test_a_time_zone_is_known_by_its_exact_name(name, is_one):
    assert is_time_zone(name) is is_one


def test_a_day_whose_midnight_does_not_exist_begins_after_the_gap():
    window = window_at(Calendar(Period.DAY, "America/Sao_Paulo"), at("2018-11-04T12:00") * US_PER_S)
    assert window == (at("2018-11-04T03:00"), at("2018-11-05T02:00"))


def test_a_day_whose_midnight_is_inside_a_gap_begins_after_it():
    # At 23:30 the clocks went forward to 00:30; no zone has done so since 1970.
    window = window_at(Calendar(Period.DAY, "America/Toronto"), at("1919-03-31T12:00") * US_PER_S)
    assert window == (at("1919-03-31T04:30"), at("1919-04-01T04:00"))


def test_a_day_with_two_midnights_begins_at_the_first():
    calendar = Calendar(Period.DAY, "America/Havana")
    window = window_at(calendar, at("2024-11-03T12:00") * US_PER_S)
    assert window == (at("2024-11-03T04:00"), at("2024-11-04T05:00"))
    assert window_at(calendar, at("2024-11-03T05:30") * US_PER_S) == window


def test_the_hour_before_a_second_midnight_belongs_to_the_new_day():
    # At 00:01 the clocks went back by two hours.
    calendar = Calendar(Period.DAY, "America/St_Johns")
    window = window_at(calendar, at("1988-10-30T12:00") * US_PER_S)
    again_s = window.start_s + 120
    assert dt.datetime.fromtimestamp(again_s, ZoneInfo("America/St_Johns")).day == 29
    assert window_at(calendar, again_s * US_PER_S) == window


def test_a_skipped_day_has_no_window():
    zone = Calendar(Period.DAY, "Pacific/Apia")
    last = window_at(zone, at("2011-12-30T09:59") * US_PER_S)
    following = window_at(zone, last.end_s * US_PER_S)
    assert (last, following) == (
        (at("2011-12-29T10:00"), at("2011-12-30T10:00")),
        (at("2011-12-30T10:00"), at("2011-12-31T10:00")),
    )


@pytest.mark.parametrize(
    ("anchor_day", "now", "start", "end"),
    [
        (1, "2026-02-14", "2026-02-01", "2026-03-01"),
        (15, "2026-02-14", "2026-01-15", "2026-02-15"),
        (15, "2026-02-15", "2026-02-15", "2026-03-15"),
        (31, "2026-02-14", "2026-01-31", "2026-02-28"),
        (31, "2026-02-28", "2026-02-28", "2026-03-31"),
        (30, "2024-02-29", "2024-02-29", "2024-03-30"),
        (31, "2026-12-31", "2026-12-31", "2027-01-31"),
        (31, "2027-01-01", "2026-12-31", "2027-01-31"),
    ],
)
def test_a_month_begins_on_its_anchor_day_or_its_last(anchor_day, now, start, end):
    found = window_at(Calendar(Period.MONTH, "UTC", anchor_day), at(now) * US_PER_S)
    assert found == (at(start), at(end))


def test_a_week_begins_on_monday():
    found = window_at(Calendar(Period.WEEK, "Europe/Berlin"), at("2026-03-29T12:00") * US_PER_S)
    assert found == (at("2026-03-22T23:00"), at("2026-03-29T22:00"))


def test_the_earliest_and_the_latest_time_have_windows():
    assert window_at(Calendar(Period.MONTH, "Asia/Tokyo"), 0).start_s < 0
    for period in Period:
        window = window_at(Calendar(period, "Asia/Tokyo"), MAX_TIME_US)
        assert window.start_s <= MAX_TIME_US // US_PER_S < window.end_s


@pytest.mark.parametrize(
    "now", ["1970-01-01", "2003-05-06", "2026-11-24", "2040-02-03", "2255-06-01"]
)
@pytest.mark.parametrize("period", Period)
def test_a_window_in_force_ends_with_the_calendar_window(now, period):
    calendar = Calendar(period, "Asia/Kathmandu")
    window = window_at(calendar, at(now) * US_PER_S)
    limit = Limit(
        limit=2,
        window_seconds=NOMINAL_SECONDS[period],
        algorithm=Algorithm.FIXED_WINDOW,
        calendar=calendar,
    )
    found = in_force(limit, window)
    assert 0 < found.window_seconds <= INT32_MAX
    state = None
    for at_us in (max(0, window.start_s) * US_PER_S, window.end_s * US_PER_S - 1):
        allowed, _, reset_time, _, _, state = fixed_window.decide(state, found, at_us, 1)
        assert allowed
        assert reset_time == window.end_s
    denied = fixed_window.decide(state, found, (window.end_s - 5) * US_PER_S, 1)
    assert denied[:4] == (False, 0, window.end_s, 5)
    too_much = fixed_window.decide(state, found, (window.end_s - 5) * US_PER_S, 3)
    assert too_much[3] == window.end_s - window.start_s


def test_a_window_whose_end_exceeds_31_bits_is_divided_into_equal_parts():
    limit = Limit(limit=1, window_seconds=1, algorithm=Algorithm.FIXED_WINDOW)
    end_s = 2**32 + 4
    found = in_force(limit, Window(end_s - DAY_S, end_s))
    assert end_s % found.window_seconds == 0
    assert DAY_S < found.window_seconds <= INT32_MAX
