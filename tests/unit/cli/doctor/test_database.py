"""Real databases, valid and invalid."""

import os
import sqlite3
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ratelimitd.cli.doctor import stores
from ratelimitd.cli.doctor.stores import check_database
from ratelimitd.rules.assignments import Assignment, Assignments
from ratelimitd.rules.book import RuleBook
from ratelimitd.rules.last_good import REMEDY, LastGoodBook
from ratelimitd.rules.sql import sqlite
from ratelimitd.rules.sql.migrations import upgrade
from ratelimitd.rules.store import LimitDraft, PlanDraft, RuleDraft
from ratelimitd.settings.table import Settings
from tests.rule_stores import migrated, store_at

DRAFT = RuleDraft("/a", "user", 1, 60, "token_bucket")


async def look(url, **settings):
    settings = Settings.load({}, {"DATABASE_URL": url, **settings})
    [finding] = await check_database(settings)
    assert finding.area == "DATABASE_URL"
    return finding


async def fill(url):
    async with store_at(url) as store:
        await store.create(DRAFT, "test")


async def test_file_with_rules_is_fine_and_unchanged(tmp_path):
    url = f"sqlite:///{tmp_path}/rules.db"
    await upgrade(url)
    await fill(url)
    before = (tmp_path / "rules.db").read_bytes()
    finding = await look(url)
    assert (finding.level, finding.remedy) == ("ok", "")
    assert finding.what.endswith("rules.db: 1 rules, revision 1, can be written")
    assert (tmp_path / "rules.db").read_bytes() == before


async def test_database_without_a_rule_is_reported(postgresql_url):
    finding = await look(postgresql_url)
    assert finding.level == "warning"
    assert "rules apply" in finding.remedy


async def test_missing_file_will_be_created(tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path}/rules.db"
    assert (await look(url)).what.endswith("will be made")
    finding = await look(f"sqlite:///{tmp_path}/none/rules.db")
    assert finding.what.endswith("its directory is missing")
    assert finding.remedy == f"look at {tmp_path}/none/rules.db"
    monkeypatch.setattr(sqlite, "os", SimpleNamespace(**{**vars(os), "access": lambda *_: False}))
    assert (await look(url)).level == "problem"
    assert not list(tmp_path.iterdir())


async def test_file_without_tables_will_be_made(tmp_path):
    (tmp_path / "rules.db").touch()
    assert (await look(f"sqlite:///{tmp_path}/rules.db")).what.endswith("will be made")


@pytest.mark.parametrize(("workers", "state_dir"), [("1", "state"), ("3", "state/worker-2")])
@pytest.mark.parametrize("state", ["missing", "without tables", "without edits"])
async def test_database_that_lost_its_rules_is_a_problem(tmp_path, state, workers, state_dir):
    url = f"sqlite:///{tmp_path}/rules.db"
    if state == "without tables":
        (tmp_path / "rules.db").touch()
    elif state == "without edits":
        await upgrade(url)
    directory = tmp_path / state_dir
    directory.mkdir(parents=True)
    settings = {"STATE_DIR": f"{tmp_path}/state", "WORKERS": workers}
    assert (await look(url, **settings)).level != "problem"
    last_good = LastGoodBook(directory)
    last_good.offer(RuleBook.of([], 1), Assignments())
    await last_good.close()
    finding = await look(url, **settings)
    assert (finding.level, finding.remedy) == ("problem", REMEDY)
    assert "rules.db is missing or empty" in finding.what


async def test_directory_in_place_of_the_file_is_named(tmp_path):
    finding = await look(f"sqlite:///{tmp_path}")
    assert (finding.level, finding.what) == (
        "problem",
        "the rule database cannot be opened: it is a directory",
    )


async def test_file_out_of_reach_is_a_problem(tmp_path, monkeypatch):
    def forbidden(_path):
        raise PermissionError  # the tests may run as root, who may enter every directory

    url = f"sqlite:///{tmp_path}/rules.db"
    monkeypatch.setattr(type(tmp_path), "stat", forbidden)
    finding = await look(url)
    assert (finding.level, finding.remedy) == ("problem", f"look at {tmp_path}/rules.db")
    assert finding.what.endswith("its directory is not accessible")


async def test_file_of_another_program_is_a_problem(tmp_path):
    connection = sqlite3.connect(tmp_path / "theirs.db")
    connection.execute("CREATE TABLE t (a)")
    connection.close()
    finding = await look(f"sqlite:///{tmp_path}/theirs.db")
    assert (finding.level, "not ratelimitd's" in finding.what) == ("problem", True)


@pytest.fixture
async def older(tmp_path):
    """The URL of a file that the first release wrote."""
    url = f"sqlite:///{tmp_path}/rules.db"
    await migrated(url, "0001")
    return url


