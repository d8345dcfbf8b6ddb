"""The RateLimiterHealth service: health, metrics, explanations of checks, and resets.

The numbers are those of ``observe/``, so that GetMetrics and ``/metrics`` agree. The log of a reset names its actor and
rules, never the identifier.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice
from typing import Final

from google.protobuf.empty_pb2 import Empty

from ratelimitd.errors import FieldViolation, InvalidInputError
from ratelimitd.limiter.dry_run import DryRun
from ratelimitd.limiter.limiter import Limiter
from ratelimitd.observe.denials import DeniedEndpoint
from ratelimitd.observe.health import HealthReport
from ratelimitd.observe.metrics import MetricSample
from ratelimitd.rpc.interface import Call, Methods, StatusCode
from ratelimitd.services.convert import (
    CONTRACT_IDENTITIES,
    Identities,
    Target,
    check_of,
    explanation_of,
    target_of,
)
from ratelimitd.services.errors import rich_error
from ratelimitd.services.wire import EMPTY, parse, parse_check
from ratelimiter.v1 import ratelimiter_pb2

SERVICE: Final = "ratelimiter.v1.RateLimiterHealth"

MAX_METRIC_NAMES: Final = 1_000
"""Names in one request; there are about thirty metrics."""

PIECE_SAMPLES: Final = 100
"""Samples encoded per event-loop iteration: about 0.5 ms. With 1,000 rules there are 2,000, which took 7 ms."""

MAX_RESETS: Final = 100
"""Resets in progress, which are written to disk one at a time. Further ones are refused, not queued."""

_log = logging.getLogger(__name__)


class HealthService:
    """Handlers of health, metrics and reset.

    ``report`` evaluates the node's health now (:meth:`ratelimitd.observe.health.Health.report`). ``samples`` reads the
    named metrics, or all without names, and raises ``InvalidInputError`` with field ``names[i]`` for an unknown one
    (:meth:`ratelimitd.observe.metrics.Metrics.samples`). A report and one sample are cheap. ``unmatched`` lists the
    endpoints of checks without a rule (:meth:`ratelimitd.observe.live.Live.unmatched`). ``actor`` returns the actor of
    a reset for the log.
    """

    def __init__(
        self,
        limiter: Limiter,
        *,
        dry_run: DryRun,
        report: Callable[[], HealthReport],
        samples: Callable[[Sequence[str]], Iterable[MetricSample]],
        unmatched: Callable[[], Awaitable[Sequence[DeniedEndpoint]]],
        actor: Callable[[Call], str],
        identities: Identities = CONTRACT_IDENTITIES,
    ) -> None:
        self._identities = identities
        self._limiter = limiter
        self._dry_run = dry_run
        self._report = report
        self._samples = samples
        self._unmatched = unmatched
        self._actor = actor
        self._resets: set[asyncio.Task[None]] = set()

    def methods(self) -> Methods:
        """Return the handlers by path."""
        return Methods(
            unary={
                f"/{SERVICE}/GetHealthStatus": self.get_health_status,
                f"/{SERVICE}/GetMetrics": self.get_metrics,
                f"/{SERVICE}/ResetRateLimit": self.reset_rate_limit,
                f"/{SERVICE}/ExplainRateLimit": self.explain_rate_limit,
                f"/{SERVICE}/ListUnmatched": self.list_unmatched,
            }
        )

    def get_health_status(self, data: bytes, _call: Call) -> bytes:
        """Return HEALTHY or DEGRADED, with the measurements behind it."""
        parse(Empty, data)
        return _health_response_of(self._report()).SerializeToString()

    async def get_metrics(self, data: bytes, _call: Call) -> bytes:
        """Return the requested metrics, or all. Other calls run between two pieces of the answer."""
        raw_names = parse(ratelimiter_pb2.MetricsRequest, data).names
        if len(raw_names) > MAX_METRIC_NAMES:
            violation = FieldViolation("names", f"must be at most {MAX_METRIC_NAMES} names")
            raise InvalidInputError(violation)
        # A name that is not UTF-8 is an unknown name.
        samples = iter(self._samples([name.decode("utf-8", "replace") for name in raw_names]))
        pieces = []
        while piece := [*map(_metric_of, islice(samples, PIECE_SAMPLES))]:
            pieces.append(ratelimiter_pb2.MetricsResponse(metrics=piece).SerializeToString())
            await asyncio.sleep(0)
        # The concatenation of messages is one message with the repeated fields of all of them.
        return b"".join(pieces)

    async def reset_rate_limit(self, data: bytes, call: Call) -> bytes:
        """Reset the buckets of one identifier on one endpoint; has no effect on missing ones.

        Raises:
            RpcError: RESOURCE_EXHAUSTED while ``MAX_RESETS`` are in progress.
        """
        target = target_of(parse(ratelimiter_pb2.ResetRequest, data), self._identities)
        if len(self._resets) >= MAX_RESETS:
            message = f"{MAX_RESETS} resets are in progress: try again"
            raise rich_error(StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_RESETS", message)
        # A task of its own, so that a reset whose caller leaves still counts until it is done, and is logged.
        reset = asyncio.create_task(self._reset(target, self._actor(call)))
        self._resets.add(reset)
        reset.add_done_callback(self._forget)
        await asyncio.wait([reset])
        reset.result()
        return EMPTY

    async def explain_rate_limit(self, data: bytes, _call: Call) -> bytes:
        """Return the answer that a check would get, and the reasons; charges nothing."""
        check = check_of(parse_check(data), self._identities)
        return explanation_of(check, await self._dry_run.explain(check)).SerializeToString()

    async def list_unmatched(self, data: bytes, _call: Call) -> bytes:
        """Return the endpoints of checks without a rule, those with the most checks first."""
        parse(ratelimiter_pb2.ListUnmatchedRequest, data)
        return ratelimiter_pb2.ListUnmatchedResponse(
            endpoints=[
                ratelimiter_pb2.UnmatchedEndpoint(
                    endpoint=one.endpoint, checks_per_minute=round(one.per_minute, 1)
                )
                for one in await self._unmatched()
            ]
        ).SerializeToString()

    def _forget(self, reset: asyncio.Task[None]) -> None:
        self._resets.discard(reset)
        if not reset.cancelled():
            reset.exception()  # marks it as retrieved: the caller may have left

    async def _reset(self, target: Target, actor: str) -> None:
        rules = await self._limiter.reset(*target)
        if rules:
            ids = ", ".join(rule.id for rule in rules)
            _log.info("%s reset one identifier under the rules %s", actor, ids)


def _health_response_of(report: HealthReport) -> ratelimiter_pb2.HealthResponse:
    status = ratelimiter_pb2.HEALTHY if report.healthy else ratelimiter_pb2.DEGRADED
    _, *names = ratelimiter_pb2.HealthResponse.DESCRIPTOR.fields_by_name
    fields = {name: getattr(report, name) for name in names}
    return ratelimiter_pb2.HealthResponse(status=status, **fields)


def _metric_of(sample: MetricSample) -> ratelimiter_pb2.Metric:
    metric = ratelimiter_pb2.Metric(
        name=sample.name, kind=sample.kind, value=sample.value, labels=sample.labels
    )
    if sample.histogram is not None:
        metric.histogram.upper_bounds.extend(sample.histogram.upper_bounds)
        metric.histogram.cumulative_counts.extend(sample.histogram.cumulative_counts)
        metric.histogram.sum = sample.histogram.sum
    return metric
