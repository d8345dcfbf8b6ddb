"""`check` and `explain`: the request, the output, and the exit status for scripts."""

import json
import re

import grpc
import pytest

from ratelimitd.cli.check import MAX_COUNT, describe, expiry
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.fake_node import status

ALICE = ("check", "user", "alice", "/orders")
RULE_ID = "6f2c1d9e-0b4a-4f58-9d3e-2a7b8c9d0e1f"


def test_allowed_check_is_status_0_and_denied_one_3(ask, node):
    node.limit = 1
    assert ask(*ALICE).status == 0
    denied = ask(*ALICE)
    assert (denied.status, denied.err) == (3, "")
    assert denied.out.startswith("denied\n")


def test_request_has_the_typed_values(ask, node):
    ask("check", "api_key", "k-1", "/v1/{id}", "--cost", "7", "--peek")
    assert node.seen[0].request == pb.RateLimitRequest(
        identifier="k-1",
        identifier_type="api_key",
        endpoint="/v1/{id}",
        tokens_requested=7,
        peek=True,
    )


def test_further_identities_are_sent(ask, node):
    for count in ("1", "2"):
        ask(*ALICE, "--also", "tenant=acme", "--also", "ip=::1", "--count", count)
    for seen in node.seen:
        requests = getattr(seen.request, "requests", [seen.request])
        assert {(one.identifier_type, one.identifier) for one in requests[0].also} == {
            ("tenant", "acme"), ("ip", "::1"),
        }  # fmt: skip


@pytest.mark.parametrize("also", [["tenant"], ["ip=::1", "--also", "ip=::2"]])
def test_further_identity_without_a_distinct_type_is_status_2(ask, node, also):
    ended = ask(*ALICE, "--also", *also)
    assert ended.status == 2
    assert "--also must be TYPE=IDENTIFIER, each TYPE once" in ended.err
    assert not node.seen


def test_json_is_the_message(ask):
    answer = json.loads(ask(*ALICE, "--json").out)
    assert answer["allowed"] is True
    assert answer["reason"] == "WITHIN_LIMIT"
    assert answer["remaining_tokens"] == 1


def test_answer_is_shown_in_words(ask, node):
    node.answer = pb.RateLimitResponse(
        reason=pb.LIMIT_EXCEEDED,
        reset_time=1,
        retry_after_seconds=90,
        limit=5,
        window_seconds=60,
        rule_id=RULE_ID,
    )
    assert ask(*ALICE).out == (
        "denied\n"
        "  reason       the limit is used up\n"
        f"  rule         5 per 1 min ({RULE_ID})\n"
        "  remaining    0\n"
        "  reset        1970-01-01 00:00:01 UTC\n"
        "  retry after  1 min 30 s\n"
    )


def test_many_checks_print_a_line_each_and_a_sum(ask, node):
    ended = ask(*ALICE, "--count", "3")
    assert ended.status == 3
    assert ended.out == (
        "1  allowed  remaining 1  reset –\n"
        "2  allowed  remaining 0  reset –\n"
        "3  denied   remaining 0  reset –  retry after –\n"
        "2 allowed, 1 denied\n"
    )


NOT_CHECKED = pb.RateLimitResponse(
    allowed=True, reason=pb.FAIL_OPEN_BREAKER, remaining_tokens=1, reset_time=1_700_000_060
)


def test_unlimited_checks_are_marked(ask, node):
    node.answer = NOT_CHECKED
    ended = ask(*ALICE, "--count", "2")
    assert ended.status == 0
    assert ended.out == (
        "1  allowed  not checked: the circuit breaker is open\n"
        "2  allowed  not checked: the circuit breaker is open\n"
        "2 allowed (2 not checked), 0 denied\n"
    )
    assert ask(*ALICE).out == (
        "allowed\n"
        "  reason     not checked: the circuit breaker is open\n"
        "  rule       –\n"
        "  remaining  –\n"
        "  reset      –\n"
    )


def test_checks_denied_by_an_open_breaker_are_marked(ask, node):
    node.answer = pb.RateLimitResponse(reason=pb.FAIL_OPEN_BREAKER, retry_after_seconds=5)
    ended = ask(*ALICE, "--count", "2")
    assert (ended.status, ended.out.splitlines()[1:]) == (
        3,
        [
            "2  denied   not checked: the circuit breaker is open  retry after 5 s",
            "0 allowed, 2 denied (2 not checked)",
        ],
    )


