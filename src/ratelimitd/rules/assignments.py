"""Which plan each identity is assigned to: one assignment, its validation, and a node's look-up that holds a million.

Reads no clock and does no I/O. See ADR 0050.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, Final, NamedTuple, Self

from ratelimitd.model import TYPE_NAME, US_PER_S
from ratelimitd.rules.validation import CONTROL_CHARACTER

MAX_ASSIGNMENTS: Final = 2_000_000
"""Assignments in a store. A node holds all of them, about 80 bytes each, and loads a million in less than 15 s."""

MAX_EXPIRE_TIME: Final = 2**33 - 1
"""Latest end of an assignment, in Unix seconds: the year 2242, within the instants that a node handles."""

_SHARD_ENTRIES: Final = 600
_SHARDS: Final = MAX_ASSIGNMENTS // _SHARD_ENTRIES
"""Dicts of a type: 300 entries each at a million, 600 at the maximum, which is where CPython packs them best."""

_TIME_BITS: Final = 33
_TIME_MASK: Final = MAX_EXPIRE_TIME

_SHARED_VALUES: Final = 4_096
"""Values kept to be shared: assignments that end at times of their own take 32 bytes more each."""

MAX_IDENTIFIER_BYTES: Final = 256
"""Longest identifier, in bytes of UTF-8."""

MAX_NOTE_CHARS: Final = 255

PLAN_NAME: Final = re.compile(r"[a-z0-9_-]{1,32}")

_SURROGATE = re.compile(r"[\ud800-\udfff]")

_UNITS_S: Final = {"m": 60, "h": 3_600, "d": 86_400}

_DURATION: Final = re.compile(r"([0-9]{1,9})([mhd])")

_UNIX_TIME: Final = re.compile(r"-?[0-9]{1,18}")

_Shards = list[dict[bytes, int]]


class Assignment(NamedTuple):
    """One identity's plan. ``identifier`` is canonical, as in a :class:`~ratelimitd.model.Check`.

    ``expire_time`` is in Unix seconds, 0 = never. ``etag`` differs after every edit; in a request, empty matches all.
    """

    identifier_type: str
    identifier: bytes
    plan: str
    expire_time: int = 0
    note: str = ""
    etag: str = ""

    @property
    def identity(self) -> tuple[str, bytes]:
        """Whose assignment it is."""
        return self.identifier_type, self.identifier

    def same_as(self, other: Assignment | None) -> bool:
        """Return whether both say the same of an identity."""
        return other is not None and self[:-1] == other[:-1]

    def with_etag(self, revision: int) -> Assignment:
        """Return it as stored at this revision."""
        # The type may be a member of an enumeration, whose repr is another.
        content = repr((str(self.identifier_type), *self[1:-1], revision)).encode()
        return self._replace(etag=blake2b(content, digest_size=9).hexdigest())


def violations(plan: str, expire_time: int, note: str, now_s: float) -> Iterator[tuple[str, str]]:
    """Yield each field of a requested assignment that is wrong, with a description. The identity is not looked at."""
    if PLAN_NAME.fullmatch(plan) is None:
        yield "plan", "the plan must be 1 to 32 characters of a-z, 0-9, _ and -"
    if expire_time and not now_s < expire_time <= MAX_EXPIRE_TIME:
        yield "expire_time", f"must be 0, or later than now and at most {MAX_EXPIRE_TIME}"
    if len(note) > MAX_NOTE_CHARS:
        yield "note", f"must be at most {MAX_NOTE_CHARS} characters"
    if CONTROL_CHARACTER.search(note):
        yield "note", "must not contain control characters"
    if _SURROGATE.search(note):
        yield "note", "must be valid Unicode"


def expire_time_of(text: str, now_s: float) -> int:
    """Return the Unix seconds of an end as people write it, 0 for an empty text.

    Raises:
        ValueError: it is none; the message says what is taken.
    """
    if not text:
        return 0
    if found := _DURATION.fullmatch(text):
        return int(now_s) + int(found[1]) * _UNITS_S[found[2]]
    if _UNIX_TIME.fullmatch(text):
        return int(text)
    try:
        at = datetime.fromisoformat(text)
        # A date, or a time without a zone, is in UTC.
        return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        message = "must be a duration such as 30d, an ISO 8601 time or Unix seconds"
        raise ValueError(message) from None


class Assigned(NamedTuple):
    """What a node needs of an assignment; ``expire_time`` in Unix seconds, 0 = never."""

    identifier_type: str
    identifier: bytes
    plan: str
    expire_time: int


def assigned_of(row: Sequence[Any]) -> Assigned | None:
    """Return the assignment of a stored row, in the fields of ``Assigned``; ``None`` if it is none.

    A row may be written past the service, with values of any type.
    """
    identifier_type, identifier, plan, expire_time = row
    if (
        isinstance(identifier_type, str)
        and isinstance(identifier, bytes)
        and isinstance(plan, str)
        and isinstance(expire_time, int)
        and TYPE_NAME.fullmatch(identifier_type)
        and 0 < len(identifier) <= MAX_IDENTIFIER_BYTES
        and PLAN_NAME.fullmatch(plan)
        and 0 <= expire_time <= MAX_EXPIRE_TIME
    ):
        return Assigned(identifier_type, identifier, plan, expire_time)
    return None


def _nothing() -> None:
    """Stand for a callback that is not set."""


class Assignments:
    """The plan of each identity. One writer: the event loop.

    As in :mod:`ratelimitd.buckets.table`, one dict of a million entries would stall the loop when it grows, so each
    identifier type has many dicts, its *shards*. Keys are ``bytes`` and values ``int``, so the cyclic garbage collector
    skips the dicts; equal values share one object.

    ``on_types_changed`` is called after the first identity of a type was assigned or the last one was removed.
    """

    __slots__ = (
        "_entries", "_holders", "_numbers", "_plans", "_shared", "_sweep_next", "_types", "on_types_changed",
    )  # fmt: skip

    def __init__(self) -> None:
        self.on_types_changed: Callable[[], None] = _nothing
        self._types: dict[str, _Shards] = {}
        self._entries: dict[str, int] = {}
        self._plans: list[str] = []
        self._numbers: dict[str, int] = {}
        self._holders: list[int] = []
        self._shared: dict[int, int] = {}
        self._sweep_next = 0

    def __len__(self) -> int:
        """Return the number of assignments, those that expired and are not yet swept included."""
        return sum(self._entries.values())

    def plan_of(
        self, identifier_type: str, identifier: bytes, now_us: int
    ) -> tuple[str, int] | None:
        """Return the plan of an identity and its end in Unix seconds, 0 = never; ``None``: none, or expired.

        ``now_us`` is in µs since the Unix epoch. An assignment has expired at the second of its end.
        """
        shards = self._types.get(identifier_type)
        if shards is None:
            return None
        value = shards[hash(identifier) % _SHARDS].get(identifier)
        if value is None:
            return None
        expire_time = value & _TIME_MASK
        if expire_time and expire_time * US_PER_S <= now_us:
            return None
        return self._plans[value >> _TIME_BITS], expire_time

    def has_type(self, identifier_type: str) -> bool:
        """Return whether any identity of this type is assigned."""
        return identifier_type in self._types

    @property
    def types(self) -> dict[str, int]:
        """The number of assignments of each identifier type that has any."""
        return dict(self._entries)

    @property
    def plans(self) -> dict[str, int]:
        """The number of assignments to each plan that has any."""
        found = zip(self._plans, self._holders, strict=True)
        return {plan: holders for plan, holders in found if holders}

    def put(self, identifier_type: str, identifier: bytes, plan: str, expire_time: int) -> None:
        """Assign an identity to a plan until ``expire_time`` in Unix seconds, 0 = for good; replaces what it had."""
        shards = self._types.get(identifier_type)
        is_new_type = shards is None
        if shards is None:
            shards = self._types[identifier_type] = [{} for _ in range(_SHARDS)]
            self._entries[identifier_type] = 0
        shard = shards[hash(identifier) % _SHARDS]
        former = shard.get(identifier)
        if former is None:
            self._entries[identifier_type] += 1
        else:
            self._holders[former >> _TIME_BITS] -= 1
        shard[identifier] = value = self._value(plan, expire_time)
        self._holders[value >> _TIME_BITS] += 1
        if is_new_type:
            self.on_types_changed()

    def remove(self, identifier_type: str, identifier: bytes) -> None:
        """Remove the assignment of an identity; ignore one that has none."""
        shards = self._types.get(identifier_type)
        if shards is None:
            return
        value = shards[hash(identifier) % _SHARDS].pop(identifier, None)
        if value is not None:
            self._removed(identifier_type, [value])

    def items(self) -> Iterator[Assigned]:
        """Yield each assignment; they may be changed meanwhile.

        What is changed during the iteration is yielded as before or as after.
        """
        # Copies, since `replace` empties the lists.
        plans, types = self._plans, [(name, list(shards)) for name, shards in self._types.items()]
        for identifier_type, shards in types:
            for shard in shards:
                for identifier, value in list(shard.items()):
                    plan = plans[value >> _TIME_BITS]
                    yield Assigned(identifier_type, identifier, plan, value & _TIME_MASK)

    def replace(self, other: Self) -> Iterator[None]:
        """Take over the content of ``other``, which is not to be used any more, at once; then free the old in steps.

        The new content is in force before the first step; a step takes about 0.1 ms.
        """
        old = self._types
        changed = old.keys() != other._types.keys()
        self._types, self._entries = other._types, other._entries
        self._plans, self._numbers, self._holders = other._plans, other._numbers, other._holders
        self._shared = other._shared
        if changed:
            self.on_types_changed()
        for shards in old.values():
            while shards:
                del shards[-4:]
                yield

    def sweep(self, now_us: int, shards: int) -> None:
        """Drop what has expired from the next ``shards`` shards of every type, about 20 µs each."""
        for _ in range(min(shards, _SHARDS)):
            at = self._sweep_next
            self._sweep_next = (at + 1) % _SHARDS
            for identifier_type in tuple(self._types):
                self._sweep_shard(identifier_type, self._types[identifier_type][at], now_us)

    def _sweep_shard(self, identifier_type: str, shard: dict[bytes, int], now_us: int) -> None:
        expired = [
            identifier
            for identifier, value in shard.items()
            if 0 < (value & _TIME_MASK) * US_PER_S <= now_us
        ]
        if expired:
            self._removed(identifier_type, [shard.pop(identifier) for identifier in expired])

    def _removed(self, identifier_type: str, values: Sequence[int]) -> None:
        for value in values:
            self._holders[value >> _TIME_BITS] -= 1
        self._entries[identifier_type] -= len(values)
        if not self._entries[identifier_type]:
            del self._types[identifier_type], self._entries[identifier_type]
            self.on_types_changed()

    def _value(self, plan: str, expire_time: int) -> int:
        number = self._numbers.get(plan)
        if number is None:
            number = self._numbers[plan] = len(self._plans)
            self._plans.append(plan)
            self._holders.append(0)
        value = number << _TIME_BITS | expire_time
        if len(self._shared) >= _SHARED_VALUES:
            self._shared.clear()
        return self._shared.setdefault(value, value)
