"""A real Valkey for the tests of each module that wants one; what a test does to it is undone before the next."""

import pytest

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