@pytest.mark.parametrize(
    ("answer", "by"),
    [
        ({"limit_name": "day", "limit": 5, "window_seconds": 60}, "  by day: 5 per 1 min"),
        ({"limit_name": "default", "limit": 5, "window_seconds": 60}, "  by 5 per 1 min"),
        ({"reason": pb.BLOCKED, "plan": "blocked"}, "  by plan blocked"),
        (
            {
                "limit_name": "default", "plan": "pro", "limit": 9, "window_seconds": 1,
                "limits": [pb.LimitStatus(identifier_type="tenant"), pb.LimitStatus()],
            },
            "  by tenant, plan pro, default: 9 per 1 s",
        ),
    ],
)  # fmt: skip
def test_many_checks_show_the_limit_that_denied(ask, node, answer, by):
    node.answer = pb.RateLimitResponse(**answer)
    assert ask(*ALICE, "--count", "2").out.splitlines()[0].endswith(by)


def test_allowed_check_shows_the_next_token_only_if_none_is_left(ask, node):
    node.answer = pb.RateLimitResponse(allowed=True, retry_after_seconds=30)
    assert "  next token  in 30 s\n" in ask(*ALICE).out
    node.answer.remaining_tokens = 1
    assert not re.search("retry|next", ask(*ALICE).out)


def test_many_checks_are_sent_in_batches_of_a_thousand(ask, node):
    ask(*ALICE, "--count", "2001", "--cost", "2")
    assert [len(call.request.requests) for call in node.seen] == [1000, 1000, 1]
    assert {item.tokens_requested for call in node.seen for item in call.request.requests} == {2}


def test_json_of_many_checks_is_one_list(ask):
    ended = ask(*ALICE, "--count", "3", "--json")
    assert ended.status == 3
    assert [answer["allowed"] for answer in json.loads(ended.out)] == [True, True, False]


def test_malformed_check_is_an_error_alone_and_in_a_batch(ask, node):
    node.answer = pb.RateLimitResponse(
        reason=pb.INVALID_REQUEST, error="requests[0].identifier: must not be empty"
    )
    batch = ask(*ALICE, "--count", "2")
    node.error = status(
        grpc.StatusCode.INVALID_ARGUMENT, "text", ("identifier", "must not be empty")
    )
    alone = ask(*ALICE)
    assert batch.status == alone.status == 1
    assert batch.err == alone.err == "Error: invalid argument: identifier: must not be empty\n"


@pytest.mark.parametrize(
    "options",
    [["--count", "0"], ["--count", str(MAX_COUNT + 1)], ["--cost", str(2**31)], ["--cost", "x"]],
)
def test_numbers_beyond_int32_are_status_2(ask, node, options):
    assert ask(*ALICE, *options).status == 2
    assert node.seen == []


@pytest.mark.parametrize(
    ("answer", "facts"),
    [
        (
            pb.RateLimitResponse(reason=pb.NO_RULE, remaining_tokens=2**31 - 1),
            {"reason": "no rule applies", "rule": "–", "remaining": "unlimited", "reset": "–"},
        ),
        (
            pb.RateLimitResponse(reason=pb.COST_EXCEEDS_LIMIT, retry_after_seconds=60),
            {"retry after": "never with this cost"},
        ),
        (
            pb.RateLimitResponse(reason=pb.FAIL_OPEN_BREAKER, remaining_tokens=1),
            {"reason": "not checked: the circuit breaker is open", "remaining": "–", "reset": "–"},
        ),
        (
            pb.RateLimitResponse(reason=pb.FAIL_OPEN_ERROR),
            {"reason": "not checked: the shared state did not answer, or the node met an error"},
        ),
        (pb.RateLimitResponse(), {"reason": "REASON_UNSPECIFIED", "retry after": "–"}),
        (pb.RateLimitResponse.FromString(b"\x28\x63"), {"reason": "99"}),  # of a later release
    ],
)
def test_every_reason_has_words(answer, facts):
    assert facts.items() <= dict(describe(answer)).items()


