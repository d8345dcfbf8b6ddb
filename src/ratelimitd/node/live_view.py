"""What the live view of a node is put together from: its parts, read with every step. Keeps none of it."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Protocol

from ratelimitd import __version__
from ratelimitd.clock import Clock
from ratelimitd.counters import CheckStats
from ratelimitd.model import US_PER_S
from ratelimitd.observe.denials import Denials
from ratelimitd.observe.health import Health
from ratelimitd.observe.history import Sampler
from ratelimitd.observe.live import Board, Live
from ratelimitd.observe.metrics import ClusterStatus, Runtime, resident_bytes
from ratelimitd.observe.node_status import NodeStatus


class Cluster(Protocol):
    """A node's part in a cluster."""

    @property
    def board(self) -> Board:
        """Where the nodes tell each other how they are doing."""

    @property
    def status(self) -> ClusterStatus:
        """How it is doing."""


class Addresses(Protocol):
    """Where a node listens; empty while it does not."""

    grpc_address: str
    http_address: str


def live_of(
    *,
    stats: CheckStats,
    health: Health,
    runtime: Runtime,
    clock: Clock,
    denials: Denials,
    buckets: Sized,
    cluster: Cluster | None,
    addresses: Addresses,
    admin_token_digest: Callable[[], str],
    report: Callable[[str], None],
) -> Live:
    """The live view of a node with these parts; ``report`` takes one line for an operator."""
    sampler = Sampler(
        stats,
        clock,
        buckets=lambda: len(buckets),
        memory_bytes=resident_bytes,
        loop_lag_s=lambda: runtime.loop_lag_s,
    )

    def status() -> NodeStatus:
        judged = health.report()
        shared = cluster.status if cluster else None
        return NodeStatus(
            node_id=judged.node_id,
            version=__version__,
            grpc_address=addresses.grpc_address,
            http_address=addresses.http_address,
            rules_revision=judged.rules_revision,
            healthy=judged.healthy,
            shared_state_connected=judged.shared_state_connected,
            hit_ratio=judged.local_cache_hit_ratio,
            hit_ratio_met=judged.hit_ratio_met,
            average_latency_ms=judged.average_latency_ms,
            latency_met=judged.latency_met,
            error_rate=judged.error_rate,
            breaker_state=judged.breaker_state,
            retry_s=health.shared_state().retry_s,
            sync_lag_s=shared.sync_lag_s if shared else 0.0,
            clock_error_s=runtime.clock_error_us / US_PER_S,
            excess_ratio=shared.excess_ratio if shared else 0.0,
            excess_bound_ratio=shared.excess_bound_ratio if shared else 0.0,
            admin_token_digest=admin_token_digest(),
            sample=sampler.sample(),
            endpoints=denials.top_endpoints(),
            identifiers=denials.top_identifiers(),
        )

    return Live(status, denials, cluster.board if cluster else None, clock, report=report)
