"""A whole set of rules, applied over gRPC and HTTP: takes effect on every node or is refused as a whole."""

import asyncio
import sqlite3
import time
import uuid
from contextlib import closing

import grpc
import httpx
import pytest

from ratelimitd.rules.applying import MAX_APPLIED
from ratelimitd.services.config import MAX_CHANGES, MAX_CHANGES_BYTES
from ratelimitd.testing import running_node as whole_node
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.rpc.node import running_node
from tests.rpc.over_http import Protocol, called, request_body

APPLY = "/ratelimiter.v1.RateLimiterConfig/ApplyRateLimits"


def rule(endpoint, limit=10, **fields):
    return pb.RateLimit(
        endpoint=endpoint, identifier_type="user", limit=limit, window_seconds=60,
        algorithm="token_bucket", **fields,
    )  # fmt: skip


def request(*rules, **options):
    return pb.ApplyRateLimitsRequest(rate_limits=rules, **options)


async def apply(node, *rules, **options):
    return await node.config.ApplyRateLimits(request(*rules, **options))


async def listed(node):
    message = pb.ListRateLimitsRequest(page_size=1_000)
    return list((await node.config.ListRateLimits(message)).rate_limits)


def in_force(node):
    return {one.endpoint: one.limit for one in node.feed.book.rules()}


async def test_a_set_is_in_force_on_the_answer_which_lists_its_changes(node):
    kept, changed, gone = [await node.rule(place) for place in ("/kept", "/changed", "/gone")]
    rules = [rule("/new", enabled=False), rule("/changed", 5), kept]
    answer = await apply(node, *rules, prune=True)
    assert (answer.created, answer.updated, answer.deleted, answer.unchanged) == (1, 1, 1, 1)
    assert answer.revision == node.feed.book.revision == 4
    assert in_force(node) == {"/kept": 10, "/changed": 5, "/new": 10}
    created, updated, deleted = answer.changes
    now = {one.endpoint: one for one in await listed(node)}
    assert not created.HasField("before")
    assert created.after == now["/new"]
    assert not created.after.enabled
    assert (updated.before, updated.after) == (changed, now["/changed"])
    assert updated.after.etag != changed.etag
    assert deleted.before == gone
    assert not deleted.HasField("after")


async def test_a_dry_run_lists_the_same_changes_without_new_ids_and_etags(node):
    before = await node.rule("/a")
    answer = await apply(node, rule("/a", 5), rule("/new"), dry_run=True)
    assert (answer.created, answer.updated, answer.deleted, answer.revision) == (1, 1, 0, 1)
    updated, created = answer.changes
    assert (updated.before, updated.after.limit, updated.after.etag) == (before, 5, "")
    assert (created.after.id, created.after.etag) == ("", "")
    assert await listed(node) == [before]


async def test_listed_rules_can_be_edited_and_applied_unless_changed_meanwhile(node):
    await node.rule("/a")
    await node.rule("/b")
    answer = await apply(node, *await listed(node), prune=True)
    assert (answer.unchanged, len(answer.changes)) == (2, 0)
    mine = await listed(node)
    await apply(node, rule("/a", 7))
    with pytest.raises(grpc.aio.AioRpcError, match=r"rate_limits\[0\]\.etag") as refused:
        await apply(node, *mine, prune=True)
    assert refused.value.code() is grpc.StatusCode.ABORTED
    with pytest.raises(grpc.aio.AioRpcError, match="rules were changed after 2") as refused:
        await apply(node, prune=True, revision=answer.revision)
    assert refused.value.code() is grpc.StatusCode.ABORTED
    assert in_force(node) == {"/a": 7, "/b": 10}


async def test_rules_revert_to_an_earlier_revision(node):
    await node.rule("/a")
    before = await listed(node)
    await apply(node, rule("/b"), prune=True)
    answer = await apply(node, as_of=1)
    assert (answer.created, answer.updated, answer.deleted, answer.revision) == (1, 0, 1, 3)
    assert in_force(node) == {"/a": 10}
    [after] = await listed(node)
    assert after.id == before[0].id


