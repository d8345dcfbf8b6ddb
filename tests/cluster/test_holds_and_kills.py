"""Holds on real nodes: made on one, settled on another, while nodes are killed.

What is charged is what was settled, no slot is taken twice, and none stays taken.
"""

import asyncio
import itertools
import os
import time
from random import Random

import grpc
import pytest

from ratelimitd_client import AsyncNodeClient, open_async_channel
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.servers import until

CALLERS = 20
TTL_S = 2
HELD = 50
KILLS = int(os.environ.get("KILLS", "3"))
"""In a run of `deep` tests; 100 take some minutes."""
BETWEEN_KILLS_S = 0.7
TIMEOUT_S = 1.0


class Callers:
    """Callers of one user, and what they know of their holds.

    ``settled`` are the tokens of holds whose settle was answered, ``unsure`` the most that others may be charged.
    """

    def __init__(self, channels, endpoint):
        self.settled = self.unsure = self.running = self.most = self.made = 0
        self.stop = asyncio.Event()
        self._nodes = [AsyncNodeClient(channel) for channel in channels]
        self._numbers = itertools.count()
        self._check = pb.RateLimitRequest(
            identifier="u", identifier_type="user", endpoint=endpoint, tokens_requested=HELD
        )

    async def run(self, random):
        """Hold on one node and settle on another, one hold after the other."""
        while not self.stop.is_set():
            began_s = time.monotonic()
            held = await self._hold(random)
            if held is None or held.answer.reason not in {pb.WITHIN_LIMIT, pb.LIMIT_EXCEEDED}:
                # Let through unchecked: what an attempt before has charged ends by itself.
                self.unsure += HELD
            elif held.answer.allowed:
                await self._use(held.hold, began_s, random)
            else:
                await asyncio.sleep(0.02)

    async def _hold(self, random):
        hold_id = f"{self._check.endpoint}/{next(self._numbers)}"
        request = pb.HoldRequest(check=self._check, hold_id=hold_id, ttl_seconds=TTL_S)
        return await self._tried(lambda node: node.hold(request, timeout_s=TIMEOUT_S), random)

    async def _use(self, hold, began_s, random):
        self.made += 1
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(random.random() * 0.1)
        self.running -= 1
        actual = random.choice((0, 1, 20, HELD, 80))
        settled = await self._tried(
            lambda node: node.settle(hold, actual, timeout_s=TIMEOUT_S), random
        )
        if settled is not None and settled.known:
            self.settled += actual
            return
        assert settled is None or time.monotonic() - began_s > TTL_S / 2
        self.unsure += max(HELD, actual)

    async def _tried(self, call, random):
        """The answer of some node, asked one after the other; ``None`` if none has answered."""
        for _ in range(3):
            try:
                return await call(random.choice(self._nodes))
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.05)
        return None


@pytest.mark.deep
@pytest.mark.timeout(120 + 2 * KILLS)
def test_holds_are_charged_once_whoever_is_killed(cluster):
    month, slots = 10_000_000, 12
    limits = [
        pb.Limit(name="month", limit=month, window_seconds=86_400, algorithm="fixed_window"),
        pb.Limit(name="slots", limit=slots, window_seconds=60, algorithm="concurrency"),
    ]
    endpoint = f"/holds-{time.time_ns()}"
    cluster.nodes.rule(endpoint=endpoint, limits=limits, algorithm="")
    random = Random(5)

    async def run():
        channels = [open_async_channel(address) for address in cluster.nodes.addresses]
        callers = Callers(channels, endpoint)
        tasks = [asyncio.create_task(callers.run(Random(number))) for number in range(CALLERS)]
        for _ in range(KILLS):
            await asyncio.sleep(BETWEEN_KILLS_S)
            victim = random.randrange(len(cluster.nodes))
            await asyncio.to_thread(cluster.nodes.kill, victim)
            await asyncio.to_thread(cluster.nodes.start, victim)
        await asyncio.sleep(BETWEEN_KILLS_S)
        callers.stop.set()
        await asyncio.gather(*tasks)
        for channel in channels:
            await channel.close()
        return callers

    callers = asyncio.run(run())
    assert callers.made > 20 * KILLS
    assert callers.most <= slots

    def told():
        answer = cluster[0].check(endpoint, "u", peek=True)
        return {one.name: one.remaining_tokens for one in answer.limits}

    until(lambda: told().get("slots") == slots, "all slots are free again")
    spent = month - told()["month"] - 1
    assert callers.settled <= spent <= callers.settled + callers.unsure
