"""What the callers of the soak do beside checks, and how their connections end: at random, from a seeded generator."""

import asyncio
import random
import socket
import struct

from tests import http2_peer as h2
from tests.system.callers import (
    BATCH_OF_CHECKS,
    EXPIRING,
    LASTING,
    LIST,
    ONE_CHECK,
    Caller,
    Tally,
    connected,
)

# What a caller may do beside simple checks; the connection stands afterwards.


async def batches(caller: Caller, rng: random.Random) -> None:
    for _ in range(rng.randrange(1, 4)):
        caller.open(BATCH_OF_CHECKS, caller.tally.batch)
    await caller.answered()


async def cancels(caller: Caller, rng: random.Random) -> None:
    """Takes back calls that are not sent to their end, are answered already, or are being worked for."""
    for _ in range(rng.randrange(1, 6)):
        caller.cancel(caller.open(ONE_CHECK, None))
        caller.cancel(caller.check())
        listing = caller.open(LIST)
        if rng.random() < 0.5:
            await asyncio.sleep(0)  # its handler may have begun, or not
        caller.cancel(listing)
    caller.open(LIST)
    await caller.answered()


async def watches(caller: Caller, rng: random.Random) -> None:
    """Takes back health watches that have said something, and one that had no time to."""
    streams = [caller.open(LASTING) for _ in range(rng.randrange(1, 9))]
    await caller.heard(streams)
    for stream_id in [*streams, caller.open(LASTING)]:
        caller.cancel(stream_id)


async def expires(caller: Caller, rng: random.Random) -> None:
    """Health watches, until their deadline."""
    for _ in range(rng.randrange(1, 5)):
        caller.open(EXPIRING)
    await caller.answered()


ACTS = (batches, cancels, watches, expires)


# How a connection may end.


async def leaves(caller: Caller, _rng: random.Random) -> None:
    await caller.leave()


async def half_closes(caller: Caller, rng: random.Random) -> None:
    caller.check(rng.randrange(20))
    caller.close_half()
    await caller.gone()


async def is_reset(caller: Caller, rng: random.Random) -> None:
    """RST instead of FIN, with calls in flight."""
    caller.check(rng.randrange(20))
    sock = caller.transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    caller.transport.abort()
    await caller.gone()


async def is_killed(caller: Caller, rng: random.Random) -> None:
    """In the middle of a frame, with calls and watches in flight."""
    for _ in range(rng.randrange(5)):
        caller.open(LASTING)
    caller.open(LIST)
    caller.check(rng.randrange(20))
    caller.transport.write(h2.GREETING[rng.randrange(9) :])
    if rng.random() < 0.5:
        await asyncio.sleep(rng.random() / 100)
    caller.transport.abort()
    await caller.gone()


async def resets_rapidly(caller: Caller, _rng: random.Random) -> None:
    """Until the node has enough of it."""
    for _ in range(3_000):
        caller.cancel(caller.open(ONE_CHECK, None))
    await caller.gone()


ENDS = {leaves: 30, half_closes: 20, is_reset: 20, is_killed: 28, resets_rapidly: 2}
"""With their weights."""


async def stormy_life(address: str, tally: Tally, rng: random.Random) -> None:
    """One connection from its opening to its end."""
    if rng.random() < 0.1:  # it says nothing that means anything
        greeting = rng.choice(
            (h2.PREFACE[:10], b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", b"\x16\x03\x01")
        )
        caller = await connected(address, tally, greeting)
        tally.acts["mutters"] += 1
        await asyncio.sleep(rng.random() / 100)
        caller.transport.abort()
        await caller.gone()
        return
    caller = await connected(address, tally)
    caller.check(rng.randrange(20))
    if rng.random() < 0.5:
        act = rng.choice(ACTS)
        tally.acts[act.__name__] += 1
        await act(caller, rng)
    (end,) = rng.choices(list(ENDS), list(ENDS.values()))
    tally.acts[end.__name__] += 1
    await end(caller, rng)
