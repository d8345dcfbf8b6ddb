from ratelimitd.cluster.redis.topology import TAGS, settled, standalone
from ratelimitd.settings.urls import parse_redis_url
from tests.servers import free_port
from tests.unit.cluster.redis.asking import PATIENT, ask, asked, peer, soon


async def test_one_server_has_all_tags(valkey):
    topology = standalone(parse_redis_url(valkey.url), PATIENT)
    await topology.start()
    links = {topology.of_tag(tag) for tag in range(TAGS)}
    assert links == set(topology.all())
    (link,) = links
    assert await ask(link, b"PING") == b"PONG"
    assert str(await topology.server_of_tag(9)) == valkey.address
    await topology.close()
    assert not link.connected


async def test_a_start_returns_when_the_server_refuses_and_continues_in_the_background(valkey):
    topology = standalone(parse_redis_url(f"redis://127.0.0.1:{free_port()}"), PATIENT)
    await topology.start()
    assert not topology.of_tag(0).connected
    await topology.close()


async def test_a_start_waits_a_bounded_time_for_a_hanging_server(monkeypatch):
    monkeypatch.setattr("ratelimitd.cluster.redis.topology.START_S", 0.01)
    async with peer(handshake=False) as port:
        topology = standalone(parse_redis_url(f"redis://127.0.0.1:{port}"), PATIENT)
        await topology.start()
        assert not topology.of_tag(255).connected
        waiting = asked(topology.of_tag(0).send, (b"PING",))
        await topology.close()
        await soon(waiting.done)


async def test_without_links_settled_returns_at_once():
    await settled([])
