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
    """Cause → what the document says is free: at once, per answer, per second."""
    found = {}
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        free = re.search(r"free: ([\d,]+), (\d+)(?: \((\w+): (\d+)\))?, (\d+)", line)
        for cause in re.findall(r"`(\w+)`", line.split("|")[1]) if free else ():
            burst, per_work, word, other, per_second = free.groups()
            per_work = other if word and word in cause else per_work
            found[cause] = int(burst.replace(",", "")), int(per_work), int(per_second)
    return found


def test_answers_that_wait_are_bounded_where_the_document_says():
    limits = Limits()
    assert (limits.max_buffered_bytes, limits.max_unread_bytes) == (4 << 20, 32 << 20)
    assert "over 4 MiB new calls of its connection are refused, at 32 MiB it ends" in (
        DOCUMENT.read_text(encoding="utf-8")
    )


def test_what_is_free_is_what_the_document_says():
    assert documented() == {str(cause): tuple(free) for cause, free in ALLOWANCES.items()}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_burst_is_free_to_its_last_frame_and_the_next_one_ends_the_connection(cause):
    meter = AbuseMeter()
    spend(meter, cause, ALLOWANCES[cause].burst)
    with pytest.raises(ConnectionFailureError) as caught:
        meter.charge(cause, 0)
    assert caught.value.code is ErrorCode.ENHANCE_YOUR_CALM
    assert caught.value.cause is cause


@pytest.mark.parametrize("cause", CAUSES)
def test_a_second_makes_room_for_what_a_second_may_hold_and_no_more(cause):
    meter = AbuseMeter()
    spend(meter, cause, ALLOWANCES[cause].burst)
    meter.tick()
    spend(meter, cause, ALLOWANCES[cause].per_second)
    with pytest.raises(ConnectionFailureError):
        meter.charge(cause, 0)


@pytest.mark.parametrize("cause", CAUSES)
def test_work_makes_room_in_proportion_and_no_more(cause):
    meter = AbuseMeter()
    spend(meter, cause, ALLOWANCES[cause].burst)
    spend(meter, cause, 10 * ALLOWANCES[cause].per_work, work=10)
    with pytest.raises(ConnectionFailureError):
        meter.charge(cause, 10)


def test_one_that_was_earned_goes_back_to_the_burst_and_no_further():
    meter = AbuseMeter()
    spend(meter, Cause.RAPID_RESET, ALLOWANCES[Cause.RAPID_RESET].burst)
    meter.charge(Cause.RAPID_RESET, 1)
    with pytest.raises(ConnectionFailureError):
        meter.charge(Cause.RAPID_RESET, 1)


def test_long_rest_makes_room_for_one_burst_not_for_two():
    meter = AbuseMeter()
    cause = Cause.PING_FLOOD
    spend(meter, cause, ALLOWANCES[cause].burst)
    for _ in range(86_400):
        meter.tick()
    spend(meter, cause, ALLOWANCES[cause].burst)
    with pytest.raises(ConnectionFailureError):
        meter.charge(cause, 0)


def test_a_keepalive_ping_every_10_seconds_goes_on_for_days():
    meter = AbuseMeter()
    for _ in range(50_000):
        for _ in range(10):
            meter.tick()
        meter.charge(Cause.PING_FLOOD, 0)


def test_causes_are_counted_apart():
    meter = AbuseMeter()
    for cause in CAUSES:
        spend(meter, cause, ALLOWANCES[cause].burst)
