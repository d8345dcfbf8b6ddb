"""Assignments of identities to plans: the value, its validation, and a node's look-up table for a million of them.

Reads no clock and performs no I/O. See ADR 0050.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, Final, NamedTuple, Self

from ratelimitd.model import TYPE_NAME, US_PER_S
from ratelimitd.rules.validation import CONTROL_CHARACTER, NAME, SURROGATE

MAX_ASSIGNMENTS: Final = 2_000_000
"""Assignments in a store. A node holds all of them, about 60 bytes each, and loads a million in less than 15 s."""

MAX_EXPIRE_TIME: Final = 2**33 - 1
"""Latest end of an assignment, in Unix seconds: the year 2242, within the instants that a node handles."""

_SHARDS: Final = 250_000
"""Shards per identifier type: 4 assignments each at a million, 8 at the maximum. Their list takes 2 MB."""

_END: Final = 0xFF
"""The octet after a value."""

_PLAN_BITS: Final = 22
_PLAN_MASK: Final = 2**_PLAN_BITS - 1
"""Mask of the plan number in a packed value. There are at most as many plans as assignments."""

_FREED_PER_STEP: Final = 1_000
"""Shards of an old look-up freed in one step: 4,000 assignments."""

MAX_IDENTIFIER_BYTES: Final = 256
"""Longest identifier, in bytes of UTF-8."""

MAX_NOTE_CHARS: Final = 255

_UNITS_S: Final = {"m": 60, "h": 3_600, "d": 86_400}

_DURATION: Final = re.compile(r"([0-9]{1,9})([mhd])")

_UNIX_TIME: Final = re.compile(r"-?[0-9]{1,18}")


class Assignment(NamedTuple):
    """The plan of one identity. ``identifier`` is canonical, as in a :class:`~ratelimitd.model.Check`.

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
        """The assigned identity."""
        return self.identifier_type, self.identifier

    def with_etag(self, revision: int) -> Assignment:
        """Return it as stored at this revision."""
        # The type may be an enumeration member, whose repr differs.
        content = repr((str(self.identifier_type), *self[1:-1], revision)).encode()
        return self._replace(etag=blake2b(content, digest_size=9).hexdigest())


def violations(plan: str, expire_time: int, note: str, now_s: float) -> Iterator[tuple[str, str]]:
    """Yield each invalid field of a requested assignment with a description. Does not validate the identity."""
    if NAME.fullmatch(plan) is None:
        yield "plan", "the plan must be 1 to 32 characters of a-z, 0-9, _ and -"
    if expire_time and not now_s < expire_time <= MAX_EXPIRE_TIME:
        yield "expire_time", f"must be 0, or later than now and at most {MAX_EXPIRE_TIME}"
    if len(note) > MAX_NOTE_CHARS:
        yield "note", f"must be at most {MAX_NOTE_CHARS} characters"
    if CONTROL_CHARACTER.search(note):
        yield "note", "must not contain control characters"
    if SURROGATE.search(note):
        yield "note", "must be valid Unicode"


