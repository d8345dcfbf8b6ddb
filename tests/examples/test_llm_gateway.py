"""The gateway of examples/llm_gateway in Uvicorn, with a real node: what is charged is what was streamed."""

import asyncio
import re

from ratelimitd import testing
from ratelimitd_client import NodeClient
from tests.examples.shops import ROOT, command_of, running_shop

EXAMPLE = ROOT / "examples/llm_gateway"
RULES = EXAMPLE / "rules.yaml"
STREAMS = 10
MINUTE = 20_000


async def stream(client, key, max_tokens=20):
    """The tokens of one request: those of its prompt and of its answer; 0 if it was denied."""
    body = {"text": "how many ?", "max_tokens": max_tokens}
    answer = await client.post("/v1/chat", json=body, headers={"X-API-Key": key})
    if answer.status_code == 429:
        return 0
    assert answer.status_code == 200
    return 3 + len(answer.text.split())


def status_of(node, key):
    """The limits of a key, by name."""
    with NodeClient(node.grpc_address) as client:
        answer = client.check(key, "api_key", "/v1/chat", peek=True)
    return {one.name: one for one in answer.limits}


def in_flight(node):
    """The holds that are not settled yet, by limit."""
    with NodeClient(node.grpc_address) as client:
        return client.holds()


def spent(node, key):
    """What the month has been charged; a peek answers as if it spent one."""
    month = status_of(node, key)["month"]
    return month.limit - month.remaining_tokens - 1


async def test_each_key_pays_for_what_was_streamed_to_it():
    clock = testing.ManualClock()
    async with (
        testing.running_node(clock=clock, rules_file=RULES, log_level="error") as node,
        running_shop(command_of(EXAMPLE / "README.md", "uvicorn"), node, TOKEN_S="0") as client,
    ):
        keys = [f"key-{number}" for number in range(4)]
        tokens = await asyncio.gather(*[stream(client, key) for key in keys for _ in range(5)])
        assert all(tokens)
        expected = {key: sum(tokens[5 * n : 5 * n + 5]) for n, key in enumerate(keys)}
        while await asyncio.to_thread(in_flight, node):
            pass  # the last settles follow their answers
        for key in keys:
            assert await asyncio.to_thread(spent, node, key) == expected[key]
            streams = (await asyncio.to_thread(status_of, node, key))["streams"]
            assert streams.remaining_tokens == STREAMS


async def test_the_eleventh_stream_at_once_is_denied():
    async with (
        testing.running_node(
            clock=testing.ManualClock(), rules_file=RULES, log_level="error"
        ) as node,
        running_shop(command_of(EXAMPLE / "README.md", "uvicorn"), node, TOKEN_S="0.05") as client,
    ):
        tokens = await asyncio.gather(*[stream(client, "key", 40) for _ in range(STREAMS + 3)])
    assert sum(one > 0 for one in tokens) == STREAMS


def test_the_readme_names_what_the_gateway_holds():
    [estimate] = re.findall(r"ESTIMATE = (\d+)", (EXAMPLE / "gateway.py").read_text())
    assert f"[holds](../../docs/holds.md) {estimate} tokens" in (EXAMPLE / "README.md").read_text()
