"""Whether messages of others were lost, came twice or out of order: each sender numbers what it says on a channel.

Pure. Knows a bounded number of senders, the longest silent of which are forgotten.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from typing import Final

MAX_SENDERS: Final = 1_024
"""Far more nodes than a cluster has, and 100 KB: senders that have ended are not told from silent ones."""


class Arrival(enum.Enum):
    """What the number of a message says."""

    NEXT = enum.auto()
    """It is the one expected, or the first of its sender that could be heard."""
    GAP = enum.auto()
    """Some before it have not come, and would be too late now."""
    OLD = enum.auto()
    """It came before, or others that were said after it did."""


class Numbering:
    """The last number of each sender."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: OrderedDict[bytes, int] = OrderedDict()

    def judge(self, sender: bytes, number: int) -> Arrival:
        """What a message that just came is. A sender who was not known may have said anything before."""
        last = self._last.get(sender)
        if last is not None and number <= last:
            return Arrival.OLD
        self._last[sender] = number
        self._last.move_to_end(sender)
        if len(self._last) > MAX_SENDERS:
            self._last.popitem(last=False)
        return Arrival.NEXT if last is None or number == last + 1 else Arrival.GAP

    def forget(self) -> None:
        """Nothing was heard for a while: take the next of each sender as its first."""
        self._last.clear()
