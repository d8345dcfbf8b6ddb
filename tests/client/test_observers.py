"""What clients report of their decisions: counts, and what an application's observer is told."""

import asyncio
import logging

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry

from ratelimitd_client import (
    AsyncRateLimiterClient,
    Check,
    Counts,
    Decision,
    RateLimiterClient,
    Reason,
)
from ratelimitd_client.decision import unchecked
from ratelimitd_client.observers import report_to
from ratelimitd_client.observers.opentelemetry import OpenTelemetryObserver
from ratelimitd_client.observers.prometheus import PrometheusObserver
from ratelimitd_client.testing import AsyncFakeRateLimiter, FakeRateLimiter, ManualClock
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.client.kinds import PATIENT_S, result_of
from tests.fake_node import fake_node
from tests.servers import free_port, until

ALLOWED = Decision(True, 1, 0, 0, Reason.WITHIN_LIMIT)
DENIED = Decision(False, 0, 0, 5, Reason.LIMIT_EXCEEDED)


class Told(list[tuple[str, bool, Reason]]):
    """Keeps what it is told."""

    def decided(self, decision, endpoint):
        self.append((endpoint, decision.allowed, decision.reason))


@pytest.mark.parametrize("kind", [RateLimiterClient, AsyncRateLimiterClient])
async def test_every_decision_of_a_real_node_is_counted_and_told_once(kind, real_node):
    told, name = Told(), f"counted by {kind.__name__}"
    client = kind(real_node.grpc_address, timeout_s=PATIENT_S, observer=told)
    await result_of(client.check(name, "user", "/five", cost=3))
    await result_of(client.check_many([Check(name, "user", "/five"), Check(name, "user", "/free")]))
    await result_of(client.hold(name, "user", "/five", cost=2))
    await result_of(client.close())
    counts = client.counts
    assert (counts.asked, counts.allowed, counts.denied, counts.unanswered) == (4, 3, 1, 0)
    assert told == [
        ("/five", True, Reason.WITHIN_LIMIT),
        ("/five", True, Reason.WITHIN_LIMIT),
        ("/free", True, Reason.NO_RULE),
        ("/five", False, Reason.LIMIT_EXCEEDED),
    ]


@pytest.mark.parametrize("kind", [RateLimiterClient, AsyncRateLimiterClient])
@pytest.mark.parametrize("on_unavailable", ["allow", "deny"])
async def test_what_no_node_has_answered_is_counted_by_its_cause_and_its_effect(
    kind, on_unavailable
):
    clock = ManualClock()
    options = {"timeout_s": PATIENT_S, "clock": clock, "on_unavailable": on_unavailable}
    client = kind(f"127.0.0.1:{free_port()}", **options)
    for _ in range(7):
        await result_of(client.check("alice", "user", "/x"))
    await result_of(client.hold("alice", "user", "/x"))
    await result_of(client.close())
    counts = client.counts
    assert (counts.unanswered, counts.not_asked, counts.asked) == (5, 3, 5)
    effects = (8, 0) if on_unavailable == "allow" else (0, 8)
    assert (counts.let_through, counts.held_closed) == effects


def test_probes_are_not_counted():
    clock, port = ManualClock(), free_port()
    with RateLimiterClient(f"127.0.0.1:{port}", timeout_s=PATIENT_S, clock=clock) as client:
        for _ in range(5):
            client.check("alice", "user", "/x")
        with fake_node(port=port) as node:
            assert client.wait_until_ready(PATIENT_S)
            clock.advance(1)
            client.check("alice", "user", "/x")
            breaker = client._opened().fail_open.breaker
            until(breaker.allows, "the probe was answered")
            assert len(node.seen) == 1
    assert (client.counts.asked, client.counts.not_asked) == (5, 1)
    assert client.counts.allowed == 0


async def test_checks_that_a_lease_decides_are_counted_apart(real_node):
    told = Told()
    options = {"timeout_s": PATIENT_S, "lease_ms": 1_000, "observer": told}
    async with AsyncRateLimiterClient(real_node.grpc_address, **options) as client:
        await asyncio.to_thread(_a_limit_of_a_million, real_node.grpc_address)
        checks = 0
        while not client.counts.leased:
            await client.check("leased", "user", "/million")
            checks += 1
    assert (client.counts.leased, client.counts.allowed) == (1, checks - 1)
    assert told == [("/million", True, Reason.WITHIN_LIMIT)] * checks


