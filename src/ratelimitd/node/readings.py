"""Where the numbers of a node's metrics come from: its parts, read when somebody asks. Keeps none of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from ratelimitd.clock import Clock
from ratelimitd.counters import CheckStats
from ratelimitd.model import US_PER_S
from ratelimitd.observe.health import Health
from ratelimitd.observe.metrics import (
    ClusterStatus,
    Metrics,
    Readings,
    Runtime,
    SnapshotStatus,
)
from ratelimitd.observe.samples import TransportStatus
from ratelimitd.rules.feed import RuleFeed
from ratelimitd.services.errors import ErrorEdge


class Buckets(Protocol):
    """The buckets that a node holds."""

    evicted_total: int
    expired_total: int

    def __len__(self) -> int: ...


class Cluster(Protocol):
    """A node's part in a cluster."""

    @property
    def status(self) -> ClusterStatus:
        """How it is doing."""


class Snapshot(Protocol):
    """What writes the buckets to disk; ``last_pass_us`` is on the clock's monotonic time."""

    last_pass_us: int
    written_bytes_total: int
    errors_total: int


def metrics_of(
    *,
    stats: CheckStats,
    health: Health,
    runtime: Runtime,
    clock: Clock,
    buckets: Buckets,
    snapshot: Snapshot | None,
    cluster: Cluster | None,
    feed: RuleFeed,
    edge: ErrorEdge,
    transport: Callable[[], TransportStatus | None],
    transport_name: str,
    task_restarts: Mapping[str, int],
) -> Metrics:
    """The metrics of a node with these parts; ``transport`` answers ``None`` before it listens."""

    def snapshot_status() -> SnapshotStatus | None:
        if snapshot is None:
            return None
        age_us = clock.monotonic_us() - snapshot.last_pass_us
        return SnapshotStatus(
            age_us / US_PER_S, snapshot.written_bytes_total, snapshot.errors_total
        )

    return Metrics(
        Readings(
            stats=stats,
            health=health,
            runtime=runtime,
            active_buckets=lambda: len(buckets),
            evicted_total=lambda: buckets.evicted_total,
            expired_total=lambda: buckets.expired_total,
            rules=lambda: len(feed.book or ()),
            rules_revision=lambda: feed.book.revision if feed.book else 0,
            rules_skipped_total=lambda: feed.skipped_total,
            rules_left_out=lambda: feed.left_out,
            rules_connected=lambda: feed.connected,
            snapshot=snapshot_status,
            cluster=lambda: cluster.status if cluster else None,
            transport=transport,
            transport_name=transport_name,
            tasks=lambda: len(asyncio.all_tasks()),
            unexpected_total=lambda: edge.unexpected_total,
            task_restarts=lambda: task_restarts,
        )
    )
