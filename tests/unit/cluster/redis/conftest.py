"""A real Valkey, and connections to it with long timeouts."""

import pytest

from ratelimitd.cluster.redis.topology import standalone
from ratelimitd.settings.urls import parse_redis_url
from tests.unit.cluster.redis.asking import PATIENT


@pytest.fixture
async def topology(valkey):
    """Connections to the server, open during the test."""
    topology = standalone(parse_redis_url(valkey.url), PATIENT)
    await topology.start()
    yield topology
    await topology.close()
