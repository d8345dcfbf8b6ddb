"""Envoy's rate limit service as Envoy calls it: over both transports, on the common port."""

import asyncio

import grpc
import pytest

from ratelimitd.rules.envoy_import import import_config
from ratelimitd.rules.validation import validated
from ratelimitd.services.auth import Credentials
from ratelimitd.services.convert_rules import rate_limit_of
from ratelimitd.services.envoy import METHOD
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.envoy_messages import Response, giving_back, request_of
from tests.rpc.node import running_node

LOGIN = [("remote_address", "192.0.2.1"), ("path", "/login")]
ADA = [("user_id", "ada")]


async def ask(node, *arguments, **options):
    data = request_of(*arguments, **options).SerializeToString()
    return Response.FromString(await node.raw(METHOD, data))


def fields_of(answer):
    return {field.key: field.value for field in answer.response_headers_to_add}


async def test_a_limit_is_reached_at_the_right_request(node):
    rule = await node.rule("edge/path=/login", "ip", limit=2)
    answers = [await ask(node, "edge", LOGIN) for _ in range(3)]
    assert [answer.overall_code for answer in answers] == [1, 1, 2]
    [status] = answers[0].statuses
    assert (status.current_limit.requests_per_unit, status.limit_remaining) == (2, 1)
    fields = fields_of(answers[2])
    assert fields["RateLimit-Policy"] == f'"{rule.id}";q=2;w=60'
    assert fields["X-RateLimit-Remaining"] == "0"
    assert int(fields["Retry-After"]) == status.duration_until_reset.seconds


async def test_buckets_are_those_of_other_callers(node):
    await node.rule("edge/path=/login", "ip", limit=2)
    await ask(node, "edge", LOGIN)
    check = pb.RateLimitRequest(
        identifier="192.0.2.1", identifier_type="ip", endpoint="edge/path=/login"
    )
    assert (await node.checks.CheckRateLimit(check)).remaining_tokens == 0
    assert (await ask(node, "edge", LOGIN)).overall_code == Response.OVER_LIMIT


async def test_nothing_is_charged_unless_all_descriptors_pass(node):
    await node.rule("edge/path=/login", "ip", limit=5)
    await node.rule("edge", "user", limit=1)
    assert (await ask(node, "edge", LOGIN, ADA)).overall_code == Response.OK
    denied = await ask(node, "edge", LOGIN, ADA)
    assert [status.code for status in denied.statuses] == [1, 2]
    [status] = (await ask(node, "edge", LOGIN)).statuses
    assert status.limit_remaining == 3


@pytest.mark.parametrize("is_reversed", [False, True])
async def test_a_peek_sees_no_charge_of_another_descriptor(node, is_reversed):
    await node.rule("edge", "ip", limit=2)
    address = LOGIN[0]
    descriptors = [([address, *ADA], 2), ([address], 0)]
    answer = await ask(node, "edge", *(reversed(descriptors) if is_reversed else descriptors))
    assert answer.overall_code == Response.OK
    assert (await ask(node, "edge", ([address], 0))).overall_code == Response.OVER_LIMIT


async def test_concurrent_requests_never_exceed_the_limit(node):
    await node.rule("edge/path=/login", "ip", limit=7)
    await node.rule("edge", "user", limit=100)
    answers = await asyncio.gather(*(ask(node, "edge", LOGIN, ADA) for _ in range(20)))
    assert sum(answer.overall_code == Response.OK for answer in answers) == 7
    [status] = (await ask(node, "edge", ADA)).statuses
    assert status.limit_remaining == 92


async def test_imported_limits_that_deny_nothing_deny_nothing(node):
    config = b"""domain: edge
descriptors:
- {key: path, value: /a, shadow_mode: true, rate_limit: {unit: hour, requests_per_unit: 1}}
- {key: path, value: /b, rate_limit: {unlimited: true}}
"""
    await node.rule("*", "api_key", limit=1)
    imported = import_config(config, {})
    for draft in imported.rules:
        rule = rate_limit_of(validated(draft, rule_id="", revision=0))
        await node.config.CreateRateLimit(pb.CreateRateLimitRequest(rate_limit=rule))
    for path in ("/a", "/b"):
        answers = [await ask(node, "edge", [("path", path)]) for _ in range(3)]
        assert [answer.overall_code for answer in answers] == [Response.OK] * 3
    assert [*node.stats.would_deny.values()] == [[2]]


async def hold(node, cost=4, metadata=(), endpoint="/a"):
    check = pb.RateLimitRequest(
        identifier="ada", identifier_type="user", endpoint=endpoint, tokens_requested=cost
    )
    return (await node.holds.Hold(pb.HoldRequest(check=check), metadata=metadata)).hold


async def give_back(node, *holds, **options):
    """Refund tokens of holds, as pairs of the hold's text and the tokens."""
    request = giving_back(*(([("hold", text)], hits) for text, hits in holds))
    return await node.outcome(METHOD, request.SerializeToString(), **options)


async def left(node):
    """Return the tokens left of 10; a peek answers as if it consumed one."""
    check = pb.RateLimitRequest(identifier="ada", identifier_type="user", endpoint="/a", peek=True)
    answer = await node.checks.CheckRateLimit(check)
    return answer.remaining_tokens + answer.allowed


