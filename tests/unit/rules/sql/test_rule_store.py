"""The SQL store beyond the protocol, which tests/conformance/test_rule_store.py covers."""

import asyncio
import dataclasses
import itertools
import json
import sqlite3
import uuid
from collections import Counter
from contextlib import AsyncExitStack, closing
from datetime import timedelta
from urllib.parse import quote

import pytest
import pytest_asyncio
from sqlalchemy.ext.asyncio import AsyncResult

from ratelimitd.errors import (
    RuleExistsError,
    RuleInvalidError,
    RuleNotFoundError,
    StoreUnavailableError,
)
from ratelimitd.model import Rule
from ratelimitd.rules import applying
from ratelimitd.rules.assignments import Assignment
from ratelimitd.rules.sql import applying as applying_in_sql
from ratelimitd.rules.sql import assignments as sql_assignments
from ratelimitd.rules.sql import reading
from ratelimitd.rules.sql import store as sql_store
from ratelimitd.rules.sql.assignments import ROWS_PER_STEP as ROWS_OF_ASSIGNMENTS
from ratelimitd.rules.sql.database import open_database
from ratelimitd.rules.sql.migrations import require_current
from ratelimitd.rules.sql.postgresql import POOL_SIZE
from ratelimitd.rules.sql.reading import ROWS_PER_STEP
from ratelimitd.rules.sql.store import SqlRuleStore
from ratelimitd.rules.store import (
    EVERY_CHANGE,
    AssignmentQuery,
    AuditFilter,
    RuleChanges,
    RuleDraft,
    SkippedRow,
)
from ratelimitd.testing import ManualClock
from tests.postgres_server import PASSWORD
from tests.rule_stores import rules_with_many_plans, sqlite_store, store_at

ORDERS = RuleDraft("/orders", "user", 10, 60, "token_bucket")
ID = "0b1f2c3d-0000-4000-8000-00000000000a"
NEVER = "00000000-0000-4000-8000-000000000000"


@pytest.fixture
def clock():
    return ManualClock(now_us=1_700_006_400_123_456)


@pytest_asyncio.fixture
async def store(tmp_path, clock):
    async with sqlite_store(
        tmp_path, clock=clock, new_id=lambda: uuid.UUID(ID), busy_timeout_s=0.01
    ) as opened:
        yield opened


async def test_audit_trail_records_actor_time_and_content_of_each_change(store, behind, clock):
    await store.create(ORDERS, "ops@10.0.0.1")
    clock.advance(seconds=1)
    await store.update(ID, RuleChanges(limit=20), "", "alice")
    await store.delete(ID, "", "x" * 300)
    rows = behind("SELECT revision, at, actor, action, rule_id, before, after FROM rule_audit")
    assert [row[:5] for row in rows] == [
        (1, "2023-11-15 00:00:00.123456", "ops@10.0.0.1", "create", ID),
        (2, "2023-11-15 00:00:01.123456", "alice", "update", ID),
        (3, "2023-11-15 00:00:01.123456", "x" * 255, "delete", ID),
    ]
    before_and_after = [[json.loads(text) if text else None for text in row[5:]] for row in rows]
    created = {
        "id": ID, "endpoint": "/orders", "identifier_type": "user", "limit": 10,
        "window_seconds": 60, "algorithm": "token_bucket", "enabled": True, "revision": 1,
    }  # fmt: skip
    updated = {**created, "limit": 20, "revision": 2}
    assert before_and_after == [[None, created], [created, updated], [updated, None]]


