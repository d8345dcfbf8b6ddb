"""What a level would be if holds had been charged other amounts. Pure. See ADR 0055.

The level of a bucket, the tokens that it lacks, is changed by refill, which ends at zero, by charges, and by edits,
which cap it. Each of these makes ``min(max(level + add, least), most)`` of a level, and so do several after one
another. So the changes between two holds are kept as one, however many they were, and another amount of a hold is
another ``add``: what comes of it is exactly what would have come of it then.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Final, TypeAlias

Change: TypeAlias = tuple[int, int, int]
"""(add, least, most): it makes ``min(max(level + add, least), most)`` of a level, which is never below zero."""

NEVER: Final = 1 << 120
"""Above any level: 10,000 holds of 2^31 tokens of 2^51 units are below 2^96."""

# equivalent: how many holds share a sum is not to be seen
BLOCK: Final = 32
"""Holds whose changes have a common sum: a settle adds up one block anew, and then the blocks."""


def changed(level: int, change: Change) -> int:
    """Return what a change makes of a level."""
    add, least, most = change
    level += add
    if level < least:
        return least
    return min(level, most)


def both(first: Change, second: Change) -> Change:
    """Return the change that is one after the other."""
    add, least, most = second
    low, high = first[1] + add, first[2] + add
    # Comparisons, not min() and max(), take a third of the time. equivalent: <= and >= assign the value it has
    if low < least:  # noqa: PLR1730
        low = least
    if low > most:  # noqa: PLR1730
        low = most
    return first[0] + add, low, min(max(high, least), most)


class _Block:
    """Up to ``BLOCK`` holds that follow one another, and the sum of their changes, ``None`` if it is out of date."""

    __slots__ = ("changes", "numbers", "total")

    def __init__(self) -> None:
        self.numbers: list[bytes] = []
        self.changes: list[Change] = []
        self.total: Change | None = None


class Replay:
    """Holds by their time, each with the change of its charge and all changes after it, until the next hold.

    They are in blocks, each with the sum of its changes: no step goes over all holds, and a settle goes over one block
    and then over the sums. A tree would settle one of 10,000 holds in 10 µs instead of 50, but has to be made anew now
    and then, which takes tens of milliseconds, and takes twice the memory of a bucket with one hold.
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
        """``None`` as long as there is one block: most buckets have a hold or two."""
        for number, change in zip(numbers, changes, strict=True):
            self.add(number, change)

    def __len__(self) -> int:
        """Return the number of holds."""
        return self._count

    def __contains__(self, number: bytes) -> bool:
        """Return whether the hold of this number is among them."""
        return number in (self._blocks[0].numbers if self._block_of is None else self._block_of)

    @property
    def numbers(self) -> list[bytes]:
        """The numbers of the holds, by their time."""
        return [*chain.from_iterable([block.numbers for block in self._blocks])]

    def parts(self) -> tuple[int, list[bytes], list[Change]]:
        """Return what it can be made of anew: the level before the oldest hold, the holds, and their changes."""
        changes = [*chain.from_iterable([block.changes for block in self._blocks])]
        return self._before, self.numbers, changes

    def add(self, number: bytes, change: Change) -> None:
        """Add a hold that has made this change."""
        block = self._blocks[-1]
        if len(block.numbers) >= BLOCK:
            # equivalent: else a settle would add up all blocks at once
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
        """Add a change to those after the latest hold; there is one."""
        block = self._blocks[-1]
        block.changes[-1] = both(block.changes[-1], change)
        block.total = None

    def remove(self, number: bytes, more: int) -> None:
        """Let a hold have added ``more`` to the level, for good: it is no hold any more."""
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
        """Put a small block into the one before it, if it fits, so that there are few, and none is empty."""
        block, before = self._blocks[place], self._blocks[place - 1]
        # equivalent: whether two blocks become one is not to be seen, but that none is empty
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
