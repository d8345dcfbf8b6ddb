import asyncio
import logging
import os
import sqlite3
import threading
from contextlib import aclosing

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, OperationalError, SQLAlchemyError

from ratelimitd.errors import RuleNotFoundError, StartupError, StoreUnavailableError
from ratelimitd.rules.sql import sqlite
from ratelimitd.rules.sql.sqlite import SqliteDatabase


@pytest.fixture
def path(tmp_path):
    """A database with one table, in a file whose name is difficult in URLs."""
    path = tmp_path / "ru%les #1?.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE things (name TEXT UNIQUE)")
    connection.commit()
    connection.close()
    return path


async def using(path, work, *, write=False, **options):
    """Return the result of ``work`` in a transaction of a newly opened database."""
    database = SqliteDatabase(path, **options)
    begin = database.writing if write else database.reading
    async with aclosing(database), begin() as connection:
        return await work(connection)


def sql(statement, *parameters):
    async def work(connection):
        return (await connection.exec_driver_sql(statement, parameters)).all()

    return work


def insert(name):
    async def work(connection):
        await connection.exec_driver_sql("INSERT INTO things VALUES (?)", (name,))

    return work


async def test_connection_never_waits_for_readers_and_syncs_commits(path):
    assert await using(path, sql("PRAGMA journal_mode")) == [("wal",)]
    assert await using(path, sql("PRAGMA synchronous")) == [(2,)]


class BusyOnce:
    """A cursor whose switch of the journal mode fails as during a concurrent switch."""

    def __init__(self, error=sqlite3.SQLITE_BUSY):
        self.statements, self._error = [], error

    def execute(self, statement):
        self.statements.append(statement)
        if len(self.statements) == 1:
            error = sqlite3.OperationalError()
            error.sqlite_errorcode = self._error
            raise error


def test_processes_that_open_a_new_file_at_once_wait_for_each_other():
    cursor = BusyOnce()
    sqlite._use_wal(cursor)
    switch = "PRAGMA journal_mode=WAL"
    assert cursor.statements == [switch, "BEGIN IMMEDIATE", "COMMIT", switch]
    with pytest.raises(sqlite3.OperationalError):
        sqlite._use_wal(BusyOnce(sqlite3.SQLITE_IOERR))


async def test_missing_file_is_an_error_without_create(tmp_path):
    with pytest.raises(StoreUnavailableError, match="cannot be opened"):
        await using(tmp_path / "rules.db", sql("SELECT 1"))
    assert list(tmp_path.iterdir()) == []


async def test_missing_file_is_created_with_create(tmp_path):
    assert await using(tmp_path / "rules.db", sql("SELECT 1"), create=True) == [(1,)]


async def test_created_file_is_private_to_its_owner(tmp_path):
    await using(tmp_path / "rules.db", sql("SELECT 1"), create=True)
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o600]


async def test_writer_waits_for_another_up_to_the_busy_timeout(path):
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailableError, match="is locked by another process"):
        await using(path, insert("a"), write=True, busy_timeout_s=0.01)
    other.execute("ROLLBACK")
    other.close()
    await using(path, insert("a"), write=True)


async def test_writers_of_one_process_take_turns(path):
    database = SqliteDatabase(path, busy_timeout_s=0.0)
    held, release = asyncio.Event(), asyncio.Event()

    async def hold():
        async with database.writing():
            held.set()
            await release.wait()

    async with aclosing(database):
        holder = asyncio.create_task(hold())
        await held.wait()
        later = [asyncio.create_task(insert_into(database, name)) for name in "abcdef"]
        async with database.reading() as connection:  # those who wait leave it a connection
            assert await sql("SELECT name FROM things")(connection) == []
        release.set()
        results = await asyncio.gather(holder, *later, return_exceptions=True)
        assert results == [None] * 7
        async with database.reading() as connection:
            names = await sql("SELECT name FROM things ORDER BY rowid")(connection)
    assert names == [(name,) for name in "abcdef"]


async def test_reads_succeed_while_another_process_writes(path):
    await using(path, insert("a"), write=True)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    other.execute("DELETE FROM things")
    assert await using(path, sql("SELECT name FROM things"), busy_timeout_s=0.01) == [("a",)]
    other.close()


async def test_all_statements_of_one_transaction_see_one_state(path):
    async def work(connection):
        before = (await connection.exec_driver_sql("SELECT count(*) FROM things")).scalar()
        await using(path, insert("a"), write=True)
        return before, (await connection.exec_driver_sql("SELECT count(*) FROM things")).scalar()

    assert await using(path, work) == (0, 0)


async def test_full_disk_is_reported(path):
    async def work(connection):
        await connection.exec_driver_sql("PRAGMA max_page_count = 1")
        await connection.exec_driver_sql("INSERT INTO things VALUES (?)", ("x" * 100_000,))

    with pytest.raises(StoreUnavailableError, match="the disk is full"):
        await using(path, work)


