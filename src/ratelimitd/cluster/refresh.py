"""Refreshes the views of buckets in use: adopts states of the store and of other nodes, and re-reads denied buckets.

A view that denies does not ask the store, and messages of other nodes may be lost; hence the periodic reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from ratelimitd.clock import Clock
from ratelimitd.cluster.accuracy import Accuracy
from ratelimitd.cluster.cache import BucketCache
from ratelimitd.cluster.gossip import Gossip
from ratelimitd.cluster.pending import Bucket
from ratelimitd.cluster.sync import Partition
from ratelimitd.errors import RateLimitdError
from ratelimitd.ledger.shared_state import SharedState

if TYPE_CHECKING:
    from ratelimitd.cluster.redis.store import RedisStore

REREADS_PER_STEP: Final = 32

PAUSES_US: Final = (100_000, 300_000, 700_000, 1_000_000)
"""Pauses between two reads of a bucket; the last one repeats."""

MAX_BUCKETS: Final = 100_000
"""Limit of denied buckets that are re-read in the background; others are refreshed when a check next asks the store."""


class _Look(NamedTuple):
    due_us: int
    times: int
    bucket: Bucket


class RefreshQueue:
    """The denied buckets of a node, in order of their next read. ``now_us`` is monotonic."""

    def __init__(self) -> None:
        self._queues = tuple(deque[_Look]() for _ in PAUSES_US)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def denied(self, bucket: Bucket, now_us: int) -> None:
        """Queue a bucket on its first denial since it was last read."""
        bucket.is_denied = True
        if not bucket.is_watched and self._count < MAX_BUCKETS:
            bucket.is_watched = True
            self._later(bucket, 0, now_us)

    def due(self, now_us: int, most: int) -> list[tuple[Bucket, int]]:
        """Return the next buckets to read, with their number of earlier reads; report each by :meth:`looked`.

        A bucket without a denial since its last read is dropped.
        """
        looks: list[tuple[Bucket, int]] = []
        for queue in self._queues:
            # All entries of a queue have the same pause, so it is in order of time.
            while queue and queue[0].due_us <= now_us and most:
                most -= 1
                _, times, bucket = queue.popleft()
                self._count -= 1
                if bucket.is_denied:
                    bucket.is_denied = False
                    looks.append((bucket, times))
                else:
                    bucket.is_watched = False
        return looks

    def looked(self, bucket: Bucket, times: int, now_us: int, *, is_news: bool) -> None:
        """Schedule the next read: later each time, soon if the state had changed."""
        self._later(bucket, 0 if is_news else times + 1, now_us)

    def _later(self, bucket: Bucket, times: int, now_us: int) -> None:
        step = min(times, len(PAUSES_US) - 1)
        self._queues[step].append(_Look(now_us + PAUSES_US[step], times, bucket))
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
        self._doubted: list[bytes] = []
        self._unsynced: Iterator[int] = iter(())

    def adopt(self, bucket: Bucket, shared: SharedState | RateLimitdError | None) -> None:
        """Adopt the state read of a known bucket; ignores errors, and ``None`` of a full bucket."""
        if isinstance(shared, SharedState):
            bucket.tag.first_word()
            bucket.view.hear(shared)
            self._accuracy.take_counts(bucket)

    def heard(self, name: bytes, shared: SharedState) -> None:
        """Adopt the state of a bucket in the store."""
        bucket = self._tags[name[0]].bucket(name)
        if bucket is None:
            self._cache.pop_packed(name)  # its next check reads it
        else:
            self.adopt(bucket, shared)

    def was_reset(self, name: bytes, shared: SharedState) -> None:
        """Adopt the state of a bucket that this node has reset, and notify the others."""
        self.heard(name, shared)
        self._gossip.was_reset(name)

    def was_changed(self, name: bytes, is_low: bool) -> None:  # noqa: FBT001 -- bound by position
        """Re-read a bucket that a hold has changed in the store; notify the others if it is low."""
        self.doubt(name)
        if is_low:
            self._gossip.changed(name)

    def doubt(self, name: bytes) -> None:
        """Re-read a bucket that has changed in the store, or drop it if it is packed."""
        bucket = self._tags[name[0]].bucket(name)
        if bucket is None:
            self._cache.pop_packed(name)
        else:
            self._store.read(name, bucket.view.rule, partial(self._cleared_up, bucket))

    def _cleared_up(self, bucket: Bucket, shared: SharedState | RateLimitdError | None) -> None:
        self.adopt(bucket, shared)
        if isinstance(shared, RateLimitdError) and not bucket.tag.server.is_open:
            # The message is not repeated, so the bucket would stay stale until it is settled.
            self._doubted.append(bucket.name)

    def resync(self) -> None:
        """Drop packed buckets and re-read those in use, in steps; called when messages may have been lost."""
        self._cache.forget_all_packed()
        self._unsynced = iter(range(len(self._tags)))

    def step(self) -> None:
        """Do the periodic work in small steps: pack idle buckets, re-read doubted and denied ones."""
        self._doubt_next_tags()
        for _ in range(min(REREADS_PER_STEP, len(self._doubted))):
            self.doubt(self._doubted.pop())
        now_us = self._clock.monotonic_us()
        self._cache.step(now_us)
        for bucket, times in self.queue.due(now_us, REREADS_PER_STEP):
            if bucket.tag.server.is_open:
                self.queue.looked(bucket, times, now_us, is_news=False)
            else:
                done = partial(self._looked, bucket, times)
                self._store.read(bucket.name, bucket.view.rule, done)

    def _doubt_next_tags(self) -> None:
        """Doubt the buckets in use of the next hash tags after a :meth:`resync`, one tag at a time."""
        while len(self._doubted) < REREADS_PER_STEP:
            number = next(self._unsynced, None)
            if number is None:
                return
            # Those packed since the resync may be stale, too.
            self._cache.forget_packed_of(number)
            tag = self._tags[number]
            if tag.number == number:  # else it is one of several that share a sender
                self._doubted += tag.names

    def _looked(
        self, bucket: Bucket, times: int, shared: SharedState | RateLimitdError | None
    ) -> None:
        before = bucket.view.base
        self.adopt(bucket, shared)
        is_news = bucket.view.base is not before
        self.queue.looked(bucket, times, self._clock.monotonic_us(), is_news=is_news)
