"""The conformance vectors over the wire: the command, against a real node that trusts its callers' time."""

import asyncio
import json
import sys
from pathlib import Path

import grpc.aio

from ratelimitd.cli.conformance.cases import cases
from ratelimitd.testing import running_node
from ratelimiter.v1 import ratelimiter_pb2 as pb
from ratelimiter.v1 import ratelimiter_pb2_grpc as stubs

COMMAND = Path(sys.executable).with_name("ratelimitd")

OTHERS = pb.RateLimit(
    endpoint="*", identifier_type="user", limit=1, window_seconds=1, algorithm="token_bucket"
)


async def test_every_vector_holds_alone_in_batches_and_in_one(transport):
    async with (
        running_node(timestamps="caller", http_listen="", transport=transport) as node,
        grpc.aio.insecure_channel(node.grpc_address) as channel,
    ):
        rules = stubs.RateLimiterConfigStub(channel)
        others = await rules.CreateRateLimit(pb.CreateRateLimitRequest(rate_limit=OTHERS))
        # A process of its own: beside the node, in another thread, it takes five times as long.
        command = [COMMAND, "conformance", "--target", node.grpc_address, "--one-batch", "--json"]
        run = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        printed, _ = await run.communicate()
        left = await rules.ListRateLimits(pb.ListRateLimitsRequest())
    report = json.loads(printed)
    assert [case for case in report["cases"] if not case["ok"]] == []
    assert (run.returncode, report["ok"]) == (0, True)
    sent = [check["sent"] for case in report["cases"] for check in case["checks"]]
    checks = sum(len(case.steps) for case in cases())
    assert {way: sent.count(way) for way in sent} == dict.fromkeys(
        ("alone", "in batches", "in one batch"), checks
    )
    assert list(left.rate_limits) == [others]
