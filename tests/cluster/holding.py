"""Callers that hold on one node and settle on another, and their records; as a program, callers that may be killed.

A caller reports before and after each call. So its listener knows the most that it may have been charged, even if the
reports stop.
"""

import asyncio
import itertools
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import TypeVar

import grpc

from ratelimitd_client import AsyncNodeClient, open_async_channel
from ratelimiter.v1 import ratelimiter_pb2 as pb

TTL_S = 2
HELD = 50
TIMEOUT_S = 1.0

A = TypeVar("A")

Tell = Callable[[str, str, int], None]
"""Takes the reports of callers: name, action and tokens."""


class Book:
    """Records of the callers' reports.

    ``settled`` are the tokens of holds whose settle was answered, ``unsure`` the most that the others may be charged.
    """

    def __init__(self) -> None:
        self.settled = self.unsure = self.running = self.most = self.made = 0
        self._settles: list[tuple[float, int]] = []
        self._open: dict[str, int] = {}

    def tell(self, who: str, does: str, tokens: int = 0) -> None:
        """Record the action of a caller."""
        if does == "asks":
            self._open[who] = HELD
        elif does == "runs":
            self.made += 1
            self.running += 1
            self.most = max(self.most, self.running)
        elif does == "settles":
            self.running -= 1
            self._open[who] = max(HELD, tokens)
        else:
            most = self._open.pop(who)
            if does == "settled":
                self.settled += tokens
                self._settles.append((time.monotonic(), tokens))
            elif does == "unsure":
                self.unsure += most

    def killed(self, callers: str) -> None:
        """Record the end of the callers whose names have this prefix."""
        for who in [one for one in self._open if one.startswith(callers)]:
            self.tell(who, "unsure")

    def settled_between(self, from_s: float, until_s: float) -> int:
        """Return the tokens of settles that were answered in this interval."""
        return sum(tokens for at_s, tokens in self._settles if from_s <= at_s <= until_s)


class Caller:
    """A caller of one user; it makes one hold after the other, until it is cancelled or ``stop`` is set."""

    def __init__(
        self, nodes: Sequence[AsyncNodeClient], endpoint: str, who: str, tell: Tell
    ) -> None:
        self.stop = asyncio.Event()
        self._nodes = nodes
        self._who = who
        self._tell = tell
        self._random = Random(who)
        self._numbers = itertools.count()
        self._check = pb.RateLimitRequest(
            identifier="u", identifier_type="user", endpoint=endpoint, tokens_requested=HELD
        )

    async def run(self) -> None:
        """Hold on one node and settle on another, one hold after the other."""
        while not self.stop.is_set():
            self._tell(self._who, "asks", HELD)
            held = await self._hold()
            if held is None or held.answer.reason not in {pb.WITHIN_LIMIT, pb.LIMIT_EXCEEDED}:
                # Allowed without a check: the charges of an earlier attempt expire.
                self._tell(self._who, "unsure", 0)
            elif held.answer.allowed:
                await self._use(held.hold)
            else:
                self._tell(self._who, "denied", 0)
                await asyncio.sleep(0.02)

    async def _hold(self) -> pb.HoldResponse | None:
        hold_id = f"{self._who}/{next(self._numbers)}/{time.time_ns()}"
        request = pb.HoldRequest(check=self._check, hold_id=hold_id, ttl_seconds=TTL_S)
        return await self._tried(lambda node: node.hold(request, timeout_s=TIMEOUT_S))

    async def _use(self, hold: str) -> None:
        self._tell(self._who, "runs", 0)
        await asyncio.sleep(self._random.random() * 0.1)
        actual = self._random.choice((0, 1, 20, HELD, 80))
        self._tell(self._who, "settles", actual)
        settled = await self._tried(lambda node: node.settle(hold, actual, timeout_s=TIMEOUT_S))
        is_known = settled is not None and settled.known
        self._tell(self._who, "settled" if is_known else "unsure", actual)

    async def _tried(self, call: Callable[[AsyncNodeClient], Awaitable[A]]) -> A | None:
        """Ask random nodes in turn; return the first answer, ``None`` if there is none."""
        for _ in range(3):
            try:
                return await call(self._random.choice(self._nodes))
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.05)
        return None


def say(who: str, does: str, tokens: int) -> None:
    """Write to the standard output and flush it: the process may be killed at any time."""
    sys.stdout.write(f"{who} {does} {tokens}\n")
    sys.stdout.flush()


async def main(endpoint: str, addresses: str, *names: str) -> None:
    """Run callers of these names until killed."""
    nodes = [AsyncNodeClient(open_async_channel(address)) for address in addresses.split(",")]
    await asyncio.gather(*[Caller(nodes, endpoint, who, say).run() for who in names])


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
