import asyncio
import struct
from contextlib import asynccontextmanager

import pytest

from ratelimitd.cluster.redis.opening import open_topology
from ratelimitd.cluster.redis.pubsub import CHANNEL_TAGS, MAX_PAYLOAD_BYTES, SILENCE_S, Bus
from ratelimitd.cluster.redis.topology import TAGS
from ratelimitd.settings.urls import parse_redis_url
from tests.chaos_proxy import ChaosProxy
from tests.servers import ValkeyCluster, free_port
from tests.unit.cluster.redis.asking import soon

TIMEOUT_MS = 5_000


class Node:
    """The messages of a node, and those that it received."""

    def __init__(self, topology, **options):
        self.topology = topology
        self.received = []
        self.gaps = 0
        self.bus = Bus(topology, **options)

    def gap(self):
        self.gaps += 1


async def one_beat(_seconds):
    """Replaces the pause between heartbeats, so that there is no second one."""
    await asyncio.Event().wait()


@asynccontextmanager
async def node(url, *, report=lambda _line: None, timeout_ms=TIMEOUT_MS, **options):
    topology = open_topology(parse_redis_url(url), timeout_ms=timeout_ms, report=report)
    await topology.start()
    node = Node(topology, **options)
    await node.bus.start(node.received.append, node.gap)
    try:
        yield node
    finally:
        await node.bus.close()
        await topology.close()


@asynccontextmanager
async def pair(url, **options):
    async with node(url, **options) as first, node(url, **options) as second:
        await soon(lambda: first.bus.connected and second.bus.connected)
        await soon(lambda: first.gaps and second.gaps)
        yield first, second


async def test_a_nodes_messages_reach_the_others_and_not_itself(valkey):
    async with pair(valkey.url) as (first, second):
        first.bus.publish(0, b"one")
        first.bus.publish(255, b"two")
        second.bus.publish(7, b"three")
        await soon(lambda: second.received == [b"one", b"two"] and first.received == [b"three"])
        assert (first.bus.undelivered_total, second.bus.undelivered_total) == (0, 0)


async def test_a_new_subscription_is_a_gap(valkey):
    async with node(valkey.url) as first:
        await soon(lambda: first.bus.connected)
        await soon(lambda: first.gaps)
        assert (first.gaps, first.bus.gaps_total) == (1, 1)


@pytest.mark.parametrize("payload", [b"", b"x" * (MAX_PAYLOAD_BYTES + 1)])
async def test_a_payload_is_neither_empty_nor_too_long(valkey, payload):
    async with node(valkey.url) as first:
        with pytest.raises(ValueError, match="1 to 8192 bytes"):
            first.bus.publish(0, payload)


async def test_the_longest_payload_arrives(valkey):
    async with pair(valkey.url) as (first, second):
        first.bus.publish(0, b"x" * MAX_PAYLOAD_BYTES)
        await soon(lambda: second.received == [b"x" * MAX_PAYLOAD_BYTES])


def message(sender, number, payload=b"", form=1):
    return struct.pack(">B8sQ", form, sender, number) + payload


async def test_lost_repeated_reordered_and_foreign_messages_are_distinguished(valkey):
    async with node(valkey.url, sleep=one_beat) as first:
        await soon(lambda: first.bus.connected and first.gaps == 1)
        other = b"a-sender"
        for told in (
            message(other, 5, b"five"),
            message(other, 5, b"again"),
            message(other, 7, b"seven"),
            message(other, 6, b"late"),
            message(other, 8, b"x" * (MAX_PAYLOAD_BYTES + 1)),
            message(other, 9, b"in another form", form=2),
            message(first.bus._sender, 99, b"own"),
            b"too short",
            message(b"another!", 1, b"end"),
        ):
            valkey.ask("PUBLISH", "rl1:bus:0", told)
        await soon(lambda: first.received[-1:] == [b"end"])
        assert first.received == [b"five", b"seven", b"end"]
        await soon(lambda: first.gaps == 2)


async def test_the_next_heartbeat_reveals_a_lost_message(valkey):
    async with node(valkey.url, sleep=one_beat) as first:
        await soon(lambda: first.bus.connected and first.gaps == 1)
        other = b"a-sender"
        valkey.ask("PUBLISH", "rl1:bus:0", message(other, 1, b"one"))
        valkey.ask("PUBLISH", "rl1:bus:0", message(other, 3))
        await soon(lambda: first.gaps == 2)
        assert first.received == [b"one"]


async def test_a_lost_subscription_is_renewed_and_is_a_gap(valkey):
    async with pair(valkey.url) as (first, second):
        valkey.ask("CLIENT", "KILL", "TYPE", "pubsub")
        await soon(lambda: first.gaps == 2 and second.gaps == 2)
        first.bus.publish(3, b"heard")
        await soon(lambda: second.received == [b"heard"])


