"""A bucket with holds in flight, or in debt. Pure. See ADR 0055.

Such a bucket is kept apart from the table: it is never evicted, its debts are not capped, and checks of other buckets
cost no more. A settle with another amount is charged exactly as of the time of the hold: a token bucket and a fixed
window replay the later changes of their level, and a log contains the time of every charge.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeAlias, cast

from ratelimitd.algorithms import DECIDE, Decide, concurrency, sliding_window
from ratelimitd.algorithms.concurrency import Slots
from ratelimitd.algorithms.several import Bucket, Charge, uncharged
from ratelimitd.buckets.snapshot_format import State, Value, is_log, pack, unpack
from ratelimitd.ledger.accounts import ACCOUNTS
from ratelimitd.ledger.holds import NUMBER_BYTES
from ratelimitd.ledger.replay import NEVER, Change, Replay, both, changed
from ratelimitd.model import (
    CONCURRENCY,
    INT32_MAX,
    MAX_TIME_US,
    US_PER_S,
    Algorithm,
    Limit,
    Outcome,
)

Dump: TypeAlias = Mapping[str, Any]

# equivalent: no level is between it and NEVER
_FAR: Final = NEVER // 2


class HeldBucket(ABC):
    """One bucket that is kept apart.

    ``name`` is the stored name. ``key`` is the key in checks; after a restart it is ``None`` until a check is charged.
    ``limit`` is the limit of the last charge.
    """

    __slots__ = ("key", "limit", "name")

    def __init__(self, name: bytes, limit: Limit) -> None:
        self.name = name
        self.key: bytes | None = None
        self.limit = limit

    def __len__(self) -> int:
        """Return the number of holds in flight."""
        return len(self.numbers())

    @abstractmethod
    def numbers(self) -> list[bytes]:
        """Return the numbers of the holds in flight."""

    @abstractmethod
    def judged(self, limit: Limit, decide: Decide) -> Bucket:
        """Return the state under ``limit``, and its decide function: ``decide``, unless that does not support debts."""

    @abstractmethod
    def charge(
        self, charge: Charge, now_us: int, cost: int, state: Any, *, number: bytes | None = None
    ) -> None:
        """Charge an allowed check, for the hold of ``number`` if any; ``state`` is that of its outcome."""

    @abstractmethod
    def settle(self, number: bytes, more: int) -> None:
        """End a hold, if present, and charge ``more`` tokens than it held, fewer if negative, as of its time."""

    @abstractmethod
    def state(self) -> State | None:
        """Return the state for the table, without holds and with a debt of at most one capacity."""

    @property
    @abstractmethod
    def fits_table(self) -> bool:
        """Whether :meth:`state` loses nothing."""

    @abstractmethod
    def dump(self) -> Dump:
        """Return values for JSON, from which :func:`load` restores the bucket."""

    def outcome(self, now_us: int, limit: Limit | None = None) -> Outcome:
        """Return the outcome at ``now_us`` of a check that costs nothing; see Holds.settle for ``limit``."""
        if limit is None or _kind(limit) != _kind(self.limit):
            limit = self.limit
        bucket = self.judged(limit, DECIDE[limit.algorithm])
        return (*uncharged(bucket, now_us)[:5], None)

    def _dumped(self, state: object) -> dict[str, Any]:
        limit = self.limit
        return {
            "limit": [limit.limit, limit.window_seconds, limit.algorithm, limit.burst],
            "full_after_s": limit.full_after_s,
            "state": state,
            "holds": b"".join(self.numbers()).hex(),
        }


class LevelBucket(HeldBucket):
    """A token bucket or a fixed window: (level, latest_us), where the level is the number of units missing.

    A fixed window is refilled by its limit at its end, so its overdraft counts in the next window.
    """

    __slots__ = ("_latest_us", "_level", "_replay")

    def __init__(self, name: bytes, limit: Limit, state: tuple[int, ...] | None) -> None:
        super().__init__(name, limit)
        self._level, self._latest_us = (0, 0) if state is None else state
        self._replay: Replay | None = None

    def __len__(self) -> int:
        """Return the number of holds in flight."""
        return len(self._replay) if self._replay is not None else 0

    def numbers(self) -> list[bytes]:
        """Return the numbers of the holds in flight, by their time."""
        return self._replay.numbers if self._replay is not None else []

    def judged(self, limit: Limit, decide: Decide) -> Bucket:
        """Return the state; an overdrawn one is judged by the ledger's account of the algorithm."""
        state = min(self._level, self._most(limit)), self._latest_us
        judge = ACCOUNTS[limit.algorithm].judge_of(state, limit)
        if judge is DECIDE[limit.algorithm]:
            return state, limit, decide
        # A partial decides a check that proceeds later.
        return state, limit, partial(decide, judge=judge) if isinstance(decide, partial) else judge

    def charge(
        self, charge: Charge, now_us: int, cost: int, state: Any, *, number: bytes | None = None
    ) -> None:
        """Charge a check or a hold; all changes of the level since the oldest hold are kept."""
        _, limit, decide = charge
        added = cost * _unit(limit), 0, NEVER
        if self._replay is not None:
            self._replay.then(self._refill(limit, decide, now_us))
            if number is None:
                self._replay.then(added)
        elif number is not None:
            self._replay = Replay(changed(self._level, self._refill(limit, decide, now_us)))
        if self._replay is not None and number is not None:
            self._replay.add(number, added)
        charged_us = max(self._latest_us, now_us)
        self.key, self.limit, _ = charge
        self._level, self._latest_us = state[:2]
        if self._replay is not None and self._latest_us > charged_us:
            # Of a check that proceeds later.
            self._replay.then((-_refilled(limit, charged_us, self._latest_us), 0, NEVER))

    def settle(self, number: bytes, more: int) -> None:
        """End a hold, and replay the level from it on."""
        replay = self._replay
        if replay is None or number not in replay:
            return
        replay.remove(number, more * _unit(self.limit))
        if more:
            self._level = replay.level()
        if not replay:
            self._replay = None

    def state(self) -> State:
        """Return (level, latest_us), the level within the capacity."""
        return min(self._level, self.limit.capacity * _unit(self.limit)), self._latest_us

    @property
    def fits_table(self) -> bool:
        """Whether there are no holds, and no debt."""
        return self._replay is None and self._level <= self.limit.capacity * _unit(self.limit)

    def is_over(self, now_us: int) -> bool:
        """Return whether the bucket is full, even under another limit."""
        # A calendar window is never refilled: the next one has another bucket.
        is_last = (
            self.limit.algorithm is Algorithm.FIXED_WINDOW
            and self.limit.full_after_s < self.limit.window_seconds
        )
        is_full = is_last or self._level <= _refilled(self.limit, self._latest_us, now_us)
        return is_full and self._latest_us + self.limit.full_after_s * US_PER_S <= now_us

    def dump(self) -> Dump:
        """Return the level, and its changes from each hold on."""
        values = self._dumped([self._level, self._latest_us])
        if self._replay is not None:
            values["before"], _, changes = self._replay.parts()
            adds, leasts, mosts = zip(*changes, strict=True)
            values["changes"] = [adds, leasts, [most if most < _FAR else None for most in mosts]]
        return values

    def load_holds(self, numbers: list[bytes], values: Dump) -> None:
        """Take the holds of a dump."""
        if numbers:
            changes = [
                (int(add), int(least), NEVER if most is None else int(most))
                for add, least, most in zip(*values["changes"], strict=True)
            ]
            if len(changes) != len(numbers):
                message = "not one change of each hold"
                raise ValueError(message)
            self._replay = Replay(int(values["before"]), numbers, changes)

    def _most(self, limit: Limit) -> int:
        """Return the bound of the debt under ``limit``: an edit caps it, as in the table."""
        if (limit.limit, limit.capacity) == (self.limit.limit, self.limit.capacity):
            return NEVER
        return limit.capacity * _unit(limit)

    def _refill(self, limit: Limit, decide: Decide, now_us: int) -> Change:
        """Return the change from the latest charge to just before ``now_us``, including that by an edit."""
        # A check that proceeds later must not use the refill until then; that until the latest charge is used already.
        ahead_us = decide.keywords["ahead_us"] if isinstance(decide, partial) else 0
        reserved_us = max(0, now_us + ahead_us - max(now_us, self._latest_us))
        refill = -_refilled(limit, self._latest_us, now_us), reserved_us * limit.limit, NEVER
        return both((0, 0, self._most(limit)), refill)