async def test_the_audit_trail_has_one_row_per_set_and_its_changes(node, tmp_path):
    first = await node.rule("/a")
    await apply(node, rule("/a", 5), rule("/b"))
    with closing(sqlite3.connect(tmp_path / "rules.db")) as connection:
        rows = connection.execute(
            "SELECT revision, action, actor, after FROM rule_audit"
        ).fetchall()
        changes = connection.execute(
            "SELECT rule_id = ?, action, json_extract(before, '$.limit'),"
            " json_extract(after, '$.limit') FROM rule_audit_changes WHERE revision = 2"
            " ORDER BY action DESC",
            (first.id,),
        ).fetchall()
    assert rows[1:] == [(2, "apply", rows[0][2], '{"created": 1, "updated": 1, "deleted": 0}')]
    assert changes == [(1, "update", 10, 5), (0, "create", None, 10)]


async def test_other_nodes_of_the_database_load_an_applied_set(tmp_path, transport):
    async with (
        running_node(tmp_path, transport=transport) as node,
        running_node(tmp_path, transport=transport) as other,
    ):
        await apply(node, *(rule(f"/{n}") for n in range(300)))
        await other.feed.notify()
        await apply(node, rule("/1", 5), rule("/new"), prune=True)
        await other.feed.notify()
        assert in_force(other) == in_force(node) == {"/1": 5, "/new": 10}
        assert other.feed.book.revision == 2


@pytest.mark.deep
async def test_ten_thousand_rules_are_one_revision_while_checks_go_on(node):
    rules = [rule(f"/services/{n % 7}/resources/{n}") for n in range(10_000)]
    began_s = time.monotonic()
    applying = asyncio.ensure_future(apply(node, *rules))
    checks = 0
    check = pb.RateLimitRequest(identifier="u", identifier_type="user", endpoint="/a")
    while not applying.done():
        await node.checks.CheckRateLimit(check)
        checks += 1
    answer = await applying
    assert time.monotonic() - began_s < 30  # 1 s on an idle machine
    assert checks > 20
    assert (answer.created, answer.revision, len(answer.changes)) == (10_000, 1, MAX_CHANGES)
    assert len(node.feed.book) == 10_000
    again = await apply(node, *rules, prune=True)
    assert (again.unchanged, again.revision) == (10_000, 1)


@pytest.mark.deep
async def test_the_answer_lists_as_many_long_rules_as_fit(node):
    limits = [
        pb.Limit(name=f"{n}" * 32, limit=1, window_seconds=60, algorithm="token_bucket")
        for n in range(8)
    ]
    plans = {f"plan-{n}": pb.LimitList(limits=limits) for n in range(8)}
    rules = [rule(f"/{n}", plans=plans) for n in range(700)]
    answer = await apply(node, *rules)
    assert answer.created == 700
    assert 0 < len(answer.changes) < 700
    assert answer.ByteSize() < MAX_CHANGES_BYTES * 1.01


async def test_fields_may_come_in_any_order(node):
    await node.rule("/gone")
    options = request(prune=True).SerializeToString()
    data = (
        options + request(rule("/a")).SerializeToString() + request(rule("/b")).SerializeToString()
    )
    answer = pb.ApplyRateLimitsResponse.FromString(await node.raw(APPLY, data))
    assert (answer.created, answer.deleted) == (2, 1)


async def test_a_set_above_the_rule_limit_is_refused(node):
    with pytest.raises(grpc.aio.AioRpcError, match=f"rate_limits: must be at most {MAX_APPLIED}"):
        await apply(node, *[pb.RateLimit()] * (MAX_APPLIED + 1))


@pytest.mark.deep
@pytest.mark.parametrize("protocol", Protocol)
async def test_ten_thousand_rules_are_applied_over_http(protocol):
    rules = [
        rule(f"/services/{n % 7}/resources/{n}", id=str(uuid.UUID(int=n))) for n in range(10_000)
    ]
    async with (
        whole_node(log_level="error") as node,
        httpx.AsyncClient(base_url=f"http://{node.http_address}", timeout=30) as client,
    ):

        async def applied(*rules):
            body = request_body(request(*rules), protocol)
            answer_class = pb.ApplyRateLimitsResponse
            return await called(client, APPLY, body, protocol, answer_class=answer_class)

        ended = await applied(*rules)
        assert (ended.answer.created, ended.answer.revision) == (10_000, 1)
        refused = await applied(*rules[:9_000], rule("/w", limit=0))
        assert "rate_limits[9000].limit: the limit must be positive" in refused.text
