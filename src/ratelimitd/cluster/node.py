"""A node's part in a cluster, put together: buckets, breakers, the sync job, who is alive, what others tell.

Knows no driver: the store and the bus are given. Every step of its jobs is small, so that checks are never held up.
"""

from __future__ import annotations

import asyncio
import random as random_source
from collections.abc import Callable, Iterable
from functools import partial
from math import ceil
from typing import Final, NamedTuple, Protocol

from ratelimitd.clock import Clock
from ratelimitd.cluster.accuracy import Accuracy, promised_excess
from ratelimitd.cluster.cache import BucketCache
from ratelimitd.cluster.gossip import Bus, Gossip, take
from ratelimitd.cluster.membership import Membership, Pulse, SharedTime
from ratelimitd.cluster.pending import HASH_TAGS, Bucket, SharedStore, Timers
from ratelimitd.cluster.shared_buckets import SharedBuckets
from ratelimitd.cluster.store_servers import StoreServer
from ratelimitd.cluster.strict_buckets import StrictBuckets
from ratelimitd.cluster.sync import Partition, Surroundings
from ratelimitd.counters import CheckStats
from ratelimitd.errors import RateLimitdError
from ratelimitd.ledger.shared_state import SharedState, has_plenty
from ratelimitd.model import US_PER_S
from ratelimitd_wire.breaker import Breaker, State

# The circuit breakers of a node, one for each server of the shared state, and which hash tags each is for.

JITTER_US: Final = US_PER_S // 2
"""Nodes whose breakers opened together probe apart, by up to so much."""


