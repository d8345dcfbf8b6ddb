from ratelimitd.cluster.redis.topology import TAGS, settled, standalone
from ratelimitd.settings.urls import parse_redis_url
from tests.servers import free_port
from tests.unit.cluster.redis.asking import PATIENT, ask, asked, peer, soon


async def test_one_server_has_all_tags(valkey):
    shards = standalone(parse_redis_url(valkey.url), PATIENT)
    await shards.start()
    links = {shards.of_tag(tag) for tag in range(TAGS)}
    assert links == set(shards.all())
    (link,) = links
    assert await ask(link, b"PING") == b"PONG"
    assert str(await shards.server_of_tag(9)) == valkey.address
    await shards.close()
    assert not link.connected


async def test_a_start_returns_when_the_server_refuses_and_goes_on_in_the_background(valkey):
    shards = standalone(parse_redis_url(f"redis://127.0.0.1:{free_port()}"), PATIENT)
    await shards.start()
    assert not shards.of_tag(0).connected
    await shards.close()


async def test_a_start_does_not_wait_for_ever_for_a_server_that_hangs(monkeypatch):
    monkeypatch.setattr("ratelimitd.cluster.redis.topology.START_S", 0.01)
    async with peer(greeted=False) as port:
        shards = standalone(parse_redis_url(f"redis://127.0.0.1:{port}"), PATIENT)
        await shards.start()
        assert not shards.of_tag(255).connected
        waiting = asked(shards.of_tag(0).send, (b"PING",))
        await shards.close()
        await soon(waiting.done)


async def test_no_links_are_settled_at_once():
    await settled([])
