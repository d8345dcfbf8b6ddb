import asyncio
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from ratelimitd.errors import StartupError, StoreUnavailableError
from ratelimitd.rules.last_good import (
    FINGERPRINT_NAME,
    KEY_FILE,
    KEY_NAME,
    BucketKey,
    require_same_key,
)
from tests.rule_stores import sqlite_store, store_at


@pytest_asyncio.fixture
async def store(tmp_path):
    async with sqlite_store(tmp_path) as opened:
        yield opened


@pytest.fixture
def key(tmp_path):
    """Makes the key of one start after another in one state directory."""
    return lambda: BucketKey(tmp_path)


async def test_the_stores_key_is_used_and_copied_for_its_owner_alone(key, store, tmp_path, reports):
    stored = await store.secret(KEY_NAME)
    new = key()
    await new.settle(store)
    assert new.use() == stored == (tmp_path / KEY_FILE).read_bytes()
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.glob("bucket*")) == [KEY_FILE]
    assert reports == []


async def test_without_the_store_the_copy_is_used(key, store):
    first = key()
    await first.settle(store)
    used = first.use()
    assert key().use() == used


async def test_a_key_made_without_the_store_is_kept_and_becomes_the_stores(key, store, reports):
    made = key().use()
    later = key()
    assert later.use() == made
    await later.settle(store)
    assert await store.secret(KEY_NAME) == made
    assert reports == []


async def test_another_key_in_the_store_wins_at_the_start_and_is_reported(key, store, reports):
    key().use()
    stored = await store.secret(KEY_NAME)
    new = key()
    await new.settle(store)
    assert new.use() == stored == key().use()
    assert len(reports) == 1
    assert "another bucket key than the state directory" in reports[0]


async def test_another_key_in_the_store_is_only_reported_once_the_node_serves(key, store, reports):
    stored = await store.secret(KEY_NAME)
    serving = key()
    used = serving.use()
    await serving.settle(store)
    assert serving.use() == used != stored
    assert len(reports) == 1
    assert "the next start takes the database's" in reports[0]


async def test_a_store_that_is_away_changes_nothing(key, store, tmp_path):
    (tmp_path / "rules.db").rename(tmp_path / "away.db")
    new = key()
    with pytest.raises(StoreUnavailableError):
        await new.settle(store)
    assert len(new.use()) == 32


@pytest.mark.parametrize("content", [b"", b"x" * 31, b"x" * 33])
def test_a_copy_that_is_no_key_is_reported_and_replaced(key, tmp_path, reports, content):
    (tmp_path / KEY_FILE).write_bytes(content)
    used = key().use()
    assert reports == ["the copy of the bucket key is not a key and is replaced"]
    assert key().use() == used != content


def test_a_copy_that_can_be_neither_read_nor_written_is_reported_and_not_fatal(
    key, tmp_path, reports
):
    (tmp_path / KEY_FILE).mkdir()
    assert len(key().use()) == 32
    assert [line.partition(":")[0] for line in reports] == [
        "the copy of the bucket key cannot be read",
        "the bucket key cannot be copied to the state directory",
    ]


def test_what_a_kill_left_over_is_replaced(key, tmp_path):
    left_over = tmp_path / f"{KEY_FILE}.tmp"
    left_over.write_bytes(b"half")
    left_over.chmod(0o644)
    used = key().use()
    assert (tmp_path / KEY_FILE).read_bytes() == used
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600


GIVEN = b"a secret of sixteen bytes and more"


async def test_nodes_with_the_same_key_go_together_whether_it_is_given_or_the_stores(store):
    await require_same_key(store, GIVEN)
    await require_same_key(store, GIVEN)
    fingerprint = await store.secret(FINGERPRINT_NAME)
    assert len(fingerprint) == 32
    assert GIVEN not in fingerprint


async def test_nodes_without_a_key_of_their_own_go_together(store):
    await require_same_key(store, b"")
    await require_same_key(store, b"")
    await require_same_key(store, await store.secret(KEY_NAME))


@pytest.mark.parametrize(("first", "second"), [(GIVEN, GIVEN + b"2"), (GIVEN, b""), (b"", GIVEN)])
async def test_a_node_with_another_key_is_refused_by_the_name_of_the_setting(store, first, second):
    await require_same_key(store, first)
    with pytest.raises(StartupError, match=r"^KEY_SECRET is not that of the other nodes"):
        await require_same_key(store, second)
    await require_same_key(store, first)


async def test_of_nodes_that_race_with_different_keys_one_goes_on(postgresql_url):
    async with AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(store_at(postgresql_url)) for _ in range(4)]
        results = await asyncio.gather(
            *(require_same_key(store, GIVEN + bytes([n])) for n, store in enumerate(stores)),
            return_exceptions=True,
        )
    assert sorted(map(type, results), key=str) == [type(None), *[StartupError] * 3]
