"""Connecting again: soon, not in step with other nodes, and without an end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from ratelimitd.backoff import Backoff

Sleep = Callable[[float], Awaitable[None]]

FIRST_S: Final = 0.05
LONGEST_S: Final = 1.0
"""A server that is back is found within a second; the attempts of a whole cluster are nothing for it."""


def pauses(random: Callable[[], float]) -> Backoff:
    """Between attempts to connect."""
    return Backoff(FIRST_S, LONGEST_S, random)


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
