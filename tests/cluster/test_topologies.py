"""Nodes on a Valkey Cluster, and behind Sentinel: checks during the loss of a shard, a moved slot, and a failover."""

import itertools
import time
from dataclasses import replace

import pytest

from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.cluster.redis.cluster_topology import SLOT_OF_TAG
from ratelimitd.model import Algorithm, IdentifierType, Rule
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.cluster.admissions import tokens
from tests.cluster.load import Event, offer, steady
from tests.cluster.nodes import Nodes
from tests.cluster.shared import KEY_SECRET, OPTIONS, down, health, spent
from tests.servers import ValkeyCluster, ValkeySentinel, until
from tests.system.process import NEVER_ENDING_S

COUNT = 2
LIMIT = 1_000_000
PASSWORD = "not-for-the-logs"


class Served:
    """Nodes on a shared state of several servers; each test has its own rule."""

    def __init__(self, nodes, servers):
        self.nodes, self.settled = nodes, nodes.settled
        self.servers = servers
        self._numbers = itertools.count(1)

    def rule(self, limit=LIMIT):
        endpoint = f"/{next(self._numbers)}"
        kind = {"window_seconds": NEVER_ENDING_S, "algorithm": "fixed_window"}
        self.nodes.rule(endpoint=endpoint, limit=limit, **kind)
        return Rule(
            "",
            endpoint,
            IdentifierType.USER,
            limit=limit,
            window_seconds=NEVER_ENDING_S,
            algorithm=Algorithm.FIXED_WINDOW,
        )

    def load(self, rule, seconds, *events, keys=("a",)):
        schedule = steady(200, seconds, nodes=COUNT, keys=keys)
        return offer(self.nodes.addresses, schedule, endpoint=rule.endpoint, events=events).log

    def whole(self):
        until(lambda: not any(map(down, self.nodes.served)), "the nodes are whole again")


def bucket_name(rule, identifier):
    keys = BucketKeys(KEY_SECRET.encode())
    return keys.stored(identifier.encode() + keys.scope(rule, rule.endpoint))


def slot_of(rule, identifier):
    return SLOT_OF_TAG[bucket_name(rule, identifier)[0]]


