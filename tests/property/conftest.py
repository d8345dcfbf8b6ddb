"""A real Valkey server for tests that run scripts."""

import pytest
import redis

from tests.servers import Valkey


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Return a client of the server."""
    with Valkey(tmp_path_factory.mktemp("valkey")) as server:
        client = redis.Redis(unix_socket_path=str(server.unix_path))
        yield client
        client.close()
