"""Holds of requests in progress: extended while these last, settled when they end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, Generic, NamedTuple

from ratelimitd_client.async_hold import DEFAULT_TTL_S, AsyncHold
from ratelimitd_client.hold import Hold
from ratelimitd_client.middleware.options import R

EXTEND_S: Final = DEFAULT_TTL_S / 2
"""How often the hold of a request in progress is extended."""

SETTLE_S: Final = 30.0
"""How long a settle is tried after a request: longer than a node needs to restart."""


class Held(NamedTuple):
    """A hold, or the denial of one, and the function of the request that returns what it is settled with."""

    hold: AsyncHold | Hold
    cost: int
    settle: Callable[[object], object] | None


class HeldRequests(Generic[R]):
    """The requests in progress of one application, on one event loop at a time.

    Args:
        actual: returns what a request has cost; never raises.
    """

    def __init__(self, actual: Callable[[Held, R], int]) -> None:
        self._actual = actual
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, request: R, held: Held) -> Callable[[], None]:
        """Keep a hold until the function that this returns is called, then settle it."""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        task = loop.create_task(self._keep(request, held, ended))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return lambda: None if ended.done() else ended.set_result(None)

    async def finish(self) -> None:
        """Wait until all requests that have ended are settled."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=SETTLE_S)

    async def _keep(self, request: R, held: Held, ended: asyncio.Future[Any]) -> None:
        hold = held.hold
        assert isinstance(hold, AsyncHold)  # noqa: S101 -- the limiter is one for asyncio
        while not (await asyncio.wait([ended], timeout=EXTEND_S))[0]:
            # As long as the hold lasts, or the request.
            extending = asyncio.create_task(hold.extend(timeout_s=DEFAULT_TTL_S - EXTEND_S))
            await asyncio.wait([ended, extending], return_when=asyncio.FIRST_COMPLETED)
            extending.cancel()
        await hold.settle(self._actual(held, request), timeout_s=SETTLE_S)
