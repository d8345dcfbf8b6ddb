from dataclasses import replace

import pytest

from ratelimitd.model import Algorithm, Calendar, Decision, IdentifierType, Period, Reason, Rule
from ratelimitd.services.convert_envoy import ALL_FIELDS, NO_FIELDS, STANDARD_FIELDS, answer_of
from tests.envoy_messages import Response

NOW_S = 1_000
MINUTE = Rule(
    "minute",
    "/a",
    IdentifierType.USER,
    limit=10,
    window_seconds=60,
    algorithm=Algorithm.FIXED_WINDOW,
)
HALF = Rule(
    "half", "/b", IdentifierType.USER, limit=10, window_seconds=30, algorithm=Algorithm.FIXED_WINDOW
)
PASSED = Decision(True, 4, NOW_S + 20, 0, Reason.WITHIN_LIMIT, MINUTE, MINUTE)
DENIED = Decision(False, 0, NOW_S + 20, 20, Reason.LIMIT_EXCEEDED, MINUTE, MINUTE)
LONGER = Decision(False, 2, NOW_S + 25, 25, Reason.LIMIT_EXCEEDED, HALF, HALF)
NO_RULE = Decision(True, 2**31 - 1, 0, 0, Reason.NO_RULE, None)
GIVEN_UP = Decision(False, 0, NOW_S + 5, 5, Reason.FAIL_OPEN_BREAKER, None)


def answer(*decisions, fields=ALL_FIELDS, now_us=NOW_S * 1_000_000):
    return Response.FromString(answer_of(decisions, now_us, fields))


def added(*decisions, **options):
    return {
        field.key: field.value for field in answer(*decisions, **options).response_headers_to_add
    }


def test_each_descriptor_has_its_status_in_order():
    read = answer(PASSED, NO_RULE, DENIED)
    assert read.overall_code == Response.OVER_LIMIT
    first, second, third = read.statuses
    assert [status.code for status in read.statuses] == [1, 1, 2]
    limit = first.current_limit
    assert (limit.requests_per_unit, limit.unit, limit.name) == (10, 2, "minute")
    assert (first.limit_remaining, first.duration_until_reset.seconds) == (4, 20)
    assert not second.HasField("current_limit")
    assert third.limit_remaining == 0


def test_a_request_is_ok_if_all_descriptors_pass():
    assert answer(PASSED, NO_RULE).overall_code == Response.OK


def test_a_window_without_a_name_in_envoy_has_no_unit():
    assert answer(LONGER).statuses[0].current_limit.unit == 0


@pytest.mark.parametrize(("days", "unit"), [(1, 4), (7, 7), (30, 5), (365, 6)])
def test_a_window_of_envoys_units_has_a_unit(days, unit):
    rule = replace(HALF, window_seconds=days * 86_400)
    assert answer(PASSED._replace(rule=rule, limit=rule)).statuses[0].current_limit.unit == unit


def test_a_calendar_month_has_a_unit():
    month = replace(
        HALF, window_seconds=2_592_000, calendar=Calendar(Period.MONTH, "Europe/Berlin", 15)
    )
    assert answer(PASSED._replace(rule=month, limit=month)).statuses[0].current_limit.unit == 5


def test_a_part_of_a_second_counts_as_one_and_past_times_as_zero():
    assert answer(PASSED, now_us=NOW_S * 10**6 + 1).statuses[0].duration_until_reset.seconds == 20
    late = answer(PASSED, now_us=2 * NOW_S * 10**6)
    assert late.statuses[0].duration_until_reset.seconds == 0


def test_the_fields_are_those_of_the_limit_with_the_least_left():
    assert added(NO_RULE, PASSED, PASSED._replace(remaining=3)) == {
        "RateLimit-Policy": '"minute";q=10;w=60',
        "RateLimit": '"minute";r=3;t=20',
        "X-RateLimit-Limit": "10",
        "X-RateLimit-Remaining": "3",
        "X-RateLimit-Reset": "20",
    }


def test_a_denial_shows_the_limit_with_the_longest_delay():
    assert added(PASSED, LONGER, DENIED) == {
        "Retry-After": "25",
        "RateLimit-Policy": '"half";q=10;w=30',
        "RateLimit": '"half";r=2;t=25',
        "X-RateLimit-Limit": "10",
        "X-RateLimit-Remaining": "2",
        "X-RateLimit-Reset": "25",
    }


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        (STANDARD_FIELDS, ["Retry-After", "RateLimit-Policy", "RateLimit"]),
        (NO_FIELDS, []),
    ],
)
def test_fields_can_be_omitted(fields, names):
    assert [*added(DENIED, fields=fields)] == names


def test_without_a_rule_only_a_denial_adds_fields():
    assert added(NO_RULE) == {}
    assert added(GIVEN_UP) == {"Retry-After": "5"}
