"""Envoy's descriptors on nodes that share their buckets."""

import grpc
import pytest

from ratelimitd.services.envoy import METHOD
from tests.cluster.nodes import Nodes
from tests.cluster.shared import TIMEOUT_MS
from tests.envoy_messages import Request, Response, request_of
from tests.servers import Valkey, until
from tests.system.process import NEVER_ENDING_S, PATIENT, START_S

ADA, LOGIN = [("user_id", "ada")], [("user_id", "ada"), ("path", "/login")]
OPTIONS = ("--redis-timeout-ms", str(TIMEOUT_MS))


def ask(node, *descriptors):
    method = node.channel.unary_unary(
        METHOD, Request.SerializeToString, Response.FromString, _registered_method=False
    )
    return method(request_of("edge", *descriptors), timeout=START_S)


def passes(node, *descriptors):
    return ask(node, *descriptors).overall_code == Response.OK


def limits(nodes):
    nodes.wait_for_members()
    for endpoint, limit in {"edge": 6, "edge/path=/login": 10}.items():
        nodes.rule(endpoint=endpoint, limit=limit, window_seconds=NEVER_ENDING_S)


@pytest.fixture
def valkey(tmp_path):
    with Valkey(tmp_path / "valkey") as valkey:
        yield valkey


def test_strict_nodes_charge_nothing_unless_all_pass(tmp_path, valkey):
    options = (*PATIENT, "--consistency", "strict")
    with Nodes(tmp_path / "nodes", valkey.url, *options, count=2) as nodes:
        limits(nodes)
        both = [passes(nodes[number % 2], ADA, LOGIN) for number in range(9)]
        assert both == [True] * 6 + [False] * 3
        alone = [passes(nodes[number % 2], LOGIN) for number in range(6)]
        assert alone == [True] * 4 + [False] * 2
        assert nodes.metric_sum("rate_limiter_requests_allowed_total") == 6 * 2 + 3 + 4


def test_eventual_nodes_converge_and_without_the_shared_state_allow_valid_requests(
    tmp_path, valkey
):
    with Nodes(tmp_path / "nodes", valkey.url, *OPTIONS, count=2) as nodes:
        limits(nodes)
        admitted = sum(passes(node, ADA, LOGIN) for node in nodes.served for _ in range(6))
        assert admitted >= 6
        until(lambda: not any(passes(node, ADA, LOGIN) for node in nodes.served), "it is used up")
        [status] = ask(nodes[0], ADA).statuses
        assert status.code == Response.OVER_LIMIT
        valkey.kill()
        # For a bucket unknown to all nodes.
        assert passes(nodes[0], [("user_id", "bob")], [("user_id", "bob"), ("path", "/login")])
        with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
            ask(nodes[0], ADA, [])
