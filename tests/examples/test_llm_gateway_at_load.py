"""The gateway of examples/llm_gateway under 500 streams, with its node killed and started again in between."""

import asyncio
from types import SimpleNamespace

import httpx
import pytest

from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.cluster.nodes import Nodes
from tests.examples.shops import command_of, running_shop
from tests.examples.test_llm_gateway import EXAMPLE, spent, stream
from tests.servers import Valkey, until
from tests.system.process import PATIENT

TENANTS, STREAMS_EACH = 50, 10
MONTH = 5_000_000
LONGEST = 60
TOKEN_S = 0.05

MADE = r'rate_limiter_holds_total\{event="made"\}'

LIMITS = [
    pb.Limit(name="minute", limit=20_000, window_seconds=60, algorithm="token_bucket"),
    pb.Limit(name="month", limit=MONTH, period=pb.MONTH, algorithm="fixed_window"),
    pb.Limit(name="streams", limit=STREAMS_EACH, window_seconds=3_600, algorithm="concurrency"),
]


@pytest.mark.deep
@pytest.mark.timeout(180)
async def test_500_streams_are_charged_what_they_streamed_though_their_node_is_killed(tmp_path):
    with (
        Valkey(tmp_path / "valkey") as valkey,
        Nodes(tmp_path / "nodes", valkey.url, *PATIENT, count=1) as nodes,
    ):
        rule = {"endpoint": "/v1/chat", "identifier_type": "api_key", "limits": LIMITS}
        nodes.rule(**rule, algorithm="")
        node = SimpleNamespace(grpc_address=nodes.addresses[0])
        command = command_of(EXAMPLE / "README.md", "uvicorn")
        keys = [f"tenant-{number}" for number in range(TENANTS)]
        async with running_shop(command, node, TOKEN_S=str(TOKEN_S)) as shop:
            # One connection for each stream.
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(
                base_url=shop.base_url, timeout=120, limits=limits
            ) as client:
                streams = [
                    asyncio.create_task(stream(client, key, LONGEST))
                    for key in keys
                    for _ in range(STREAMS_EACH)
                ]
                await asyncio.to_thread(
                    until,
                    lambda: nodes[0].metric(MADE) == len(streams),
                    "all streams have begun",
                )
                await asyncio.to_thread(nodes.kill, 0)
                await asyncio.to_thread(nodes.start, 0)
                tokens = await asyncio.gather(*streams)
            assert all(tokens)
            reported = {
                key: sum(tokens[number * STREAMS_EACH : (number + 1) * STREAMS_EACH])
                for number, key in enumerate(keys)
            }
            await asyncio.to_thread(
                until,
                lambda: {key: spent(node, key) for key in keys} == reported,
                "each tenant is charged what was streamed to it",
            )
