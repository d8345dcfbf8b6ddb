"""The statuses of nodes, in a real Valkey."""

import pytest

from ratelimitd.cluster.redis.store import MAX_STATUS_BYTES, RedisStore
from ratelimitd.errors import StoreUnavailableError
from ratelimitd.observe.node_status import MAX_BYTES
from tests.unit.cluster.redis.asking import asked
from tests.unit.cluster.redis.test_store import Liar

KEY = b"rl1:{00}:status:n1/a"


@pytest.fixture
async def statuses(topology):
    return RedisStore(topology)


async def test_statuses_are_read_in_the_requested_order(statuses):
    statuses.put_status("n1/a", b"one", 60_000)
    statuses.put_status("n2/b", b"two", 60_000)
    assert await asked(statuses.read_statuses, ["n2/b", "n3/c", "n1/a"]) == [b"two", None, b"one"]


async def test_a_status_expires(statuses, valkey):
    statuses.put_status("n1/a", b"one", 60_000)
    await asked(statuses.read_statuses, ["n1/a"])
    assert 0 < valkey.ask("PTTL", KEY) <= 60_000


async def test_a_leaving_node_has_no_status(statuses):
    statuses.put_status("n1/a", b"one", 60_000)
    statuses.remove_status("n1/a")
    assert await asked(statuses.read_statuses, ["n1/a"]) == [None]


def test_a_status_of_any_valid_length_is_read():
    assert MAX_STATUS_BYTES > MAX_BYTES


async def test_a_foreign_value_is_replaced(statuses, valkey):
    valkey.ask("LPUSH", KEY, "x")
    assert await asked(statuses.read_statuses, ["n1/a"]) == [None]
    statuses.put_status("n1/a", b"one", 60_000)
    assert await asked(statuses.read_statuses, ["n1/a"]) == [b"one"]


async def test_an_unavailable_store_is_an_error(statuses, topology):
    await topology.close()
    statuses.put_status("n1/a", b"one", 60_000)
    assert isinstance(await asked(statuses.read_statuses, ["n1/a"]), StoreUnavailableError)


@pytest.mark.parametrize("reply", [7, [b"one"], None, b""])
async def test_a_foreign_answer_is_no_status(reply):
    assert await asked(RedisStore(Liar(reply)).read_statuses, ["n1/a", "n2/b"]) == [None, None]


async def test_only_the_start_of_a_too_long_value_is_read(statuses, valkey):
    valkey.ask("SETRANGE", KEY, 50_000_000, "x")
    statuses.put_status("n2/b", b"two", 60_000)
    assert await asked(statuses.read_statuses, ["n1/a", "n2/b"]) == [
        bytes(MAX_STATUS_BYTES),
        b"two",
    ]
