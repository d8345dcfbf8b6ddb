"""One store's opening; what it is for, with a node around it: test_app.py."""

import sqlite3
from contextlib import closing, nullcontext

import pytest
import pytest_asyncio

from ratelimitd.clock import SystemClock
from ratelimitd.errors import StartupError, StoreMisconfiguredError, StoreUnavailableError
from ratelimitd.node import startup
from ratelimitd.node.startup import StoreOpening, feed_of
from ratelimitd.rules.assignments import Assignments
from ratelimitd.rules.last_good import KEY_NAME, BucketKey
from ratelimitd.rules.sql import migrations
from ratelimitd.rules.sql.database import open_database
from ratelimitd.rules.sql.store import SqlRuleStore
from ratelimitd.settings.table import Settings
from tests.rule_stores import store_at

RULES = """
rules:
  - {endpoint: /a, identifier_type: user, limit: 1, window_seconds: 60, algorithm: token_bucket}
"""


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'rules.db'}"


@pytest_asyncio.fixture
async def store(url):
    store = SqlRuleStore(open_database(url), clock=SystemClock())
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
    key = BucketKey(tmp_path)
    opening = StoreOpening(
        store, url, may_create=lambda: True, rules_file=rules_file, bucket_key=key
    )
    await opening.open()
    assert [rule.endpoint for rule in await store.page("", "", None, 10)] == ["/a"]
    assert await store.secret(KEY_NAME) == key.use()
    rules_file.unlink()
    await opening.open()


async def test_a_rules_file_that_cannot_be_read_ends_the_start_whatever_the_book_has(
    store, url, rules_file
):
    def opening():
        return StoreOpening(
            store, url, may_create=lambda: True, rules_file=rules_file, bucket_key=None
        )

    await opening().open()
    rules_file.unlink()
    with pytest.raises(StartupError, match=r"RULES_FILE .*rules\.yaml cannot be read: No such"):
        await opening().open()


async def test_without_rules_file_and_key_there_is_only_the_schema(store, url):
    await StoreOpening(store, url, may_create=lambda: True, rules_file=None, bucket_key=None).open()
    assert await store.revision() == 0


async def test_an_attempt_that_failed_is_made_again(store, url, monkeypatch, tmp_path):
    monkeypatch.setattr(startup, "BUSY_TIMEOUT_S", 0.01)
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


async def test_the_feed_of_a_node_opens_the_store_and_makes_no_new_one_beside_the_last_good_book(
    url, store, rules_file, *, tmp_path, caplog
):
    settings = Settings.load({}, {"DATABASE_URL": url, "RULES_FILE": str(rules_file)})

    async def started():
        feed = feed_of(
            store,
            settings,
            None,
            tmp_path,
            on_book=lambda _book: None,
            assignments=Assignments(),
            whole_load=nullcontext,
        )
        await feed.start()
        await feed.notify()
        await feed.close()
        return feed

    assert len((await started()).book) == 1
    (tmp_path / "rules.db").rename(tmp_path / "away.db")
    (tmp_path / "rules.db").mkdir()
    with pytest.raises(StartupError, match="cannot be opened"):
        await started()
    (tmp_path / "rules.db").rmdir()
    (tmp_path / "rules.db").write_bytes(b"damaged" * 1000)
    feed = await started()
    assert len(feed.book) == 1
    (tmp_path / "rules.db").unlink()
    await feed.notify()
    assert not (tmp_path / "rules.db").exists()
    assert "serving the last good rule book" in caplog.text


async def test_a_server_without_the_schema_is_waited_for_and_named_with_the_command(postgres):
    url = postgres.new_database("template0")
    async with store_at(url) as store:
        opening = StoreOpening(
            store, url, may_create=lambda: True, rules_file=None, bucket_key=None
        )
        for _ in range(2):
            with pytest.raises(StoreUnavailableError, match="run `ratelimitd db upgrade`"):
                await opening.open()
        await migrations.upgrade(url)
        await opening.open()
        assert await store.revision() == 0


async def test_a_server_that_is_down_is_waited_for_and_then_gets_rules_and_key(
    postgres, postgresql_url, rules_file, tmp_path
):
    key = BucketKey(tmp_path)
    async with store_at(postgresql_url) as store:
        opening = StoreOpening(
            store, postgresql_url, may_create=lambda: True, rules_file=rules_file, bucket_key=key
        )
        postgres.stop()
        with pytest.raises(StoreUnavailableError, match="cannot be reached"):
            await opening.open()
        postgres.start()
        await opening.open()
        assert [rule.endpoint for rule in await store.page("", "", None, 10)] == ["/a"]
        assert await store.secret(KEY_NAME) == key.use()


async def test_a_wrong_password_is_waited_for_since_somebody_may_mend_it(postgres):
    url = postgres.url("migrated", user="guarded:wrong")
    async with store_at(url) as store:
        opening = StoreOpening(
            store, url, may_create=lambda: True, rules_file=None, bucket_key=None
        )
        with pytest.raises(StoreMisconfiguredError, match="refuses the user or the password"):
            await opening.open()


async def test_nodes_that_share_buckets_must_have_one_key_and_others_need_not(store, url):
    def opening(shared_key):
        return StoreOpening(
            store,
            url,
            may_create=lambda: True,
            rules_file=None,
            bucket_key=None,
            shared_key=shared_key,
        )

    await opening(b"sixteen bytes or").open()
    await opening(b"sixteen bytes or").open()
    with pytest.raises(StartupError, match="KEY_SECRET"):
        await opening(b"sixteen others..").open()
    with pytest.raises(StartupError, match="KEY_SECRET"):
        await opening(b"").open()
    await opening(None).open()
