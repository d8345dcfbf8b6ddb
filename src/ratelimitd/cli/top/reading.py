"""The activity of a node between two looks at its metrics. Pure: calls no node and reads no clock.

Numbers cover the time between the looks, except states (buckets, memory) and the totals of rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Self

from ratelimitd.cli.output import enum_name
from ratelimiter.v1 import ratelimiter_pb2 as pb

ALLOWED: Final = "rate_limiter_requests_allowed_total"
BLOCKED: Final = "rate_limiter_requests_blocked_total"
FAIL_OPEN: Final = "rate_limiter.fail_open"
FAIL_OPEN_ERRORS: Final = "rate_limiter_fail_open_errors_total"
LATENCY: Final = "rate_limiter_check_latency_seconds"
RULE_ALLOWED: Final = "rate_limiter_rule_allowed_total"
RULE_BLOCKED: Final = "rate_limiter_rule_blocked_total"
NODES: Final = "rate_limiter_cluster_nodes"
EXCESS: Final = "rate_limiter_over_admission_ratio"
EXCESS_BOUND: Final = "rate_limiter_over_admission_bound_ratio"

_STATES: Final[Mapping[str, str]] = {
    "hit_ratio": "rate_limiter_cache_hit_ratio",
    "buckets": "rate_limiter_active_buckets",
    "memory_bytes": "rate_limiter_memory_usage_bytes",
    "connections": "rate_limiter_connections",
    "rules": "rate_limiter_rules",
    "cluster_nodes": NODES,
    "sync_lag_s": "rate_limiter_sync_lag_seconds",
    "excess_ratio": EXCESS,
    "excess_bound_ratio": EXCESS_BOUND,
}
"""Metrics without a rate, by their fields of a :class:`Reading`; a node without a cluster lacks the last four."""

NAMES: Final = (
    ALLOWED, BLOCKED, FAIL_OPEN, FAIL_OPEN_ERRORS, LATENCY, RULE_ALLOWED, RULE_BLOCKED,
    *_STATES.values(),
)  # fmt: skip
"""The metrics to read."""

QUANTILES: Final = (0.5, 0.95, 0.99)

MS_PER_S: Final = 1_000

Series = tuple[str, str]
"""A metric's name and label value, empty without one."""


class Look(NamedTuple):
    """One look at a node, at ``at_s`` on a monotonic clock."""

    at_s: float
    health: pb.HealthResponse
    values: Mapping[Series, float]
    bounds_s: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    """Cumulative checks by latency, one more than there are bounds; empty if the node does not report them."""
    latency_sum_s: float = 0.0

    @classmethod
    def of(cls, at_s: float, health: pb.HealthResponse, metrics: pb.MetricsResponse) -> Self:
        """Return the look in two answers."""
        values = {
            (one.name, next(iter(one.labels.values()), "")): one.value for one in metrics.metrics
        }
        histogram = next((m.histogram for m in metrics.metrics if m.name == LATENCY), None)
        if histogram is None:
            return cls(at_s, health, values)
        bounds, counts = tuple(histogram.upper_bounds), tuple(histogram.cumulative_counts)
        return cls(at_s, health, values, bounds, counts, histogram.sum)


class RuleReading(NamedTuple):
    """The activity of a rule."""

    rule_id: str
    allowed_per_s: float
    blocked_per_s: float
    blocked_total: int


class Latency(NamedTuple):
    """Latency of the checks in between, in ms. A quantile is the upper bound of its bucket; infinite after the last."""

    mean_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float


class Reading(NamedTuple):
    """The figures of a node. ``None``: not reported, or nothing to measure."""

    node_id: str
    status: str
    breaker_state: str
    shared_state_connected: bool
    rules_revision: int
    allowed_per_s: float
    blocked_per_s: float
    fail_open_per_s: float
    latency: Latency | None
    hit_ratio: float | None
    buckets: float | None
    memory_bytes: float | None
    connections: float | None
    rules: float | None
    cluster_nodes: float | None
    sync_lag_s: float | None
    excess_ratio: float | None
    excess_bound_ratio: float | None
    busiest: tuple[RuleReading, ...]
    """The rules with the most denials."""


class Frame(NamedTuple):
    """The last reading, and why there is no newer one, empty if there is."""

    reading: Reading
    names: Mapping[str, str]
    """Names of rules, by id."""
    checks_per_s: tuple[float, ...]
    """Rate of each reading so far."""
    lost: str = ""


def reading(before: Look, after: Look, *, rules: int) -> Reading:
    """Return the activity between two looks, with the ``rules`` rules with the most denials."""
    health = after.health
    return Reading(
        health.node_id,
        enum_name(pb.HealthStatus, health.status),
        health.breaker_state,
        health.shared_state_connected,
        health.rules_revision,
        _rate(before, after, (ALLOWED, "")),
        _rate(before, after, (BLOCKED, "")),
        _rate(before, after, (FAIL_OPEN, "")) + _rate(before, after, (FAIL_OPEN_ERRORS, "")),
        _latency(before, after),
        busiest=tuple(sorted(_rules(before, after), key=_most_blocked_first)[:rules]),
        **{field: after.values.get((name, "")) for field, name in _STATES.items()},
    )


def _rate(before: Look, after: Look, series: Series) -> float:
    """Return the growth of a counter per second; one that decreased was reset by a restart."""
    now, then = after.values.get(series, 0.0), before.values.get(series, 0.0)
    grown = now - then if now >= then else now
    elapsed_s = after.at_s - before.at_s
    return grown / elapsed_s if elapsed_s > 0 else 0.0


def _rules(before: Look, after: Look) -> Iterator[RuleReading]:
    names = {label for name, label in after.values if name in {RULE_ALLOWED, RULE_BLOCKED}}
    for rule_id in names:
        blocked = RULE_BLOCKED, rule_id
        yield RuleReading(
            rule_id,
            _rate(before, after, (RULE_ALLOWED, rule_id)),
            _rate(before, after, blocked),
            int(after.values.get(blocked, 0.0)),
        )


def _most_blocked_first(rule: RuleReading) -> tuple[float, int, float, str]:
    return -rule.blocked_per_s, -rule.blocked_total, -rule.allowed_per_s, rule.rule_id


def _latency(before: Look, after: Look) -> Latency | None:
    began_anew = len(before.counts) != len(after.counts) or any(
        now < then for now, then in zip(after.counts, before.counts, strict=True)
    )
    earlier = (0,) * len(after.counts) if began_anew else before.counts
    counts = [now - then for now, then in zip(after.counts, earlier, strict=True)]
    if not counts or not counts[-1]:
        return None
    sum_s = after.latency_sum_s - (0.0 if began_anew else before.latency_sum_s)
    p50, p95, p99 = (quantile_s(after.bounds_s, counts, share) for share in QUANTILES)
    return Latency(*(value * MS_PER_S for value in (sum_s / counts[-1], p50, p95, p99)))


def quantile_s(bounds_s: Sequence[float], counts: Sequence[int], share: float) -> float:
    """Return the upper bound of the bucket that a quantile falls into, infinite beyond the last."""
    within = (
        bound for bound, count in zip(bounds_s, counts, strict=False) if count >= share * counts[-1]
    )
    return next(within, float("inf"))
