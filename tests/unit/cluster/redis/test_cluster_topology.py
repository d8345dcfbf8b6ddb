import asyncio
from functools import partial

import pytest

from ratelimitd.cluster.redis.cluster_topology import (
    CLUSTER_SLOTS,
    SLOT_OF_TAG,
    SLOTS,
    ClusterTopology,
)
from ratelimitd.cluster.redis.codec import Script
from ratelimitd.cluster.redis.connection import Handshake, answer_of
from ratelimitd.cluster.redis.link import LinkOptions
from ratelimitd.cluster.redis.opening import open_topology
from ratelimitd.cluster.redis.topology import TAGS
from ratelimitd.errors import StoreClusterDownError, StoreSlowError, StoreUnavailableError
from ratelimitd.settings.urls import Server, parse_redis_url
from tests.chaos_proxy import ChaosProxy
from tests.servers import ValkeyCluster, free_port
from tests.unit.cluster.redis.asking import PATIENT, ask, asked, at, linked, peer, serving, soon

INCREMENT = Script(b"return redis.call('INCRBY', KEYS[1], ARGV[1])")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with ValkeyCluster(tmp_path_factory.mktemp("cluster"), node_timeout_ms=500) as servers:
        yield servers


@pytest.fixture
def said():
    return []


@pytest.fixture
async def topology(cluster, said):
    topology = open_topology(
        parse_redis_url(cluster.url),
        timeout_ms=5_000,
        report=said.append,
    )
    await topology.start()
    yield topology
    await topology.close()


def key(tag, name=b"k"):
    return b"rl1:{%02x}:%s" % (tag, name)


async def test_every_tag_has_the_link_to_the_primary_of_its_slot(cluster, topology, said):
    assert not said
    assert len(topology.all()) == 3
    assert all(link.connected for link in topology.all())
    replies = [asked(topology.of_tag(tag).send, (b"SET", key(tag), tag)) for tag in range(TAGS)]
    assert set(await asyncio.gather(*replies)) == {b"OK"}
    assert {link.name for link in topology.all()} == {node.address for node in cluster.nodes}
    assert str(await topology.server_of_tag(0)) == topology.of_tag(0).name


async def test_a_moved_slot_is_followed_and_the_command_runs_once(cluster, topology, said):
    tag = 7
    slot = SLOT_OF_TAG[tag]
    source = next(
        node for number, node in enumerate(cluster.nodes) if slot in cluster.slots(number)
    )
    target = cluster.nodes[(cluster.nodes.index(source) + 1) % 3]
    name = key(tag, b"moved")
    assert await asked(topology.of_tag(tag).run, INCREMENT, (name,), (1,)) == 1
    cluster.move_slot(slot, source, target)
    try:
        assert await asked(topology.of_tag(tag).run, INCREMENT, (name,), (1,)) == 2
        await soon(lambda: topology.of_tag(tag).name == target.address)
        assert not said
        assert await asked(topology.of_tag(tag).run, INCREMENT, (name,), (1,)) == 3
    finally:
        cluster.move_slot(slot, target, source)
    assert await asked(topology.of_tag(tag).run, INCREMENT, (name,), (1,)) == 4


async def test_a_migrating_slot_answers_from_the_server_with_the_key(cluster, topology, said):
    tag = 9
    slot = SLOT_OF_TAG[tag]
    source = next(
        node for number, node in enumerate(cluster.nodes) if slot in cluster.slots(number)
    )
    target = cluster.nodes[(cluster.nodes.index(source) + 1) % 3]
    ids = {node: node.ask("CLUSTER", "MYID").decode() for node in (source, target)}
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
    try:
        name = key(tag, b"asked")
        assert await asked(topology.of_tag(tag).run, INCREMENT, (name,), (1,)) == 1
        assert await asked(topology.of_tag(tag).run, INCREMENT, (name,), (1,)) == 2
        assert topology.of_tag(tag).name == source.address, "the slot has not moved yet"
        assert not said
    finally:
        for node in (source, target):
            node.ask("CLUSTER", "SETSLOT", slot, "STABLE")


async def test_a_redirection_to_a_new_server_creates_a_link(cluster, topology):
    link = topology.of_tag(0)
    topology._links.pop(Server(*_address(link.name)))
    reply = asyncio.get_running_loop().create_future()
    other = next(each for each in topology.all() if each is not link)
    other.send((b"GET", key(0, b"absent")), reply.set_result)
    assert await reply is None
    await link.close()


def _address(name):
    host, _, port = name.rpartition(":")
    return host, int(port)


async def test_a_shard_that_is_down_fails_only_its_own_tags_until_it_recovers(
    cluster, topology, said
):
    tags = {topology.of_tag(tag).name: tag for tag in range(TAGS)}
    dead, *living = cluster.nodes
    link = topology.of_tag(tags[dead.address])
    dead.kill()
    try:
        await soon(lambda: not link.connected)
        for node in living:
            assert await ask(topology.of_tag(tags[node.address]), b"PING") == b"PONG"
        reply = await asked(topology.of_tag(tags[dead.address]).send, (b"PING",))
        assert isinstance(reply, StoreUnavailableError)
    finally:
        dead.start()
    await soon(lambda: topology.of_tag(tags[dead.address]).connected)
    reply = b""
    while reply != b"OK":  # it serves once the others have accepted it
        reply = await asked(topology.of_tag(tags[dead.address]).send, (b"SET", key(0), 1))
        await asyncio.sleep(0.01)


