"""The node's buckets: at most so many entries, each shard in least-recently-used order, every step small.

Never reads a clock, never does I/O, never judges: it applies the algorithm it is given. See ADR 0014.

One dict of a million entries would be simpler, and would stall: it grows all at once, and finding its oldest entry
walks over everything that was touched meanwhile (37 ms at worst). So the table is many dicts of about 620 entries.
Touching a bucket takes it out and puts it back at the end, which keeps each dict in order of use at no memory of its
own; a small dict pays for that with a compaction of a few µs every some hundred touches. 620 is chosen by CPython's
growth rule (three times the entries in use, rounded up to a power of two): at 620 ± 60 a dict settles at 2,048 slots,
59 bytes an entry; at 690 it would settle at twice that.

Keys are ``bytes`` and values ``int`` or ``bytes``: the cyclic garbage collector never looks at a dict of those.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

from ratelimitd.algorithms import Decide
from ratelimitd.buckets.codec import Value, is_over, pack, unpack, window_us
from ratelimitd.model import US_PER_S, Outcome, Rule
from ratelimitd.stats import CheckStats

SHARD_ENTRIES: Final = 620

LATE_US: Final = 10 * US_PER_S
"""How long an expired bucket is kept: twice the 5 s by which a caller's timestamp may lag behind the node's clock."""

IDLE_US: Final = 3600 * US_PER_S
"""How long an untouched bucket is kept when time is the callers' own, for windows up to half of it."""

# Marks divide a shard into what was touched before and after some moment. No key is that short: a key is an
# identifier, which is never empty, and a scope.
_WRITTEN: Final = b""
_IDLE: Final = b"\0"


class ColdBuckets(Protocol):
    """Buckets of before a restart that nobody has asked for since."""

    def __len__(self) -> int:
        """How many there are."""

    def take(self, key: bytes) -> Value | None:
        """The bucket of ``key``, which is gone from here afterwards; ``None`` when there is none."""

    def drop_any(self) -> None:
        """Forget one bucket; there is at least one."""


