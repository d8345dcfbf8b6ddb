"""The synchronous client: each method is one RPC, with its fields, its deadline and its token."""

import grpc
import pytest

from ratelimitd_client import NodeClient, open_channel
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.fake_node import fake_node, status


@pytest.fixture
def node():
    with fake_node() as node:
        yield node


@pytest.fixture
def client(node):
    with NodeClient(node.address) as client:
        yield client


def test_a_check_carries_what_was_asked(node, client):
    answer = client.check("alice", "user", "/x", cost=3, timestamp=1_700_000_000, peek=True)
    assert answer.allowed
    assert node.seen[0].request == pb.RateLimitRequest(
        identifier="alice",
        identifier_type="user",
        endpoint="/x",
        tokens_requested=3,
        timestamp=1_700_000_000,
        peek=True,
    )


def test_a_denied_check_is_an_answer_and_no_error(node, client):
    node.limit = 0
    assert not client.check("alice", "user", "/x").allowed


def test_a_batch_is_answered_in_order(node, client):
    requests = [pb.RateLimitRequest(identifier=name) for name in ("a", "b", "c")]
    answers = client.check_batch(requests)
    assert [answer.allowed for answer in answers] == [True, True, False]
    assert list(node.seen[0].request.requests) == requests


def test_a_rule_is_created_changed_and_deleted(node, client):
    rule = client.create_rule(
        pb.RateLimit(endpoint="/x", identifier_type="user", limit=1, window_seconds=1)
    )
    changed = client.update_rule(pb.RateLimit(id=rule.id, limit=2, etag=rule.etag), ["limit"])
    assert (changed.limit, changed.window_seconds) == (2, 1)
    assert client.health().status == pb.HEALTHY
    client.delete_rule(rule.id, etag=changed.etag)
    assert node.rules == {}


def test_an_update_without_fields_has_no_mask_and_one_with_none_has_an_empty_one(node, client):
    rule = node.add_rule("/x")
    client.update_rule(rule)
    client.update_rule(rule, [])
    first, second = (call.request for call in node.seen)
    assert not first.HasField("update_mask")
    assert second.HasField("update_mask")


def test_all_rules_are_read_page_by_page(node, client):
    node.page_size = 2
    for number in range(5):
        node.add_rule(f"/{number}")
    node.add_rule("/0", "ip")
    rules = list(client.rules(identifier_type="user"))
    assert [rule.endpoint for rule in rules] == ["/0", "/1", "/2", "/3", "/4"]
    assert node.methods() == ["ListRateLimits"] * 3


def test_one_page_is_what_was_asked_for(node, client):
    node.page_size = 1
    node.add_rule("/0")
    node.add_rule("/1")
    page = client.list_rules(pb.ListRateLimitsRequest(page_token="1"))
    assert [rule.endpoint for rule in page.rate_limits] == ["/1"]
    assert not page.next_page_token


def test_metrics_are_asked_for_by_name(node, client):
    node.metrics_answer = pb.MetricsResponse(metrics=[pb.Metric(name="m", value=1)])
    assert client.metrics(["m"]) == node.metrics_answer
    assert list(node.seen[0].request.names) == ["m"]


def test_a_reset_names_the_bucket(node, client):
    client.reset("alice", "user", "/x")
    assert node.seen[0].request == pb.ResetRequest(
        identifier="alice", identifier_type="user", endpoint="/x"
    )


def test_the_token_travels_with_every_call(node):
    with NodeClient(node.address, token="s3cret") as client:
        client.check("alice", "user", "/x")
        list(client.rules())
    assert [call.metadata["authorization"] for call in node.seen] == ["Bearer s3cret"] * 2


def test_without_a_token_no_authorization_is_sent(node, client):
    client.health()
    assert "authorization" not in node.seen[0].metadata


@pytest.mark.parametrize("token", ["two words", "line\nbreak", "ümlaut", "a=b"])
def test_a_token_that_no_header_can_carry_is_refused_without_showing_it(token):
    with pytest.raises(ValueError) as refused:
        NodeClient(token=token)
    assert token not in str(refused.value)


def test_an_error_of_the_node_is_raised_as_grpc_has_it(node, client):
    node.error = status(grpc.StatusCode.NOT_FOUND, "no rule has this id")
    with pytest.raises(grpc.RpcError) as error:
        client.delete_rule("x")
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_call_has_the_deadline_of_the_client_unless_it_brings_its_own(node):
    node.answering.clear()
    for default_s, own_s in ((0.05, None), (60, 0.05)):
        with NodeClient(node.address, timeout_s=default_s) as client:
            with pytest.raises(grpc.RpcError) as error:
                client.check("alice", "user", "/x", timeout_s=own_s)
            assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), "1"])
def test_an_invalid_deadline_is_refused_by_name(client, timeout_s):
    with pytest.raises((ValueError, TypeError), match="timeout_s"):
        NodeClient(timeout_s=timeout_s)
    with pytest.raises((ValueError, TypeError), match="timeout_s"):
        client.health(timeout_s=timeout_s)


def test_closing_the_client_closes_its_own_channel_but_not_a_borrowed_one(node):
    with open_channel(node.address) as channel:
        with NodeClient(channel=channel):
            pass
        borrower = NodeClient(channel=channel)
        assert borrower.check("alice", "user", "/x").allowed
    owner = NodeClient(node.address)
    owner.close()
    with pytest.raises(ValueError, match="closed channel"):
        owner.check("alice", "user", "/x")


def test_assignments_are_made_read_page_by_page_and_taken_away(node, client):
    node.page_size = 2
    alice = pb.Identity(identifier_type="user", identifier="alice")
    made = client.assign(pb.Assignment(identity=alice, plan="pro"))
    assert client.assignment(alice) == made
    others = [
        pb.Assignment(
            identity=pb.Identity(identifier_type="user", identifier=f"b{number}"), plan="free"
        )
        for number in range(3)
    ]
    assigned = client.assign_all(others)
    assert [one.identity for one in assigned] == [one.identity for one in others]
    assert [one.plan for one in client.assignments()] == ["pro", "free", "free", "free"]
    assert len(list(client.assignments(plan="free", identifier_type="user", prefix="b2"))) == 1
    client.unassign(alice, etag=made.etag)
    with pytest.raises(grpc.RpcError):
        client.assignment(alice)
    page = client.list_assignments(pb.ListAssignmentsRequest(page_token="2"))
    assert [one.identity.identifier for one in page.assignments] == ["b2"]
