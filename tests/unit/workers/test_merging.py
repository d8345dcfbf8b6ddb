import pytest

from ratelimitd.observe.metrics import DEFINITIONS, HistogramSample
from ratelimitd.workers.metrics import GAUGES, added, merged, number


def values(name, counted=(), now=()):
    """Return the merged readings of one metric, by label."""
    [points] = [points for found, points in merged(counted, now) if found.name == name]
    return {point.label: point.histogram or point.value for point in points}


def test_every_gauge_has_a_rule_and_every_rule_a_gauge():
    gauges = {definition.name for definition in DEFINITIONS if definition.kind == "gauge"}
    assert gauges == GAUGES.keys()


def test_all_metrics_are_in_order_including_unreported_ones():
    found = merged([], [])
    assert [definition for definition, _ in found] == list(DEFINITIONS)
    assert all(points == [] for _, points in found)


def test_counters_are_summed_label_by_label():
    name = "rate_limiter_rule_allowed_total"
    assert values(name, counted=[{name: {"a": 1, "b": 2}}, {}, {name: {"b": 40}}]) == {
        "a": 1,
        "b": 42,
    }


def test_histograms_are_summed_bucket_by_bucket():
    name = "rate_limiter_check_latency_seconds"
    first = {name: {"": HistogramSample((0.5, 1.0), (1, 2, 3), 0.25)}}
    second = {name: {"": HistogramSample((0.5, 1.0), (0, 10, 10), 0.5)}}
    assert values(name, counted=[first, second]) == {
        "": HistogramSample((0.5, 1.0), (1, 12, 13), 0.75)
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rate_limiter_active_buckets", 0.9),
        ("rate_limiter_loop_lag_seconds", 0.7),
        ("rate_limiter_rules_revision", -1.0),
        ("rate_limiter_clock_error_seconds", -1.0),
        ("rate_limiter_tls_certificate_expiry_timestamp_seconds", -1.0),
    ],
)
def test_each_gauge_is_merged_by_its_own_rule(name, expected):
    now = [{name: {"": value}} for value in (0.7, 0.2, 1.0, -1.0)]
    now = now[:2] + now[3:] if name != "rate_limiter_active_buckets" else now
    assert values(name, now=now) == {"": pytest.approx(expected)}


def test_the_breaker_shows_each_state_of_any_worker():
    name = "rate_limiter_breaker_state"
    now = [{name: {"closed": 1.0, "open": 0.0}}, {name: {"closed": 0.0, "open": 1.0}}]
    assert values(name, now=now) == {"closed": 1.0, "open": 1.0}


def test_counters_use_all_workers_and_gauges_those_that_answer():
    report = {"rate_limiter_requests_allowed_total": {"": 3}, "rate_limiter_tasks": {"": 5}}
    assert values("rate_limiter_requests_allowed_total", now=[report]) == {}
    assert values("rate_limiter_tasks", counted=[report]) == {}


def test_metrics_of_another_release_are_left_out():
    assert values("rate_limiter_tasks", now=[{"of_tomorrow": {"": 1}}]) == {}


def test_the_number_of_a_histogram_is_its_total_count():
    assert number(HistogramSample((1.0,), (2, 5), 3.0)) == 5
    assert number(7) == 7
    assert added(3, 4) == 7
