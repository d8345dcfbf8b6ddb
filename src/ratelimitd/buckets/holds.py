"""Holds on a node's own buckets. See ADR 0055.

Does no I/O; the snapshot log writes what changed, and hands it back after a restart.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ratelimitd.algorithms import concurrency
from ratelimitd.algorithms.several import ENFORCE, Charge, decide_all
from ratelimitd.buckets import snapshot_format
from ratelimitd.buckets.held import HeldBucket, load
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.errors import (
    CheckInvalidError,
    FieldViolation,
    HoldEndedError,
    HoldSettledError,
    HoldsFullError,
)
from ratelimitd.ledger.holds import Held, Hold, Settled
from ratelimitd.model import US_PER_S, Algorithm, Limit, Outcome, Reason

if TYPE_CHECKING:
    from ratelimitd.buckets.table import BucketTable

T = TypeVar("T")

LATE_US: Final = 10 * US_PER_S
"""How long a bucket that is full again is kept: twice the 5 s by which a caller's timestamp may lag."""

MAX_HOLDS: Final = 100_000
"""Holds in flight on one node, some 60 MB; and as many that are over, to answer repeated calls."""

MAX_HOLDS_PER_BUCKET: Final = 10_000

GRACE_US: Final = 60 * US_PER_S
"""How long a hold is remembered after its end, to tell late settles why they do nothing."""

STEP: Final = 100
"""Holds that are ended, and buckets that are looked at, in one step."""

MIN_ENDS: Final = 1_000


class _Record:
    """What is remembered of a hold. ``actual`` is what it was settled with, -1 if it has ended, ``None`` in flight."""

    __slots__ = ("actual", "digest", "end_us", "last_us", "names", "outcomes")

    def __init__(  # noqa: PLR0917 -- the fields in the order of the file
        self,
        digest: bytes,
        end_us: int,
        last_us: int,
        names: Sequence[bytes],
        outcomes: Sequence[Outcome],
        actual: int | None = None,
    ) -> None:
        self.digest = digest
        self.end_us = end_us
        self.last_us = last_us
        """The latest end that it may be given."""
        self.names = names
        self.outcomes = outcomes
        self.actual = actual

    def dump(self) -> Sequence[Any]:
        """Return the arguments that make it anew, for JSON."""
        names = [name.hex() for name in self.names]
        outcomes = [one[:5] for one in self.outcomes]
        return [self.digest.hex(), self.end_us, self.last_us, names, outcomes, self.actual]


