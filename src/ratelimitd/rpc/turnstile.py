"""A turnstile: whoever wants through waits in line, and no turn of the event loop lets more than one through.

What is dear, and can be asked for many times in one read, passes here first, so that a turn never holds more than one
piece of it. Never measures anything: what one piece may cost is bounded where it is made.
"""

from __future__ import annotations

import asyncio


class Turnstile:
    """First come, first through; one in two turns of the loop, since the next in line is woken in a turn of its own."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def passed(self) -> None:
        """Wait for a turn of one's own."""
        async with self._lock:
            await asyncio.sleep(0)