async def test_older_file_is_upgraded_by_the_next_start(older):
    finding = await look(older)
    assert finding.level == "warning"
    assert "older release (schema 0001)" in finding.what
    assert finding.remedy.startswith("back it up first; serve upgrades it")


async def test_older_file_that_cannot_be_written_is_a_problem(older, monkeypatch):
    monkeypatch.setattr(stores, "os", SimpleNamespace(**{**vars(os), "access": lambda *_: False}))
    finding = await look(older)
    assert (finding.level, finding.remedy) == ("problem", "ratelimitd db upgrade")


async def test_older_server_needs_the_upgrade(postgres):
    url = postgres.new_database("template0")
    await migrated(url, "0001")
    finding = await look(url)
    assert (finding.level, finding.remedy) == ("problem", "ratelimitd db upgrade")


async def test_server_with_rules_is_fine(postgresql_url):
    await fill(postgresql_url)
    finding = await look(postgresql_url)
    assert (finding.level, "1 rules, revision 1" in finding.what) == ("ok", True)


async def test_server_without_the_tables_needs_the_upgrade(postgres):
    finding = await look(postgres.new_database("template0"))
    assert (finding.level, finding.remedy) == ("problem", "ratelimitd db upgrade")


async def test_wrong_password_is_reported_without_it(postgres):
    database_name = postgres.new_database().rpartition("/")[2]
    url = postgres.url(database_name, user="guarded:s3cret-word")
    finding = await look(url)
    assert (finding.level, "password" in finding.what) == ("problem", True)
    assert "s3cret" not in str(finding)


async def test_each_missing_permission_is_reported(postgres, postgresql_url):
    name = postgresql_url.rpartition("/")[2]
    postgres.sql(
        "CREATE ROLE reader LOGIN",
        "GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader",
        "GRANT UPDATE ON rule_revision TO reader",
        "GRANT INSERT, UPDATE, DELETE ON rule_revision, rule_audit_changes, rules, secrets, assignments TO reader",
        "GRANT INSERT, UPDATE ON rule_audit TO reader",
        database=name,
    )
    url = postgres.url(name, user="reader")
    finding = await look(url)
    assert (finding.level, "forbids" in finding.what) == ("problem", True)
    postgres.sql("GRANT DELETE ON rule_audit TO reader", database=name)
    await fill(postgresql_url)
    assert (await look(url)).level == "ok"
    postgres.sql("DROP OWNED BY reader", "DROP ROLE reader", database=name)


async def test_read_only_server_is_a_problem(postgres, postgresql_url):
    name = postgresql_url.rpartition("/")[2]
    postgres.sql(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    finding = await look(postgresql_url)
    assert (finding.level, "read-only" in finding.what) == ("problem", True)


async def test_unreachable_server_is_a_problem(unused_tcp_port):
    finding = await look(f"postgresql://u@127.0.0.1:{unused_tcp_port}/d")
    assert (finding.level, "cannot be reached" in finding.what) == ("problem", True)
    assert finding.remedy.startswith("look at 127.0.0.1:")


async def test_rules_for_undeclared_types_are_reported(tmp_path):
    url = f"sqlite:///{tmp_path}/rules.db"
    await upgrade(url)
    async with store_at(url, types=("user", "tenant", "org")) as store:
        for kind in ("user", "all", "org+tenant", "tenant"):
            await store.create(replace(DRAFT, identifier_type=kind), "test")
    settings = Settings.load({}, {"DATABASE_URL": url})
    _, finding = await check_database(settings)
    assert (finding.level, finding.remedy) == (
        "warning",
        "add org, tenant to IDENTIFIER_TYPES of serve and of this command, or delete the rules",
    )


async def test_assignments_are_counted_and_those_without_effect_reported(tmp_path):
    url = f"sqlite:///{tmp_path}/rules.db"
    await upgrade(url)
    limits = (LimitDraft("", 9, 60, "token_bucket"),)
    async with store_at(url) as store:
        await store.create(replace(DRAFT, plans=(PlanDraft("pro", limits),)), "test")
        await store.assignments.assign_all(
            [
                Assignment("user", b"a", "pro"),
                Assignment("user", b"b", "blocked"),
                Assignment("tenant", b"c", "pro"),
                Assignment("user", b"d", "gone"),
            ],
            "test",
        )
    settings = Settings.load({}, {"DATABASE_URL": url})
    _, counted, unnamed, undeclared = await check_database(settings)
    assert (counted.level, counted.what) == ("ok", "4 identities are assigned to plans")
    assert unnamed.level == undeclared.level == "warning"
    assert unnamed.what.startswith("no rule names gone (1): ")
    assert undeclared.what.startswith("assignments of tenant (1) have no effect")