async def test_apply_keeps_creation_times_and_records_each_rule_in_the_audit_trail(
    store, behind, clock
):
    await store.create(ORDERS, "me")
    clock.advance(seconds=1)
    moved = RuleDraft("/moved", "user", 10, 60, "token_bucket", id=ID)
    new = RuleDraft("/orders", "user", 1, 1, "fixed_window", id=NEVER)
    await store.apply([moved, new], "ops", prune=False, dry_run=False, since=0)
    assert behind("SELECT id, created_at, updated_at FROM rules ORDER BY endpoint") == [
        (ID, "2023-11-15 00:00:00.123456", "2023-11-15 00:00:01.123456"),
        (NEVER, "2023-11-15 00:00:01.123456", "2023-11-15 00:00:01.123456"),
    ]
    place = "json_extract({}, '$.endpoint')"
    columns = f"revision, rule_id, action, {place.format('before')}, {place.format('after')}"
    assert behind(f"SELECT {columns} FROM rule_audit_changes ORDER BY action") == [  # noqa: S608
        (2, NEVER, "create", None, "/orders"),
        (2, ID, "update", "/orders", "/moved"),
    ]
    assert len(behind("SELECT * FROM rule_audit")) == 2


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("DELETE FROM rule_audit WHERE revision = 2", "does not have all changes since"),
        ("DELETE FROM rule_audit_changes WHERE action = 'create'", "not have all changes since"),
        ("UPDATE rule_revision SET revision = 9", "does not have all changes since"),
        (
            "UPDATE rule_audit SET before = json_set(before, '$.limit', 'x') WHERE revision = 2",
            f"the rule {ID} was invalid then: limit",
        ),
        ("UPDATE rule_audit SET before = '[]' WHERE revision = 2", "was invalid then: id"),
        ("UPDATE rule_audit SET after = NULL WHERE action = 'apply'", "not have all changes"),
        ("UPDATE rule_audit SET after = '[1]' WHERE action = 'apply'", "not have all changes"),
        ("UPDATE rule_audit SET after = json_set(after, '$.created', 'x')", "not have all changes"),
    ],
)
async def test_revert_is_refused_after_gaps_in_the_audit_trail(store, behind, statement, problem):
    await store.create(ORDERS, "me")
    await store.update(ID, RuleChanges(limit=20), "", "me")
    wanted = [RuleDraft("/b", "user", 1, 60, "token_bucket", id=NEVER)]
    await store.apply(wanted, "me", prune=True, dry_run=False, since=0)
    behind(statement)
    with pytest.raises(RuleInvalidError, match=problem):
        await store.revert(1, "me", dry_run=False, since=0)
    assert [rule.id for rule in await store.page("", "", None, 9)] == [NEVER]


async def test_revert_is_bounded_by_the_size_of_a_set(store, behind, monkeypatch):
    monkeypatch.setattr("ratelimitd.rules.sql.applying.MAX_APPLIED", 1)
    await store.create(ORDERS, "me")
    wanted = [RuleDraft("/b", "user", 1, 60, "token_bucket", id=NEVER)]
    await store.apply(wanted, "me", prune=True, dry_run=False, since=0)
    with pytest.raises(RuleInvalidError, match="more than 1 rules were changed since"):
        await store.revert(1, "me", dry_run=False, since=0)


async def test_create_all_leaves_a_store_with_rules_and_no_revision_unchanged(store, insert_many):
    insert_many(1)
    assert await store.create_all([ORDERS], "me") == 0


async def test_create_all_records_each_rule_in_the_audit_trail(store, behind):
    await store.create_all([ORDERS, RuleDraft("/b", "ip", 1, 1, "fixed_window", id=NEVER)], "me")
    rows = behind("SELECT revision, actor, action, rule_id, after FROM rule_audit")
    assert [row[:4] for row in rows] == [(1, "me", "create", ID), (2, "me", "create", NEVER)]
    assert json.loads(rows[1][4])["endpoint"] == "/b"


async def test_unchanged_and_refused_updates_are_not_recorded(store, behind):
    await store.create(ORDERS, "me")
    await store.update(ID, RuleChanges(limit=10), "", "me")
    with pytest.raises(RuleInvalidError):
        await store.update(ID, RuleChanges(limit=0), "", "me")
    with pytest.raises(RuleNotFoundError):
        await store.delete(NEVER, "", "me")
    assert behind("SELECT count(*) FROM rule_audit") == [(1,)]


