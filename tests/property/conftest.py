"""A real Valkey for the tests of each module that runs scripts."""

import pytest
import redis

from tests.servers import Valkey


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A client of the server."""
    with Valkey(tmp_path_factory.mktemp("valkey")) as server:
        client = redis.Redis(unix_socket_path=str(server.unix_path))
        yield client
        client.close()
