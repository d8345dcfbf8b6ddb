"""The last 24 hours of a node: a sample every two seconds, computed from cumulative counters, and means for older ones.

Reads no clock and no counter: values are arguments. See ADR 0029.
"""

from __future__ import annotations

import operator
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple, Self

from ratelimitd.clock import Clock
from ratelimitd.counters import LATENCY_BOUNDS_S, CheckStats
from ratelimitd.model import US_PER_MS, US_PER_S

SAMPLE_S: Final = 2.0


class Span(NamedTuple):
    """A period up to now and the step of its samples, both in seconds."""

    kept_s: int
    step_s: int

    @property
    def most(self) -> int:
        """The maximum number of samples in it, including the unfinished one."""
        return self.kept_s // self.step_s


SPANS: Final[Mapping[str, Span]] = MappingProxyType(
    {"5m": Span(300, 2), "15m": Span(900, 2), "1h": Span(3_600, 10), "24h": Span(86_400, 240)}
)
"""Kept samples: at most 450 per step, 1.6 MB in all."""

DEFAULT_SPAN: Final = "15m"


class Sample(NamedTuple):
    """One node, or the sum of all, over about :data:`SAMPLE_S` seconds.

    ``at_ms`` is its end in ms since the Unix epoch. The first five rates are checks per second: ``looked`` are those
    that looked up a bucket, ``known`` those that found it. ``latency_counts`` is the growth of the histogram of
    :class:`ratelimitd.counters.CheckStats`.
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
        """Look-ups that found a bucket / look-ups; ``None`` without look-ups."""
        return min(1.0, self.known_per_s / self.looked_per_s) if self.looked_per_s else None

    def percentile_ms(self, share: float) -> float | None:
        """Return the latency that ``share`` (0 to 1) of the checks did not exceed; ``None`` without checks."""
        latency_s = percentile_s(self.latency_counts, share)
        return None if latency_s is None else 1_000 * latency_s


def summed(samples: Sequence[Sample]) -> Sample:
    """Add up samples of at least one node; the loop lag is the maximum."""
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


def folded(samples: Iterable[Sample], step_s: int) -> list[Sample]:
    """Return one sample per step of ``step_s`` seconds that has samples, oldest first.

    It holds their mean, the sum of their latency counts, the largest loop lag, and the time of the last one.
    """
    series = _Series(Span(sys.maxsize, step_s))
    for sample in samples:
        series.add(sample)
    return series.samples


class _Series:
    """The finished samples of a span, and the sum of those in the unfinished one."""

    def __init__(self, span: Span) -> None:
        self._step_ms = span.step_s * 1_000
        self._finished: deque[Sample] = deque(maxlen=span.most - 1)
        self._sum: Sample | None = None
        self._count = 0

    def add(self, sample: Sample) -> None:
        before = self._sum
        if before is None or sample.at_ms // self._step_ms != before.at_ms // self._step_ms:
            self._finished.extend(self._unfinished)
            self._sum, self._count = sample, 1
        else:
            self._sum, self._count = summed([before, sample]), self._count + 1

    @property
    def samples(self) -> list[Sample]:
        return [*self._finished, *self._unfinished]

    @property
    def _unfinished(self) -> Sequence[Sample]:
        if self._sum is None:
            return ()
        total, count = self._sum, self._count
        mean = {name: getattr(total, name) / count for name in _PER_S}
        held = {name: getattr(total, name) // count for name in ("buckets", "memory_bytes")}
        return [total._replace(**mean, **held)]


_PER_S: Final = tuple(name for name in Sample._fields if name.endswith("_per_s"))


class Totals(NamedTuple):
    """Counters of :class:`ratelimitd.counters.CheckStats` at one moment, or their growth."""

    allowed: int = 0
    blocked: int = 0
    fail_open: int = 0
    looked: int = 0
    known: int = 0
    latency_sum_s: float = 0.0
    latency_counts: tuple[int, ...] = (0,) * (len(LATENCY_BOUNDS_S) + 1)

    @classmethod
    def of(cls, stats: CheckStats) -> Self:
        """Return the current totals of a process."""
        return cls(
            stats.allowed_total,
            stats.blocked_total,
            stats.fail_open_breaker_total + stats.fail_open_error_total,
            stats.bucket_looked_total,
            stats.bucket_known_total,
            stats.latency_sum_s,
            tuple(stats.latency_counts),
        )

    def since(self, earlier: Totals) -> Totals:
        """Return the growth since ``earlier``."""
        counts = tuple(map(operator.sub, self.latency_counts, earlier.latency_counts))
        return Totals._make((*map(operator.sub, self[:-1], earlier[:-1]), counts))


class Sampler:
    """Computes the samples of this node."""

    def __init__(self, stats: CheckStats, clock: Clock) -> None:
        self._stats = stats
        self._clock = clock
        self._before_us = clock.monotonic_us()
        self._before = Totals.of(stats)

    def sample(self, *, buckets: int, memory_bytes: int, loop_lag_s: float) -> Sample:
        """Return the sample since the last call, or since the start, with these current values."""
        now_us, now = self._clock.monotonic_us(), Totals.of(self._stats)
        elapsed_s = max(1, now_us - self._before_us) / US_PER_S
        grown = now.since(self._before)
        self._before_us, self._before = now_us, now
        return Sample(
            at_ms=self._clock.now_us() // US_PER_MS,
            allowed_per_s=grown.allowed / elapsed_s,
            blocked_per_s=grown.blocked / elapsed_s,
            fail_open_per_s=grown.fail_open / elapsed_s,
            looked_per_s=grown.looked / elapsed_s,
            # A miss counts at the look-up, its check at the answer.
            known_per_s=max(0, grown.known) / elapsed_s,
            latency_counts=grown.latency_counts,
            buckets=buckets,
            memory_bytes=memory_bytes,
            loop_lag_s=loop_lag_s,
        )


class History:
    """The samples of each of :data:`SPANS`, oldest first."""

    def __init__(self, samples: Iterable[Sample] = ()) -> None:
        longest = sorted(SPANS.values())
        self._series = {span.step_s: _Series(span) for span in longest}
        for sample in samples:
            self.add(sample)

    def add(self, sample: Sample) -> None:
        """Add a sample; drop the oldest."""
        for series in self._series.values():
            series.add(sample)

    def samples(self, span: Span) -> Sequence[Sample]:
        """Return the samples of the last ``span.kept_s`` seconds before the newest; ``span`` is one of SPANS."""
        samples = self._series[span.step_s].samples
        if not samples:
            return ()
        oldest_ms = samples[-1].at_ms - span.kept_s * 1_000
        return [sample for sample in samples if sample.at_ms > oldest_ms]


def percentile_s(counts: Sequence[int], share: float) -> float | None:
    """Return the latency in seconds that ``share`` (0 to 1) of the checks did not exceed; ``None`` without checks.

    ``counts`` are those of :attr:`ratelimitd.counters.CheckStats.latency_counts`, or their growth. Interpolates
    linearly within a bucket of the histogram; above the last bound it returns that bound.
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