async def test_hits_of_holds_are_refunded_once(node):
    rule = await node.rule()
    held = [(await hold(node), 3), (await hold(node), 4)]
    assert await left(node) == 2
    for expected in ([5, 9], [5, 9]):
        code, data = await give_back(node, *held)
        assert code is grpc.StatusCode.OK
        answer = Response.FromString(data)
        assert answer.overall_code == Response.OK
        assert [status.limit_remaining for status in answer.statuses] == expected
        assert {status.current_limit.name for status in answer.statuses} == {rule.id}
        assert fields_of(answer)["X-RateLimit-Remaining"] == "5"
        assert await left(node) == 9
    assert node.stats.hold_tokens == {"held": 8, "refunded": 7, "debt": 0}


async def test_a_hold_settled_before_refunds_only_the_same_hits(node):
    await node.rule()
    text = await hold(node)
    assert (await node.holds.Settle(pb.SettleRequest(hold=text, actual=1))).known
    assert (await give_back(node, (text, 3)))[0] is grpc.StatusCode.OK
    code, details = await give_back(node, (text, 2))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert details.startswith("descriptors[0]: the hold was settled before")
    assert await left(node) == 9


async def test_hits_of_an_ended_hold_are_not_refunded(node):
    await node.rule(window_seconds=3_600)
    text = await hold(node)
    node.clock.advance(seconds=60)
    code, details = await give_back(node, (text, 3))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert details.startswith("descriptors[0]: the hold has expired")
    assert await left(node) == 6


async def test_the_answer_shows_the_limit_that_would_decide_a_check(node):
    limits = [
        pb.Limit(name="minute", limit=10, window_seconds=60, algorithm="token_bucket"),
        pb.Limit(name="hour", limit=100, window_seconds=3_600, algorithm="fixed_window"),
        pb.Limit(
            name="planned", limit=5, window_seconds=60, algorithm="fixed_window",
            enforcement=pb.OBSERVE,
        ),
    ]  # fmt: skip
    rule = pb.RateLimit(endpoint="/a", identifier_type="user", limits=limits)
    await node.config.CreateRateLimit(pb.CreateRateLimitRequest(rate_limit=rule))
    _, data = await give_back(node, (await hold(node), 1))
    [status] = Response.FromString(data).statuses
    assert (status.limit_remaining, status.current_limit.requests_per_unit) == (7, 10)


async def test_an_empty_hold_refunds_nothing_and_the_answer_is_ok(node):
    code, data = await give_back(node, (await hold(node), 3))
    assert code is grpc.StatusCode.OK
    answer = Response.FromString(data)
    assert (answer.overall_code, fields_of(answer)) == (Response.OK, {})
    assert not answer.statuses[0].HasField("current_limit")


async def test_a_limit_deleted_meanwhile_is_omitted(node):
    rule = await node.rule()
    text = await hold(node)
    await node.config.DeleteRateLimit(pb.DeleteRateLimitRequest(id=rule.id))
    code, data = await give_back(node, (text, 3))
    assert code is grpc.StatusCode.OK
    assert not Response.FromString(data).statuses[0].HasField("current_limit")


async def test_hits_are_refunded_only_to_the_caller_that_made_the_hold(tmp_path, transport):
    credentials = Credentials(admin_token="admin-token", check_token="check-token")
    as_check = (("authorization", "Bearer check-token"),)
    as_admin = (("authorization", "Bearer admin-token"),)
    async with running_node(tmp_path, transport=transport, credentials=credentials) as node:
        text = await hold(node, metadata=as_check)
        code, details = await give_back(node, (text, 1), metadata=as_admin)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details.startswith("descriptors[0].entries[0].value: is not a hold")
        assert (await give_back(node, (text, 1), metadata=as_check))[0] is grpc.StatusCode.OK


async def test_an_unknown_rule_is_ok(node):
    answer = await ask(node, "nowhere", LOGIN)
    assert (answer.overall_code, fields_of(answer)) == (Response.OK, {})


WRONG = {
    "domain": request_of("", ADA),
    "descriptors": request_of("edge"),
    "descriptors[0].entries[0].value": request_of("edge", [("remote_address", "here")]),
    "hits_addend": request_of("edge", ADA, hits=2**32 - 1),
    "request": request_of("edge", [("path", "x" * 70_000)]),
    "descriptors[0].is_negative_hits": giving_back((ADA, 1)),
}


@pytest.mark.parametrize("field", WRONG)
async def test_bad_input_is_refused_and_named(node, field):
    await node.rule("edge", "user")
    code, text = await node.outcome(METHOD, WRONG[field].SerializeToString())
    assert (code, text.partition(":")[0]) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    assert node.fail_opens() == (0, 0)
    assert node.stats.allowed_total == 0


async def test_the_check_role_is_required(tmp_path, transport):
    credentials = Credentials(check_token="the-check-token")
    async with running_node(tmp_path, transport=transport, credentials=credentials) as node:
        data = request_of("edge", ADA).SerializeToString()
        assert (await node.outcome(METHOD, data))[0] is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", "Bearer the-check-token"),)
        assert (await node.outcome(METHOD, data, metadata=metadata))[0] is grpc.StatusCode.OK
