"""Merges the metrics of several workers into those of one node. Pure.

Counters and histograms are summed. Each gauge has its own rule, in the table below.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import reduce
from typing import Final

from ratelimitd.counters import MAX_RULE_LABELS
from ratelimitd.observe.metrics import DEFINITIONS, Definition, HistogramSample, Point
from ratelimitd.workers.protocol import Reading, Report

GAUGES: Final[Mapping[str, Callable[[Iterable[float]], float]]] = {
    # The total of all workers.
    "rate_limiter_active_buckets": sum,
    "rate_limiter_calls_in_progress": sum,
    "rate_limiter_connections": sum,
    "rate_limiter_holds_open": sum,
    "rate_limiter_http2_streams": sum,
    "rate_limiter_memory_usage_bytes": sum,
    "rate_limiter_tasks": sum,
    "rate_limiter_unsettled_buckets": sum,
    # The worst value, so that alerts for one process work for all.
    "rate_limiter_cache_hit_ratio": min,
    "rate_limiter_clock_error_seconds": lambda values: max(values, key=abs),
    "rate_limiter_cluster_nodes": min,
    "rate_limiter_healthy": min,
    "rate_limiter_loop_lag_seconds": max,
    "rate_limiter_over_admission_bound_ratio": max,
    "rate_limiter_over_admission_ratio": max,
    "rate_limiter_rules_left_out": max,
    "rate_limiter_rules_revision": min,
    "rate_limiter_rules_store_up": min,
    "rate_limiter_shared_state_up": min,
    "rate_limiter_snapshot_age_seconds": max,
    "rate_limiter_sync_lag_seconds": max,
    "rate_limiter_tls_certificate_expiry_timestamp_seconds": min,
    # Each state of any worker.
    "rate_limiter_breaker_state": max,
    # The same for all workers, or nearly so.
    "rate_limiter_build_info": max,
    "rate_limiter_rules": min,
    "rate_limiter_assignments": min,
    "process_start_time_seconds": min,
}
"""Rule of each gauge; one that is missing here would show the largest value."""


def merged(
    counted: Sequence[Report], now: Sequence[Report]
) -> list[tuple[Definition, list[Point]]]:
    """Return the readings of one node, in the order of the definitions.

    Args:
        counted: the counters and histograms of each worker, from all its processes.
        now: the current report of each process that answered.
    """
    merged_points = []
    for definition in DEFINITIONS:
        if definition.kind == "gauge":
            rule = GAUGES.get(definition.name, max)
            readings = _by_label(definition.name, now)
            points = [Point(rule(map(number, each)), label) for label, each in readings.items()]
        else:
            readings = _by_label(definition.name, counted)
            points = [_point(label, reduce(added, each)) for label, each in readings.items()]
        merged_points.append((definition, points))
    return merged_points


def added(first: Reading, second: Reading) -> Reading:
    """Return the sum of two counters, or of two histograms with the same bounds."""
    if isinstance(first, HistogramSample) and isinstance(second, HistogramSample):
        pairs = zip(first.cumulative_counts, second.cumulative_counts, strict=True)
        return HistogramSample(first.upper_bounds, tuple(map(sum, pairs)), first.sum + second.sum)
    return number(first) + number(second)


def number(reading: Reading) -> float:
    """Return the value of a counter, or the total count of a histogram."""
    if isinstance(reading, HistogramSample):
        return reading.cumulative_counts[-1]
    return reading


def _by_label(name: str, reports: Sequence[Report]) -> dict[str, list[Reading]]:
    found: dict[str, list[Reading]] = {}
    for report in reports:
        for label, reading in report.get(name, {}).items():
            found.setdefault(label, []).append(reading)
    return found


def _point(label: str, reading: Reading) -> Point:
    if isinstance(reading, HistogramSample):
        return Point(label=label, histogram=reading)
    return Point(reading, label)


COUNTED: Final = frozenset(
    definition.name for definition in DEFINITIONS if definition.kind != "gauge"
)
"""The metrics that only grow."""

MAX_LABELS: Final = 2 * MAX_RULE_LABELS
"""Labels of one metric for each worker: those of rules in use, and as many of rules that may be deleted."""


class CounterTotals:
    """The counters and histograms of one worker, over all its processes."""

    def __init__(self) -> None:
        self._base: dict[str, dict[str, Reading]] = {}
        """Totals of the processes that have ended."""
        self._last: dict[str, dict[str, Reading]] = {}
        """Last report of the current process."""

    def take(self, report: Report) -> None:
        """Take a report of the current process."""
        for name in COUNTED & report.keys():
            last = self._last.setdefault(name, {})
            for label, reading in report[name].items():
                # It may restart in the same process, too: its rule was deleted and created again.
                before = last.pop(label, None)
                if before is not None and number(reading) < number(before):
                    _add(self._base.setdefault(name, {}), label, before)
                last[label] = reading

    def process_ended(self) -> None:
        """Prepare for the reports of a new process, which counts from 0."""
        self._base, self._last = self.report(), {}

    def report(self) -> dict[str, dict[str, Reading]]:
        """Return the totals so far, the labels in the order of their last report."""
        total = {name: dict(readings) for name, readings in self._base.items()}
        for name, readings in self._last.items():
            found = total.setdefault(name, {})
            for label, reading in readings.items():
                _add(found, label, reading)
        return total

    def labels(self, name: str) -> list[str]:
        """Return the labels of a metric in the order of their last report."""
        last = self._last.get(name, {})
        return [*(label for label in self._base.get(name, ()) if label not in last), *last]

    def forget_others(self, name: str, kept: Collection[str]) -> None:
        """Drop all labels of one metric but these."""
        for readings in (self._base.get(name, {}), self._last.get(name, {})):
            for label in readings.keys() - kept:
                del readings[label]


def forget_unused(workers: Sequence[CounterTotals]) -> None:
    """Bound the labels: if there are too many, keep the :data:`MAX_LABELS` that each worker reported last.

    A label is dropped in all workers or in none, since a sum without one of them would be lower. The dropped counts are
    not added to ``other``, where they would look like new checks.
    """
    for name in COUNTED:
        labels = [totals.labels(name) for totals in workers]
        if len(set().union(*labels)) > MAX_LABELS * len(workers):
            kept = set().union(*(each[-MAX_LABELS:] for each in labels))
            for totals in workers:
                totals.forget_others(name, kept)


def _add(totals: dict[str, Reading], label: str, reading: Reading) -> None:
    """Add a reading; its label becomes the last one."""
    totals[label] = added(totals.pop(label), reading) if label in totals else reading


ANSWERING: Final = Definition(
    "rate_limiter_workers",
    "gauge",
    "Worker processes that answered this scrape; the gauges cover only these.",
    lambda _: (),
)
RESTARTS: Final = Definition(
    "rate_limiter_worker_restarts_total",
    "counter",
    "Processes that ended and were started again, by the worker's number; store is the private Valkey.",
    lambda _: (),
    "worker",
)
OF_PARENT: Final = (ANSWERING, RESTARTS)
"""The metrics of a parent, beside those of its workers."""
