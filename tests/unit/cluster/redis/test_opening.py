import ssl

import pytest
import trustme

from ratelimitd.cluster.redis.cluster_topology import ClusterTopology
from ratelimitd.cluster.redis.codec import Script
from ratelimitd.cluster.redis.opening import open_topology
from ratelimitd.cluster.redis.pubsub import Bus
from ratelimitd.cluster.redis.sentinel import SentinelTopology
from ratelimitd.cluster.redis.topology import OneServer
from ratelimitd.errors import StartupError, StoreMisconfiguredError
from ratelimitd.settings.urls import parse_redis_url
from tests.chaos_proxy import ChaosProxy
from tests.unit.cluster.redis.asking import ask, asked, soon


async def test_links_of_a_url_are_named_at_the_server(valkey):
    topology = open_topology(
        parse_redis_url(f"{valkey.url}/3"), timeout_ms=5_000, client_name="ratelimitd:node-1"
    )
    await topology.start()
    told = await ask(topology.of_tag(0), b"CLIENT", b"INFO")
    await topology.close()
    assert b" name=ratelimitd:node-1 " in told
    assert b" db=3 " in told


async def test_a_unix_socket_is_supported(valkey):
    topology = open_topology(parse_redis_url(f"unix://{valkey.unix_path}"), timeout_ms=5_000)
    await topology.start()
    assert await ask(topology.of_tag(0), b"PING") == b"PONG"
    await topology.close()


async def test_a_missing_certificate_is_a_startup_error():
    url = parse_redis_url("rediss://valkey.example?ssl_ca_certs=/absent/ca.pem")
    with pytest.raises(StartupError, match="ssl_ca_certs"):
        open_topology(url, timeout_ms=5)


@pytest.mark.parametrize(
    ("url", "kind", "wants_primary"),
    [
        ("redis://h", OneServer, True),
        ("redis+sentinel://h/limits", SentinelTopology, True),
        ("redis+cluster://h", ClusterTopology, False),
    ],
)
async def test_each_scheme_selects_its_topology(url, kind, wants_primary):
    topology = open_topology(parse_redis_url(url), timeout_ms=5)
    assert type(topology) is kind
    assert topology.is_cluster == (kind is ClusterTopology)
    options = topology.options
    assert options.handshake.wants_primary == wants_primary
    assert options.timeout_s == 0.005


PERMISSIONS = (
    *("~rl1:*", "&rl1:*", "-@all", "+evalsha", "+script|load", "+get", "+mget", "+set"),
    *(
        "+getrange",
        "+expire",
        "+time",
        "+zadd",
        "+zrange",
        "+zrem",
        "+zremrangebyscore",
        "+publish",
        "+subscribe",
    ),
)
"""Permissions of a node on one server; none shows, changes or ends foreign data."""


async def test_a_user_with_few_permissions_suffices_for_a_node(valkey):
    valkey.ask("ACL", "SETUSER", "node", "on", ">p%40ss", *PERMISSIONS)
    url = parse_redis_url(f"redis://node:p%2540ss@{valkey.address}")
    lines, received = [], []
    topology = open_topology(url, timeout_ms=5_000, report=lines.append)
    await topology.start()
    ours, theirs = (Bus(topology) for _ in range(2))
    await ours.start(print, lambda: None)
    await theirs.start(received.append, lambda: None)
    await soon(lambda: theirs.connected)
    script = Script(b"redis.call('TIME') return redis.call('SET', KEYS[1], ARGV[1])")
    assert await asked(topology.of_tag(0).run, script, (b"rl1:{00}:k",), (7,)) == b"OK"
    assert await ask(topology.of_tag(0), b"MGET", b"rl1:{00}:k") == [b"7"]
    ours.publish(0, b"heard")
    await soon(lambda: received == [b"heard"])
    with pytest.raises(StoreMisconfiguredError):
        await ask(topology.of_tag(0), b"GET", b"of-somebody-else")
    for bus in (ours, theirs):
        await bus.close()
    await topology.close()
    valkey.ask("ACL", "DELUSER", "node")
    assert lines == [f"shared state at {valkey.address}: the shared state answered NOPERM"]


async def test_a_tls_url_uses_the_authority_that_it_names(valkey, tmp_path):
    ca, context = trustme.CA(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ca.issue_cert("localhost").configure_cert(context)
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    with ChaosProxy(valkey.port, tls=context) as proxy:
        text = f"rediss://localhost:{proxy.port}?ssl_ca_certs={tmp_path}/ca.pem"
        topology = open_topology(parse_redis_url(text), timeout_ms=5_000)
        await topology.start()
        assert await ask(topology.of_tag(0), b"PING") == b"PONG"
        await topology.close()
