"""The conformance vectors over the wire: the command against a real node that trusts its callers' time."""

import asyncio
import json
import sys
from pathlib import Path

import grpc.aio
import httpx
import pytest
from google.protobuf import json_format

from ratelimitd.cli.conformance.cases import Answer, cases
from ratelimitd.testing import running_node
from ratelimiter.v1 import ratelimiter_pb2 as pb
from ratelimiter.v1 import ratelimiter_pb2_grpc as stubs

CHECK = "/ratelimiter.v1.RateLimiter/CheckRateLimit"
HOLD = "/ratelimiter.v1.RateLimiterHolds/Hold"
SETTLE = "/ratelimiter.v1.RateLimiterHolds/Settle"
CREATE = "/ratelimiter.v1.RateLimiterConfig/CreateRateLimit"
COMMAND = Path(sys.executable).with_name("ratelimitd")

OTHERS = pb.RateLimit(
    endpoint="*", identifier_type="user", limit=1, window_seconds=1, algorithm="token_bucket"
)


async def test_every_vector_passes_alone_in_batches_and_in_one_batch(transport):
    async with (
        running_node(timestamps="caller", http_listen="", transport=transport) as node,
        grpc.aio.insecure_channel(node.grpc_address) as channel,
    ):
        rules = stubs.RateLimiterConfigStub(channel)
        others = await rules.CreateRateLimit(pb.CreateRateLimitRequest(rate_limit=OTHERS))
        # In its own process: in a thread beside the node it takes five times as long.
        command = [COMMAND, "conformance", "--target", node.grpc_address, "--one-batch", "--json"]
        run = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        printed, _ = await run.communicate()
        left = await rules.ListRateLimits(pb.ListRateLimitsRequest())
    report = json.loads(printed)
    assert [case for case in report["cases"] if not case["ok"]] == []
    assert (run.returncode, report["ok"]) == (0, True)
    sent = [check["sent"] for case in report["cases"] for check in case["checks"]]
    alone = sum(len(case.steps) for case in cases())
    in_batches = sum(len(case.steps) for case in cases() if not case.has_holds)
    assert {way: sent.count(way) for way in sent} == {
        "alone": alone, "in batches": in_batches, "in one batch": in_batches,
    }  # fmt: skip
    assert list(left.rate_limits) == [others]


@pytest.mark.parametrize("case", [case for case in cases() if case.rules], ids=str)
async def test_json_of_policies_and_holds_is_as_expected(case):
    async with (
        running_node(timestamps="caller") as node,
        httpx.AsyncClient(base_url=f"http://{node.http_address}") as client,
    ):
        ids = case.rule_ids("/e")
        for rule_id, rule in zip(ids, case.rules, strict=True):
            fields = json_format.MessageToDict(rule, preserving_proto_field_name=True)
            made = await client.post(CREATE, json={"rate_limit": {**fields, "id": rule_id}})
            assert made.status_code == 200
        holds = {}
        for step in case.steps:
            for name, actual in step.settles:
                settle = {"hold": holds[name], "actual": actual}
                assert (await client.post(SETTLE, json=settle)).json()["known"]
            (kind, identifier), *also = step.identities
            check = {
                "identifier": identifier,
                "identifier_type": kind,
                "also": [{"identifier_type": one, "identifier": named} for one, named in also],
                "endpoint": step.endpoint,
                "tokens_requested": step.cost,
                "timestamp": str(step.at_us),
            }
            if step.hold:
                held = (await client.post(HOLD, json={"check": check, "ttl_seconds": 3_600})).json()
                holds[step.hold], answer = held.get("hold"), held["answer"]
            else:
                answer = (await client.post(CHECK, json=check)).json()
            response = json_format.ParseDict(answer, pb.RateLimitResponse())
            assert step.expected.differences(Answer.of(response, ids)) == []
