"""Decisions and the headers that tell of them."""

import pytest

from ratelimitd_client import Decision, LimitStatus, Reason
from ratelimitd_client.decision import decision_of, refused, unchecked
from ratelimiter.v1 import ratelimiter_pb2 as pb

NOW_S = 1_700_000_000.25

DENIED = decision_of(
    pb.RateLimitResponse(
        allowed=False,
        remaining_tokens=2,
        reset_time=1_700_000_041,
        retry_after_seconds=12,
        reason=pb.LIMIT_EXCEEDED,
        limit=100,
        window_seconds=60,
        rule_id="r",
    ),
    NOW_S,
)
ALLOWED = Decision(
    allowed=True,
    remaining_tokens=99,
    reset_time=1_700_000_041,
    retry_after_seconds=0,
    reason=Reason.WITHIN_LIMIT,
    limit=100,
    window_seconds=60,
    decided_at_s=NOW_S,
)
NO_RULE = Decision(
    allowed=True,
    remaining_tokens=2**31 - 1,
    reset_time=0,
    retry_after_seconds=0,
    reason=Reason.NO_RULE,
    decided_at_s=NOW_S,
)


def test_a_denial_tells_when_to_come_back_and_what_the_limit_is():
    assert DENIED.headers() == {
        "Retry-After": "12",
        "RateLimit-Policy": '"default";q=100;w=60',
        "RateLimit": '"default";r=2;t=12',
    }


def test_an_allowed_answer_has_no_retry_after_even_when_the_bucket_is_empty():
    answer = pb.RateLimitResponse(
        allowed=True, retry_after_seconds=7, limit=1, window_seconds=60, reason=pb.WITHIN_LIMIT
    )
    headers = decision_of(answer, NOW_S).headers()
    assert "Retry-After" not in headers
    assert headers["RateLimit"] == '"default";r=0;t=0'


def test_the_older_headers_come_when_asked_for_and_the_policy_has_the_name_chosen():
    headers = ALLOWED.headers(x_ratelimit=True, policy="per user")
    assert headers == {
        "RateLimit-Policy": '"per user";q=100;w=60',
        "RateLimit": '"per user";r=99;t=41',
        "X-RateLimit-Limit": "100",
        "X-RateLimit-Remaining": "99",
        "X-RateLimit-Reset": "1700000041",
    }


@pytest.mark.parametrize("decision", [NO_RULE, unchecked(Reason.NO_ANSWER, "UNAVAILABLE", NOW_S)])
def test_where_no_rule_decided_there_is_nothing_to_tell(decision):
    assert decision.headers(x_ratelimit=True) == {}


@pytest.mark.parametrize("policy", ['a"b', "a\\b", "ü", "a\r\nb"])
def test_a_name_that_would_break_the_header_is_refused(policy):
    with pytest.raises(ValueError, match="printable ASCII"):
        ALLOWED.headers(policy=policy)


@pytest.mark.parametrize(("ahead_s", "told_s"), [(-3_600, 12), (5, 12), (30, 30), (3_600, 60)])
def test_a_clock_that_differs_from_the_nodes_cannot_make_the_reset_absurd(ahead_s, told_s):
    answer = pb.RateLimitResponse(
        reset_time=1_700_000_000 + ahead_s, retry_after_seconds=12, window_seconds=60, limit=1
    )
    assert decision_of(answer, 1_700_000_000.0).reset_after_seconds == told_s


def test_several_limits_are_told_with_the_deciding_one_first():
    status = pb.LimitStatus(
        rule_id="r", name="day", identifier_type="user", allowed=False, remaining_tokens=1, reset_time=7,
        retry_after_seconds=8, limit=9, window_seconds=10, enforcement=pb.OBSERVE, reason=pb.COST_EXCEEDS_LIMIT,
    )  # fmt: skip
    limits = [pb.LimitStatus(name="default", allowed=True), status]
    found = decision_of(pb.RateLimitResponse(limit_name="default", limits=limits), NOW_S)
    assert found.limit_name == "default"
    assert [(limit.name, limit.allowed, limit.observed) for limit in found.limits] == [
        ("default", True, False), ("day", False, True),
    ]  # fmt: skip
    assert found.limits[1] == LimitStatus(
        "r", "day", "user", False, 1, 7, 8, 9, 10, True, reason=Reason.COST_EXCEEDS_LIMIT
    )
    assert (DENIED.limit_name, DENIED.limits) == ("", ())