async def test_creation_and_update_times_are_stored_in_utc(store, behind, clock):
    await store.create(ORDERS, "me")
    clock.advance(seconds=60)
    await store.update(ID, RuleChanges(limit=20), "", "me")
    assert behind("SELECT created_at, updated_at FROM rules") == [
        ("2023-11-15 00:00:00.123456", "2023-11-15 00:01:00.123456")
    ]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ('"limit" = 0', "limit: the limit must be positive"),
        ("\"limit\" = 'many'", "limit: the limit must be a whole number"),
        ("window_seconds = 1099511627776", "window_seconds: the window must be at most 2147483647"),
        ("endpoint = x'ff'", "endpoint: the endpoint must not be empty; * is the global rule"),
        ("revision = 'new'", "revision: the revision must be a whole number"),
    ],
)
async def test_row_damaged_outside_the_service_is_skipped_and_others_are_served(
    store, behind, damage, reason
):
    await store.create(ORDERS, "me")
    good = await store.create(RuleDraft("/carts", "user", 1, 1, "fixed_window", id=NEVER), "me")
    behind(f"UPDATE rules SET {damage} WHERE id = ?", ID)  # noqa: S608
    assert (await store.changes_since(None))[:5] == (2, [good], (), [SkippedRow(ID, reason)], True)
    assert list(await store.page("", "", None, 10)) == [good]


async def test_invalid_text_is_an_invalid_row_and_does_not_fail_the_load(store, behind):
    await store.create(ORDERS, "me")
    behind("UPDATE rules SET endpoint = CAST(x'2fff' AS TEXT)")
    changes = await store.changes_since(None)
    assert changes.changed == []
    assert changes.skipped == [SkippedRow(ID, "endpoint: the endpoint must be valid Unicode")]


async def test_invalid_row_can_be_repaired_or_deleted_through_the_store(store, behind):
    await store.create(ORDERS, "me")
    behind('UPDATE rules SET "limit" = ?', b"\x00")
    with pytest.raises(RuleInvalidError, match="whole number"):
        await store.update(ID, RuleChanges(window_seconds=5), "", "me")
    mended = await store.update(ID, RuleChanges(limit=5), "", "me")
    assert list(await store.page("", "", None, 10)) == [mended]
    behind("UPDATE rules SET algorithm = ''")
    await store.delete(ID, "", "me")
    assert (await store.changes_since(2))[:5] == (3, [], [ID], [], False)


async def test_identifier_type_that_is_no_text_can_be_repaired(store, behind):
    await store.create(ORDERS, "me")
    behind("UPDATE rules SET identifier_type = ?", b"user")
    with pytest.raises(RuleInvalidError, match="identifier_type"):
        await store.update(ID, RuleChanges(limit=5), "", "me")
    mended = await store.update(ID, RuleChanges(identifier_type="user"), "", "me")
    assert mended.identifier_type == "user"


async def test_invalid_row_does_not_count_towards_a_page(store, behind, insert_many):
    insert_many(ROWS_PER_STEP + 3)
    behind("UPDATE rules SET algorithm = '' WHERE endpoint IN ('/0001', '/0003')")
    page = await store.page("", "", None, 3)
    assert [rule.endpoint for rule in page] == ["/0000", "/0002", "/0004"]
    assert len(await store.page("", "", None, 1000)) == ROWS_PER_STEP + 1
    assert await store.page("", "", ("/0129", "user"), 1000) == [
        rule for rule in await store.page("/0130", "", None, 10) if isinstance(rule, Rule)
    ]


async def test_missing_revision_row_counts_as_zero(store, behind):
    await store.create(ORDERS, "me")
    behind("DELETE FROM rule_revision")
    assert await store.revision() == 0


@pytest.mark.parametrize("text", ["no JSON", "[1]", "7", pytest.param("[" * 100_000, id="deep")])
async def test_audit_text_without_fields_is_read_as_none(store, behind, text):
    await store.create(ORDERS, "me")
    behind("UPDATE rule_audit SET before = ?", text)
    [entry] = await store.audit("", None, 10)
    assert (entry.before, entry.after["endpoint"]) == (None, "/orders")
    assert entry.at.utcoffset() == timedelta(0)


