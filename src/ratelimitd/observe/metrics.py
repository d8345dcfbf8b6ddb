"""Every metric of a node, defined once, for ``/metrics`` and for ``GetMetrics``.

The check path increments plain integers; everything here runs on request only. Labels come from closed sets, never from
caller input.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Final, Literal, NamedTuple, Protocol

from ratelimitd import __version__
from ratelimitd.buckets.snapshot import SnapshotLog
from ratelimitd.buckets.table import BucketTable
from ratelimitd.clock import Clock
from ratelimitd.cluster.cache import BucketCache
from ratelimitd.cluster.node import Cluster
from ratelimitd.counters import LATENCY_BOUNDS_S, CheckStats
from ratelimitd.errors import FieldViolation, InvalidInputError
from ratelimitd.model import US_PER_S, InFlight
from ratelimitd.observe.health import BREAKER_STATES, Health
from ratelimitd.rules.feed import RuleFeed

STATM: Final = Path("/proc/self/statm")

STARTED_AT_S: Final = time.time()
"""Unix seconds of the first import of this module, during the start of the process."""

_MAXRSS_UNIT: Final = 1 if sys.platform == "darwin" else 1024


def resident_bytes(statm: Path = STATM) -> int:
    """Return the resident memory of this process in bytes: current on Linux, elsewhere the maximum so far."""
    try:
        return int(statm.read_bytes().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT


@dataclass(slots=True)
class Runtime:
    """Measurements written by the background jobs."""

    loop_lag_s: float = 0.0
    """Largest delay of an event-loop timer in the last 10 to 20 s, in seconds."""
    clock_error_us: int = 0
    """Wall clock minus node clock, in µs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeParts:
    """The parts of a node that metrics and statuses read."""

    stats: CheckStats
    health: Health
    runtime: Runtime
    clock: Clock
    feed: RuleFeed
    buckets: BucketTable | BucketCache
    snapshot: SnapshotLog | None = None
    """``None`` if buckets are shared."""
    cluster: Cluster | None = None
    """``None`` if buckets are the node's own."""
    task_restarts: Mapping[str, int]
    """Background job → number of restarts after a crash."""
    transport: Callable[[], TransportStatus | None]
    """``None`` before it listens."""
    transport_name: str
    tls_expiry_s: Callable[[], Mapping[str, float]]
    """TLS setting → Unix time at which the first certificate of its file expires; empty without TLS."""
    in_flight: Callable[[], Sequence[InFlight]]
    """Holds in flight, by limit."""


class TransportStatus(Protocol):
    """Work in progress in a transport: :class:`ratelimitd.rpc.interface.InProgress`."""

    @property
    def unary(self) -> int:
        """Unary calls in progress."""

    @property
    def streams(self) -> int:
        """Streaming calls."""

    @property
    def connections(self) -> int | None:
        """Open connections."""

    @property
    def http2_streams(self) -> int | None:
        """Requests whose response has not ended."""


MetricKind = Literal["counter", "gauge", "histogram"]
"""Kinds of metric, by contract name."""


@dataclass(frozen=True, slots=True)
class HistogramSample:
    """One histogram.

    ``upper_bounds`` in the metric's unit (seconds), ascending, without +Inf; ``cumulative_counts`` is one longer, its
    last entry (+Inf) the number of observations; ``sum`` in the metric's unit.
    """

    upper_bounds: tuple[float, ...]
    cumulative_counts: tuple[int, ...]
    sum: float


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One metric at one moment.

    ``name`` is the specification's exact name (including ``rate_limiter.fail_open``); ``value`` is that of a counter or
    gauge, and 0 for a histogram, which sets ``histogram``. Label values come from closed sets only.
    """

    name: str
    kind: MetricKind
    value: float = 0.0
    histogram: HistogramSample | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


class Point(NamedTuple):
    """One reading: a number or a histogram; ``label`` holds the values of the definition's labels in order."""

    value: float = 0.0
    label: str = ""
    histogram: HistogramSample | None = None


