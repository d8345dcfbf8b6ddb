"""From a URL to the shards that it names."""

from __future__ import annotations

import random as random_source
from collections.abc import Callable

from ratelimitd.cluster.redis.cluster_topology import ClusterShards
from ratelimitd.cluster.redis.connection import MAX_REQUESTS, Handshake
from ratelimitd.cluster.redis.link import LinkOptions
from ratelimitd.cluster.redis.sentinel import SentinelShards
from ratelimitd.cluster.redis.topology import Shards, client_context, standalone
from ratelimitd.settings.urls import RedisUrl, Topology


def open_shards(
    url: RedisUrl,
    *,
    timeout_ms: float,
    client_name: str = "ratelimitd",
    report: Callable[[str], None] = lambda _line: None,
    on_change: Callable[[], None] = lambda: None,
    max_requests: int = MAX_REQUESTS,
    random: Callable[[], float] = random_source.random,
) -> Shards:
    """The shards of ``url``, to be started.

    ``report`` takes a line for an operator when something starts to fail or recovers, never at each attempt.
    ``on_change`` is called when hash tags have moved to other servers. Needs a running event loop.

    Raises:
        StartupError: a TLS file cannot be used.
    """
    wants_primary = url.topology is not Topology.CLUSTER
    options = LinkOptions(
        timeout_ms / 1000,
        Handshake(url.login, url.database, client_name, wants_primary=wants_primary),
        client_context(url.tls) if url.tls is not None else None,
        max_requests,
        report,
        random,
    )
    if url.topology is Topology.CLUSTER:
        return ClusterShards(url, options, on_change)
    if url.topology is Topology.SENTINEL:
        return SentinelShards(url, options)
    return standalone(url, options)
