"""The last 15 minutes of a node: a sample every two seconds, computed from cumulative counters.

Reads no clock and no counter: values are passed in. See ADR 0029.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from ratelimitd.clock import Clock
from ratelimitd.counters import LATENCY_BOUNDS_S, CheckStats
from ratelimitd.model import US_PER_MS, US_PER_S

SAMPLE_S: Final = 2.0

KEPT_S: Final = 900

MAX_SAMPLES: Final = int(KEPT_S / SAMPLE_S)


class Sample(NamedTuple):
    """One node, or the sum of all, over about :data:`SAMPLE_S` seconds.

    ``at_ms`` is the end of the stretch in ms since the Unix epoch. The first five are checks per second: ``looked`` are
    those that looked for a bucket, and ``known`` those of them that found it. ``latency_counts`` is what the histogram
    of :class:`ratelimitd.counters.CheckStats` grew by.
    """

    at_ms: int
    allowed_per_s: float = 0.0
    blocked_per_s: float = 0.0
    fail_open_per_s: float = 0.0
    looked_per_s: float = 0.0
    known_per_s: float = 0.0
    latency_counts: tuple[int, ...] = (0,) * (len(LATENCY_BOUNDS_S) + 1)
    buckets: int = 0
    memory_bytes: int = 0
    loop_lag_s: float = 0.0

    @property
    def hit_ratio(self) -> float | None:
        """Known buckets / look-ups; ``None`` without look-ups."""
        return min(1.0, self.known_per_s / self.looked_per_s) if self.looked_per_s else None

    def percentile_ms(self, share: float) -> float | None:
        """Return the latency that ``share`` (0 to 1) of the checks did not exceed; ``None`` without checks."""
        latency_s = percentile_s(self.latency_counts, share)
        return None if latency_s is None else 1_000 * latency_s


def summed(samples: Sequence[Sample]) -> Sample:
    """Add up samples of at least one node; the loop lag is the largest."""
    return Sample(
        at_ms=max(sample.at_ms for sample in samples),
        allowed_per_s=sum(sample.allowed_per_s for sample in samples),
        blocked_per_s=sum(sample.blocked_per_s for sample in samples),
        fail_open_per_s=sum(sample.fail_open_per_s for sample in samples),
        looked_per_s=sum(sample.looked_per_s for sample in samples),
        known_per_s=sum(sample.known_per_s for sample in samples),
        latency_counts=tuple(
            map(sum, zip(*(sample.latency_counts for sample in samples), strict=True))
        ),
        buckets=sum(sample.buckets for sample in samples),
        memory_bytes=sum(sample.memory_bytes for sample in samples),
        loop_lag_s=max(sample.loop_lag_s for sample in samples),
    )


class _Totals(NamedTuple):
    """Counters of :class:`ratelimitd.counters.CheckStats` at one moment."""

    allowed: int
    blocked: int
    fail_open: int
    looked: int
    known: int
    latency_counts: tuple[int, ...]

    @classmethod
    def of(cls, stats: CheckStats) -> _Totals:
        return cls(
            stats.allowed_total,
            stats.blocked_total,
            stats.fail_open_breaker_total + stats.fail_open_error_total,
            stats.bucket_looked_total,
            stats.bucket_known_total,
            tuple(stats.latency_counts),
        )


class Sampler:
    """Creates the samples of this node; the callables return current values."""

    def __init__(
        self,
        stats: CheckStats,
        clock: Clock,
        *,
        buckets: Callable[[], int],
        memory_bytes: Callable[[], int],
        loop_lag_s: Callable[[], float],
    ) -> None:
        self._stats = stats
        self._clock = clock
        self._buckets = buckets
        self._memory_bytes = memory_bytes
        self._loop_lag_s = loop_lag_s
        self._before_us = clock.monotonic_us()
        self._before = _Totals.of(stats)

    def sample(self) -> Sample:
        """Return the sample since the last call, or since the start."""
        now_us, now = self._clock.monotonic_us(), _Totals.of(self._stats)
        then_us, then = self._before_us, self._before
        self._before_us, self._before = now_us, now
        elapsed_s = max(1, now_us - then_us) / US_PER_S
        return Sample(
            at_ms=self._clock.now_us() // US_PER_MS,
            allowed_per_s=(now.allowed - then.allowed) / elapsed_s,
            blocked_per_s=(now.blocked - then.blocked) / elapsed_s,
            fail_open_per_s=(now.fail_open - then.fail_open) / elapsed_s,
            looked_per_s=(now.looked - then.looked) / elapsed_s,
            # A miss counts when it is asked for, and its check when it is answered.
            known_per_s=max(0, now.known - then.known) / elapsed_s,
            latency_counts=tuple(
                after - before
                for after, before in zip(now.latency_counts, then.latency_counts, strict=True)
            ),
            buckets=self._buckets(),
            memory_bytes=self._memory_bytes(),
            loop_lag_s=self._loop_lag_s(),
        )


class History:
    """The last :data:`MAX_SAMPLES` samples, oldest first."""

    def __init__(self, samples: Iterable[Sample] = ()) -> None:
        self._samples: deque[Sample] = deque(samples, maxlen=MAX_SAMPLES)

    def add(self, sample: Sample) -> None:
        """Add a sample; drop the oldest."""
        self._samples.append(sample)

    @property
    def samples(self) -> Sequence[Sample]:
        """Return the samples of the last :data:`KEPT_S` seconds."""
        if not self._samples:
            return ()
        oldest_ms = self._samples[-1].at_ms - KEPT_S * 1_000
        return [sample for sample in self._samples if sample.at_ms > oldest_ms]


def percentile_s(counts: Sequence[int], share: float) -> float | None:
    """Return the latency in seconds that ``share`` (0 to 1) of the checks did not exceed; ``None`` without checks.

    ``counts`` are those of :attr:`ratelimitd.counters.CheckStats.latency_counts`, or what they grew by. Within
    a bucket the checks count as evenly spread; above the last bound nothing is known, so it is the answer.
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
