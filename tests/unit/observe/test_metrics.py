import asyncio
import resource
import time
from types import SimpleNamespace

import pytest

from ratelimitd import __version__
from ratelimitd.counters import LATENCY_BOUNDS_S, MAX_RULE_LABELS, CheckStats
from ratelimitd.errors import InvalidInputError
from ratelimitd.model import Algorithm, IdentifierType, Rule
from ratelimitd.observe.health import Health
from ratelimitd.observe.metrics import (
    _MAXRSS_UNIT,
    DEFINITIONS,
    Metrics,
    NodeParts,
    Runtime,
    resident_bytes,
)
from ratelimitd.rules.book import RuleBook
from ratelimitd.testing import ManualClock

RULE = Rule(
    "1", "/e", IdentifierType.USER, limit=10, window_seconds=60, algorithm=Algorithm.FIXED_WINDOW
)

SPECIFIED = {
    "rate_limiter_requests_allowed_total": "counter",
    "rate_limiter_requests_blocked_total": "counter",
    "rate_limiter_false_positives_total": "counter",
    "rate_limiter_check_latency_seconds": "histogram",
    "rate_limiter_cache_hit_ratio": "gauge",
    "rate_limiter_active_buckets": "gauge",
    "rate_limiter_redis_errors_total": "counter",
    "rate_limiter_memory_usage_bytes": "gauge",
}


@pytest.fixture
def stats():
    return CheckStats()


@pytest.fixture
def runtime():
    return Runtime()


class Buckets:
    evicted_total, expired_total = 12, 13

    def __len__(self):
        return 11


class Transport:
    """A transport that reports everything, unless a test removes something."""

    unary, streams, connections, http2_streams = 20, 21, 22, 23


@pytest.fixture
def transport():
    return Transport()


@pytest.fixture
def cluster():
    return SimpleNamespace(
        membership=SimpleNamespace(count=3),
        sync_lag_s=0.5,
        unsettled_buckets=24,
        buckets=SimpleNamespace(asked_total=25, late_total=26, given_back_total=33, kept_total=34),
        accuracy=SimpleNamespace(forgiven_total=27, over_admitted_total=28),
        worst_excess=0.02,
        promised_excess=0.53,
        store=SimpleNamespace(corrupt_total=29),
        bus=SimpleNamespace(gaps_total=31, undelivered_total=32),
    )


@pytest.fixture
def snapshot():
    return SimpleNamespace(age_s=1.5, written_bytes_total=16, errors_total=17)


@pytest.fixture
def tls_expiry_s():
    return {"TLS_CERT": 1_800_000_000.0, "TLS_CLIENT_CA": 1_900_000_000.0}


@pytest.fixture
def feed():
    return SimpleNamespace(
        book=RuleBook.of([RULE], 4),
        assignments=range(20),
        skipped_total=15,
        left_out=19,
        connected=True,
    )


@pytest.fixture
def metrics(stats, runtime, feed, *, transport, cluster, snapshot, tls_expiry_s):
    clock = ManualClock()
    return Metrics(
        NodeParts(
            stats=stats,
            health=Health(node_id="n", stats=stats, clock=clock, rules_revision=lambda: 4),
            runtime=runtime,
            clock=clock,
            feed=feed,
            buckets=Buckets(),
            snapshot=snapshot,
            cluster=cluster,
            task_restarts={"snapshot": 2},
            transport=lambda: transport,
            transport_name="native",
            tls_expiry_s=lambda: tls_expiry_s,
            in_flight=lambda: (),
        )
    )


def value(metrics, name, **labels):
    (found,) = [sample for sample in metrics.samples([name]) if sample.labels == labels]
    return found.value


@pytest.mark.parametrize(("name", "kind"), SPECIFIED.items())
def test_specified_metrics_have_their_exact_names_without_labels(metrics, name, kind):
    (sample,) = metrics.samples([name])
    assert (sample.name, sample.kind, dict(sample.labels)) == (name, kind, {})


