"""The rule stores that every test of the RuleStore protocol runs against: real ones, each empty and of its own."""

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from ratelimitd.rules.book import BookEditor
from ratelimitd.rules.sql.database import open_database
from ratelimitd.rules.sql.migrations import migrate, upgrade
from ratelimitd.rules.sql.store import SqlRuleStore
from ratelimitd.rules.store import LimitDraft, PlanDraft, RuleDraft
from ratelimitd.rules.validation import MAX_LIMITS, MAX_PLANS
from ratelimitd.testing import ManualClock

UNHURRIED_S = 50.0
"""Waits of tests that are about something else: longer than any on a busy machine, within a test's own limit."""

_made: list[bytes] = []


def rules_with_many_plans(number: int) -> list[RuleDraft]:
    """Rules for /00, /01 and so on, with as many plans and limits as a rule may have."""
    limits = tuple(LimitDraft(f"limit-{n}", 1, 1, "fixed_window") for n in range(MAX_LIMITS))
    plans = tuple(PlanDraft(f"plan-{n:02}", limits) for n in range(MAX_PLANS))
    return [
        RuleDraft(
            f"/{n:02}",
            "user",
            limit=1,
            window_seconds=1,
            algorithm="fixed_window",
            id=f"00000000-0000-4000-8000-{n:012}",
            plans=plans,
        )
        for n in range(number)
    ]


def successor(book, changed, removed_ids, revision):
    """The book after these changes, applied as the feed does."""
    editor = BookEditor(book)
    for _ in editor.apply(changed, removed_ids):
        pass
    return editor.finish(revision)


async def migrated(url, revision):
    """Create the tables as releases before this one did, one migration after the other."""
    database = open_database(url, create=True)
    async with aclosing(database), database.upgrading() as connection:
        await connection.run_sync(migrate, revision)


@asynccontextmanager
async def sqlite_store(directory: Path, **options) -> AsyncIterator[SqlRuleStore]:
    """A store in ``directory/rules.db``, which is made if there is none."""
    path = directory / "rules.db"
    if not path.exists():
        path.write_bytes(await _empty_database())
    async with store_at(f"sqlite:///{path}", **options) as store:
        yield store


async def _empty_database() -> bytes:
    """A file with the schema and nothing in it; created once per process, because that takes 15 ms."""
    if not _made:
        with TemporaryDirectory() as directory:
            path = Path(directory) / "rules.db"
            await upgrade(f"sqlite:///{path}")
            _made.append(path.read_bytes())
    return _made[0]


@asynccontextmanager
async def store_at(
    url: str,
    *,
    busy_timeout_s: float = UNHURRIED_S,
    command_timeout_s: float = UNHURRIED_S,
    pool_timeout_s: float = UNHURRIED_S,
    **options,
) -> AsyncIterator[SqlRuleStore]:
    """A store in a database that has the schema."""
    database = open_database(
        url,
        busy_timeout_s=busy_timeout_s,
        command_timeout_s=command_timeout_s,
        pool_timeout_s=pool_timeout_s,
    )
    store = SqlRuleStore(database, **{"clock": ManualClock(), **options})
    try:
        yield store
    finally:
        await store.close()