class LogBucket(HeldBucket):
    """A sliding window: a log, and the time of each hold's charge."""

    __slots__ = ("_at_us", "_log")

    def __init__(self, name: bytes, limit: Limit, log: bytes | None) -> None:
        super().__init__(name, limit)
        self._log = log or b""
        self._at_us: dict[bytes, int] = {}

    def numbers(self) -> list[bytes]:
        """Return the numbers of the holds in flight."""
        return [*self._at_us]

    def judged(self, limit: Limit, decide: Decide) -> Bucket:
        """Return the log; in debt it contains more tokens than the limit."""
        return self._log, limit, decide

    def charge(
        self, charge: Charge, _now_us: int, _cost: int, state: Any, *, number: bytes | None = None
    ) -> None:
        """Store the log that includes the check, and the time of a hold's charge."""
        self.key, self.limit, _ = charge
        self._log = state
        if number is not None:
            self._at_us[number], _ = sliding_window.latest(self._log)

    def settle(self, number: bytes, more: int) -> None:
        """End a hold: insert additional tokens at its time, or remove unused ones, the latest up to its time."""
        at_us = self._at_us.pop(number, None)
        if at_us is None:
            return
        if more > 0:
            self._log = sliding_window.entered(self._log, self.limit, [(at_us, more)])
        elif more < 0:
            self._log, _ = sliding_window.removed(self._log, at_us, -more)

    def state(self) -> State:
        """Return the log."""
        return self._log

    @property
    def fits_table(self) -> bool:
        """Whether there are no holds: a log is never capped."""
        return not self._at_us

    def dump(self) -> Dump:
        """Return the log, and the time of each hold's charge."""
        return self._dumped(self._log.hex()) | {"at": [*self._at_us.values()]}

    def load_holds(self, numbers: list[bytes], values: Dump) -> None:
        """Take the holds of a dump."""
        latest_us, _ = sliding_window.latest(self._log)
        for number, at_us in zip(numbers, values["at"], strict=True):
            self._at_us[number] = min(int(at_us), latest_us)