async def test_searches_of_the_audit_trail_leave_connections_to_others(store, monkeypatch):
    running, begun, finish = [], asyncio.Event(), asyncio.Event()
    read = sql_store.read_trail

    async def spied(*arguments):
        if arguments[-1] != EVERY_CHANGE:
            running.append(arguments[-1].text)
            begun.set()
            await finish.wait()
        return await read(*arguments)

    monkeypatch.setattr(sql_store, "read_trail", spied)
    await store.create(ORDERS, "me")
    searches = [
        asyncio.create_task(store.audit("", None, 10, AuditFilter(text=text)))
        for text in ("/orders", *"abcdef")
    ]
    [change] = await store.audit("", None, 10)
    await store.update(ID, RuleChanges(limit=20), "", "me")
    await begun.wait()
    assert running == ["/orders"]
    finish.set()
    first, *others = await asyncio.gather(*searches)
    assert first[-1] == change
    assert running == ["/orders", *"abcdef"]
    assert len(others) == 6


async def test_search_of_the_audit_trail_does_not_wait_for_long(store, monkeypatch):
    finish = asyncio.Event()
    monkeypatch.setattr(sql_store, "SEARCH_WAIT_S", 0)
    monkeypatch.setattr(sql_store, "read_trail", lambda *_: finish.wait())
    search = AuditFilter(actor="me")
    first = asyncio.create_task(store.audit("", None, 10, search))
    await asyncio.sleep(0)
    with pytest.raises(StoreUnavailableError, match="other searches of the audit trail take"):
        await store.audit("", None, 10, search)
    finish.set()
    await first


async def paced(work, monkeypatch, module, reader):
    """Do the work; return its result, and the number of rules read in each event-loop iteration."""
    rows_of, iteration, read = Counter(), itertools.count(), getattr(module, reader)
    now = next(iteration)

    async def iterate():
        nonlocal now
        while True:
            now = next(iteration)
            await asyncio.sleep(0)

    def counted(row, **options):
        rows_of[now] += 1
        return read(row, **options)

    monkeypatch.setattr(module, reader, counted)
    iterating = asyncio.create_task(iterate())
    result = await work
    iterating.cancel()
    return result, rows_of


async def test_long_load_is_complete_and_yields_between_batches(store, insert_many, monkeypatch):
    insert_many(2 * ROWS_PER_STEP + 1)
    load = store.changes_since(None)
    changes, rows_of = await paced(load, monkeypatch, reading, "rule_from_row")
    assert len(changes.changed) == rows_of.total() == 2 * ROWS_PER_STEP + 1
    assert max(rows_of.values()) <= ROWS_PER_STEP


async def test_ids_of_many_deleted_rules_are_read_in_steps(store, insert_many, monkeypatch):
    insert_many(2 * ROWS_PER_STEP + 1)
    await store.apply([], "me", prune=True, dry_run=False, since=0)
    sizes, read = [], AsyncResult.partitions

    async def partitions(result, size):
        async for rows in read(result, size):
            sizes.append(len(rows))
            yield rows

    monkeypatch.setattr(AsyncResult, "partitions", partitions)
    changes = await store.changes_since(0)
    assert len(set(changes.removed_ids)) == sum(sizes) == 2 * ROWS_PER_STEP + 1
    assert max(sizes) <= ROWS_PER_STEP


