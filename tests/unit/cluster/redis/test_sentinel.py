import asyncio
from contextlib import suppress

import pytest
import redis

from ratelimitd.cluster.redis.opening import open_topology
from ratelimitd.cluster.redis.sentinel import Sentinels, SentinelTopology
from ratelimitd.errors import StoreMisconfiguredError, StoreUnavailableError
from ratelimitd.settings.urls import Login, RedisUrl, Server, TopologyKind, parse_redis_url
from tests.servers import ValkeySentinel, free_port
from tests.unit.cluster.redis.asking import PATIENT, ask, peer, serving, soon


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """On a busy machine a real sentinel may take longer than a node waits for it."""
    monkeypatch.setattr("ratelimitd.cluster.redis.sentinel.ASK_S", 3.0)


@pytest.fixture(scope="module")
def sentinel(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sentinel")
    with ValkeySentinel(directory, replicas=1, sentinels=1, down_after_ms=300) as servers:
        yield servers


async def test_the_sentinel_that_answered_is_asked_first_next_time(
    sentinel,
):
    dead = Server("127.0.0.1", free_port())
    live = Server("127.0.0.1", sentinel.sentinels[0].port)
    url = RedisUrl(TopologyKind.SENTINEL, (dead, live), service=sentinel.service)
    sentinels = Sentinels(url, PATIENT)
    assert sentinels.preferred == dead
    assert await sentinels.primary() == Server("127.0.0.1", sentinel.primary.port)
    assert sentinels.preferred == live


async def test_a_service_unknown_to_the_sentinels_is_a_misconfiguration(sentinel):
    url = parse_redis_url(sentinel.url.replace(sentinel.service, "other"))
    with pytest.raises(StoreMisconfiguredError, match="do not know the service"):
        await Sentinels(url, PATIENT).primary()


async def test_no_sentinel_at_all_is_unavailable():
    url = parse_redis_url(f"redis+sentinel://127.0.0.1:{free_port()}/limits")
    with pytest.raises(StoreUnavailableError, match="no sentinel answers"):
        await Sentinels(url, PATIENT).primary()


def fail_over(sentinel):
    """Fail over as soon as the sentinel accepts the replica."""
    with suppress(redis.ResponseError):  # NOGOODSLAVE
        return sentinel.sentinels[0].ask("SENTINEL", "FAILOVER", sentinel.service)
    return None


@pytest.fixture
async def topology(sentinel):
    topology = open_topology(parse_redis_url(sentinel.url), timeout_ms=5_000)
    await topology.start()
    yield topology
    await topology.close()


async def test_a_failover_is_followed(sentinel, topology):
    link = topology.of_tag(0)
    old = sentinel.primary
    assert link.name == old.address
    assert await ask(link, b"SET", b"k", 1) == b"OK"
    await soon(lambda: topology._switches.connected)
    await soon(lambda: fail_over(sentinel))
    new = await asyncio.to_thread(sentinel.wait_for_failover, old)
    await soon(lambda: link.connected and link.name == new.address)
    assert await ask(link, b"SET", b"k", 2) == b"OK"
    assert await topology.server_of_tag(0) == Server("127.0.0.1", new.port)


def reply(*words):
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words)


async def test_the_link_leaves_a_primary_that_still_answers_after_a_failover(valkey):
    """A primary that is partitioned from the others keeps answering."""
    host, port = b"127.0.0.1", b"%d" % valkey.port
    other = b"%d" % free_port()
    said = asyncio.Event()

    async def serve(reader, writer):
        asked = await reader.readuntil(b"PING\r\n")
        writer.write(b"+PONG\r\n")
        asked = await reader.read(1_000)
        if b"SUBSCRIBE" not in asked:
            writer.write(reply(host, other if said.is_set() else port))
            return
        writer.write(b"*3\r\n$9\r\nsubscribe\r\n$14\r\n+switch-master\r\n:1\r\n")
        said.set()
        switch = b"ours %s %s %s %s" % (host, port, host, other)
        for told in (b"their 127.0.0.1 1 127.0.0.1 2", b"what?", switch):
            writer.write(reply(b"message", b"+switch-master", told))
        await reader.read()

    async with serving(serve) as sentinel_port:
        url = RedisUrl(TopologyKind.SENTINEL, (Server("127.0.0.1", sentinel_port),), service="ours")
        topology = SentinelTopology(url, PATIENT)
        await topology.start()
        (link,) = topology.all()
        await soon(lambda: link.name == f"127.0.0.1:{other.decode()}")
        await topology.close()


