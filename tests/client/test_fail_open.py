"""What becomes of the result of a call: decisions, a breaker that is told, and a warning now and then."""

import logging

import grpc
import pytest
from google.protobuf.any_pb2 import Any
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from ratelimitd_client import Check, Reason
from ratelimitd_client.check import MAX_BATCH
from ratelimitd_client.decision import MAX_LIMITS
from ratelimitd_client.fail_open import (
    BATCH,
    CHECK,
    MAX_ANSWER_BYTES,
    MAX_HOLD_ANSWER_BYTES,
    CallError,
    FailOpen,
    call_of,
    last_resort,
    read,
)
from ratelimitd_client.log_throttle import LogThrottle
from ratelimitd_client.testing import ManualClock
from ratelimiter.v1 import ratelimiter_pb2 as pb

ONE = Check("alice", "user", "/x").message()
OPEN_AFTER = 5
FULL = grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def fail_open(clock):
    return FailOpen(clock)


def test_one_check_is_sent_alone_and_several_as_a_batch():
    assert call_of([ONE]) == (CHECK, ONE)
    path, message = call_of([ONE, ONE])
    assert path == BATCH
    batch = pb.BatchRateLimitRequest.FromString(message)
    assert list(batch.requests) == [pb.RateLimitRequest.FromString(ONE)] * 2


def test_decisions_are_in_the_order_of_the_answers(fail_open):
    answers = [pb.RateLimitResponse(allowed=True), pb.RateLimitResponse(retry_after_seconds=3)]
    data = pb.BatchRateLimitResponse(responses=answers).SerializeToString()
    assert [d.allowed for d in fail_open.answered(data, 2)] == [True, False]


def test_an_answer_may_have_the_most_octets(fail_open):
    head = pb.RateLimitResponse(allowed=True, error="e").ByteSize() + 2  # a length of three octets
    answer = pb.RateLimitResponse(allowed=True, error="e" * (MAX_ANSWER_BYTES - head + 1))
    assert answer.ByteSize() == MAX_ANSWER_BYTES
    (decision,) = fail_open.answered(answer.SerializeToString(), 1)
    assert decision.error.startswith("eee")


@pytest.mark.parametrize(
    ("answer", "count"),
    [
        (b"\xff\xff\xff", 1),
        (b"\xff\xff\xff", 2),
        (pb.BatchRateLimitResponse(responses=[pb.RateLimitResponse()]).SerializeToString(), 2),
        (b"\x0a\x00" * (2 * MAX_ANSWER_BYTES), 2),
        (b"\x00" * (MAX_ANSWER_BYTES + 1), 1),
        (None, 1),
        (b"", 1),
        (pb.RateLimitResponse(rule_id="and nothing else").SerializeToString(), 1),
        (b"\x0a\x00\x0a\x02\x08\x01", 2),
    ],
)
def test_what_is_no_answer_lets_through_and_counts_as_a_failure(fail_open, answer, count):
    for _ in range(OPEN_AFTER):
        decisions = fail_open.answered(answer, count)
        assert [(d.reason, d.error) for d in decisions] == [(Reason.NO_ANSWER, "GARBLED")] * count
        assert all(d.fail_open for d in decisions)
    assert not fail_open.breaker.allows()


def hold_response(hold, *, limits=0):
    answer = pb.RateLimitResponse(allowed=True, reason=pb.WITHIN_LIMIT)
    answer.limits.extend([pb.LimitStatus()] * limits)
    return pb.HoldResponse(answer=answer, hold=hold).SerializeToString()


LONGEST_HOLD = "x" * (MAX_HOLD_ANSWER_BYTES - len(hold_response("x" * 20_000)) + 20_000)


def test_an_answer_to_a_hold_may_have_the_most_octets(fail_open):
    decision, held = fail_open.held(hold_response(LONGEST_HOLD))
    assert (decision.allowed, decision.reason) == (True, Reason.WITHIN_LIMIT)
    assert held.hold == LONGEST_HOLD


