"""What a level would be if holds had been charged other amounts. Pure. See ADR 0055.

The level of a bucket, the tokens that it lacks, is changed by refill, which ends at zero, by charges, and by edits,
which cap it. Each of these makes ``min(max(level + add, least), most)`` of a level, and so do several after one
another. So the changes between two holds are kept as one, however many they were, and another amount of a hold is
another ``add``: what comes of it is exactly what would have come of it then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

Change: TypeAlias = tuple[int, int, int]
"""(add, least, most): it makes ``min(max(level + add, least), most)`` of a level, which is never below zero."""

NEVER: Final = 1 << 120
"""Above any level: 10,000 holds of 2^31 tokens of 2^51 units are below 2^96."""

NOTHING: Final[Change] = (0, 0, NEVER)

# equivalent: how often the tree is made anew is not to be seen
LEAST_SIZE: Final = 16


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


class Replay:
    """Holds by their time, each with the change of its charge and all changes after it, until the next hold.

    Their changes are the leaves of a tree whose nodes are the changes of their leaves one after another: a settle takes
    the logarithm of their number, and a check that is charged one step, for the change of the latest hold is apart.
    """

    __slots__ = ("_before", "_count", "_latest", "_leaf_of", "_nodes", "_size")

    def __init__(
        self, before: int, numbers: Sequence[bytes] = (), changes: Sequence[Change] = ()
    ) -> None:
        self._before = before
        """The level before the oldest hold."""
        self._latest: Change
        self._make(numbers, changes)

    def __len__(self) -> int:
        """Return the number of holds."""
        return len(self._leaf_of)

    def __contains__(self, number: bytes) -> bool:
        """Return whether the hold of this number is among them."""
        return number in self._leaf_of

    @property
    def numbers(self) -> list[bytes]:
        """The numbers of the holds, by their time."""
        return [*self._leaf_of]

    def parts(self) -> tuple[int, list[bytes], list[Change]]:
        """Return what it can be made of anew: the level before the oldest hold, the holds, and their changes."""
        self._compact()
        leaves = self._nodes[self._size : self._size + self._count - 1]
        return self._before, self.numbers, [*leaves, self._latest]

    def add(self, number: bytes, change: Change) -> None:
        """Add a hold that has made this change."""
        if self._count == self._size:
            self._compact()
        if self._count:
            self._set(self._count - 1, self._latest)
        self._leaf_of[number] = self._count
        self._latest = change
        self._count += 1

    def then(self, change: Change) -> None:
        """Add a change to those after the latest hold."""
        self._latest = both(self._latest, change)

    def remove(self, number: bytes, more: int) -> None:
        """Let a hold have added ``more`` to the level, for good: it is no hold any more."""
        leaf = self._leaf_of.pop(number)
        if leaf == self._count - 1:
            add, least, most = self._latest
            self._latest = add + more, least, most
        elif more:
            add, least, most = self._nodes[self._size + leaf]
            self._set(leaf, (add + more, least, most))

    def level(self) -> int:
        """Return the level now."""
        return changed(changed(self._before, self._nodes[1]), self._latest)

    def _set(self, leaf: int, change: Change) -> None:
        nodes, place = self._nodes, self._size + leaf
        nodes[place] = change
        while place > 1:
            place >>= 1
            nodes[place] = both(nodes[2 * place], nodes[2 * place + 1])

    def _compact(self) -> None:
        """Join the changes of what is no hold any more to those before."""
        leaves = self._nodes[self._size : self._size + self._count]
        leaves[-1:] = [self._latest]
        kept = {*self._leaf_of.values()}
        joined: list[Change] = []
        for leaf, change in enumerate(leaves):
            if leaf in kept:
                joined.append(change)
            elif joined:
                joined[-1] = both(joined[-1], change)
            else:
                self._before = changed(self._before, change)
        self._make(self.numbers, joined)

    def _make(self, numbers: Sequence[bytes], changes: Sequence[Change]) -> None:
        size = LEAST_SIZE
        while size < 2 * len(changes):
            size *= 2
        self._size, self._count = size, len(changes)
        self._leaf_of = {number: leaf for leaf, number in enumerate(numbers)}
        self._latest = changes[-1] if changes else NOTHING
        self._nodes = (
            [NOTHING] * size + [*changes[:-1]] + [NOTHING] * (size - len(changes) + bool(changes))
        )
        for place in range(size - 1, 0, -1):
            self._nodes[place] = both(self._nodes[2 * place], self._nodes[2 * place + 1])
