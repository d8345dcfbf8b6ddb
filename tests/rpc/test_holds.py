"""Holds are made, settled, extended and listed through a real channel on both transports."""

import logging
import uuid

import grpc
import pytest

from ratelimitd.model import US_PER_S
from ratelimitd.services.auth import Credentials
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.rpc.node import running_node

LIMIT = 10
INVALID = grpc.StatusCode.INVALID_ARGUMENT
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION


def check_of(cost=4, identifier="u", **fields):
    return pb.RateLimitRequest(
        identifier=identifier,
        identifier_type="user",
        endpoint="/a",
        tokens_requested=cost,
        **fields,
    )


async def hold(node, cost=4, *, ttl=60, hold_id="", metadata=(), **fields):
    request = pb.HoldRequest(check=check_of(cost, **fields), ttl_seconds=ttl, hold_id=hold_id)
    return await node.holds.Hold(request, metadata=metadata)


async def settle(node, held, actual, metadata=()):
    request = pb.SettleRequest(hold=getattr(held, "hold", held), actual=actual)
    return await node.holds.Settle(request, metadata=metadata)


async def left(node, identifier="u"):
    """Return the tokens left; a peek answers as if it consumed one."""
    answer = await node.checks.CheckRateLimit(check_of(1, identifier, peek=True))
    return answer.remaining_tokens + answer.allowed


