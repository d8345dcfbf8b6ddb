"""``ratelimitd health``, ``metrics`` and ``reset``: the state of a node, and the reset of a bucket."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated

import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ratelimitd.cli.check import (
    AlsoOption,
    EndpointArgument,
    IdentifierArgument,
    TypeArgument,
    further,
)
from ratelimitd.cli.client_options import EXIT_NO, Target, asks_node
from ratelimitd.cli.output import Output, enum_name
from ratelimitd.cli.top.reading import EXCESS, EXCESS_BOUND, NODES, QUANTILES, quantile_s
from ratelimitd.errors import printable
from ratelimitd_client import open_channel
from ratelimiter.v1 import ratelimiter_pb2 as pb


@asks_node
def health(
    target: Target,
    *,
    ready: Annotated[
        bool,
        typer.Option(
            "--ready",
            help="Show only whether the node is ready for checks, for probes. Needs no token.",
        ),
    ] = False,
) -> None:
    """Show whether a node is HEALTHY or DEGRADED, and why.

    Exit status: 0 when it is HEALTHY, 3 when it is not; with --ready 0 when it is ready, also while it is DEGRADED.

    Example:
      ratelimitd health
      ratelimitd health --target limiter.internal:9090 --ca ca.pem --token-file admin.token
      ratelimitd health --ready
    """
    if ready:
        _readiness(target)
        return
    with target.client() as client:
        answer = client.health()
        if target.output.as_json:
            target.output.message(answer)
        else:
            metrics = client.metrics((NODES, EXCESS, EXCESS_BOUND))
            _print_health(answer, metrics, target.output)
    if answer.status != pb.HEALTHY:
        raise typer.Exit(EXIT_NO)


@asks_node
def metrics(
    target: Target,
    *,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Only these metrics."),
    ] = None,
) -> None:
    """Show the metrics of a node.

    Example:
      ratelimitd metrics
      ratelimitd metrics rate_limiter_requests_allowed_total --json
    """
    with target.client() as client:
        answer = client.metrics(names or ())
    if target.output.as_json:
        target.output.message(answer)
    else:
        rows = [(_series(metric), metric.kind, _value(metric)) for metric in answer.metrics]
        target.output.table(("METRIC", "KIND", "VALUE"), rows)


@asks_node
def reset(
    target: Target,
    *,
    identifier_type: TypeArgument,
    identifier: IdentifierArgument,
    endpoint: EndpointArgument,
    also: AlsoOption = None,
) -> None:
    """Reset one bucket: of an identifier, or a combination of several, on an endpoint.

    ENDPOINT '**' is the bucket over all endpoints; TYPE all, with the IDENTIFIER '', that of everybody.

    Example:
      ratelimitd reset user alice /orders
      ratelimitd reset user alice /orders --also ip=192.0.2.7
    """
    others = further(also)
    with target.client() as client:
        client.reset(identifier, identifier_type, endpoint, also=others)
    identities = {identifier_type: identifier, **others}
    named = " ".join(f"{kind} {printable(name)}" for kind, name in identities.items())
    done = f"reset {named} {printable(endpoint)}"
    target.output.answer({}, done)


def _readiness(target: Target) -> None:
    """Query the standard health service, as a load balancer does."""
    # A bare channel sends no token.
    with open_channel(target.address, tls=target.tls) as channel, target.explained():
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        # The package's stubs do not declare it.
        answer = stub.Check(request, timeout=target.timeout_s)  # type: ignore[attr-defined]
    serving = enum_name(health_pb2.HealthCheckResponse.ServingStatus, answer.status)
    target.output.answer(answer, serving)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise typer.Exit(EXIT_NO)


def _print_health(answer: pb.HealthResponse, metrics: pb.MetricsResponse, output: Output) -> None:
    good = answer.status == pb.HEALTHY
    output.line(
        output.styled(enum_name(pb.HealthStatus, answer.status), "good" if good else "warn")
    )
    values = {metric.name: metric.value for metric in metrics.metrics}
    reached = "connected" if answer.shared_state_connected else "not connected"
    # The bounds are the specification's; the node evaluates them, this only shows the result.
    output.pairs(
        [
            ("node", answer.node_id or "–"),
            ("transport", answer.transport or "–"),
            ("shared state", reached if NODES in values else "none: this node's memory"),
            ("cache hit ratio", f"{answer.local_cache_hit_ratio:.3f} (healthy above 0.90)"),
            ("average latency", f"{answer.average_latency_ms:.3f} ms (healthy below 2.0 ms)"),
            ("fail-open answers", f"{answer.error_rate:.4f} (healthy below 0.01)"),
            ("circuit breaker", answer.breaker_state or "–"),
            ("rules revision", str(answer.rules_revision)),
            *_cluster(values, fails_open=answer.error_rate > 0),
        ]
    )


def _cluster(values: Mapping[str, float], *, fails_open: bool) -> Iterator[tuple[str, str]]:
    """Yield rows about the cluster; none for an embedded node."""
    if NODES in values:
        excess, promised = values.get(EXCESS, 0.0), values.get(EXCESS_BOUND, 0.0)
        shown = f"{excess:.1%} of a limit at most (promised: {promised:.1%})"
        yield "cluster nodes", f"{values[NODES]:.0f}"
        yield "over-admission", shown + (", fail-open answers left out" if fails_open else "")


def _series(metric: pb.Metric) -> str:
    labels = ",".join(f'{name}="{value}"' for name, value in sorted(metric.labels.items()))
    return f"{metric.name}{{{labels}}}" if labels else metric.name


def _value(metric: pb.Metric) -> str:
    if not metric.HasField("histogram"):
        return f"{metric.value:.12g}"
    counts = metric.histogram.cumulative_counts
    total = counts[-1] if counts else 0
    if not total:
        return "no observations"
    quantiles = ", ".join(_quantiles(metric.histogram))
    return f"{total} observations, mean {metric.histogram.sum / total:.3g} s, {quantiles}"


def _quantiles(histogram: pb.Histogram) -> Iterator[str]:
    """Yield the bucket of each quantile: a histogram has only upper bounds."""
    bounds = histogram.upper_bounds
    last = f"> {bounds[-1]:g} s" if bounds else "–"
    for share in QUANTILES:
        bound_s = quantile_s(bounds, histogram.cumulative_counts, share)
        yield f"p{share * 100:g} {f'≤ {bound_s:g} s' if math.isfinite(bound_s) else last}"