Read = Callable[[NodeParts], Iterable[Point]]
"""Returns the readings of one metric."""


class Definition(NamedTuple):
    """One metric. ``name`` is its name in the exposition; ``label`` holds its label names, joined by commas.

    ``reported_name`` is the name in GetMetrics if the specification requires a different one there.
    """

    name: str
    kind: MetricKind
    help: str
    read: Read
    label: str = ""
    reported_name: str = ""


class Metrics:
    """The metrics of one node."""

    def __init__(self, parts: NodeParts) -> None:
        self._parts = parts

    def points(self) -> Iterator[tuple[Definition, Iterable[Point]]]:
        """Yield every metric with its readings, in the order of :data:`DEFINITIONS`; each is read when requested."""
        for definition in DEFINITIONS:
            yield definition, definition.read(self._parts)

    def samples(self, names: Sequence[str] = ()) -> Iterator[MetricSample]:
        """Yield the metrics called ``names``, or all, as GetMetrics reports them; each is read when requested.

        Raises:
            InvalidInputError: unknown names; each is identified by its index in ``names``.
        """
        unknown = [index for index, name in enumerate(names) if name not in _BY_REPORTED_NAME]
        if unknown:
            raise InvalidInputError(
                *(
                    FieldViolation(f"names[{index}]", "is not the name of a metric")
                    for index in unknown
                )
            )
        wanted = [_BY_REPORTED_NAME[name] for name in dict.fromkeys(names)] or DEFINITIONS
        return (
            MetricSample(
                name=definition.reported_name or definition.name,
                kind=definition.kind,
                value=point.value,
                histogram=point.histogram,
                labels=dict(zip(*split_labels(definition, point), strict=True)),
            )
            for definition in wanted
            for point in definition.read(self._parts)
        )


def split_labels(definition: Definition, point: Point) -> tuple[list[str], list[str]]:
    """Return the label names of a metric and their values in this reading."""
    names = definition.label.split(",") if definition.label else []
    return names, point.label.split(",", len(names) - 1) if names else []


def _one(read: Callable[[NodeParts], float]) -> Read:
    return lambda parts: (Point(read(parts)),)


def _counter(
    name: str, text: str, read: Callable[[NodeParts], float], reported_name: str = ""
) -> Definition:
    return Definition(name, "counter", text, _one(read), reported_name=reported_name)


def _gauge(name: str, text: str, read: Callable[[NodeParts], float]) -> Definition:
    return Definition(name, "gauge", text, _one(read))


def _of_cluster(read: Callable[[Cluster], float]) -> Read:
    return lambda parts: () if parts.cluster is None else (Point(read(parts.cluster)),)


def _of_snapshot(read: Callable[[SnapshotLog], float]) -> Read:
    return lambda parts: () if parts.snapshot is None else (Point(read(parts.snapshot)),)


def _latency(parts: NodeParts) -> Iterable[Point]:
    stats = parts.stats
    counts = tuple(accumulate(stats.latency_counts))
    return (Point(histogram=HistogramSample(LATENCY_BOUNDS_S, counts, stats.latency_sum_s)),)


def _breaker(parts: NodeParts) -> Iterable[Point]:
    state = parts.health.shared_state().breaker_state
    return (Point(float(name == state), name) for name in BREAKER_STATES)


def _per_rule(column: int) -> Read:
    return lambda parts: [
        Point(counts[column], rule_id) for rule_id, *counts in parts.stats.labelled_rules()
    ]


def _transport(**kinds: Callable[[TransportStatus], int | None]) -> Read:
    """Return readings by kind, without values that a transport does not provide."""

    def points(parts: NodeParts) -> Iterable[Point]:
        status = parts.transport()
        if status is None:
            return
        for kind, read in kinds.items():
            if (value := read(status)) is not None:
                yield Point(value, kind)

    return points


def _counts(read: Callable[[NodeParts], Mapping[str, float]]) -> Read:
    return lambda parts: [Point(count, label) for label, count in sorted(read(parts).items())]


