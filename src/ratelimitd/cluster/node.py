"""A node's part in a cluster: connections, buckets, breakers, the sync job, and gossip.

The store and the bus are passed in. Every job step is small, so that checks are not delayed.
"""

from __future__ import annotations

import asyncio
import logging
import random as random_source
from collections.abc import Callable
from math import ceil
from typing import TYPE_CHECKING, Final, NamedTuple

from ratelimitd.clock import Clock
from ratelimitd.cluster.accuracy import Accuracy, promised_excess
from ratelimitd.cluster.cache import BucketCache
from ratelimitd.cluster.gossip import Gossip, take
from ratelimitd.cluster.holds import SharedHolds
from ratelimitd.cluster.membership import BEAT_S, Membership, SharedTime, StatusBoard
from ratelimitd.cluster.pending import HASH_TAGS, Bucket
from ratelimitd.cluster.refresh import Refresh
from ratelimitd.cluster.shared_buckets import SharedBuckets
from ratelimitd.cluster.store_servers import Breakers
from ratelimitd.cluster.strict_buckets import StrictBuckets
from ratelimitd.cluster.sync import Partition
from ratelimitd.counters import CheckStats
from ratelimitd.ledger.local_view import LocalView, TightView
from ratelimitd.ledger.shared_state import SharedState, has_plenty
from ratelimitd.model import US_PER_S
from ratelimitd.retry import Background
from ratelimitd.rules.feed import RuleFeed
from ratelimitd.settings.table import Settings
from ratelimitd_wire.breaker import State

if TYPE_CHECKING:
    from ratelimitd.cluster.redis.pubsub import Bus
    from ratelimitd.cluster.redis.store import RedisStore

STEP_MS: Final = 6.25
"""Longest pause between two steps of the sync job; packing, distrusting and re-reading are done in the same steps."""

RESYNC_PAUSE_US: Final = 1_000_000
"""Shortest pause between two resyncs, of which each distrusts all packed buckets and reads the rules."""

WATCH_S: Final = 0.1
"""Period of probing breakers and following moved hash tags."""

JOIN_S: Final = 1.0
"""Longest wait of a starting node for the answer to its first heartbeat; then it serves without it."""

MAX_SYNC_LAG_S: Final = 2.0
"""When a batch is unacknowledged for longer, limits are not shared: the shared state counts as disconnected."""

_log = logging.getLogger(__name__)


class SharedStateStatus(NamedTuple):
    """Status of the shared state; ``retry_s``: seconds until an open breaker is probed."""

    connected: bool
    breaker_state: str
    retry_s: float = 0.0


