"""Holds on real nodes, made on one and settled on another, while nodes, callers or the store's primary are killed.

The charge is what was settled, no slot is taken twice, and none stays taken.
"""

import asyncio
import os
import sys
import time
from contextlib import asynccontextmanager
from random import Random

import pytest

from ratelimitd_client import AsyncNodeClient, open_async_channel
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.cluster.holding import Book, Caller
from tests.cluster.nodes import Nodes
from tests.cluster.shared import OPTIONS
from tests.servers import ValkeySentinel, until

CALLERS = 20
KILLS = int(os.environ.get("KILLS", "3"))
"""Kills in a run of `deep` tests; 100 take some minutes."""
BETWEEN_KILLS_S = 0.7
PROCESSES = 4
MONTH, SLOTS = 10_000_000, 12
LIMITS = [
    pb.Limit(name="month", limit=MONTH, window_seconds=86_400, algorithm="fixed_window"),
    pb.Limit(name="slots", limit=SLOTS, window_seconds=60, algorithm="concurrency"),
]
NOT_REPLICATED_S = 1.0
"""Longest replication delay on a busy machine when the primary is killed."""

pytestmark = [pytest.mark.deep, pytest.mark.timeout(120 + 10 * KILLS)]


def rule_on(nodes):
    endpoint = f"/holds-{time.time_ns()}"
    nodes.rule(endpoint=endpoint, limits=LIMITS, algorithm="")
    return endpoint


@asynccontextmanager
async def calling(nodes, endpoint, book):
    """Run callers within the block, and settle their last holds after it."""
    channels = [open_async_channel(address) for address in nodes.addresses]
    clients = [AsyncNodeClient(channel) for channel in channels]
    callers = [Caller(clients, endpoint, str(number), book.tell) for number in range(CALLERS)]
    tasks = [asyncio.create_task(caller.run()) for caller in callers]
    try:
        yield
    finally:
        for caller in callers:
            caller.stop.set()
        await asyncio.gather(*tasks)
        for channel in channels:
            await channel.close()


async def started(number, nodes, endpoint, book):
    """Start a process of callers; returns it, and the task that reads its reports until it is killed."""
    names = [f"{number}.{one}" for one in range(CALLERS // PROCESSES)]
    arguments = ("-m", "tests.cluster.holding", endpoint, ",".join(nodes.addresses), *names)
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE
    )

    async def hear():
        async for line in process.stdout:
            if line.endswith(b"\n"):  # else it was killed during a report
                who, does, tokens = line.decode().split()
                book.tell(who, does, int(tokens))
        book.killed(f"{number}.")

    return process, asyncio.create_task(hear())


async def more_holds(book, more=20):
    until_made = book.made + more
    while book.made < until_made:  # noqa: ASYNC110 -- so many that an event for each is more
        await asyncio.sleep(0.05)


def told(node, endpoint):
    """Return the tokens left of each limit."""
    answer = node.check(endpoint, "u", peek=True)
    return {one.name: one.remaining_tokens for one in answer.limits}


def spent_when_all_is_over(node, endpoint):
    until(lambda: told(node, endpoint).get("slots") == SLOTS, "all slots are free again")
    return MONTH - told(node, endpoint)["month"] - 1


def test_holds_are_charged_once_when_any_node_is_killed(cluster):
    endpoint, book, random = rule_on(cluster.nodes), Book(), Random(5)

    async def run():
        async with calling(cluster.nodes, endpoint, book):
            for _ in range(KILLS):
                await asyncio.sleep(BETWEEN_KILLS_S)
                victim = random.randrange(len(cluster.nodes))
                await asyncio.to_thread(cluster.nodes.kill, victim)
                await asyncio.to_thread(cluster.nodes.start, victim)
            await asyncio.sleep(BETWEEN_KILLS_S)

    asyncio.run(run())
    assert book.made > 20 * KILLS
    assert book.most <= SLOTS
    spent = spent_when_all_is_over(cluster[0], endpoint)
    assert book.settled <= spent <= book.settled + book.unsure


def test_holds_of_killed_callers_end_and_are_charged(cluster):
    endpoint, book, random = rule_on(cluster.nodes), Book(), Random(6)

    async def run():
        running = [await started(one, cluster.nodes, endpoint, book) for one in range(PROCESSES)]
        try:
            for number in range(KILLS):
                await more_holds(book)
                process, hearing = running.pop(random.randrange(PROCESSES))
                process.kill()
                await hearing
                running.append(await started(PROCESSES + number, cluster.nodes, endpoint, book))
        finally:
            for process, hearing in running:
                process.kill()
                await hearing
                await process.wait()

    asyncio.run(run())
    assert book.made >= 20 * KILLS
    assert book.unsure
    spent = spent_when_all_is_over(cluster[0], endpoint)
    assert book.settled <= spent <= book.settled + book.unsure


def test_a_failover_loses_only_unreplicated_settles_and_creates_no_tokens(tmp_path):
    book, killed_s = Book(), []

    async def run(nodes, servers, endpoint):
        async with calling(nodes, endpoint, book):
            for _ in range(KILLS):
                await more_holds(book)
                old = servers.primary
                killed_s.append(time.monotonic())
                old.kill()
                await asyncio.to_thread(servers.wait_for_failover, old)
                await asyncio.to_thread(servers.start_as_replica, old)

    with (
        # A busy machine must not be taken for a dead one: the replica may not have caught up for its election.
        ValkeySentinel(tmp_path / "valkey", sentinels=1, down_after_ms=3_000) as servers,
        Nodes(tmp_path / "nodes", servers.url, *OPTIONS) as nodes,
    ):
        nodes.wait_for_members()
        endpoint = rule_on(nodes)
        asyncio.run(run(nodes, servers, endpoint))
        spent = spent_when_all_is_over(nodes[0], endpoint)
    lost = sum(book.settled_between(at_s - NOT_REPLICATED_S, at_s) for at_s in killed_s)
    assert book.settled - lost <= spent <= book.settled + book.unsure
