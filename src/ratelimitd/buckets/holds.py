"""Holds on a node's own buckets. See ADR 0055.

Does no I/O; the snapshot log writes changes, and passes them back after a restart. A bucket is written together with
the holds in flight on it. A settle after a restart therefore affects only buckets on which the hold is in flight, even
if a kill has lost some of the latest changes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import islice
from typing import Any, Final, TypeAlias

from ratelimitd.algorithms.several import Charge, passes
from ratelimitd.buckets import snapshot_format
from ratelimitd.buckets.held import HeldBucket, LevelBucket, SlotsBucket, bucket_of, load
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.restore import in_time
from ratelimitd.buckets.snapshot_format import MAX_PAYLOAD_BYTES, Value, unpack
from ratelimitd.buckets.table import LATE_US, BucketTable
from ratelimitd.errors import (
    CheckInvalidError,
    HoldEndedError,
    HoldSettledError,
    HoldsFullError,
)
from ratelimitd.ledger.holds import (
    GRACE_S,
    MAX_HOLDS,
    MAX_HOLDS_PER_BUCKET,
    MAX_TTL_S,
    OF_ANOTHER_CHECK,
    OF_WHAT_IS_OVER,
    Held,
    Hold,
    Settled,
    longest_life_us,
)
from ratelimitd.model import US_PER_S, Limit, Outcome, Reason

RecordedOutcomes: TypeAlias = tuple[tuple[bytes, tuple[int, ...]], ...]
"""(stored name, outcome) of buckets, as bytes and numbers, which the garbage collector skips."""

Change: TypeAlias = tuple[bytes, bytes, bytes]
"""(kind of chunk, number of a hold or stored name of a bucket, its new value)."""

GivenBack: TypeAlias = tuple[bytes, bytes | None]
"""(stored name of a bucket, its key, or ``None`` if no check has used it since the restart)."""

_GRACE_US: Final = GRACE_S * US_PER_S

# equivalent: ends are compared with the clock wherever they matter
_TICK_BITS: Final = 17
"""Holds are ended every 131 ms."""

STEP: Final = 100
"""Holds ended or dropped, and buckets without holds examined, in one step: about 1 ms."""

_ENDED: Final = -1
_HOLD, _BUCKET = snapshot_format.HOLDS, snapshot_format.APART


@dataclass(eq=False, slots=True)
class _Record:
    """A hold in flight, or recently ended or settled.

    ``last_us`` is the latest end to which it may be extended. ``actual`` is the settled number of tokens, -1 if the
    hold ended without a settle, ``None`` in flight. ``recorded`` are the outcomes of the hold, ``settled`` of the
    settle.
    """

    digest: bytes
    made_us: int
    end_us: int
    last_us: int
    cost: int
    recorded: RecordedOutcomes
    actual: int | None = None
    settled: RecordedOutcomes = ()
    tick: int = 0

    @property
    def due_us(self) -> int:
        """When the hold ends, or is dropped if it is not in flight."""
        return self.end_us if self.actual is None else self.end_us + _GRACE_US

    @property
    def more(self) -> int:
        """Tokens settled beyond those held, negative if fewer."""
        return 0 if self.actual is None or self.actual == _ENDED else self.actual - self.cost

    def dump(self) -> Sequence[Any]:
        """Return values for JSON, from which :meth:`load` restores the record."""
        recorded = {name.hex(): one for name, one in self.recorded}
        times = self.end_us, self.last_us
        return [self.digest.hex(), *times, self.cost, recorded, self.actual, self.made_us]

    @classmethod
    def load(cls, values: Any, now_us: int) -> _Record:
        """Restore a record from a dump; a hold made after ``now_us`` is moved to it with its ends (I8).

        Raises:
            ValueError, TypeError, AttributeError, OverflowError: the dump is invalid.
        """
        digest, end_us, last_us, cost, recorded, actual, *made = values
        made_us = int(made[0]) if made else now_us  # earlier releases did not write it
        ahead_us = max(0, made_us - now_us)
        return cls(
            bytes.fromhex(digest),
            made_us - ahead_us,
            min(int(end_us) - ahead_us, now_us + MAX_TTL_S * US_PER_S),
            int(last_us) - ahead_us,
            int(cost),
            _recorded([(bytes.fromhex(name), _outcome(*one)) for name, one in recorded.items()]),
            actual if actual is None else int(actual),
        )


class OwnHolds:
    """Holds on the buckets of ``table``, and the buckets that are kept apart for them, by their stored names.

    Holds end by ``now_us``, the node's clock; charges have the time of their checks. Changed holds and buckets are
    collected for :meth:`changes`.
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
        self._idle: dict[bytes, None] = {}
        """Names of buckets in debt that have no holds."""
        self._records: dict[bytes, _Record] = {}
        self._over: dict[bytes, None] = {}
        """Numbers of the holds not in flight, oldest first; at most ``max_holds``."""
        self._due: dict[int, dict[bytes, None]] = {}
        """Tick → numbers of the holds to be ended or dropped then; ``_ticks`` is a heap of these ticks."""
        self._ticks: list[int] = []
        self._changed: dict[tuple[bytes, bytes], bool] = {}
        """(kind, number or name) → whether the files may have an earlier value. Then the number of a dropped hold stays
        until that is written; as many can stay as were in flight when they were written, about ``max_holds``."""
        self._given_back: dict[bytes, bytes | None] = {}
        """Stored name → key of buckets returned to the table, ``None`` if among its restored ones."""
        table.apart = self

    def __len__(self) -> int:
        """Return the number of buckets that are kept apart."""
        return len(self._buckets)

    @property
    def in_flight(self) -> int:
        """Holds in flight."""
        return len(self._records) - len(self._over)

    def open_holds(self) -> Iterator[tuple[bytes, int]]:
        """Yield the number and the end in µs of each hold in flight."""
        for number, record in self._records.items():
            if record.actual is None:
                yield number, record.end_us

    async def hold(self, hold: Hold) -> Held:
        """Charge all buckets and keep the hold; see :class:`ratelimitd.ledger.holds.Holds`."""
        record = self._known(hold.number)
        names = [self._keys.stored(key) for key, _, _ in hold.charges]
        if record is not None:
            if record.digest != hold.check_digest:
                raise CheckInvalidError(OF_ANOTHER_CHECK)
            if record.actual is not None:
                raise CheckInvalidError(OF_WHAT_IS_OVER)
            there = [name for name, _ in record.recorded]
            return Held(there, _outcomes(record.recorded, there), record.end_us)
        outcomes = self._table.peek_each(hold.charges, hold.now_us, [hold.cost] * len(hold.charges))
        judged = [*zip(names, hold.charges, outcomes, strict=True)]
        recorded: dict[bytes, Outcome] = {name: (*one[:5], None) for name, _, one in judged}
        if not passes([limit for _, limit, _ in hold.charges], outcomes):
            return Held(names, [*recorded.values()], 0)
        passing = [one for one in judged if one[2][0]]
        self._require_room([name for name, _, _ in passing])
        now_us = self._now_us()
        last_us = now_us + longest_life_us([limit for _, (_, limit, _), _ in passing])
        end_us = min(now_us + hold.ttl_us, last_us)
        for name, charge, outcome in passing:
            bucket = self._buckets[name] if name in self._buckets else self._take(name, charge)
            bucket.charge(charge, hold.now_us, hold.cost, outcome[5], number=hold.number)
            if isinstance(bucket, SlotsBucket):
                bucket.take(hold.number, end_us)
                recorded[name] = bucket.held()
            self._changed[_BUCKET, name] = True
        record = self._records[hold.number] = _Record(
            hold.check_digest, now_us, end_us, last_us, hold.cost, _recorded(recorded.items())
        )
        self._changed.setdefault((_HOLD, hold.number), False)
        self._schedule(hold.number, record)
        return Held(names, [*recorded.values()], end_us, is_first=True)

    async def settle(
        self, number: bytes, limits: Mapping[bytes, Limit | None], actual: int, now_us: int
    ) -> Settled:
        """Charge the actual cost of a hold; see :class:`ratelimitd.ledger.holds.Holds`."""
        record = self._known(number)
        if record is None:
            return Settled(known=False)
        if record.actual == _ENDED:
            raise HoldEndedError
        is_first = record.actual is None
        if is_first:
            record.actual = actual
            left = self._leave(number, record)
            record.settled = _recorded(
                [(one.name, one.outcome(now_us, limits.get(one.name))) for one in left]
            )
        elif record.actual != actual:
            raise HoldSettledError
        return Settled(known=True, is_first=is_first, outcomes=_outcomes(record.settled, limits))

    async def extend(
        self, number: bytes, _names: Sequence[bytes], ttl_us: int, _now_us: int
    ) -> int | None:
        """Extend a hold; see :class:`ratelimitd.ledger.holds.Holds`."""
        record = self._known(number)
        if record is None:
            return None
        if record.actual is not None:
            raise HoldEndedError if record.actual == _ENDED else HoldSettledError("hold")
        end_us = max(record.end_us, min(self._now_us() + ttl_us, record.last_us))
        record.end_us = end_us
        for name, _ in record.recorded:
            bucket = self._buckets.get(name)
            if isinstance(bucket, SlotsBucket):
                bucket.extend(number, end_us)
        self._schedule(number, record)
        return end_us

    # Called by the table.

    def find(self, key: bytes) -> HeldBucket | None:
        """Return the bucket of ``key``, if it is kept apart."""
        return self._buckets.get(self._keys.stored(key))

    def charge(  # noqa: PLR0917 -- as that of a bucket
        self, bucket: HeldBucket, charge: Charge, now_us: int, cost: int, state: Any
    ) -> None:
        """Charge an allowed check to a bucket that is kept apart."""
        bucket.charge(charge, now_us, cost, state)
        self._changed[_BUCKET, bucket.name] = True
        if bucket.fits_table:
            self._give_back(bucket)

    def remove(self, key: bytes) -> HeldBucket | None:
        """Remove a bucket with its holds; return it, for :meth:`put_back`."""
        return self._drop(self._keys.stored(key))

    def put_back(self, bucket: HeldBucket) -> None:
        """Undo a :meth:`remove`."""
        self._buckets[bucket.name] = bucket
        self._catch_up(bucket)

    def sweep(self, now_us: int) -> None:
        """End holds, and drop old ones and buckets that are full again; a step of bounded length."""
        self._expire(now_us)
        for name in [*islice(self._idle, STEP)]:
            del self._idle[name]
            bucket = self._buckets.get(name)
            if bucket is None or len(bucket):
                continue
            # Only a level can be in debt.
            is_over = isinstance(bucket, LevelBucket) and bucket.is_over(now_us - LATE_US)
            if is_over and not self._table.callers_time:
                self._drop(name)
            else:
                self._idle[name] = None

    # Called by the snapshot log.

    @property
    def unwritten(self) -> int:
        """The number of changed holds and buckets."""
        return len(self._changed)

    def changes(self, most: int, most_bytes: int = MAX_PAYLOAD_BYTES) -> list[Change]:
        """Return up to ``most`` changed holds and buckets, about ``most_bytes`` in all, and at least one if any."""
        taken, taken_bytes = [], 0
        for kind, name in [*islice(self._changed, most)]:
            taken.append(self._taken(kind, name))
            taken_bytes += len(taken[-1][2])
            if taken_bytes >= most_bytes:
                break
        return taken

    def changes_of(self, names: Iterable[bytes]) -> list[Change]:
        """Return the changes of the buckets of these stored names that are kept apart and have changed."""
        changed = [(_BUCKET, name) for name in names]
        return [self._taken(*one) for one in changed if one in self._changed]

    def _taken(self, kind: bytes, name: bytes) -> Change:
        del self._changed[kind, name]
        one = self._buckets[name] if kind == _BUCKET else self._records.get(name)
        # Empty: a dropped hold, which a restart would otherwise find in flight.
        value = b"" if one is None else json.dumps(one.dump(), separators=(",", ":")).encode()
        return kind, name, value

    def change_again(self, changes: Iterable[Change]) -> None:
        """Let :meth:`changes` return these again, because they could not be written."""
        for kind, name, _ in changes:
            if kind == _HOLD or name in self._buckets:
                self._changed[kind, name] = True

    def given_back(self) -> list[GivenBack]:
        """Return the buckets that were returned to the table since the last call."""
        buckets = [*self._given_back.items()]
        self._given_back.clear()
        return buckets

    def give_back_again(self, buckets: Iterable[GivenBack]) -> None:
        """Let :meth:`given_back` return these again, because they could not be written."""
        self._given_back = {**dict(buckets), **self._given_back}

    def change_all(self) -> None:
        """Let :meth:`changes` return everything."""
        self._changed = (
            {(_HOLD, number): True for number in self._records}
            | {(_BUCKET, name): True for name in self._buckets}
            | self._changed
        )

    def restore(self, values: Mapping[tuple[bytes, bytes], bytes]) -> None:
        """Restore holds and buckets from :meth:`changes`: (kind, name) → its last value. Skips invalid ones."""
        now_us = self._now_us()
        # Holds first: a bucket is restored with those in flight on it.
        for (kind, name), value in sorted(values.items(), key=lambda one: one[0][0] != _HOLD):
            one: _Record | HeldBucket
            try:
                dump = json.loads(value)
                if kind == _HOLD:
                    one = _Record.load(dump, now_us)
                else:
                    one = load(name, dump, partial(self._end_of, name), self._now_us, self._in_time)
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                continue
            if isinstance(one, HeldBucket):
                self._buckets[name] = one
                self._catch_up(one)
            elif one.end_us + _GRACE_US > now_us:
                self._records[name] = one
                if one.actual is not None:
                    self._over[name] = None
                self._schedule(name, one)

    def _in_time(self, value: Value) -> Value:
        return value if self._table.callers_time else in_time(value, self._now_us())

    # Holds.

    def _require_room(self, names: Iterable[bytes]) -> None:
        if self.in_flight >= self._max_holds:
            message = f"the node has {self._max_holds} holds in flight, its maximum"
            raise HoldsFullError(message)
        for name in names:
            if name in self._buckets and len(self._buckets[name]) >= self._max_per_bucket:
                message = f"a limit has {self._max_per_bucket} holds in flight for one identity, the maximum"
                raise HoldsFullError(message)

    def _known(self, number: bytes) -> _Record | None:
        """Return the record of a hold, as of now."""
        now_us = self._now_us()
        self._expire(now_us)
        # Steps are bounded, so the hold may not have been processed yet.
        while (record := self._records.get(number)) is not None and record.due_us <= now_us:
            self._end(number, record)
        return record

    def _end(self, number: bytes, record: _Record) -> None:
        """End a hold that is due, or drop it if it is not in flight."""
        if record.actual is None:
            record.actual = _ENDED
            self._leave(number, record)
        else:
            self._forget(number)

    def _leave(self, number: bytes, record: _Record) -> list[HeldBucket]:
        """Settle a finished hold on its buckets, and return them."""
        buckets = [self._buckets[name] for name, _ in record.recorded if name in self._buckets]
        for bucket in buckets:
            bucket.settle(number, record.more)
            self._was_left(bucket)
        self._over[number] = None
        if len(self._over) > self._max_holds:
            self._forget(next(iter(self._over)))
        self._schedule(number, record)
        return buckets

    def _schedule(self, number: bytes, record: _Record) -> None:
        """Note that a hold has changed, and schedule its end, or its removal if it has ended."""
        self._changed.setdefault((_HOLD, number), True)
        if record.tick:
            del self._due[record.tick][number]
        record.tick = (record.due_us >> _TICK_BITS) + 1
        if record.tick not in self._due:
            self._due[record.tick] = {}
            heappush(self._ticks, record.tick)
        self._due[record.tick][number] = None

    def _expire(self, now_us: int) -> None:
        """End the holds that are due, and drop those that ended long ago, at most :data:`STEP` together."""
        tick, ticks = now_us >> _TICK_BITS, self._ticks
        for _ in range(STEP):
            if not ticks or ticks[0] > tick:
                return
            numbers = self._due[ticks[0]]
            if not numbers:
                del self._due[heappop(ticks)]
                continue
            number = next(iter(numbers))
            self._end(number, self._records[number])

    def _forget(self, number: bytes) -> None:
        record = self._records.pop(number)
        del self._due[record.tick][number], self._over[number]
        if self._changed.get((_HOLD, number)) is False:
            del self._changed[_HOLD, number]

    # Buckets.

    def _take(self, name: bytes, charge: Charge) -> HeldBucket:
        """Move a bucket out of the table."""
        key, limit, _ = charge
        value = self._table.take(key)
        state = None if value is None else unpack(value)
        bucket = self._buckets[name] = bucket_of(name, limit, state, self._now_us)
        return bucket

    def _catch_up(self, bucket: HeldBucket) -> None:
        """Settle the holds on a bucket that ended or were settled while it was removed."""
        for number in bucket.numbers():
            record = self._on_bucket(bucket.name, number)
            if record is None or record.actual is not None:
                bucket.settle(number, 0 if record is None else record.more)
        self._was_left(bucket)

    def _on_bucket(self, name: bytes, number: bytes) -> _Record | None:
        """Return the hold of a number if it is on this bucket; an older hold may have had the same number."""
        record = self._records.get(number)
        return record if record is not None and name in dict(record.recorded) else None

    def _end_of(self, name: bytes, number: bytes) -> int | None:
        record = self._on_bucket(name, number)
        return None if record is None else record.end_us

    def _was_left(self, bucket: HeldBucket) -> None:
        """Note that holds on a bucket have ended; without any left, return it to the table unless it is in debt."""
        self._changed[_BUCKET, bucket.name] = True
        if bucket.fits_table:
            self._give_back(bucket)
        elif not len(bucket):
            self._idle[bucket.name] = None
            if len(self._idle) > self._max_holds:
                # The debt beyond one capacity is forgiven.
                oldest = next(iter(self._idle))
                del self._idle[oldest]
                if oldest in self._buckets and not len(self._buckets[oldest]):
                    self._give_back(self._buckets[oldest])

    def _give_back(self, bucket: HeldBucket) -> None:
        self._drop(bucket.name)
        state = bucket.state()
        if state is not None:
            self._table.take_back(bucket.name, bucket.key, state, bucket.limit)
            self._given_back[bucket.name] = bucket.key

    def _drop(self, name: bytes) -> HeldBucket | None:
        self._changed.pop((_BUCKET, name), None)
        return self._buckets.pop(name, None)


def _recorded(outcomes: Iterable[tuple[bytes, Outcome]]) -> RecordedOutcomes:
    return tuple([(name, (*one[:4], int(one[4]))) for name, one in outcomes])


def _outcomes(recorded: RecordedOutcomes, names: Iterable[bytes]) -> list[Outcome | None]:
    known = dict(recorded)
    return [_outcome(*known[name]) if name in known else None for name in names]


def _outcome(  # noqa: PLR0917 -- as it was recorded
    allowed: int, remaining: int, reset_time: int, retry_after: int, reason: int
) -> Outcome:
    return (bool(allowed), int(remaining), int(reset_time), int(retry_after), Reason(reason), None)