async def refusal(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


@pytest.mark.parametrize("algorithm", ["token_bucket", "sliding_window", "fixed_window"])
async def test_a_settle_refunds_unused_tokens_and_charges_additional_ones(node, algorithm):
    rule = await node.rule(limit=LIMIT, algorithm=algorithm)
    first, second = await hold(node), await hold(node)
    assert first.answer.allowed
    assert (first.answer.remaining_tokens, first.answer.rule_id) == (LIMIT - 4, rule.id)
    assert first.expire_time == node.clock.now_us() // US_PER_S + 60
    assert await left(node) == LIMIT - 8
    settled = await settle(node, first, 1)
    assert (settled.known, settled.charged) == (True, 1)
    [status] = settled.limits
    assert (status.rule_id, status.remaining_tokens, status.limit) == (rule.id, LIMIT - 5, LIMIT)
    await settle(node, second, 7)
    assert await left(node) == LIMIT - 8
    third = await hold(node, 2)
    await settle(node, third, LIMIT)
    assert not (await node.checks.CheckRateLimit(check_of(1))).allowed


async def test_a_settle_of_zero_cancels_and_a_denied_hold_holds_nothing(node):
    await node.rule(limit=LIMIT)
    held = await hold(node, LIMIT)
    denied = await hold(node, 1)
    assert (denied.answer.allowed, denied.hold, denied.expire_time) == (False, "", 0)
    assert denied.answer.reason == pb.LIMIT_EXCEEDED
    await settle(node, held, 0)
    assert await left(node) == LIMIT


async def test_a_settle_applies_once_and_is_refused_with_another_amount(node):
    await node.rule(limit=LIMIT)
    held = await hold(node)
    for _ in range(3):
        assert (await settle(node, held, 1)).known
    assert await left(node) == LIMIT - 1
    code, details = await refusal(settle(node, held, 2))
    assert (code, details.split(":")[0]) == (PRECONDITION, "actual")
    assert await left(node) == LIMIT - 1


async def test_the_same_id_and_check_return_the_same_hold(node):
    await node.rule(limit=LIMIT)
    hold_id = str(uuid.uuid4())
    first, again = await hold(node, hold_id=hold_id), await hold(node, hold_id=hold_id)
    assert again == first
    assert await left(node) == LIMIT - 4
    for other in (hold(node, 5, hold_id=hold_id), hold(node, hold_id=hold_id, identifier="v")):
        code, details = await refusal(other)
        assert (code, details.split(":")[0]) == (INVALID, "hold_id")
    assert (await settle(node, again, 2)).known
    assert await left(node) == LIMIT - 2


async def test_the_id_of_an_ended_hold_is_refused(node):
    await node.rule(limit=LIMIT, window_seconds=3_600)
    for seconds in (0, 5):
        hold_id = str(uuid.uuid4())
        held = await hold(node, hold_id=hold_id, ttl=5)
        if seconds:
            node.clock.advance(seconds=seconds)
        else:
            assert (await settle(node, held, 0)).known
        code, details = await refusal(hold(node, hold_id=hold_id))
        assert (code, details.split(":")[0]) == (INVALID, "hold_id")
    assert await left(node) == LIMIT - 4


async def test_an_unsettled_hold_stays_charged_and_expires(node):
    await node.rule(limit=LIMIT, window_seconds=3_600)
    held = await hold(node, ttl=5)
    node.clock.advance(seconds=5)
    code, details = await refusal(settle(node, held, 0))
    assert (code, details.split(":")[0]) == (PRECONDITION, "hold")
    code, _ = await refusal(node.holds.Extend(pb.ExtendRequest(hold=held.hold)))
    assert code == PRECONDITION
    assert await left(node) == LIMIT - 4
    node.clock.advance(seconds=3_600)
    code, _ = await refusal(settle(node, held, 0))
    assert code == PRECONDITION


async def test_an_extended_hold_expires_later(node):
    await node.rule(limit=LIMIT, window_seconds=3_600)
    held = await hold(node, ttl=5)
    node.clock.advance(seconds=4)
    extended = await node.holds.Extend(pb.ExtendRequest(hold=held.hold, ttl_seconds=100))
    assert (extended.known, extended.expire_time) == (True, held.expire_time + 99)
    node.clock.advance(seconds=50)
    assert (await settle(node, held, 1)).known
    code, details = await refusal(node.holds.Extend(pb.ExtendRequest(hold=held.hold)))
    assert (code, details.split(":")[0]) == (PRECONDITION, "hold")


async def test_slots_are_taken_by_holds_and_free_when_these_are_settled_or_end(node):
    await node.rule(limit=2, window_seconds=30, algorithm="concurrency")
    first, second = await hold(node, 500), await hold(node, ttl=10)
    assert first.expire_time == node.clock.now_us() // US_PER_S + 30
    assert first.answer.remaining_tokens == 1
    denied = await hold(node)
    assert (denied.answer.allowed, denied.answer.retry_after_seconds) == (False, 10)
    checked = await node.checks.CheckRateLimit(check_of(1))
    assert (checked.allowed, checked.remaining_tokens) == (False, 0)
    await settle(node, first, 999)
    for _ in range(3):
        checked = await node.checks.CheckRateLimit(check_of(1))
        assert (checked.allowed, checked.remaining_tokens) == (True, 1)
    node.clock.advance(seconds=10)
    checked = await node.checks.CheckRateLimit(check_of(1))
    assert checked.remaining_tokens == 2
    code, _ = await refusal(settle(node, second, 1))
    assert code == PRECONDITION


async def test_an_hour_long_stream_keeps_its_slot_and_a_dead_caller_releases_it(node):
    await node.rule(limit=2, window_seconds=3_600, algorithm="concurrency")
    stream, died = await hold(node), await hold(node)
    for minute in range(1, 120):
        node.clock.advance(seconds=30)
        await node.holds.Extend(pb.ExtendRequest(hold=stream.hold))
        taken = (await node.checks.CheckRateLimit(check_of(1))).remaining_tokens
        assert taken == (0 if minute == 1 else 1)
    assert (await settle(node, stream, 5)).known
    code, _ = await refusal(settle(node, died, 5))
    assert code == PRECONDITION
    assert (await node.checks.CheckRateLimit(check_of(1))).remaining_tokens == 2


async def test_several_limits_are_held_and_settled_as_one(node):
    limits = [
        pb.Limit(name="minute", limit=10, window_seconds=60, algorithm="token_bucket"),
        pb.Limit(name="hour", limit=12, window_seconds=3_600, algorithm="fixed_window"),
        pb.Limit(name="streams", limit=2, window_seconds=600, algorithm="concurrency"),
    ]
    rule = pb.RateLimit(endpoint="/a", identifier_type="user", limits=limits)
    await node.config.CreateRateLimit(pb.CreateRateLimitRequest(rate_limit=rule))
    held = await hold(node, 8)
    assert [(one.name, one.remaining_tokens) for one in held.answer.limits] == [
        ("minute", 2), ("hour", 4), ("streams", 1),
    ]  # fmt: skip
    assert not (await hold(node, 5)).answer.allowed
    settled = await settle(node, held, 3)
    assert {one.name: one.remaining_tokens for one in settled.limits} == {
        "minute": 7, "hour": 9, "streams": 2,
    }  # fmt: skip
    assert len((await node.holds.ListHolds(pb.ListHoldsRequest())).limits) == 0


async def test_a_hold_without_a_limit_settles_nothing(node):
    await node.rule("/other")
    held = await hold(node)
    assert held.answer.reason == pb.NO_RULE
    assert held.hold
    assert held.expire_time
    assert await settle(node, held, 3) == pb.SettleResponse()
    assert await node.holds.Extend(pb.ExtendRequest(hold=held.hold)) == pb.ExtendResponse()


async def test_holds_in_flight_are_listed_by_limit_and_counted(node):
    rule = await node.rule(limit=LIMIT, window_seconds=3_600)
    held = [await hold(node, 2, identifier=one) for one in "abc"]
    [listed] = (await node.holds.ListHolds(pb.ListHoldsRequest())).limits
    assert (listed.rule_id, listed.endpoint, listed.holds, listed.tokens) == (rule.id, "/a", 3, 6)
    await settle(node, held[0], 5)
    await settle(node, held[1], 0)
    node.clock.advance(seconds=60)
    assert len((await node.holds.ListHolds(pb.ListHoldsRequest())).limits) == 0
    assert node.stats.holds == {"made": 3, "settled": 2, "expired": 1, "refused": 0}
    assert node.stats.hold_tokens == {"held": 6, "refunded": 2, "debt": 3}
    assert node.stats.holds_open == 0


async def test_a_reset_discards_held_tokens(node):
    await node.rule(limit=LIMIT, window_seconds=3_600)
    held = await hold(node, 6)
    bucket = pb.ResetRequest(identifier="u", identifier_type="user", endpoint="/a")
    await node.health.ResetRateLimit(bucket)
    await hold(node, 3)
    assert (await settle(node, held, 0)).known
    assert await left(node) == LIMIT - 3


FORGED = "A" * 88


@pytest.mark.parametrize("text", ["", "x", "é", FORGED, "A" * 20_000, "A=A", "\x00"])
async def test_an_invalid_hold_is_refused_and_named(node, text):
    await node.rule(limit=LIMIT)
    for call in (
        settle(node, text, 0),
        node.holds.Extend(pb.ExtendRequest(hold=text, ttl_seconds=5)),
    ):
        code, details = await refusal(call)
        assert (code, details.split(":")[0]) == (INVALID, "hold")


async def test_a_hold_altered_at_any_place_is_refused(node):
    await node.rule(limit=LIMIT)
    held = await hold(node)
    for place in range(len(held.hold)):
        other = "B" if held.hold[place] != "B" else "C"
        altered = held.hold[:place] + other + held.hold[place + 1 :]
        code, details = await refusal(settle(node, altered, 0))
        assert (code, details.split(":")[0]) == (INVALID, "hold")
    assert await left(node) == LIMIT - 4


async def test_a_hold_is_invalid_for_another_role(tmp_path, transport):
    credentials = Credentials(admin_token="admin-token", check_token="check-token")
    as_check = (("authorization", "Bearer check-token"),)
    as_admin = (("authorization", "Bearer admin-token"),)
    async with running_node(tmp_path, credentials=credentials, transport=transport) as node:
        rule = pb.RateLimit(
            endpoint="/a", identifier_type="user", limit=LIMIT, window_seconds=60,
            algorithm="fixed_window",
        )  # fmt: skip
        request = pb.CreateRateLimitRequest(rate_limit=rule)
        await node.config.CreateRateLimit(request, metadata=as_admin)
        held = await hold(node, hold_id="h", metadata=as_check)
        code, details = await refusal(settle(node, held, 0, as_admin))
        assert (code, details.split(":")[0]) == (INVALID, "hold")
        other = await hold(node, hold_id="h", metadata=as_admin)
        assert other.answer.remaining_tokens == LIMIT - 8
        assert (await settle(node, held, 0, as_check)).known


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.HoldRequest(check=check_of(LIMIT + 1)), "check.tokens_requested"),
        (pb.HoldRequest(check=check_of(-1)), "check.tokens_requested"),
        (pb.HoldRequest(check=check_of(peek=True)), "check.peek"),
        (pb.HoldRequest(check=check_of(max_wait_ms=5)), "check.max_wait_ms"),
        (pb.HoldRequest(check=check_of(), ttl_seconds=-1), "ttl_seconds"),
        (pb.HoldRequest(check=check_of(), ttl_seconds=3_601), "ttl_seconds"),
        (pb.HoldRequest(check=check_of(), hold_id="x" * 65), "hold_id"),
        (pb.HoldRequest(check=check_of(), hold_id="\n"), "hold_id"),
        (pb.HoldRequest(), "check.identifier"),
    ],
    ids=map(str, range(9)),
)
async def test_bad_input_is_named_and_changes_nothing(node, request_, field):
    await node.rule(limit=LIMIT)
    code, details = await refusal(node.holds.Hold(request_))
    assert code == INVALID
    assert f"{field}:" in details
    assert await left(node) == LIMIT
    assert node.fail_opens() == (0, 0)
    assert node.stats.holds["made"] == 0


