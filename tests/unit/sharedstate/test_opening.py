import pytest

from ratelimitd.errors import StartupError
from ratelimitd.sharedstate.cluster_shards import ClusterShards
from ratelimitd.sharedstate.opening import open_shards
from ratelimitd.sharedstate.sentinel import SentinelShards
from ratelimitd.sharedstate.shards import OneServer
from ratelimitd.sharedstate.url import parse_redis_url
from tests.unit.sharedstate.asking import ask


async def test_a_url_leads_to_links_that_are_named_at_the_server(valkey):
    shards = open_shards(
        parse_redis_url(f"{valkey.url}/3"), timeout_ms=5_000, client_name="ratelimitd:node-1"
    )
    await shards.start()
    told = await ask(shards.of_tag(0), b"CLIENT", b"INFO")
    await shards.close()
    assert b" name=ratelimitd:node-1 " in told
    assert b" db=3 " in told


async def test_a_socket_is_a_server_too(valkey):
    shards = open_shards(parse_redis_url(f"unix://{valkey.unix_path}"), timeout_ms=5_000)
    await shards.start()
    assert await ask(shards.of_tag(0), b"PING") == b"PONG"
    await shards.close()


async def test_a_certificate_that_is_not_there_is_told_at_once():
    url = parse_redis_url("rediss://valkey.example?ssl_ca_certs=/absent/ca.pem")
    with pytest.raises(StartupError, match="ssl_ca_certs"):
        open_shards(url, timeout_ms=5)


@pytest.mark.parametrize(
    ("url", "kind", "wants_primary"),
    [
        ("redis://h", OneServer, True),
        ("redis+sentinel://h/limits", SentinelShards, True),
        ("redis+cluster://h", ClusterShards, False),
    ],
)
async def test_each_topology_has_its_kind_of_shards(url, kind, wants_primary):
    shards = open_shards(parse_redis_url(url), timeout_ms=5, max_requests=7, random=lambda: 0.5)
    assert type(shards) is kind
    assert shards.is_cluster == (kind is ClusterShards)
    options = shards.options
    assert options.greeting.wants_primary == wants_primary
    assert (options.timeout_s, options.max_requests, options.random()) == (0.005, 7, 0.5)
