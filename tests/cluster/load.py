"""Load from many callers on several nodes: a schedule made beforehand, and a log of the answers.

Checks are sent on schedule, regardless of earlier answers. A check is skipped only if its connection is closed or has
too many open calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.cluster.admissions import Asked, Log
from tests.system.callers import CHECK, Caller, Kind, block, connected, framed

MOST_OPEN = 250
"""Limit of open calls on a connection; a node allows 256."""
SENT_BETWEEN_READS = 16
"""Checks sent between two reads of answers, even if more are overdue."""
RECONNECT_S = 0.05
LAST_ANSWERS_S = 5.0
"""Longest wait for answers after everything was sent."""


class Due(NamedTuple):
    """One check to be sent, ``at_s`` after the start."""

    at_s: float
    node: int
    key: str
    cost: int


def steady(
    rate_per_s: float,
    seconds: float,
    *,
    nodes: int,
    keys: Sequence[str] = ("u",),
    cost: int = 1,
    seed: int = 1,
) -> list[Due]:
    """Return checks at random times with this total rate, each for a random node and key."""
    source = random.Random(seed)
    schedule, at_s = [], 0.0
    while (at_s := at_s + source.expovariate(rate_per_s)) < seconds:
        schedule.append(Due(at_s, source.randrange(nodes), source.choice(keys), cost))
    return schedule


def bursts(
    size: int, every_s: float, seconds: float, *, nodes: int, key: str = "u", cost: int = 1
) -> list[Due]:
    """Return repeated bursts of concurrent checks, to all nodes in turn."""
    times = int(seconds / every_s)
    return [
        Due(number * every_s, one % nodes, key, cost)
        for number in range(times)
        for one in range(size)
    ]


def draining(limit: int, every_s: float, seconds: float, *, nodes: int) -> list[Due]:
    """Return the checks that exceed a limit most: all nodes but one spend their shares, then that one gets twice the
    limit.
    """
    share, asked_s = limit // (2 * nodes) - 1, 0.05
    schedule = []
    for number in range(int(seconds / every_s)):
        at_s = number * every_s
        schedule += [Due(at_s, node, "u", 1) for node in range(1, nodes) for _ in range(share)]
        at_s += 0.02
        schedule += [Due(at_s + asked_s * one / (2 * limit), 0, "u", 1) for one in range(2 * limit)]
    return schedule


def together(*schedules: Sequence[Due]) -> list[Due]:
    """Merge schedules by time."""
    return list(heapq.merge(*schedules))


class Event(NamedTuple):
    """An action during a load, ``at_s`` after the start; it runs in a thread, so it may block."""

    at_s: float
    act: Callable[[], object]


@dataclass
class Counts:
    """Counters of ``Caller`` other than answers."""

    lost: int = 0
    refused: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    goaways: Counter[int] = field(default_factory=Counter)


@dataclass
class Offered:
    """The result of a load."""

    log: Log
    counts: Counts
    passed_over: int
    """Checks that were never sent: the connection was closed or full."""


def offer(
    addresses: Sequence[str],
    schedule: Sequence[Due],
    *,
    endpoint: str = "/a",
    events: Sequence[Event] = (),
) -> Offered:
    """Send a schedule to nodes, and wait for the answers. Blocks, in its own loop: asyncio's debug mode halves the
    rate.
    """
    with asyncio.Runner(debug=False) as runner:
        return runner.run(_Load(addresses, endpoint).run(schedule, events))


class _Load:
    def __init__(self, addresses: Sequence[str], endpoint: str) -> None:
        self._addresses = addresses
        self._endpoint = endpoint
        self._counts = Counts()
        self._callers: dict[int, Caller] = {}
        self._all_connected = asyncio.Event()
        self._log: list[Asked] = []
        self._passed_over = 0

    async def run(self, schedule: Sequence[Due], events: Sequence[Event]) -> Offered:
        wall_s = time.time() - time.monotonic()
        keepers = [asyncio.create_task(self._keep(node)) for node in range(len(self._addresses))]
        async with asyncio.timeout(LAST_ANSWERS_S):
            await self._all_connected.wait()
        began_s = time.monotonic()
        happening = [asyncio.create_task(_happen(began_s, event)) for event in events]
        try:
            await self._send_all(began_s, schedule)
            await asyncio.gather(*happening)
            await self._last_answers()
        finally:
            for task in (*keepers, *happening):
                task.cancel()
            await asyncio.gather(*keepers, *happening, return_exceptions=True)
            for caller in self._callers.values():
                caller.transport.abort()
                await caller.gone()
        return Offered(Log(self._log, wall_s), self._counts, self._passed_over)

    async def _send_all(self, began_s: float, schedule: Sequence[Due]) -> None:
        for number, due in enumerate(schedule):
            wait_s = began_s + due.at_s - time.monotonic()
            if wait_s > 0 or number % SENT_BETWEEN_READS == 0:
                await asyncio.sleep(max(0.0, wait_s))
            caller = self._callers.get(due.node)
            if caller is None or len(caller.pending) >= MOST_OPEN:
                self._passed_over += 1
                continue
            entry = Asked(due.key, due.cost, due.node, time.monotonic())
            self._log.append(entry)
            caller.open(_kind(entry), _message(self._endpoint, due.key, due.cost))

    async def _last_answers(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_ANSWERS_S):
                for caller in list(self._callers.values()):
                    await caller.answered()

    async def _keep(self, node: int) -> None:
        """Keep one connection to a node; while there is none, its checks are skipped."""
        while True:
            with contextlib.suppress(OSError):
                caller = await connected(self._addresses[node], self._counts)  # type: ignore[arg-type]
                self._callers[node] = caller
                if len(self._callers) == len(self._addresses):
                    self._all_connected.set()
                await asyncio.shield(caller.ended)
                del self._callers[node]
            await asyncio.sleep(RECONNECT_S)


async def _happen(began_s: float, event: Event) -> None:
    await asyncio.sleep(began_s + event.at_s - time.monotonic())
    await asyncio.to_thread(event.act)


_HEAD = block(CHECK)


def _kind(entry: Asked) -> Kind:
    def take(_counts: object, message: bytes) -> None:
        entry.received_s = time.monotonic()
        answer = pb.RateLimitResponse.FromString(message[5:])
        entry.allowed, entry.reason = answer.allowed, answer.reason

    return Kind("check", _HEAD, 1, take)


@lru_cache(maxsize=100_000)
def _message(endpoint: str, key: str, cost: int) -> bytes:
    """Encode a check; a key is a user, or a user of a tenant: ``user@tenant``."""
    user, _, tenant = key.partition("@")
    also = [pb.Identity(identifier_type="api_key", identifier=tenant)] if tenant else []
    request = pb.RateLimitRequest(
        identifier=user,
        identifier_type="user",
        endpoint=endpoint,
        tokens_requested=cost,
        also=also,
    )
    return framed(request.SerializeToString())


def keys(count: int) -> list[str]:
    """Return ``count`` identifiers."""
    return [f"u{number}" for number in range(count)]