# Keep the layout of the table.
# fmt: off
DEFINITIONS: Final = (
    # The eight of the specification, with their exact names and without labels.
    _counter("rate_limiter_requests_allowed_total",
        "Checks answered allowed, fail-open answers and checks without a rule included.",
        lambda r: r.stats.allowed_total),
    _counter("rate_limiter_requests_blocked_total", "Checks denied by a rule.", lambda r: r.stats.blocked_total),
    _counter("rate_limiter_false_positives_total", "Denials that the shared state would have allowed.",
        lambda r: r.stats.false_positives_total),
    Definition("rate_limiter_check_latency_seconds", "histogram",
        "Time from reading a check to writing its answer; the checks of a batch share its time.", _latency),
    _gauge("rate_limiter_cache_hit_ratio",
        "Fraction of bucket lookups that found a known bucket, last 60 s; 1 without traffic.",
        lambda r: r.health.cache_hit_ratio()),
    _gauge("rate_limiter_active_buckets", "Buckets held by this node.", lambda r: len(r.buckets)),
    _counter("rate_limiter_redis_errors_total", "Failed round trips to the shared state.",
        lambda r: r.stats.shared_state_errors_total),
    _gauge("rate_limiter_memory_usage_bytes", "Resident memory of the process.", lambda _: resident_bytes()),

    # Failing open, and why.
    _counter("rate_limiter_fail_open_total", "Checks allowed unchecked because the circuit breaker was open.",
        lambda r: r.stats.fail_open_breaker_total, "rate_limiter.fail_open"),
    _counter("rate_limiter_fail_open_errors_total",
        "Checks allowed unchecked because of an unexpected error or a missing rule book.",
        lambda r: r.stats.fail_open_error_total),
    _gauge("rate_limiter_shared_state_up",
        "1 while the shared state is reached; a node on its own memory always reaches it.",
        lambda r: float(r.health.shared_state().connected)),
    Definition("rate_limiter_breaker_state", "gauge",
        "1 for the state the circuit breaker is in.", _breaker, "state"),
    _gauge("rate_limiter_healthy", "1 for HEALTHY, 0 for DEGRADED.", lambda r: float(r.health.report().healthy)),

    # Rules.
    _gauge("rate_limiter_rules", "Rules in the book in force.", lambda r: len(r.feed.book or ())),
    _gauge("rate_limiter_rules_revision", "Revision of the book in force, 0 before there is one.",
        lambda r: r.feed.book.revision if r.feed.book else 0),
    _counter("rate_limiter_rules_skipped_total",
        "Invalid rows of the rule database that were left out.",
        lambda r: r.feed.skipped_total),
    _gauge("rate_limiter_rules_left_out", "Rows of the rule database that are invalid now.",
        lambda r: r.feed.left_out),
    _gauge("rate_limiter_assignments", "Identities assigned to plans, in force on this node.",
        lambda r: len(r.feed.assignments)),
    _gauge("rate_limiter_rules_store_up", "1 while the rule database answers and the book in force comes from it.",
        lambda r: float(r.feed.connected)),
    Definition("rate_limiter_rule_allowed_total", "counter", "Checks allowed, by the rule that decided.",
        _per_rule(0), "rule_id"),
    Definition("rate_limiter_rule_would_deny_total", "counter",
        "Checks that an observed limit would have denied.",
        lambda parts: [Point(count, key) for key, [count] in parts.stats.would_deny.items()], "rule_id,limit"),
    Definition("rate_limiter_rule_blocked_total", "counter", "Checks denied, by the rule that decided.",
        _per_rule(1), "rule_id"),
    Definition("rate_limiter_plan_checks_total", "counter",
        "Checks that no rule decided, because an identity is assigned to the plan unlimited or blocked.",
        _counts(lambda r: {"unlimited": r.stats.unlimited_total, "blocked": r.stats.plan_blocked_total}), "plan"),

    # Holds.
    _gauge("rate_limiter_holds_open",
        "Holds made by this node that have not ended; those settled by another node count until their end.",
        lambda r: r.stats.holds_open),
    Definition("rate_limiter_holds_total", "counter",
        "Holds made, settled, ended without a settle by this node (expired), and refused because there are too many.",
        _counts(lambda r: r.stats.holds), "event"),
    Definition("rate_limiter_hold_tokens_total", "counter",
        "Tokens that holds held, that settles gave back (refunded), and that they charged in addition (debt).",
        _counts(lambda r: r.stats.hold_tokens), "event"),

    # What callers send.
    _counter("rate_limiter_invalid_requests_total",
        "Malformed checks: calls refused and batch items answered INVALID_REQUEST.",
        lambda r: r.stats.invalid_total),
    _counter("rate_limiter_timestamps_rejected_total",
        "Caller timestamps out of tolerance, replaced by the node's clock.",
        lambda r: r.stats.clock_rejected_total),
    Definition("rate_limiter_transport_errors_total", "counter", "Calls the transport refused or lost, by cause.",
        _counts(lambda r: r.stats.errors_by_transport), "cause"),
    Definition("rate_limiter_token_guesses_total", "counter",
        "Wrong bearer tokens (wrong), and calls refused because too many came from their address (refused).",
        _counts(lambda r: r.stats.token_guesses), "result"),
    Definition("rate_limiter_recorded_checks_total", "counter",
        "Checks in complete files of the trace (written), and checks that could not be recorded (lost).",
        _counts(lambda r: r.stats.recorded), "result"),
    Definition("rate_limiter_web_refused_total", "counter", "Requests that the pages refused, by cause.",
        _counts(lambda r: r.stats.refused_by_web), "cause"),
    _counter("rate_limiter_auth_forwarding_ignored_total",
        "Requests for /v1/auth whose forwarding headers were ignored, because their peer is not a trusted proxy.",
        lambda r: r.stats.forwarding_ignored_total),
    Definition("rate_limiter_connections", "gauge", "Open connections of callers; absent with the grpcio transport.",
        _transport(open=lambda s: s.connections)),
    Definition("rate_limiter_http2_streams", "gauge",
        "Requests not fully answered, over all connections; absent with the grpcio transport.",
        _transport(open=lambda s: s.http2_streams)),
    Definition("rate_limiter_calls_in_progress", "gauge",
        "Calls whose handler is running. The native transport answers checks immediately: they are not counted.",
        _transport(unary=lambda s: s.unary, stream=lambda s: s.streams), "kind"),
    Definition("rate_limiter_tls_certificate_expiry_timestamp_seconds", "gauge",
        "Unix time at which the first certificate in service of a setting's file expires; absent without TLS.",
        _counts(lambda r: r.tls_expiry_s()), "setting"),
    _counter("rate_limiter_unexpected_errors_total", "Calls answered INTERNAL: a defect, which the log names.",
        lambda r: r.stats.unexpected_total),

    # Buckets and their snapshot.
    _counter("rate_limiter_buckets_evicted_total", "Buckets dropped because the table was full.",
        lambda r: r.buckets.evicted_total),
    _counter("rate_limiter_buckets_expired_total", "Buckets dropped because they were full again.",
        lambda r: r.buckets.expired_total),
    Definition("rate_limiter_snapshot_age_seconds", "gauge",
        "Time since the buckets were last written to the state directory; absent with a shared state.",
        _of_snapshot(lambda s: s.age_s)),
    Definition("rate_limiter_snapshot_written_bytes_total", "counter",
        "Bytes of buckets written to the state directory; absent with a shared state.",
        _of_snapshot(lambda s: s.written_bytes_total)),
    Definition("rate_limiter_snapshot_errors_total", "counter",
        "Failed passes of the bucket snapshot; absent with a shared state.",
        _of_snapshot(lambda s: s.errors_total)),

    # The cluster; absent on a node with its own buckets.
    Definition("rate_limiter_cluster_nodes", "gauge", "Nodes alive, as this node sees it.",
        _of_cluster(lambda c: c.membership.count)),
    Definition("rate_limiter_sync_lag_seconds", "gauge",
        "Age of the oldest spends sent to the shared state and not acknowledged.",
        _of_cluster(lambda c: c.sync_lag_s)),
    Definition("rate_limiter_unsettled_buckets", "gauge",
        "Buckets with spends that the shared state has not acknowledged.",
        _of_cluster(lambda c: c.unsettled_buckets)),
    Definition("rate_limiter_shared_state_checks_total", "counter",
        "Checks sent to the shared state for a decision; with CONSISTENCY=eventual only those of known buckets.",
        _of_cluster(lambda c: c.buckets.asked_total)),
    Definition("rate_limiter_shared_state_late_total", "counter",
        "Checks sent to the shared state that the node decided alone, because the answer was late.",
        _of_cluster(lambda c: c.buckets.late_total)),
    Definition("rate_limiter_given_back_tokens_total", "counter",
        "Tokens that the shared state had charged for checks that another limit denied, and that were given back.",
        _of_cluster(lambda c: c.buckets.given_back_total)),
    Definition("rate_limiter_kept_tokens_total", "counter",
        "Tokens that stay charged for checks that another limit denied.",
        _of_cluster(lambda c: c.buckets.kept_total)),
    Definition("rate_limiter_over_admitted_tokens_total", "counter",
        "Tokens allowed here that the shared state charged beyond the capacity of a bucket.",
        _of_cluster(lambda c: c.accuracy.over_admitted_total)),
    Definition("rate_limiter_over_admission_ratio", "gauge",
        "Largest overdraft of a bucket in the last one to two minutes, as a fraction of its limit.",
        _of_cluster(lambda c: c.worst_excess)),
    Definition("rate_limiter_over_admission_bound_ratio", "gauge",
        "Bound that the settings promise for the over-admission of a window of one second.",
        _of_cluster(lambda c: c.promised_excess)),
    Definition("rate_limiter_forgiven_tokens_total", "counter",
        "Tokens that were allowed and are charged nowhere: after outages, resets and lowered limits.",
        _of_cluster(lambda c: c.accuracy.forgiven_total)),
    Definition("rate_limiter_shared_state_corrupt_total", "counter",
        "Values in the shared state that were not buckets and were replaced.",
        _of_cluster(lambda c: c.store.corrupt_total)),
    Definition("rate_limiter_message_gaps_total", "counter",
        "Times that messages of other nodes may have been lost, each start of a subscription included.",
        _of_cluster(lambda c: c.bus.gaps_total)),
    Definition("rate_limiter_messages_undelivered_total", "counter",
        "Messages to other nodes that the shared state did not accept; a node sends at least one a second.",
        _of_cluster(lambda c: c.bus.undelivered_total)),
    _counter("rate_limiter_breaker_denied_total", "Checks denied because the circuit breaker was open.",
        lambda r: r.stats.breaker_denied_total),

    # The process.
    _gauge("rate_limiter_loop_lag_seconds", "Longest delay of an event loop timer in the last 10 to 20 s.",
        lambda r: r.runtime.loop_lag_s),
    _gauge("rate_limiter_tasks", "Tasks of the event loop that have not ended.", lambda _: len(asyncio.all_tasks())),
    _gauge("rate_limiter_clock_error_seconds",
        "How far the wall clock is ahead of the node's clock, which follows it slowly.",
        lambda r: r.runtime.clock_error_us / US_PER_S),
    Definition("rate_limiter_task_restarts_total", "counter", "Background jobs that crashed and were started again.",
        _counts(lambda r: r.task_restarts), "task"),
    Definition("rate_limiter_build_info", "gauge", "Always 1; labels: the version, and the transport that serves gRPC.",
        lambda r: (Point(1.0, f"{__version__},{r.transport_name}"),), "version,transport"),
    _gauge("process_start_time_seconds", "Unix time at which the process started.", lambda _: STARTED_AT_S),
)
# fmt: on
"""Every metric, in the order of the exposition."""

_BY_REPORTED_NAME: Final = {
    definition.reported_name or definition.name: definition for definition in DEFINITIONS
}
