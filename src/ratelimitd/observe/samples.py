"""The values in which the node reports on itself: its health and its metrics.

Never measures, never reads a clock and imports nothing but the standard library: ``observe/`` fills these in, the
services and the page render them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

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