class OwnHolds:
    """Holds beside the buckets of ``table``, and the buckets that are kept apart for them, by their stored names.

    ``now_us`` is the node's clock. Between two calls of :meth:`changes` the changed holds and buckets are remembered.
    """

    def __init__(
        self,
        table: BucketTable,
        keys: BucketKeys,
        now_us: Callable[[], int],
        *,
        max_holds: int = MAX_HOLDS,
        max_per_bucket: int = MAX_HOLDS_PER_BUCKET,
    ) -> None:
        self._table = table
        self._keys = keys
        self._now_us = now_us
        self._max_holds = max_holds
        self._max_per_bucket = max_per_bucket
        self._buckets: dict[bytes, HeldBucket] = {}
        self._idle: deque[bytes] = deque()
        """Names of buckets that may be able to go back to the table, some more than once."""
        self._open: dict[bytes, _Record] = {}
        self._over: dict[bytes, _Record] = {}
        self._ends: list[tuple[int, bytes]] = []
        self._changed: dict[tuple[bytes, bytes], None] = {}
        table.apart = self

    def __len__(self) -> int:
        """Return the number of buckets that are kept apart."""
        return len(self._buckets)

    async def hold(self, hold: Hold) -> Held:
        """Charge all buckets and keep the hold; see :class:`ratelimitd.ledger.holds.Holds`."""
        now_us = self._now_us()
        self.expire(now_us)
        names = [self._keys.stored(key) for key, _, _ in hold.charges]
        record = self._open.get(hold.number) or self._over.get(hold.number)
        if record is not None:
            if record.digest != hold.check_digest:
                raise CheckInvalidError(FieldViolation("hold_id", "is that of another check"))
            known = dict(zip(record.names, record.outcomes, strict=True))
            return Held([known.get(name) for name in names], record.end_us)
        outcomes = decide_all(self._table.states(hold.charges), hold.now_us, hold.cost)
        limits = [limit for _, limit, _ in hold.charges]
        if any(
            not outcome[0] and limit.enforcement is ENFORCE
            for limit, outcome in zip(limits, outcomes, strict=True)
        ):
            return Held(outcomes, 0)
        self._require_room(names)
        end_us, last_us = now_us + hold.ttl_us, now_us + hold.ttl_us + _FOR_EVER_US
        for limit in limits:
            if limit.algorithm is Algorithm.CONCURRENCY:
                last_us = min(last_us, now_us + limit.window_us)
        end_us = min(end_us, last_us)
        told = []
        for charge, name, outcome in zip(hold.charges, names, outcomes, strict=True):
            told.append(
                self._charge(hold, charge, name, outcome, end_us) if outcome[0] else outcome
            )
        self._open[hold.number] = _Record(hold.check_digest, end_us, last_us, names, told)
        heappush(self._ends, (end_us, hold.number))
        self._changed[_HOLD, hold.number] = None
        return Held(told, end_us)

    async def settle(
        self, number: bytes, names: Sequence[bytes], actual: int, now_us: int
    ) -> Settled:
        """Charge what a hold has cost; see :class:`ratelimitd.ledger.holds.Holds`."""
        self.expire(now_us)
        record = self._open.pop(number, None)
        if record is not None:
            record.actual = actual
            self._remember(number, record)
            for name in record.names:
                bucket = self._buckets.get(name)
                if bucket is not None:
                    bucket.settle(number, actual)
                    self._was_left(name)
            return Settled(known=True, is_first=True, outcomes=self._levels(names, now_us))
        record = self._over.get(number)
        if record is None:
            return Settled(known=False)
        if record.actual == _ENDED:
            raise HoldEndedError
        if record.actual != actual:
            raise HoldSettledError
        return Settled(known=True, outcomes=self._levels(names, now_us))

    async def extend(
        self, number: bytes, _names: Sequence[bytes], ttl_us: int, now_us: int
    ) -> int | None:
        """Let a hold end later; see :class:`ratelimitd.ledger.holds.Holds`."""
        self.expire(now_us)
        record = self._open.get(number)
        if record is None:
            record = self._over.get(number)
            if record is None:
                return None
            raise HoldEndedError if record.actual == _ENDED else HoldSettledError("hold")
        record.end_us = max(record.end_us, min(now_us + ttl_us, record.last_us))
        for name in record.names:
            bucket = self._buckets.get(name)
            if bucket is not None:
                bucket.extend(number, record.end_us)
        self._changed[_HOLD, number] = None
        return record.end_us

    def find(self, key: bytes) -> HeldBucket | None:
        """Return the bucket of ``key``, if it is kept apart."""
        bucket = self._buckets.get(self._keys.stored(key))
        if bucket is not None and bucket.key is None:
            bucket.key = key
        return bucket

    def charge(self, bucket: HeldBucket, rule: Limit, outcome: Outcome) -> None:
        """Charge a check that was allowed to a bucket that is kept apart."""
        bucket.charge(rule, outcome)
        self._changed[_BUCKET, bucket.name] = None
        if bucket.fits_table:
            self._return(bucket)

    def remove(self, key: bytes) -> HeldBucket | None:
        """Forget a bucket with what is held on it; returns it, for :meth:`put_back`."""
        name = self._keys.stored(key)
        bucket = self._buckets.pop(name, None)
        if bucket is not None:
            self._changed[_BUCKET, name] = None
        return bucket

    def put_back(self, bucket: HeldBucket) -> None:
        """Undo a :meth:`remove`; holds that ended meanwhile are left out."""
        self._buckets[bucket.name] = bucket
        for number in [number for number in bucket.parts if number not in self._open]:
            bucket.drop(number)
        self._was_left(bucket.name)

    def expire(self, now_us: int) -> None:
        """End the holds whose time is over, at most :data:`STEP`."""
        ends = self._ends
        for _ in range(STEP):
            if not ends or ends[0][0] > now_us:
                break
            _, number = heappop(ends)
            record = self._open.get(number)
            if record is None:
                continue
            if record.end_us > now_us:  # it was extended
                heappush(ends, (record.end_us, number))
                continue
            del self._open[number]
            record.actual = _ENDED
            self._remember(number, record)
            for name in record.names:
                bucket = self._buckets.get(name)
                if bucket is not None:
                    bucket.drop(number)
                    self._was_left(name)
        if len(ends) > 2 * len(self._open) + MIN_ENDS:
            # Most are of holds that were settled.
            self._ends = [(record.end_us, number) for number, record in self._open.items()]
            heapify(self._ends)

    def sweep(self, now_us: int) -> None:
        """End holds, forget old ones, and let buckets return to the table; a step of bounded length."""
        self.expire(now_us)
        for number, record in [*_first(self._over.items())]:
            if record.end_us + GRACE_US > now_us:
                break
            self._forget(number)
        for _ in range(min(STEP, len(self._idle))):
            name = self._idle.popleft()
            bucket = self._buckets.get(name)
            if bucket is None or bucket.parts:
                continue  # it is put here again when its last hold ends
            if bucket.is_over(now_us - LATE_US):
                del self._buckets[name]
                self._changed[_BUCKET, name] = None
            elif bucket.fits_table and bucket.key is not None:
                self._return(bucket)
            else:
                self._idle.append(name)

    def changes(self, most: int) -> list[tuple[bytes, bytes, bytes]]:
        """Return up to ``most`` changed holds and buckets as (kind, name or number, value); no value: it is gone."""
        taken = [*_first(self._changed, most)]
        for changed in taken:
            del self._changed[changed]
        return [(kind, name, self._dump(kind, name)) for kind, name in taken]

    def change_again(self, changes: Iterable[tuple[bytes, bytes, bytes]]) -> None:
        """Let :meth:`changes` return these once more: they could not be written."""
        self._changed |= dict.fromkeys([(kind, name) for kind, name, _ in changes])

    def change_all(self) -> None:
        """Let :meth:`changes` return everything."""
        self._changed |= dict.fromkeys([(_HOLD, number) for number in self._open])
        self._changed |= dict.fromkeys([(_HOLD, number) for number in self._over])
        self._changed |= dict.fromkeys([(_BUCKET, name) for name in self._buckets])

    def restore(self, values: Mapping[tuple[bytes, bytes], bytes]) -> None:
        """Take what :meth:`changes` has returned, by kind and name, the last value of each; skips what is none."""
        for (kind, number), value in values.items():
            if kind == _HOLD and value:
                self._restore_hold(number, value)
        ends_us = {number: record.end_us for number, record in self._open.items()}
        for (kind, name), value in values.items():
            if kind == _BUCKET and value:
                try:
                    self._buckets[name] = load(name, json.loads(value), ends_us)
                except (ValueError, KeyError, TypeError):
                    continue
                self._was_left(name)
        self._changed.clear()

    def _restore_hold(self, number: bytes, value: bytes) -> None:
        try:
            digest, end_us, last_us, names, outcomes, actual = json.loads(value)
            told = [_outcome(one) for one in outcomes]
            known = [bytes.fromhex(name) for name in names]
            record = _Record(bytes.fromhex(digest), end_us, last_us, known, told, actual)
        except (ValueError, TypeError):
            return
        if actual is None:
            self._open[number] = record
            heappush(self._ends, (end_us, number))
        else:
            self._over[number] = record

    def _dump(self, kind: bytes, name: bytes) -> bytes:
        if kind == _BUCKET:
            bucket = self._buckets.get(name)
            return json.dumps(bucket.dump()).encode() if bucket is not None else b""
        record = self._open.get(name) or self._over.get(name)
        return json.dumps(record.dump()).encode() if record is not None else b""

    def _require_room(self, names: Sequence[bytes]) -> None:
        if len(self._open) >= self._max_holds:
            message = f"the node has {self._max_holds} holds in flight, as many as it may have"
            raise HoldsFullError(message)
        for name in names:
            bucket = self._buckets.get(name)
            if bucket is not None and len(bucket.parts) >= self._max_per_bucket:
                message = f"a limit has {self._max_per_bucket} holds in flight for one identity, as many as it may have"
                raise HoldsFullError(message)

    def _charge(  # noqa: PLR0917 -- what is charged where
        self, hold: Hold, charge: Charge, name: bytes, outcome: Outcome, end_us: int
    ) -> Outcome:
        key, limit, _ = charge
        bucket = self._buckets.get(name)
        if bucket is None:
            [(state, _, _)] = self._table.states([charge])
            self._table.remove(key)
            bucket = self._buckets[name] = HeldBucket(name, key, limit, state)
        self._changed[_BUCKET, name] = None
        bucket.charge(limit, outcome)
        bucket.hold(hold.number, hold.cost, end_us, outcome)
        if bucket.account is None:
            ends_us = bucket.state.ends_us(hold.now_us)
            return concurrency.outcome(ends_us, limit, hold.now_us, taken=1)
        return (*outcome[:5], None)

    def _levels(self, names: Sequence[bytes], now_us: int) -> Sequence[Outcome | None]:
        """Return what buckets have now."""
        return [self._level(name, now_us) for name in names]

    def _level(self, name: bytes, now_us: int) -> Outcome | None:
        bucket = self._buckets.get(name)
        return None if bucket is None else bucket.level(now_us)

    def _was_left(self, name: bytes) -> None:
        """Note that a hold on a bucket is over."""
        self._changed[_BUCKET, name] = None
        if not self._buckets[name].parts:
            self._idle.append(name)

    def _return(self, bucket: HeldBucket) -> None:
        del self._buckets[bucket.name]
        self._changed[_BUCKET, bucket.name] = None
        if bucket.state is not None and bucket.key is not None:
            self._table.take_back(bucket.key, bucket.state, bucket.limit)

    def _remember(self, number: bytes, record: _Record) -> None:
        self._changed[_HOLD, number] = None
        self._over[number] = record
        if len(self._over) > self._max_holds:
            self._forget(next(iter(self._over)))

    def _forget(self, number: bytes) -> None:
        del self._over[number]
        self._changed[_HOLD, number] = None


def _first(items: Iterable[T], most: int = STEP) -> Iterator[T]:
    return islice(items, most)


def _outcome(values: Sequence[Any]) -> Outcome:
    allowed, remaining, reset_time, retry_after, reason = values
    return (bool(allowed), remaining, reset_time, retry_after, Reason(reason), None)


_HOLD, _BUCKET = snapshot_format.HOLDS, snapshot_format.APART
_ENDED: Final = -1
_FOR_EVER_US: Final = 10**15
