import pytest

from ratelimitd.errors import StartupError
from ratelimitd.sharedstate.opening import open_shards
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