@pytest.mark.parametrize(
    ("time_s", "text"),
    [
        (0, "–"),
        (1_700_000_090, "in 1 min 30 s (2023-11-14 22:14:50 UTC)"),
        (1_700_000_000, "now (2023-11-14 22:13:20 UTC)"),
        (2**62, "in 53375995563974 d 9 h (Unix time 4611686018427387904)"),
    ],
)
def test_expiry_is_shown_as_duration_and_instant(time_s, text):
    assert expiry(time_s, 1_700_000_000) == text


EXPLANATION = pb.Explanation(
    answer=pb.RateLimitResponse(
        reason=pb.LIMIT_EXCEEDED, retry_after_seconds=9, limit=5, window_seconds=60
    ),
    rules=[
        pb.RuleExplanation(
            endpoint="/orders",
            identifier_type="user",
            match=pb.JUDGES,
            limits=[
                pb.LimitStatus(name="default", limit=5, window_seconds=60),
                pb.LimitStatus(
                    name="days", limit=9, window_seconds=172_800, allowed=True, remaining_tokens=4
                ),
                pb.LimitStatus(name="new", limit=1, window_seconds=1, enforcement=pb.OBSERVE),
            ],
            remedy="wait 9 s",
        ),
        pb.RuleExplanation(
            endpoint="*",
            identifier_type="tenant",
            match=pb.NOT_NAMED,
            remedy="name the tenant of the request",
        ),
    ],
)


def test_check_may_wait(ask, node):
    node.answer = pb.RateLimitResponse(allowed=True, reason=pb.WITHIN_LIMIT, wait_ms=250)
    ended = ask("check", "user", "alice", "/x", "--max-wait-ms", "500")
    assert "250 ms before it proceeds" in ended.out
    assert node.seen[-1].request.max_wait_ms == 500
    assert (
        "  wait 250 ms"
        in ask("check", "user", "alice", "/x", "--max-wait-ms", "500", "--count", "2").out
    )
    node.explanation = EXPLANATION
    ask("explain", "user", "alice", "/x", "--max-wait-ms", "500")
    assert node.seen[-1].request.max_wait_ms == 500


def test_explanation_shows_every_rule_and_its_remedy(ask, node):
    node.explanation = EXPLANATION
    ended = ask("explain", "user", "alice", "/orders", "--cost", "2", "--also", "ip=::1")
    assert ended.status == 3
    assert ended.out.splitlines()[0] == "denied"
    table = [line.split() for line in ended.out.splitlines()[-5:]]
    assert table[0] == ["ENDPOINT", "TYPE", "LIMIT", "SAYS", "REMEDY"]
    assert "denies, 0 left wait 9 s" in " ".join(table[1])
    assert "others" not in ended.out
    assert "days: 9 per 2 d allows, 4 left" in " ".join(table[2])
    assert "would deny, 0 left" in " ".join(table[3])
    assert "tenant – not named name the tenant of the request" in " ".join(table[4])
    (seen,) = node.seen
    assert (seen.request.tokens_requested, seen.request.also[0].identifier) == (2, "::1")


def test_explanation_names_calendar_windows(ask, node):
    month = pb.Limit(
        name="month", limit=100, window_seconds=2_592_000, algorithm="fixed_window", period=pb.MONTH,
        time_zone="Europe/Berlin", anchor_day=15,
    )  # fmt: skip
    day = pb.Limit(
        name="day", limit=9, window_seconds=86_400, algorithm="fixed_window", period=pb.DAY, time_zone="UTC",
    )  # fmt: skip
    seconds = pb.Limit(name="s", limit=5, window_seconds=86_400, algorithm="fixed_window")
    rule = node.add_rule("/a", limits=[month, seconds], plans={"pro": pb.LimitList(limits=[day])})

    def statuses(plan, *limits):
        return [
            pb.LimitStatus(
                rule_id=rule.id,
                name=one.name,
                limit=one.limit,
                window_seconds=one.window_seconds,
                plan=plan,
            )
            for one in limits
        ]

    for plan, judged, own, others in (
        ("", statuses("", month, seconds), "100 per month from day 15 (Europe/Berlin)", "s: 5 per 1 d"),
        ("pro", statuses("pro", day), "9 per day (UTC)", "pro, day: 9 per day (UTC)"),
    ):  # fmt: skip
        answer = pb.RateLimitResponse(
            rule_id=rule.id, limit_name=judged[0].name, limit=judged[0].limit, plan=plan,
            window_seconds=judged[0].window_seconds,
        )  # fmt: skip
        explained = pb.RuleExplanation(
            rule_id=rule.id, endpoint="/a", identifier_type="user", match=pb.JUDGES, limits=judged
        )
        node.explanation = pb.Explanation(answer=answer, rules=[explained])
        out = ask("explain", "user", "alice", "/a").out
        assert f"/a user, {own} ({rule.id})" in out
        assert "REMEDY" not in out
        assert others in out
    assert node.methods() == ["RateLimit", "GetRateLimit"] * 2


