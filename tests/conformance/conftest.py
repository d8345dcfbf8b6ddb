"""The rule stores that must keep the same promises."""

from functools import partial

import pytest
import pytest_asyncio

from ratelimitd.testing import ManualClock
from tests.rule_stores import sqlite_store, store_at


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture(params=["sqlite", "postgresql"])
def open_store(request, tmp_path, clock):
    """Opens an empty store of each kind."""
    if request.param == "sqlite":
        return partial(sqlite_store, tmp_path, clock=clock)
    return partial(store_at, request.getfixturevalue("postgresql_url"), clock=clock)


@pytest_asyncio.fixture
async def store(open_store):
    """An open store."""
    async with open_store() as opened:
        yield opened
