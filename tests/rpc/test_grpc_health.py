"""The standard health service with its real client."""

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ratelimitd.services.methods import OUR_SERVICES

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
NAMES = ["", *OUR_SERVICES, *(name.removeprefix("ratelimiter.v1.") for name in OUR_SERVICES)]


@pytest.fixture
def client(node):
    return health_pb2_grpc.HealthStub(node.channel)


@pytest.mark.parametrize("name", NAMES)
async def test_every_service_serves_until_the_node_drains(node, client, name):
    request = health_pb2.HealthCheckRequest(service=name)
    assert (await client.Check(request)).status == SERVING
    node.grpc_health.drain()
    assert (await client.Check(request)).status == NOT_SERVING


async def test_the_list_has_the_same_status_for_all_services(client):
    answer = await client.List(health_pb2.HealthListRequest())
    assert {name: each.status for name, each in answer.statuses.items()} == dict.fromkeys(
        NAMES, SERVING
    )


async def test_a_missing_service_is_not_found(client):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.Check(health_pb2.HealthCheckRequest(service="nope"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_watch_reports_the_status_and_its_change(node, client):
    watch = client.Watch(health_pb2.HealthCheckRequest(service=""))
    assert (await watch.read()).status == SERVING
    node.grpc_health.drain()
    node.grpc_health.set_serving()
    assert (await watch.read()).status == NOT_SERVING
    watch.cancel()


async def test_a_watch_of_an_unknown_service_reports_it_and_stays_open(node, client):
    watch = client.Watch(health_pb2.HealthCheckRequest(service="nope"))
    assert (await watch.read()).status == SERVICE_UNKNOWN
    node.grpc_health.drain()
    assert not watch.done()
    watch.cancel()


async def test_a_stopping_server_ends_watches_instead_of_waiting_for_them(node, client):
    watch = client.Watch(health_pb2.HealthCheckRequest(service=""))
    assert (await watch.read()).status == SERVING
    await node.server.stop(grace_s=3600)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await watch.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
