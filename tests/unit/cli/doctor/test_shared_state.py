"""REDIS_URL in each topology, with real servers and the faults of each."""

import dataclasses
import importlib.util

import pytest

from ratelimitd.cli.doctor.stores import check_answer_without, check_shared_state
from ratelimitd.observe.node_status import encode
from ratelimitd.settings.table import Settings
from tests.servers import QUICK_REPLICAS, Valkey, ValkeyCluster, ValkeySentinel, free_port, until
from tests.unit.observe.test_node_status import STATUS


async def look(url):
    settings = Settings.load({}, {"REDIS_URL": url, "REDIS_TIMEOUT_MS": "1000"})
    return await check_shared_state(settings)


def worst(findings):
    return [finding for finding in findings if finding.level != "ok"]


async def test_embedded_node_has_no_shared_state():
    [finding] = await look("")
    assert (finding.area, finding.level) == ("REDIS_URL", "ok")


async def test_workers_without_a_url_share_a_private_valkey(tmp_path, monkeypatch):
    async def found():
        settings = Settings.load({}, {"WORKERS": "2", "STATE_DIR": str(tmp_path)})
        [finding] = await check_shared_state(settings)
        return finding

    fine = await found()
    assert (fine.area, fine.level) == ("REDIS_URL", "ok")
    assert f"a private Valkey in {tmp_path}/valkey, of at most 1008 MiB" in fine.what
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    missing = await found()
    assert (missing.area, missing.level) == ("WORKERS", "problem")
    assert "'ratelimitd[workers]'" in missing.what


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "every check is allowed"),
        ({"ON_BREAKER_OPEN": "deny"}, "every check is denied"),
        ({"ON_BREAKER_OPEN": "local"}, None),
        ({"CONSISTENCY": "strict"}, None),
        ({"REDIS_URL": ""}, None),
    ],
)
def test_answer_during_an_outage_is_reported_where_local_would_limit(given, says):
    settings = Settings.load({}, {"REDIS_URL": "redis://store", **given})
    told = [finding.what for finding in check_answer_without(settings)]
    assert [says in what for what in told] == ([True] if says else [])


async def test_single_server_is_checked(tmp_path):
    with Valkey(tmp_path, password="s3cret-word") as valkey:
        findings = await look(valkey.url)
        assert not worst(findings)
        assert {finding.area for finding in findings} == {f"store {valkey.address}"}
        [wrong] = await look(valkey.url.replace("s3cret-word", "wr0ng"))
        assert (wrong.level, "WRONGPASS" in wrong.what) == ("problem", True)
        assert "wr0ng" not in str(wrong)
        [missing] = await look(f"redis://{valkey.address}")
        assert "NOAUTH" in missing.what
        for one in (wrong, missing):
            assert "password into REDIS_URL" in one.remedy
        valkey.ask("REPLICAOF", "127.0.0.1", free_port())
        [replica] = await look(valkey.url)
        assert (replica.level, replica.what) == ("problem", "the server is a replica")


async def test_nodes_with_different_admin_tokens_are_reported(tmp_path):
    def put(name, digest):
        status = dataclasses.replace(STATUS, admin_token_digest=digest)
        valkey.ask("ZADD", "rl1:{00}:members", 2**52, name)
        valkey.ask("SET", f"rl1:{{00}}:status:{name}", encode(status))

    async def told():
        return [finding for finding in await look(valkey.url) if finding.area == "ADMIN_TOKEN"]

    with Valkey(tmp_path) as valkey:
        assert await told() == []
        put("n1", "aa")
        put("n2", "aa")
        valkey.ask("SET", "rl1:{00}:status:n3", "no status")
        valkey.ask("ZADD", "rl1:{00}:members", 2**52, "n3", 2**52, "n4")
        [finding] = await told()
        assert (finding.level, "the same admin token" in finding.what) == ("ok", True)
        put("n3", "bb")
        [finding] = await told()
        assert finding.level == "warning"
        assert "2 different admin tokens" in finding.what
        assert "ADMIN_TOKEN_FILE" in finding.remedy


async def test_unreachable_server_is_a_problem():
    [finding] = await look(f"redis://127.0.0.1:{free_port()}")
    assert (finding.level, "no connection" in finding.what) == ("problem", True)
    assert finding.remedy == "check REDIS_URL, the server, and the network between"


async def test_missing_certificate_is_a_problem(tmp_path):
    [finding] = await look(f"rediss://127.0.0.1:1?ssl_ca_certs={tmp_path}/none")
    assert (finding.level, "ssl_ca_certs" in finding.what) == ("problem", True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with ValkeyCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


async def test_each_primary_of_a_cluster_is_checked(cluster):
    findings = await look(cluster.url)
    assert not worst(findings)
    assert findings[0].what == "a Cluster of 3 primaries, all slots served"
    areas = {f"store {node.address}" for node in cluster.nodes}
    assert {finding.area for finding in findings[1:]} == areas


async def test_single_server_url_of_a_cluster_member_is_a_problem(cluster):
    found = worst(await look(f"redis://{cluster.nodes[0].address}"))
    assert found
    assert all("redis+cluster://" in finding.remedy for finding in found)


async def test_cluster_url_of_a_single_server_is_a_problem(tmp_path):
    with Valkey(tmp_path) as valkey:
        found = worst(await look(f"redis+cluster://{valkey.address}"))
    assert [finding.level for finding in found] == ["warning", "problem"]


async def test_unassigned_slots_are_a_problem(cluster):
    first = cluster.nodes[0]
    slots = cluster.slots(0)
    for node in cluster.nodes:
        node.ask("CLUSTER", "DELSLOTSRANGE", slots.start, slots.stop - 1)
    [finding] = worst(await look(f"redis+cluster://{cluster.nodes[1].address}"))
    assert "of 256 hash tags have no server" in finding.what
    first.ask("CLUSTER", "ADDSLOTSRANGE", slots.start, slots.stop - 1)
    until(lambda: all(map(cluster._is_whole, cluster.nodes)), "all know of it")


async def test_sentinels_name_the_primary_and_silent_ones_are_reported(tmp_path):
    with ValkeySentinel(tmp_path, replicas=0, sentinels=2) as servers:
        findings = await look(servers.url)
        assert not worst(findings)
        assert findings[0].what == f"says that {servers.nodes[0].address} is the primary"
        unknown = worst(await look(servers.url.replace("/limits", "/other")))
        assert [finding.level for finding in unknown] == ["warning", "warning", "problem"]
        servers.sentinels[0].kill()
        [silent] = worst(await look(servers.url))
        assert silent.level == "warning"


async def test_sentinels_that_disagree_are_a_problem(tmp_path):
    with (
        ValkeySentinel(tmp_path / "a", *QUICK_REPLICAS, replicas=0, sentinels=1) as one,
        ValkeySentinel(tmp_path / "b", replicas=0, sentinels=1) as other,
    ):
        url = f"redis+sentinel://{one.sentinels[0].address},{other.sentinels[0].address}/limits"
        until(lambda: one.nodes[0].runs and other.nodes[0].runs, "both run")
        findings = worst(await look(url))
        while "no sentinel answers" in findings[0].what:  # a busy machine is late
            findings = worst(await look(url))
        [finding] = findings
        assert "do not agree" in finding.what
