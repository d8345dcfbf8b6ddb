"""Traces of a node, from the caller's header to the collector, without identifiers."""

import grpc
import pytest

from ratelimitd.testing import running_node
from ratelimiter.v1 import ratelimiter_pb2 as pb
from ratelimiter.v1 import ratelimiter_pb2_grpc as stubs
from tests.servers import Valkey
from tests.trace_collector import attributes, collector

TRACE = "0af7651916cd43dd8448eb211c80319c"
SECRET = "alice-wonderland"
RULE = pb.RateLimit(
    endpoint="/a", identifier_type="user", limit=1, window_seconds=60, algorithm="token_bucket"
)


@pytest.fixture
def receiver():
    with collector() as receiver:
        yield receiver


def parent(number, *, sampled):
    return (("traceparent", f"00-{TRACE}-{number:016x}-0{int(sampled)}"),)


@pytest.mark.parametrize("transport", ["native", "grpcio"])
async def test_edits_of_rules_and_sampled_checks_are_traced(receiver, transport):
    check = pb.RateLimitRequest(identifier=SECRET, identifier_type="user", endpoint="/a")
    settings = {"transport": transport, "otel_endpoint": receiver.url, "node_id": "n1"}
    async with (
        running_node(**settings) as node,
        grpc.aio.insecure_channel(node.grpc_address) as channel,
    ):
        rules = stubs.RateLimiterConfigStub(channel)
        checks = stubs.RateLimiterStub(channel)
        await rules.CreateRateLimit(pb.CreateRateLimitRequest(rate_limit=RULE))
        for number in range(1, 9):
            metadata = parent(number, sampled=number % 4 == 0)
            await checks.CheckRateLimit(check, metadata=metadata)
        await checks.CheckRateLimit(check)
        with pytest.raises(grpc.aio.AioRpcError):
            await rules.DeleteRateLimit(pb.DeleteRateLimitRequest(id="none"))
    spans = {
        (span.name.rpartition("/")[2], span.parent_span_id.hex()): span for span in receiver.spans
    }
    assert set(spans) == {
        ("CreateRateLimit", ""),
        ("DeleteRateLimit", ""),
        ("CheckRateLimit", f"{4:016x}"),
        ("CheckRateLimit", f"{8:016x}"),
    }
    denied = spans["CheckRateLimit", f"{8:016x}"]
    assert denied.trace_id.hex() == TRACE
    assert attributes(denied)["ratelimitd.reason"] == "LIMIT_EXCEEDED"
    failed = spans["DeleteRateLimit", ""]
    assert failed.status.message == "INVALID_ARGUMENT"
    assert not any(SECRET.encode() in body for body in receiver.bodies)


async def test_a_node_of_a_cluster_traces_what_it_settles(receiver, tmp_path):
    with Valkey(tmp_path) as valkey:
        settings = {"redis_url": valkey.url, "otel_endpoint": receiver.url, "sync_interval_ms": 10}
        async with (
            running_node(**settings) as node,
            grpc.aio.insecure_channel(node.grpc_address) as channel,
        ):
            rule = pb.RateLimit()
            rule.CopyFrom(RULE)
            rule.limit = 100
            rules = stubs.RateLimiterConfigStub(channel)
            await rules.CreateRateLimit(pb.CreateRateLimitRequest(rate_limit=rule))
            check = pb.RateLimitRequest(identifier=SECRET, identifier_type="user", endpoint="/a")
            # The store decides the first check; the node decides the later ones and must settle them.
            for _ in range(3):
                assert (await stubs.RateLimiterStub(channel).CheckRateLimit(check)).allowed
        assert "ratelimitd.sync" in {span.name for span in receiver.spans}
    assert not any(SECRET.encode() in body for body in receiver.bodies)