def test_answer_names_calendar_windows_if_the_caller_may_read_rules(ask, node):
    day = pb.Limit(
        name="day", limit=9, window_seconds=86_400, algorithm="fixed_window", period=pb.DAY, time_zone="UTC",
    )  # fmt: skip
    rule = node.add_rule("/a", limits=[day])
    status = pb.LimitStatus(
        rule_id=rule.id, name="day", identifier_type="user", limit=9, window_seconds=86_400
    )
    node.answer = pb.RateLimitResponse(
        reason=pb.LIMIT_EXCEEDED, rule_id=rule.id, limit_name="day", limit=9, window_seconds=86_400,
        limits=[status, status],
    )  # fmt: skip
    for arguments in (("check",), ("hold",)):
        out = ask(*arguments, "user", "alice", "/a").out
        assert (out.count("9 per day (UTC)"), out.count("1 d")) == (2, 0)
    rows = ask("check", "user", "alice", "/a", "--count", "2").out.splitlines()
    assert [row.endswith("by user, day: 9 per day (UTC)") for row in rows] == [True, True, False]
    node.rules.clear()
    assert ask("check", "user", "alice", "/a").out.count("9 per 1 d") == 2
    ask("check", "user", "alice", "/a", "--json")
    assert node.methods()[-1] == "RateLimit"


def test_explanation_shows_the_plans_of_the_identities(ask, node):
    blocked = pb.RateLimitResponse(reason=pb.BLOCKED, plan="blocked", retry_after_seconds=2**31 - 1)
    node.explanation = pb.Explanation(
        answer=blocked,
        plans=[
            pb.AssignedPlan(identifier_type="user", plan="blocked", remedy="unassign the user"),
            pb.AssignedPlan(identifier_type="tenant", plan="pro", expire_time=1),
        ],
    )
    lines = [" ".join(line.split()) for line in ask("explain", "user", "a", "/").out.splitlines()]
    assert "reason the plan of an identity is blocked" in lines
    assert "plan blocked" in lines
    assert "retry after never, until it is unassigned" in lines
    assert lines[-2] == "user blocked never unassign the user"
    assert lines[-1].startswith("tenant pro now (1970-01-01")


def test_explanation_without_a_rule_is_the_answer(ask, node):
    node.explanation = pb.Explanation(answer=pb.RateLimitResponse(allowed=True, reason=pb.NO_RULE))
    ended = ask("explain", "user", "alice", "/orders")
    assert (ended.status, "no rule applies" in ended.out) == (0, True)
    assert json.loads(ask("explain", "user", "alice", "/orders", "--json").out)["answer"]["allowed"]


def test_answer_of_several_limits_shows_the_deciding_one_and_the_others(ask, node):
    numbers = {"rule_id": "r", "limit": 5, "window_seconds": 60}
    status = pb.LimitStatus(
        **numbers, name="day", identifier_type="user", remaining_tokens=0, reason=pb.LIMIT_EXCEEDED
    )
    tenant = pb.LimitStatus(
        rule_id="t", name="default", identifier_type="tenant", limit=9, window_seconds=1,
        allowed=True, remaining_tokens=9,
    )  # fmt: skip
    candidate = pb.LimitStatus(
        rule_id="t", name="new", identifier_type="tenant", limit=1, window_seconds=1,
        enforcement=pb.OBSERVE,
    )  # fmt: skip
    node.answer = pb.RateLimitResponse(
        **numbers, limit_name="day", reason=pb.LIMIT_EXCEEDED, limits=[status, tenant, candidate]
    )
    out = ask("check", "user", "alice", "/a").out
    assert "  rule         user, day: 5 per 1 min (r)\n" in out
    assert "  others       tenant, default: 9 per 1 s, allows, 9 left\n" in out
    assert "               tenant, new: 1 per 1 s, would deny, 0 left\n" in out