class BucketTable:
    """At most ``max_entries`` buckets. One writer: the event loop.

    ``evicted_total`` counts buckets that left only because of the bound, ``expired_total`` those that equalled a fresh
    one. With ``callers_time`` the times inside the buckets are not the node's, and buckets expire by disuse alone.
    """

    def __init__(self, max_entries: int, stats: CheckStats, *, callers_time: bool = False) -> None:
        self.max_entries = max_entries
        self.evicted_total = 0
        self.expired_total = 0
        self._stats = stats
        self._callers_time = callers_time
        self._cold: ColdBuckets | None = None
        self._entries = 0
        self._shards: list[dict[bytes, Value]] = [
            {} for _ in range(-(-max_entries // SHARD_ENTRIES))
        ]
        self._shard_count = len(self._shards)
        self._evict_next = 0
        self._sweep_next = 0

    def __len__(self) -> int:
        """Live buckets, including those of before a restart that nobody has asked for since."""
        return self._entries + (len(self._cold) if self._cold else 0)

    @property
    def shard_count(self) -> int:
        """Number of shards: the unit of :meth:`touched` and :meth:`sweep`."""
        return self._shard_count

    def adopt(self, cold: ColdBuckets) -> None:
        """Use ``cold`` for buckets that are not in the table; the bound holds for both together."""
        self._cold = cold
        while len(self) > self.max_entries and len(cold):
            cold.drop_any()

    def apply(  # noqa: PLR0917 - called once a check: keywords would cost it 50 ns
        self, key: bytes, rule: Rule, decide: Decide, now_us: int, cost: int
    ) -> Outcome:
        """Judge a check against its bucket, keep the outcome's state, and make the bucket the most recently used."""
        stats = self._stats
        stats.bucket_looked_total += 1
        shard = self._shards[hash(key) % self._shard_count]
        value = shard.get(key)
        if value is not None:
            stats.bucket_known_total += 1
            state = unpack(value)
            outcome = decide(state, rule, now_us, cost)
            del shard[key]
            after = outcome.state
            shard[key] = value if after is state or after is None else pack(after, rule)
            return outcome
        value = self._cold.take(key) if self._cold else None
        if value is not None:
            stats.bucket_known_total += 1
        outcome = decide(None if value is None else unpack(value), rule, now_us, cost)
        if outcome.state is not None:
            shard[key] = pack(outcome.state, rule)
            self._entries += 1
            if len(self) > self.max_entries:
                self._evict()
        return outcome

    def peek(  # noqa: PLR0917 - the same signature as apply
        self, key: bytes, rule: Rule, decide: Decide, now_us: int, cost: int
    ) -> Outcome:
        """Judge a check as :meth:`apply` would, and change nothing but what is known of the bucket's use."""
        stats = self._stats
        stats.bucket_looked_total += 1
        value = self._find(key)
        if value is None:
            return decide(None, rule, now_us, cost)
        stats.bucket_known_total += 1
        return decide(unpack(value), rule, now_us, cost)

    def remove(self, key: bytes) -> Value | None:
        """Forget the bucket of ``key``: it starts afresh. Returns what it held, for :meth:`put_back`."""
        value = self._shards[hash(key) % self._shard_count].pop(key, None)
        if value is not None:
            self._entries -= 1
            return value
        return self._cold.take(key) if self._cold else None

    def put_back(self, key: bytes, value: Value) -> None:
        """Undo a :meth:`remove`."""
        shard = self._shards[hash(key) % self._shard_count]
        self._entries += key not in shard
        shard[key] = value

    def touched(self, index: int) -> list[tuple[bytes, Value]]:
        """The buckets of shard ``index`` that were used since this was last asked, and from now on not any more."""
        shard = self._shards[index]
        found = []
        for key, value in reversed(shard.items()):
            if key == _WRITTEN:
                break
            if key != _IDLE:
                found.append((key, value))
        if found:
            shard.pop(_WRITTEN, None)
            shard[_WRITTEN] = 0
        return found

    def shard_items(self, index: int) -> list[tuple[bytes, Value]]:
        """Every bucket of shard ``index``."""
        return [item for item in self._shards[index].items() if item[0] not in (_WRITTEN, _IDLE)]

    def sweep(self, now_us: int, shards: int) -> None:
        """Drop the expired buckets of the next ``shards`` shards, about 0.1 ms each.

        ``now_us`` is the node's wall time, or with ``callers_time`` its monotonic time.
        """
        for _ in range(min(shards, self._shard_count)):
            shard = self._shards[self._sweep_next]
            self._sweep_next = (self._sweep_next + 1) % self._shard_count
            expired = list(
                self._unused(shard, now_us)
                if self._callers_time
                else _over(shard, now_us - LATE_US)
            )
            for key in expired:
                del shard[key]
            self._entries -= len(expired)
            self.expired_total += len(expired)

    def _find(self, key: bytes) -> Value | None:
        value = self._shards[hash(key) % self._shard_count].get(key)
        if value is None and self._cold:
            value = self._cold.take(key)
            if value is not None:
                self.put_back(key, value)
        return value

    def _evict(self) -> None:
        """Make room for one: of the buckets of before a restart any, else the oldest of the next shard in turn.

        Exact least-recently-used within a shard, approximate over all: a victim was not used for about as long as it
        takes to touch every other bucket of its shard.
        """
        self.evicted_total += 1
        if self._cold:
            self._cold.drop_any()
            return
        while True:
            shard = self._shards[self._evict_next]
            self._evict_next = (self._evict_next + 1) % self._shard_count
            for key in shard:
                if key not in (_WRITTEN, _IDLE):
                    del shard[key]
                    self._entries -= 1
                    return

    def _unused(self, shard: dict[bytes, Value], now_us: int) -> Iterator[bytes]:
        """Keys that were not touched for ``IDLE_US``, told by a mark that is that old."""
        marked_us = shard.get(_IDLE)
        if isinstance(marked_us, int):
            if now_us - marked_us < IDLE_US:
                return
            for key, value in shard.items():
                if key == _IDLE:
                    break
                if key != _WRITTEN and 2 * window_us(value) <= IDLE_US:
                    yield key
        shard.pop(_IDLE, None)
        shard[_IDLE] = now_us


def _over(shard: dict[bytes, Value], now_us: int) -> Iterator[bytes]:
    return (
        key
        for key, value in shard.items()
        if key not in (_WRITTEN, _IDLE) and is_over(value, now_us)
    )
