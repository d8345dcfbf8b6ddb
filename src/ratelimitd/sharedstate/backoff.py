"""Trying again: after pauses that grow from failure to failure, not in step with other nodes, and without an end."""

from __future__ import annotations

import asyncio
import random as random_source
from collections.abc import Awaitable, Callable
from typing import Final

Sleep = Callable[[float], Awaitable[None]]

FIRST_S: Final = 0.05
LONGEST_S: Final = 1.0
"""A server that is back is found within a second; the attempts of a whole cluster are nothing for it."""


class Backoff:
    """The pauses of one thing that is tried again and again. ``random`` (0 to 1) is there for tests."""

    __slots__ = ("_pause_s", "_random")

    def __init__(self, random: Callable[[], float] = random_source.random) -> None:
        self._random = random
        self._pause_s = FIRST_S

    def next_s(self) -> float:
        """Seconds to wait now: doubled from call to call up to ``LONGEST_S``, less up to a half at random."""
        pause_s = self._pause_s
        self._pause_s = min(LONGEST_S, 2 * pause_s)
        return pause_s * (1 - self._random() / 2)

    def reset(self) -> None:
        """It worked: begin with the first pause again."""
        self._pause_s = FIRST_S


async def for_ever(step: Callable[[], Awaitable[None]], sleep: Sleep = asyncio.sleep) -> None:
    """Await ``step`` again and again. What it raises is a defect of ours: it is reported, and must not be the end."""
    while True:
        try:
            await step()
        except Exception as error:  # noqa: BLE001 -- whatever it is, there must be a connection again
            asyncio.get_running_loop().call_exception_handler(
                {
                    "message": "a connection to the shared state could not be kept up",
                    "exception": error,
                }
            )
            await sleep(LONGEST_S)
