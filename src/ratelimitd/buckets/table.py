"""The buckets of a node: a bounded table with approximate LRU eviction, and the buckets restored after a restart.

Reads no clock and does no I/O. See ADR 0014.

One dict of a million entries would stall the loop when it grows, so the table is many dicts, its *shards*, of about 600
entries each. CPython sizes a growing dict to three times its entries, rounded up to a power of two: 1,024 slots hold up
to 682 entries, 30 bytes each at 600.

LRU order in the dict itself (remove, reinsert at the end) would take 50 % more memory, because every use takes a slot
until the dict is compacted. Instead a value contains the tick, about a second, of its last use and is replaced in
place; eviction sorts one shard by tick.

Keys are ``bytes`` and values ``int`` or ``bytes``, so the cyclic garbage collector skips the dicts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, cast

from ratelimitd.algorithms import Decide, token_bucket
from ratelimitd.algorithms.several import ENFORCE, Bucket, Charge, decide_all
from ratelimitd.buckets.held import HeldBucket
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.snapshot_format import (
    FULL_AFTER_SHIFT,
    LATEST_MASK,
    MAX_TICK,
    SPENT_SHIFT,
    TICK_SHIFT,
    State,
    Value,
    full_after_s,
    is_over,
    pack,
    tick_of,
    viewed,
    with_tick,
)
from ratelimitd.model import ALLOWED, US_PER_S, WITHIN_LIMIT, Limit, Outcome

if TYPE_CHECKING:
    from ratelimitd.buckets.holds import OwnHolds

SHARD_ENTRIES: Final = 600

# equivalent: the shard of a bucket is not observable
RESTORED_SHARDS: Final = 2_048
"""Shards of the restored buckets; of a million each has about 490, which bounds a step over one."""

EVICTED_PART: Final = 10
"""A full table evicts a tenth of one shard at a time: about 0.2 ms for 60 buckets."""

LATE_US: Final = 10 * US_PER_S
"""Time for which an expired bucket is kept: twice the 5 s by which a caller's timestamp may lag."""

IDLE_TICKS: Final = 3600
"""Least time for which an unused bucket is kept with callers' time; twice its time to full, if that is longer."""


