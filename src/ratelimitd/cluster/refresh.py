"""Refreshes the views of buckets in use: adopts states of the store and of other nodes, and re-reads watched buckets.

A view that denies, or answers peeks, settles nothing, and other nodes announce only that half is used up, in messages
that may be lost; hence the periodic reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from ratelimitd.clock import Clock
from ratelimitd.cluster.accuracy import Accuracy
from ratelimitd.cluster.cache import BucketCache
from ratelimitd.cluster.gossip import Gossip
from ratelimitd.cluster.pending import Bucket
from ratelimitd.cluster.sync import Partition
from ratelimitd.errors import RateLimitdError
from ratelimitd.ledger.shared_state import SharedState
from ratelimitd.model import Limit

if TYPE_CHECKING:
    from ratelimitd.cluster.redis.store import RedisStore

REREADS_PER_STEP: Final = 32

DISTRUSTED_PER_STEP: Final = 8
"""Hash tags whose packed buckets become stale in one step: about 1 ms with a million of them."""

PAUSES_US: Final = (100_000, 300_000, 700_000, 1_000_000)
"""Pauses between two reads of a bucket; the last one repeats."""

MAX_BUCKETS: Final = 100_000
"""Limit of watched buckets that are re-read in the background; others join when there is room."""


class _Read(NamedTuple):
    due_us: int
    times: int
    bucket: Bucket


class RefreshQueue:
    """The watched buckets of a node, in order of their next read. ``now_us`` is monotonic."""

    def __init__(self) -> None:
        self._queues = tuple(deque[_Read]() for _ in PAUSES_US)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def watch(self, bucket: Bucket, now_us: int) -> None:
        """Queue a bucket on its first denial or peek since it was last read."""
        if not bucket.is_queued:
            if self._count >= MAX_BUCKETS:
                return  # the next denial or peek tries again
            bucket.is_queued = True
            self.schedule(bucket, 0, now_us)
        bucket.is_watched = True

    def due(self, now_us: int, most: int) -> list[tuple[Bucket, int]]:
        """Return the next buckets to read, with their reads without a change so far; pass each to :meth:`schedule`.

        A bucket without a denial or a peek since its last read is dropped.
        """
        reads: list[tuple[Bucket, int]] = []
        for queue in self._queues:
            # All entries of a queue have the same pause, so it is in order of time.
            while queue and queue[0].due_us <= now_us and most:
                most -= 1
                _, times, bucket = queue.popleft()
                self._count -= 1
                if bucket.is_watched:
                    bucket.is_watched = False
                    reads.append((bucket, times))
                else:
                    bucket.is_queued = False
        return reads

    def schedule(self, bucket: Bucket, times: int, now_us: int) -> None:
        """Schedule the next read, later the more reads have shown no change."""
        step = min(times, len(PAUSES_US) - 1)
        self._queues[step].append(_Read(now_us + PAUSES_US[step], times, bucket))
        self._count += 1


class Refresh:
    """Updates the shared buckets of one node after their first check. ``tags`` are the partitions by hash tag."""

    def __init__(
        self,
        *,
        store: RedisStore,
        tags: Sequence[Partition],
        cache: BucketCache,
        clock: Clock,
        gossip: Gossip,
        accuracy: Accuracy,
    ) -> None:
        self._store = store
        self._tags = tags
        self._cache = cache
        self._clock = clock
        self._gossip = gossip
        self._accuracy = accuracy
        self.queue = RefreshQueue()
        self._stale: list[bytes] = []
        self._learning: set[bytes] = set()
        """Names of unknown buckets that are read."""
        self._unread: dict[bytes, int] = {}
        """Names of buckets whose read failed, with the time of the next one, in order."""
        self._unsynced_tags = self._trusted_tags = 0
        """Hash tags whose buckets in use are not read, and whose packed buckets are not distrusted since a resync."""
        self._next_tag = 0

    def adopt(self, bucket: Bucket, shared: SharedState | RateLimitdError | None) -> None:
        """Adopt the state read of a known bucket; ignores errors, and ``None`` of a full bucket."""
        if isinstance(shared, SharedState):
            bucket.tag.forgive_outage()
            bucket.view.adopt(shared)
            self._accuracy.take_counts(bucket)

    def adopt_by_name(self, name: bytes, shared: SharedState) -> None:
        """Adopt the state of a bucket in the store."""
        bucket = self._tags[name[0]].bucket(name)
        if bucket is None:
            self._cache.distrust(name, shared)  # the store decides its next check
        else:
            self.adopt(bucket, shared)

    def learn(self, name: bytes, rule: Limit) -> None:
        """Read an unknown bucket whose first check was not answered in time, so that a later check finds it known."""
        if name not in self._learning and len(self._learning) < MAX_BUCKETS:
            self._learning.add(name)
            self._store.read(name, rule, partial(self._learned, name))

    def _learned(self, name: bytes, shared: SharedState | RateLimitdError | None) -> None:
        self._learning.discard(name)
        bucket = self._tags[name[0]].bucket(name)
        if bucket is not None:
            self.adopt(bucket, shared)
        elif isinstance(shared, SharedState):
            self._cache.put_packed(name, shared)

    def was_reset(self, name: bytes, shared: SharedState) -> None:
        """Adopt the state of a bucket that this node has reset, and notify the others."""
        self.adopt_by_name(name, shared)
        self._gossip.was_reset(name)

    def was_changed(self, name: bytes, is_low: bool) -> None:  # noqa: FBT001 -- bound by position
        """Re-read a bucket that a hold has changed in the store; notify the others if it is low."""
        self.reread(name)
        if is_low:
            self._gossip.changed(name)

    def reread(self, name: bytes, done: Callable[[], None] = lambda: None) -> None:
        """Re-read a bucket that has changed in the store, and call ``done``; one that is packed becomes stale."""
        bucket = self._tags[name[0]].bucket(name)
        if bucket is None:
            self._cache.distrust(name)
            done()
        else:
            self._store.read(name, bucket.view.rule, partial(self._reread_done, name, done))

    def _reread_done(
        self, name: bytes, done: Callable[[], None], shared: SharedState | RateLimitdError | None
    ) -> None:
        self._take_read(name, shared)
        done()

    def _take_read(self, name: bytes, shared: SharedState | RateLimitdError | None) -> None:
        if isinstance(shared, SharedState):
            # By name: it may have been packed and unpacked as another object meanwhile.
            self.adopt_by_name(name, shared)
        elif shared is not None and len(self._unread) < MAX_BUCKETS:
            # The message is not repeated, so the bucket would stay stale until it is settled.
            self._unread.setdefault(name, self._clock.monotonic_us() + PAUSES_US[-1])

    def resync(self) -> None:
        """Distrust packed buckets, and re-read those in use, in steps; called when messages may have been lost."""
        self._unsynced_tags = self._trusted_tags = len(self._tags)

    def step(self) -> None:
        """Do the periodic work in small steps: pack idle buckets, re-read stale and watched ones."""
        now_us = self._clock.monotonic_us()
        for name, due_us in tuple(islice(self._unread.items(), REREADS_PER_STEP)):
            if due_us > now_us:
                break
            del self._unread[name]
            if self._tags[name[0]].server.is_open:
                self._unread[name] = now_us + PAUSES_US[-1]
            else:
                self.reread(name)
        for _ in range(min(DISTRUSTED_PER_STEP, self._trusted_tags)):
            self._trusted_tags -= 1
            self._cache.distrust_packed(self._trusted_tags)
        self._queue_unsynced()
        for _ in range(min(REREADS_PER_STEP, len(self._stale))):
            self.reread(self._stale.pop())
        self._cache.step(now_us)
        for bucket, times in self.queue.due(now_us, REREADS_PER_STEP):
            if bucket.tag.server.is_open:
                self.queue.schedule(bucket, times + 1, now_us)
            else:
                done = partial(self._read_done, bucket, times)
                self._store.read(bucket.name, bucket.view.rule, done)

    def _queue_unsynced(self) -> None:
        """Queue the buckets in use of the next hash tags after a :meth:`resync`, one tag at a time.

        A resync during another one goes on with the next tag, or the last tags would never be read.
        """
        while self._unsynced_tags and len(self._stale) < REREADS_PER_STEP:
            self._unsynced_tags -= 1
            number, self._next_tag = self._next_tag, (self._next_tag + 1) % len(self._tags)
            # Those packed since the resync may be stale, too.
            self._cache.distrust_packed(number)
            tag = self._tags[number]
            if tag.number == number:  # else it is one of several that share a sender
                self._stale += tag.names

    def _read_done(
        self, bucket: Bucket, times: int, shared: SharedState | RateLimitdError | None
    ) -> None:
        before = bucket.view.base
        self.adopt(bucket, shared)
        if shared is None:
            bucket.view.end_alone()
        has_changed = bucket.view.base is not before
        if has_changed and not bucket.is_cached:  # it was packed before the answer came
            self._take_read(bucket.name, shared)
        self.queue.schedule(bucket, 0 if has_changed else times + 1, self._clock.monotonic_us())
