"""Recomputes the level of a bucket after a hold is settled with another amount. Pure. See ADR 0055.

The level is the number of missing units. Refill lowers it, down to zero; charges raise it; edits cap it. Each of these
maps a level to ``min(max(level + add, least), most)``, and so does any sequence of them. All changes between two holds
are therefore kept as one, and another amount of a hold is another ``add``. The result is exact, as if the hold had been
charged this amount at first.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Final, TypeAlias

Change: TypeAlias = tuple[int, int, int]
"""(add, least, most): maps a level, which is never negative, to ``min(max(level + add, least), most)``."""

NEVER: Final = 1 << 120
"""Above any level: 10,000 holds of 2^31 tokens of 2^51 units are below 2^96."""

# equivalent: the number of holds in a block is not observable
BLOCK: Final = 32
"""Holds whose changes have a common sum: a settle sums up one block again, and then the blocks."""


def changed(level: int, change: Change) -> int:
    """Return the level after a change."""
    add, least, most = change
    level += add
    if level < least:
        return least
    return min(level, most)


def both(first: Change, second: Change) -> Change:
    """Return the composition of two changes."""
    add, least, most = second
    low, high = first[1] + add, first[2] + add
    # Comparisons, not min() and max(), take a third of the time. equivalent: <= and >= assign the value it has
    if low < least:  # noqa: PLR1730
        low = least
    if low > most:  # noqa: PLR1730
        low = most
    return first[0] + add, low, min(max(high, least), most)


class _Block:
    """Up to ``BLOCK`` consecutive holds, and the sum of their changes, ``None`` if it is out of date."""

    __slots__ = ("changes", "numbers", "total")

    def __init__(self) -> None:
        self.numbers: list[bytes] = []
        self.changes: list[Change] = []
        self.total: Change | None = None


class Replay:
    """Holds by time, each with the change by its charge and all later changes until the next hold.

    Holds are in blocks, each with the sum of its changes: no step visits all holds, and a settle visits one block and
    then the sums. A tree would settle one of 10,000 holds in 10 µs instead of 50, but must be rebuilt at times, which
    takes tens of milliseconds, and takes twice the memory for a bucket with one hold.
    """

    __slots__ = ("_before", "_block_of", "_blocks", "_count")

    def __init__(
        self, before: int, numbers: Iterable[bytes] = (), changes: Iterable[Change] = ()
    ) -> None:
        self._before = before
        """The level before the oldest hold."""
        self._count = 0
        self._blocks = [_Block()]
        self._block_of: dict[bytes, _Block] | None = None
        """``None`` until there is a second block: most buckets have one or two holds."""
        for number, change in zip(numbers, changes, strict=True):
            self.add(number, change)

    def __len__(self) -> int:
        """Return the number of holds."""
        return self._count

    def __contains__(self, number: bytes) -> bool:
        """Return whether the hold of this number is present."""
        return number in (self._blocks[0].numbers if self._block_of is None else self._block_of)

    @property
    def numbers(self) -> list[bytes]:
        """The numbers of the holds, by time."""
        return [*chain.from_iterable([block.numbers for block in self._blocks])]

    def parts(self) -> tuple[int, list[bytes], list[Change]]:
        """Return the arguments that recreate it: the level before the oldest hold, the holds, and their changes."""
        changes = [*chain.from_iterable([block.changes for block in self._blocks])]
        return self._before, self.numbers, changes

    def add(self, number: bytes, change: Change) -> None:
        """Add a hold with the change by its charge."""
        block = self._blocks[-1]
        if len(block.numbers) >= BLOCK:
            # equivalent: otherwise a settle would sum up all blocks at once
            block.total = _total(block.changes)
            if self._block_of is None:
                self._block_of = dict.fromkeys(block.numbers, block)
            block = _Block()
            self._blocks.append(block)
        block.numbers.append(number)
        block.changes.append(change)
        block.total = None
        self._count += 1
        if self._block_of is not None:
            self._block_of[number] = block

    def then(self, change: Change) -> None:
        """Add a change after the latest hold; there must be one."""
        block = self._blocks[-1]
        block.changes[-1] = both(block.changes[-1], change)
        block.total = None

    def remove(self, number: bytes, more: int) -> None:
        """Remove a hold; its charge adds ``more`` units to the level from now on."""
        block = self._blocks[0] if self._block_of is None else self._block_of.pop(number)
        self._count -= 1
        place = block.numbers.index(number)
        del block.numbers[place]
        add, least, most = block.changes.pop(place)
        change = add + more, least, most
        block.total = None
        if place:
            block.changes[place - 1] = both(block.changes[place - 1], change)
        elif block is self._blocks[0]:
            self._before = changed(self._before, change)
        else:
            before = self._blocks[self._blocks.index(block) - 1]
            before.changes[-1] = both(before.changes[-1], change)
            before.total = None
        if self._block_of and len(block.numbers) <= BLOCK // 4:
            self._join(self._blocks.index(block), self._block_of)

    def level(self) -> int:
        """Return the level now."""
        level = self._before
        for block in self._blocks:
            if block.total is None:
                block.total = _total(block.changes)
            level = changed(level, block.total)
        return level

    def _join(self, place: int, block_of: dict[bytes, _Block]) -> None:
        """Merge a small block into the one before it, if it fits, so that blocks are few, and none is empty."""
        block, before = self._blocks[place], self._blocks[place - 1]
        # equivalent: a merge is not observable, except that no block is empty
        if block.numbers and (not place or len(before.numbers) > BLOCK // 2):
            return
        before.numbers += block.numbers
        before.changes += block.changes
        before.total = None
        block_of |= dict.fromkeys(block.numbers, before)
        del self._blocks[place]


def _total(changes: Iterable[Change]) -> Change:
    total = (0, 0, NEVER)
    for change in changes:
        total = both(total, change)
    return total
