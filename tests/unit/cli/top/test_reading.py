"""The activity of a node between two looks: differences, never negative, regardless of its answers."""

import math

import pytest

from ratelimitd.cli.top.reading import (
    ALLOWED,
    BLOCKED,
    LATENCY,
    NAMES,
    RULE_ALLOWED,
    RULE_BLOCKED,
    Look,
    reading,
)
from ratelimitd.observe.metrics import DEFINITIONS
from ratelimiter.v1 import ratelimiter_pb2 as pb

HEALTH = pb.HealthResponse(
    status=pb.HEALTHY,
    node_id="n1",
    breaker_state="closed",
    rules_revision=7,
    shared_state_connected=True,
)


def look(at_s, *series, counts=(), sum_s=0.0):
    metrics = [
        pb.Metric(name=name, value=value, labels={"rule_id": label} if label else {})
        for name, label, value in series
    ]
    if counts:
        histogram = pb.Histogram(upper_bounds=[0.001, 0.002], cumulative_counts=counts, sum=sum_s)
        metrics.append(pb.Metric(name=LATENCY, kind="histogram", histogram=histogram))
    return Look.of(at_s, HEALTH, pb.MetricsResponse(metrics=metrics))


def test_every_requested_metric_exists():
    reported = {definition.reported_name or definition.name for definition in DEFINITIONS}
    assert set(NAMES) <= reported


def test_rate_is_growth_per_second():
    before = look(10.0, (ALLOWED, "", 100), (BLOCKED, "", 5))
    after = look(12.0, (ALLOWED, "", 300), (BLOCKED, "", 5))
    seen = reading(before, after, rules=10)
    assert (seen.allowed_per_s, seen.blocked_per_s, seen.fail_open_per_s) == (100.0, 0.0, 0.0)
    assert (seen.node_id, seen.status, seen.breaker_state) == ("n1", "HEALTHY", "closed")
    assert (seen.shared_state_connected, seen.rules_revision) == (True, 7)


def test_restarted_counter_counts_from_zero():
    seen = reading(look(0, (ALLOWED, "", 1_000)), look(2, (ALLOWED, "", 10)), rules=1)
    assert seen.allowed_per_s == 5.0


def test_no_activity_between_equal_looks():
    same = look(1, (ALLOWED, "", 10), counts=(1, 1, 1))
    seen = reading(same, same, rules=1)
    assert (seen.allowed_per_s, seen.latency) == (0.0, None)


def test_unreported_values_are_unknown_rather_than_zero():
    seen = reading(look(0), look(1, ("rate_limiter_active_buckets", "", 0)), rules=1)
    assert (seen.buckets, seen.memory_bytes, seen.latency, seen.cluster_nodes) == (
        0,
        None,
        None,
        None,
    )


def test_latencies_are_those_of_the_checks_in_between():
    before = look(0, counts=(100, 100, 100), sum_s=0.01)
    after = look(1, counts=(150, 195, 200), sum_s=0.11)
    latency = reading(before, after, rules=1).latency
    assert latency.mean_ms == pytest.approx(1.0)
    assert latency[1:] == (1.0, 2.0, math.inf)


@pytest.mark.parametrize("before", [look(0), look(0, counts=(9, 9, 9), sum_s=5)])
def test_restarted_histogram_counts_whole(before):
    latency = reading(before, look(1, counts=(2, 2, 2), sum_s=0.002), rules=1).latency
    assert latency == (1.0, 1.0, 1.0, 1.0)


def test_rules_with_most_denials_come_first_up_to_the_requested_number():
    before = look(0, (RULE_BLOCKED, "a", 0), (RULE_BLOCKED, "b", 90), (RULE_ALLOWED, "c", 0))
    after = look(
        1,
        *((RULE_BLOCKED, "a", 3), (RULE_BLOCKED, "b", 91), (RULE_BLOCKED, "c", 0)),
        *((RULE_ALLOWED, "a", 0), (RULE_ALLOWED, "c", 50), (RULE_BLOCKED, "d", 0)),
    )
    seen = reading(before, after, rules=3).busiest
    assert [rule.rule_id for rule in seen] == ["a", "b", "c"]
    assert seen[0] == ("a", 0.0, 3.0, 3)
    assert seen[2].allowed_per_s == 50.0
