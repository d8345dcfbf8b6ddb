"""Holds on real shared buckets: on several servers, with crashes of servers and nodes, a failover, a moved slot."""

import asyncio
import os
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from ratelimitd.algorithms import DECIDE
from ratelimitd.cluster.redis.cluster_topology import SLOT_OF_TAG
from ratelimitd.errors import (
    BreakerOpenError,
    HoldEndedError,
    HoldSettledError,
    StoreUnavailableError,
)
from ratelimitd.ledger.holds import Hold
from ratelimitd.model import US_PER_S, Algorithm, Enforcement
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.cluster.nodes import Nodes
from tests.servers import Valkey, ValkeyCluster, ValkeySentinel, until
from tests.store_scripts import rule_of
from tests.system.process import NEVER_ENDING_S, START_S
from tests.unit.cluster.redis.asking import soon
from tests.unit.cluster.test_joining import Member, running

WINDOW = rule_of(Algorithm.FIXED_WINDOW, 100, NEVER_ENDING_S)
TOKENS = rule_of(Algorithm.TOKEN_BUCKET, 100, 86_400)
LOG = rule_of(Algorithm.SLIDING_WINDOW, 100, 86_400)
SLOTS = rule_of(Algorithm.CONCURRENCY, 3, 600)
OF_TOKENS = (WINDOW, TOKENS, LOG)


class Node(Member):
    """A node's part in a cluster, and holds through it."""

    async def hold(self, buckets, cost=10, *, number=None, ttl_s=60):
        """Make a hold on the buckets of these keys, with their limits; returns its number and result."""
        number = number or os.urandom(16)
        charges = [(key, limit, DECIDE[limit.algorithm]) for key, limit in buckets.items()]
        now_us = self.clock.now_us()
        hold = Hold(number, b"digest01", charges, now_us, cost, ttl_s * US_PER_S)
        return number, await self.cluster.holds.hold(hold)

    async def settle(self, number, buckets, actual):
        limits = {self.name(key): buckets[key] for key in buckets}
        return await self.cluster.holds.settle(number, limits, actual, self.clock.now_us())

    async def left(self, buckets):
        """Return the tokens left in each bucket, by peeks."""
        answers = []
        for key, limit in buckets.items():
            now_us = self.clock.now_us()
            outcome = await self.cluster.buckets.wait(key, limit, now_us, 1, peek=True)
            is_counted = limit.algorithm is not Algorithm.CONCURRENCY and outcome[0]
            answers.append(outcome[1] + is_counted)
        return answers

    def name(self, key):
        return self.keys.stored(key)

    def key_on(self, cluster, server):
        """Return the key of a new bucket on a server of a Cluster."""
        while True:
            key = os.urandom(8)
            if SLOT_OF_TAG[self.name(key)[0]] in cluster.slots(server):
                return key


@asynccontextmanager
async def nodes(url, count=2, **settings):
    found = [Node(url, **settings) for _ in range(count)]
    async with running(*found):
        yield found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with ValkeyCluster(tmp_path_factory.mktemp("cluster"), node_timeout_ms=500) as servers:
        yield servers


def on_all(node, cluster, *limits):
    """Return a new bucket on each server, with one of these limits."""
    return {
        node.key_on(cluster, server): limit
        for server, limit in zip(range(3), limits or OF_TOKENS, strict=False)
    }


@pytest.mark.slice
async def test_a_node_settles_the_hold_of_another_on_every_server(cluster):
    async with nodes(cluster.url, CONSISTENCY="strict") as (one, two):
        buckets = on_all(one, cluster) | {one.key_on(cluster, 1): SLOTS}
        number, held = await one.hold(buckets)
        assert [outcome[:2] for outcome in held.outcomes] == [(True, 90)] * 3 + [(True, 2)]
        repeated = await two.hold(buckets, number=number)
        assert repeated == (number, held._replace(is_first=False))
        settled = await two.settle(number, buckets, 4)
        assert settled.is_first
        assert [outcome[1] for outcome in settled.outcomes] == [96, 96, 96, 3]
        assert (await one.settle(number, buckets, 4)).is_first is False
        with pytest.raises(HoldSettledError):
            await one.settle(number, buckets, 5)
        assert await one.left(buckets) == [96, 96, 96, 3]


async def test_a_denial_by_one_server_leaves_the_others_unchanged(cluster):
    async with nodes(cluster.url, CONSISTENCY="strict") as (one, two):
        buckets = on_all(one, cluster, WINDOW, LOG, WINDOW)
        scarce = {one.key_on(cluster, 2): SLOTS}
        for _ in range(SLOTS.limit):
            await one.hold(scarce)
        attempts = [node.hold(buckets | scarce) for node in (one, two) for _ in range(20)]
        for _, held in await asyncio.gather(*attempts):
            assert (held.expire_us, held.outcomes[3][:2]) == (0, (False, 0))
        await has(one, buckets, [100, 100, 100])