@pytest.fixture(scope="module")
def on_cluster(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cluster")
    with (
        ValkeyCluster(directory / "valkey") as servers,
        Nodes(directory / "nodes", servers.url, *OPTIONS, count=COUNT) as nodes,
    ):
        nodes.wait_for_members()
        yield Served(nodes, servers)


@pytest.fixture(scope="module")
def on_sentinel(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sentinel")
    with (
        ValkeySentinel(directory / "valkey", password=PASSWORD) as servers,
        Nodes(directory / "nodes", servers.url, *OPTIONS, count=COUNT) as nodes,
    ):
        nodes.wait_for_members()
        yield Served(nodes, servers)


def test_nodes_share_a_limit_on_every_shard(on_cluster):
    rule = on_cluster.rule(limit=20)
    identifiers = [f"u{number}" for number in range(30)]
    shards = {slot_of(rule, one) * 3 // 16_384 for one in identifiers}
    assert shards == {0, 1, 2}
    first, second = on_cluster.nodes.served
    left = {}
    for identifier in identifiers:
        reasons = [first.check(rule.endpoint, identifier).reason for _ in range(20)]
        assert set(reasons) <= {pb.WITHIN_LIMIT, pb.FAIL_OPEN_ERROR}
        left[identifier] = reasons.count(pb.FAIL_OPEN_ERROR)  # on a machine that stalls
    on_cluster.settled()
    for identifier in identifiers:
        reasons = [second.check(rule.endpoint, identifier).reason for _ in range(20)]
        assert reasons.count(pb.WITHIN_LIMIT) <= left[identifier]
    assert sum(left.values()) < 30


def a_move(servers, rule):
    """Return the slot of "a", its server, and another server to move it to."""
    slot = slot_of(rule, "a")
    home = next(number for number in range(3) if slot in servers.slots(number))
    return slot, servers.nodes[home], servers.nodes[(home + 1) % 3]


def names_in(slot, rule, prefix, count):
    """Return identifiers whose buckets are in a slot."""
    names = (f"{prefix}{number}" for number in itertools.count())
    return list(itertools.islice((name for name in names if slot_of(rule, name) == slot), count))


def test_a_slot_that_moves_under_load_keeps_its_counts(on_cluster):
    rule = on_cluster.rule()
    servers = on_cluster.servers
    slot, here, there = a_move(servers, rule)

    def move():
        servers.move_slot(slot, here, there)

    def back():
        servers.move_slot(slot, there, here)

    log = on_cluster.load(rule, 3.0, Event(0.7, move), Event(1.9, back))
    assert not log.unknown
    on_cluster.settled()
    errors = sum(entry.reason == pb.FAIL_OPEN_ERROR for entry in log.entries)
    least = tokens(log.admitted)
    assert least <= spent(here.ask, rule, "a") <= least + errors
    assert errors < 0.1 * len(log.entries), log.reasons
    on_cluster.whole()


def test_checks_of_new_buckets_in_a_migrating_slot_are_decided(on_cluster):
    rule = on_cluster.rule(limit=5)
    servers, node = on_cluster.servers, on_cluster.nodes[0]
    slot, here, there = a_move(servers, rule)
    together = names_in(slot, rule, "new", 5)
    servers.begin_to_move_slot(slot, here, there)
    try:
        reasons = [node.check(rule.endpoint, "a").reason]
        reasons += [answer.reason for answer in node.check_batch(rule.endpoint, together)]
        assert reasons == [pb.WITHIN_LIMIT] * 6
    finally:
        servers.move_slot(slot, here, there)
        servers.move_slot(slot, there, here)
    assert {node.check(rule.endpoint, name).remaining_tokens for name in ("a", *together)} == {3}
    on_cluster.whole()


def test_a_half_moved_slot_opens_no_breaker_and_each_node_limits_its_buckets(
    on_cluster,
):
    rule = on_cluster.rule(limit=10)
    servers, node = on_cluster.servers, on_cluster.nodes[0]
    slot, here, there = a_move(servers, rule)
    together = names_in(slot, rule, "half", 6)
    for _ in range(2):  # first unknown, then known
        assert {one.allowed for one in node.check_batch(rule.endpoint, together)} == {True}
    on_cluster.settled()
    servers.begin_to_move_slot(slot, here, there)
    try:
        keys = here.ask("CLUSTER", "GETKEYSINSLOT", slot, 1_000)
        buckets = [key for key in keys if b":s:" not in key]  # the records of senders stay
        here.ask("MIGRATE", "127.0.0.1", there.port, "", 0, 5_000, "KEYS", *buckets)
        reasons = []
        since_s = time.monotonic()
        while time.monotonic() < since_s + 3:
            reasons += [one.reason for one in node.check_batch(rule.endpoint, together)]
        assert reasons.count(pb.WITHIN_LIMIT) == 8 * len(together)
        assert set(reasons) == {pb.WITHIN_LIMIT, pb.LIMIT_EXCEEDED}
        assert down(node)  # spends are not settled
        assert health(node).breaker_state == "closed"
    finally:
        servers.move_slot(slot, here, there)
        servers.move_slot(slot, there, here)
    on_cluster.whole()
    on_cluster.settled()
    assert [spent(here.ask, rule, name) for name in together] == [10] * len(together)


def test_the_loss_of_one_shard_affects_only_its_own_checks(on_cluster):
    rule = on_cluster.rule(limit=5)
    servers, node = on_cluster.servers, on_cluster.nodes[0]
    names = [f"u{number}" for number in range(300)]
    dead, alive = [], []
    for name in names:
        (dead if slot_of(rule, name) in servers.slots(0) else alive).append(name)
    servers.nodes[0].kill()
    breaker = iter(dead)
    until(
        lambda: node.check(rule.endpoint, next(breaker)).reason == pb.FAIL_OPEN_BREAKER,
        "the breaker of the dead shard is open",
    )
    assert {node.check(rule.endpoint, name).reason for name in alive} == {pb.WITHIN_LIMIT}
    report = health(node)
    assert report.status == pb.DEGRADED
    assert not report.shared_state_connected
    servers.nodes[0].start()
    on_cluster.whole()
    reasons = {node.check(rule.endpoint, name).reason for name in names}
    assert reasons == {pb.WITHIN_LIMIT}


def test_shards_that_wait_for_a_lost_one_are_used_again_once_the_cluster_is_whole(tmp_path):
    """With the servers' default one lost shard makes all of them answer CLUSTERDOWN."""
    options = (*OPTIONS, "--breaker-recovery-s", "3600")  # only an early probe closes a breaker
    with (
        ValkeyCluster(tmp_path / "valkey", 3, "--cluster-require-full-coverage", "yes") as servers,
        Nodes(tmp_path / "nodes", servers.url, *options, count=1) as nodes,
    ):
        served = Served(nodes, servers)
        rule = served.rule()
        names = (f"u{number}" for number in itertools.count())

        def answers(number):
            """Return the reason of a check of a new bucket of a shard."""
            name = next(one for one in names if slot_of(rule, one) in servers.slots(number))
            return nodes[0].check(rule.endpoint, name).reason

        servers.nodes[0].kill()
        for number in (1, 2):
            until(
                lambda of=number: answers(of) == pb.FAIL_OPEN_BREAKER,
                "the breaker of a shard that waits is open",
            )
        servers.nodes[0].start()
        for number in (1, 2):
            until(
                lambda of=number: answers(of) == pb.WITHIN_LIMIT,
                "the breaker of a shard that waited is closed",
            )
        served.whole()


def test_a_shard_lost_between_two_charges_leaves_the_other_limits_in_force(on_cluster):
    """Each check is for a user, on any shard, and for everybody, on a live one."""
    rule = on_cluster.rule(limit=5)
    for_all = replace(rule, id="all", identifier_type="all", limit=250)
    name = bucket_name(for_all, "")
    servers = on_cluster.servers
    dying = next(number for number in range(3) if SLOT_OF_TAG[name[0]] not in servers.slots(number))
    home = next(number for number in range(3) if SLOT_OF_TAG[name[0]] in servers.slots(number))
    on_cluster.nodes.rule(
        endpoint=rule.endpoint,
        identifier_type="all",
        limit=for_all.limit,
        window_seconds=NEVER_ENDING_S,
        algorithm="fixed_window",
    )
    users = [f"u{number}" for number in range(60)]
    log = on_cluster.load(rule, 4.0, Event(1.0, servers.nodes[dying].kill), keys=users)
    assert not log.unknown
    assert log.reasons.keys() <= {
        "WITHIN_LIMIT", "LIMIT_EXCEEDED", "FAIL_OPEN_ERROR", "FAIL_OPEN_BREAKER",
    }  # fmt: skip
    servers.nodes[dying].start()
    on_cluster.whole()
    on_cluster.settled()
    allowed = tokens(one for one in log.entries if one.allowed)
    errors = tokens(one for one in log.entries if one.reason == pb.FAIL_OPEN_ERROR)
    charged = spent(servers.nodes[home].ask, for_all, "")
    # Everybody's limit is charged for all that was allowed, except for late answers of its own shard.
    assert allowed - errors <= charged <= allowed + errors
    assert charged <= for_all.limit + COUNT * 5
    assert max(tokens(log.of(user).admitted) for user in users) <= rule.limit + COUNT


def test_a_failover_is_followed(on_sentinel):
    rule = on_sentinel.rule()
    servers = on_sentinel.servers
    old = servers.primary
    killed_s = []

    def kill():
        killed_s.append(time.monotonic())
        old.kill()

    log = on_sentinel.load(rule, 3.0, Event(1.0, kill), keys=("a", "b"))
    assert not log.unknown
    assert log.between(0, killed_s[0]).reasons.keys() == {"WITHIN_LIMIT"}
    new = servers.wait_for_failover(old)
    on_sentinel.whole()
    again = on_sentinel.load(rule, 0.5, keys=("a", "b"))
    assert again.reasons.keys() == {"WITHIN_LIMIT"}
    on_sentinel.settled()
    for key in ("a", "b"):
        # Spends that the old primary acknowledged but did not replicate are lost: those of a moment.
        admitted = log.of(key).admitted
        safe = [one for one in admitted if one.received_s < killed_s[0] - 0.5]
        most = [*log.of(key).entries, *again.of(key).entries]
        stored = spent(new.ask, rule, key)
        assert tokens(safe) + tokens(again.of(key).admitted) <= stored <= tokens(most)
    for number in range(COUNT):
        assert PASSWORD not in on_sentinel.nodes.log(number)
    old.start()
