"""The RateLimiterHealth service: how the node is, what it has counted, and the reset of one identifier.

Never measures: the numbers are those of ``observe/``, so that GetMetrics and ``/metrics`` cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from ratelimitd.errors import FieldViolation, InvalidInputError
from ratelimitd.model import IdentifierType
from ratelimitd.observe.samples import HealthReport, MetricSample
from ratelimitd.rpc.interface import Call, Methods
from ratelimitd.services.convert import target_of
from ratelimitd.services.wire import parse_empty, parse_metrics, parse_reset
from ratelimiter.v1 import ratelimiter_pb2

SERVICE: Final = "ratelimiter.v1.RateLimiterHealth"

MAX_METRIC_NAMES: Final = 1_000
"""Names in one request; there are some thirty metrics."""

_EMPTY: Final = b""
"""``google.protobuf.Empty`` on the wire."""


class Resetter(Protocol):
    """What this service needs of a :class:`ratelimitd.limiter.Limiter`."""

    async def reset(
        self, identifier: bytes, identifier_type: IdentifierType, endpoint: str
    ) -> None:
        """Let the identifier start afresh; raises ``StoreUnavailableError`` when that could not be made durable."""


class HealthService:
    """Handlers of health, metrics and reset.

    ``report`` evaluates the node's health now (:meth:`ratelimitd.observe.health.Health.report`). ``samples`` reads the
    metrics of these names, all for none, and raises ``InvalidInputError`` for an unknown one, its field
    ``names[i]`` (:meth:`ratelimitd.observe.metrics.Metrics.samples`). Both are cheap and never wait.
    """

    def __init__(
        self,
        limiter: Resetter,
        *,
        report: Callable[[], HealthReport],
        samples: Callable[[Sequence[str]], Sequence[MetricSample]],
    ) -> None:
        self._limiter = limiter
        self._report = report
        self._samples = samples

    def methods(self) -> Methods:
        """The handlers by path."""
        return Methods(
            unary={
                f"/{SERVICE}/GetHealthStatus": self.get_health_status,
                f"/{SERVICE}/GetMetrics": self.get_metrics,
                f"/{SERVICE}/ResetRateLimit": self.reset_rate_limit,
            }
        )

    def get_health_status(self, data: bytes, _call: Call) -> bytes:
        """HEALTHY or DEGRADED, with the measurements behind it."""
        parse_empty(data)
        return _health_response_of(self._report()).SerializeToString()

    def get_metrics(self, data: bytes, _call: Call) -> bytes:
        """The metrics that were asked for, or all."""
        raw_names = parse_metrics(data).names
        if len(raw_names) > MAX_METRIC_NAMES:
            violation = FieldViolation("names", f"must be at most {MAX_METRIC_NAMES} names")
            raise InvalidInputError(violation)
        # A name that is no UTF-8 is as unknown as any other.
        samples = self._samples([name.decode("utf-8", "replace") for name in raw_names])
        answer = ratelimiter_pb2.MetricsResponse(metrics=map(_metric_of, samples))
        return answer.SerializeToString()

    async def reset_rate_limit(self, data: bytes, _call: Call) -> bytes:
        """Let one identifier start afresh on one endpoint. Resetting what does not exist is fine."""
        await self._limiter.reset(*target_of(parse_reset(data)))
        return _EMPTY


def _health_response_of(report: HealthReport) -> ratelimiter_pb2.HealthResponse:
    return ratelimiter_pb2.HealthResponse(
        status=ratelimiter_pb2.HEALTHY if report.healthy else ratelimiter_pb2.DEGRADED,
        shared_state_connected=report.shared_state_connected,
        local_cache_hit_ratio=report.local_cache_hit_ratio,
        average_latency_ms=report.average_latency_ms,
        error_rate=report.error_rate,
        node_id=report.node_id,
        breaker_state=report.breaker_state,
        rules_revision=report.rules_revision,
    )


def _metric_of(sample: MetricSample) -> ratelimiter_pb2.Metric:
    metric = ratelimiter_pb2.Metric(
        name=sample.name, kind=sample.kind, value=sample.value, labels=sample.labels
    )
    if sample.histogram is not None:
        metric.histogram.upper_bounds.extend(sample.histogram.upper_bounds)
        metric.histogram.cumulative_counts.extend(sample.histogram.cumulative_counts)
        metric.histogram.sum = sample.histogram.sum
    return metric
