import asyncio
import logging
import sqlite3
from contextlib import aclosing, closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command

from ratelimitd.errors import SchemaOlderError, SettingsError, StartupError, StoreUnavailableError
from ratelimitd.rules.assignments import Assignment
from ratelimitd.rules.sql import migrations
from ratelimitd.rules.sql.database import REVISIONS, VERSION_TABLE, metadata, open_database
from ratelimitd.rules.sql.migrations import require_current, upgrade
from ratelimitd.rules.store import RuleChanges, RuleDraft
from tests.rule_stores import migrated, store_at

NEWEST = REVISIONS[-1]
NEWER = rf"newer ratelimitd \(schema 0999, .* up to {NEWEST}\)"
AUDIT = """
INSERT INTO rule_audit (revision, at, actor, action, rule_id) VALUES (1, '2026-01-01', 'ada', 'create', 'r')
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rules.db"


def run(path, statement):
    with closing(sqlite3.connect(path)) as connection, connection:
        return connection.execute(statement).fetchall()


def contents(path):
    with closing(sqlite3.connect(path)) as connection:
        return list(connection.iterdump())


async def test_upgrade_creates_a_missing_file_with_the_newest_schema(path):
    await upgrade(f"sqlite:///{path}")
    assert run(path, f"SELECT version_num FROM {VERSION_TABLE}") == [(NEWEST,)]  # noqa: S608
    assert run(path, "SELECT revision FROM rule_revision") == [(0,)]
    assert run(path, "PRAGMA journal_mode") == [("wal",)]


async def schema_of(url):
    """Return what a database says of its tables, in any order of their columns."""
    async with aclosing(open_database(url)) as database, database.reading() as connection:
        return await connection.run_sync(lambda it: described_by(sa.inspect(it)))


def described_by(inspector):
    return {
        table: {
            repr(part)
            for parts in (
                [str(column) for column in inspector.get_columns(table)],
                [inspector.get_pk_constraint(table)],
                inspector.get_indexes(table),
                inspector.get_unique_constraints(table),
                inspector.get_check_constraints(table),
            )
            for part in parts
        }
        for table in inspector.get_table_names()
    }


def test_every_migration_is_named():
    files = Path(migrations.__file__).parent.glob("versions/r*.py")
    assert sorted(path.name[1:5] for path in files) == list(REVISIONS)


async def test_a_new_file_has_the_schema_of_a_migrated_one(path, tmp_path):
    new, old = f"sqlite:///{path}", f"sqlite:///{tmp_path / 'old.db'}"
    await upgrade(new)
    await migrated(old, NEWEST)
    assert await schema_of(new) == await schema_of(old)


async def test_upgrade_keeps_the_content_of_a_file_of_the_first_release(path):
    await migrated(f"sqlite:///{path}", "0001")
    run(path, AUDIT)
    with pytest.raises(StoreUnavailableError, match=r"of an older release \(schema 0001\)"):
        await require_current(f"sqlite:///{path}")
    await upgrade(f"sqlite:///{path}")
    await require_current(f"sqlite:///{path}")
    assert run(path, "SELECT revision, actor, rule_id FROM rule_audit") == [(1, "ada", "r")]


async def test_index_serves_the_audit_trail_of_one_rule(path):
    await upgrade(f"sqlite:///{path}")
    of_one = "SELECT actor FROM rule_audit WHERE rule_id = 'r' AND revision < 9"
    [plan] = run(path, f"EXPLAIN QUERY PLAN {of_one} ORDER BY revision DESC LIMIT 20")
    assert "USING INDEX rule_audit_rule" in plan[-1]


async def test_upgrade_leaves_a_current_database_unchanged(path):
    await upgrade(f"sqlite:///{path}")
    before = contents(path)
    await upgrade(f"sqlite:///{path}")
    assert contents(path) == before


async def test_database_constraints_refuse_invalid_rules(path):
    await upgrade(f"sqlite:///{path}")
    insert = "INSERT INTO rules VALUES ({}, 1, 1, '2026-01-01', '2026-01-01', NULL, NULL)"
    run(path, insert.format("'1', '/taken', 'user', 1, 1, 'fixed_window'"))
    for row in (
        "'9', '', 'user', 1, 1, 'fixed_window'",
        "'9', '/', 'user', 0, 1, 'fixed_window'",
        "'9', '/', 'user', 2147483648, 1, 'fixed_window'",
        "'9', '/', 'user', 1, 0, 'fixed_window'",
        "'9', '/', 'user', 1, 1, 'leaky_bucket'",
        "'9', '/', 'user', NULL, 1, 'fixed_window'",
        "'2', '/taken', 'user', 1, 1, 'fixed_window'",
    ):
        with pytest.raises(sqlite3.IntegrityError):
            run(path, insert.format(row))


async def test_concurrent_upgrades_migrate_once(path):
    await asyncio.gather(*(upgrade(f"sqlite:///{path}") for _ in range(3)))
    assert run(path, "SELECT count(*) FROM rule_revision") == [(1,)]


@pytest.mark.parametrize("foreign", ["TABLE customers (name TEXT)", "VIEW rules AS SELECT 1"])
async def test_foreign_database_is_refused_and_unchanged(path, foreign):
    run(path, f"CREATE {foreign}")
    before = contents(path)
    with pytest.raises(StartupError, match="holds tables that are not ratelimitd's"):
        await upgrade(f"sqlite:///{path}")
    assert contents(path) == before


async def test_database_of_a_newer_release_is_refused_and_unchanged(path):
    await upgrade(f"sqlite:///{path}")
    run(path, f"UPDATE {VERSION_TABLE} SET version_num = '0999'")  # noqa: S608
    before = contents(path)
    with pytest.raises(StartupError, match=NEWER):
        await upgrade(f"sqlite:///{path}")
    assert contents(path) == before


async def test_file_that_is_not_a_database_is_reported_and_unchanged(path):
    path.write_text("rules: []\n" * 1000)
    with pytest.raises(StoreUnavailableError, match="is not a SQLite database"):
        await upgrade(f"sqlite:///{path}")
    assert path.read_text() == "rules: []\n" * 1000


async def test_missing_directory_is_retryable(tmp_path):
    with pytest.raises(StoreUnavailableError) as caught:
        await upgrade(f"sqlite:///{tmp_path / 'missing/rules.db'}")
    text = f"DATABASE_URL: the rule database cannot be opened: its directory is missing: {tmp_path}/missing/rules.db"
    assert str(caught.value) == text


async def test_directory_in_place_of_the_file_is_permanent(tmp_path):
    with pytest.raises(
        StartupError, match=f"^DATABASE_URL: .* cannot be opened: it is a directory: {tmp_path}$"
    ):
        await upgrade(f"sqlite:///{tmp_path}")


async def test_missing_file_is_not_created_without_create(path):
    with pytest.raises(StoreUnavailableError, match="cannot be opened"):
        await upgrade(f"sqlite:///{path}", create=False)
    assert not path.exists()


async def test_locked_database_yields_a_one_line_error(path):
    await upgrade(f"sqlite:///{path}")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailableError, match="is locked by another process"):
            await upgrade(f"sqlite:///{path}", busy_timeout_s=0.01)


def and_fail(call):
    """Return a function that does what ``call`` does, then fails."""

    def fail(*arguments, **options):
        call(*arguments, **options)
        raise ZeroDivisionError

    return fail


async def test_failed_creation_rolls_back(path, monkeypatch):
    run(path, "PRAGMA journal_mode=WAL")
    monkeypatch.setattr(metadata, "create_all", and_fail(metadata.create_all))
    with pytest.raises(ZeroDivisionError):
        await upgrade(f"sqlite:///{path}")
    assert run(path, "SELECT name FROM sqlite_master") == []


async def test_failed_migration_rolls_back(path, monkeypatch):
    await migrated(f"sqlite:///{path}", "0001")
    before = contents(path)
    monkeypatch.setattr(command, "upgrade", and_fail(command.upgrade))
    with pytest.raises(ZeroDivisionError):
        await upgrade(f"sqlite:///{path}")
    assert contents(path) == before


async def test_alembic_prints_and_logs_nothing(path, capfd, caplog):
    caplog.set_level(logging.INFO)
    await migrated(f"sqlite:///{path}", "0001")
    await upgrade(f"sqlite:///{path}")
    assert capfd.readouterr() == ("", "")
    assert "alembic" not in {record.name.split(".")[0] for record in caplog.records}


async def test_other_url_scheme_is_refused():
    with pytest.raises(SettingsError):
        await upgrade("mysql://h/d")


@pytest.fixture
def empty_url(postgres):
    """A PostgreSQL database without a table."""
    return postgres.new_database("template0")


@pytest.fixture
def ask(postgres):
    """Run a statement on the database of a URL."""
    return lambda url, statement: postgres.sql(statement, database=url.rpartition("/")[2])


async def test_upgrade_migrates_an_empty_postgresql_and_leaves_a_current_one_unchanged(
    empty_url, ask
):
    for _ in range(2):
        await upgrade(empty_url)
        assert ask(empty_url, f"SELECT version_num FROM {VERSION_TABLE}") == [NEWEST]  # noqa: S608
        assert ask(empty_url, "SELECT revision FROM rule_revision") == ["0"]


async def test_upgrade_keeps_the_content_of_a_postgresql_of_the_first_release(empty_url, ask):
    await migrated(empty_url, "0001")
    ask(empty_url, AUDIT)
    with pytest.raises(StoreUnavailableError, match=r"older release \(schema 0001\): run `rate"):
        await require_current(empty_url)
    await upgrade(empty_url)
    await require_current(empty_url)
    assert ask(empty_url, "SELECT actor FROM rule_audit") == ["ada"]
    assert "rule_audit_rule" in ask(empty_url, "SELECT indexname FROM pg_indexes")


async def test_rules_are_sorted_by_bytes_in_any_database_language(postgresql_url, ask):
    collations = ask(
        postgresql_url,
        "SELECT column_name, collation_name FROM information_schema.columns"
        " WHERE table_name = 'rules' AND column_name IN ('endpoint', 'identifier_type')",
    )
    assert sorted(collations) == ["endpoint|C", "identifier_type|C"]


async def test_concurrent_upgrades_of_one_postgresql_migrate_once(empty_url, ask):
    await asyncio.gather(*(upgrade(empty_url) for _ in range(4)))
    assert ask(empty_url, "SELECT count(*) FROM rule_revision") == ["1"]


async def test_foreign_postgresql_is_refused_and_unchanged(empty_url, ask):
    ask(empty_url, "CREATE TABLE customers (name TEXT)")
    for attempt in (upgrade, require_current):
        with pytest.raises(StartupError, match="holds tables that are not ratelimitd's"):
            await attempt(empty_url)
    assert ask(empty_url, "SELECT relname FROM pg_stat_user_tables") == ["customers"]


async def test_postgresql_of_a_newer_release_is_refused_and_unchanged(postgresql_url, ask):
    ask(postgresql_url, f"UPDATE {VERSION_TABLE} SET version_num = '0999'")  # noqa: S608
    for attempt in (upgrade, require_current):
        with pytest.raises(StartupError, match=NEWER):
            await attempt(postgresql_url)


async def test_a_new_postgresql_has_the_schema_of_a_migrated_one(empty_url, postgres):
    old = postgres.new_database("template0")
    await upgrade(empty_url)
    await migrated(old, NEWEST)
    assert await schema_of(empty_url) == await schema_of(old)


async def test_failed_creation_rolls_back_on_postgresql(empty_url, ask, monkeypatch):
    monkeypatch.setattr(metadata, "create_all", and_fail(metadata.create_all))
    with pytest.raises(ZeroDivisionError):
        await upgrade(empty_url)
    assert ask(empty_url, "SELECT relname FROM pg_stat_user_tables") == []


async def test_failed_migration_rolls_back_on_postgresql(empty_url, monkeypatch):
    await migrated(empty_url, "0001")
    before = await schema_of(empty_url)
    monkeypatch.setattr(command, "upgrade", and_fail(command.upgrade))
    with pytest.raises(ZeroDivisionError):
        await upgrade(empty_url)
    assert await schema_of(empty_url) == before


async def test_start_requires_a_current_schema_and_names_the_command_if_it_is_missing(
    postgresql_url, empty_url
):
    await require_current(postgresql_url)
    with pytest.raises(
        StoreUnavailableError,
        match=r"has no tables yet: run `ratelimitd db upgrade`: 127\.0\.0\.1:.*",
    ):
        await require_current(empty_url)


async def test_own_schema_is_accepted_beside_foreign_tables(empty_url, ask):
    ask(empty_url, "CREATE TABLE rules (name TEXT)")
    ask(empty_url, "CREATE SCHEMA own")
    own = f"{empty_url}?search_path=own"
    await upgrade(own)
    await upgrade(own)
    await require_current(own)
    tables = ask(empty_url, "SELECT relname FROM pg_stat_user_tables WHERE schemaname = 'public'")
    assert tables == ["rules"]


DRAFT = RuleDraft("/a", "user", limit=1, window_seconds=1, algorithm="fixed_window")
RULE_ID = "00000000-0000-4000-8000-000000000001"
EDITS = {
    "create": lambda store: store.create(DRAFT, "ada"),
    "seed": lambda store: store.create_all([DRAFT], "ada"),
    "update": lambda store: store.update(RULE_ID, RuleChanges(limit=2), "", "ada"),
    "delete": lambda store: store.delete(RULE_ID, "", "ada"),
    "apply": lambda store: store.apply([DRAFT], "ada", prune=True, dry_run=False, since=0),
    "revert": lambda store: store.revert(0, "ada", dry_run=False, since=0),
    "assign": lambda store: store.assignments.assign_all([Assignment("user", b"u", "p")], "ada"),
    "unassign": lambda store: store.assignments.unassign(("user", b"u"), "", "ada"),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
async def test_edits_wait_for_the_upgrade_because_they_would_not_be_in_force(path, edit):
    url = f"sqlite:///{path}"
    await migrated(url, REVISIONS[-2])
    before = contents(path)
    async with store_at(url) as store:
        with pytest.raises(SchemaOlderError, match=r"\): run `ratelimitd db upgrade`$"):
            await edit(store)
        assert contents(path) == before
        await upgrade(url)
        await store.create(DRAFT, "ada")


async def test_edits_on_postgresql_wait_for_the_upgrade_to_this_release_but_not_to_a_newer_one(
    empty_url, ask
):
    await migrated(empty_url, REVISIONS[-2])
    async with store_at(empty_url) as store:
        with pytest.raises(SchemaOlderError):
            await store.create(DRAFT, "ada")
        await upgrade(empty_url)
        ask(empty_url, f"UPDATE {VERSION_TABLE} SET version_num = '0999'")  # noqa: S608
        await store.create(DRAFT, "ada")
