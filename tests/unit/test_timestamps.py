import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimitd.clock import (
    TOLERANCE_US,
    CallerTime,
    TimestampPolicy,
    bounded,
    caller_time,
    trusted,
)
from ratelimitd.errors import CheckInvalidError
from ratelimitd.model import INT32_MAX, MAX_TIME_US

NOW_US = 1_700_006_400_123_456
SECOND_US = 1_000_000
MINUTE_US = 60 * SECOND_US
INT64 = st.integers(-(2**63), 2**63 - 1)


def test_policies_have_the_names_of_the_setting():
    assert list(TimestampPolicy) == ["bounded", "server", "caller"]


@pytest.mark.parametrize(
    ("timestamp", "expected"),
    [
        (1_700_006_400, CallerTime(1_700_006_400_000_000, 1_000_000)),
        (1_700_006_400_123, CallerTime(1_700_006_400_123_000, 1000)),
        (1_700_006_400_123_456, CallerTime(1_700_006_400_123_456, 1)),
        (1_700_006_400_123_456_789, CallerTime(1_700_006_400_123_456, 1)),
    ],
)
def test_one_instant_is_understood_in_seconds_ms_us_and_ns(timestamp, expected):
    assert caller_time(timestamp) == expected


@pytest.mark.parametrize(
    ("timestamp", "expected"),
    [
        (0, CallerTime(0, 1_000_000)),
        (10**11 - 1, CallerTime((10**11 - 1) * 1_000_000, 1_000_000)),
        (10**11, CallerTime(10**14, 1000)),
        (10**14 - 1, CallerTime((10**14 - 1) * 1000, 1000)),
        (10**14, CallerTime(10**14, 1)),
        (10**17 - 1, CallerTime(10**17 - 1, 1)),
        (10**17, CallerTime(10**14, 1)),
        (2**63 - 1, CallerTime((2**63 - 1) // 1000, 1)),
        (-1, CallerTime(-1_000_000, 1_000_000)),
    ],
)
def test_the_unit_changes_exactly_at_the_magnitudes(timestamp, expected):
    assert caller_time(timestamp) == expected


@pytest.mark.parametrize(
    ("timestamp", "expected_us"),
    [
        (1, 1_000_000),
        (1_700_006_400, 1_700_006_400_000_000),
        (MAX_TIME_US // 1000, MAX_TIME_US // 1000 * 1000),
        (MAX_TIME_US, MAX_TIME_US),
    ],
)
def test_a_trusted_timestamp_is_taken_as_it_is(timestamp, expected_us):
    assert trusted(timestamp) == expected_us


@pytest.mark.parametrize("timestamp", [-1, -(2**63), MAX_TIME_US + 1, 2**63 - 1, 10**11 - 1])
def test_a_trusted_timestamp_out_of_range_is_refused_by_the_name_of_its_field(timestamp):
    with pytest.raises(CheckInvalidError) as refused:
        trusted(timestamp)
    (violation,) = refused.value.violations
    assert violation.field == "timestamp"


@pytest.mark.parametrize("seconds", [-1, 0, 1])
def test_whole_seconds_that_agree_give_way_to_the_finer_clock_of_the_node(seconds):
    timestamp = NOW_US // SECOND_US + seconds
    agrees = abs(timestamp * SECOND_US - NOW_US) <= SECOND_US
    assert bounded(timestamp, NOW_US, MINUTE_US) == (NOW_US if agrees else timestamp * SECOND_US)


def test_milliseconds_that_agree_give_way_to_the_finer_clock_of_the_node():
    assert bounded(NOW_US // 1000, NOW_US, MINUTE_US) == NOW_US
    assert bounded(NOW_US // 1000 - 1, NOW_US, MINUTE_US) == (NOW_US // 1000 - 1) * 1000
    at_us = NOW_US // 1000 * 1000
    assert bounded(at_us // 1000 - 1, at_us, MINUTE_US) == at_us, "just one unit apart"


@pytest.mark.parametrize(
    ("window_us", "tolerance_us"),
    [
        (SECOND_US, SECOND_US // 10),
        (50 * SECOND_US, TOLERANCE_US),
        (INT32_MAX * SECOND_US, TOLERANCE_US),
    ],
)
@pytest.mark.parametrize("direction", [-1, 1])
def test_within_the_tolerance_the_callers_time_holds_and_beyond_it_does_not(
    window_us, tolerance_us, direction
):
    within_us = NOW_US + direction * tolerance_us
    assert bounded(within_us, NOW_US, window_us) == within_us
    assert bounded(within_us + direction, NOW_US, window_us) is None


@pytest.mark.parametrize("timestamp", [-1, 1, 2**63 - 1, -(2**63)])
def test_nonsense_is_out_of_tolerance(timestamp):
    assert bounded(timestamp, NOW_US, MINUTE_US) is None


@given(INT64, st.integers(1, INT32_MAX))
def test_no_timestamp_moves_time_by_more_than_the_tolerance(timestamp, window_seconds):
    at_us = bounded(timestamp, NOW_US, window_seconds * SECOND_US)
    assert at_us is None or abs(at_us - NOW_US) <= min(
        TOLERANCE_US, window_seconds * SECOND_US // 10
    )


@given(INT64)
def test_every_timestamp_is_trusted_within_range_or_refused(timestamp):
    try:
        at_us = trusted(timestamp)
    except CheckInvalidError:
        assert not 0 <= caller_time(timestamp).at_us <= MAX_TIME_US
    else:
        assert at_us == caller_time(timestamp).at_us
