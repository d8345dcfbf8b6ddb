"""A shared limit while one of its nodes dies, hangs or leaves."""

import pytest

from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.cluster.admissions import tokens
from tests.cluster.load import Event
from tests.cluster.nodes import Nodes
from tests.cluster.shared import OPTIONS, health, use_up
from tests.servers import until

UNSETTLED_S = 0.5
"""Age at which a node's spends are settled, unless the machine is very slow: a sync takes 0.1 s."""


def test_a_killed_node_loses_only_its_last_spends(cluster):
    endpoint = cluster.new_rule()
    log = cluster.load(endpoint, 3.0, Event(1.5, lambda: cluster.nodes.kill(1)))
    others = [entry for entry in log.entries if entry.node != 1]
    assert {entry.reason for entry in others} == {pb.WITHIN_LIMIT}
    killed_s = max(entry.sent_s for entry in log.entries if entry.node == 1)
    for key in log.keys:
        admitted = log.of(key).admitted
        last = [one for one in admitted if one.node == 1 and one.sent_s > killed_s - UNSETTLED_S]
        unknown = tokens(log.of(key).unknown)
        stored = cluster.stored(endpoint, key)
        assert tokens(admitted) - tokens(last) <= stored <= tokens(admitted) + unknown


def test_a_restarted_node_asks_before_it_allows(cluster):
    endpoint = cluster.new_rule(limit=5)
    node = cluster[0]
    use_up(node, endpoint)
    cluster.settled()
    cluster.nodes.kill(0)
    again = cluster.nodes.start(0)
    assert again.check(endpoint).reason == pb.LIMIT_EXCEEDED


def test_a_leaving_node_settles_first(cluster):
    endpoint = cluster.new_rule()
    ended = []
    log = cluster.load(endpoint, 2.0, Event(1.0, lambda: ended.append(cluster.nodes.stop(2))))
    assert ended == [0]
    assert set(cluster.nodes.metric("rate_limiter_cluster_nodes")) == {2.0}  # it reported its end
    for key in log.keys:
        of_key = log.of(key)
        least = tokens(of_key.admitted)
        assert least <= cluster.stored(endpoint, key) <= least + tokens(of_key.unknown)
    assert len(log.unknown) < 0.05 * len(log.entries)


def test_a_briefly_hanging_node_is_charged_for_everything(cluster):
    endpoint = cluster.new_rule()
    events = (
        Event(0.5, lambda: cluster.nodes.pause(1)),
        Event(2.0, lambda: cluster.nodes.resume(1)),
    )
    log = cluster.load(endpoint, 3.0, *events)
    assert log.reasons.keys() == {"WITHIN_LIMIT"}
    for key in log.keys:
        assert cluster.stored(endpoint, key) == tokens(log.of(key).admitted)


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_long_hanging_node_is_no_member_until_it_resumes(cluster):
    cluster.nodes.pause(1)
    others = cluster[0], cluster[2]
    count = "rate_limiter_cluster_nodes"
    until(lambda: {one.metric(count) for one in others} == {2.0}, "it is missed")
    cluster.nodes.resume(1)
    until(lambda: set(cluster.nodes.metric(count)) == {3.0}, "it is one of them again")
    assert health(cluster[1]).status == pb.HEALTHY


def test_nodes_with_different_secrets_do_not_share_a_store(cluster, tmp_path):
    options = (*OPTIONS, "--key-secret", "another than that of the others")
    with (
        pytest.raises(AssertionError, match="KEY_SECRET"),
        Nodes(tmp_path / "nodes", cluster.valkey.url, *options, count=1),
    ):
        pass
    assert cluster[0].process.poll() is None
