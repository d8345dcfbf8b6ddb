"""Which plan each identity is assigned to, on this node: a look-up that holds a million of them.

Reads no clock and does no I/O. See ADR 0050.

As in :mod:`ratelimitd.buckets.table`, one dict of a million entries would stall the loop when it grows, so each
identifier type has many dicts, its *shards*. Keys are ``bytes`` and values ``int``, so the cyclic garbage collector
skips the dicts; equal values share one object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Self

from ratelimitd.model import US_PER_S

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

_Shards = list[dict[bytes, int]]


def _nothing() -> None:
    """Stand for a callback that is not set."""


class Assignments:
    """The plan of each identity. One writer: the event loop.

    ``on_types_changed`` is called after the first identity of a type was assigned or the last one was removed.
    """

    __slots__ = ("_entries", "_numbers", "_plans", "_shared", "_sweep_next", "_types", "on_types_changed")  # fmt: skip

    def __init__(self) -> None:
        self.on_types_changed: Callable[[], None] = _nothing
        self._types: dict[str, _Shards] = {}
        self._entries: dict[str, int] = {}
        self._plans: list[str] = []
        self._numbers: dict[str, int] = {}
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

    def put(self, identifier_type: str, identifier: bytes, plan: str, expire_time: int) -> None:
        """Assign an identity to a plan until ``expire_time`` in Unix seconds, 0 = for good; replaces what it had."""
        shards = self._types.get(identifier_type)
        is_new_type = shards is None
        if shards is None:
            shards = self._types[identifier_type] = [{} for _ in range(_SHARDS)]
            self._entries[identifier_type] = 0
        shard = shards[hash(identifier) % _SHARDS]
        if identifier not in shard:
            self._entries[identifier_type] += 1
        shard[identifier] = self._value(plan, expire_time)
        if is_new_type:
            self.on_types_changed()

    def remove(self, identifier_type: str, identifier: bytes) -> None:
        """Remove the assignment of an identity; ignore one that has none."""
        shards = self._types.get(identifier_type)
        if (
            shards is not None
            and shards[hash(identifier) % _SHARDS].pop(identifier, None) is not None
        ):
            self._removed(identifier_type, 1)

    def replace(self, other: Self) -> Iterator[None]:
        """Take over the content of ``other``, which is not to be used any more, at once; then free the old in steps.

        The new content is in force before the first step; a step takes about 0.1 ms.
        """
        old = self._types
        changed = old.keys() != other._types.keys()
        self._types, self._entries = other._types, other._entries
        self._plans, self._numbers, self._shared = other._plans, other._numbers, other._shared
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
        for identifier in expired:
            del shard[identifier]
        if expired:
            self._removed(identifier_type, len(expired))

    def _removed(self, identifier_type: str, number: int) -> None:
        self._entries[identifier_type] -= number
        if not self._entries[identifier_type]:
            del self._types[identifier_type], self._entries[identifier_type]
            self.on_types_changed()

    def _value(self, plan: str, expire_time: int) -> int:
        number = self._numbers.get(plan)
        if number is None:
            number = self._numbers[plan] = len(self._plans)
            self._plans.append(plan)
        value = number << _TIME_BITS | expire_time
        if len(self._shared) >= _SHARED_VALUES:
            self._shared.clear()
        return self._shared.setdefault(value, value)
