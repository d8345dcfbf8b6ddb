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


async def test_what_was_put_is_read_in_the_order_of_the_question(statuses):
    statuses.put_status("n1/a", b"one", 60_000)
    statuses.put_status("n2/b", b"two", 60_000)
    assert await asked(statuses.read_statuses, ["n2/b", "n3/c", "n1/a"]) == [b"two", None, b"one"]


async def test_a_status_expires_by_itself(statuses, valkey):
    statuses.put_status("n1/a", b"one", 60_000)
    await asked(statuses.read_statuses, ["n1/a"])
    assert 0 < valkey.ask("PTTL", KEY) <= 60_000


async def test_who_has_left_is_forgotten(statuses):
    statuses.put_status("n1/a", b"one", 60_000)
    statuses.remove_status("n1/a")
    assert await asked(statuses.read_statuses, ["n1/a"]) == [None]


def test_a_status_of_any_length_that_it_may_have_is_read():
    assert MAX_STATUS_BYTES > MAX_BYTES


async def test_what_somebody_else_put_there_is_replaced(statuses, valkey):
    valkey.ask("LPUSH", KEY, "x")
    assert await asked(statuses.read_statuses, ["n1/a"]) == [None]
    statuses.put_status("n1/a", b"one", 60_000)
    assert await asked(statuses.read_statuses, ["n1/a"]) == [b"one"]


async def test_while_the_store_is_away_there_is_an_error(statuses, topology):
    await topology.close()
    statuses.put_status("n1/a", b"one", 60_000)
    assert isinstance(await asked(statuses.read_statuses, ["n1/a"]), StoreUnavailableError)


@pytest.mark.parametrize("reply", [7, [b"one"], None, b""])
async def test_a_store_that_answers_something_else_is_not_believed(reply):
    assert await asked(RedisStore(Liar(reply)).read_statuses, ["n1/a", "n2/b"]) == [None, None]


async def test_of_what_is_too_long_for_a_status_the_beginning_is_read(statuses, valkey):
    valkey.ask("SETRANGE", KEY, 50_000_000, "x")
    statuses.put_status("n2/b", b"two", 60_000)
    assert await asked(statuses.read_statuses, ["n1/a", "n2/b"]) == [
        bytes(MAX_STATUS_BYTES),
        b"two",
    ]
