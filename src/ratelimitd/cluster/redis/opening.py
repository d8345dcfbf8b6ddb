"""From settings to a node's part in a cluster, and from a URL to the servers it names."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Final

from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.clock import Clock
from ratelimitd.cluster.membership import SharedTime
from ratelimitd.cluster.node import Cluster
from ratelimitd.cluster.redis.cluster_topology import ClusterTopology
from ratelimitd.cluster.redis.connection import SILENCE_S, Handshake
from ratelimitd.cluster.redis.link import LinkOptions, warn
from ratelimitd.cluster.redis.pubsub import Bus
from ratelimitd.cluster.redis.sentinel import SentinelTopology
from ratelimitd.cluster.redis.store import RedisStore, TracedStore
from ratelimitd.cluster.redis.topology import ClientTls, Topology, standalone
from ratelimitd.counters import CheckStats
from ratelimitd.rules.feed import RuleFeed
from ratelimitd.settings.table import Settings
from ratelimitd.settings.urls import RedisUrl, TopologyKind, parse_redis_url
from ratelimitd.tracing import Tracer

INCARNATION_BYTES: Final = 6


def open_cluster(
    settings: Settings,
    *,
    keys: BucketKeys,
    fingerprint: Callable[[], str],
    clock: Clock,
    shared_time: SharedTime,
    stats: CheckStats,
    feed: RuleFeed,
    tracer: Tracer | None = None,
) -> Cluster:
    """Return a node's part in the cluster of REDIS_URL, to be started. Needs a running event loop.

    ``fingerprint`` returns that of the key secret, empty while unknown.

    Raises:
        StartupError: a TLS file cannot be used.
    """
    topology = open_topology(
        parse_redis_url(settings.redis_url),
        timeout_ms=settings.redis_timeout_ms,
        silence_ms=settings.breaker_silence_ms,
        client_name=f"ratelimitd:{settings.node_name}",
    )
    return Cluster(
        RedisStore(topology) if tracer is None else TracedStore(topology, tracer=tracer),
        Bus(topology),
        settings,
        # Two processes of one name, after a restart or by mistake, must not be the same sender.
        incarnation=f"{settings.node_name}/{secrets.token_hex(INCARNATION_BYTES)}",
        stored_name=keys.stored,
        fingerprint=fingerprint,
        clock=clock,
        shared_time=shared_time,
        stats=stats,
        feed=feed,
    )


def open_topology(
    url: RedisUrl,
    *,
    timeout_ms: float,
    silence_ms: float = SILENCE_S * 1_000,
    client_name: str = "ratelimitd",
    report: Callable[[str], None] = warn,
) -> Topology:
    """Return the topology of ``url``, to be started.

    ``report`` takes a line for the operator when something starts to fail or recovers, never at each attempt. Needs a
    running event loop.

    Raises:
        StartupError: a TLS file cannot be used.
    """
    wants_primary = url.topology is not TopologyKind.CLUSTER
    options = LinkOptions(
        timeout_ms / 1000,
        Handshake(url.login, url.database, client_name, wants_primary=wants_primary),
        ClientTls(url.tls, report) if url.tls is not None else None,
        report=report,
        silence_s=silence_ms / 1_000,
    )
    if url.topology is TopologyKind.CLUSTER:
        return ClusterTopology(url, options)
    if url.topology is TopologyKind.SENTINEL:
        return SentinelTopology(url, options)
    return standalone(url, options)
