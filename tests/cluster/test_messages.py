"""Limits while messages between nodes are late, duplicated, out of order, or lost."""

import itertools
import struct

import redis

from ratelimitd.cluster.redis.pubsub import MAX_PAYLOAD_BYTES
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.cluster.admissions import tokens
from tests.cluster.load import keys, steady
from tests.cluster.nodes import Nodes
from tests.cluster.shared import OPTIONS, change_rule
from tests.servers import Valkey, until
from tests.system.process import START_S

CHANNEL = "rl1:bus:0"
MEMORY = "rate_limiter_memory_usage_bytes"
GAPS = "rate_limiter_message_gaps_total"
HEAD = struct.Struct(">B8sQ")
"""Head of a message: its form, the sender, and the sender's number."""

MIB = 2**20


def spend(node, endpoint, times, identifier="u"):
    """Spend tokens, all of them allowed."""
    assert all(node.check(endpoint, identifier).allowed for _ in range(times))


def test_a_silent_subscription_is_renewed_and_missed_changes_are_read(cluster):
    endpoint, changed = cluster.new_rule(limit=1_000), cluster.new_rule(limit=1_000)
    node, proxy = cluster[2], cluster.proxies[2]
    rule_id = node.check(changed, peek=True).rule_id
    spend(node, endpoint, 60)
    cluster.settled()
    gaps, connections = node.metric(GAPS), proxy.accepted
    proxy.silence(b"SUBSCRIBE")
    cluster[0].reset(endpoint)
    change_rule(cluster[0], rule_id, limit=500)
    assert node.spent(endpoint) == 60  # it got no message, and decides as before
    assert node.metric("rate_limiter_shared_state_up") == 1.0
    until(lambda: node.metric(GAPS) > gaps, "the node knows that it missed something")
    until(lambda: node.spent(endpoint) == 0, "the node has heard of the reset")
    until(lambda: node.check(changed, peek=True).limit == 500, "the node has the changed rule")
    assert node.metric(GAPS) == gaps + 1
    assert proxy.accepted == connections + 1  # its spends are still sent
    spend(node, changed, 7)
    cluster.settled()
    cluster[0].reset(changed)
    until(lambda: node.spent(changed) == 0, "the node hears again")


def test_an_explanation_counts_spends_of_other_nodes_that_no_message_has_announced(cluster):
    endpoint = cluster.new_rule(limit=100)
    # Nodes announce that half of a limit is used up, and nothing until it is all used up.
    for node, times in ((cluster[0], 1), (cluster[1], 60), (cluster[2], 8)):
        spend(node, endpoint, times)
        cluster.settled()
        cluster[0].check(endpoint, peek=True)
    check = pb.RateLimitRequest(identifier="u", identifier_type="user", endpoint=endpoint)
    explained = cluster[0].node.ExplainRateLimit(check, timeout=START_S).answer
    assert (explained.allowed, explained.remaining_tokens) == (True, 100 - 69 - 1)
    assert cluster.stored(endpoint, "u") == 69


def listeners(valkey):
    return valkey.ask("CLIENT", "LIST", "TYPE", "pubsub").decode()