def test_the_plan_that_decided_is_told():
    status = pb.LimitStatus(name="day", plan="pro")
    answer = pb.RateLimitResponse(reason=pb.UNLIMITED, plan="unlimited", limits=[status])
    found = decision_of(answer, NOW_S)
    assert (found.reason, found.plan, found.limits[0].plan) == (
        Reason.UNLIMITED,
        "unlimited",
        "pro",
    )
    blocked = decision_of(
        pb.RateLimitResponse(reason=pb.BLOCKED, retry_after_seconds=9, plan="blocked"), NOW_S
    )
    assert blocked.headers() == {"Retry-After": "9"}


def test_every_reason_of_the_contract_has_its_name_and_others_are_other():
    for name, number in pb.Reason.items():
        reason = decision_of(pb.RateLimitResponse(reason=number), NOW_S).reason
        assert reason == (name if number else "OTHER")
    answer = pb.RateLimitResponse.FromString(b"\x28\x63")  # reason 99
    assert decision_of(answer, NOW_S).reason is Reason.OTHER


@pytest.mark.parametrize(
    ("allowed", "reason", "fail_open"),
    [
        (True, Reason.NO_ANSWER, True),
        (True, Reason.NOT_ASKED, True),
        (True, Reason.FAIL_OPEN_ERROR, True),
        (True, Reason.FAIL_OPEN_BREAKER, True),
        (False, Reason.FAIL_OPEN_BREAKER, False),
        (True, Reason.WITHIN_LIMIT, False),
        (True, Reason.NO_RULE, False),
        (False, Reason.LIMIT_EXCEEDED, False),
    ],
)
def test_fail_open_is_what_was_allowed_unchecked(allowed, reason, fail_open):
    decision = Decision(
        allowed=allowed, remaining_tokens=1, reset_time=0, retry_after_seconds=0, reason=reason
    )
    assert decision.fail_open is fail_open


def test_a_refused_check_is_denied_and_says_why():
    decision = refused("timestamp: out of range", NOW_S)
    assert (decision.allowed, decision.reason) == (False, Reason.INVALID_REQUEST)
    assert decision.error == "timestamp: out of range"
    assert decision.headers() == {}


def test_a_check_that_is_denied_unchecked_tells_when_to_come_back_and_nothing_of_a_limit():
    closed = unchecked(Reason.NOT_ASKED, "", NOW_S, "deny")
    assert (closed.allowed, closed.fail_closed, closed.fail_open) == (False, True, False)
    assert closed.headers(x_ratelimit=True) == {"Retry-After": "1"}


def test_what_the_client_decided_may_be_decided_otherwise_and_what_a_node_decided_stays():
    closed = unchecked(Reason.NO_ANSWER, "UNAVAILABLE", NOW_S, "deny")
    opened = unchecked(Reason.NO_ANSWER, "UNAVAILABLE", NOW_S, "allow")
    assert (closed.if_unavailable("allow"), opened.if_unavailable("deny")) == (opened, closed)
    by_node = decision_of(pb.RateLimitResponse(allowed=True, reason=pb.FAIL_OPEN_BREAKER), NOW_S)
    for decision in (ALLOWED, DENIED, NO_RULE, by_node):
        assert decision.if_unavailable("deny") is decision


def test_a_node_that_denies_without_its_shared_state_fails_closed():
    answer = pb.RateLimitResponse(reason=pb.FAIL_OPEN_BREAKER, retry_after_seconds=20)
    assert decision_of(answer, NOW_S).fail_closed
    assert not DENIED.fail_closed
