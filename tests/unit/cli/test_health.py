"""`health`, `metrics` and `reset`."""

import json

import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse

from ratelimiter.v1 import ratelimiter_pb2 as pb


@pytest.mark.parametrize(
    ("health", "status"),
    [(pb.HEALTHY, 0), (pb.DEGRADED, 3), (pb.HEALTH_STATUS_UNSPECIFIED, 3)],
)
def test_only_a_healthy_node_is_status_0(ask, node, health, status):
    node.health_answer.status = health
    for options in ([], ["--json"]):
        ended = ask("health", *options)
        assert ended.status == status
        assert pb.HealthStatus.Name(health) in ended.out


def test_status_of_a_later_release_is_shown_by_number_and_is_not_healthy(ask, node):
    node.health_answer = pb.HealthResponse.FromString(b"\x08\x07")
    ended = ask("health")
    assert ended.status == 3
    assert ended.out.startswith("7\n")


def test_clustered_node_shows_its_accuracy_beside_its_bound(ask, node):
    node.metrics_answer = pb.MetricsResponse(
        metrics=[
            pb.Metric(name=f"rate_limiter_{name}", kind="gauge", value=value)
            for name, value in (
                ("cluster_nodes", 3),
                ("over_admission_ratio", 0.0123),
                ("over_admission_bound_ratio", 0.515),
            )
        ]
    )
    node.health_answer.shared_state_connected = True
    out = ask("health").out
    assert "  cluster nodes      3\n" in out
    assert "  shared state       connected\n" in out
    assert "  over-admission     1.2% of a limit at most (promised: 51.5%)\n" in out
    node.health_answer.error_rate = 0.2
    node.health_answer.shared_state_connected = False
    out = ask("health").out
    assert "  shared state       not connected\n" in out
    assert "(promised: 51.5%), fail-open answers left out\n" in out


@pytest.mark.parametrize(
    ("serving", "status"),
    [(HealthCheckResponse.SERVING, 0), (HealthCheckResponse.NOT_SERVING, 3)],
)
def test_readiness_is_independent_of_health(ask, node, serving, status):
    node.health_answer.status = pb.DEGRADED
    node.readiness.set("", serving)
    name = HealthCheckResponse.ServingStatus.Name(serving)
    ended = ask("health", "--ready")
    assert (ended.status, ended.out) == (status, f"{name}\n")
    ended = ask("health", "--ready", "--json", "--token", "of-no-use")
    assert (ended.status, json.loads(ended.out)) == (status, {"status": name})
    assert not node.seen


def test_health_shows_the_evaluated_figures(ask, node):
    node.health_answer = pb.HealthResponse(
        status=pb.DEGRADED,
        shared_state_connected=True,
        local_cache_hit_ratio=0.5,
        average_latency_ms=0.25,
        error_rate=0.125,
        node_id="node-1",
        breaker_state="half_open",
        rules_revision=7,
        transport="native",
    )
    assert ask("health").out == (
        "DEGRADED\n"
        "  node               node-1\n"
        "  transport          native\n"
        "  shared state       none: this node's memory\n"
        "  cache hit ratio    0.500 (healthy above 0.90)\n"
        "  average latency    0.250 ms (healthy below 2.0 ms)\n"
        "  fail-open answers  0.1250 (healthy below 0.01)\n"
        "  circuit breaker    half_open\n"
        "  rules revision     7\n"
    )


def test_unreported_figure_is_a_dash(ask, node):
    node.health_answer = pb.HealthResponse()
    assert "node               –\n" in ask("health").out


def test_metrics_are_a_table_with_their_labels(ask, node):
    node.metrics_answer = pb.MetricsResponse(
        metrics=[
            pb.Metric(name="a_total", kind="counter", value=3),
            pb.Metric(name="b", kind="gauge", value=0.5, labels={"y": "2", "x": "1"}),
        ]
    )
    assert ask("metrics").out == (
        'METRIC          KIND     VALUE\na_total         counter  3\nb{x="1",y="2"}  gauge    0.5\n'
    )


@pytest.mark.parametrize(
    ("histogram", "text"),
    [
        (pb.Histogram(), "no observations"),
        (pb.Histogram(upper_bounds=[1], cumulative_counts=[0, 0]), "no observations"),
        (
            pb.Histogram(upper_bounds=[0.001, 0.002], cumulative_counts=[50, 95, 100], sum=0.1),
            "100 observations, mean 0.001 s, p50 ≤ 0.001 s, p95 ≤ 0.002 s, p99 > 0.002 s",
        ),
        (
            pb.Histogram(cumulative_counts=[2], sum=1),
            "2 observations, mean 0.5 s, p50 –, p95 –, p99 –",
        ),
    ],
    ids=["no buckets", "empty", "filled", "no bounds"],
)
def test_histogram_is_shown_by_mean_and_quantiles(ask, node, histogram, text):
    node.metrics_answer = pb.MetricsResponse(
        metrics=[pb.Metric(name="h", kind="histogram", histogram=histogram)]
    )
    assert ask("metrics").out.splitlines()[1].split("histogram  ")[1] == text


def test_metrics_are_requested_by_name(ask, node):
    ask("metrics", "a_total", "b")
    ask("metrics")
    assert [list(call.request.names) for call in node.seen] == [["a_total", "b"], []]


def test_json_metrics_are_the_message(ask, node):
    node.metrics_answer = pb.MetricsResponse(metrics=[pb.Metric(name="a_total", value=3)])
    metrics = json.loads(ask("metrics", "--json").out)["metrics"]
    assert (metrics[0]["name"], metrics[0]["value"]) == ("a_total", 3.0)


@pytest.mark.parametrize(
    ("options", "out"), [([], "reset ip 192.0.2.7 /login\n"), (["--json"], "{}\n")]
)
def test_reset_names_the_bucket(ask, node, options, out):
    assert ask("reset", "ip", "192.0.2.7", "/login", *options) == (0, out, "")
    assert node.seen[0].request == pb.ResetRequest(
        identifier="192.0.2.7", identifier_type="ip", endpoint="/login"
    )


def test_reset_of_a_combination_names_all_identities(ask, node):
    assert ask("reset", "user", "ada", "**", "--also", "ip=::1") == (
        0,
        "reset user ada ip ::1 **\n",
        "",
    )
    assert node.seen[0].request == pb.ResetRequest(
        identifier="ada",
        identifier_type="user",
        endpoint="**",
        also=[pb.Identity(identifier_type="ip", identifier="::1")],
    )
