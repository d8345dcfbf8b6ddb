"""The last 60 seconds of counters: differences between samples taken once a second.

Pure: never reads a clock or a counter; both are handed in.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple, Self

from ratelimitd.model import US_PER_S
from ratelimitd.stats import CheckStats

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
