"""Evaluates whether the node is HEALTHY: the specification's four conditions over the last 60 seconds.

Reads counters of the check path. DEGRADED informs people and alerts; it never takes the node out of service.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, cast, get_args

from ratelimitd.clock import Clock
from ratelimitd.cluster.node import SharedStateStatus
from ratelimitd.counters import CheckStats
from ratelimitd.model import US_PER_S
from ratelimitd.observe.history import Totals

MIN_CACHE_HIT_RATIO: Final = 0.90
"""The hit ratio must be above this (specification, health status)."""

MIN_CHECKS_TO_TELL: Final = 100
"""Below this, hit ratio and average latency count as met, as without traffic: a node's first checks miss by necessity,
and one that waits for the shared state outweighs many."""

MAX_AVERAGE_LATENCY_MS: Final = 2.0
"""The average latency of a check must be below this (specification, health status)."""

MAX_ERROR_RATE: Final = 0.01
"""The share of checks failed open must be below this (specification, health status)."""

MS_PER_S: Final = 1000


BreakerStateName = Literal["closed", "open", "half_open"]
"""The states of the circuit breaker, by wire name."""

BREAKER_STATES: Final = get_args(BreakerStateName)

EMBEDDED: Final = SharedStateStatus(connected=True, breaker_state="closed")
"""Status of a node whose own memory is the shared state, which is always available."""


@dataclass(frozen=True, slots=True)
class HealthReport:
    """One evaluation of the four conditions of the specification over the last 60 s.

    ``healthy`` is their conjunction. ``local_cache_hit_ratio`` and ``error_rate`` are fractions from 0 to 1,
    ``average_latency_ms`` is in milliseconds; ``rules_revision`` is 0 before the first rule book. ``hit_ratio_met``,
    ``latency_met``: that condition holds, or there were too few checks to evaluate it.
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


WINDOW_S: Final = 60
"""Period over which health is judged; the specification leaves it open."""


class RollingWindow:
    """Samples of the last :data:`WINDOW_S` seconds, and the one before them as the baseline."""

    __slots__ = ("_samples",)

    def __init__(self, now_us: int, totals: Totals) -> None:
        self._samples = deque([(now_us, totals)])

    def sample(self, now_us: int, totals: Totals) -> None:
        """Add a sample; called about once a second with monotonic µs.

        Drops samples that no later call can need, which bounds memory.
        """
        self._samples.append((now_us, totals))
        start_us = now_us - WINDOW_S * US_PER_S
        while self._samples[1][0] <= start_us:
            self._samples.popleft()

    def growth(self, now_us: int, totals: Totals) -> Totals:
        """Return the growth of ``totals`` in the last :data:`WINDOW_S` seconds, or since the start if that is shorter.

        The window begins at a sample, so it is up to one sampling interval longer.
        """
        start_us = now_us - WINDOW_S * US_PER_S
        ground = self._samples[0][1]
        for at_us, then in self._samples:
            if at_us > start_us:
                break
            ground = then
        return totals.since(ground)


class Health:
    """The measurements of one node and the resulting health status."""

    def __init__(
        self,
        *,
        node_id: str,
        stats: CheckStats,
        clock: Clock,
        rules_revision: Callable[[], int],
        shared_state: Callable[[], SharedStateStatus] = lambda: EMBEDDED,
        transport: str = "",
    ) -> None:
        self._node_id = node_id
        self._stats = stats
        self._clock = clock
        self._rules_revision = rules_revision
        self.shared_state = shared_state
        """Returns whether the shared state is reachable, and the state of its circuit breaker."""
        self._transport = transport
        self._window = RollingWindow(clock.monotonic_us(), Totals.of(stats))

    def sample(self) -> None:
        """Sample the counters; called about once a second."""
        self._window.sample(self._clock.monotonic_us(), Totals.of(self._stats))

    def cache_hit_ratio(self) -> float:
        """Look-ups that found a bucket / look-ups, over the last 60 s; 1 without look-ups."""
        return _hit_ratio(self._recent())

    def report(self) -> HealthReport:
        """Evaluate the four conditions. With few or no checks, a ratio counts as met."""
        recent = self._recent()
        shared_state = self.shared_state()
        hit_ratio = _hit_ratio(recent)
        latency_count = sum(recent.latency_counts)
        latency_ms = MS_PER_S * recent.latency_sum_s / max(1, latency_count)
        error_rate = recent.fail_open / max(1, recent.allowed + recent.blocked)
        hit_ratio_met = hit_ratio > MIN_CACHE_HIT_RATIO or recent.looked < MIN_CHECKS_TO_TELL
        latency_met = latency_ms < MAX_AVERAGE_LATENCY_MS or latency_count < MIN_CHECKS_TO_TELL
        return HealthReport(
            healthy=shared_state.connected
            and hit_ratio_met
            and latency_met
            and error_rate < MAX_ERROR_RATE,
            shared_state_connected=shared_state.connected,
            local_cache_hit_ratio=hit_ratio,
            hit_ratio_met=hit_ratio_met,
            average_latency_ms=latency_ms,
            latency_met=latency_met,
            error_rate=error_rate,
            node_id=self._node_id,
            breaker_state=cast("BreakerStateName", shared_state.breaker_state),
            rules_revision=self._rules_revision(),
            transport=self._transport,
        )

    def _recent(self) -> Totals:
        return self._window.growth(self._clock.monotonic_us(), Totals.of(self._stats))


def _hit_ratio(recent: Totals) -> float:
    if not recent.looked:
        return 1.0
    # A miss counts at the look-up, its check at the answer, and a failed check is subtracted again. While some are in
    # progress, the difference may be negative or exceed the look-ups.
    return min(max(0.0, recent.known / recent.looked), 1.0)
