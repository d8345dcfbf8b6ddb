"""The node's buckets: at most so many entries, the least recently used leave first, every step small.

Never reads a clock, never does I/O, never judges: it applies the algorithm it is given. See ADR 0014.

One dict of a million entries would be simpler, and would stall: it grows all at once. So the table is many dicts, its
*shards*, each of about 600 entries. CPython gives a growing dict three times its entries in slots, rounded up to a
power of two: 1,024 slots hold up to 682 entries, 30 bytes each at 600.

An order of use in the dict itself (take out, put back at the end) would be exact, and would cost half as much memory
again, because every touch uses up a slot until the dict is compacted into twice the size. So a value carries the tick,
about a second, of its last use, and is replaced in place; making room sorts one shard by tick.

Keys are ``bytes`` and values ``int`` or ``bytes``: the cyclic garbage collector never looks at a dict of those.
"""

from __future__ import annotations

from typing import Final

from ratelimitd.algorithms import Decide
from ratelimitd.buckets.restored import ColdBuckets
from ratelimitd.buckets.snapshot_format import (
    LATEST_MASK,
    MAX_TICK,
    SPENT_SHIFT,
    TICK_SHIFT,
    WINDOW_SHIFT,
    Value,
    is_over,
    pack,
    tick_of,
    unpack,
    window_seconds,
    with_tick,
)
from ratelimitd.counters import CheckStats
from ratelimitd.model import US_PER_S, Outcome, Rule

SHARD_ENTRIES: Final = 600

EVICTED_PART: Final = 10
"""A full table makes room by a tenth of one shard at a time: about 0.2 ms for 60 buckets."""

LATE_US: Final = 10 * US_PER_S
"""How long an expired bucket is kept: twice the 5 s by which a caller's timestamp may lag behind the node's clock."""

IDLE_TICKS: Final = 3600
"""How long an unused bucket is kept when time is the callers' own; or two windows, where that is longer."""


