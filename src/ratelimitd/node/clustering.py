"""How a node becomes one of a cluster, and ceases to be: connections, the shared buckets, its jobs.

Used by the composition root alone; the only other place that knows both the cluster and its driver.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Final, Protocol

from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.clock import Clock
from ratelimitd.cluster.cache import BucketCache
from ratelimitd.cluster.membership import BEAT_S, SharedTime, StatusBoard
from ratelimitd.cluster.node import JOIN_S, WATCH_S, Cluster, Options
from ratelimitd.cluster.redis.opening import open_shards
from ratelimitd.cluster.redis.pubsub import Bus
from ratelimitd.cluster.redis.statuses import RedisStatuses
from ratelimitd.cluster.redis.store import RedisStore, TracedStore
from ratelimitd.cluster.redis.topology import Shards
from ratelimitd.counters import CheckStats
from ratelimitd.limiter import SharedBuckets
from ratelimitd.model import US_PER_S
from ratelimitd.observe.health import SharedStateStatus
from ratelimitd.observe.metrics import ClusterStatus
from ratelimitd.retry import Background
from ratelimitd.rules.book import RuleBook
from ratelimitd.settings.table import Settings
from ratelimitd.settings.urls import parse_redis_url
from ratelimitd.tracing import Tracer

INCARNATION_BYTES: Final = 6

MAX_SYNC_LAG_S: Final = 2.0
"""A batch that is not acknowledged for so long means that limits are not shared: the shared state counts as away."""

_log = logging.getLogger(__name__)


class Feed(Protocol):
    """What is needed of a :class:`ratelimitd.rules.feed.RuleFeed`."""

    @property
    def book(self) -> RuleBook | None:
        """The rules in force."""

    async def notify(self) -> None:
        """Take over what has changed."""


class Clustering:
    """A node's part in a cluster, with all that it talks through.

    ``fingerprint`` is that of the key secret, empty while it is not known. ``feed`` is asked for new rules when another
    node says that there are some, or may have said so unheard.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        keys: BucketKeys,
        fingerprint: Callable[[], str],
        clock: Clock,
        shared_time: SharedTime,
        stats: CheckStats,
        feed: Feed,
        tracer: Tracer | None = None,
    ) -> None:
        self._feed = feed
        self._rules_changed = asyncio.Event()
        url = parse_redis_url(settings.redis_url)
        # The same name twice, after a restart or by mistake, must not be the same sender.
        incarnation = f"{settings.node_name}/{secrets.token_hex(INCARNATION_BYTES)}"
        self._shards: Shards = open_shards(
            url,
            timeout_ms=settings.redis_timeout_ms,
            client_name=f"ratelimitd:{settings.node_name}",
            report=_warn,
        )
        self._bus = Bus(self._shards, on_message=self._take, on_gap=self._resync)
        self._store = (
            RedisStore(self._shards) if tracer is None else TracedStore(self._shards, tracer=tracer)
        )
        self._cluster = Cluster(
            self._store,
            self._bus,
            Options(
                sync_interval_ms=settings.sync_interval_ms,
                cache_entries=settings.cache_entries,
                cache_ttl_s=settings.cache_ttl_s,
                breaker_failures=settings.breaker_failures,
                breaker_recovery_s=settings.breaker_recovery_s,
                strict=settings.consistency == "strict",
                decides_alone=settings.on_breaker_open == "local",
                callers_time=settings.timestamps == "caller",
                timeout_ms=settings.redis_timeout_ms,
            ),
            incarnation=incarnation,
            stored_name=keys.stored,
            fingerprint=fingerprint,
            clock=clock,
            shared_time=shared_time,
            stats=stats,
            report=_warn,
            rules_changed=self._rules_changed.set,
        )
        self.board = StatusBoard(
            RedisStatuses(self._shards), self._cluster.membership, incarnation, clock
        )
        """Where the nodes tell each other how they are doing."""

    @property
    def buckets(self) -> SharedBuckets:
        """For the limiter."""
        return self._cluster.buckets

    @property
    def cache(self) -> BucketCache:
        """The buckets that this node knows."""
        return self._cluster.cache

    async def start(self) -> None:
        """Connect and join; comes back soon and without an error when the servers are away.

        Raises:
            StartupError: other nodes use another key secret.
        """
        await self._shards.start()
        await self._bus.start()
        await self._cluster.membership.join(JOIN_S)

    def start_jobs(self, background: Background) -> None:
        """Start what goes on beside the checks."""
        cluster = self._cluster
        background.every(cluster.step_s, "sync", cluster.sync_step)
        background.every(WATCH_S, "breakers", cluster.watch)
        background.every(BEAT_S, "members", cluster.membership.beat)
        background.start("rule news", self._follow_rule_news)

    async def notify(self) -> None:
        """The rules were changed here: take that over, and tell the other nodes."""
        await self._feed.notify()
        if self._feed.book is not None:
            self._cluster.news.rules_changed(self._feed.book.revision)

    async def _follow_rule_news(self) -> None:
        while True:
            await self._rules_changed.wait()
            self._rules_changed.clear()
            await self._feed.notify()

    async def drain(self, timeout_s: float) -> None:
        """Settle what there is, leave, and disconnect. The jobs must have ended, and no checks come any more."""
        if not await self._cluster.settle(timeout_s):
            _log.warning("not all spends reached the shared state before the end")
        self.board.leave()
        await self._cluster.membership.leave()
        await self._bus.close()
        await self._shards.close()

    @property
    def shared_state(self) -> SharedStateStatus:
        """For health."""
        cluster = self._cluster
        connected = (
            cluster.is_connected
            # A store that answers readings and refuses batches is none that nodes could share.
            and cluster.sync_lag_s < MAX_SYNC_LAG_S
            and self._shards.connected
        )
        retry_s = cluster.retry_after_us / US_PER_S
        return SharedStateStatus(connected, cluster.breaker_state.value, retry_s)

    @property
    def status(self) -> ClusterStatus:
        """For metrics."""
        cluster, buckets = self._cluster, self._cluster.buckets
        return ClusterStatus(
            members=cluster.membership.count,
            sync_lag_s=cluster.sync_lag_s,
            unsettled_buckets=cluster.unsettled_buckets,
            asked_total=buckets.asked_total,
            late_total=buckets.late_total,
            forgiven_tokens_total=cluster.accuracy.forgiven_total,
            over_admitted_tokens_total=cluster.accuracy.over_admitted_total,
            excess_ratio=cluster.worst_excess,
            excess_bound_ratio=cluster.promised_excess,
            corrupt_total=self._store.corrupt_total,
            message_gaps_total=self._bus.gaps_total,
            messages_undelivered_total=self._bus.undelivered_total,
        )

    # What the bus brings; the cluster is there by then.

    def _take(self, payload: bytes) -> None:
        self._cluster.take(payload)

    def _resync(self) -> None:
        self._cluster.resync()


def _warn(line: str) -> None:
    _log.warning("%s", line)