def test_counters_and_only_they_end_in_total():
    for definition in DEFINITIONS:
        assert (definition.kind == "counter") == definition.name.endswith("_total")


def test_no_name_is_defined_twice():
    names = [definition.name for definition in DEFINITIONS]
    assert len(names) == len(set(names))


def test_counters_of_the_check_path_are_reported(metrics, stats):
    stats.allowed_total, stats.blocked_total, stats.false_positives_total = 1, 2, 3
    stats.shared_state_errors_total, stats.invalid_total, stats.clock_rejected_total = 4, 5, 6
    stats.fail_open_breaker_total, stats.fail_open_error_total = 7, 8
    assert value(metrics, "rate_limiter_requests_allowed_total") == 1
    assert value(metrics, "rate_limiter_requests_blocked_total") == 2
    assert value(metrics, "rate_limiter_false_positives_total") == 3
    assert value(metrics, "rate_limiter_redis_errors_total") == 4
    assert value(metrics, "rate_limiter_invalid_requests_total") == 5
    assert value(metrics, "rate_limiter_timestamps_rejected_total") == 6
    assert value(metrics, "rate_limiter.fail_open") == 7
    assert value(metrics, "rate_limiter_fail_open_errors_total") == 8


def test_buckets_rules_and_snapshot_are_reported(metrics, stats):
    stats.unexpected_total = 18
    assert value(metrics, "rate_limiter_active_buckets") == 11
    assert value(metrics, "rate_limiter_buckets_evicted_total") == 12
    assert value(metrics, "rate_limiter_buckets_expired_total") == 13
    assert value(metrics, "rate_limiter_rules") == 1
    assert value(metrics, "rate_limiter_rules_revision") == 4
    assert value(metrics, "rate_limiter_rules_skipped_total") == 15
    assert value(metrics, "rate_limiter_rules_left_out") == 19
    assert value(metrics, "rate_limiter_assignments") == 20
    assert value(metrics, "rate_limiter_rules_store_up") == 1
    assert value(metrics, "rate_limiter_snapshot_age_seconds") == 1.5
    assert value(metrics, "rate_limiter_snapshot_written_bytes_total") == 16
    assert value(metrics, "rate_limiter_snapshot_errors_total") == 17
    assert value(metrics, "rate_limiter_unexpected_errors_total") == 18


def test_no_rules_are_reported_before_the_first_book(metrics, feed):
    feed.book, feed.connected = None, False
    for name in ("rules", "rules_revision", "rules_store_up"):
        assert value(metrics, f"rate_limiter_{name}") == 0


def test_cluster_state_of_a_node_is_reported(metrics, stats):
    stats.breaker_denied_total = 30
    assert value(metrics, "rate_limiter_cluster_nodes") == 3
    assert value(metrics, "rate_limiter_sync_lag_seconds") == 0.5
    assert value(metrics, "rate_limiter_unsettled_buckets") == 24
    assert value(metrics, "rate_limiter_shared_state_checks_total") == 25
    assert value(metrics, "rate_limiter_shared_state_late_total") == 26
    assert value(metrics, "rate_limiter_given_back_tokens_total") == 33
    assert value(metrics, "rate_limiter_kept_tokens_total") == 34
    assert value(metrics, "rate_limiter_forgiven_tokens_total") == 27
    assert value(metrics, "rate_limiter_over_admitted_tokens_total") == 28
    assert value(metrics, "rate_limiter_over_admission_ratio") == 0.02
    assert value(metrics, "rate_limiter_over_admission_bound_ratio") == 0.53
    assert value(metrics, "rate_limiter_shared_state_corrupt_total") == 29
    assert value(metrics, "rate_limiter_message_gaps_total") == 31
    assert value(metrics, "rate_limiter_messages_undelivered_total") == 32
    assert value(metrics, "rate_limiter_breaker_denied_total") == 30


