"""The rule stores that every test of the RuleStore protocol runs against: real ones, each empty and of its own."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from ratelimitd.rules.sql.migrations import upgrade
from ratelimitd.rules.sql.store import SqlRuleStore
from ratelimitd.testing import ManualClock


@asynccontextmanager
async def sqlite_store(directory: Path, **options) -> AsyncIterator[SqlRuleStore]:
    """A store in ``directory/rules.db``, which is made if there is none."""
    url = f"sqlite:///{directory}/rules.db"
    await upgrade(url)
    async with store_at(url, **options) as store:
        yield store


@asynccontextmanager
async def store_at(url: str, **options) -> AsyncIterator[SqlRuleStore]:
    """A store in a database that has the schema."""
    store = SqlRuleStore(url, **{"clock": ManualClock(), **options})
    try:
        yield store
    finally:
        await store.close()