def expire_time_of(text: str, now_s: float) -> int:
    """Parse the end of an assignment into Unix seconds; an empty text is 0.

    Raises:
        ValueError: the text is not a time; the message names the accepted formats.
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
    """The fields of an assignment that a node needs; ``expire_time`` in Unix seconds, 0 = never."""

    identifier_type: str
    identifier: bytes
    plan: str
    expire_time: int


def assigned_of(row: Sequence[Any]) -> Assigned | None:
    """Return the assignment of a stored row in the fields of ``Assigned``; ``None`` if the row is invalid.

    A row written by other programs may hold values of any type.
    """
    identifier_type, identifier, plan, expire_time = row
    if (
        isinstance(identifier_type, str)
        and isinstance(identifier, bytes)
        and isinstance(plan, str)
        and isinstance(expire_time, int)
        and TYPE_NAME.fullmatch(identifier_type)
        and 0 < len(identifier) <= MAX_IDENTIFIER_BYTES
        and NAME.fullmatch(plan)
        and 0 <= expire_time <= MAX_EXPIRE_TIME
        and (identifier.isascii() or is_utf8(identifier))
    ):
        return Assigned(identifier_type, identifier, plan, expire_time)
    return None


def is_utf8(octets: bytes) -> bool:
    """Return whether octets are valid UTF-8."""
    try:
        octets.decode()
    except UnicodeDecodeError:
        return False
    return True


class Assignments:
    """The plan of each identity. Only the event loop writes it.

    Each identifier type has many *shards*; a shard is one ``bytes`` object with a few assignments. This takes 60 bytes
    per 38-byte identifier; a dict entry with an object per identifier would take 110. The duration of a step does not
    grow with the number of assignments, and the cyclic garbage collector does not track the shards.

    An assignment is ``FF identifier FE value``, the value in hexadecimal digits; a shard ends with another ``FF``.
    UTF-8 never contains FE or FF, so a search for ``FF identifier FE`` matches this identifier only.

    Calls ``on_types_changed`` after assigning the first identity of a type and after removing the last one.
    """

    __slots__ = (
        "_entries", "_free", "_holders", "_lasting", "_numbers", "_plans", "_sweep_next", "_types", "on_types_changed",
    )  # fmt: skip

    def __init__(self) -> None:
        self.on_types_changed: Callable[[], None] = lambda: None
        self._types: dict[str, list[bytes]] = {}
        self._entries: dict[str, int] = {}
        self._plans: list[str] = []
        self._holders: list[int] = []
        self._numbers: dict[str, int] = {}
        self._free: list[int] = []
        self._lasting: dict[bytes | int, tuple[str, int]] = {}
        self._sweep_next = 0

    def __len__(self) -> int:
        """Return the number of assignments, including expired ones not yet swept."""
        return sum(self._entries.values())

    def plan_of(
        self, identifier_type: str, identifier: bytes, now_us: int
    ) -> tuple[str, int] | None:
        """Return the plan of an identity and its end in Unix seconds, 0 = never; ``None``: none, or expired.

        ``identifier`` is UTF-8; ``now_us`` is in µs since the Unix epoch. An assignment has expired at the second of
        its end.
        """
        shards = self._types.get(identifier_type)
        if shards is None:
            return None
        shard = shards[hash(identifier) % _SHARDS]
        start = identifier + b"\xfe"
        at = shard.find(start)
        if at > 0 and shard[at - 1] != _END:  # a longer identifier that ends like this one
            at = shard.find(b"\xff" + start) + 1
        if at <= 0:
            return None
        at += len(start)
        # One digit: it never ends. A search and a slice would take 120 ns.
        if shard[at + 1] == _END:
            return self._lasting[shard[at]]
        text = shard[at : shard.find(b"\xff", at)]
        found = self._lasting.get(text)
        if found is not None:
            return found
        value = int(text, 16)
        expire_time = value >> _PLAN_BITS
        if expire_time * US_PER_S <= now_us:
            return None
        return self._plans[value & _PLAN_MASK], expire_time

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
        return {plan: self._holders[number] for plan, number in self._numbers.items()}

    def put(self, identifier_type: str, identifier: bytes, plan: str, expire_time: int) -> None:
        """Assign an identity to a plan until ``expire_time`` in Unix seconds, 0 = never; replaces any assignment.

        ``identifier`` is UTF-8.
        """
        is_new_type = identifier_type not in self._types
        if is_new_type:
            self._types[identifier_type] = [b""] * _SHARDS
            self._entries[identifier_type] = 0
        shards, place = self._types[identifier_type], hash(identifier) % _SHARDS
        # Add before removing: a plan whose only holder is this identity keeps its number.
        value = expire_time << _PLAN_BITS | self._hold(plan)
        shard = shards[place]
        rest = self._without(shard, identifier)
        shards[place] = b"%b\xff%b\xfe%x\xff" % (rest[:-1], identifier, value)
        self._entries[identifier_type] += len(rest) == len(shard)
        if is_new_type:
            self.on_types_changed()

    def remove(self, identifier_type: str, identifier: bytes) -> None:
        """Remove the assignment of an identity; ignore an unknown identity."""
        shards = self._types.get(identifier_type)
        if shards is None:
            return
        place = hash(identifier) % _SHARDS
        shard = shards[place]
        shards[place] = rest = self._without(shard, identifier)
        if len(rest) == len(shard):
            return
        self._entries[identifier_type] -= 1
        if not self._entries[identifier_type]:
            del self._types[identifier_type], self._entries[identifier_type]
            self.on_types_changed()

    def items(self) -> Iterator[Assigned]:
        """Yield each assignment as of the first step; concurrent changes do not affect it."""
        plans, types = self._plans, [(name, list(shards)) for name, shards in self._types.items()]
        for identifier_type, shards in types:
            for shard in filter(None, shards):  # most shards of a few assignments are empty
                for identifier, value in _parsed(shard):
                    plan, expire_time = plans[value & _PLAN_MASK], value >> _PLAN_BITS
                    yield Assigned(identifier_type, identifier, plan, expire_time)

    def replace(self, other: Self) -> Iterator[None]:
        """Switch to the content of ``other``, which must not be used again, then free the old content in steps.

        The new content is in force before the first step; a step takes about 0.1 ms.
        """
        old = self._types
        changed = old.keys() != other._types.keys()
        self._types, self._entries = other._types, other._entries
        self._plans, self._holders = other._plans, other._holders
        self._numbers, self._free, self._lasting = other._numbers, other._free, other._lasting
        if changed:
            self.on_types_changed()
        for shards in old.values():
            while shards:
                del shards[-_FREED_PER_STEP:]
                yield

    def sweep(self, now_us: int, shards: int) -> None:
        """Drop expired assignments from the next ``shards`` shards of every type; about 1 µs each."""
        for _ in range(min(shards, _SHARDS)):
            at = self._sweep_next
            self._sweep_next = (at + 1) % _SHARDS
            for identifier_type in tuple(self._types):
                for identifier, value in _parsed(self._types[identifier_type][at]):
                    if 0 < (value >> _PLAN_BITS) * US_PER_S <= now_us:
                        self.remove(identifier_type, identifier)

    def _without(self, shard: bytes, identifier: bytes) -> bytes:
        """Remove an identifier from the shard and decrement the holders of its plan; empty if none is left."""
        start = shard.find(b"\xff%b\xfe" % identifier)
        if start < 0:
            return shard
        at = start + len(identifier) + 2
        end = shard.index(b"\xff", at)
        self._release(int(shard[at:end], 16) & _PLAN_MASK)
        rest = shard[:start] + shard[end:]
        return rest if len(rest) > 1 else b""

    def _hold(self, plan: str) -> int:
        """Return the number of a plan and increment its holders."""
        number = self._numbers.get(plan)
        if number is None:
            if self._free:
                number = self._free.pop()
                # Copy: `items` may still read the old list.
                self._plans = self._plans.copy()
                self._plans[number] = plan
            else:
                number = len(self._plans)
                self._plans.append(plan)
                self._holders.append(0)
            self._numbers[plan] = number
            self._lasting[_digits(number)] = plan, 0
        self._holders[number] += 1
        return number

    def _release(self, number: int) -> None:
        self._holders[number] -= 1
        if not self._holders[number]:
            del self._numbers[self._plans[number]], self._lasting[_digits(number)]
            self._free.append(number)


def _digits(number: int) -> bytes | int:
    """Return the value of an assignment that never ends, to the plan of this number; a single digit as an octet."""
    digits = b"%x" % number
    return digits if len(digits) > 1 else digits[0]


def _parsed(shard: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield the identifiers of a shard with their values."""
    for entry in shard.split(b"\xff")[1:-1]:
        identifier, _, value = entry.partition(b"\xfe")
        yield identifier, int(value, 16)
