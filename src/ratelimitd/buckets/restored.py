"""Buckets of before a restart that nobody has asked for since, by the name they had on disk.

On disk a bucket goes by a digest of its key (ADR 0015), so that it cannot be put into the table by name. It waits here
until its first check, which knows the key. Never does I/O, never reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.snapshot_format import Value

SHARDS: Final = 2_048
"""A fixed number: at a million buckets about 490 to a shard, so that no step over one takes long."""


class ColdBuckets:
    """Buckets by the stored form of their key."""

    def __init__(self, keys: BucketKeys) -> None:
        self._keys = keys
        self._shards: list[dict[bytes, Value]] = [{} for _ in range(SHARDS)]
        self._entries = 0
        self._drop_next = 0
        self._sweep_next = 0

    def __len__(self) -> int:
        """How many there are."""
        return self._entries

    def put(self, stored_key: bytes, value: Value) -> None:
        """Keep ``value``, instead of what was kept under that name."""
        shard = self._shard(stored_key)
        self._entries += stored_key not in shard
        shard[stored_key] = value

    def discard(self, stored_key: bytes) -> None:
        """Forget the bucket of that name, if there is one."""
        self._entries -= self._shard(stored_key).pop(stored_key, None) is not None

    def get(self, key: bytes) -> Value | None:
        """The bucket of ``key``, or ``None``."""
        stored_key = self._keys.stored(key)
        return self._shard(stored_key).get(stored_key)

    def take(self, key: bytes) -> Value | None:
        """The bucket of ``key``, which is gone from here afterwards; or ``None``."""
        stored_key = self._keys.stored(key)
        value = self._shard(stored_key).pop(stored_key, None)
        self._entries -= value is not None
        return value

    def drop_any(self) -> None:
        """Forget one bucket; there is at least one."""
        while not self._shards[self._drop_next]:
            self._drop_next = (self._drop_next + 1) % SHARDS
        self._shards[self._drop_next].popitem()
        self._entries -= 1

    def items(self, index: int) -> list[tuple[bytes, Value]]:
        """The (stored key, value) pairs of shard ``index``."""
        return list(self._shards[index].items())

    def sweep(self, is_expired: Callable[[Value], bool]) -> int:
        """Drop the expired buckets of the next shard, about 0.2 ms; returns how many."""
        shard = self._shards[self._sweep_next]
        self._sweep_next = (self._sweep_next + 1) % SHARDS
        expired = [stored_key for stored_key, value in shard.items() if is_expired(value)]
        for stored_key in expired:
            del shard[stored_key]
        self._entries -= len(expired)
        return len(expired)

    def map(self, change: Callable[[Value], Value | None]) -> None:
        """Replace every value by what ``change`` says; ``None`` drops it. Takes about 0.5 s for a million."""
        for index, shard in enumerate(self._shards):
            changed = ((stored_key, change(value)) for stored_key, value in shard.items())
            self._shards[index] = kept = {
                stored_key: value for stored_key, value in changed if value is not None
            }
            self._entries -= len(shard) - len(kept)

    def _shard(self, stored_key: bytes) -> dict[bytes, Value]:
        return self._shards[(stored_key[0] << 8 | stored_key[1]) % SHARDS]
