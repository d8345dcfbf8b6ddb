"""The client for asyncio: as :class:`ratelimitd_client.RateLimiterClient`, and checks of one turn travel as one batch.

Opens its channel with the first call, for the event loop and in the process that makes it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Final, Self

import grpc
import grpc.aio

from ratelimitd_client.async_node_client import AsyncNodeClient
from ratelimitd_client.channel import (
    CHECKING_OPTIONS,
    Metadata,
    Tls,
    authorization,
    open_async_channel,
)
from ratelimitd_client.check import Check, request_of
from ratelimitd_client.client import DEFAULT_TIMEOUT_S, Methods, requests_of, valid_timeout_s
from ratelimitd_client.clock import Clock, SystemClock
from ratelimitd_client.coalescing import Coalescer
from ratelimitd_client.decision import Decision
from ratelimitd_client.exchange import Exchange, path_of, question_of

MAX_LINGER_US: Final = 1_000_000


class AsyncRateLimiterClient:
    """Decides whether requests may proceed. One for an event loop; close it, or use ``async with``.

    It may be made before the loop runs. A loop that follows another gets a channel of its own. The arguments are those
    of :class:`RateLimiterClient`, and

    Args:
        linger_us: how long a check may wait, in µs, for others to travel with; 0 takes those of the same turn of the
            event loop, which delays nobody.

    Raises:
        ValueError: an argument is not valid.
    """

    def __init__(
        self,
        target: str = "127.0.0.1:9090",
        *,
        tls: Tls | None = None,
        token: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        linger_us: int = 0,
        options: Mapping[str, int | str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        if not 0 <= linger_us <= MAX_LINGER_US:
            message = f"linger_us must be 0 to {MAX_LINGER_US}"
            raise ValueError(message)
        self._target = target
        self._tls = tls
        self._token = token
        self._timeout_s = valid_timeout_s(timeout_s)
        self._linger_s = linger_us / 1_000_000
        self._metadata = authorization(token)
        self._options = {**CHECKING_OPTIONS, **(options or {})}
        self._clock = SystemClock() if clock is None else clock
        self._session: _Session | None = None
        self._left: list[_Session] = []
        self._process: int | None = None
        self._forked = Exchange(self._clock)
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Answer the checks that are under way, then close the channel."""
        self._closed = True
        session, self._session = self._session, None
        if session is None or self._is_forked() or session.loop is not asyncio.get_running_loop():
            return
        await session.close()

    async def wait_until_ready(self, timeout_s: float = 5.0) -> bool:
        """Connect, and tell whether that came about in time; else the first check does it, within its own deadline."""
        try:
            await asyncio.wait_for(self._opened().channel.channel_ready(), timeout_s)
        except TimeoutError:
            return False
        return True

    @property
    def admin(self) -> AsyncNodeClient:
        """Rules, health and metrics over the same channel: messages in and out, errors raised, a deadline of 1 s."""
        return self._opened().admin

    async def check(
        self,
        identifier: str,
        identifier_type: str,
        endpoint: str,
        *,
        cost: int = 1,
        timestamp: int = 0,
        peek: bool = False,
        timeout_s: float | None = None,
    ) -> Decision:
        """Ask whether a request may proceed, and spend ``cost`` tokens if so. The arguments are those of ``Check``.

        Raises:
            ValueError, TypeError: an argument is not valid; nothing was sent.
            RuntimeError: the client is closed.
        """
        request = request_of(
            identifier, identifier_type, endpoint, cost=cost, timestamp=timestamp, peek=peek
        )
        deadline_s = self._timeout_s if timeout_s is None else valid_timeout_s(timeout_s)
        try:
            session = self._opened()
        except ForkedError as error:
            return self._forked.broken(error, 1)[0]
        if not session.exchange.breaker.allows():
            return session.unasked([request], deadline_s)[0]
        return await session.coalescer.add(request, deadline_s)

    async def check_many(
        self, checks: Iterable[Check], *, timeout_s: float | None = None
    ) -> list[Decision]:
        """Ask up to 1,000 checks in one call; decision i is that on check i. Each counts for itself.

        Raises:
            ValueError: there are more; nothing was sent.
            RuntimeError: the client is closed.
        """
        requests = requests_of(checks)
        deadline_s = self._timeout_s if timeout_s is None else valid_timeout_s(timeout_s)
        try:
            session = self._opened()
        except ForkedError as error:
            return self._forked.broken(error, len(requests))
        if not requests:
            return []
        if not session.exchange.breaker.allows():
            return session.unasked(requests, deadline_s)
        return await session.ask(requests, deadline_s)

    def _is_forked(self) -> bool:
        """Whether gRPC was used in the process that forked this one."""
        return self._process is not None and self._process != os.getpid()

    def _opened(self) -> _Session:
        """What this event loop has open."""
        if self._closed:
            message = "the client is closed"
            raise RuntimeError(message)
        if self._is_forked():
            raise ForkedError
        session = self._session
        loop = asyncio.get_running_loop()
        if session is not None and session.loop is loop:
            return session
        if session is not None:
            self._left.append(session)  # of a loop that is over: it cannot be closed from this one
        self._process = os.getpid()
        channel = open_async_channel(self._target, tls=self._tls, options=self._options)
        self._session = _Session(
            channel,
            AsyncNodeClient(channel=channel, token=self._token),
            Exchange(self._clock),
            metadata=self._metadata,
            linger_s=self._linger_s,
        )
        return self._session