async def test_read_only_database_is_reported(path):
    async def work(connection):
        await connection.exec_driver_sql("PRAGMA query_only = 1")
        await connection.exec_driver_sql("INSERT INTO things VALUES ('a')")

    with pytest.raises(StoreUnavailableError, match="is read-only"):
        await using(path, work)


async def test_file_that_is_not_a_database_is_reported(tmp_path):
    (tmp_path / "rules.db").write_text("rules: []\n" * 1000)
    with pytest.raises(StoreUnavailableError, match="is not a SQLite database"):
        await using(tmp_path / "rules.db", sql("SELECT 1"))


async def test_message_contains_neither_statement_nor_value(path):
    await using(path, insert("s3cret"), write=True)
    with pytest.raises(StoreUnavailableError) as caught:
        await using(path, insert("s3cret"), write=True)
    assert str(caught.value) == "the rule database failed (SQLITE_CONSTRAINT_UNIQUE)"
    assert "s3cret" not in str(caught.value.__cause__)


@pytest.mark.parametrize("statement", ["SELECT 1 FROM rules", "SELECT plans FROM things"])
async def test_missing_table_asks_for_an_upgrade(path, statement):
    with pytest.raises(StoreUnavailableError, match="lacks the tables of this release"):
        await using(path, sql(statement))


def test_error_of_another_library_has_a_message(path):
    assert (
        sqlite.meaning_of(SQLAlchemyError("x"), path)
        == "the rule database failed (SQLAlchemyError)"
    )
    assert "ArgumentError" in sqlite.meaning_of(ArgumentError("x"), path)


async def test_own_errors_pass_through(path):
    async def work(_connection):
        raise RuleNotFoundError(name="x")

    with pytest.raises(RuleNotFoundError):
        await using(path, work)


async def test_wait_for_a_busy_pool_is_bounded(path, monkeypatch):
    monkeypatch.setattr(sqlite, "POOL_SIZE", 1)

    async def work(_connection):
        async with database.reading():
            pytest.fail("there was another connection")

    database = SqliteDatabase(path, pool_timeout_s=0.01)
    with pytest.raises(StoreUnavailableError, match=r"every connection .* is busy"):
        async with database.reading() as connection:
            await work(connection)
    await database.aclose()


async def test_replaced_database_is_detected_at_the_next_transaction(path, tmp_path):
    other = tmp_path / "other.db"
    other.write_bytes(path.read_bytes())
    await using(other, insert("from the backup"), write=True)
    database = SqliteDatabase(path)
    async with database.reading() as connection:
        assert await sql("SELECT name FROM things")(connection) == []
    other.replace(path)
    async with database.reading() as connection:
        assert await sql("SELECT name FROM things")(connection) == [("from the backup",)]
    await database.aclose()


async def test_deleted_database_is_detected_instead_of_written(path):
    database = SqliteDatabase(path)
    async with database.reading() as connection:
        await sql("SELECT 1")(connection)
    path.unlink()
    with pytest.raises(StoreUnavailableError, match="cannot be opened"):
        await insert_into(database, "lost")
    await database.aclose()


async def test_invalid_text_is_read_as_lone_surrogates(path):
    broken = await using(path, sql("SELECT CAST(x'2fff' AS TEXT)"))
    assert broken == [("/\udcff",)]


async def test_driver_never_logs_call_arguments(path, caplog):
    caplog.set_level(logging.DEBUG)
    asyncio.get_running_loop().set_debug(enabled=False)
    await using(path, insert("s3cret"), write=True)
    assert "s3cret" not in caplog.text


async def test_close_waits_for_the_thread_of_a_cancelled_caller(path):
    database, held = SqliteDatabase(path), asyncio.Event()

    async def hold():
        async with database.reading() as connection:
            await connection.execute(sa.text("SELECT 1"))
            held.set()
            await asyncio.Event().wait()

    before = set(threading.enumerate())
    holder = asyncio.create_task(hold())
    await held.wait()
    workers = set(threading.enumerate()) - before
    holder.cancel()
    await asyncio.wait([holder])
    await database.aclose()
    assert workers
    assert not any(worker.is_alive() for worker in workers)


@pytest.mark.parametrize("exists", [True, False])
async def test_connections_opened_after_their_callers_were_cancelled_are_closed(
    path, monkeypatch, exists
):
    begun, may_open, opened = threading.Semaphore(0), threading.Event(), []

    class SlowConnection(sqlite._Connection):
        def __init__(self, *arguments, **options):
            begun.release()
            may_open.wait()
            super().__init__(*arguments, **options)
            opened.append(self)

    monkeypatch.setattr(sqlite, "_Connection", SlowConnection)
    database = SqliteDatabase(path if exists else path.with_name("missing.db"))
    readings = [asyncio.create_task(database.reading().__aenter__()) for _ in "ab"]
    for _ in readings:
        await asyncio.to_thread(begun.acquire)
    for reading in readings:
        reading.cancel()
    await asyncio.wait(readings)
    may_open.set()
    await database.aclose()
    assert len(opened) == (2 if exists else 0)
    for connection in opened:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            connection.execute("SELECT 1")