async def test_without_any_server_the_start_returns_and_requests_fail_until_one_is_up(
    tmp_path,
):
    port, lines = free_port(), []
    topology = open_topology(
        parse_redis_url(f"redis+cluster://127.0.0.1:{port}"), timeout_ms=5, report=lines.append
    )
    await topology.start()
    assert (topology.all(), topology.connected) == ((), False)
    assert isinstance(await asked(topology.of_tag(3).send, (b"PING",)), StoreUnavailableError)
    with pytest.raises(StoreUnavailableError):
        await topology.server_of_tag(3)
    assert lines == ["the map of the Cluster cannot be read: no connection: Connection refused"]
    await topology.close()


def slot_map(*ranges):
    """Return the reply to CLUSTER SLOTS: each range is the first slot, the last slot, and the port of the server."""
    return b"*%d\r\n" % len(ranges) + b"".join(
        b"*3\r\n:%d\r\n:%d\r\n*2\r\n$0\r\n\r\n:%d\r\n" % one for one in ranges
    )


def slots(port, last):
    return slot_map((0, last, port))


async def test_an_incomplete_map_is_used_and_read_again_soon(monkeypatch):
    """A server that returns no map, then half a map, then an error, then the whole map."""
    monkeypatch.setattr("ratelimitd.cluster.redis.cluster_topology.POLL_TROUBLED_S", 0.01)
    lines, asked_for = [], []

    async def serve(reader, writer):
        while told := await reader.read(1_000):
            if b"PING" in told:
                writer.write(b"+PONG\r\n")
            if b"SLOTS" in told:
                asked_for.append(1)
                answers = {1: b"*0\r\n", 2: slots(port, SLOTS // 2 - 1), 3: b"-LOADING wait\r\n"}
                writer.write(answers.get(len(asked_for), slots(port, SLOTS - 1)))

    async with serving(serve) as port:
        url = parse_redis_url(f"redis+cluster://127.0.0.1:{port}")
        options = PATIENT._replace(
            handshake=Handshake(wants_primary=False), report=lines.append, random=lambda: 0.0
        )
        topology = ClusterTopology(url, options)
        await topology.start()
        assert lines == [
            "the map of the Cluster cannot be read: the server is not part of a Cluster"
        ]
        await soon(topology.all)
        low, high = (tag_between(0, SLOTS // 2), tag_between(SLOTS // 2, SLOTS))
        assert isinstance(await asked(topology.of_tag(high).send, (b"GET",)), StoreUnavailableError)
        assert not topology.connected
        await soon(lambda: topology.of_tag(low) is topology.of_tag(high))
        assert topology.connected
        await topology.close()
    assert lines[1] == "the map of the Cluster can be read again"


@pytest.mark.parametrize("luck", [0.0, 0.5])
async def test_after_clusterdown_the_map_is_soon_read_from_another_server(monkeypatch, luck):
    """A primary that is cut off from the others names itself for half of the slots, which another one has by now."""
    monkeypatch.setattr("ratelimitd.cluster.redis.cluster_topology.POLL_S", 3_600)
    monkeypatch.setattr("ratelimitd.cluster.redis.cluster_topology.POLL_TROUBLED_S", 0.01)
    asked_for = []

    async def serve(reader, writer, cut_off):
        while told := await reader.read(1_000):
            if b"PING" in told:
                writer.write(b"+PONG\r\n")
            if b"SLOTS" in told:
                asked_for.append(cut_off)
                half = SLOTS // 2
                ranges = ((0, half - 1, old), (half, SLOTS - 1, new))
                writer.write(slot_map(*ranges) if cut_off else slot_map((0, SLOTS - 1, new)))
            if b"GET" in told:
                writer.write(b"-CLUSTERDOWN The cluster is down\r\n")

    async with (
        serving(partial(serve, cut_off=True)) as old,
        serving(partial(serve, cut_off=False)) as new,
    ):
        url = parse_redis_url(f"redis+cluster://127.0.0.1:{old}")
        options = PATIENT._replace(handshake=Handshake(wants_primary=False), random=lambda: luck)
        topology = ClusterTopology(url, options)
        await topology.start()
        assert topology.connected
        moved, other = (
            topology.of_tag(tag_between(0, SLOTS // 2)),
            topology.of_tag(tag_between(SLOTS // 2, SLOTS)),
        )
        assert moved is not other
        reply = await asked(moved.send, (b"GET", b"k"))
        assert isinstance(reply, StoreClusterDownError)
        await soon(lambda: set(topology._of_tag) == {other})
        assert asked_for == [True, False]
        await topology.close()


async def test_the_map_is_read_from_servers_that_answer_late(monkeypatch):
    monkeypatch.setattr("ratelimitd.cluster.redis.cluster_topology.POLL_TROUBLED_S", 0.01)
    last = [SLOTS // 2 - 1]

    async def serve(reader, writer):
        while told := await reader.read(1_000):
            writer.write(b"+PONG\r\n" if b"PING" in told else slots(proxy.port, last[0]))

    async with serving(serve) as port:
        with ChaosProxy(port) as proxy:
            options = LinkOptions(timeout_s=0.01, handshake=Handshake(wants_primary=False))
            topology = ClusterTopology(parse_redis_url(f"redis+cluster://{proxy.address}"), options)
            await topology.start()
            proxy.down.latency_ms = 50
            last[0] = SLOTS - 1
            await soon(lambda: topology.connected)
            await topology.close()


@pytest.mark.parametrize("luck", [0.0, 0.999])
async def test_a_server_that_owes_an_answer_is_asked_for_the_map_last(luck):
    asked_for, told_moved = [], []

    async def serve(reader, writer, number):
        while told := await reader.read(1_000):
            if b"PING" in told:
                writer.write(b"+PONG\r\n")
            if b"SLOTS" in told:
                asked_for.append(number)
                half = SLOTS // 2
                writer.write(slot_map((0, half - 1, silent), (half, SLOTS - 1, other)))
            if b"GET" in told and number:
                writer.write(b"+OK\r\n" if told_moved else b"-MOVED 9000 127.0.0.1:%d\r\n" % other)
                told_moved.append(number)

    async with (
        serving(partial(serve, number=0)) as silent,
        serving(partial(serve, number=1)) as other,
    ):
        options = LinkOptions(
            timeout_s=0.01,
            silence_s=60,
            handshake=Handshake(wants_primary=False),
            random=lambda: luck,
        )
        topology = ClusterTopology(parse_redis_url(f"redis+cluster://127.0.0.1:{other}"), options)
        await topology.start()
        assert topology.connected
        late = topology.of_tag(tag_between(0, SLOTS // 2))
        assert isinstance(await asked(late.send, (b"GET", b"k")), StoreSlowError)
        asked_for.clear()
        moved = topology.of_tag(tag_between(SLOTS // 2, SLOTS))
        await asked(moved.send, (b"GET", b"k"))
        await soon(lambda: asked_for == [1])
        await topology.close()


def tag_between(first, end):
    return next(tag for tag in range(TAGS) if first <= SLOT_OF_TAG[tag] < end)


async def test_a_server_that_left_the_cluster_finishes_requests_in_flight(cluster):
    paused = asyncio.Event()

    async def sleep(_seconds):
        await paused.wait()

    lines = []
    options = PATIENT._replace(
        handshake=Handshake(wants_primary=False), sleep=sleep, report=lines.append
    )
    topology = ClusterTopology(parse_redis_url(cluster.url), options)
    await topology.start()
    first, *others = topology.all()
    topology._take((await topology.server_of_tag(tag_of(topology, first)),) * TAGS)
    assert topology.all() == (first,)
    assert all([await ask(link, b"PING") == b"PONG" for link in others])
    paused.set()
    await soon(lambda: not any(link.connected for link in others))
    assert lines == []
    await topology.close()


async def test_an_unavailable_server_that_left_the_cluster_is_reported(cluster):
    lines = []
    options = PATIENT._replace(handshake=Handshake(wants_primary=False), report=lines.append)
    topology = ClusterTopology(parse_redis_url(cluster.url), options)
    await topology.start()
    away, *_ = topology.all()
    await away.close()
    other = Server(*_address(topology.all()[1].name))
    topology._take((other,) * TAGS)
    assert lines == [f"shared state at {away.name}: no longer serves any keys"]
    await topology.close()


async def test_an_unavailable_cluster_is_reported_once(monkeypatch):
    monkeypatch.setattr("ratelimitd.cluster.redis.cluster_topology.POLL_TROUBLED_S", 0.001)
    lines, pauses = [], []

    async def sleep(seconds):
        pauses.append(seconds)

    url = parse_redis_url(f"redis+cluster://127.0.0.1:{free_port()}")
    topology = ClusterTopology(url, PATIENT._replace(sleep=sleep, report=lines.append))
    await topology.start()
    await soon(lambda: len(pauses) >= 3)
    await topology.close()
    assert len(lines) == 1


def tag_of(topology, link):
    return next(tag for tag in range(TAGS) if topology.of_tag(tag) is link)


async def test_shards_that_were_never_started_can_be_closed(cluster):
    await ClusterTopology(parse_redis_url(cluster.url), PATIENT).close()


async def test_an_error_instead_of_the_map_is_raised():
    async with peer(b"-LOADING wait\r\n") as port, linked(at(port)) as link:
        with pytest.raises(StoreUnavailableError, match="LOADING"):
            await answer_of(partial(link.send, CLUSTER_SLOTS))
