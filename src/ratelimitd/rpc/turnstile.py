"""A turnstile: whoever wants through waits in line, and each turn of the event loop lets one through.

What is dear, and can be asked for many times in one read, passes here first, so that a turn never holds more than one
piece of it. Never measures a piece: what one may cost is bounded where it is made.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

EVERY_S: Final = 0.005
MOST_AT_ONCE: Final = 8
"""For a turnstile with a clock: one for each 5 ms that the last turn took, but no more than 8. A TLS handshake is about
1 ms of arithmetic, so that handshakes get about a fifth of the time, however long turns are."""


class Turnstile:
    """First come, first through; one in each turn of the loop.

    With a clock, ``monotonic_s``, more go through together when turns are long: else a loop whose turns take 30 ms
    would let 33 through in a second, however many wait. Only for pieces that cost less than ``EVERY_S``: dearer ones
    would make the turns longer and longer.
    """

    __slots__ = ("_in_line", "_last_s", "_monotonic_s", "_taken")

    def __init__(self, monotonic_s: Callable[[], float] | None = None) -> None:
        self._monotonic_s = monotonic_s
        self._last_s = 0.0
        self._in_line: deque[asyncio.Future[None]] = deque()
        self._taken = False
        """Whether somebody goes through in the next turn."""

    async def passed(self) -> None:
        """Wait for a turn of one's own."""
        if self._taken:
            turn = asyncio.get_running_loop().create_future()
            self._in_line.append(turn)
            await turn
            return
        self._take_next_turn()
        await asyncio.sleep(0)

    def _take_next_turn(self) -> None:
        self._taken = True
        if self._monotonic_s is not None:
            self._last_s = self._monotonic_s()
        asyncio.get_running_loop().call_soon(self._let_through)

    def _let_through(self) -> None:
        """Wake those who go through in the next turn."""
        self._taken = False
        for _ in range(self._room()):
            while self._in_line and self._in_line[0].done():  # has left the line
                self._in_line.popleft()
            if not self._in_line:
                break
            self._in_line.popleft().set_result(None)
            self._taken = True
        if self._taken:
            self._take_next_turn()

    def _room(self) -> int:
        if self._monotonic_s is None:
            return 1
        return min(MOST_AT_ONCE, max(1, round((self._monotonic_s() - self._last_s) / EVERY_S)))
