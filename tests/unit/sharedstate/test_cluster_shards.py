import asyncio

import pytest

from ratelimitd.errors import StoreUnavailableError
from ratelimitd.sharedstate.cluster_map import SLOT_OF_TAG
from ratelimitd.sharedstate.opening import open_shards
from ratelimitd.sharedstate.script import Script
from ratelimitd.sharedstate.shards import TAGS
from ratelimitd.sharedstate.url import Server, parse_redis_url
from tests.servers import ValkeyCluster, free_port
from tests.unit.sharedstate.asking import ask, asked, soon

INCREMENT = Script(b"return redis.call('INCRBY', KEYS[1], ARGV[1])")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with ValkeyCluster(tmp_path_factory.mktemp("cluster"), node_timeout_ms=500) as servers:
        yield servers


@pytest.fixture
def said():
    return []


@pytest.fixture
async def shards(cluster, said):
    shards = open_shards(
        parse_redis_url(cluster.url),
        timeout_ms=5_000,
        report=said.append,
        on_change=lambda: said.append("changed"),
    )
    await shards.start()
    yield shards
    await shards.close()


def key(tag, name=b"k"):
    return b"rl1:{%02x}:%s" % (tag, name)


async def test_every_tag_has_the_link_to_the_primary_of_its_slot(cluster, shards, said):
    assert said == ["changed"]
    assert len(shards.all()) == 3
    assert all(link.connected for link in shards.all())
    replies = [asked(shards.of_tag(tag).send, (b"SET", key(tag), tag)) for tag in range(TAGS)]
    assert set(await asyncio.gather(*replies)) == {b"OK"}
    assert {link.name for link in shards.all()} == {node.address for node in cluster.nodes}
    assert str(await shards.server_of_tag(0)) == shards.of_tag(0).name


async def test_a_slot_that_moved_is_found_and_the_command_runs_once(cluster, shards, said):
    tag = 7
    slot = SLOT_OF_TAG[tag]
    source = next(
        node for number, node in enumerate(cluster.nodes) if slot in cluster.slots(number)
    )
    target = cluster.nodes[(cluster.nodes.index(source) + 1) % 3]
    name = key(tag, b"moved")
    assert await asked(shards.of_tag(tag).run, INCREMENT, (name,), (1,)) == 1
    cluster.move_slot(slot, source, target)
    try:
        assert await asked(shards.of_tag(tag).run, INCREMENT, (name,), (1,)) == 2
        await soon(lambda: shards.of_tag(tag).name == target.address)
        assert said == ["changed", "changed"]
        assert await asked(shards.of_tag(tag).run, INCREMENT, (name,), (1,)) == 3
    finally:
        cluster.move_slot(slot, target, source)
    assert await asked(shards.of_tag(tag).run, INCREMENT, (name,), (1,)) == 4


async def test_a_slot_that_is_being_moved_answers_from_where_the_key_is(cluster, shards, said):
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
        assert await asked(shards.of_tag(tag).run, INCREMENT, (name,), (1,)) == 1
        assert await asked(shards.of_tag(tag).run, INCREMENT, (name,), (1,)) == 2
        assert said == ["changed"], "the slot has not moved yet, and neither has the map"
    finally:
        for node in (source, target):
            node.ask("CLUSTER", "SETSLOT", slot, "STABLE")


async def test_a_server_that_is_named_for_the_first_time_gets_a_link(cluster, shards):
    link = shards.of_tag(0)
    shards._links.pop(Server(*_address(link.name)))
    reply = asyncio.get_running_loop().create_future()
    other = next(each for each in shards.all() if each is not link)
    other.send((b"GET", key(0, b"absent")), reply.set_result)
    assert await reply is None
    await link.close()


def _address(name):
    host, _, port = name.rpartition(":")
    return host, int(port)


async def test_a_shard_that_is_down_fails_its_own_tags_only_and_comes_back(cluster, shards, said):
    tags = {shards.of_tag(tag).name: tag for tag in range(TAGS)}
    dead, *living = cluster.nodes
    link = shards.of_tag(tags[dead.address])
    dead.kill()
    try:
        await soon(lambda: not link.connected)
        for node in living:
            assert await ask(shards.of_tag(tags[node.address]), b"PING") == b"PONG"
        reply = await asked(shards.of_tag(tags[dead.address]).send, (b"PING",))
        assert isinstance(reply, StoreUnavailableError)
    finally:
        dead.start()
    await soon(lambda: shards.of_tag(tags[dead.address]).connected)
    reply = b""
    while reply != b"OK":  # it serves once the others have greeted it
        reply = await asked(shards.of_tag(tags[dead.address]).send, (b"SET", key(0), 1))
        await asyncio.sleep(0.01)


async def test_without_any_server_the_start_returns_and_everything_fails_until_one_is_there(
    tmp_path,
):
    port, lines = free_port(), []
    shards = open_shards(
        parse_redis_url(f"redis+cluster://127.0.0.1:{port}"), timeout_ms=5, report=lines.append
    )
    await shards.start()
    assert shards.all() == ()
    assert isinstance(await asked(shards.of_tag(3).send, (b"PING",)), StoreUnavailableError)
    with pytest.raises(StoreUnavailableError):
        await shards.server_of_tag(3)
    assert lines == ["the map of the Cluster cannot be read: no connection: Connection refused"]
    await shards.close()
