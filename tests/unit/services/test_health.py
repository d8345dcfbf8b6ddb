import asyncio
import gc
import logging
from dataclasses import replace

import pytest

from ratelimitd.errors import CheckInvalidError, InvalidInputError, StoreUnavailableError
from ratelimitd.model import Algorithm, IdentifierType, Rule
from ratelimitd.observe.denials import DeniedEndpoint
from ratelimitd.observe.health import HealthReport
from ratelimitd.observe.metrics import HistogramSample, MetricSample
from ratelimitd.rpc.interface import RpcError, StatusCode
from ratelimitd.services.health import MAX_RESETS, PIECE_SAMPLES, HealthService
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


RULE = Rule(
    "rule-1",
    "/a",
    IdentifierType.USER,
    limit=10,
    window_seconds=60,
    algorithm=Algorithm.TOKEN_BUCKET,
)
A_RESET = pb.ResetRequest(
    identifier="alice", identifier_type="user", endpoint="/a"
).SerializeToString()


class ResetProbe:
    """Records resets, which wait until ``disk`` is set and then raise ``error``, if any."""

    def __init__(self, rules=(RULE,)):
        self.resets = []
        self.rules = rules
        self.disk = asyncio.Event()
        self.disk.set()
        self.error = None

    async def reset(self, identifier, identifier_type, endpoint):
        self.resets.append((identifier, identifier_type, endpoint))
        await self.disk.wait()
        if self.error is not None:
            raise self.error
        return self.rules


def service_of(report=REPORT, samples=(), asked=None, limiter=None):
    def read(names):
        if asked is not None:
            asked.append(list(names))
        return samples

    async def unmatched():
        return [DeniedEndpoint("/ordes", 11.26)]

    return HealthService(
        limiter or ResetProbe(),
        dry_run=None,
        report=lambda: report,
        samples=read,
        unmatched=unmatched,
        actor=lambda _call: "admin@me",
    )


def test_the_service_offers_the_methods_of_the_contract():
    names = [method.name for method in pb.DESCRIPTOR.services_by_name["RateLimiterHealth"].methods]
    assert [path.rpartition("/")[2] for path in service_of().methods().unary] == names


def test_health_is_answered_with_the_measurements_behind_it():
    answer = pb.HealthResponse.FromString(service_of().get_health_status(b"", CALL))
    assert answer == pb.HealthResponse(
        status=pb.HEALTHY, shared_state_connected=True, local_cache_hit_ratio=0.95, average_latency_ms=0.5,
        error_rate=0.001, node_id="node-1", breaker_state="closed", rules_revision=7,
    )  # fmt: skip


def test_an_unhealthy_node_is_degraded():
    service = service_of(replace(REPORT, healthy=False))
    answer = pb.HealthResponse.FromString(service.get_health_status(b"", CALL))
    assert answer.status == pb.DEGRADED


async def test_metrics_are_answered_as_sampled():
    histogram = HistogramSample((0.001, 0.002), (1, 2, 4), 0.5)
    samples = [
        MetricSample("c", "counter", 3.0, labels={"rule": "r"}),
        MetricSample("h", "histogram", histogram=histogram),
    ]
    answer = pb.MetricsResponse.FromString(await service_of(samples=samples).get_metrics(b"", CALL))
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


def test_no_iteration_encodes_more_than_a_piece_of_the_metrics():
    read = []
    samples = (read.append(n) or MetricSample(str(n), "gauge", 1.0) for n in range(1001))
    answering = service_of(samples=samples).get_metrics(b"", CALL).__await__()
    turns = []
    answer = b""
    try:
        while True:
            next(answering)
            turns.append(len(read))
    except StopIteration as end:
        answer = end.value
    assert turns == [*range(PIECE_SAMPLES, 1001, PIECE_SAMPLES), 1001]
    names = [metric.name for metric in pb.MetricsResponse.FromString(answer).metrics]
    assert names == [str(n) for n in range(1001)]


async def test_names_are_passed_on_and_invalid_utf8_is_an_unknown_name():
    asked = []
    await service_of(asked=asked).get_metrics(b"\x0a\x01a\x0a\x01\xff", CALL)
    assert asked == [["a", "\ufffd"]]


