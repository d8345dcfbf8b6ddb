"""Any node's page shows all nodes: on a Valkey Cluster, with a killed node, and with malformed statuses."""

import html
import re
import time

import httpx
import pytest

from tests.cluster.nodes import Nodes
from tests.servers import ValkeyCluster, until

ROW = re.compile(
    r"<tr[^>]*>\s*<th scope=\"row\">(\w+).*?</th>\s*<td[^>]*><span[^>]*>(\w+)", re.DOTALL
)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with ValkeyCluster(tmp_path_factory.mktemp("valkey")) as store:
        yield store


@pytest.fixture(scope="module")
def nodes(store, tmp_path_factory):
    with Nodes(tmp_path_factory.mktemp("nodes"), store.url, count=2) as nodes:
        until(lambda: all(len(states_on(one)) == 2 for one in nodes.served), "all show all")
        yield nodes


def page_of(node, query=""):
    headers = {"accept": "text/html", **node.authorization}
    answer = httpx.get(f"http://{node.http_address}/{query}", headers=headers)
    assert answer.status_code == 200
    return html.unescape(answer.text)


def states_on(node):
    """Return the state of each node on a node's page."""
    table = page_of(node).partition('<div id="nodes">')[2].partition('<div id="denials">')[0]
    return dict(ROW.findall(table))


def test_every_node_shows_all_nodes_and_masked_denied_identifiers(nodes):
    assert states_on(nodes[1]).keys() == {"n0", "n1"}
    nodes.rule(endpoint="/a", limit=1, window_seconds=3_600)
    for _ in range(5):
        nodes[0].check("/a", "ada.lovelace")
    until(lambda: "ada…" in page_of(nodes[1]), "n1 has heard")
    assert "lovelace" not in page_of(nodes[0])
    assert "ada.lovelace" in page_of(nodes[0], "?names=shown")
    assert "ada.lovelace" in page_of(nodes[1], "?names=shown")
    assert "lovelace" not in page_of(nodes[1])
    assert "looks at the names" in nodes.log(0)
    assert "lovelace" not in nodes.log(0)


def test_events_update_the_page(nodes):
    address, headers = f"http://{nodes[0].http_address}/events", nodes[0].authorization
    with httpx.stream("GET", address, headers=headers, timeout=20) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("retry:")
        assert next(line for line in lines if line == "event: now")
        assert '"parts":{"state":' in next(lines)


def test_a_killed_node_is_shown_as_gone_until_it_restarts(nodes):
    nodes.kill(1)
    until(lambda: states_on(nodes[0]).get("n1") == "gone", "n0 shows that n1 is gone")
    nodes.start(1)
    until(lambda: states_on(nodes[0]).get("n1") == "healthy", "n1 is back, and not gone any more")


def test_a_malformed_status_is_left_out_and_reported(nodes, store):
    """Foreign writes: an invalid name, and a status that no node can show."""
    [server] = [one for one in store.nodes if one.runs and one.ask("KEYS", "rl1:*:members")]
    server.ask("SET", "rl1:{00}:status:<evil>/1", b'{"v":1,"node_id":"<script>"}')

    def has_told():
        server.ask("ZADD", "rl1:{00}:members", int(time.time() * 1e6), "<evil>/1")
        # Viewing the page makes the node read statuses more often.
        return page_of(nodes[0]) and "another version, or damaged" in nodes.log(0)

    until(has_told, "n0 has told")
    assert states_on(nodes[0]).keys() == {"n0", "n1"}
    server.ask("ZREM", "rl1:{00}:members", "<evil>/1")