def test_a_slow_subscriber_is_disconnected_and_reads_missed_changes(
    tmp_path,
):
    valkey = Valkey(tmp_path / "valkey")
    url = f"unix://{valkey.unix_path}"  # the kernel buffers less for a Unix socket than for TCP
    with valkey, Nodes(tmp_path / "nodes", url, *OPTIONS, count=2) as nodes:
        nodes.wait_for_members()
        valkey.ask("CONFIG", "SET", "client-output-buffer-limit", "pubsub 1mb 0 0")
        rule = nodes.rule(limit=1_000, window_seconds=3_600, algorithm="fixed_window")
        spend(nodes[1], "/a", 60)
        nodes.settled()
        gaps, memory = nodes[1].metric(GAPS), nodes[1].metric(MEMORY)
        nodes.pause(1)
        nodes[0].reset("/a")
        change_rule(nodes[0], rule.id, limit=500)
        for number in itertools.count(1):
            flood = HEAD.pack(1, b"stranger", number) + b"?" * MAX_PAYLOAD_BYTES
            valkey.ask("PUBLISH", CHANNEL, flood)
            if "name=ratelimitd:n1 " not in listeners(valkey):
                break
            assert number * MAX_PAYLOAD_BYTES < 16 * MIB, "the server keeps all of it"
        assert valkey.info("stats")["client_output_buffer_limit_disconnections"] >= 1
        nodes.resume(1)
        until(lambda: nodes[1].metric(GAPS) > gaps, "the node knows that it missed something")
        until(lambda: nodes[1].spent("/a") == 0, "the node has heard of the reset")
        until(lambda: nodes[1].check("/a", peek=True).limit == 500, "it has the changed rule")
        assert "name=ratelimitd:n1 " in listeners(valkey)
        assert nodes[1].metric(MEMORY) < memory + 8 * MIB


class Recorded:
    """Messages between nodes, recorded to be sent again."""

    def __init__(self, valkey):
        self._client = redis.Redis(unix_socket_path=str(valkey.unix_path), protocol=2)
        self._listener = self._client.pubsub(ignore_subscribe_messages=True)
        self._listener.subscribe(CHANNEL)
        self._listener.get_message(timeout=None)
        self.messages = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._listener.close()
        self._client.close()

    def kinds(self):
        """Record the messages so far; return their kinds."""
        while (heard := self._listener.get_message()) is not None:
            self.messages.append(heard["data"])
        return {message[HEAD.size : HEAD.size + 1] for message in self.messages}

    def say(self, messages):
        for message in messages:
            self._client.publish(CHANNEL, message)

    def as_news(self, messages):
        """Return the same messages from a new sender, so that their numbers are not old."""
        for number, message in enumerate(messages, 1):
            yield HEAD.pack(1, b"an echo!", number) + message[HEAD.size :]


def test_duplicate_late_and_reordered_messages_change_nothing(cluster):
    endpoint, marker = cluster.new_rule(limit=200), cluster.new_rule(limit=1_000)
    users = keys(3)
    spend(cluster[2], marker, 3)
    with Recorded(cluster.valkey) as recorded:
        log = cluster.offer(endpoint, steady(300, 1.5, nodes=3, keys=users))
        cluster[0].reset(marker)
        cluster[0].reset(endpoint, users[0])
        until(
            lambda: {b"", b"S", b"D"} <= recorded.kinds(), "heartbeats, states and resets are heard"
        )
        stored = {user: cluster.stored(endpoint, user) for user in users}
        assert stored == {user: tokens(log.of(user).admitted) for user in users} | {users[0]: 0}
        seen = {(n, user): cluster[n].spent(endpoint, user) for n in range(3) for user in users[1:]}
        spend(cluster[2], marker, 3)
        cluster.settled()
        old = recorded.messages
        recorded.say(old)
        recorded.say(reversed(old))
        recorded.say(recorded.as_news(reversed(old)))
        recorded.say(recorded.as_news(old))
    cluster[0].reset(marker)
    until(lambda: cluster[2].spent(marker) == 0, "all that was said before is heard")
    for (n, user), spent in seen.items():
        assert spent <= cluster[n].spent(endpoint, user) <= stored[user]
    assert {node.spent(endpoint, users[0]) for node in cluster.nodes.served} == {0}
    assert {user: cluster.stored(endpoint, user) for user in users} == stored
    assert cluster.nodes.metric_sum("rate_limiter_shared_state_corrupt_total") == 0
    again = cluster.offer(endpoint, steady(300, 1.5, nodes=3, keys=users[1:]))
    for user in users[1:]:
        assert 200 <= stored[user] + tokens(again.of(user).admitted) <= 200 * 1.51
