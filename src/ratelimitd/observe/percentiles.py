"""Percentiles of the latency histogram, as far as its buckets can tell: within one it counts as evenly spread. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ratelimitd.stats import LATENCY_BOUNDS_S


def percentile_s(counts: Sequence[int], share: float) -> float | None:
    """The latency in seconds that ``share`` (0 to 1) of the checks did not exceed; ``None`` without any.

    ``counts`` are those of :attr:`ratelimitd.stats.CheckStats.latency_counts`, or what they grew by. Above the last
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
