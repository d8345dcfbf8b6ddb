"""A real node that is killed, paused or cut off under checks, and returns: every check has its answer all the while."""

import asyncio
from contextlib import ExitStack, asynccontextmanager

import pytest

from ratelimitd_client import AsyncRateLimiterClient
from tests.client.outages import OUTAGES
from tests.servers import START_S

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("transport")]

CALLERS = 8


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


@pytest.mark.parametrize("outage", OUTAGES)
async def test_a_node_that_was_away_is_asked_again_when_it_is_back(outage, tmp_path):
    with ExitStack() as stack:
        address, begin, end = OUTAGES[outage](tmp_path, stack)
        async with AsyncRateLimiterClient(address) as client:
            load = Load(client)
            assert await client.wait_until_ready(START_S)
            async with load.running():
                await load.told(fail_open=False)
                await asyncio.to_thread(begin)
                await load.told(fail_open=True)
                await asyncio.to_thread(end)
                await load.told(fail_open=False)
    # None is lost: all are answered but those that the end of the load broke off.
    assert load.asked - CALLERS <= len(load.decisions) <= load.asked