@pytest.mark.parametrize(
    "answer",
    [
        None,
        b"",
        b"\xff",
        pb.HoldResponse(hold="and nothing else").SerializeToString(),
        pb.HoldResponse(hold="x", answer=pb.RateLimitResponse()).SerializeToString(),
        hold_response(LONGEST_HOLD + "x"),
    ],
    ids=["none", "empty", "garbage", "a hold alone", "no reason", "too long"],
)
def test_what_is_no_answer_to_a_hold_lets_through_and_counts_as_a_failure(fail_open, answer):
    for _ in range(OPEN_AFTER):
        decision, held = fail_open.held(answer)
        assert (decision.reason, decision.error) == (Reason.NO_ANSWER, "GARBLED")
        assert (decision.fail_open, held.hold) == (True, "")
    assert not fail_open.breaker.allows()


def test_limits_beyond_the_most_are_left_out(fail_open):
    decision, held = fail_open.held(hold_response("x", limits=MAX_LIMITS + 1))
    assert (held.hold, len(decision.limits)) == ("x", MAX_LIMITS)


@pytest.mark.parametrize(("count", "most"), [(2, MAX_LIMITS), (100, 163), (MAX_BATCH, 16)])
def test_limits_of_a_batch_beyond_the_most_are_left_out_in_equal_shares(fail_open, count, most):
    answer = pb.RateLimitResponse(allowed=True, limits=[pb.LimitStatus()] * (most + 1))
    data = pb.BatchRateLimitResponse(responses=[answer] * count).SerializeToString()
    assert [len(one.limits) for one in fail_open.answered(data, count)] == [most] * count


def test_the_limits_of_one_check_of_a_batch_do_not_depend_on_the_others(fail_open):
    most = pb.RateLimitResponse(allowed=True, limits=[pb.LimitStatus()] * MAX_LIMITS)
    others = [pb.RateLimitResponse(allowed=True)] * (MAX_BATCH - 1)
    data = pb.BatchRateLimitResponse(responses=[most, *others]).SerializeToString()
    assert len(fail_open.answered(data, MAX_BATCH)[0].limits) == MAX_LIMITS


def test_an_answer_to_a_settle_that_is_too_long_is_none():
    limits = [pb.LimitStatus(name="x" * MAX_HOLD_ANSWER_BYTES)]
    answer = pb.SettleResponse(known=True, limits=limits).SerializeToString()
    assert not read(pb.SettleResponse, answer).known


def test_a_check_that_the_node_calls_malformed_is_denied_and_no_failure(fail_open):
    for _ in range(OPEN_AFTER):
        [decision] = fail_open.failed(grpc.StatusCode.INVALID_ARGUMENT, "timestamp: no", 1)
    assert (decision.allowed, decision.reason) == (False, Reason.INVALID_REQUEST)
    assert decision.error == "timestamp: no"
    assert fail_open.breaker.allows()


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.INTERNAL,
    ],
)
def test_any_other_status_lets_through_and_is_named(fail_open, code):
    [decision] = fail_open.failed(code, "whatever", 1)
    assert decision.fail_open
    assert decision.error == code.name


def status_of(*details):
    packed = [Any(type_url=f"type.googleapis.com/{name}", value=data) for name, data in details]
    return Status(code=8, message="no", details=packed).SerializeToString()


def error_info(reason="TOO_MANY_HOLDS", domain="ratelimitd"):
    return "google.rpc.ErrorInfo", ErrorInfo(reason=reason, domain=domain).SerializeToString()


@pytest.mark.parametrize("on_unavailable", ["allow", "deny"])
def test_a_hold_beyond_the_most_is_denied_and_no_failure(clock, on_unavailable):
    fail_open = FailOpen(clock, on_unavailable)
    status = status_of(("google.rpc.RetryInfo", b""), error_info())
    for _ in range(OPEN_AFTER):
        decision = fail_open.not_held(CallError(FULL, "whatever", status))
    assert (decision.allowed, decision.fail_closed) == (False, False)
    assert (decision.reason, decision.error) == (Reason.LIMIT_EXCEEDED, "TOO_MANY_HOLDS")
    assert decision.headers() == {"Retry-After": "1"}
    assert fail_open.breaker.allows()


