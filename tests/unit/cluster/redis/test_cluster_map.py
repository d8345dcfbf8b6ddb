import pytest

from ratelimitd.cluster.redis.cluster_topology import SLOT_OF_TAG, SLOTS, map_of, slot_of_tag
from ratelimitd.cluster.redis.topology import TAGS
from ratelimitd.errors import StoreCorruptError
from ratelimitd.settings.urls import Server
from tests.servers import Valkey, free_port

ASKED = Server("10.0.0.1", 7000)


@pytest.fixture(scope="module")
def valkey_of_module(tmp_path_factory):
    options = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    with Valkey(tmp_path_factory.mktemp("valkey"), *options) as server:
        yield server


def test_the_slot_of_a_tag_matches_the_servers(valkey):
    for tag in (0, 1, 127, 255):
        key = b"rl1:{%02x}:s:x" % tag
        assert slot_of_tag(tag) == valkey.ask("CLUSTER", "KEYSLOT", key)


def test_each_tag_belongs_to_the_primary_of_its_slot():
    half = SLOTS // 2
    reply = [
        [0, half - 1, [b"10.0.0.1", 7000, b"id-a", []], [b"10.0.0.9", 7009, b"id-c", []]],
        [half, SLOTS - 1, [b"10.0.0.2", 7000, b"id-b"]],
    ]
    read = map_of(reply, ASKED)
    assert len(read) == TAGS
    for tag, server in enumerate(read):
        assert server == Server("10.0.0.1" if SLOT_OF_TAG[tag] < half else "10.0.0.2", 7000)


def test_a_slot_without_a_server_is_unmapped():
    slot = SLOT_OF_TAG[5]
    read = map_of([[slot + 1, SLOTS - 1, [b"h", 1]], [0, slot - 1, [b"h", 1]]], ASKED)
    assert [tag for tag in range(TAGS) if read[tag] is None] == [5]
    assert set(map_of([], ASKED)) == {None}


@pytest.mark.parametrize(
    ("host", "server"),
    [
        (b"", Server("10.0.0.1", 1)),
        (None, Server("10.0.0.1", 1)),
        (b"valkey-0.example", Server("valkey-0.example", 1)),
        (b"?", None),
    ],
)
def test_a_server_may_be_named_the_one_asked_or_unknown(host, server):
    assert set(map_of([[0, SLOTS - 1, [host, 1]]], ASKED)) == {server}


@pytest.mark.parametrize("reply", [None, b"x", 3, [3], [[0, 1]], [[0, 1, [b"h"]]], [[0, 1, b"h"]]])
def test_a_malformed_map_is_corrupt(reply):
    with pytest.raises(StoreCorruptError):
        map_of(reply, ASKED)