class Cluster:
    """One node's part. Needs a running event loop.

    ``incarnation`` is the node's name and a part that distinguishes it from an earlier process of that name.
    ``stored_name`` maps a bucket's key to its name in the store. ``fingerprint`` returns that of the key secret, empty
    while the secret is unknown. ``feed`` is notified of rule changes, also when a message may have been lost.
    """

    def __init__(
        self,
        store: RedisStore,
        bus: Bus,
        settings: Settings,
        *,
        incarnation: str,
        stored_name: Callable[[bytes], bytes],
        fingerprint: Callable[[], str],
        clock: Clock,
        shared_time: SharedTime,
        stats: CheckStats,
        feed: RuleFeed,
        random: Callable[[], float] = random_source.random,
    ) -> None:
        self.store = store
        self.bus = bus
        self.clock = clock
        self.timers = loop = asyncio.get_running_loop()
        self._sync_interval_ms = settings.sync_interval_ms
        self._feed = feed
        self._rules_changed = asyncio.Event()
        self._shared_time = shared_time
        self.gossip = Gossip(bus, clock)
        self.accuracy = Accuracy(stats)
        self.membership = Membership(
            store, incarnation, fingerprint=fingerprint, clock=clock, shared_time=shared_time
        )
        self.board = StatusBoard(store, self.membership, incarnation, clock)
        self._breakers = Breakers(
            store,
            clock,
            loop,
            stats=stats,
            failures=settings.breaker_failures,
            recovery_s=settings.breaker_recovery_s,
            random=random,
        )
        self.make_view = TightView if settings.accuracy == "tight" else LocalView
        self._tags = [
            Partition(number, self._breakers.of_tag(number), incarnation, self)
            for number in range(0, HASH_TAGS, store.tags_per_batch)
        ]
        by_octet = [tag for tag in self._tags for _ in range(store.tags_per_batch)]
        self.cache = BucketCache(
            max_entries=settings.cache_entries,
            ttl_us=settings.cache_ttl_s * US_PER_S,
            now_us=clock.monotonic_us(),
        )
        self.buckets: SharedBuckets | StrictBuckets
        self._refresh: Refresh | None = None
        """Unset on a strict node, which has no views."""
        if settings.consistency == "strict":
            self.buckets = StrictBuckets(
                store=store,
                tags=by_octet,
                stored_name=stored_name,
                timers=loop,
                callers_time=settings.timestamps == "caller",
                breaker_denies=settings.on_breaker_open == "deny",
            )
        else:
            self._refresh = Refresh(
                store=store,
                tags=by_octet,
                cache=self.cache,
                clock=clock,
                gossip=self.gossip,
                accuracy=self.accuracy,
            )
            self.buckets = SharedBuckets(
                store=store,
                tags=by_octet,
                cache=self.cache,
                stored_name=stored_name,
                clock=clock,
                timers=loop,
                stats=stats,
                membership=self.membership,
                gossip=self.gossip,
                refresh=self._refresh,
                answer_s=settings.redis_timeout_ms / 1000,
                decides_alone=settings.on_breaker_open == "local",
                breaker_denies=settings.on_breaker_open == "deny",
            )
        self.holds = SharedHolds(
            store=store,
            tags=by_octet,
            stored_name=stored_name,
            clock=clock,
            timers=loop,
            store_time=self._refresh is None and settings.timestamps != "caller",
            changed=None if self._refresh is None else self._refresh.was_changed,
            max_holds=settings.max_holds,
            max_per_bucket=settings.max_holds_per_bucket,
        )
        self._steps = ceil(settings.sync_interval_ms / STEP_MS)
        self._step = 0
        self._is_resync_due = False
        self._resynced_us = clock.monotonic_us() - RESYNC_PAUSE_US

    # Start and stop

    async def start(self) -> None:
        """Connect and join; returns after a bounded wait, without an error, if the servers are unavailable.

        Raises:
            StartupError: other nodes use another key secret.
        """
        await self.store.start()
        await self.bus.start(self.take, self.resync)
        await self.membership.join(JOIN_S)

    def start_jobs(self, background: Background) -> None:
        """Start the periodic work."""
        background.every(self.step_s, "sync", self.sync_step)
        background.every(WATCH_S, "breakers", self.watch)
        background.every(BEAT_S, "members", self.membership.beat)
        background.start("rule news", self._follow_rule_changes)

    async def drain(self, timeout_s: float) -> None:
        """Settle everything, leave, and disconnect. Jobs and checks must have ended."""
        if not await self.settle(timeout_s):
            _log.warning("some spends did not reach the shared state before the node stopped")
        self.board.leave()
        await self.membership.leave()
        await self.bus.close()
        await self.store.close()

    async def settle(self, timeout_s: float) -> bool:
        """Send everything unsettled; returns whether all of it was acknowledged in time."""
        deadline_us = self.clock.monotonic_us() + round(timeout_s * US_PER_S)
        while not all(tag.is_settled for tag in self._tags):
            if self.clock.monotonic_us() >= deadline_us:
                return False
            for tag in self._tags:
                tag.sync()
            await asyncio.sleep(WATCH_S / 16)
        return True

    # Periodic work

    @property
    def step_s(self) -> float:
        """Period of :meth:`sync_step`, in seconds."""
        return self._sync_interval_ms / 1000 / self._steps

    def sync_step(self) -> None:
        """Sync the next share of the hash tags; the steps of one interval cover all of them."""
        for tag in self._tags[self._step :: self._steps]:
            tag.sync()
        self._step = (self._step + 1) % self._steps
        if self._is_resync_due:
            self._resync()
        if self._refresh is not None:
            self._refresh.step()
        if not self._step:
            self.gossip.publish()

    def watch(self) -> None:
        """Probe servers whose breakers are due, and follow hash tags that have moved."""
        self._breakers.watch(self._tags)

    async def _follow_rule_changes(self) -> None:
        while True:
            await self._rules_changed.wait()
            self._rules_changed.clear()
            await self._feed.notify()

    # Messages between nodes

    async def notify(self) -> None:
        """Apply a rule change made on this node, and notify the others."""
        await self._feed.notify()
        if self._feed.book is not None:
            self.gossip.rules_changed(self._feed.book.revision)

    def take(self, payload: bytes) -> None:
        """Apply a message of another node."""
        if self._refresh is not None:
            take(payload, self._refresh, rules_changed=self._rules_changed.set)
        elif payload[:1] == b"R":
            self._rules_changed.set()

    def resync(self) -> None:
        """Read rules and buckets again soon: messages of other nodes may have been lost."""
        self._is_resync_due = True

    def _resync(self) -> None:
        """Do what :meth:`resync` asked for, unless it was done less than ``RESYNC_PAUSE_US`` ago."""
        now_us = self.clock.monotonic_us()
        if now_us - self._resynced_us < RESYNC_PAUSE_US:
            return
        self._is_resync_due = False
        self._resynced_us = now_us
        self._rules_changed.set()
        if self._refresh is not None:
            self._refresh.resync()

    # Called by the partitions

    def settled(self, bucket: Bucket, tokens: int, before: SharedState | None) -> None:
        """Account for an acknowledged batch that charged ``tokens``; ``before`` was the base of the bucket's view."""
        view = bucket.view
        if view.base is not None and has_plenty(view.base, view.rule):
            # The usual case: neither overdrawn nor in the last half, so there is nothing to publish.
            self.accuracy.take_counts(bucket)
            return
        self.accuracy.settled(bucket, tokens, before, self.clock.now_us())
        self.gossip.settled(bucket, before)

    def lost(self, tokens: int) -> None:
        """Account for tokens that were allowed and will not be charged."""
        self.accuracy.forgiven_total += tokens

    def defect(self, error: Exception) -> None:
        """Log that a batch cannot be sent, or that its answer is malformed."""
        self.timers.call_exception_handler(
            {"message": "spends cannot be settled", "exception": error}
        )

    # Read by health, metrics and pages

    @property
    def shared_state(self) -> SharedStateStatus:
        """Whether limits are shared, and the state of the breakers."""
        connected = (
            self.breaker_state is State.CLOSED
            # A store that answers reads and refuses batches shares no limits.
            and self.sync_lag_s < MAX_SYNC_LAG_S
            and self.store.connected
        )
        retry_s = self._breakers.retry_after_us / US_PER_S
        return SharedStateStatus(connected, self.breaker_state.value, retry_s)

    @property
    def breaker_state(self) -> State:
        """State of the worst breaker."""
        return self._breakers.state

    @property
    def worst_excess(self) -> float:
        """Largest recent overdraft of a bucket, as a fraction of its limit."""
        return self.accuracy.worst_excess(self.clock.now_us())

    @property
    def promised_excess(self) -> float:
        """Bound of :attr:`worst_excess` for a window of one second, from the conditions of the same period."""
        now_us, shared_time = self.clock.now_us(), self._shared_time
        skew_us = abs(shared_time.wall_us() - now_us)
        promise = promised_excess(
            self.make_view.shares, self.membership.count, shared_time.round_trip_us, skew_us
        )
        return self.accuracy.largest_promise(now_us, promise)

    @property
    def sync_lag_s(self) -> float:
        """Age of the oldest batch that is not acknowledged."""
        now_us = self.clock.now_us()
        oldest = [tag.oldest_us for tag in self._tags if tag.oldest_us is not None]
        return max(0, now_us - min(oldest)) / US_PER_S if oldest else 0.0

    @property
    def unsettled_buckets(self) -> int:
        """Buckets with unacknowledged spends."""
        return sum(tag.unsettled_buckets for tag in self._tags)
