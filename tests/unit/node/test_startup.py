"""Seeding and opening of a rule store; test_app.py tests them in a whole node."""

import asyncio
import os
import sqlite3
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from ratelimitd.clock import SystemClock
from ratelimitd.errors import (
    MAX_VIOLATIONS,
    StartupError,
    StoreMisconfiguredError,
    StoreUnavailableError,
)
from ratelimitd.node import startup
from ratelimitd.node.startup import ACTOR, StoreOpening, feed_of, seed_new_book
from ratelimitd.rules.assignments import Assignment, Assignments
from ratelimitd.rules.last_good import KEY_NAME, BucketKey
from ratelimitd.rules.rules_file import parse_rules
from ratelimitd.rules.sql import migrations
from ratelimitd.rules.sql.database import open_database
from ratelimitd.rules.sql.store import SqlRuleStore
from ratelimitd.rules.store import RuleDraft
from ratelimitd.settings.table import Settings
from tests.rule_stores import sqlite_store, store_at

RULES = """
rules:
  - {endpoint: /a, identifier_type: user, limit: 1, window_seconds: 60, algorithm: token_bucket}
  - {endpoint: /b, identifier_type: user, limit: 2, window_seconds: 60, algorithm: fixed_window}
"""


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'rules.db'}"


@pytest.fixture
async def unopened(url):
    """A store whose file does not exist yet."""
    store = SqlRuleStore(open_database(url), clock=SystemClock())
    yield store
    await store.close()


@pytest.fixture
async def store(url, unopened):
    await migrations.upgrade(url)
    return unopened


