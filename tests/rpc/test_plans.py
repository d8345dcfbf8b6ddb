"""Assignments are made, listed and removed through a real channel."""

import logging

import grpc
import pytest

from ratelimitd.model import US_PER_S
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.rpc.node import running_node


def identity(identifier="u", identifier_type="user"):
    return pb.Identity(identifier_type=identifier_type, identifier=identifier)


async def assign(node, identifier="u", identifier_type="user", **fields):
    who = identity(identifier, identifier_type)
    assignment = pb.Assignment(**{"identity": who, "plan": "pro", **fields})
    return await node.plans.AssignPlan(pb.AssignPlanRequest(assignment=assignment))


async def listed(node, **fields):
    answer = await node.plans.ListAssignments(pb.ListAssignmentsRequest(**fields))
    return [one.identity.identifier for one in answer.assignments], answer.next_page_token


def in_force(node, identifier=b"u", identifier_type="user"):
    return node.feed.assignments.plan_of(identifier_type, identifier, node.clock.now_us())


async def test_an_assignment_is_in_force_on_the_node_when_it_is_answered(node):
    expire_time = node.clock.now_us() // US_PER_S + 60
    note = "é" * 255
    assigned = await assign(node, expire_time=expire_time, note=note)
    assert (assigned.plan, assigned.note) == ("pro", note)
    assert in_force(node) == ("pro", expire_time)
    assert await node.plans.GetAssignment(pb.GetAssignmentRequest(identity=identity())) == assigned
    await node.plans.UnassignPlan(pb.UnassignPlanRequest(identity=identity(), etag=assigned.etag))
    assert in_force(node) is None
    assert await listed(node) == ([], "")


@pytest.mark.parametrize("plan", ["unlimited", "blocked", "no-rule_names-it", "p" * 32])
async def test_any_name_may_be_assigned(node, plan):
    assert (await assign(node, plan=plan)).plan == plan
    assert in_force(node) == (plan, 0)


async def test_the_spellings_of_an_address_are_one_identity(node):
    assigned = await assign(node, "::FFFF:102:304", "ip")
    assert assigned.identity.identifier == "1.2.3.4"
    await assign(node, "1.2.3.4", "ip", plan="free")
    assert await listed(node) == (["1.2.3.4"], "")
    assert in_force(node, b"1.2.3.4", "ip") == ("free", 0)


async def test_odd_but_valid_identifiers_are_opaque(node):
    odd = ["i" * 256, "nul\x00", "cr\r\nlf", "a:b{c}*", "\u202ertl", "e\u0301"]
    for identifier in odd:
        await assign(node, identifier)
        assert in_force(node, identifier.encode()) == ("pro", 0)
    assert sorted((await listed(node))[0]) == sorted(odd)


async def test_assignments_are_listed_page_by_page(node):
    for identifier in ("a1", "a2", "a3", "b\x00\xff"):
        await assign(node, identifier, plan="free" if identifier == "a2" else "pro")
    page, token = await listed(node, page_size=2)
    assert page == ["a1", "a2"]
    assert await listed(node, page_size=2, page_token=token) == (["a3", "b\x00\xff"], "")
    selected = {"identifier_type": "user", "identifier_prefix": "a", "plan": "pro"}
    page, token = await listed(node, page_size=1, **selected)
    assert page == ["a1"]
    assert await listed(node, page_size=1, page_token=token, **selected) == (["a3"], "")
    with pytest.raises(grpc.aio.AioRpcError, match="page_token"):
        await listed(node, page_size=1, page_token=token)


async def test_a_batch_is_answered_in_order_and_takes_effect_as_a_whole(node):
    wanted = [pb.Assignment(identity=identity(f"v{n % 7}{n}"), plan="pro") for n in range(1_000)]
    answer = await node.plans.BatchAssignPlans(pb.BatchAssignPlansRequest(assignments=wanted))
    assert [one.identity for one in answer.assignments] == [one.identity for one in wanted]
    assert len({one.etag for one in answer.assignments}) == 1_000
    assert len(node.feed.assignments) == 1_000


async def test_an_expired_assignment_has_no_effect_and_is_not_shown(node):
    await assign(node, expire_time=node.clock.now_us() // US_PER_S + 60)
    node.clock.advance(seconds=60)
    assert in_force(node) is None
    assert await listed(node) == ([], "")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await node.plans.GetAssignment(pb.GetAssignmentRequest(identity=identity()))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_full_store_takes_no_more_assignments(tmp_path, transport):
    options = {"store_options": {"max_assignments": 2}, "transport": transport}
    async with running_node(tmp_path, **options) as node:
        await assign(node, "a")
        await assign(node, "b")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await assign(node, "c")
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await assign(node, "b", plan="free")
        assert in_force(node, b"c") is None


async def test_logs_and_errors_contain_no_identifier(node, caplog):
    caplog.set_level(logging.DEBUG)
    await assign(node, "secret-user")
    stale = pb.UnassignPlanRequest(identity=identity("secret-user"), etag="stale")
    missing = pb.UnassignPlanRequest(identity=identity("secret-other"))
    for request in (stale, missing):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await node.plans.UnassignPlan(request)
        assert "secret" not in repr(caught.value)
    assert "secret" not in "".join(record.getMessage() for record in caplog.records)


async def test_a_plan_decides_from_the_next_check_until_its_assignment_expires(node):
    await node.rule("/a", limit=1)
    check = pb.RateLimitRequest(identifier="u", identifier_type="user", endpoint="/a")
    assert [(await node.checks.CheckRateLimit(check)).allowed for _ in range(2)] == [True, False]
    await assign(node, plan="unlimited")
    assert (await node.checks.CheckRateLimit(check)).reason == pb.UNLIMITED
    await assign(node, plan="blocked", expire_time=node.clock.now_us() // US_PER_S + 60)
    answer = await node.checks.CheckRateLimit(check)
    assert (answer.allowed, answer.reason, answer.retry_after_seconds) == (False, pb.BLOCKED, 60)
    batch = pb.BatchRateLimitRequest(requests=[check])
    assert (await node.checks.CheckRateLimitBatch(batch)).responses[0].reason == pb.BLOCKED
    node.clock.advance(seconds=60)
    assert (await node.checks.CheckRateLimit(check)).reason == pb.WITHIN_LIMIT
    await assign(node, plan="blocked")
    assert not (await node.checks.CheckRateLimit(check)).allowed
    await node.plans.UnassignPlan(pb.UnassignPlanRequest(identity=identity()))
    assert (await node.checks.CheckRateLimit(check)).reason == pb.LIMIT_EXCEEDED
