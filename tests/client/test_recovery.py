"""A real node that is killed, paused or cut off under checks, and returns: every check has its answer all the while."""

import asyncio
import signal
import sys
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import get_args

import pytest

from ratelimitd_client import AsyncRateLimiterClient
from ratelimitd_client.async_sessions import Transport
from tests.chaos_proxy import ChaosProxy
from tests.servers import START_S, free_port
from tests.system.process import Files

pytestmark = pytest.mark.system

CALLERS = 8


@pytest.fixture(autouse=True, params=get_args(Transport))
def transport(request, monkeypatch):
    """Every test is made over both."""
    made = partial(AsyncRateLimiterClient, transport=request.param)
    monkeypatch.setattr(sys.modules[__name__], "AsyncRateLimiterClient", made)


class Load:
    """Callers that ask one check after another, and what they were told."""

    def __init__(self, client):
        self._client = client
        self.asked = 0
        self.decisions = []
        self._told = asyncio.Condition()

    async def _call(self):
        while True:
            self.asked += 1
            decision = await self._client.check("alice", "user", "/x")
            self.decisions.append(decision)
            async with self._told:
                self._told.notify_all()
            await asyncio.sleep(0.001)

    @asynccontextmanager
    async def running(self):
        tasks = [asyncio.create_task(self._call()) for _ in range(CALLERS)]
        yield
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended

    async def told(self, *, fail_open, count=100):
        """Wait until so many decisions in a row are of this kind."""

        def last_ones():
            last = self.decisions[-count:]
            return len(last) == count and {decision.fail_open for decision in last} == {fail_open}

        async with asyncio.timeout(START_S), self._told:
            await self._told.wait_for(last_ones)


async def outage(client, begin, end):
    load = Load(client)
    assert await client.wait_until_ready(START_S)
    async with load.running():
        await load.told(fail_open=False)
        await begin()
        await load.told(fail_open=True)
        await end()
        await load.told(fail_open=False)
    # None is lost: all are answered but those that the end of the load broke off.
    assert load.asked - CALLERS <= len(load.decisions) <= load.asked


async def test_a_killed_node_is_asked_again_when_it_is_back(tmp_path):
    port = free_port()
    files, listen = Files(tmp_path), ("--listen", f"127.0.0.1:{port}")
    with ExitStack() as nodes:
        node = nodes.enter_context(files.serving(*listen))

        async def kill():
            node.signal(signal.SIGKILL)
            await asyncio.to_thread(node.ended)

        async def start_again():
            await asyncio.to_thread(nodes.enter_context, files.serving(*listen))

        async with AsyncRateLimiterClient(node.grpc_address) as client:
            await outage(client, kill, start_again)


async def test_a_paused_node_is_asked_again_when_it_goes_on(tmp_path):
    with Files(tmp_path).serving() as node:

        async def send(number):
            node.signal(number)

        async with AsyncRateLimiterClient(node.grpc_address) as client:
            await outage(client, lambda: send(signal.SIGSTOP), lambda: send(signal.SIGCONT))


async def test_a_node_that_is_cut_off_is_asked_again_when_the_way_is_open(tmp_path):
    with (
        Files(tmp_path).serving() as node,
        ChaosProxy(int(node.grpc_address.rpartition(":")[2])) as proxy,
    ):
        async with AsyncRateLimiterClient(proxy.address) as client:
            await outage(
                client,
                lambda: asyncio.to_thread(proxy.partition),
                lambda: asyncio.to_thread(proxy.heal),
            )