async def test_a_silent_subscription_is_renewed_after_missing_heartbeats(valkey, monkeypatch):
    monkeypatch.setattr("ratelimitd.cluster.redis.pubsub.SILENCE_S", 0.2)
    monkeypatch.setattr("ratelimitd.cluster.redis.pubsub.HEARTBEAT_S", 0.05)
    with ChaosProxy(valkey.port) as proxy:
        async with pair(proxy.url) as (first, second):
            proxy.partition()
            await soon(lambda: not first.bus.connected and not second.bus.connected)
            proxy.heal()
            await soon(lambda: first.bus.connected and second.bus.connected)
            await soon(lambda: first.gaps >= 2 and second.gaps >= 2)


async def test_undelivered_messages_are_counted_and_dropped():
    async with node(f"redis://127.0.0.1:{free_port()}", sleep=one_beat) as first:
        first.bus.publish(0, b"nobody hears it")
        await soon(lambda: first.bus.undelivered_total == 2)
        assert not first.bus.connected


async def test_a_message_that_is_acknowledged_late_is_delivered(valkey):
    with ChaosProxy(valkey.port) as proxy:
        async with node(proxy.url, timeout_ms=10, sleep=one_beat) as first:
            await soon(lambda: not first.topology.of_tag(0).in_flight)
            before = first.bus.undelivered_total
            proxy.down.latency_ms = 50
            first.bus.publish(0, b"heard")
            await soon(lambda: not first.topology.of_tag(0).in_flight)
            assert first.bus.undelivered_total == before


async def test_a_missing_permission_to_publish_is_reported_once_until_granted(valkey):
    valkey.ask(
        "ACL", "SETUSER", "node", "on", ">pw", "resetchannels", "&rl1:*", "+@all", "-publish"
    )
    lines = []
    own = f"redis://node:pw@{valkey.address}"
    async with node(own, report=lines.append, sleep=one_beat) as first:
        await soon(lambda: lines)
        first.bus.publish(0, b"refused as the heartbeat was")
        await soon(lambda: first.bus.undelivered_total == 2)
        valkey.ask("ACL", "SETUSER", "node", "+publish")
        first.bus.publish(0, b"taken")
        await soon(lambda: "messages of rl1:bus:0: sent again" in lines)
    told = "messages of rl1:bus:0: cannot be sent, the shared state answered NOPERM"
    assert lines.count(told) == lines.count("messages of rl1:bus:0: sent again") == 1
    valkey.ask("ACL", "DELUSER", "node")


async def test_clusters_in_two_databases_of_one_server_get_no_messages_of_each_other(valkey):
    async with pair(f"{valkey.url}/1") as (first, second), node(f"{valkey.url}/2") as stranger:
        await soon(lambda: stranger.bus.connected)
        first.bus.publish(0, b"ours")
        await soon(lambda: second.received == [b"ours"])
        valkey.ask("PUBLISH", "rl1:bus:2", message(b"a-sender", 1, b"theirs"))
        await soon(lambda: stranger.received == [b"theirs"])


async def test_a_failing_listener_does_not_end_the_subscription(valkey):
    failures = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: failures.append(context["exception"])
    )
    async with pair(valkey.url) as (first, second):
        second.bus._on_message = None
        first.bus.publish(0, b"one")
        await soon(lambda: failures)
        second.bus._on_message = second.received.append
        first.bus.publish(0, b"two")
        await soon(lambda: second.received == [b"two"])
        assert second.gaps == 1


async def test_in_a_cluster_every_tag_reaches_all_nodes_over_sharded_channels(tmp_path):
    with ValkeyCluster(tmp_path, node_timeout_ms=500) as cluster:
        async with pair(cluster.url) as (first, second):
            for tag in range(TAGS):
                first.bus.publish(tag, b"%d" % tag)
            await soon(lambda: len(second.received) == TAGS)
            assert sorted(map(int, second.received)) == list(range(TAGS))
            spread = [node.ask("PUBSUB", "SHARDCHANNELS") for node in cluster.nodes]
            assert all(spread), "each shard has some of the channels"
            assert sorted(name for names in spread for name in names) == sorted(
                b"rl1:{%02x}:bus" % tag for tag in CHANNEL_TAGS
            )
            assert first.bus.undelivered_total == 0


def test_three_missing_heartbeats_are_silence():
    assert SILENCE_S == 3.0


async def test_a_bus_that_was_never_started_can_be_closed(valkey):
    topology = open_topology(parse_redis_url(valkey.url), timeout_ms=TIMEOUT_MS)
    await Node(topology).bus.close()
