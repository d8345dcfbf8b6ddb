"""The users in docs/cluster.md have the permissions that nodes need, with each kind of server."""

import re
from pathlib import Path

import pytest

from tests.cluster.nodes import Nodes
from tests.servers import Valkey, ValkeyCluster, ValkeySentinel, until

PAGE = (Path(__file__).resolve().parents[2] / "docs/cluster.md").read_text(encoding="utf-8")
NODES, SENTINELS = [
    command.split() for command in re.findall(r"^(ACL SETUSER ratelimitd .+)$", PAGE, re.MULTILINE)
]
[IN_A_CLUSTER] = [more.split() for more in re.findall(r"`(\+spublish .+?)`", PAGE)]
LOGIN = "ratelimitd:PASSWORD@"


def as_the_user(url):
    return url.replace("://", f"://{LOGIN}")


def let_in(servers, command):
    for server in servers:
        server.ask(*command)


def refused(servers):
    """Return the commands refused to the user on running servers."""
    return [entry for server in servers if server.runs for entry in server.ask("ACL", "LOG")]


def live(nodes):
    """Use everything that needs the shared state."""
    nodes.wait_for_members()
    nodes.rule(endpoint="/a", limit=20, window_seconds=3_600)
    allowed = sum(node.check("/a").allowed for node in nodes.served for _ in range(15))
    assert allowed >= 20
    until(lambda: not any(node.check("/a").allowed for node in nodes.served), "it is used up")
    nodes[0].reset("/a")
    until(lambda: nodes[1].check("/a").allowed, "the other node has heard of the reset")
    nodes.settled()
    assert nodes.metric_sum("rate_limiter_shared_state_corrupt_total") == 0


@pytest.mark.parametrize("consistency", ["eventual", "strict"])
def test_the_documented_user_suffices_for_one_server(tmp_path, consistency):
    with Valkey(tmp_path / "valkey") as valkey:
        let_in([valkey], NODES)
        url = as_the_user(valkey.url)
        with Nodes(tmp_path / "nodes", url, "--consistency", consistency, count=2) as nodes:
            live(nodes)
        assert not refused([valkey])


def test_another_database_needs_one_more_permission(tmp_path):
    with Valkey(tmp_path / "valkey") as valkey:
        let_in([valkey], [*NODES, "+select"])
        with Nodes(tmp_path / "nodes", f"{as_the_user(valkey.url)}/3", count=2) as nodes:
            live(nodes)
        assert not refused([valkey])


def test_the_documented_user_suffices_for_a_cluster(tmp_path):
    with ValkeyCluster(tmp_path / "valkey") as cluster:
        let_in(cluster.nodes, [*NODES, *IN_A_CLUSTER])
        with Nodes(tmp_path / "nodes", as_the_user(cluster.url), count=2) as nodes:
            live(nodes)
        assert not refused(cluster.nodes)


def test_the_documented_users_suffice_for_sentinels_and_their_servers(tmp_path):
    with ValkeySentinel(tmp_path / "valkey") as sentinel:
        let_in(sentinel.nodes, NODES)
        let_in(sentinel.sentinels, SENTINELS)
        own = "?sentinel_username=ratelimitd&sentinel_password=PASSWORD"
        with Nodes(tmp_path / "nodes", as_the_user(sentinel.url) + own, count=2) as nodes:
            live(nodes)
        assert not refused([*sentinel.nodes, *sentinel.sentinels])