class BucketTable:
    """At most ``max_entries`` buckets. One writer: the event loop.

    ``evicted_total`` counts buckets dropped because of the bound, ``expired_total`` those equal to a fresh one. With
    ``callers_time``, times are not the node's, and buckets expire only when unused.
    """

    def __init__(self, max_entries: int, *, callers_time: bool = False) -> None:
        self.max_entries = max_entries
        self.evicted_total = 0
        self.expired_total = 0
        self.apart: OwnHolds | None = None
        """Buckets with holds; they are looked up before restored ones."""
        self._tick = 1
        self._uses: dict[int, int] = {}
        """By the seconds to a full bucket, the bits of a value used at this tick: a look-up takes half their time."""
        self.callers_time = callers_time
        self._restored: RestoredBuckets | None = None
        self._entries = 0
        self._shards: list[dict[bytes, Value]] = [
            {} for _ in range(-(-max_entries // SHARD_ENTRIES))
        ]
        self._shard_count = len(self._shards)
        self._evict_next = 0
        self._sweep_next = 0

    def __len__(self) -> int:
        """Return the number of buckets, restored ones included."""
        return self._entries + (len(self._restored) if self._restored else 0)

    @property
    def tick(self) -> int:
        """Seconds since the start: the unit of LRU order. Stops at :data:`MAX_TICK`, after eight years."""
        return self._tick

    @tick.setter
    def tick(self, seconds: int) -> None:
        self._tick = min(seconds, MAX_TICK)
        self._uses = {}

    @property
    def shard_count(self) -> int:
        """Number of shards: the unit of :meth:`keys` and :meth:`sweep`."""
        return self._shard_count

    def adopt(self, restored: RestoredBuckets) -> None:
        """Look up missing buckets in ``restored``; the bound applies to both together."""
        self._restored = restored
        while len(self) > self.max_entries and len(restored):
            restored.drop_any()

    def take_back(self, stored_key: bytes, key: bytes | None, state: State, limit: Limit) -> None:
        """Return a bucket with holds to the table; to the restored ones while its key is unknown."""
        value = pack(state, limit, self._tick)
        if key is not None:
            self._add(key, value)
        elif self._restored is not None:
            if len(self) >= self.max_entries:
                self._evict()
            self._restored.put(stored_key, value)

    def restored_value(self, stored_key: bytes) -> Value | None:
        """Return the value of a restored bucket that was not used since, else ``None``."""
        return None if self._restored is None else self._restored.value(stored_key)

    def apply(  # noqa: PLR0917 - called once a check: keywords would cost it 50 ns
        self, key: bytes, rule: Limit, decide: Decide, now_us: int, cost: int
    ) -> Outcome:
        """Decide a check on its bucket, and store the new state with the time of use."""
        shard = self._shards[hash(key) % self._shard_count]
        value = shard.get(key)
        if type(value) is int:
            # unpack and pack of an integer, inlined: two calls fewer save 0.2 µs of a check's 2.
            outcome = decide((value >> SPENT_SHIFT, value & LATEST_MASK), rule, now_us, cost)
            spent, latest_us = outcome[5]  # type: ignore[misc]  # an integer's state is a pair
            try:
                use = self._uses[rule.full_after_s]
            except KeyError:
                use = self._use(rule.full_after_s)
            shard[key] = spent << SPENT_SHIFT | use | latest_us
            return outcome
        if value is not None:
            outcome = decide(viewed(value), rule, now_us, cost)
            shard[key] = pack(outcome[5], rule, self._tick)  # type: ignore[arg-type]  # None comes of None only
            return outcome
        if self.apart and (held := self.apart.find(key)) is not None:
            state, _, judge = held.judged(rule, decide)
            outcome = judge(state, rule, now_us, cost)
            if outcome[0]:
                self.apart.charge(held, (key, rule, decide), now_us, cost, outcome[5])
            return outcome
        value = self._restored.take(key) if self._restored else None
        outcome = decide(None if value is None else viewed(value), rule, now_us, cost)
        if outcome[5] is not None:
            self._add(key, pack(outcome[5], rule, self._tick))
        return outcome

    def peek(  # noqa: PLR0917 - the same signature as apply
        self, key: bytes, rule: Limit, decide: Decide, now_us: int, cost: int
    ) -> Outcome:
        """Decide a check as :meth:`apply` does, storing nothing."""
        value = self._shards[hash(key) % self._shard_count].get(key)
        if value is None and self.apart and (held := self.apart.find(key)) is not None:
            state, _, judge = held.judged(rule, decide)
            return judge(state, rule, now_us, cost)
        if value is None and self._restored:
            value = self._restored.get(key)
        return decide(None if value is None else viewed(value), rule, now_us, cost)

    def apply_each(
        self, charges: Sequence[Charge], now_us: int, costs: Sequence[int]
    ) -> list[Outcome]:
        """Decide a check on several buckets, and store their new states if no enforced limit denies it."""
        if len(set(costs)) == 1:
            charged = self.charge_each(b"", charges, now_us, costs[0])
            if charged is not None:
                return charged[1]
        return self.apply_any(charges, now_us, costs)

    def charge_each(  # noqa: C901, PLR0912 -- one loop: a call more costs every limit 50 ns
        self, identifier: bytes, charges: Sequence[Charge], now_us: int, cost: int
    ) -> tuple[int, list[Outcome]] | None:
        """Decide as :meth:`apply_each` does if every bucket is in the table, an integer, and allows the check.

        The keys of ``charges`` lack the ``identifier``, and all cost the same.

        Returns:
            The index of the smallest remaining part of a capacity, among equals the first, and the outcomes, whose
            states may be ``None``. ``None``: nothing was charged, and :meth:`apply_any` decides.
        """
        shards, shard_count, uses = self._shards, self._shard_count, self._uses
        outcomes: list[Outcome] = []
        values: list[int] = []
        first, least, its_capacity = 0, 1, 0  # more than any part
        try:
            for suffix, limit, decide in charges:
                key = identifier + suffix
                shard = shards[hash(key) % shard_count]
                value: int = shard[key]  # type: ignore[assignment]  # of bytes the next line raises TypeError
                spent, latest_us = value >> SPENT_SHIFT, value & LATEST_MASK
                wanted = remaining = 0
                if decide is token_bucket.decide:
                    # decide, inlined for a check that leaves a token: takes half the time.
                    token, capacity = limit.window_us, limit.capacity_units
                    if spent > capacity:  # noqa: PLR1730 - as there; equivalent: >= assigns the value it has
                        spent = capacity
                    if now_us > latest_us:  # equivalent: >= adds 0 µs
                        spent -= (now_us - latest_us) * limit.limit
                        if spent < 0:  # noqa: PLR1730 - as there; equivalent: <= assigns the value it has
                            spent = 0
                        latest_us = now_us
                    wanted = spent + cost * token
                    remaining = (capacity - wanted) // token
                if remaining > 0:
                    spent = wanted
                    reset_time = (latest_us + (spent - 1) // limit.limit) // US_PER_S + 1
                    outcome: Outcome = (ALLOWED, remaining, reset_time, 0, WITHIN_LIMIT, None)
                else:
                    outcome = decide((spent, latest_us), limit, now_us, cost)
                    allowed, remaining, _, _, _, (spent, latest_us) = outcome  # type: ignore[misc]  # a pair, as given
                    if not allowed:
                        break
                outcomes.append(outcome)
                if remaining * its_capacity < least * limit.capacity:
                    first, least, its_capacity = len(values), remaining, limit.capacity
                values.append(value)
                try:
                    use = uses[limit.full_after_s]
                except KeyError:
                    use = self._use(limit.full_after_s)
                shard[key] = spent << SPENT_SHIFT | use | latest_us
            else:
                return first, outcomes
        except (KeyError, TypeError):
            pass  # a bucket is missing, or not an integer
        for (suffix, _, _), value in zip(charges, values, strict=False):
            key = identifier + suffix
            shards[hash(key) % shard_count][key] = value
        return None

    def apply_any(
        self, charges: Sequence[Charge], now_us: int, costs: Sequence[int]
    ) -> list[Outcome]:
        """Decide as :meth:`apply_each` does, without trying :meth:`charge_each`, which takes half the time."""
        outcomes = self.peek_each(charges, now_us, costs)
        for (_, limit, _), outcome in zip(charges, outcomes, strict=True):
            if not outcome[0] and limit.enforcement is ENFORCE:
                return outcomes
        tick = self._tick
        for (key, limit, decide), cost, outcome in zip(charges, costs, outcomes, strict=True):
            if not outcome[0]:
                continue  # of an observing limit
            if self.apart and (held := self.apart.find(key)) is not None:
                self.apart.charge(held, (key, limit, decide), now_us, cost, outcome[5])
                continue
            if outcome[5] is None:
                continue  # of a concurrency limit: a check takes no slot
            value = pack(outcome[5], limit, tick)
            shard = self._shards[hash(key) % self._shard_count]
            if key in shard:
                shard[key] = value
            else:
                if self._restored:
                    self._restored.take(key)
                self._add(key, value)
        return outcomes

    def peek_each(
        self, charges: Sequence[Charge], now_us: int, costs: Sequence[int]
    ) -> list[Outcome]:
        """Decide as :meth:`apply_each` does, storing nothing."""
        return decide_all(self.states(charges), now_us, costs)

    def states(self, charges: Sequence[Charge]) -> list[Bucket]:
        """Return the buckets with their states."""
        buckets: list[Bucket] = []
        for key, limit, decide in charges:
            value = self._shards[hash(key) % self._shard_count].get(key)
            if value is None and self.apart and (held := self.apart.find(key)) is not None:
                buckets.append(held.judged(limit, decide))
                continue
            if value is None and self._restored:
                value = self._restored.get(key)
            buckets.append((None if value is None else viewed(value), limit, decide))
        return buckets

    def remove(self, key: bytes) -> Value | HeldBucket | None:
        """Drop the bucket of ``key``; return its value, for :meth:`put_back`."""
        if self.apart and (held := self.apart.remove(key)) is not None:
            return held
        return self.take(key)

    def take(self, key: bytes) -> Value | None:
        """Remove the bucket of ``key`` unless it has holds; return its value."""
        value = self._shards[hash(key) % self._shard_count].pop(key, None)
        if value is not None:
            self._entries -= 1
            return value
        return self._restored.take(key) if self._restored else None

    def put_back(self, key: bytes, value: Value | HeldBucket) -> None:
        """Undo a :meth:`remove`, and drop later spends: a failed reset must not help fast callers."""
        self.remove(key)
        if self.apart is not None and isinstance(value, HeldBucket):
            self.apart.put_back(value)
        else:
            self._add(key, with_tick(cast("Value", value), self._tick))

    def value(self, key: bytes) -> Value | None:
        """Return the value of ``key`` if this process has used the bucket, else ``None``."""
        return self._shards[hash(key) % self._shard_count].get(key)

    def keys(self, index: int, since_tick: int = 0) -> list[bytes]:
        """Return the keys of shard ``index`` used at ``since_tick`` or later; takes about 0.1 ms."""
        return [key for key, value in self._shards[index].items() if tick_of(value) >= since_tick]

    def sweep(self, now_us: int, shards: int) -> None:
        """Drop the expired buckets of the next ``shards`` shards, about 0.1 ms each; ``now_us`` is the node's time."""
        if self.apart is not None:
            self.apart.sweep(now_us)
        for _ in range(min(shards, self._shard_count)):
            shard = self._shards[self._sweep_next]
            self._sweep_next = (self._sweep_next + 1) % self._shard_count
            expired = [key for key, value in shard.items() if self._is_expired(value, now_us)]
            for key in expired:
                del shard[key]
            self._entries -= len(expired)
            self.expired_total += len(expired)
            if self._restored:
                self.expired_total += self._restored.sweep(
                    lambda value: self._is_expired(value, now_us)
                )

    def _use(self, full_s: int) -> int:
        use = self._uses[full_s] = full_s << FULL_AFTER_SHIFT | self._tick << TICK_SHIFT
        return use

    def _add(self, key: bytes, value: Value) -> None:
        # Evict first: it may replace the key's shard.
        if len(self) >= self.max_entries:
            self._evict()
        self._shards[hash(key) % self._shard_count][key] = value
        self._entries += 1

    def _is_expired(self, value: Value, now_us: int) -> bool:
        if self.callers_time:
            return self._tick - tick_of(value) >= max(IDLE_TICKS, 2 * full_after_s(value))
        return is_over(value, now_us - LATE_US)

    def _evict(self) -> None:
        """Drop a restored bucket or, if there is none, the least recently used ones of the next shard.

        LRU is exact to the tick within a shard and approximate over all: shards are filled by a hash and evicted
        round-robin, so their oldest buckets are about equally old.
        """
        if self._restored:
            self._restored.drop_any()
            self.evicted_total += 1
            return
        shard = self._next_filled()
        by_use = sorted(shard.items(), key=_tick_of_item)
        victims = by_use[: -(-len(by_use) // EVICTED_PART)]
        for key, _ in victims:
            del shard[key]
        # A dict keeps the slots of deleted keys; a copy does not.
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


class RestoredBuckets:
    """Buckets from before a restart that have not been used since, by their stored key.

    The stored key is a digest of the key (ADR 0015). The first check, which has the key, moves a bucket to the table.
    """

    def __init__(self, keys: BucketKeys) -> None:
        self._keys = keys
        self._shards: list[dict[bytes, Value]] = [{} for _ in range(RESTORED_SHARDS)]
        self._entries = 0
        self._drop_next = 0
        self._sweep_next = 0

    def __len__(self) -> int:
        """Return the number of buckets."""
        return self._entries

    @property
    def shard_count(self) -> int:
        """Number of shards: the unit of :meth:`items` and :meth:`sweep`."""
        return len(self._shards)

    def put(self, stored_key: bytes, value: Value) -> None:
        """Set the value of a stored key."""
        shard = self._shard(stored_key)
        self._entries += stored_key not in shard
        shard[stored_key] = value

    def discard(self, stored_key: bytes) -> None:
        """Drop the bucket of a stored key, if it exists."""
        self._entries -= self._shard(stored_key).pop(stored_key, None) is not None

    def value(self, stored_key: bytes) -> Value | None:
        """Return the value of a stored key, or ``None``."""
        return self._shard(stored_key).get(stored_key)

    def get(self, key: bytes) -> Value | None:
        """Return the value of ``key``, or ``None``."""
        return self.value(self._keys.stored(key))

    def take(self, key: bytes) -> Value | None:
        """Remove and return the value of ``key``, or ``None``."""
        stored_key = self._keys.stored(key)
        value = self._shard(stored_key).pop(stored_key, None)
        self._entries -= value is not None
        return value

    def drop_any(self) -> None:
        """Drop any one bucket; there must be one."""
        while not self._shards[self._drop_next]:
            self._drop_next = (self._drop_next + 1) % RESTORED_SHARDS
        self._shards[self._drop_next].popitem()
        self._entries -= 1

    def items(self, index: int) -> list[tuple[bytes, Value]]:
        """Return the (stored key, value) pairs of shard ``index``."""
        return list(self._shards[index].items())

    def sweep(self, is_expired: Callable[[Value], bool]) -> int:
        """Drop the expired buckets of the next shard, about 0.2 ms; return their number."""
        shard = self._shards[self._sweep_next]
        self._sweep_next = (self._sweep_next + 1) % RESTORED_SHARDS
        expired = [stored_key for stored_key, value in shard.items() if is_expired(value)]
        for stored_key in expired:
            del shard[stored_key]
        self._entries -= len(expired)
        return len(expired)

    def map(self, change: Callable[[Value], Value | None]) -> None:
        """Replace every value by ``change(value)``; ``None`` drops it. Takes about 0.5 s for a million."""
        for index, shard in enumerate(self._shards):
            changed = ((stored_key, change(value)) for stored_key, value in shard.items())
            self._shards[index] = kept = {
                stored_key: value for stored_key, value in changed if value is not None
            }
            self._entries -= len(shard) - len(kept)

    def _shard(self, stored_key: bytes) -> dict[bytes, Value]:
        return self._shards[(stored_key[0] << 8 | stored_key[1]) % RESTORED_SHARDS]


def _tick_of_item(item: tuple[bytes, Value]) -> int:
    return tick_of(item[1])
