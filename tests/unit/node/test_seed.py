import asyncio
import os
import sqlite3
from contextlib import closing

import pytest

from ratelimitd.clock import SystemClock
from ratelimitd.errors import MAX_VIOLATIONS, StartupError
from ratelimitd.node import startup
from ratelimitd.node.startup import ACTOR, seed_new_book
from ratelimitd.rules.sql import migrations
from ratelimitd.rules.sql.database import open_database
from ratelimitd.rules.sql.store import SqlRuleStore

RULES = """
rules:
  - {endpoint: /a, identifier_type: user, limit: 1, window_seconds: 60, algorithm: token_bucket}
  - {endpoint: /b, identifier_type: user, limit: 2, window_seconds: 60, algorithm: fixed_window}
"""


@pytest.fixture
async def store(tmp_path):
    url = f"sqlite:///{tmp_path / 'rules.db'}"
    await migrations.upgrade(url)
    store = SqlRuleStore(open_database(url), clock=SystemClock())
    yield store
    await store.close()


@pytest.fixture
def rules_file(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text(RULES)
    return path


async def endpoints(store):
    return [rule.endpoint for rule in await store.page("", "", None, 10)]


async def test_a_new_book_is_filled(store, rules_file):
    assert await seed_new_book(store, rules_file) == 2
    assert await endpoints(store) == ["/a", "/b"]


async def test_a_filled_book_is_never_touched_and_the_file_not_even_read(
    store, rules_file, tmp_path
):
    await seed_new_book(store, rules_file)
    for rule in await store.page("/a", "", None, 1):
        await store.delete(rule.id, "", "test")
    assert await seed_new_book(store, rules_file) == 0
    assert await seed_new_book(store, tmp_path / "absent.yaml") == 0
    assert await endpoints(store) == ["/b"]


async def test_a_file_without_rules_beside_a_new_book_is_not_said_to_be_left_alone(
    store, rules_file, caplog
):
    caplog.set_level("INFO", startup.__name__)
    rules_file.write_text("rules: []\n")
    assert await seed_new_book(store, rules_file) == 0
    assert "RULES_FILE" not in caplog.text


async def test_a_book_with_rows_past_the_service_is_said_to_be_left_alone(
    store, rules_file, tmp_path, caplog
):
    caplog.set_level("INFO", startup.__name__)
    await seed_new_book(store, rules_file)
    with closing(sqlite3.connect(tmp_path / "rules.db")) as connection, connection:
        connection.execute("UPDATE rule_revision SET revision = 0")
    assert await seed_new_book(store, rules_file) == 0
    assert "RULES_FILE fills a new rule book only" in caplog.text


async def test_a_book_that_was_emptied_on_purpose_stays_empty(store, rules_file):
    await seed_new_book(store, rules_file)
    for rule in await store.page("", "", None, 10):
        await store.delete(rule.id, "", "test")
    assert await seed_new_book(store, rules_file) == 0
    assert await endpoints(store) == []


async def test_of_two_nodes_that_seed_one_database_at_once_one_does(store, rules_file):
    written = await asyncio.gather(*(seed_new_book(store, rules_file) for _ in range(2)))
    assert sorted(written) == [0, 2]
    assert await endpoints(store) == ["/a", "/b"]


async def test_the_audit_trail_names_the_setting(store, rules_file, tmp_path):
    await seed_new_book(store, rules_file)
    with closing(sqlite3.connect(tmp_path / "rules.db")) as connection:
        assert connection.execute("SELECT actor FROM rule_audit").fetchall() == [(ACTOR,)] * 2


@pytest.mark.parametrize("turns", range(0, 60, 3))
async def test_a_start_that_is_broken_off_leaves_a_book_that_the_next_one_fills(
    store, rules_file, turns
):
    seeding = asyncio.create_task(seed_new_book(store, rules_file))
    for _ in range(turns):
        await asyncio.sleep(0)
    seeding.cancel()
    await asyncio.gather(seeding, return_exceptions=True)
    assert len(await endpoints(store)) in {0, 2}
    await seed_new_book(store, rules_file)
    assert await endpoints(store) == ["/a", "/b"]


async def test_a_wrong_rule_is_named_by_file_index_and_field_and_nothing_is_written(
    store, rules_file
):
    rules_file.write_text(RULES.replace("limit: 2", "limit: 0"))
    with pytest.raises(StartupError, match=r"RULES_FILE .*rules\.yaml: rules\[1\]\.limit: "):
        await seed_new_book(store, rules_file)
    assert await endpoints(store) == []


async def test_of_many_wrong_rules_the_first_are_named_and_the_others_counted(store, rules_file):
    rules_file.write_text("rules:\n" + f"- {{{'x' * 900}: 1}}\n" * 9_000)
    with pytest.raises(StartupError, match=r"; \d+ more$") as caught:
        await seed_new_book(store, rules_file)
    assert len(str(caught.value)) < 200 * MAX_VIOLATIONS


async def test_a_file_that_cannot_be_read_is_named_with_the_reason(store, tmp_path):
    with pytest.raises(StartupError, match=r"RULES_FILE .*absent\.yaml cannot be read: No such"):
        await seed_new_book(store, tmp_path / "absent.yaml")


async def test_a_pipe_is_refused_without_waiting_for_a_writer(store, tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(StartupError, match=r"RULES_FILE .*pipe cannot be read: not a regular file"):
        await seed_new_book(store, path)
