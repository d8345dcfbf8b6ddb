"""One store's opening; what it is for, with a node around it: test_app.py."""

import sqlite3
from contextlib import closing

import pytest
import pytest_asyncio

from ratelimitd import store_opening
from ratelimitd.clock import SystemClock
from ratelimitd.errors import StartupError, StoreUnavailableError
from ratelimitd.rules.bucket_key import STORED_NAME, BucketKey
from ratelimitd.rules.sql import SqlRuleStore
from ratelimitd.store_opening import StoreOpening

RULES = """
rules:
  - {endpoint: /a, identifier_type: user, limit: 1, window_seconds: 60, algorithm: token_bucket}
"""


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'rules.db'}"


@pytest_asyncio.fixture
async def store(url):
    store = SqlRuleStore(url, clock=SystemClock())
    yield store
    await store.close()


@pytest.fixture
def rules_file(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text(RULES)
    return path


async def test_a_new_database_gets_its_schema_its_rules_and_the_nodes_key(
    store, url, rules_file, tmp_path
):
    key = BucketKey(tmp_path, report=lambda _line: None)
    opening = StoreOpening(
        store, url, may_create=lambda: True, rules_file=rules_file, bucket_key=key
    )
    await opening.open()
    assert [rule.endpoint for rule in await store.page("", "", None, 10)] == ["/a"]
    assert await store.secret(STORED_NAME) == key.use()
    rules_file.unlink()
    await opening.open()


async def test_without_rules_file_and_key_there_is_only_the_schema(store, url):
    await StoreOpening(store, url, may_create=lambda: True, rules_file=None, bucket_key=None).open()
    assert await store.revision() == 0


async def test_an_attempt_that_failed_is_made_again(store, url, monkeypatch, tmp_path):
    monkeypatch.setattr(store_opening, "BUSY_TIMEOUT_S", 0.01)
    opening = StoreOpening(store, url, may_create=lambda: True, rules_file=None, bucket_key=None)
    with closing(sqlite3.connect(tmp_path / "rules.db", isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode=WAL")
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailableError, match="is locked"):
            await opening.open()
    await opening.open()
    assert await store.revision() == 0


async def test_a_mistake_ends_the_first_attempt_and_is_waited_for_by_later_ones(
    store, url, rules_file
):
    rules_file.write_text("rules: [{}]")
    opening = StoreOpening(
        store, url, may_create=lambda: True, rules_file=rules_file, bucket_key=None
    )
    with pytest.raises(StartupError, match="RULES_FILE"):
        await opening.open()
    with pytest.raises(StoreUnavailableError, match="RULES_FILE"):
        await opening.open()
    rules_file.write_text(RULES)
    await opening.open()
    assert await store.revision() == 1


async def test_a_missing_database_is_made_only_while_it_may(store, url, tmp_path):
    opening = StoreOpening(store, url, may_create=lambda: False, rules_file=None, bucket_key=None)
    with pytest.raises(StoreUnavailableError, match="cannot be opened"):
        await opening.open()
    assert not (tmp_path / "rules.db").exists()
