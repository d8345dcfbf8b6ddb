"""Hears that the rules were changed, by whichever node: PostgreSQL's LISTEN, on a connection of its own.

Never reads a rule. A notice may be lost, with the connection or by a server that fails over; the feed polls besides. So
nothing is reported here: a database that is away is found by the poll. See ADR 0024.
"""

from __future__ import annotations

import asyncio
import random as random_source
from collections.abc import Awaitable, Callable
from typing import Final

import asyncpg

from ratelimitd.retry import Backoff

CHANNEL: Final = "ratelimitd_rules"
"""The channel of the notices. They carry nothing: who hears one asks for what changed since the revision it knows."""

KEEPALIVE_S: Final = 5.0
"""Pause between two questions whether the connection still works: a machine on the way may have dropped it silently."""

RETRY_FIRST_S: Final = 0.5
RETRY_LONGEST_S: Final = 10.0
"""The pause after a failure doubles from the first to the longest, and is cut by up to half at random."""

LOST: Final = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # also: no server is of the kind that target_session_attrs asks for
    OSError,  # also: the time is up
)
"""What the driver raises when there is no connection, or none any more."""

Changed = Callable[[], Awaitable[None]]
Connect = Callable[[], Awaitable[asyncpg.Connection]]
Sleep = Callable[[float], Awaitable[None]]


async def follow(
    connect: Connect,
    changed: Changed,
    *,
    sleep: Sleep = asyncio.sleep,
    random: Callable[[], float] = random_source.random,
) -> None:
    """Call ``changed`` for notices until cancelled; those that come while it runs are one more call.

    It is also called when a connection is there, since notices before that were not heard. ``sleep`` and ``random`` (0
    to 1) are there for tests.
    """
    retry = Backoff(RETRY_FIRST_S, RETRY_LONGEST_S, random)
    while True:
        driver = None
        try:
            driver = await connect()
            heard = await _listening(driver)
            retry.reset()
            await _hear(driver, heard, changed, sleep)
        except LOST:
            pass
        finally:
            if driver is not None:
                driver.terminate()
        await sleep(retry.next_s())


async def _listening(driver: asyncpg.Connection) -> asyncio.Event:
    """An event that is set by a notice, by the end of the connection, and to begin with."""
    heard = asyncio.Event()
    heard.set()
    await driver.add_listener(CHANNEL, lambda *_: heard.set())
    driver.add_termination_listener(lambda _: heard.set())
    return heard


async def _hear(
    driver: asyncpg.Connection, heard: asyncio.Event, changed: Changed, sleep: Sleep
) -> None:
    """Until the connection ends, which raises."""
    while True:
        if heard.is_set():
            heard.clear()
            await changed()
        await driver.execute("SELECT 1")
        await _first_of(heard.wait(), sleep(KEEPALIVE_S))


async def _first_of(*waits: Awaitable[object]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