def _a_limit_of_a_million(address):
    with RateLimiterClient(address, timeout_s=PATIENT_S) as client:
        client.admin.create_rule(
            pb.RateLimit(
                endpoint="/million",
                identifier_type="user",
                limit=1_000_000,
                window_seconds=60,
                algorithm="fixed_window",
            ),
            timeout_s=PATIENT_S,
        )


class Failing:
    """Fails with what no log may contain."""

    def decided(self, decision, endpoint):
        raise ValueError(endpoint, "alice")


async def test_an_observer_that_fails_reaches_no_caller_and_is_told_in_the_log(real_node, caplog):
    caplog.set_level(logging.WARNING, "ratelimitd_client")
    options = {"timeout_s": PATIENT_S, "observer": Failing(), "clock": ManualClock()}
    with RateLimiterClient(real_node.grpc_address, **options) as client:
        assert client.check("failing", "user", "/five").allowed
        assert client.check("failing", "user", "/five").allowed
    async with AsyncRateLimiterClient(real_node.grpc_address, **options) as client:
        assert (await client.check("failing", "user", "/five")).allowed
    texts = [record.getMessage() for record in caplog.records]
    assert texts == ["the observer failed (ValueError), 1 reports lost since the last warning"] * 2
    assert client.counts.allowed == 1


class Awaited:
    """Would never be awaited."""

    async def decided(self, decision, endpoint):
        """Report later."""


@pytest.mark.parametrize("observer", [Awaited(), object(), print])
def test_what_is_no_observer_is_refused(observer):
    with pytest.raises(TypeError, match="observer must have a method decided"):
        RateLimiterClient(observer=observer)
    with pytest.raises(TypeError, match="observer must have a method decided"):
        FakeRateLimiter(observer=observer)


async def test_fakes_report_as_the_clients_do():
    told = Told()
    limiter, asynchronous = FakeRateLimiter(observer=told), AsyncFakeRateLimiter(observer=told)
    for each in (limiter, asynchronous):
        await result_of(each.check("alice", "user", "/x"))
        await result_of(each.hold("alice", "user", "/x"))
        each.available = False
        await result_of(each.check("alice", "user", "/x"))
        assert (each.counts.allowed, each.counts.unanswered, each.counts.let_through) == (2, 1, 1)
    assert len(told) == 6


def test_counts_are_readable():
    counts = Counts()
    counts.decided(ALLOWED, "/x")
    assert "asked=1, allowed=1, denied=0" in repr(counts)


def reported_to(observer):
    report = report_to(ManualClock(), observer)
    for decision in (ALLOWED, ALLOWED, DENIED, unchecked(Reason.NO_ANSWER, "alice", 0.0, "deny")):
        report(decision, "/orders/{id}")


BY_OUTCOME = {
    ("/orders/{id}", "WITHIN_LIMIT", True): 2,
    ("/orders/{id}", "LIMIT_EXCEEDED", False): 1,
    ("/orders/{id}", "NO_ANSWER", False): 1,
}


def test_prometheus_counts_by_endpoint_and_outcome():
    registry = CollectorRegistry()
    reported_to(PrometheusObserver(registry))
    [metric] = registry.collect()
    found = {
        (labels["endpoint"], labels["reason"], labels["allowed"] == "true"): value
        for name, labels, value, *_ in metric.samples
        if name == "rate_limiter_client_decisions_total"
    }
    assert found == BY_OUTCOME


def test_opentelemetry_counts_by_endpoint_and_outcome():
    reader = InMemoryMetricReader()
    reported_to(OpenTelemetryObserver(MeterProvider(metric_readers=[reader])))
    [resource] = reader.get_metrics_data().resource_metrics
    [metric] = resource.scope_metrics[0].metrics
    assert metric.name == "ratelimitd.client.decisions"
    found = {
        tuple(point.attributes[name] for name in ("endpoint", "reason", "allowed")): point.value
        for point in metric.data.data_points
    }
    assert found == BY_OUTCOME