@pytest.fixture
def rules_file(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text(RULES)
    return path


async def endpoints(store):
    return [rule.endpoint for rule in await store.page("", "", None, 10)]


async def test_a_new_book_is_seeded_and_the_audit_trail_names_the_setting(
    store, rules_file, tmp_path
):
    assert await seed_new_book(store, rules_file) == 2
    assert await endpoints(store) == ["/a", "/b"]
    with closing(sqlite3.connect(tmp_path / "rules.db")) as connection:
        assert connection.execute("SELECT actor FROM rule_audit").fetchall() == [(ACTOR,)] * 2


@pytest.mark.parametrize(("deleted", "left"), [("/a", ["/b"]), ("", [])])
async def test_an_existing_or_emptied_book_is_not_changed_and_the_file_not_read(
    store, rules_file, tmp_path, *, deleted, left
):
    await seed_new_book(store, rules_file)
    for rule in await store.page(deleted, "", None, 10):
        await store.delete(rule.id, "", "test")
    assert await seed_new_book(store, rules_file) == 0
    assert await seed_new_book(store, tmp_path / "absent.yaml") == 0
    assert await endpoints(store) == left


async def test_an_empty_file_with_a_new_book_is_not_reported_as_ignored(store, rules_file, caplog):
    caplog.set_level("INFO", startup.__name__)
    rules_file.write_text("rules: []\n")
    assert await seed_new_book(store, rules_file) == 0
    assert "RULES_FILE" not in caplog.text


async def test_a_file_is_reported_as_ignored_if_rows_exist_at_revision_0(
    store, rules_file, tmp_path, caplog
):
    caplog.set_level("INFO", startup.__name__)
    await seed_new_book(store, rules_file)
    with closing(sqlite3.connect(tmp_path / "rules.db")) as connection, connection:
        connection.execute("UPDATE rule_revision SET revision = 0")
    assert await seed_new_book(store, rules_file) == 0
    assert "RULES_FILE only seeds a new rule book" in caplog.text


async def test_one_of_two_concurrent_nodes_seeds_the_database(store, rules_file):
    written = await asyncio.gather(*(seed_new_book(store, rules_file) for _ in range(2)))
    assert sorted(written) == [0, 2]
    assert await endpoints(store) == ["/a", "/b"]


@pytest.mark.parametrize("turns", range(0, 60, 3))
async def test_a_start_after_a_cancelled_one_seeds_the_book(store, rules_file, turns):
    seeding = asyncio.create_task(seed_new_book(store, rules_file))
    for _ in range(turns):
        await asyncio.sleep(0)
    seeding.cancel()
    await asyncio.gather(seeding, return_exceptions=True)
    assert len(await endpoints(store)) in {0, 2}
    await seed_new_book(store, rules_file)
    assert await endpoints(store) == ["/a", "/b"]


async def test_an_invalid_rule_is_reported_by_file_index_and_field_and_nothing_is_written(
    store, rules_file
):
    rules_file.write_text(RULES.replace("limit: 2", "limit: 0"))
    with pytest.raises(StartupError, match=r"RULES_FILE .*rules\.yaml: rules\[1\]\.limit: "):
        await seed_new_book(store, rules_file)
    assert await endpoints(store) == []


async def test_the_first_of_many_invalid_rules_are_reported_and_the_others_counted(
    store, rules_file
):
    rules_file.write_text("rules:\n" + f"- {{{'x' * 900}: 1}}\n" * 9_000)
    with pytest.raises(StartupError, match=r"; \d+ more$") as caught:
        await seed_new_book(store, rules_file)
    assert len(str(caught.value)) < 200 * MAX_VIOLATIONS


async def test_an_unreadable_file_is_reported_with_the_reason(store, tmp_path):
    with pytest.raises(StartupError, match=r"RULES_FILE .*absent\.yaml cannot be read: No such"):
        await seed_new_book(store, tmp_path / "absent.yaml")


async def test_a_pipe_is_refused_without_waiting_for_a_writer(store, tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(StartupError, match=r"RULES_FILE .*pipe cannot be read: not a regular file"):
        await seed_new_book(store, path)


def opening_of(store, url, **changes):
    """Return the opening of a store that may be created, without rules file and key."""
    given = {"may_be_new": lambda: True, "rules_file": None, "bucket_key": None}
    return StoreOpening(store, url, **{**given, **changes})


async def test_a_new_database_gets_its_schema_its_rules_and_the_nodes_key(
    unopened, url, rules_file, tmp_path
):
    key = BucketKey(tmp_path)
    opening = opening_of(unopened, url, rules_file=rules_file, bucket_key=key)
    await opening.open()
    assert await endpoints(unopened) == ["/a", "/b"]
    assert await unopened.secret(KEY_NAME) == key.use()
    rules_file.unlink()
    await opening.open()


async def test_an_existing_book_ignores_the_file_and_logs_it(unopened, url, rules_file, caplog):
    caplog.set_level("INFO", startup.__name__)
    for _ in "ab":
        await opening_of(unopened, url, rules_file=rules_file).open()
    filled, left = [
        record.getMessage() for record in caplog.records if record.name == startup.__name__
    ]
    assert "2 rules" in filled
    assert "RULES_FILE" in left
    assert "ratelimitd rules apply" in left


async def test_a_failed_attempt_is_repeated(unopened, url, monkeypatch, tmp_path):
    monkeypatch.setattr(startup, "BUSY_TIMEOUT_S", 0.01)
    opening = opening_of(unopened, url)
    with closing(sqlite3.connect(tmp_path / "rules.db", isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode=WAL")
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailableError, match="is locked"):
            await opening.open()
    await opening.open()
    assert await unopened.revision() == 0


async def test_a_wrong_configuration_fails_the_first_attempt_and_is_retried_by_later_ones(
    unopened, url, rules_file, tmp_path
):
    rules_file.write_text("rules: [{}]")
    opening = opening_of(unopened, url, rules_file=rules_file)
    with pytest.raises(StartupError, match="RULES_FILE"):
        await opening.open()
    with pytest.raises(StoreUnavailableError, match="RULES_FILE"):
        await opening.open()
    assert list(tmp_path.iterdir()) == [rules_file], "no empty database is left"
    rules_file.write_text(RULES)
    await opening.open()
    assert await unopened.revision() == 2


async def test_an_empty_database_in_place_of_one_with_content_is_not_filled(
    store, url, rules_file, tmp_path
):
    opening = opening_of(
        store,
        url,
        may_be_new=lambda: False,
        rules_file=rules_file,
        bucket_key=BucketKey(tmp_path),
        shared_key=b"sixteen bytes or",
    )
    with pytest.raises(
        StoreUnavailableError,
        match=r"database is empty: restore it, or run `ratelimitd rules apply` .* rules.last-good",
    ):
        await opening.open()
    with closing(sqlite3.connect(tmp_path / "rules.db")) as connection:
        assert connection.execute("SELECT count(*) FROM secrets").fetchall() == [(0,)]
    assert await endpoints(store) == []
    await store.create_all(parse_rules(RULES.encode()), "restored")
    await opening.open()


async def test_a_missing_database_is_created_only_while_allowed(unopened, url, tmp_path):
    opening = opening_of(unopened, url, may_be_new=lambda: False)
    with pytest.raises(
        StoreUnavailableError,
        match=r"rules.db is missing: restore it, or run `ratelimitd db upgrade` and .* rules.last-good",
    ):
        await opening.open()
    assert not (tmp_path / "rules.db").exists()


@pytest.fixture
def new_feed(unopened, url, rules_file, tmp_path):
    """Return a node's feed, with the rules file unless told otherwise."""

    def new_feed(given=None):
        given = {"RULES_FILE": str(rules_file)} if given is None else given
        return feed_of(
            unopened,
            Settings.load({}, {"DATABASE_URL": url, **given}),
            None,
            tmp_path,
            on_book=lambda _book: None,
            assignments=Assignments(),
            whole_load=nullcontext,
        )

    return new_feed


@pytest.fixture
def started(new_feed):
    """Start a node's feed and close it."""

    async def started(given=None):
        feed = new_feed(given)
        await feed.start()
        await feed.notify()
        await feed.close()
        return feed

    return started


def truncated(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("lose", [Path.unlink, truncated])
@pytest.mark.parametrize("given", [None, {}], ids=["with RULES_FILE", "without"])
async def test_a_lost_database_leaves_edits_and_assignments_of_the_last_good_book_in_force(
    started, unopened, tmp_path, *, lose, given
):
    await started()
    await unopened.create(RuleDraft("/c", "user", 1, 60, "token_bucket"), "me")
    await unopened.assignments.assign_all([Assignment("user", b"eve", "blocked")], "me")
    await started()
    await unopened.close()
    copy = (tmp_path / "rules.last-good").read_bytes()
    lose(tmp_path / "rules.db")
    feed = await started(given)
    assert (len(feed.book), len(feed.assignments), feed.connected) == (3, 1, False)
    assert (tmp_path / "rules.last-good").read_bytes() == copy
    (tmp_path / "rules.last-good").unlink()
    feed = await started(given)
    assert (len(feed.book), len(feed.assignments)) == (0 if given is not None else 2, 0)
    assert feed.connected


async def test_a_lost_database_is_not_made_again_because_its_copy_is_damaged(
    started, unopened, new_feed, tmp_path
):
    await started()
    await unopened.close()
    copy = tmp_path / "rules.last-good"
    copy.write_bytes(copy.read_bytes()[:-9])
    (tmp_path / "rules.db").unlink()
    feed = new_feed()
    await feed.start()
    await feed.notify()
    assert (feed.book, copy.exists()) == (None, False)
    assert not (tmp_path / "rules.db").exists()
    await feed.close()


@pytest.mark.parametrize("endpoints_there", [["/x"], ["/x", "/y"], ["/x", "/y", "/z"]])
async def test_a_file_in_place_of_that_of_a_running_node_is_loaded_whole(
    new_feed, tmp_path, endpoints_there
):
    feed = new_feed()
    await feed.start()
    assert feed.book.revision == 2
    (tmp_path / "there").mkdir()
    async with sqlite_store(tmp_path / "there") as there:
        for endpoint in endpoints_there:
            await there.create(RuleDraft(endpoint, "user", 1, 60, "token_bucket"), "me")
    for wal in tmp_path.glob("rules.db-*"):
        wal.unlink()
    (tmp_path / "there/rules.db").replace(tmp_path / "rules.db")
    await feed.notify()
    assert sorted(rule.endpoint for rule in feed.book.rules()) == endpoints_there
    book = feed.book
    await feed.notify()
    assert feed.book is book
    await feed.close()


async def test_an_empty_file_that_another_node_creates_does_not_replace_the_book_in_use(
    new_feed, url, tmp_path, caplog
):
    feed = new_feed()
    await feed.start()
    for file in tmp_path.glob("rules.db*"):
        file.unlink()
    await feed.notify()
    assert "rules.db is missing: restore it" in caplog.text
    await migrations.upgrade(url)
    await feed.notify()
    assert (len(feed.book), feed.connected) == (2, False)
    await feed.close()


async def test_a_database_without_edits_is_created_again(started, tmp_path):
    assert len((await started({})).book) == 0
    (tmp_path / "rules.db").unlink()
    assert (await started({})).connected


async def test_the_feed_opens_the_store_and_creates_none_beside_the_last_good_book(
    started, rules_file, tmp_path, caplog
):
    assert len((await started()).book) == 2
    rules_file.unlink()
    (tmp_path / "rules.db").rename(tmp_path / "away.db")
    (tmp_path / "rules.db").mkdir()
    with pytest.raises(StartupError, match="cannot be opened"):
        await started()
    (tmp_path / "rules.db").rmdir()
    (tmp_path / "rules.db").write_bytes(b"damaged" * 1000)
    feed = await started()
    assert len(feed.book) == 2
    (tmp_path / "rules.db").unlink()
    await feed.notify()
    assert not (tmp_path / "rules.db").exists()
    assert "serving the last good rule book" in caplog.text
    assert len((await started({})).book) == 2
    assert not (tmp_path / "rules.db").exists()
    (tmp_path / "rules.last-good").unlink()
    assert len((await started({})).book) == 0
    (tmp_path / "rules.db").unlink()
    rules_file.write_text(RULES)
    assert len((await started()).book) == 2


async def test_a_server_without_the_schema_is_retried_and_reported_with_the_command(postgres):
    url = postgres.new_database("template0")
    async with store_at(url) as store:
        opening = opening_of(store, url)
        for _ in range(2):
            with pytest.raises(StoreUnavailableError, match="run `ratelimitd db upgrade`"):
                await opening.open()
        await migrations.upgrade(url)
        await opening.open()
        assert await store.revision() == 0


async def test_a_server_that_is_down_is_retried_and_then_gets_rules_and_key(
    postgres, postgresql_url, rules_file, tmp_path
):
    key = BucketKey(tmp_path)
    async with store_at(postgresql_url) as store:
        opening = opening_of(store, postgresql_url, rules_file=rules_file, bucket_key=key)
        postgres.stop()
        with pytest.raises(StoreUnavailableError, match="cannot be reached"):
            await opening.open()
        postgres.start()
        await opening.open()
        assert await endpoints(store) == ["/a", "/b"]
        assert await store.secret(KEY_NAME) == key.use()


async def test_a_wrong_password_is_retried(postgres):
    url = postgres.url("migrated", user="guarded:wrong")
    async with store_at(url) as store:
        opening = opening_of(store, url)
        with pytest.raises(StoreMisconfiguredError, match="refuses the user or the password"):
            await opening.open()


async def test_only_nodes_that_share_buckets_must_have_the_same_key(unopened, url):
    for _ in range(2):
        await opening_of(unopened, url, shared_key=b"sixteen bytes or").open()
    for other in (b"sixteen others..", b""):
        with pytest.raises(StartupError, match="KEY_SECRET"):
            await opening_of(unopened, url, shared_key=other).open()
    await opening_of(unopened, url, shared_key=None).open()
