import asyncio

import pytest
from grpc_health.v1 import health_pb2

from ratelimitd.errors import InvalidInputError
from ratelimitd.rpc.interface import RpcError, StatusCode
from ratelimitd.services.grpc_health import GrpcHealthService
from tests.unit.services.fake_call import FakeCall

CALL = FakeCall()
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def asking(name):
    return health_pb2.HealthCheckRequest(service=name).SerializeToString()


def status_of(answer):
    return health_pb2.HealthCheckResponse.FromString(answer).status


@pytest.fixture
def service():
    return GrpcHealthService(["a.B"])


@pytest.mark.parametrize("name", ["", "a.B"])
def test_a_node_is_serving_from_ready_until_it_drains(service, name):
    def now():
        return status_of(service.check(asking(name), CALL))

    assert now() == NOT_SERVING
    service.set_serving()
    assert service.serving
    assert now() == SERVING
    service.drain()
    service.set_serving()
    assert not service.serving
    assert now() == NOT_SERVING


def test_an_unknown_service_is_not_found(service):
    with pytest.raises(RpcError) as caught:
        service.check(asking("nope"), CALL)
    assert caught.value.code is StatusCode.NOT_FOUND


def test_malformed_bytes_are_refused(service):
    with pytest.raises(InvalidInputError, match="no HealthCheckRequest message"):
        service.check(b"\xff", CALL)
    with pytest.raises(InvalidInputError, match="no HealthListRequest message"):
        service.list_all(b"\xff", CALL)


def test_the_list_has_the_node_and_every_service_with_its_status(service):
    def listed():
        answer = health_pb2.HealthListResponse.FromString(service.list_all(b"", CALL))
        return {name: each.status for name, each in answer.statuses.items()}

    assert listed() == {"": NOT_SERVING, "a.B": NOT_SERVING}
    service.set_serving()
    assert listed() == {"": SERVING, "a.B": SERVING}


async def test_a_watch_reports_each_change_once(service):
    service.set_serving()
    watch = service.methods().server_stream["/grpc.health.v1.Health/Watch"](asking(""), CALL)
    assert status_of(await anext(watch)) == SERVING
    upcoming = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)
    service.set_serving()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not upcoming.done()
    service.drain()
    assert status_of(await upcoming) == NOT_SERVING
    await watch.aclose()


async def test_a_watch_of_an_unknown_service_reports_it(service):
    watch = service.watch(asking("nope"), CALL)
    assert status_of(await anext(watch)) == SERVICE_UNKNOWN
    await watch.aclose()