class Breakers:
    """The breakers; each opens after ``failures`` and is probed after ``recovery_s``. ``random`` is from 0 to 1."""

    def __init__(
        self,
        store: SharedStore,
        clock: Clock,
        timers: Timers,
        *,
        stats: CheckStats,
        failures: int,
        recovery_s: int,
        random: Callable[[], float],
        report: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._timers = timers
        self._stats = stats
        self._failures = failures
        self._recovery_us = recovery_s * US_PER_S
        self._random = random
        self._report = report
        self._shards: dict[str, StoreServer] = {}

    def of_tag(self, tag: int) -> StoreServer:
        """The server that holds a hash tag now."""
        name = self._store.shard_of(tag)
        shard = self._shards.get(name)
        if shard is None:
            breaker = Breaker(
                self._clock.monotonic_us,
                failure_threshold=self._failures,
                recovery_us=self._recovery_us,
                jitter_us=lambda: int(self._random() * JITTER_US),
            )
            shard = StoreServer(
                name, tag, breaker, self._clock, self._stats, self._timers, self._report
            )
            self._shards[name] = shard
        return shard

    def watch(self, tags: Iterable[Partition]) -> None:
        """Follow hash tags that have moved, and probe the servers whose breakers want it."""
        held = {}
        for tag in tags:
            shard = tag.shard = self.of_tag(tag.number)
            shard.tag = tag.number
            held[shard.name] = shard
        for name, shard in self._shards.items():
            if name not in held:
                shard.left()
        self._shards = held
        for shard in held.values():
            # Without a connection the probe would fail, and the next one be as long away: the attempts to connect, one
            # a second at least, find out sooner that the server is back.
            if self._store.is_connected(shard.tag) and shard.begins_probe():
                self._store.probe(shard.tag, partial(_probed, shard))

    @property
    def state(self) -> State:
        """Of the worst of them."""
        states = {shard.state for shard in self._shards.values()}
        for state in (State.OPEN, State.HALF_OPEN):
            if state in states:
                return state
        return State.CLOSED

    @property
    def retry_after_us(self) -> int:
        """Until the last of those that are open is tried again; 0 while none is."""
        open_ones = [shard for shard in self._shards.values() if shard.is_open]
        return max((shard.open_error().retry_after_us for shard in open_ones), default=0)


def _probed(shard: StoreServer, error: RateLimitdError | None) -> None:
    if error is None:
        shard.answered()
    else:
        shard.failed(error)


STEP_MS: Final = 6.25
"""Longest pause between two steps of the sync job: packing, re-reading and freeing ride on them."""

WATCH_S: Final = 0.1
"""How often it is looked whether a breaker wants a probe, and whether hash tags have moved."""

JOIN_S: Final = 1.0
"""How long a node waits at its start to hear of the others; it serves without them afterwards."""


class Store(SharedStore, Pulse, Protocol):
    """All that a node asks of the shared state."""


class Options(NamedTuple):
    """What an operator has chosen."""

    sync_interval_ms: int
    cache_entries: int
    cache_ttl_s: int
    breaker_failures: int
    breaker_recovery_s: int
    strict: bool
    decides_alone: bool
    """While a breaker is open, checks are decided by what the node itself knows."""
    callers_time: bool
    timeout_ms: int = 20
    """How long a check waits for the shared state."""


class Cluster:
    """One node's part. Needs a running event loop.

    ``incarnation`` is the node's name and something that tells it from an earlier one of that name. ``stored_name``
    makes the name in the store of a bucket's key; ``fingerprint``: of the secret behind it. ``report`` takes one line
    for an operator. ``rules_changed`` is called when another node says so.
    """

    def __init__(
        self,
        store: Store,
        bus: Bus,
        options: Options,
        *,
        incarnation: str,
        stored_name: Callable[[bytes], bytes],
        fingerprint: Callable[[], str],
        clock: Clock,
        shared_time: SharedTime,
        stats: CheckStats,
        report: Callable[[str], None],
        rules_changed: Callable[[], None],
        random: Callable[[], float] = random_source.random,
    ) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self._sync_interval_ms = options.sync_interval_ms
        self._clock = clock
        self._rules_changed = rules_changed
        self._shared_time = shared_time
        self.news = Gossip(bus, clock)
        self.accuracy = Accuracy(stats)
        self.membership = Membership(
            store,
            incarnation,
            fingerprint=fingerprint,
            clock=clock,
            shared_time=shared_time,
            report=report,
        )
        self._breakers = Breakers(
            store,
            clock,
            loop,
            stats=stats,
            failures=options.breaker_failures,
            recovery_s=options.breaker_recovery_s,
            random=random,
            report=report,
        )
        around = Surroundings(store, clock, loop, self)
        self._tags = [
            Partition(number, self._breakers.of_tag(number), incarnation, around)
            for number in range(0, HASH_TAGS, store.tags_per_batch)
        ]
        by_octet = [tag for tag in self._tags for _ in range(store.tags_per_batch)]
        self.cache = BucketCache(
            max_entries=options.cache_entries,
            ttl_us=options.cache_ttl_s * US_PER_S,
            now_us=clock.monotonic_us(),
        )
        self.buckets: SharedBuckets | StrictBuckets
        self._eventual: SharedBuckets | None = None
        if options.strict:
            self.buckets = StrictBuckets(
                store=store,
                tags=by_octet,
                stored_name=stored_name,
                callers_time=options.callers_time,
            )
        else:
            self.buckets = self._eventual = SharedBuckets(
                store=store,
                tags=by_octet,
                cache=self.cache,
                stored_name=stored_name,
                clock=clock,
                timers=loop,
                stats=stats,
                membership=self.membership,
                news=self.news,
                accuracy=self.accuracy,
                answer_s=options.timeout_ms / 1000,
                decides_alone=options.decides_alone,
            )
        self._steps = ceil(options.sync_interval_ms / STEP_MS)
        self._step = 0

    # What the node's jobs call

    @property
    def step_s(self) -> float:
        """How often :meth:`sync_step` is to be called."""
        return self._sync_interval_ms / 1000 / self._steps

    def sync_step(self) -> None:
        """Send what a part of the hash tags has to settle; after a whole interval all have."""
        for tag in self._tags[self._step :: self._steps]:
            tag.sync()
        self._step = (self._step + 1) % self._steps
        if self._eventual is not None:
            self._eventual.step()
        if not self._step:
            self.news.tell()

    def watch(self) -> None:
        """Probe the servers whose breakers want it, and follow hash tags that have moved."""
        self._breakers.watch(self._tags)

    def take(self, payload: bytes) -> None:
        """Go by a message of another node."""
        if self._eventual is not None:
            take(payload, self._eventual, rules_changed=self._rules_changed)
        elif payload[:1] == b"R":
            self._rules_changed()

    def resync(self) -> None:
        """Messages of others may have been lost."""
        self._rules_changed()
        if self._eventual is not None:
            self._eventual.resync()

    async def settle(self, timeout_s: float) -> bool:
        """Send all that there is to settle, for a node that leaves; false: not all has arrived in time."""
        deadline_us = self._clock.monotonic_us() + round(timeout_s * US_PER_S)
        while not all(tag.is_settled for tag in self._tags):
            if self._clock.monotonic_us() >= deadline_us:
                return False
            for tag in self._tags:
                tag.sync()
            await asyncio.sleep(WATCH_S / 16)
        return True

    # What the hash tags tell

    def settled(self, bucket: Bucket, tokens: int, before: SharedState | None) -> None:
        """A batch that charged ``tokens`` to a bucket was acknowledged; ``before`` was its view's base."""
        view = bucket.view
        if view.base is not None and has_plenty(view.base, view.rule):
            # By far the most: neither overdrawn nor in their last half: nothing to publish.
            self.accuracy.take_counts(bucket)
            return
        self.accuracy.settled(bucket, tokens, before, self._clock.now_us())
        self.news.settled(bucket, before)

    def lost(self, tokens: int) -> None:
        """So many tokens were allowed and will not be charged."""
        self.accuracy.lost(tokens)

    def defect(self, error: Exception) -> None:
        """A batch cannot be sent, or is answered with what is no answer: for the log."""
        self._loop.call_exception_handler(
            {"message": "spends cannot be settled", "exception": error}
        )

    # What others read

    @property
    def worst_excess(self) -> float:
        """The most by which a bucket was overdrawn lately, as a part of its limit."""
        return self.accuracy.worst_excess(self._clock.now_us())

    @property
    def promised_excess(self) -> float:
        """The most that may be, of a window of one second, as things were in the time of :attr:`worst_excess`."""
        now_us, shared_time = self._clock.now_us(), self._shared_time
        skew_us = abs(shared_time.wall_us() - now_us)
        promise = promised_excess(self.membership.count, shared_time.round_trip_us, skew_us)
        return self.accuracy.largest_promise(now_us, promise)

    @property
    def is_connected(self) -> bool:
        """Whether all breakers are closed."""
        return self.breaker_state is State.CLOSED

    @property
    def breaker_state(self) -> State:
        """Of the worst breaker."""
        return self._breakers.state

    @property
    def retry_after_us(self) -> int:
        """Until every server whose breaker is open will have been tried again; 0 while none is."""
        return self._breakers.retry_after_us

    @property
    def sync_lag_s(self) -> float:
        """Age of the oldest batch that was not acknowledged yet."""
        now_us = self._clock.now_us()
        oldest = [tag.oldest_us for tag in self._tags if tag.oldest_us is not None]
        return max(0, now_us - min(oldest)) / US_PER_S if oldest else 0.0

    @property
    def unsettled_buckets(self) -> int:
        """Buckets with spends that the store may not know of."""
        return sum(tag.unsettled_buckets for tag in self._tags)
