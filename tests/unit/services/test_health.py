import pytest

from ratelimitd.errors import CheckInvalidError, InvalidInputError
from ratelimitd.model import IdentifierType
from ratelimitd.observe.samples import HealthReport, HistogramSample, MetricSample
from ratelimitd.services.health import HealthService
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.unit.services.fake_call import FakeCall

CALL = FakeCall()
REPORT = HealthReport(
    healthy=True,
    shared_state_connected=True,
    local_cache_hit_ratio=0.95,
    average_latency_ms=0.5,
    error_rate=0.001,
    node_id="node-1",
    breaker_state="closed",
    rules_revision=7,
)


class ResetProbe:
    """Remembers what was reset."""

    def __init__(self):
        self.resets = []

    async def reset(self, identifier, identifier_type, endpoint):
        self.resets.append((identifier, identifier_type, endpoint))


def service_of(report=REPORT, samples=(), asked=None):
    def read(names):
        if asked is not None:
            asked.append(list(names))
        return samples

    return HealthService(ResetProbe(), report=lambda: report, samples=read)


def test_the_service_offers_the_methods_of_the_contract():
    names = [method.name for method in pb.DESCRIPTOR.services_by_name["RateLimiterHealth"].methods]
    assert [path.rpartition("/")[2] for path in service_of().methods().unary] == names


def test_health_is_answered_with_the_measurements_behind_it():
    answer = pb.HealthResponse.FromString(service_of().get_health_status(b"", CALL))
    assert answer == pb.HealthResponse(
        status=pb.HEALTHY, shared_state_connected=True, local_cache_hit_ratio=0.95, average_latency_ms=0.5,
        error_rate=0.001, node_id="node-1", breaker_state="closed", rules_revision=7,
    )  # fmt: skip


def test_a_node_that_is_not_healthy_is_degraded():
    report = HealthReport(
        healthy=False,
        shared_state_connected=False,
        local_cache_hit_ratio=0.0,
        average_latency_ms=9.0,
        error_rate=1.0,
        node_id="n",
        breaker_state="open",
        rules_revision=0,
    )
    answer = pb.HealthResponse.FromString(service_of(report).get_health_status(b"", CALL))
    assert answer.status == pb.DEGRADED


def test_metrics_are_answered_as_sampled():
    histogram = HistogramSample((0.001, 0.002), (1, 2, 4), 0.5)
    samples = [
        MetricSample("c", "counter", 3.0, labels={"rule": "r"}),
        MetricSample("h", "histogram", histogram=histogram),
    ]
    answer = pb.MetricsResponse.FromString(service_of(samples=samples).get_metrics(b"", CALL))
    assert list(answer.metrics) == [
        pb.Metric(name="c", kind="counter", value=3.0, labels={"rule": "r"}),
        pb.Metric(
            name="h",
            kind="histogram",
            histogram=pb.Histogram(
                upper_bounds=[0.001, 0.002], cumulative_counts=[1, 2, 4], sum=0.5
            ),
        ),
    ]


def test_names_are_handed_on_and_those_that_are_no_text_cannot_be_found():
    asked = []
    service_of(asked=asked).get_metrics(b"\x0a\x01a\x0a\x01\xff", CALL)
    assert asked == [["a", "\ufffd"]]


def test_a_thousand_names_are_looked_up_and_one_more_is_refused():
    service_of().get_metrics(b"\x0a\x01a" * 1000, CALL)
    with pytest.raises(InvalidInputError, match=r"^names: "):
        service_of().get_metrics(b"\x0a\x01a" * 1001, CALL)


def test_bytes_that_are_no_message_are_refused():
    with pytest.raises(InvalidInputError):
        service_of().get_health_status(b"\xff", CALL)


async def test_a_reset_reaches_the_limiter_in_the_canonical_form():
    limiter = ResetProbe()
    service = HealthService(limiter, report=lambda: REPORT, samples=lambda _names: ())
    message = pb.ResetRequest(identifier="::ffff:1.2.3.4", identifier_type="ip", endpoint="/a")
    assert await service.reset_rate_limit(message.SerializeToString(), CALL) == b""
    assert limiter.resets == [(b"1.2.3.4", IdentifierType.IP, "/a")]


async def test_a_malformed_reset_reaches_nobody():
    limiter = ResetProbe()
    service = HealthService(limiter, report=lambda: REPORT, samples=lambda _names: ())
    with pytest.raises(CheckInvalidError):
        await service.reset_rate_limit(b"", CALL)
    assert limiter.resets == []
