"""A real Valkey for the tests of each module that wants one; what a test does to it is undone before the next.

And a rule store in a file.
"""

import pytest
import pytest_asyncio

from tests.servers import Valkey


@pytest.fixture(scope="module")
def valkey_of_module(tmp_path_factory):
    with Valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def valkey(valkey_of_module):
    """A server that holds nothing: keys, scripts and users of earlier tests are gone."""
    valkey_of_module.ask("FLUSHALL")
    valkey_of_module.ask("SCRIPT", "FLUSH")
    valkey_of_module.ask("CONFIG", "RESETSTAT")
    return valkey_of_module


@pytest_asyncio.fixture
async def store(tmp_path):
    from tests.rule_stores import sqlite_store  # noqa: PLC0415 -- most tests need no database

    async with sqlite_store(tmp_path) as opened:
        yield opened
