"""Envoy's service on shared buckets."""

from dataclasses import replace

from ratelimitd.services.envoy import EnvoyService
from tests.envoy_messages import request_of
from tests.unit.limiter.nodes import GRANTED, ORDERS, Sharing
from tests.unit.services.envoy_node import OPTIONS
from tests.unit.services.fake_call import FakeCall


async def test_the_limiter_is_told_how_long_envoy_waits():
    node = Sharing(replace(ORDERS, endpoint="edge"))
    node.shared.answers.append(GRANTED)
    service = EnvoyService(node.limiter, node.stats, lambda: 0.0, **OPTIONS, holds=None)
    request = request_of("edge", [("user_id", "ada")])
    await service.should_rate_limit(request.SerializeToString(), FakeCall(remaining_s=0.02))
    assert node.shared.remaining_s == [0.02]
