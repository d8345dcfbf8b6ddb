"""Rules are created, changed, deleted and listed through a real channel."""

import sqlite3
import uuid

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.rpc.node import check, running_node


async def update(node, rule, *paths):
    mask = FieldMask(paths=paths) if paths else None
    message = pb.UpdateRateLimitRequest(rate_limit=rule, update_mask=mask)
    return await node.config.UpdateRateLimit(message)


def detail_of(error, kind):
    status = rpc_status.from_call(error)
    for packed in status.details:
        found = kind()
        if packed.Unpack(found):
            return found
    return None


async def test_a_new_rule_decides_the_very_next_check(node):
    created = await node.rule("/a", limit=1)
    assert created.enabled
    assert uuid.UUID(created.id)
    assert created.etag
    answers = [await node.checks.CheckRateLimit(check()) for _ in range(2)]
    assert [answer.allowed for answer in answers] == [True, False]


async def test_a_rule_takes_the_callers_uuid_and_can_start_disabled(node):
    rule_id = str(uuid.uuid4())
    created = await node.rule("/a", id=rule_id.upper(), enabled=False)
    assert (created.id, created.enabled) == (rule_id, False)
    assert (await node.checks.CheckRateLimit(check())).reason == pb.NO_RULE


async def test_an_update_without_a_mask_replaces_the_rule_but_enabled_only_if_sent(node):
    created = await node.rule("/a", limit=1, enabled=False)
    rule = pb.RateLimit(
        id=created.id, endpoint="/b", identifier_type="ip", limit=7, window_seconds=9, algorithm="token_bucket",
    )  # fmt: skip
    changed = await update(node, rule)
    assert changed.etag != created.etag
    rule.enabled, rule.etag = False, changed.etag
    assert changed == rule
    rule.enabled = True
    assert (await update(node, rule)).enabled


async def test_plans_of_a_rule_are_listed_and_edited_by_a_mask(node):
    day = pb.Limit(name="day", limit=9, window_seconds=60, algorithm="fixed_window")
    first = pb.Limit(limit=5, window_seconds=1, algorithm="token_bucket")
    plans = {"pro": pb.LimitList(limits=[first, day]), "free": pb.LimitList(limits=[day])}
    created = await node.rule("/a", limit=1, plans=plans)
    assert [limit.name for limit in created.plans["pro"].limits] == ["default", "day"]
    assert [limit.name for limit in created.plans["free"].limits] == ["day"]
    [listed] = (await node.config.ListRateLimits(pb.ListRateLimitsRequest())).rate_limits
    assert listed == created
    fewer = pb.RateLimit(id=created.id, plans={"free": plans["free"]})
    changed = await update(node, fewer, "plans")
    assert (list(changed.plans), changed.limit) == (["free"], 1)
    assert changed.etag != created.etag
    assert not (await update(node, pb.RateLimit(id=created.id), "plans")).plans


async def test_an_update_with_a_mask_changes_exactly_the_named_fields(node):
    created = await node.rule("/a", limit=1)
    changed = await update(node, pb.RateLimit(id=created.id, limit=9, endpoint="/z"), "limit")
    created.limit, created.etag = 9, changed.etag
    assert changed == created
    # An unset field in the mask is the type's zero, with which a caller without "optional" disables a rule.
    disabled = await update(node, pb.RateLimit(id=created.id), "enabled")
    assert not disabled.enabled
    assert (await node.checks.CheckRateLimit(check())).reason == pb.NO_RULE


async def test_a_matching_etag_lets_an_update_pass_once(node):
    created = await node.rule("/a", limit=1)
    change = pb.RateLimit(id=created.id, limit=2, etag=created.etag)
    await update(node, change, "limit")
    change.limit = 3
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await update(node, change, "limit")
    assert caught.value.code() is grpc.StatusCode.ABORTED
    assert detail_of(caught.value, error_details_pb2.ErrorInfo).reason == "ETAG_MISMATCH"


async def test_a_deleted_rule_is_gone_at_once_and_cannot_be_deleted_twice(node):
    created = await node.rule("/a", limit=1)
    await node.config.DeleteRateLimit(pb.DeleteRateLimitRequest(id=created.id, etag=created.etag))
    assert (await node.checks.CheckRateLimit(check())).reason == pb.NO_RULE
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await node.config.DeleteRateLimit(pb.DeleteRateLimitRequest(id=created.id))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    resource = detail_of(caught.value, error_details_pb2.ResourceInfo)
    assert (resource.resource_type, resource.resource_name) == (
        "ratelimiter.v1.RateLimit",
        created.id,
    )


async def test_rules_are_listed_in_order_of_bytes_page_by_page(node):
    names = ["/b", "/a", "/\u00e9", "*", "/B"]
    for name in names:
        for identifier_type in ("user", "ip"):
            await node.rule(name, identifier_type)
    listed, token, pages = [], "", 0
    while pages == 0 or token:
        request = pb.ListRateLimitsRequest(page_size=3, page_token=token)
        answer = await node.config.ListRateLimits(request)
        listed += [(rule.endpoint, rule.identifier_type) for rule in answer.rate_limits]
        token, pages = answer.next_page_token, pages + 1
    expected = [(name, kind) for name in sorted(names, key=str.encode) for kind in ("ip", "user")]
    assert (listed, pages) == (expected, 4)


async def test_a_listing_is_filtered_by_endpoint_and_type(node):
    for endpoint in ("/a", "/b"):
        for identifier_type in ("user", "ip"):
            await node.rule(endpoint, identifier_type)
    request = pb.ListRateLimitsRequest(endpoint="/a", identifier_type="ip")
    answer = await node.config.ListRateLimits(request)
    assert [(r.endpoint, r.identifier_type) for r in answer.rate_limits] == [("/a", "ip")]
    request = pb.ListRateLimitsRequest(identifier_type="ip", page_size=1)
    answer = await node.config.ListRateLimits(request)
    request.page_token = answer.next_page_token
    answer = await node.config.ListRateLimits(request)
    assert [(r.endpoint, r.identifier_type) for r in answer.rate_limits] == [("/b", "ip")]
    assert not answer.next_page_token


async def test_a_database_that_cannot_be_written_is_unavailable_and_checks_go_on(
    tmp_path, transport
):
    async with running_node(tmp_path, transport=transport, busy_timeout_s=0.05) as node:
        await node.rule("/a")
        await write_while_locked(node, tmp_path)


async def write_while_locked(node, tmp_path):
    lock = sqlite3.connect(tmp_path / "rules.db", isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    try:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await node.rule("/b")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        retry = detail_of(caught.value, error_details_pb2.RetryInfo)
        assert retry.retry_delay.seconds == 1
        assert (await node.checks.CheckRateLimit(check())).reason == pb.WITHIN_LIMIT
    finally:
        lock.close()


async def test_the_actor_of_a_change_is_recorded(node, tmp_path):
    await node.rule("/a")
    with sqlite3.connect(tmp_path / "rules.db") as connection:
        assert connection.execute("SELECT actor FROM rule_audit").fetchall() == [
            ("admin@127.0.0.1",)
        ]
    connection.close()
