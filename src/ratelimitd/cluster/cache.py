"""The shared buckets in a node's memory: views of those in use, the others packed; evicts the least recently used.

A view is several objects that the garbage collector tracks, a packed bucket one that it does not. An idle bucket is
packed down to its base; one with something to settle is never packed. See ADR 0026.

Two generations approximate the order of use: a used bucket moves to the young one; when its period ends, it becomes the
old one, whose views are packed, and whose packed buckets are dropped. Work is done in small steps: a few buckets at a
time, packed ones by hash tag.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Final

from ratelimitd.cluster.packed import Packed, pack, unpack
from ratelimitd.cluster.pending import HASH_TAGS, Bucket
from ratelimitd.ledger.shared_state import SharedState
from ratelimitd.model import US_PER_S

IDLE_US: Final = US_PER_S // 2
"""Shortest period of the young generation. When it ends, views are packed in turn unless they are used before that: at
once in a small cache, after up to another period in a full one."""

MOVED_PER_STEP: Final = 64
"""Views packed or kept in one step, about 0.1 ms; more while buckets are added."""


class BucketCache:
    """At most ``max_entries`` buckets, for at most ``ttl_us`` after their last use. ``now_us`` is monotonic."""

    def __init__(self, *, max_entries: int, ttl_us: int, now_us: int) -> None:
        self._max_entries = max_entries
        self._generation_us = ttl_us // 2
        self.young: dict[bytes, Bucket] = {}
        """Recently used buckets, by key; reading this first saves a call of :meth:`get`."""
        self._old: dict[bytes, Bucket] = {}
        self._unsettled: dict[bytes, Bucket] = {}
        """Old ones with something to settle; they join the next young generation."""
        self._rotated_us = now_us
        self._added = 0
        self._packed_young: list[dict[bytes, Packed]] = [{} for _ in range(HASH_TAGS)]
        self._packed_old: list[dict[bytes, Packed]] = [{} for _ in range(HASH_TAGS)]
        self._packed_count = 0
        self.cold = 0
        """Buckets with a cold spend in a partition: known, but neither packed nor in use."""
        self._stale_young: list[dict[bytes, Packed]] = [{} for _ in range(HASH_TAGS)]
        """Packed buckets that may have changed in the store; they expire as the others do."""
        self._stale_old: list[dict[bytes, Packed]] = [{} for _ in range(HASH_TAGS)]
        self._next_tag = 0
        self._tag_rotated_us = now_us
        self.evicted_total = 0
        """Buckets evicted for lack of room."""
        self.expired_total = 0
        """Buckets dropped because they were unused."""

    def __len__(self) -> int:
        """Return the number of known buckets."""
        in_use = len(self.young) + len(self._old) + len(self._unsettled)
        return in_use + self._packed_count + self.cold

    def get(self, key: bytes) -> Bucket | None:
        """Return the bucket of ``key``, if it is in use."""
        return self.young.get(key) or self.get_old(key)

    def get_old(self, key: bytes) -> Bucket | None:
        """Return the bucket of ``key`` from the old generation, and move it to the young one."""
        bucket = self._old.pop(key, None) or self._unsettled.pop(key, None)
        if bucket is not None:
            self.young[key] = bucket
        return bucket

    def take_packed(self, name: bytes) -> SharedState | None:
        """Remove and return the last known state of a packed bucket; the caller puts it back with :meth:`add`."""
        packed = self.pop_packed(name)
        return None if packed is None else unpack(packed)

    def end_cold(self, packed: Mapping[bytes, Packed]) -> None:
        """Store the states of buckets whose cold spends are settled."""
        young = self._packed_young
        for name, state in packed.items():
            young[name[0]][name] = state
        self.cold -= len(packed)
        self._packed_count += len(packed)

    def pop_packed(self, name: bytes) -> Packed | None:
        """Remove and return the last known state of a packed bucket, still packed."""
        packed = self._packed_young[name[0]].pop(name, None)
        if packed is None:
            packed = self._packed_old[name[0]].pop(name, None)
        if packed is not None:
            self._packed_count -= 1
        return packed

    def distrust_packed(self, number: int) -> None:
        """Make the packed buckets of a hash tag stale: messages about them may have been lost."""
        for packed, stale in (
            (self._packed_young, self._stale_young),
            (self._packed_old, self._stale_old),
        ):
            stale[number].update(packed[number])
            packed[number] = {}

    def distrust(self, name: bytes, shared: SharedState | None = None) -> None:
        """Make a packed bucket stale, because it has changed; ``shared`` is a state of the store, if it is known."""
        known = self.take_packed(name) or self.take_stale(name)
        if known is not None:
            if shared is None or _order(shared) < _order(known):
                shared = known
            self._stale_young[name[0]][name] = pack(shared)
            self._packed_count += 1

    def take_stale(self, name: bytes) -> SharedState | None:
        """Remove and return the last known state of a stale bucket; the caller puts it back with :meth:`add`."""
        packed = self._pop_stale(name)
        return None if packed is None else unpack(packed)

    def _pop_stale(self, name: bytes) -> Packed | None:
        packed = self._stale_young[name[0]].pop(name, None)
        if packed is None:
            packed = self._stale_old[name[0]].pop(name, None)
        if packed is not None:
            self._packed_count -= 1
        return packed

    def _drop_packed(self, name: bytes) -> None:
        if self.pop_packed(name) is None:
            self._pop_stale(name)

    def put_packed(self, name: bytes, shared: SharedState) -> None:
        """Keep the state of a bucket that is not in use."""
        self._drop_packed(name)
        self._packed_young[name[0]][name] = pack(shared)
        self._packed_count += 1

    def add(self, bucket: Bucket) -> None:
        """Put a bucket into use."""
        self._drop_packed(bucket.name)
        self.young[bucket.key] = bucket
        bucket.tag.buckets[bucket.name] = bucket
        bucket.is_cached = True
        self._added += 1

    def step(self, now_us: int) -> None:
        """Do one small step of the periodic work; called often."""
        moves = MOVED_PER_STEP + 2 * self._added
        self._added = 0
        while self._old and moves:
            moves -= 1
            self._retire(self._old.popitem()[1])
        if not self._old and now_us - self._rotated_us >= IDLE_US:
            self._rotated_us = now_us
            self._old, self.young, self._unsettled = self.young, self._unsettled, {}
        self._expire(now_us)
        # Cold ones stay until they are settled; partitions bound their number.
        while len(self) > max(self._max_entries, self.cold):
            self._evict_some()

    def _retire(self, bucket: Bucket) -> None:
        if not bucket.is_settled:
            self._unsettled[bucket.key] = bucket
            return
        self._forget(bucket)
        if bucket.view.base is not None:
            self.put_packed(bucket.name, bucket.view.base)

    @staticmethod
    def _forget(bucket: Bucket) -> None:
        """Drop a bucket. An unsettled one stays in its partition until it is settled."""
        bucket.is_cached = False
        if bucket.is_settled:
            bucket.tag.buckets.pop(bucket.name, None)

    def _expire(self, now_us: int) -> None:
        """Rotate the packed generations, one hash tag after another, each once in half the time to live."""
        pause_us = self._generation_us // HASH_TAGS
        # After a long pause, each tag at most once.
        self._tag_rotated_us = max(self._tag_rotated_us, now_us - self._generation_us)
        while now_us - self._tag_rotated_us >= pause_us:
            self._tag_rotated_us += pause_us
            self.expired_total += self._rotate_next_tag()

    def _rotate_next_tag(self) -> int:
        """Drop the old packed buckets of the next tag; return their number."""
        number, self._next_tag = self._next_tag, (self._next_tag + 1) % HASH_TAGS
        dropped = len(self._packed_old[number]) + len(self._stale_old[number])
        self._packed_old[number], self._packed_young[number] = self._packed_young[number], {}
        self._stale_old[number], self._stale_young[number] = self._stale_young[number], {}
        self._packed_count -= dropped
        return dropped

    def _evict_some(self) -> None:
        """Drop the older packed buckets of the next tag that has any, else the longest unused of those in use."""
        if self._packed_count:
            evicted = 0
            while not evicted:
                evicted = self._rotate_next_tag()
            self.evicted_total += evicted
            return
        generation = self._old or self._unsettled or self.young
        for key in [*islice(generation, len(self) - self._max_entries)]:
            self._forget(generation.pop(key))
            self.evicted_total += 1


def _order(shared: SharedState) -> tuple[int, int, int]:
    """Return what is higher for a later state, as ``standing`` does, which needs the algorithm."""
    latest_us = shared.state[1] if isinstance(shared.state, tuple) else 0
    return shared.generation, shared.revision, latest_us
