from datetime import timedelta

import pytest
import pytest_asyncio
import sqlalchemy as sa

from ratelimitd.errors import RuleConflictError, RuleNotFoundError
from ratelimitd.rules.sql import store as sql_reads
from ratelimitd.rules.sql.database import rule_audit, rules
from ratelimitd.rules.sql.sqlite import SqliteDatabase
from ratelimitd.rules.sql.store import COLUMNS, ROWS_PER_STEP
from ratelimitd.rules.store import RuleDraft
from tests.rule_stores import sqlite_store

EVERY = sa.select(*COLUMNS).order_by(rules.c.endpoint)


@pytest.fixture
def drafts():
    return [
        RuleDraft(f"/{n:03}", "user", 1, 1, "fixed_window") for n in range(2 * ROWS_PER_STEP + 1)
    ]


@pytest_asyncio.fixture
async def store(tmp_path):
    async with sqlite_store(tmp_path) as opened:
        yield opened


@pytest_asyncio.fixture
async def connection(store, tmp_path):
    """One transaction that reads what the store wrote."""
    database = SqliteDatabase(tmp_path / "rules.db")
    async with database.reading() as opened:
        yield opened
        await opened.rollback()
    await database.close()


async def test_rules_come_in_batches_with_turns_of_the_loop_between(store, connection, drafts):
    await store.create_all(drafts, "me")
    sizes = [len(batch.rules) async for batch in sql_reads.read(connection, EVERY)]
    assert sizes == [ROWS_PER_STEP, ROWS_PER_STEP, 1]
    whole = await sql_reads.read_all(connection, EVERY)
    assert [rule.endpoint for rule in whole.rules] == [draft.endpoint for draft in drafts]
    assert whole.skipped == []


async def test_a_row_that_is_no_rule_is_set_apart(store, connection):
    await store.create(RuleDraft("/a", "user", 1, 1, "fixed_window"), "me")
    wrong = await store.create(RuleDraft("/b", "user", 1, 1, "fixed_window"), "me")
    await connection.exec_driver_sql("PRAGMA ignore_check_constraints = 1")
    await connection.execute(rules.update().where(rules.c.id == wrong.id).values(limit=0))
    batch = await sql_reads.read_all(connection, EVERY)
    assert [rule.endpoint for rule in batch.rules] == ["/a"]
    assert batch.skipped == [(wrong.id, "limit: the limit must be positive")]


async def test_the_revision_and_the_deletions_after_another(store, connection):
    one = await store.create(RuleDraft("/a", "user", 1, 1, "fixed_window"), "me")
    two = await store.create(RuleDraft("/b", "user", 1, 1, "fixed_window"), "me")
    await store.delete(one.id, "", "me")
    await store.delete(two.id, "", "me")
    assert await sql_reads.current_revision(connection) == 4
    assert set(await sql_reads.removed_since(connection, 2)) == {one.id, two.id}
    assert await sql_reads.removed_since(connection, 3) == [two.id]
    assert await sql_reads.removed_since(connection, 4) == []


async def test_a_lost_revision_row_counts_as_zero(connection):
    await connection.exec_driver_sql("DELETE FROM rule_revision")
    assert await sql_reads.current_revision(connection) == 0


async def test_a_row_is_found_by_its_id_and_its_etag_if_one_is_given(store, connection):
    rule = await store.create(RuleDraft("/a", "user", 1, 1, "fixed_window"), "me")
    for etag in ("", rule.etag):
        assert (await sql_reads.stored_row(connection, rule.id, etag)).endpoint == "/a"
    with pytest.raises(RuleConflictError):
        await sql_reads.stored_row(connection, rule.id, "another")
    with pytest.raises(RuleNotFoundError):
        await sql_reads.stored_row(connection, "another", "")


@pytest.mark.parametrize("text", ["no JSON", "[1]", "7"])
async def test_what_holds_no_fields_in_the_audit_trail_is_read_as_none(store, connection, text):
    await store.create(RuleDraft("/a", "user", 1, 1, "fixed_window"), "me")
    await connection.execute(rule_audit.update().values(before=text))
    [entry] = await sql_reads.audit_entries(connection, "", None, 10)
    assert (entry.before, entry.after["endpoint"]) == (None, "/a")
    assert entry.at.utcoffset() == timedelta(0)
