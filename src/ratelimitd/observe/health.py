"""Whether the node is HEALTHY: the specification's four conditions over the last 60 seconds.

Never measures: it reads the counters that the check path moved. DEGRADED is a judgement for people and alerts; it
never takes the node out of service.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from ratelimitd.clock import Clock
from ratelimitd.counters import CheckStats
from ratelimitd.observe.samples import BreakerStateName, HealthReport, RollingWindow, Totals

MIN_CACHE_HIT_RATIO: Final = 0.90
"""The hit ratio must be above this (specification, health status)."""

MIN_CHECKS_TO_TELL: Final = 100
"""With fewer the hit ratio and the average latency say nothing yet, and count as met as they do without traffic: the
first checks of a node are of buckets that it cannot know, and one that waits for the shared state outweighs many."""

MAX_AVERAGE_LATENCY_MS: Final = 2.0
"""The average latency of a check must be below this (specification, health status)."""

MAX_ERROR_RATE: Final = 0.01
"""The share of checks answered fail-open must be below this (specification, health status)."""

MS_PER_S: Final = 1000


class SharedStateStatus(NamedTuple):
    """What the breaker knows of the shared state; ``retry_s``: when an open one is tried again, in seconds from now."""

    connected: bool
    breaker_state: BreakerStateName
    retry_s: float = 0.0


def embedded() -> SharedStateStatus:
    """The status of a node whose own memory is the shared state: it cannot be away."""
    return SharedStateStatus(connected=True, breaker_state="closed")


class Health:
    """The measurements of one node and the verdict on them."""

    def __init__(
        self,
        *,
        node_id: str,
        stats: CheckStats,
        clock: Clock,
        rules_revision: Callable[[], int],
        shared_state: Callable[[], SharedStateStatus] = embedded,
        transport: str = "",
    ) -> None:
        self._node_id = node_id
        self._stats = stats
        self._clock = clock
        self._rules_revision = rules_revision
        self._shared_state = shared_state
        self._transport = transport
        self._window = RollingWindow(clock.monotonic_us(), Totals.of(stats))

    def sample(self) -> None:
        """Remember the counters of this moment; call it about once a second."""
        self._window.sample(self._clock.monotonic_us(), Totals.of(self._stats))

    def cache_hit_ratio(self) -> float:
        """Checks whose bucket was known / checks that looked for one, over the last 60 s; 1 when none looked."""
        return _hit_ratio(self._recent())

    def shared_state(self) -> SharedStateStatus:
        """Whether the shared state is reached, and the state of the breaker before it."""
        return self._shared_state()

    def report(self) -> HealthReport:
        """Evaluate the four conditions. A ratio with no traffic, or with next to none, counts as met."""
        recent = self._recent()
        shared_state = self._shared_state()
        hit_ratio = _hit_ratio(recent)
        latency_ms = MS_PER_S * recent.latency_sum_s / max(1, recent.latency_count)
        error_rate = recent.fail_open / max(1, recent.checks)
        hit_ratio_met = (
            hit_ratio > MIN_CACHE_HIT_RATIO or recent.buckets_looked < MIN_CHECKS_TO_TELL
        )
        latency_met = (
            latency_ms < MAX_AVERAGE_LATENCY_MS or recent.latency_count < MIN_CHECKS_TO_TELL
        )
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
            breaker_state=shared_state.breaker_state,
            rules_revision=self._rules_revision(),
            transport=self._transport,
        )

    def _recent(self) -> Totals:
        return self._window.growth(self._clock.monotonic_us(), Totals.of(self._stats))


def _hit_ratio(recent: Totals) -> float:
    if not recent.buckets_looked:
        return 1.0
    # A miss counts when it is asked for, its check when it is answered, and one that fails is taken back: while some
    # are under way there may be fewer known than none, or more than there are.
    return min(max(0.0, recent.buckets_known / recent.buckets_looked), 1.0)
