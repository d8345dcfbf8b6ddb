"""The values in which the node reports on itself: its health and its metrics.

Never measures, never reads a clock and imports nothing but the standard library: ``observe/`` fills these in, the
services and the page render them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, Protocol, Self

from ratelimitd.counters import LATENCY_BOUNDS_S, CheckStats
from ratelimitd.model import US_PER_S

MetricKind = Literal["counter", "gauge", "histogram"]
"""The kinds of metric of the contract, by the name they have on the wire."""

BreakerStateName = Literal["closed", "open", "half_open"]
"""The states of the circuit breaker, by the name they have on the wire."""


@dataclass(frozen=True, slots=True)
class HistogramSample:
    """One histogram.

    ``upper_bounds`` in the metric's unit (seconds), rising, without +Inf; ``cumulative_counts`` is one longer, its
    last entry (+Inf) is the number of observations; ``sum`` in the metric's unit.
    """

    upper_bounds: tuple[float, ...]
    cumulative_counts: tuple[int, ...]
    sum: float


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One metric at one moment.

    ``name`` is the specification's exact name (``rate_limiter.fail_open`` included); ``value`` is that of a counter
    or gauge and 0 for a histogram, which has ``histogram`` instead. Label values come from closed sets only.
    """

    name: str
    kind: MetricKind
    value: float = 0.0
    histogram: HistogramSample | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HealthReport:
    """One evaluation of the four conditions of the specification over the last 60 s.

    ``healthy`` is their conjunction. ``local_cache_hit_ratio`` and ``error_rate`` are fractions from 0 to 1,
    ``average_latency_ms`` is in milliseconds; ``rules_revision`` is 0 before the first rule book is there.
    ``hit_ratio_met``, ``latency_met``: that condition holds, perhaps only because there were too few checks to tell.
    """

    healthy: bool
    shared_state_connected: bool
    local_cache_hit_ratio: float
    average_latency_ms: float
    error_rate: float
    node_id: str
    breaker_state: BreakerStateName
    rules_revision: int
    transport: str = ""
    hit_ratio_met: bool = True
    latency_met: bool = True


class TransportStatus(Protocol):
    """What a transport is busy with at the moment: ``rpc.interface.InProgress``, which need not know of this module."""

    @property
    def unary(self) -> int:
        """Unary calls whose handler is at work."""

    @property
    def streams(self) -> int:
        """Streaming calls."""

    @property
    def connections(self) -> int | None:
        """Open connections."""

    @property
    def http2_streams(self) -> int | None:
        """Requests not answered to their end."""


# Percentiles of the latency histogram, as far as its buckets can tell: within one it counts as evenly spread. Pure.


def percentile_s(counts: Sequence[int], share: float) -> float | None:
    """The latency in seconds that ``share`` (0 to 1) of the checks did not exceed; ``None`` without any.

    ``counts`` are those of :attr:`ratelimitd.counters.CheckStats.latency_counts`, or what they grew by. Above the last
    bound nothing is known, so that bound is the answer.
    """
    rank = share * sum(counts)
    if not rank:
        return None
    below, lower_s = 0, 0.0
    for count, upper_s in zip(counts, LATENCY_BOUNDS_S, strict=False):
        if count and below + count >= rank:
            return lower_s + (upper_s - lower_s) * (rank - below) / count
        below, lower_s = below + count, upper_s
    return lower_s


# The last 60 seconds of counters: differences between samples taken once a second.
#
# Pure: never reads a clock or a counter; both are handed in.

WINDOW_S: Final = 60
"""The stretch over which health is judged; the specification gives the conditions and leaves the stretch open."""


class Totals(NamedTuple):
    """The cumulative counters that health is computed from, or what they grew by. ``latency_sum_s`` in seconds."""

    checks: int = 0
    fail_open: int = 0
    buckets_looked: int = 0
    buckets_known: int = 0
    latency_count: int = 0
    latency_sum_s: float = 0.0

    @classmethod
    def of(cls, stats: CheckStats) -> Self:
        """The totals of a process by now."""
        return cls(
            checks=stats.allowed_total + stats.blocked_total,
            fail_open=stats.fail_open_breaker_total + stats.fail_open_error_total,
            buckets_looked=stats.bucket_looked_total,
            buckets_known=stats.bucket_known_total,
            latency_count=sum(stats.latency_counts),
            latency_sum_s=stats.latency_sum_s,
        )

    def since(self, earlier: Totals) -> Totals:
        """What was added after ``earlier``."""
        return Totals._make(now - then for now, then in zip(self, earlier, strict=True))


class RollingWindow:
    """Samples of the last :data:`WINDOW_S` seconds, and the one before them as the ground to subtract from."""

    __slots__ = ("_samples",)

    def __init__(self, now_us: int, totals: Totals) -> None:
        self._samples = deque([(now_us, totals)])

    def sample(self, now_us: int, totals: Totals) -> None:
        """Keep one sample; call it about once a second with monotonic µs.

        Memory is bounded by the window: samples that no later question can need are dropped.
        """
        self._samples.append((now_us, totals))
        start_us = now_us - WINDOW_S * US_PER_S
        while self._samples[1][0] <= start_us:
            self._samples.popleft()

    def growth(self, now_us: int, totals: Totals) -> Totals:
        """What ``totals`` grew by in the last :data:`WINDOW_S` seconds, or since the start when that is shorter.

        The window begins at a sample, so it is up to one sampling interval longer.
        """
        start_us = now_us - WINDOW_S * US_PER_S
        ground = self._samples[0][1]
        for at_us, then in self._samples:
            if at_us > start_us:
                break
            ground = then
        return totals.since(ground)