async def test_a_new_primary_is_followed_although_the_subscribed_sentinel_hangs(valkey):
    """It accepts connections and says no more, as a stopped process; another one knows of the failover."""
    primary, other = b"%d" % valkey.port, b"%d" % free_port()
    hangs = asyncio.Event()

    async def hang_later(reader, writer):
        await reader.readuntil(b"PING\r\n")
        if not hangs.is_set():
            writer.write(b"+PONG\r\n")
            if b"SUBSCRIBE" in await reader.read(1_000):
                writer.write(b"*3\r\n$9\r\nsubscribe\r\n$14\r\n+switch-master\r\n:1\r\n")
            else:
                writer.write(reply(b"127.0.0.1", primary))
        await reader.read()

    async def answer(reader, writer):
        await reader.readuntil(b"PING\r\n")
        writer.write(b"+PONG\r\n")
        await reader.read(1_000)
        writer.write(reply(b"127.0.0.1", other))
        await reader.read()

    async def pause(_seconds):
        await hangs.wait()

    async with serving(hang_later) as hanging, serving(answer) as live:
        servers = (Server("127.0.0.1", hanging), Server("127.0.0.1", live))
        url = RedisUrl(TopologyKind.SENTINEL, servers, service="ours")
        topology = SentinelTopology(url, PATIENT._replace(sleep=pause))
        await topology.start()
        (link,) = topology.all()
        await soon(lambda: topology._switches.connected)
        assert link.name == f"127.0.0.1:{primary.decode()}"
        hangs.set()
        await soon(lambda: link.name == f"127.0.0.1:{other.decode()}")
        await topology.close()


def named(port):
    """Return what a sentinel serves that names the server at ``port``, and announces nothing."""

    async def serve(reader, writer):
        await reader.readuntil(b"PING\r\n")
        writer.write(b"+PONG\r\n")
        if b"SUBSCRIBE" not in await reader.read(1_000):
            writer.write(reply(b"127.0.0.1", b"%d" % port))
        await reader.read()

    return serve


async def test_a_sentinel_that_names_an_unusable_server_is_not_asked_for_ever(valkey):
    """One that is cut off from the others does not hear of a failover."""
    async with serving(named(free_port())) as wrong, serving(named(valkey.port)) as right:
        servers = (Server("127.0.0.1", wrong), Server("127.0.0.1", right))
        url = RedisUrl(TopologyKind.SENTINEL, servers, service="ours")
        topology = SentinelTopology(url, PATIENT)
        await topology.start()
        assert not topology.connected
        await soon(lambda: topology.connected)
        assert await topology.server_of_tag(0) == Server("127.0.0.1", valkey.port)
        await topology.close()


async def test_sentinels_use_their_own_login():
    url = RedisUrl(
        TopologyKind.SENTINEL,
        (Server("h", 1),),
        Login("u", "p"),
        service="s",
        sentinel_login=Login("", "other"),
    )
    assert Sentinels(url, PATIENT).handshake.login == Login("", "other")
    assert not Sentinels(url, PATIENT).handshake.wants_primary


async def test_a_login_error_at_a_sentinel_is_reported():
    async with peer(b"+PONG\r\n", b"-NOAUTH Authentication required.\r\n", handshake=False) as port:
        url = parse_redis_url(f"redis+sentinel://127.0.0.1:{port}/limits")
        with pytest.raises(StoreMisconfiguredError, match="a sentinel answered NOAUTH"):
            await Sentinels(url, PATIENT).primary()


@pytest.mark.parametrize(
    ("host", "port"), [(b"\xff", b"port"), (b"h", b"65536"), (b"h", b"7" * 5_000), (b"?", b"7")]
)
async def test_a_sentinel_that_names_no_server_is_passed_over(sentinel, host, port):
    named = b"*2\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n" % (len(host), host, len(port), port)
    live = Server("127.0.0.1", sentinel.sentinels[0].port)
    async with peer(b"+PONG\r\n", named, handshake=False) as odd:
        servers = (Server("127.0.0.1", odd), live)
        url = RedisUrl(TopologyKind.SENTINEL, servers, service=sentinel.service)
        primary = await Sentinels(url, PATIENT).primary()
    assert primary == Server("127.0.0.1", sentinel.primary.port)