async def test_a_hold_repeated_concurrently_by_several_nodes_is_made_once(cluster):
    async with nodes(cluster.url, CONSISTENCY="strict") as (one, two):
        buckets = on_all(one, cluster, WINDOW, LOG, LOG) | {one.key_on(cluster, 0): SLOTS}
        for _ in range(20):
            number = os.urandom(16)
            attempts = [node.hold(buckets, 5, number=number) for node in (one, two) for _ in "abc"]
            made = [held.expire_us > 0 for _, held in await asyncio.gather(*attempts)]
            assert all(made)
            assert await one.left(buckets) == [95, 95, 95, 2]
            settles = [node.settle(number, buckets, 0) for node in (one, two)]
            assert all(settled.known for settled in await asyncio.gather(*settles))
            assert await one.left(buckets) == [100, 100, 100, 3]


async def test_a_hold_on_several_servers_ends_with_its_slot(cluster):
    async with nodes(cluster.url, CONSISTENCY="strict") as (one, two):
        brief = replace(SLOTS, window_seconds=1)
        buckets = {one.key_on(cluster, 0): WINDOW, one.key_on(cluster, 1): brief}
        number, held = await one.hold(buckets, 50)
        await asyncio.sleep(max(0, held.expire_us - one.clock.now_us()) / US_PER_S + 0.2)
        with pytest.raises(HoldEndedError):
            await two.settle(number, buckets, 90)
        assert await one.left(buckets) == [50, 3]


async def test_a_killed_server_loses_its_holds_and_creates_no_tokens(cluster):
    async with nodes(cluster.url, CONSISTENCY="strict", REDIS_TIMEOUT_MS="300") as (one, two):
        buckets = on_all(one, cluster, LOG, WINDOW, WINDOW)
        [_, _, lost] = buckets
        alive = {key: limit for key, limit in buckets.items() if key != lost}
        number, held = await one.hold(buckets, 50)
        assert held.expire_us
        cluster.nodes[2].kill()
        with pytest.raises(StoreUnavailableError):
            await one.hold(buckets, 20)
        with pytest.raises(StoreUnavailableError):
            await two.settle(number, buckets, 10)
        # A hold that was not made leaves no charges; reachable buckets are settled.
        await has(one, alive, [90, 90])
        cluster.nodes[2].start()
        await soon(lambda: cluster.nodes[2].ask("CLUSTER", "INFO").startswith(b"cluster_state:ok"))
        await soon(lambda: two.cluster.store.connected and one.cluster.store.connected)
        other = await again(lambda: one.hold({lost: WINDOW}, 70))
        assert other[1].outcomes[0][:2] == (True, 30)
        settled = await again(lambda: two.settle(number, buckets, 10))
        assert settled.known
        assert await two.left({lost: WINDOW}) == [30]
        assert (await two.settle(other[0], {lost: WINDOW}, 0)).is_first
        assert await two.left({lost: WINDOW}) == [100]


async def test_holds_are_judged_by_reachable_servers_while_the_breaker_of_another_is_open(cluster):
    async with nodes(cluster.url, CONSISTENCY="strict", REDIS_TIMEOUT_MS="300") as (one, two):
        lost, full, window = (one.key_on(cluster, server) for server in (2, 0, 1))
        one.cluster.watch()  # each server has its breaker
        await one.hold({full: WINDOW}, WINDOW.limit)
        cluster.nodes[2].kill()
        await open_breaker(one, lost)
        _, denied = await one.hold({lost: WINDOW, full: WINDOW, window: WINDOW})
        assert (denied.outcomes[0], denied.outcomes[1][0], denied.expire_us) == (None, False, 0)
        with pytest.raises(BreakerOpenError):
            await one.hold({lost: WINDOW, window: WINDOW})
        await has(two, {window: WINDOW}, [100])
        observed = {lost: replace(WINDOW, enforcement=Enforcement.OBSERVE), window: WINDOW}
        number, held = await one.hold(observed)
        assert (held.is_first, held.outcomes[0], held.outcomes[1][1]) == (True, None, 90)
        assert (await two.settle(number, {window: WINDOW}, 0)).is_first
        await has(two, {window: WINDOW}, [100])
        cluster.nodes[2].start()
        await soon(lambda: cluster.nodes[2].ask("CLUSTER", "INFO").startswith(b"cluster_state:ok"))


async def open_breaker(node, lost):
    """Make holds on a lost server until its breaker is open."""
    while True:
        try:
            await node.hold({lost: WINDOW})
        except BreakerOpenError:
            return
        except StoreUnavailableError:
            await asyncio.sleep(0.01)


async def has(node, buckets, expected):
    """Wait until this much is left: withdrawals and messages may be in flight."""
    for _ in range(200):
        left = await node.left(buckets)
        if left == expected:
            break
        await asyncio.sleep(0.02)
    assert left == expected