@pytest.mark.parametrize(
    "status",
    [
        b"",
        b"\xff",
        status_of(),
        status_of(("google.rpc.ErrorInfo", b"\xff")),
        status_of(error_info(domain="another")),
        status_of(error_info(reason="TOO_MANY_WRONG_TOKENS")),
    ],
)
def test_any_other_exhaustion_is_a_failure_for_holds_too(fail_open, status):
    for _ in range(OPEN_AFTER):
        decision = fail_open.not_held(CallError(FULL, "TOO_MANY_HOLDS", status))
        assert (decision.reason, decision.error) == (Reason.NO_ANSWER, "RESOURCE_EXHAUSTED")
    assert not fail_open.breaker.allows()


def test_an_error_that_is_no_status_lets_through_and_is_named(fail_open):
    assert fail_open.broken(OSError("secret"), 2)[1].error == "OSError"


def test_what_is_not_asked_says_so(fail_open):
    assert [d.reason for d in fail_open.not_asked(2)] == [Reason.NOT_ASKED] * 2


def test_there_is_one_warning_a_second_with_the_calls_since_the_last(fail_open, clock, caplog):
    caplog.set_level(logging.WARNING, "ratelimitd_client")
    for _ in range(100):
        fail_open.failed(grpc.StatusCode.UNAVAILABLE, "alice\nat 192.0.2.7", 1)
    clock.advance(0.999)
    fail_open.failed(grpc.StatusCode.UNAVAILABLE, "", 1)
    assert len(caplog.records) == 1
    clock.advance(0.001)
    fail_open.failed(grpc.StatusCode.DEADLINE_EXCEEDED, "", 1)
    first, second = (record.getMessage() for record in caplog.records)
    assert "UNAVAILABLE" in first
    assert "1 since" in first
    assert "101 since" in second
    assert "alice" not in caplog.text


def test_a_logging_filter_that_fails_costs_nobody_the_answer(fail_open):
    asked = []

    def fail(record):
        asked.append(record)
        message = "a filter of the application's"
        raise RuntimeError(message)

    log = logging.getLogger("ratelimitd_client")
    log.addFilter(fail)
    try:
        (decision,) = fail_open.failed(grpc.StatusCode.UNAVAILABLE, "", 1)
    finally:
        log.removeFilter(fail)
    assert decision.allowed
    assert len(asked) == 1


def test_who_wants_it_closed_is_denied_whatever_a_call_ends_with(clock, caplog):
    closed = FailOpen(clock, "deny")
    decisions = [
        *closed.answered(b"\xff", 1),
        *closed.failed(grpc.StatusCode.UNAVAILABLE, "", 2),
        *closed.broken(OSError("secret"), 1),
        *closed.not_asked(2),
        *last_resort(OSError("the wall"), 1, "deny"),
        closed.held(b"\xff")[0],
    ]
    assert [decision.error for decision in decisions] == [
        "GARBLED", "UNAVAILABLE", "UNAVAILABLE", "OSError", "", "", "OSError", "GARBLED",
    ]  # fmt: skip
    assert all(decision.fail_closed for decision in decisions)
    assert {decision.retry_after_seconds for decision in decisions} == {1}
    assert "the client denies checks unless the middleware or a view has its own" in caplog.text


def test_what_is_denied_is_not_charged_by_the_probe(fail_open, clock):
    assert fail_open.probe_of([ONE]) == [ONE]
    [probe] = FailOpen(clock, "deny").probe_of([ONE])
    assert pb.RateLimitRequest.FromString(probe).peek
    assert probe.startswith(ONE)


def test_the_last_resort_lets_all_through_and_names_the_kind_of_error_only():
    decisions = last_resort(OSError("the wall"), 2)
    assert [(d.allowed, d.reason, d.error) for d in decisions] == [
        (True, Reason.NO_ANSWER, "OSError")
    ] * 2


def test_nobody_waits_for_a_thread_that_counts():
    throttle = LogThrottle(ManualClock())
    with throttle._lock:  # as one that was forked away
        assert throttle.count() == 0
    assert throttle.count() == 1