class BucketTable:
    """At most ``max_entries`` buckets. One writer: the event loop.

    ``evicted_total`` counts buckets that left only because of the bound, ``expired_total`` those that equalled a fresh
    one. With ``callers_time`` the times inside the buckets are not the node's, and buckets expire by disuse alone.
    """

    def __init__(self, max_entries: int, stats: CheckStats, *, callers_time: bool = False) -> None:
        self.max_entries = max_entries
        self.evicted_total = 0
        self.expired_total = 0
        self._tick = 1
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
        """Live buckets, with those of before a restart that nobody has asked for since."""
        return self._entries + (len(self._cold) if self._cold else 0)

    @property
    def tick(self) -> int:
        """Seconds since the start, as the node's timer counts them: the unit of the order of use.

        It stops at :data:`MAX_TICK`, after eight years: order of use is lost then, the windows beside it are not.
        """
        return self._tick

    @tick.setter
    def tick(self, seconds: int) -> None:
        self._tick = min(seconds, MAX_TICK)

    @property
    def shard_count(self) -> int:
        """Number of shards: the unit of :meth:`keys` and :meth:`sweep`."""
        return self._shard_count

    def adopt(self, cold: ColdBuckets) -> None:
        """Use ``cold`` for buckets that are not in the table; the bound holds for both together."""
        self._cold = cold
        while len(self) > self.max_entries and len(cold):
            cold.drop_any()

    def apply(  # noqa: PLR0917 - called once a check: keywords would cost it 50 ns
        self, key: bytes, rule: Rule, decide: Decide, now_us: int, cost: int
    ) -> Outcome:
        """Judge a check against its bucket, keep the outcome's state, and note that the bucket was used."""
        shard = self._shards[hash(key) % self._shard_count]
        value = shard.get(key)
        if type(value) is int:
            # codec.unpack and codec.pack of an integer, spelled out: two calls less, 0.2 µs of a check's 2.
            outcome = decide((value >> SPENT_SHIFT, value & LATEST_MASK), rule, now_us, cost)
            spent, latest_us = outcome[5]  # type: ignore[misc]  # an integer's state is a pair
            shard[key] = (
                spent << SPENT_SHIFT
                | rule.window_seconds << WINDOW_SHIFT
                | self._tick << TICK_SHIFT
                | latest_us
            )
            return outcome
        if value is not None:
            outcome = decide(unpack(value), rule, now_us, cost)
            shard[key] = pack(outcome[5], rule, self._tick)  # type: ignore[arg-type]  # None comes of None only
            return outcome
        value = self._cold.take(key) if self._cold else None
        outcome = decide(None if value is None else unpack(value), rule, now_us, cost)
        # Only now: a check that failed is not one of those that were judged.
        self._stats.bucket_missed_total += value is None
        if outcome[5] is not None:
            self._add(key, pack(outcome[5], rule, self._tick))
        return outcome

    def peek(  # noqa: PLR0917 - the same signature as apply
        self, key: bytes, rule: Rule, decide: Decide, now_us: int, cost: int
    ) -> Outcome:
        """Judge a check as :meth:`apply` would, and keep nothing of it."""
        value = self._shards[hash(key) % self._shard_count].get(key)
        if value is None and self._cold:
            value = self._cold.get(key)
        if value is None:
            outcome = decide(None, rule, now_us, cost)
            self._stats.bucket_missed_total += 1
            return outcome
        return decide(unpack(value), rule, now_us, cost)

    def remove(self, key: bytes) -> Value | None:
        """Forget the bucket of ``key``: it starts afresh. Returns what it held, for :meth:`put_back`."""
        value = self._shards[hash(key) % self._shard_count].pop(key, None)
        if value is not None:
            self._entries -= 1
            return value
        return self._cold.take(key) if self._cold else None

    def put_back(self, key: bytes, value: Value) -> None:
        """Undo a :meth:`remove`, and forget what was spent since.

        Else whoever checks fast enough would profit from a reset that failed.
        """
        shard = self._shards[hash(key) % self._shard_count]
        if key in shard:
            shard[key] = with_tick(value, self._tick)
        else:
            self._add(key, with_tick(value, self._tick))

    def value(self, key: bytes) -> Value | None:
        """What the bucket of ``key`` holds, if it was used by this process."""
        return self._shards[hash(key) % self._shard_count].get(key)

    def keys(self, index: int, since_tick: int = 0) -> list[bytes]:
        """The buckets of shard ``index`` that were used at ``since_tick`` or later; about 0.1 ms."""
        return [key for key, value in self._shards[index].items() if tick_of(value) >= since_tick]

    def sweep(self, now_us: int, shards: int) -> None:
        """Drop the expired buckets of the next ``shards`` shards, about 0.1 ms each; ``now_us`` is the node's time."""
        for _ in range(min(shards, self._shard_count)):
            shard = self._shards[self._sweep_next]
            self._sweep_next = (self._sweep_next + 1) % self._shard_count
            expired = [key for key, value in shard.items() if self._is_expired(value, now_us)]
            for key in expired:
                del shard[key]
            self._entries -= len(expired)
            self.expired_total += len(expired)
            if self._cold:
                self.expired_total += self._cold.sweep(
                    lambda value: self._is_expired(value, now_us)
                )

    def _add(self, key: bytes, value: Value) -> None:
        # Room first: it may give the key's shard another dict.
        if len(self) >= self.max_entries:
            self._evict()
        self._shards[hash(key) % self._shard_count][key] = value
        self._entries += 1

    def _is_expired(self, value: Value, now_us: int) -> bool:
        if self._callers_time:
            return self._tick - tick_of(value) >= max(IDLE_TICKS, 2 * window_seconds(value))
        return is_over(value, now_us - LATE_US)

    def _evict(self) -> None:
        """Make room: drop a bucket of before the restart, else the least recently used of the next shard in turn.

        Least recently used to the tick within a shard, approximately over all: shards are filled by a hash and take
        turns, so that their oldest buckets are about equally old.
        """
        if self._cold:
            self._cold.drop_any()
            self.evicted_total += 1
            return
        shard = self._next_filled()
        by_use = sorted(shard.items(), key=_tick_of_item)
        victims = by_use[: -(-len(by_use) // EVICTED_PART)]
        for key, _ in victims:
            del shard[key]
        # A dict never gives back the slots of what it lost; a copy has just as many as it needs.
        compact: dict[bytes, Value] = {}
        compact.update(shard)
        self._shards[self._evict_next - 1] = compact
        self._entries -= len(victims)
        self.evicted_total += len(victims)

    def _next_filled(self) -> dict[bytes, Value]:
        while True:
            shard = self._shards[self._evict_next]
            self._evict_next = (self._evict_next + 1) % self._shard_count
            if shard:
                return shard


def _tick_of_item(item: tuple[bytes, Value]) -> int:
    return tick_of(item[1])