@pytest.mark.parametrize("cluster", [None])
def test_embedded_node_reports_no_cluster_metrics(metrics):
    assert list(metrics.samples(["rate_limiter_cluster_nodes"])) == []


@pytest.mark.parametrize("snapshot", [None])
def test_node_with_shared_buckets_reports_no_snapshot_metrics(metrics):
    assert list(metrics.samples(["rate_limiter_snapshot_age_seconds"])) == []


def test_health_is_reported(metrics, stats):
    stats.allowed_total, stats.bucket_missed_total = 1_000, 500
    assert value(metrics, "rate_limiter_cache_hit_ratio") == 0.5
    assert value(metrics, "rate_limiter_healthy") == 0
    assert value(metrics, "rate_limiter_shared_state_up") == 1
    assert value(metrics, "rate_limiter_breaker_state", state="closed") == 1
    assert value(metrics, "rate_limiter_breaker_state", state="open") == 0
    assert value(metrics, "rate_limiter_breaker_state", state="half_open") == 0


def test_process_is_reported(metrics, runtime):
    runtime.loop_lag_s, runtime.clock_error_us = 0.25, -1_500_000
    assert value(metrics, "rate_limiter_loop_lag_seconds") == 0.25
    assert value(metrics, "rate_limiter_clock_error_seconds") == -1.5
    assert value(metrics, "rate_limiter_task_restarts_total", task="snapshot") == 2
    labels = {"version": __version__, "transport": "native"}
    assert value(metrics, "rate_limiter_build_info", **labels) == 1
    assert 5_000_000 < value(metrics, "rate_limiter_memory_usage_bytes") < 10_000_000_000
    assert 1_700_000_000 < value(metrics, "process_start_time_seconds") <= time.time()


async def test_tasks_are_counted(metrics):
    before, idle = value(metrics, "rate_limiter_tasks"), asyncio.Event()
    task = asyncio.create_task(idle.wait())
    assert value(metrics, "rate_limiter_tasks") == before + 1
    idle.set()
    await task


def test_resident_memory_is_the_second_figure_of_statm_in_pages(tmp_path):
    statm = tmp_path / "statm"
    statm.write_bytes(b"900 3 2 1 0 5 0\n")
    assert resident_bytes(statm) == 3 * resource.getpagesize()


@pytest.mark.parametrize("content", [None, b"1\n"])
def test_peak_memory_is_reported_without_proc(tmp_path, content):
    statm = tmp_path / "statm"
    if content is not None:
        statm.write_bytes(content)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT
    assert resident_bytes(statm) >= peak


def test_work_of_the_transport_is_reported(metrics):
    assert value(metrics, "rate_limiter_calls_in_progress", kind="unary") == 20
    assert value(metrics, "rate_limiter_calls_in_progress", kind="stream") == 21
    assert value(metrics, "rate_limiter_connections") == 22
    assert value(metrics, "rate_limiter_http2_streams") == 23


def test_values_that_a_transport_lacks_are_absent_rather_than_zero(metrics, transport):
    transport.connections = None
    assert list(metrics.samples(["rate_limiter_connections"])) == []
    assert value(metrics, "rate_limiter_http2_streams") == 23


def test_the_expiry_of_certificates_is_reported_by_setting(metrics):
    name = "rate_limiter_tls_certificate_expiry_timestamp_seconds"
    assert value(metrics, name, setting="TLS_CERT") == 1_800_000_000
    assert value(metrics, name, setting="TLS_CLIENT_CA") == 1_900_000_000


@pytest.mark.parametrize("tls_expiry_s", [{}])
def test_without_tls_no_expiry_is_reported(metrics):
    assert not list(metrics.samples(["rate_limiter_tls_certificate_expiry_timestamp_seconds"]))


@pytest.mark.parametrize("transport", [None])
def test_nothing_is_reported_before_a_transport_listens(metrics, transport):
    assert list(metrics.samples(["rate_limiter_calls_in_progress"])) == []


