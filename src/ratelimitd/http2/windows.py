"""Flow-control arithmetic (RFC 9113 §5.2, §6.9), in octets of DATA payload. Pure.

What we may send needs no object: it is a number that goes down by what was sent and up by :func:`grown`. What the peer
may send is a :class:`ReceiveWindow`.
"""

from __future__ import annotations

from typing import Final

DEFAULT_WINDOW_BYTES: Final = 65_535
"""Of connection and streams, until somebody says otherwise (§6.9.2)."""

MAX_WINDOW_BYTES: Final = 2**31 - 1


def grown(window_bytes: int, increment: int) -> int | None:
    """A window after an increment, None when it would be over the maximum (§6.9.1)."""
    window_bytes += increment
    return window_bytes if window_bytes <= MAX_WINDOW_BYTES else None


class ReceiveWindow:
    """How much the peer may still send, and how much of what it sent we have done with but not told it.

    Credit is told when it is half of the window: often enough that a peer never waits while we keep up, and a frame of
    13 octets for thousands of small checks.

    Attributes:
        left: octets the peer may send.
    """

    __slots__ = ("_credit", "_worth_telling", "left")

    def __init__(self, window_bytes: int) -> None:
        self.left = window_bytes
        self._credit = 0
        self._worth_telling = max(1, window_bytes // 2)

    def take(self, size: int) -> bool:
        """Count octets that came; False, and nothing is counted, when the peer had no right to send them."""
        if size > self.left:
            return False
        self.left -= size
        return True

    def give(self, size: int) -> int:
        """Count octets that we have done with; return the increment to tell the peer, 0 for not yet."""
        credit = self._credit = self._credit + size
        if credit < self._worth_telling:
            return 0
        self._credit = 0
        self.left += credit
        return credit