async def test_a_thousand_names_are_accepted_and_one_more_is_refused():
    await service_of().get_metrics(b"\x0a\x01a" * 1000, CALL)
    with pytest.raises(InvalidInputError, match=r"^names: "):
        await service_of().get_metrics(b"\x0a\x01a" * 1001, CALL)


def test_malformed_bytes_are_refused():
    with pytest.raises(InvalidInputError):
        service_of().get_health_status(b"\xff", CALL)


async def test_the_limiter_receives_a_reset_in_canonical_form():
    limiter = ResetProbe()
    service = service_of(limiter=limiter)
    message = pb.ResetRequest(identifier="::ffff:1.2.3.4", identifier_type="ip", endpoint="/a")
    assert await service.reset_rate_limit(message.SerializeToString(), CALL) == b""
    assert limiter.resets == [(b"1.2.3.4", IdentifierType.IP, "/a")]


async def test_a_malformed_reset_does_not_reach_the_limiter():
    limiter = ResetProbe()
    with pytest.raises(CheckInvalidError):
        await service_of(limiter=limiter).reset_rate_limit(b"", CALL)
    assert limiter.resets == []


async def test_a_reset_is_logged_with_actor_and_rule_but_not_the_identifier(caplog):
    caplog.set_level(logging.INFO)
    await service_of().reset_rate_limit(A_RESET, CALL)
    [record] = caplog.records
    assert record.getMessage() == "admin@me reset one identifier under the rules rule-1"


async def test_a_reset_without_a_rule_is_not_logged(caplog):
    caplog.set_level(logging.INFO)
    await service_of(limiter=ResetProbe(rules=())).reset_rate_limit(A_RESET, CALL)
    assert caplog.records == []


async def test_resets_above_the_bound_are_refused_until_one_is_done():
    limiter = ResetProbe()
    limiter.disk.clear()
    service = service_of(limiter=limiter)
    waiting = [
        asyncio.ensure_future(service.reset_rate_limit(A_RESET, CALL)) for _ in range(MAX_RESETS)
    ]
    await asyncio.sleep(0)
    with pytest.raises(RpcError) as caught:
        await service.reset_rate_limit(A_RESET, CALL)
    assert caught.value.code is StatusCode.RESOURCE_EXHAUSTED
    limiter.disk.set()
    assert await asyncio.gather(*waiting) == [b""] * MAX_RESETS
    assert await service.reset_rate_limit(A_RESET, CALL) == b""


async def test_a_failed_reset_whose_caller_left_is_no_lost_error():
    lost = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))
    limiter = ResetProbe()
    limiter.error = StoreUnavailableError("the disk is full")
    limiter.disk.clear()
    service = service_of(limiter=limiter)
    left = asyncio.ensure_future(service.reset_rate_limit(A_RESET, CALL))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    limiter.disk.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gc.collect()
    assert not lost


async def test_a_reset_whose_caller_left_counts_until_it_is_done_and_is_logged(caplog):
    caplog.set_level(logging.INFO)
    limiter = ResetProbe()
    limiter.disk.clear()
    service = service_of(limiter=limiter)
    for _ in range(MAX_RESETS):
        left = asyncio.ensure_future(service.reset_rate_limit(A_RESET, CALL))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    with pytest.raises(RpcError):
        await service.reset_rate_limit(A_RESET, CALL)
    limiter.disk.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(caplog.records) == MAX_RESETS


async def test_a_failed_reset_is_reported_to_the_caller_and_not_logged(caplog):
    caplog.set_level(logging.INFO)
    limiter = ResetProbe()
    limiter.error = StoreUnavailableError("the disk is full")
    with pytest.raises(StoreUnavailableError):
        await service_of(limiter=limiter).reset_rate_limit(A_RESET, CALL)
    assert caplog.records == []


async def test_endpoints_without_a_rule_are_listed_with_their_rates():
    answer = pb.ListUnmatchedResponse.FromString(await service_of().list_unmatched(b"", CALL))
    [endpoint] = answer.endpoints
    assert endpoint == pb.UnmatchedEndpoint(endpoint="/ordes", checks_per_minute=11.3)


async def test_malformed_bytes_for_the_list_of_unmatched_endpoints_are_refused():
    with pytest.raises(InvalidInputError, match="not a ListUnmatchedRequest"):
        await service_of().list_unmatched(b"\xff", CALL)