class ForkedError(RuntimeError):
    """gRPC's part for asyncio was used in the process that forked this one, and would hang here.

    A server that forks its workers makes the client in each of them, or in their parent without using it there.
    """

    def __init__(self) -> None:
        super().__init__(
            "the client was used before this process was forked: use it after that only"
        )


class _Session:
    """A channel, and how its calls went so far."""

    __slots__ = (
        "_metadata",
        "_methods",
        "_probes",
        "admin",
        "channel",
        "coalescer",
        "exchange",
        "loop",
    )

    def __init__(
        self,
        channel: grpc.aio.Channel,
        admin: AsyncNodeClient,
        exchange: Exchange,
        *,
        metadata: Metadata,
        linger_s: float,
    ) -> None:
        self.channel = channel
        self.admin = admin
        self.exchange = exchange
        self.loop = asyncio.get_running_loop()
        self.coalescer = Coalescer(self.ask, linger_s=linger_s, loop=self.loop)
        self._metadata = metadata
        # Bytes in and out: what a peer sends in place of an answer is judged by us, not logged by gRPC.
        self._methods = Methods(channel)
        self._probes: set[asyncio.Task[list[Decision]]] = set()

    async def ask(self, requests: Sequence[bytes], timeout_s: float) -> list[Decision]:
        """The decisions on checks, within so many seconds; never raises."""
        count = len(requests)
        method = self._methods[path_of(requests)]
        try:
            answer = await method(question_of(requests), timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            return self.exchange.failed(error.code(), error.details() or "", count)
        except Exception as error:  # noqa: BLE001 - whatever gRPC raises, those who wait need an answer
            return self.exchange.broken(error, count)
        return self.exchange.answered(answer, count)

    def unasked(self, requests: Sequence[bytes], timeout_s: float) -> list[Decision]:
        """The decisions on checks while the breaker is not closed. They are the probe, when one is due."""
        if self.exchange.breaker.begin_probe():
            probe = self.loop.create_task(self.ask(requests, timeout_s))
            self._probes.add(probe)
            probe.add_done_callback(self._probes.discard)
        return self.exchange.not_asked(len(requests))

    async def close(self) -> None:
        """Let what is under way end, within its deadlines."""
        await self.coalescer.finish()
        await asyncio.gather(*self._probes)
        await self.channel.close()
