"""A span for each batch; settling and its results are unchanged."""

import asyncio

import pytest

from ratelimitd.cluster.redis.opening import open_topology
from ratelimitd.cluster.redis.store import SYNC_SPAN, TracedStore
from ratelimitd.errors import StoreUnavailableError
from ratelimitd.ledger.protocol import Batch
from ratelimitd.settings.urls import parse_redis_url
from tests.servers import Valkey, free_port
from tests.unit.services.test_traced_methods import Recorded


async def settled(url, tracer):
    """Return the result of settling an empty batch."""
    topology = open_topology(parse_redis_url(url), timeout_ms=5_000)
    await topology.start()
    try:
        store = TracedStore(topology, tracer=tracer)
        reply = asyncio.get_running_loop().create_future()
        store.settle(7, Batch("n1", 1, 0, {}), reply.set_result)
        return await reply
    finally:
        await topology.close()


@pytest.mark.parametrize("samples", [True, False])
async def test_a_settled_batch_has_a_span_if_it_is_sampled(tmp_path, samples):
    tracer = Recorded()
    tracer.samples = samples
    with Valkey(tmp_path) as valkey:
        reply = await settled(valkey.url, tracer)
        assert not isinstance(reply, Exception)
        assert tracer.begun == [(SYNC_SPAN, None)]
        assert tracer.errors == ([""] if samples else [])
        if samples:
            assert tracer.notes == {"ratelimitd.buckets": 0, "server.address": valkey.address}


async def test_the_span_of_a_failed_batch_has_its_error():
    tracer = Recorded()
    reply = await settled(f"redis://127.0.0.1:{free_port()}", tracer)
    assert isinstance(reply, StoreUnavailableError)
    assert tracer.errors == ["StoreUnavailableError"]
