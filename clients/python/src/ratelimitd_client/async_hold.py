# Source of hold.py: run `make proto` after a change.
"""Holds: tokens charged for a request whose cost is known when it ends, and slots for what is in flight."""

from __future__ import annotations

import asyncio
import time
from typing import Final, Protocol, Self

from ratelimitd_client.check import MAX_COST, MAX_TTL_S, require_number, valid_timeout_s
from ratelimitd_client.decision import Decision
from ratelimitd_client.fail_open import EXTEND, SETTLE, CallError, read
from ratelimiter.v1 import ratelimiter_pb2 as pb

DEFAULT_TTL_S: Final = 60

DEFAULT_SETTLE_S: Final = 1.0
"""How long a settle or an extension is tried."""

ATTEMPT_S: Final = 0.25
FIRST_PAUSE_S: Final = 0.05
MAX_PAUSE_S: Final = 1.0
"""Deadline of an attempt, and the pauses between attempts, which double."""


class AsyncCaller(Protocol):
    """What sends the calls of a hold: a session, and the fake for tests."""

    async def call(self, path: str, message: bytes, timeout_s: float, /) -> bytes | None:
        """As :meth:`ratelimitd_client.async_sessions.AsyncSession.call`."""
        ...

    # asyncio only:
    def keep(self, task: asyncio.Task[bool], /) -> None:
        """As :meth:`ratelimitd_client.async_sessions.AsyncSession.keep`."""
        ...


class AsyncHold:
    """A hold, or the denial of one.

    Use it with ``async with``: on leaving it is settled with :attr:`actual`, or with what it held if that was not set.
    Without a settle its tokens stay charged, and its slots come free after :attr:`expire_time`.

    Attributes:
        decision: the answer to the check.
        expire_time: when the hold ends, in Unix seconds; 0 if nothing is held.
    """

    def __init__(
        self,
        decision: Decision,
        *,
        cost: int = 1,
        hold: str = "",
        expire_time: int = 0,
        session: AsyncCaller | None = None,
    ) -> None:
        self.decision = decision
        self.expire_time: int = expire_time
        self._actual: int | None = None
        self._cost = cost
        self._hold = hold
        self._session = session

    @property
    def allowed(self) -> bool:
        """Whether the request may proceed."""
        return self.decision.allowed

    @property
    def is_held(self) -> bool:
        """Whether tokens or slots of a limit are held: not where none was asked."""
        return bool(self._hold and self.decision.limit)

    @property
    def actual(self) -> int | None:
        """Tokens that the request has cost.

        Raises:
            ValueError, TypeError: the number that is set is not valid. Leaving the block then still settles.
        """
        return self._actual

    @actual.setter
    def actual(self, actual: int | None) -> None:
        if actual is not None:
            require_number("actual", actual, 0, MAX_COST)
        self._actual = actual

    async def settle(self, actual: int, *, timeout_s: float = DEFAULT_SETTLE_S) -> bool:
        """Charge ``actual`` tokens in place of those held, also more; 0 gives all back.

        Tried again for ``timeout_s`` if no node answers, and charged once however often it is tried. Returns whether it
        was charged: not if the hold has ended, if it held nothing because no limit was asked, or if no node answers.
        In asyncio a hold cannot be used on another event loop, or in a forked process.

        Raises:
            ValueError, TypeError: ``actual`` or ``timeout_s`` is not valid.
        """
        require_number("actual", actual, 0, MAX_COST)
        request = pb.SettleRequest(hold=self._hold, actual=actual)
        answer = await self._tried(SETTLE, request, timeout_s)
        return read(pb.SettleResponse, answer).known

    async def extend(
        self, ttl_s: int = DEFAULT_TTL_S, *, timeout_s: float = DEFAULT_SETTLE_S
    ) -> bool:
        """Let the hold end ``ttl_s`` seconds from now, 1 to 3,600, never sooner; returns whether it is still there.

        Raises:
            ValueError, TypeError: ``ttl_s`` or ``timeout_s`` is not valid.
        """
        require_number("ttl_s", ttl_s, 1, MAX_TTL_S)
        request = pb.ExtendRequest(hold=self._hold, ttl_seconds=ttl_s)
        answer = await self._tried(EXTEND, request, timeout_s)
        extended = read(pb.ExtendResponse, answer)
        self.expire_time = extended.expire_time or self.expire_time
        return extended.known

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        actual = self._cost if self._actual is None else self._actual
        # asyncio only:
        if self._session is not None and self._hold:
            settling = asyncio.create_task(self.settle(actual))
            self._session.keep(settling)
            await asyncio.shield(settling)  # a cancelled block is settled, too
            return

        await self.settle(actual)

    async def _tried(
        self, path: str, request: pb.SettleRequest | pb.ExtendRequest, timeout_s: float
    ) -> bytes | None:
        """Return the answer to a call; ``None`` if there is no hold, or no node takes it in time."""
        valid_timeout_s(timeout_s)
        session = self._session
        if session is None or not self._hold:
            return None
        message, pause_s = request.SerializeToString(), FIRST_PAUSE_S
        ends_s = time.monotonic() + timeout_s
        while True:
            try:
                return await session.call(path, message, min(ATTEMPT_S, timeout_s))
            except CallError as error:
                left_s = ends_s - time.monotonic()
                if error.is_final or left_s <= pause_s:
                    return None
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