class SlotsBucket(HeldBucket):
    """A limit of concurrency. Holds end by the clock ``now_us``, whatever the time of a check."""

    __slots__ = ("_now_us", "_slots")

    def __init__(self, name: bytes, limit: Limit, now_us: Callable[[], int]) -> None:
        super().__init__(name, limit)
        self._now_us = now_us
        self._slots = Slots()

    def __len__(self) -> int:
        """Return the number of holds in flight."""
        return len(self._slots)

    def numbers(self) -> list[bytes]:
        """Return the numbers of the holds in flight."""
        return [number for _, number in self._slots.items()]

    def judged(self, limit: Limit, _decide: Decide) -> Bucket:
        """Return the slots."""
        return self._slots, limit, self._decide

    def charge(
        self,
        charge: Charge,
        _now_us: int,
        _cost: int,
        _state: Any,
        *,
        number: bytes | None = None,  # noqa: ARG002
    ) -> None:
        """Note the limit; a check takes no slot, and :meth:`take` gives one to a hold."""
        self.key, self.limit, _ = charge

    def take(self, number: bytes, end_us: int) -> None:
        """Give a hold a slot until ``end_us``."""
        self._slots.take(number, end_us)

    def extend(self, number: bytes, end_us: int) -> None:
        """Extend the slot of a hold, if it has one."""
        if number in self._slots:
            self._slots.take(number, end_us)

    def held(self) -> Outcome:
        """Return the outcome of a hold that has just taken a slot."""
        return concurrency.held(self._slots, self.limit, self._now_us())

    def settle(self, number: bytes, _more: int) -> None:
        """Free the slot of a hold."""
        self._slots.free(number)

    def state(self) -> None:
        """Return ``None``: the table stores no state of slots."""

    @property
    def fits_table(self) -> bool:
        """Whether no slot is in use."""
        return not self._slots

    def dump(self) -> Dump:
        """Return the holds with a slot; their records contain the ends."""
        return self._dumped(None)

    def _decide(self, state: Any, limit: Limit, _now_us: int, cost: int) -> Outcome:
        return concurrency.decide(state, limit, self._now_us(), cost)