def test_rules_of_an_answer_are_told_apart_by_their_endpoints(ask, node):
    rules = [node.add_rule(endpoint) for endpoint in ("**", "*")]
    statuses = [
        pb.LimitStatus(rule_id=rule.id, name="default", identifier_type="user", limit=5, window_seconds=60)
        for rule in rules
    ]  # fmt: skip
    node.answer = pb.RateLimitResponse(
        rule_id=rules[0].id, limit_name="default", limit=5, window_seconds=60, limits=statuses
    )
    out = ask("check", "user", "alice", "/a").out
    assert f"  rule         ** user, default: 5 per 1 min ({rules[0].id})\n" in out
    assert "  others       * user, default: 5 per 1 min, denies, 0 left\n" in out
    explained = [
        pb.RuleExplanation(
            rule_id=rule.id, endpoint=rule.endpoint, identifier_type="user", match=pb.JUDGES, limits=[one]
        )
        for rule, one in zip(rules, statuses, strict=True)
    ]  # fmt: skip
    node.explanation = pb.Explanation(answer=node.answer, rules=explained)
    assert (
        f"** user, default: 5 per 1 min ({rules[0].id})"
        in ask("explain", "user", "alice", "/a").out
    )
    reads = node.methods().count("GetRateLimit")
    assert reads == len(rules)  # of the check: an explanation has the places


def test_explanation_without_a_rule_lists_the_nearest(ask, node):
    answer = pb.RateLimitResponse(allowed=True, reason=pb.NO_RULE)
    near = pb.NearRule(endpoint="/orders", identifier_type="user", why="differs in \x1bcase")
    node.explanation = pb.Explanation(answer=answer, nearest=[near])
    head, row = ask("explain", "user", "alice", "/Orders").out.splitlines()[-2:]
    assert head.split(maxsplit=3) == ["NEAREST", "ENDPOINT", "TYPE", "WHY IT IS NOT THE SAME"]
    assert row.split(maxsplit=2) == ["/orders", "user", "differs in \ufffdcase"]


def test_explain_says_what_unmatched_is(ask, node):
    node.explanation = pb.Explanation(answer=pb.RateLimitResponse(allowed=True, reason=pb.NO_RULE))
    assert "AUTH_ENDPOINTS" in ask("explain", "ip", "192.0.2.7", "unmatched").out
    assert "AUTH_ENDPOINTS" not in ask("explain", "ip", "192.0.2.7", "/other").out


def test_peek_and_explanation_show_what_would_be_left(ask, node):
    limits = [
        pb.LimitStatus(
            rule_id=kind, name="default", identifier_type=kind, limit=9, window_seconds=1,
            allowed=True, remaining_tokens=8,
        )
        for kind in ("user", "tenant")
    ]  # fmt: skip
    node.answer = pb.RateLimitResponse(allowed=True, reason=pb.WITHIN_LIMIT, limits=limits)
    assert "tenant, default: 9 per 1 s, allows, 8 left\n" in ask(*ALICE).out
    assert "tenant, default: 9 per 1 s, allows, 8 would be left\n" in ask(*ALICE, "--peek").out
    node.explanation = pb.Explanation(
        answer=node.answer,
        rules=[
            pb.RuleExplanation(
                rule_id=one.rule_id,
                endpoint="/orders",
                identifier_type=one.identifier_type,
                match=pb.JUDGES,
                limits=[one],
            )
            for one in limits
        ],
    )
    lines = ask("explain", "user", "alice", "/orders").out.splitlines()
    assert lines[-2].endswith("allows, 8 would be left")
    assert lines[-1].endswith("allows, 8 would be left")


def test_reset_is_shown_by_the_clock_of_the_node(ask, node):
    node.answer = pb.RateLimitResponse(
        reason=pb.LIMIT_EXCEEDED, reset_time=1_700_000_090, retry_after_seconds=31
    )
    row = ask(*ALICE, "--count", "2").out.splitlines()[0]
    assert row == "1  denied   remaining 0  reset 2023-11-14 22:14:50 UTC  retry after 31 s"