async def test_rules_with_many_plans_are_read_and_validated_one_per_iteration(store, monkeypatch):
    drafts = rules_with_many_plans(3)

    async def per_iteration(work, module, reader):
        _, rules_of = await paced(work, monkeypatch, module, reader)
        return list(rules_of.values())

    fill = store.create_all(drafts, "me")
    assert await per_iteration(fill, sql_store, "validated") == [1, 1, 1]
    load = store.changes_since(None)
    assert await per_iteration(load, reading, "rule_from_row") == [1, 1, 1]
    doubled = [dataclasses.replace(draft, limit=2 * draft.limit) for draft in drafts]
    apply = store.apply(doubled, "me", prune=False, dry_run=False, since=0)
    assert await per_iteration(apply, applying, "validated") == [1, 1, 1]
    revert = store.revert(3, "me", dry_run=False, since=0)
    assert await per_iteration(revert, applying_in_sql, "rule_from_row") == [1, 1, 1]
    assert await store.revision() == 5


async def test_changes_of_rules_with_many_plans_are_recorded_one_per_iteration(store, monkeypatch):
    apply = store.apply(rules_with_many_plans(3), "me", prune=False, dry_run=False, since=0)
    _, rows_of = await paced(apply, monkeypatch, applying_in_sql, "_json")
    assert max(rows_of.values()) <= 2, "before and after"


async def test_failed_write_stores_nothing(store, behind):
    behind("CREATE TRIGGER refuse BEFORE INSERT ON rule_audit BEGIN SELECT RAISE(ABORT, 'no'); END")
    with pytest.raises(StoreUnavailableError):
        await store.create(ORDERS, "me")
    assert await store.revision() == 0
    assert await store.page("", "", None, 10) == []


