import re
from pathlib import Path

import pytest

from ratelimitd.http2.errors import Cause, ConnectionFailureError
from ratelimitd.http2.limits import ALLOWANCES, AbuseMeter, Limits
from ratelimitd_wire.codes import ErrorCode

CAUSES = list(ALLOWANCES)


def spend(meter, cause, times, work=0):
    for _ in range(times):
        meter.charge(cause, work)


DOCUMENT = Path(__file__).parents[3] / "docs" / "operations.md"


def documented():
    """Cause → documented allowance: burst, per piece of work, per second."""
    found = {}
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        free = re.search(r"free: ([\d,]+), (\d+)(?: \((\w+): (\d+)\))?, (\d+)", line)
        for cause in re.findall(r"`(\w+)`", line.split("|")[1]) if free else ():
            burst, per_work, word, other, per_second = free.groups()
            per_work = other if word and word in cause else per_work
            found[cause] = int(burst.replace(",", "")), int(per_work), int(per_second)
    return found


def test_bounds_of_pending_answers_are_as_documented():
    limits = Limits()
    assert (limits.max_buffered_bytes, limits.max_unread_bytes) == (4 << 20, 32 << 20)
    assert "over 4 MiB new calls of its connection are refused, at 32 MiB it ends" in (
        DOCUMENT.read_text(encoding="utf-8")
    )


def test_allowances_are_as_documented():
    assert documented() == {str(cause): tuple(free) for cause, free in ALLOWANCES.items()}


@pytest.mark.parametrize("cause", CAUSES)
def test_the_frame_after_a_full_burst_ends_the_connection(cause):
    meter = AbuseMeter()
    spend(meter, cause, ALLOWANCES[cause].burst)
    with pytest.raises(ConnectionFailureError) as caught:
        meter.charge(cause, 0)
    assert caught.value.code is ErrorCode.ENHANCE_YOUR_CALM
    assert caught.value.cause is cause


@pytest.mark.parametrize("cause", CAUSES)
def test_a_tick_frees_the_allowance_of_a_second_and_no_more(cause):
    meter = AbuseMeter()
    spend(meter, cause, ALLOWANCES[cause].burst)
    meter.tick()
    spend(meter, cause, ALLOWANCES[cause].per_second)
    with pytest.raises(ConnectionFailureError):
        meter.charge(cause, 0)


@pytest.mark.parametrize("cause", CAUSES)
def test_work_frees_frames_in_proportion_and_no_more(cause):
    meter = AbuseMeter()
    spend(meter, cause, ALLOWANCES[cause].burst)
    spend(meter, cause, 10 * ALLOWANCES[cause].per_work, work=10)
    with pytest.raises(ConnectionFailureError):
        meter.charge(cause, 10)


def test_a_frame_freed_by_work_can_be_used_once():
    meter = AbuseMeter()
    spend(meter, Cause.RAPID_RESET, ALLOWANCES[Cause.RAPID_RESET].burst)
    meter.charge(Cause.RAPID_RESET, 1)
    with pytest.raises(ConnectionFailureError):
        meter.charge(Cause.RAPID_RESET, 1)


def test_a_long_pause_frees_one_burst_not_two():
    meter = AbuseMeter()
    cause = Cause.PING_FLOOD
    spend(meter, cause, ALLOWANCES[cause].burst)
    for _ in range(86_400):
        meter.tick()
    spend(meter, cause, ALLOWANCES[cause].burst)
    with pytest.raises(ConnectionFailureError):
        meter.charge(cause, 0)


def test_a_keepalive_ping_every_10_seconds_is_allowed_for_days():
    meter = AbuseMeter()
    for _ in range(50_000):
        for _ in range(10):
            meter.tick()
        meter.charge(Cause.PING_FLOOD, 0)


def test_causes_are_counted_separately():
    meter = AbuseMeter()
    for cause in CAUSES:
        spend(meter, cause, ALLOWANCES[cause].burst)