async def test_numbers_out_of_range_are_named_together_with_an_invalid_hold(node):
    await node.rule(limit=LIMIT)
    held = await hold(node)
    code, details = await refusal(settle(node, held, -1))
    assert (code, details.split(":")[0]) == (INVALID, "actual")
    code, details = await refusal(settle(node, FORGED, -1))
    assert code == INVALID
    assert "hold:" in details
    assert "actual:" in details
    for ttl_seconds in (-1, 3_601):
        request = pb.ExtendRequest(hold=held.hold, ttl_seconds=ttl_seconds)
        code, details = await refusal(node.holds.Extend(request))
        assert (code, details.split(":")[0]) == (INVALID, "ttl_seconds")


async def test_a_lease_is_refused_under_a_concurrency_limit(node):
    await node.rule(limit=LIMIT, algorithm="concurrency")
    code, details = await refusal(node.holds.Hold(pb.HoldRequest(check=check_of(), lease=True)))
    assert (code, details.split(":")[0]) == (INVALID, "lease")
    await node.rule("/b", limit=LIMIT)
    check = pb.RateLimitRequest(identifier="u", identifier_type="user", endpoint="/b")
    assert (await node.holds.Hold(pb.HoldRequest(check=check, lease=True))).hold


async def test_logs_errors_and_holds_contain_no_identifier(node, caplog):
    caplog.set_level(logging.DEBUG)
    await node.rule(limit=LIMIT)
    held = await hold(node, identifier="secret-user", hold_id="h")
    assert "secret" not in repr(held)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await hold(node, 5, identifier="secret-user", hold_id="h")
    assert "secret" not in repr(caught.value)
    assert "secret" not in "".join(record.getMessage() for record in caplog.records)
