"""Calls a handler of the services for a request over HTTP, with what a transport owes it.

It is not called once the deadline has passed, so that nothing is charged for an answer that nobody waits for, and it is
cancelled when the caller leaves. Never knows what a method means. See ADR 0016.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from ratelimitd.rpc.interface import Call, RpcError, StatusCode, UnaryHandler


class Deadline:
    """When a caller stops waiting, told from now on; never, without a ``timeout_s``."""

    def __init__(self, timeout_s: float | None) -> None:
        self._time_s = asyncio.get_running_loop().time
        self._at_s = None if timeout_s is None else self._time_s() + timeout_s

    def remaining_s(self) -> float | None:
        """Seconds that are left; ``None``: no end.

        Raises:
            RpcError: DEADLINE_EXCEEDED.
        """
        if self._at_s is None:
            return None
        remaining_s = self._at_s - self._time_s()
        if remaining_s <= 0:
            raise _exceeded()
        return remaining_s


async def handled(
    handler: UnaryHandler, data: bytes, call: Call, *, receive: Receive, deadline: Deadline
) -> bytes:
    """The answer of a handler; ``receive`` tells when the caller has left, the body having been read.

    Raises:
        RpcError: the handler's own, or DEADLINE_EXCEEDED.
        starlette.requests.ClientDisconnect: nobody waits for the answer.
    """
    deadline.remaining_s()
    answer = handler(data, call)
    if isinstance(answer, bytes):
        return answer
    return await _first_of(answer, receive, deadline)


async def _first_of(answer: Awaitable[bytes], receive: Receive, deadline: Deadline) -> bytes:
    """The answer, unless the caller's patience or the caller's connection ends before."""
    working = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(_left(receive))
    both = (working, leaving)
    try:
        await asyncio.wait(
            both, timeout=deadline.remaining_s(), return_when=asyncio.FIRST_COMPLETED
        )
        if working.done():
            return working.result()
        if leaving.done():
            raise ClientDisconnect
        raise _exceeded()
    finally:
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _exceeded() -> RpcError:
    return RpcError(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