async def test_reads_succeed_and_writes_fail_while_another_process_holds_the_lock(store, tmp_path):
    with closing(sqlite3.connect(tmp_path / "rules.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert await store.revision() == 0
        with pytest.raises(StoreUnavailableError, match="locked"):
            await store.create(ORDERS, "me")
        with pytest.raises(StoreUnavailableError, match="locked"):
            await store.secret("key")
    await store.create(ORDERS, "me")


async def test_stored_secret_is_read_while_another_process_holds_the_lock(store, tmp_path):
    secret = await store.secret("key")
    with closing(sqlite3.connect(tmp_path / "rules.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert await store.secret("key") == secret


async def test_database_without_the_schema_is_unavailable(tmp_path):
    sqlite3.connect(tmp_path / "rules.db").executescript("CREATE TABLE t (x)").connection.close()
    async with store_at(f"sqlite:///{tmp_path}/rules.db") as store:
        for call in (store.revision(), store.changes_since(None), store.create(ORDERS, "me")):
            with pytest.raises(StoreUnavailableError):
                await call


async def test_secret_uses_the_given_randomness_and_has_a_date(tmp_path, behind, clock):
    async with sqlite_store(tmp_path, clock=clock, random_bytes=lambda n: b"r" * n) as store:
        assert await store.secret("key") == b"r" * 32
    assert behind("SELECT name, value, created_at FROM secrets") == [
        ("key", b"r" * 32, "2023-11-15 00:00:00.123456")
    ]


@pytest.fixture
def raced(postgres, postgresql_url):
    """A database in which a writer without the lock always inserts first."""
    postgres.sql(
        "CREATE FUNCTION race() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE unique_violation; END $$",
        "CREATE TRIGGER race BEFORE INSERT OR UPDATE ON rules FOR EACH ROW"
        " WHEN (NEW.endpoint = '/raced') EXECUTE FUNCTION race()",
        database=postgresql_url.rpartition("/")[2],
    )
    return postgresql_url


async def test_create_reports_an_existing_rule_after_losing_to_an_unlocked_writer(raced):
    async with store_at(raced) as store:
        rule = await store.create(ORDERS, "me")
        with pytest.raises(RuleExistsError, match="was created concurrently"):
            await store.create(RuleDraft("/raced", "user", 1, 1, "fixed_window"), "me")
        with pytest.raises(RuleExistsError, match="was created concurrently"):
            await store.update(rule.id, RuleChanges(endpoint="/raced"), "", "me")
        assert list(await store.page("", "", None, 10)) == [rule]
        assert await store.revision() == 1


async def test_one_of_concurrent_creates_of_one_pair_succeeds(postgresql_url):
    async with store_at(postgresql_url) as one, store_at(postgresql_url) as two:
        results = await asyncio.gather(
            *(store.create(ORDERS, "me") for store in (one, two, one, two)), return_exceptions=True
        )
        kinds = sorted(type(result).__name__ for result in results)
        assert kinds == ["Rule", *["RuleExistsError"] * 3]
        assert await two.revision() == 1


async def test_call_waits_for_a_free_connection(postgresql_url):
    """More concurrent calls than connections all succeed; the clock of the test limits none."""
    async with store_at(postgresql_url) as store:
        drafts = [RuleDraft(f"/{n}", "user", 1, 1, "fixed_window") for n in range(5 * POOL_SIZE)]
        made = await asyncio.gather(*(store.create(draft, "me") for draft in drafts))
        assert sorted(rule.revision for rule in made) == list(range(1, len(drafts) + 1))
    database = open_database(postgresql_url, pool_timeout_s=0.0)
    impatient = SqlRuleStore(database, clock=ManualClock())
    async with AsyncExitStack() as held:
        held.push_async_callback(impatient.close)
        for _ in range(POOL_SIZE):
            await held.enter_async_context(database.reading())
        with pytest.raises(StoreUnavailableError, match=r"every connection .* is busy"):
            await impatient.revision()


async def test_reader_of_a_revision_sees_all_changes_up_to_it(postgresql_url):
    async with store_at(postgresql_url) as one, store_at(postgresql_url) as two:
        drafts = [RuleDraft(f"/{n}", "user", 1, 1, "fixed_window") for n in range(40)]
        writing = asyncio.gather(
            *((one, two)[n % 2].create(draft, "me") for n, draft in enumerate(drafts))
        )
        seen = 0
        while seen < 40:
            if writing.done():
                await writing  # raises its error instead of waiting in vain
            changes = await two.changes_since(None)
            assert sorted(rule.revision for rule in changes.changed) == list(
                range(1, changes.revision + 1)
            )
            assert changes.revision >= seen
            seen = changes.revision
        await writing


async def test_rows_damaged_outside_the_service_are_skipped_on_postgresql(postgres, postgresql_url):
    async with store_at(postgresql_url) as store:
        bad = await store.create(ORDERS, "me")
        good = await store.create(RuleDraft("/carts", "user", 1, 1, "fixed_window"), "me")
        postgres.sql(
            "ALTER TABLE rules DROP CONSTRAINT rules_limit, ALTER COLUMN algorithm DROP NOT NULL",
            'UPDATE rules SET "limit" = 0, algorithm = NULL',
            f"UPDATE rules SET \"limit\" = 1, algorithm = 'fixed_window' WHERE id = '{good.id}'",  # noqa: S608
            database=postgresql_url.rpartition("/")[2],
        )
        changes = await store.changes_since(None)
        assert list(changes.changed) == [good]
        assert [row.rule_id for row in changes.skipped] == [bad.id]
        mended = await store.update(
            bad.id, RuleChanges(limit=5, algorithm="fixed_window"), "", "me"
        )
        assert set(await store.page("", "", None, 10)) == {good, mended}


async def test_time_of_a_change_written_outside_the_service_is_the_nearest_in_python(
    postgres, postgresql_url
):
    async with store_at(postgresql_url) as store:
        await store.create(ORDERS, "me")
        database = postgresql_url.rpartition("/")[2]
        for at, year in (
            ("0044-03-15 BC", 1), ("-infinity", 1), ("20000-01-01", 9999), ("infinity", 9999),
        ):  # fmt: skip
            postgres.sql(f"UPDATE rule_audit SET at = '{at}'", database=database)  # noqa: S608
            [entry] = await store.audit("", None, 10)
            assert (entry.at.year, entry.at.utcoffset()) == (year, timedelta(0)), at


async def test_actor_is_stored_without_characters_that_databases_refuse(postgres, postgresql_url):
    async with store_at(postgresql_url) as store:
        rule = await store.create(ORDERS, "spiffe://a\0b")
        await store.delete(rule.id, "", "caf\udce9")
    noted = "SELECT actor FROM rule_audit ORDER BY revision"
    database = postgresql_url.rpartition("/")[2]
    assert postgres.sql(noted, database=database) == ["spiffe://a?b", "caf?"]


GRANTS = (
    "GRANT SELECT ON ratelimitd_schema TO guarded",
    "GRANT SELECT, INSERT, UPDATE, DELETE ON rules, rule_revision, rule_audit TO guarded",
    "GRANT SELECT, INSERT, UPDATE, DELETE ON rule_audit_changes, secrets, assignments TO guarded",
)
"""The grants that docs/operations.md recommends for the nodes' role."""


async def test_node_runs_with_a_role_without_schema_permissions(postgres, postgresql_url):
    name = postgresql_url.rpartition("/")[2]
    postgres.sql(*GRANTS, database=name)
    url = postgres.url(name, user=f"guarded:{quote(PASSWORD, safe='')}")
    await require_current(url)
    async with store_at(url) as store:
        rule = await store.create(ORDERS, "me")
        await store.update(rule.id, RuleChanges(limit=5), "", "me")
        assert len(await store.secret("key")) == 32
        await store.delete(rule.id, "", "me")


async def test_stored_secret_is_read_on_a_server_that_became_read_only(postgres, postgresql_url):
    name = postgresql_url.rpartition("/")[2]
    async with store_at(postgresql_url) as store:
        secret = await store.secret("key")
    postgres.sql(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    async with store_at(postgresql_url) as store:
        assert await store.secret("key") == secret
        with pytest.raises(StoreUnavailableError, match="read-only"):
            await store.secret("another")


async def test_one_of_racing_first_calls_creates_the_secret(postgresql_url):
    async with AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(store_at(postgresql_url)) for _ in range(4)]
        assert len(set(await asyncio.gather(*(one.secret("key") for one in stores)))) == 1


async def test_long_load_of_assignments_yields_between_steps(store, behind, monkeypatch):
    many_assigned = 3 * ROWS_OF_ASSIGNMENTS
    behind(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)"
        " INSERT INTO assignments SELECT 'user', CAST(i AS BLOB), 'pro', 0, '', 1 FROM n",
        many_assigned,
    )
    load = store.changes_since(None)
    changes, rows_of = await paced(load, monkeypatch, sql_assignments, "assigned_of")
    assert changes.assignments is not None
    assert len(changes.assignments) == rows_of.total() == many_assigned
    assert max(rows_of.values()) <= ROWS_OF_ASSIGNMENTS


async def test_page_of_assignments_skips_invalid_rows(store, behind):
    wanted = [Assignment("user", b"%03d" % number, "pro") for number in range(9)]
    await store.assignments.assign_all(wanted, "me")
    behind("UPDATE assignments SET plan = 'No Plan' WHERE identifier IN (x'303030', x'303032')")
    behind("UPDATE assignments SET identifier = x'ff' WHERE identifier = x'303033'")
    page = await store.assignments.assignments(AssignmentQuery(), None, 3)
    assert [one.identifier for one in page] == [b"001", b"004", b"005"]
    page = await store.assignments.assignments(AssignmentQuery(), ("user", b"005"), 9)
    assert [one.identifier for one in page] == [b"006", b"007", b"008"]


async def test_wrong_count_of_assignments_is_corrected(store, behind):
    behind("UPDATE rule_revision SET assignments = 2000000")
    await store.assignments.assign_all([Assignment("user", b"a", "pro")], "me")
    assert behind("SELECT assignments FROM rule_revision") == [(1,)]


async def test_rule_with_an_invalid_row_is_not_found(store, behind):
    await store.create(ORDERS, "me")
    assert (await store.rule(ID)).limit == 10
    behind("UPDATE rules SET endpoint = ''")
    with pytest.raises(RuleNotFoundError):
        await store.rule(ID)
