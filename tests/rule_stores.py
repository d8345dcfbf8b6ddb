"""The rule stores that every test of the RuleStore protocol runs against: real ones, each empty and of its own."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from ratelimitd.rules.migrations import upgrade
from ratelimitd.rules.sql import SqlRuleStore
from ratelimitd.rules.store import RuleStore
from ratelimitd.testing import ManualClock


@asynccontextmanager
async def sqlite_store(directory: Path, **options) -> AsyncIterator[SqlRuleStore]:
    """A store in ``directory/rules.db``, which is made if there is none."""
    url = f"sqlite:///{directory}/rules.db"
    await upgrade(url)
    store = SqlRuleStore(url, **{"clock": ManualClock(), **options})
    try:
        yield store
    finally:
        await store.close()


STORES: dict[str, Callable[..., AbstractAsyncContextManager[RuleStore]]] = {"sqlite": sqlite_store}