def test_histogram_is_cumulative_with_bounds_at_the_promise_and_the_alert(metrics, stats):
    stats.observe_latency(0.0015)
    stats.observe_latency(0.002)
    stats.observe_latency(10.0)
    (sample,) = metrics.samples(["rate_limiter_check_latency_seconds"])
    histogram = sample.histogram
    assert histogram.upper_bounds == LATENCY_BOUNDS_S
    assert {0.001, 0.002} <= set(histogram.upper_bounds)
    at = dict(zip(histogram.upper_bounds, histogram.cumulative_counts, strict=False))
    assert (at[0.001], at[0.002], at[1.0], histogram.cumulative_counts[-1]) == (0, 2, 2, 3)
    assert histogram.sum == pytest.approx(10.0035)


def test_rules_are_distinguished_by_id_up_to_a_bound(metrics, stats):
    for number in range(MAX_RULE_LABELS + 5):
        counters = stats.rule_counters(f"rule-{number}")
        counters[0] += 1
        counters[1] += 2
    samples = list(metrics.samples(["rate_limiter_rule_allowed_total"]))
    assert len(samples) == MAX_RULE_LABELS + 1
    assert value(metrics, "rate_limiter_rule_allowed_total", rule_id="rule-0") == 1
    assert value(metrics, "rate_limiter_rule_blocked_total", rule_id="other") == 10


def test_would_be_denials_are_reported_by_rule_and_limit_up_to_a_bound(metrics, stats):
    for number in range(MAX_RULE_LABELS + 5):
        stats.observed_counter("rule", f"limit-{number}")[0] += 1
    name = "rate_limiter_rule_would_deny_total"
    assert len(list(metrics.samples([name]))) == MAX_RULE_LABELS + 1
    assert value(metrics, name, rule_id="rule", limit="limit-0") == 1
    assert value(metrics, name, rule_id="other", limit="other") == 5
    stats.observed_counter("rule", "limit-0")[0] += 1
    assert value(metrics, name, rule_id="rule", limit="limit-0") == 2
    stats.forget_rules(lambda rule_id: rule_id != "rule")
    assert stats.would_deny == {"other,other": [5]}


def test_transport_errors_are_reported_by_cause(metrics, stats):
    stats.transport_error("oversize")
    assert value(metrics, "rate_limiter_transport_errors_total", cause="oversize") == 1


def test_refused_page_requests_are_reported_by_cause(metrics, stats):
    stats.web_refusal("cross_site")
    assert value(metrics, "rate_limiter_web_refused_total", cause="cross_site") == 1


def test_ignored_forwarding_headers_are_reported(metrics, stats):
    stats.ignored_forwarding()
    assert value(metrics, "rate_limiter_auth_forwarding_ignored_total") == 1


async def test_every_metric_is_reported_without_names(metrics, stats):
    stats.rule_counters("r")
    stats.observed_counter("r", "day")
    stats.web_refusal("cross_site")
    stats.transport_error("oversize")
    names = {sample.name for sample in metrics.samples()}
    assert names == {definition.reported_name or definition.name for definition in DEFINITIONS}


def test_metrics_requested_twice_are_reported_once_in_the_order_requested(metrics):
    names = ["rate_limiter_active_buckets", "rate_limiter.fail_open", "rate_limiter_active_buckets"]
    assert [sample.name for sample in metrics.samples(names)] == names[:2]


def test_unknown_names_are_refused_by_place_and_not_repeated(metrics):
    with pytest.raises(InvalidInputError) as caught:
        metrics.samples(["secret-user", "rate_limiter_rules", "rate_limiter_fail_open_total"])
    assert [violation.field for violation in caught.value.violations] == ["names[0]", "names[2]"]
    assert "secret-user" not in str(caught.value)


async def test_exposition_has_every_definition_in_order(metrics):
    assert [definition for definition, _ in metrics.points()] == list(DEFINITIONS)
