"""Comparison of answers, field by field."""

import pytest

from ratelimitd.cli.conformance.cases import ANY, Answer
from ratelimiter.v1 import ratelimiter_pb2 as pb

DENIED = Answer(False, 0, 1_700_006_460, 40, "LIMIT_EXCEEDED", 2, 60)


def test_response_is_read_with_the_contracts_names():
    response = pb.RateLimitResponse(
        reset_time=1_700_006_460,
        retry_after_seconds=40,
        reason=pb.LIMIT_EXCEEDED,
        limit=2,
        window_seconds=60,
        rule_id="any",
    )
    assert Answer.of(response) == DENIED


def test_reason_of_a_later_release_is_shown_by_number():
    assert Answer.of(pb.RateLimitResponse(reason=99)).reason == "99"


@pytest.mark.parametrize(
    ("change", "differences"),
    [
        ({}, []),
        ({"allowed": True, "reason": "WITHIN_LIMIT"}, ["allowed", "reason"]),
        ({"remaining_tokens": 1}, ["remaining_tokens"]),
        (
            {"reset_time": 1_700_006_461, "retry_after_seconds": 41},
            ["reset_time", "retry_after_seconds"],
        ),
        ({"limit": 3, "window_seconds": 61}, ["limit", "window_seconds"]),
    ],
)
def test_every_different_field_is_named(change, differences):
    assert DENIED.differences(DENIED._replace(**change)) == differences


def test_only_times_may_differ_by_the_tolerance():
    near = DENIED._replace(reset_time=1_700_006_459, retry_after_seconds=41, remaining_tokens=1)
    assert DENIED.differences(near, tolerance_s=1) == ["remaining_tokens"]
    assert DENIED.differences(DENIED._replace(retry_after_seconds=42), tolerance_s=1)


def test_time_that_depends_on_the_servers_clock_is_not_compared():
    slots = DENIED._replace(reset_time=ANY, retry_after_seconds=ANY)
    assert slots.differences(DENIED) == []
    assert slots.differences(DENIED._replace(remaining_tokens=1)) == ["remaining_tokens"]
    assert DENIED.differences(slots) == ["reset_time", "retry_after_seconds"]


def test_later_answer_has_later_times():
    assert DENIED.later(7) == DENIED._replace(reset_time=1_700_006_467)


STATUSES = [
    pb.LimitStatus(rule_id="b", name="day", allowed=True, remaining_tokens=3, reason=pb.WITHIN_LIMIT),
    pb.LimitStatus(rule_id="a", name="s", allowed=False, retry_after_seconds=1, reason=pb.LIMIT_EXCEEDED),
    pb.LimitStatus(rule_id="a", name="default", allowed=True, reason=pb.WITHIN_LIMIT),
]  # fmt: skip


def test_limits_are_named_by_the_place_of_their_rule_with_the_deciding_one_first():
    told = Answer.of(pb.RateLimitResponse(limits=STATUSES), ["a", "b"]).limits
    assert [(one.rule, one.name) for one in told] == [(1, "day"), (0, "default"), (0, "s")]
    other = Answer.of(pb.RateLimitResponse(limits=STATUSES[1:]), ["b"]).limits
    assert [one.rule for one in other] == [-1, -1]
    assert Answer.of(pb.RateLimitResponse(limits=STATUSES)).limits == ()


def test_single_limit_is_taken_from_the_answer():
    response = pb.RateLimitResponse(
        rule_id="a", limit_name="s", allowed=True, remaining_tokens=7, reason=pb.WITHIN_LIMIT
    )
    [told] = Answer.of(response, ["a"]).limits
    assert told == (0, "s", True, 7, 0, 0, "WITHIN_LIMIT")


def test_difference_in_a_limit_is_named_by_its_path():
    expected = Answer.of(pb.RateLimitResponse(limits=STATUSES), ["a", "b"])
    fewer = Answer.of(pb.RateLimitResponse(limits=STATUSES[:1]), ["a", "b"])
    changed = [pb.LimitStatus(rule_id="b", name="day", remaining_tokens=2), *STATUSES[1:]]
    got = Answer.of(pb.RateLimitResponse(limits=changed), ["a", "b"])
    assert expected.differences(got) == [
        "limits[0].allowed", "limits[0].remaining_tokens", "limits[0].reason",
    ]  # fmt: skip
    assert {name.split(".")[0] for name in expected.differences(fewer)} == {
        "limits[1]",
        "limits[2]",
    }
    assert expected.differences(expected) == []