def sqlite_error(code):
    error = sqlite3.OperationalError()
    error.sqlite_errorcode = code
    return OperationalError("", None, error)


@pytest.mark.parametrize(
    ("code", "permanent"),
    [
        (sqlite3.SQLITE_READONLY_DIRECTORY, True),
        (sqlite3.SQLITE_PERM, True),
        (sqlite3.SQLITE_FULL, True),
        (sqlite3.SQLITE_BUSY, False),
        (sqlite3.SQLITE_CORRUPT, False),
        (sqlite3.SQLITE_NOTADB, False),
        (sqlite3.SQLITE_IOERR_WRITE, False),
    ],
)
def test_errors_that_a_retry_cannot_fix_are_permanent(path, code, permanent):
    assert sqlite.is_permanent(sqlite_error(code), path) is permanent


def test_missing_place_is_retryable_and_forbidden_one_is_permanent(path, tmp_path, monkeypatch):
    cannot_open = sqlite_error(sqlite3.SQLITE_CANTOPEN)
    assert not sqlite.is_permanent(cannot_open, path)
    assert not sqlite.is_permanent(cannot_open, tmp_path / "absent.db")
    assert not sqlite.is_permanent(cannot_open, tmp_path / "absent" / "rules.db")
    assert sqlite.is_permanent(cannot_open, tmp_path)
    # The tests may run as root, who may access everything.
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert sqlite.is_permanent(cannot_open, path)
    assert sqlite.is_permanent(cannot_open, tmp_path / "absent.db")
    assert not sqlite.is_permanent(cannot_open, tmp_path / "absent" / "rules.db")


def test_file_that_cannot_be_opened_is_named_with_the_reason(path, tmp_path, monkeypatch):
    def reason(place):
        return sqlite.meaning_of(sqlite_error(sqlite3.SQLITE_CANTOPEN), place).rpartition("opened")[
            2
        ]

    absent = tmp_path / "absent.db"
    assert reason(path) == ""
    assert reason(absent) == ": it is missing: restore it, or run `ratelimitd db upgrade`"
    assert reason(absent / "rules.db") == ": its directory is missing"
    assert reason(tmp_path) == ": it is a directory"
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert reason(path) == ": it is not a file that this user may read and write"
    assert reason(absent) == ": its directory is not writable"

    def forbidden(_path):
        raise PermissionError

    monkeypatch.setattr(type(path), "stat", forbidden)
    assert reason(path) == ": its directory is not accessible"
    assert sqlite.is_permanent(sqlite_error(sqlite3.SQLITE_CANTOPEN), path)


def test_error_without_a_code_is_retryable(path):
    assert not sqlite.is_permanent(SQLAlchemyError(), path)


async def test_reads_and_writes_run_in_separate_transactions(path):
    database = SqliteDatabase(path)
    async with database.writing() as connection:
        await insert("a")(connection)
    with pytest.raises(StoreUnavailableError, match="SQLITE_CONSTRAINT_UNIQUE"):
        await insert_into(database, "a")
    async with database.reading() as connection:
        assert await sql("SELECT name FROM things")(connection) == [("a",)]
    await database.aclose()


async def insert_into(database, name):
    async with database.writing() as connection:
        await insert(name)(connection)


async def test_upgrade_of_a_read_only_database_is_permanent(path):
    database = SqliteDatabase(path)
    async with database.upgrading() as connection:
        await connection.exec_driver_sql("PRAGMA query_only = 1")
    with pytest.raises(StartupError, match="is read-only: "):
        async with database.upgrading() as connection:
            await insert("a")(connection)
    await database.aclose()


async def test_failed_upgrade_names_the_file(tmp_path):
    database = SqliteDatabase(tmp_path / "absent" / "rules.db")
    with pytest.raises(
        StoreUnavailableError, match=r"cannot be opened: its directory is missing: .*rules\.db$"
    ):
        async with database.upgrading():
            pytest.fail("it opened what is not there")
    await database.aclose()


async def test_connection_discarded_between_execution_and_fetch_holds_no_lock(path):
    unread = []

    async def give_up(connection):
        unread.append(await connection.stream(sa.text("SELECT name FROM things")))
        await connection.invalidate()
        await connection.execute(sa.text("SELECT 1"))

    await using(path, sql("INSERT INTO things VALUES ('a'), ('b') RETURNING name"), write=True)
    with pytest.raises(StoreUnavailableError, match="PendingRollback"):
        await using(path, give_up, write=True)
    await using(path, insert("c"), write=True, busy_timeout_s=0)