def bucket_of(
    name: bytes, limit: Limit, state: State | None, now_us: Callable[[], int]
) -> HeldBucket:
    """Return the bucket, without holds, of a state in the table under ``limit``."""
    if limit.algorithm is CONCURRENCY:
        return SlotsBucket(name, limit, now_us)
    if limit.algorithm is Algorithm.SLIDING_WINDOW:
        return LogBucket(name, limit, cast("bytes | None", state))
    # An edit has capped the debt at one capacity.
    capped = ACCOUNTS[limit.algorithm].capped(state, limit)
    return LevelBucket(name, limit, capped)


def load(  # noqa: PLR0917 -- what a dump does not say
    name: bytes,
    values: Dump,
    end_of: Callable[[bytes], int | None],
    now_us: Callable[[], int],
    in_time: Callable[[Value], Value],
) -> HeldBucket:
    """Restore a bucket from a dump; ``in_time`` corrects times in the future.

    ``end_of`` returns the end of the hold of a number, ``None`` if it is unknown.

    Raises:
        ValueError, KeyError, TypeError: the dump is invalid.
    """
    limit = _limit(*values["limit"], full_after_s=values.get("full_after_s"))
    numbers = _numbers(values["holds"])
    if limit.algorithm is CONCURRENCY:
        slots = SlotsBucket(name, limit, now_us)
        for number in numbers:
            end_us = end_of(number)
            if end_us is not None:
                slots.take(number, end_us)
        return slots
    bucket: LevelBucket | LogBucket
    if limit.algorithm is Algorithm.SLIDING_WINDOW:
        value = pack(bytes.fromhex(values["state"]), limit, 0)
        if not is_log(cast("bytes", value)):
            message = "no log"
            raise ValueError(message)
        bucket = LogBucket(name, limit, cast("bytes", unpack(in_time(value))))
    else:
        level, latest_us = values["state"]
        value = pack((max(0, level), min(max(0, latest_us), MAX_TIME_US)), limit, 0)
        bucket = LevelBucket(name, limit, cast("tuple[int, ...]", unpack(in_time(value))))
    bucket.load_holds(numbers, values)
    return bucket


def _limit(
    limit: int, window_seconds: int, algorithm: str, burst: int, *, full_after_s: int | None
) -> Limit:
    if not (0 < limit <= INT32_MAX and 0 < window_seconds <= INT32_MAX and 0 <= burst <= INT32_MAX):
        message = "no limit"
        raise ValueError(message)
    if full_after_s is not None and not 0 < full_after_s <= INT32_MAX:
        message = "no time in which it is full"
        raise ValueError(message)
    found = Limit(
        limit=int(limit),
        window_seconds=int(window_seconds),
        algorithm=Algorithm(algorithm),
        burst=int(burst),
    )
    if full_after_s is not None:  # in a calendar window not that of its limit
        object.__setattr__(found, "full_after_s", int(full_after_s))
    return found


def _numbers(text: str) -> list[bytes]:
    joined = bytes.fromhex(text)
    return [joined[start : start + NUMBER_BYTES] for start in range(0, len(joined), NUMBER_BYTES)]


def _kind(limit: Limit) -> tuple[Algorithm, int]:
    return limit.algorithm, limit.window_seconds


def _unit(limit: Limit) -> int:
    """Return the units per token."""
    return limit.window_us if limit.algorithm is Algorithm.TOKEN_BUCKET else 1


def _refilled(limit: Limit, from_us: int, until_us: int) -> int:
    """Return the units that are refilled between two times."""
    if until_us <= from_us:
        return 0
    if limit.algorithm is Algorithm.TOKEN_BUCKET:
        return (until_us - from_us) * limit.limit
    return (until_us // limit.window_us - from_us // limit.window_us) * limit.limit