async def again(call):
    """Return the result of a call, repeated until the server is back."""
    while True:
        try:
            return await call()
        except StoreUnavailableError:
            await asyncio.sleep(0.05)


async def test_a_moved_slot_keeps_its_holds(cluster):
    async with nodes(cluster.url, CONSISTENCY="strict") as (one, two):
        buckets = {one.key_on(cluster, 0): WINDOW}
        [key] = buckets
        number, _ = await one.hold(buckets, 50)
        source, target = cluster.nodes[:2]
        slot = SLOT_OF_TAG[one.name(key)[0]]
        await asyncio.to_thread(cluster.move_slot, slot, source, target)
        try:
            settled = await again(lambda: two.settle(number, buckets, 20))
            assert (settled.is_first, settled.outcomes[0][1]) == (True, 80)
        finally:
            await asyncio.to_thread(cluster.move_slot, slot, target, source)


async def test_a_failover_between_a_hold_and_its_settle_creates_no_tokens(tmp_path):
    with ValkeySentinel(tmp_path / "valkey", replicas=1, sentinels=1, down_after_ms=300) as servers:
        async with nodes(servers.url, CONSISTENCY="strict", BREAKER_RECOVERY_S="1") as (one, two):
            buckets = {b"a": WINDOW, b"b": TOKENS, b"c": LOG, b"s": SLOTS}
            number, held = await one.hold(buckets, 50)
            old = servers.primary
            offset = old.info("replication")["master_repl_offset"]
            [replica] = [node for node in servers.nodes if node is not old]
            until(
                lambda: replica.info("replication")["slave_repl_offset"] >= offset,
                "the replica knows of the hold",
            )
            old.kill()
            await asyncio.to_thread(servers.wait_for_failover, old)
            repeated = await again(lambda: one.hold(buckets, 50, number=number))
            assert repeated == (number, held._replace(is_first=False))
            settled = await again(lambda: two.settle(number, buckets, 20))
            assert settled.is_first
            assert [outcome[1] for outcome in settled.outcomes] == [80, 80, 80, 3]
            assert (await one.settle(number, buckets, 20)).is_first is False
            assert await one.left(buckets) == [80, 80, 80, 3]


@pytest.mark.parametrize("consistency", ["eventual", "strict"])
async def test_slots_in_use_never_exceed_the_limit(cluster, consistency):
    async with nodes(cluster.url, 3, CONSISTENCY=consistency) as found:
        buckets = {os.urandom(8): SLOTS, os.urandom(8): replace(WINDOW, limit=100_000)}
        in_use, most, made = 0, 0, 0

        async def work(node):
            nonlocal in_use, most, made
            for _ in range(30):
                number, held = await node.hold(buckets, 3)
                if held.expire_us:
                    in_use, made = in_use + 1, made + 1
                    most = max(most, in_use)
                    await asyncio.sleep(0.002)
                    in_use -= 1
                    await node.settle(number, buckets, 1)

        await asyncio.gather(*[work(node) for node in found for _ in range(5)])
        assert most <= SLOTS.limit
        assert made >= 30
        await has(found[0], buckets, [3, 100_000 - made])


async def test_a_node_that_decides_by_its_view_is_notified_of_holds(tmp_path):
    with Valkey(tmp_path / "valkey") as valkey:
        async with nodes(valkey.url) as (one, two):
            buckets = {b"a": WINDOW}
            assert await one.left(buckets) == [100]
            assert await two.left(buckets) == [100]
            number, _ = await one.hold(buckets, 90)
            for node in (one, two):
                await has(node, buckets, [10])
            await two.settle(number, buckets, 150)
            for node in (one, two):
                await has(node, buckets, [0])


def test_a_hold_outlives_the_node_that_made_it(tmp_path):
    with (
        ValkeyCluster(tmp_path / "valkey") as servers,
        Nodes(tmp_path / "nodes", servers.url, "--redis-timeout-ms", "500", count=2) as started,
    ):
        started.wait_for_members()
        limits = [
            pb.Limit(name="tokens", limit=100, window_seconds=86_400, algorithm="fixed_window"),
            pb.Limit(name="slots", limit=2, window_seconds=600, algorithm="concurrency"),
        ]
        started.rule(endpoint="/a", limits=limits, algorithm="")
        check = pb.RateLimitRequest(
            identifier="u", identifier_type="user", endpoint="/a", tokens_requested=40
        )
        request = pb.HoldRequest(check=check, ttl_seconds=60, hold_id="one")
        held = started[0].holds.Hold(request, timeout=START_S)
        assert held.answer.allowed
        started.kill(0)
        assert started[1].holds.Hold(request, timeout=START_S).hold == held.hold
        settle = pb.SettleRequest(hold=held.hold, actual=10)
        for _ in range(2):
            settled = started[1].holds.Settle(settle, timeout=START_S)
            assert (settled.known, settled.charged) == (True, 10)
            left = {one.name: one.remaining_tokens for one in settled.limits}
            assert left == {"tokens": 90, "slots": 2}
