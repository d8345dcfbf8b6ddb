"""The client for asyncio: as :class:`ratelimitd_client.RateLimiterClient`, and checks of one turn travel as one batch.

Opens its channel with the first call, for the event loop and in the process that makes it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Final, Literal, Self, get_args

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
from ratelimitd_client.coalescing import Coalescer, Told
from ratelimitd_client.decision import Decision
from ratelimitd_client.exchange import FailOpen, last_resort, path_of, question_of
from ratelimitd_client.native_channel import (
    CallError,
    NativeChannel,
    NodeCall,
    open_native_channel,
)
from ratelimitd_client.targets import require_target

MAX_LINGER_US: Final = 1_000_000

Transport = Literal["native", "grpcio"]
DEFAULT_TRANSPORT: Final = "native"


class AsyncRateLimiterClient:
    """Decides whether requests may proceed. One for a whole process; close it, or use ``async with``.

    It may be made before the event loop runs. Each loop that uses it gets a channel of its own, which goes with the
    loop; what they learn of the service they share. The arguments are those of :class:`RateLimiterClient`, and

    Args:
        linger_us: how long a check may wait, in µs, for others to travel with, and never more than half of its
            deadline; 0 takes those of the same turn of the event loop, and those that come while two calls are under
            way. Then a check waits for nothing if the one before it had no company.
        transport: what carries the checks. ``native`` is the client's own HTTP/2, and costs a process much less;
            ``grpcio`` is gRPC's channel. With ``options``, or a target that only gRPC knows, it is gRPC's all the same.

    Raises:
        ValueError, TypeError: an argument is not valid.
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
        transport: Transport = DEFAULT_TRANSPORT,
        clock: Clock | None = None,
    ) -> None:
        if transport not in get_args(Transport):
            message = "transport must be native or grpcio"
            raise ValueError(message)
        if not 0 <= linger_us <= MAX_LINGER_US:
            message = f"linger_us must be 0 to {MAX_LINGER_US}"
            raise ValueError(message)
        require_target(target)
        self._target = target
        self._tls = tls
        self._token = token
        self._timeout_s = valid_timeout_s(timeout_s)
        self._linger_s = linger_us / 1_000_000
        self._metadata = authorization(token)
        self._options = {**CHECKING_OPTIONS, **(options or {})}
        self._is_native = transport == "native" and not options
        self._clock = SystemClock() if clock is None else clock
        self._sessions: dict[asyncio.AbstractEventLoop, _Session] = {}
        self._process: int | None = None
        self._exchange = FailOpen(self._clock)
        # Of its own: a lock of the other may have been held when the process was forked.
        self._forked = FailOpen(self._clock)
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
        """Answer the checks that are under way in this event loop, then close its channel."""
        self._closed = True
        if self._is_forked():
            return
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is not None:
            await session.close()
            # Not before: a close that was cancelled can be made again.
            self._sessions.pop(loop, None)

    async def wait_until_ready(self, timeout_s: float = 5.0) -> bool:
        """Connect, and tell whether that came about in time; else the first check does it, within its own deadline."""
        try:
            await asyncio.wait_for(self._opened().channel.channel_ready(), timeout_s)
        except (TimeoutError, grpc.aio.UsageError):  # the latter: gRPC's channel was closed
            return False
        return not self._closed

    @property
    def admin(self) -> AsyncNodeClient:
        """Rules, health and metrics over gRPC: messages in and out, errors raised, a deadline of 1 s."""
        return AsyncNodeClient(channel=self._opened().grpc_channel, token=self._token)

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
        if not self._exchange.breaker.allows():
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
        if not self._exchange.breaker.allows():
            return session.unasked(requests, deadline_s)
        return await session.begin(requests, deadline_s)

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
        loop = asyncio.get_running_loop()
        return self._sessions.get(loop) or self._open(loop)

    def _open(self, loop: asyncio.AbstractEventLoop) -> _Session:
        # An application may run one loop after another, as asgiref does for each request of a server that blocks.
        for other in list(self._sessions):
            if other.is_closed():
                self._sessions.pop(other, None)
        self._process = os.getpid()
        native = open_native_channel(self._target, self._tls) if self._is_native else None
        session = _Session(
            native,
            self._open_grpc,
            self._exchange,
            metadata=self._metadata,
            linger_s=self._linger_s,
        )
        self._sessions[loop] = session
        return session

    def _open_grpc(self) -> grpc.aio.Channel:
        return open_async_channel(self._target, tls=self._tls, options=self._options)


class ForkedError(RuntimeError):
    """gRPC's part for asyncio was used in the process that forked this one, and would hang here.

    A server that forks its workers makes the client in each of them, or in their parent without using it there.
    """

    def __init__(self) -> None:
        super().__init__(
            "the client was used before this process was forked: use it after that only"
        )


class _Session:
    """The channels of one event loop, and what is under way there."""

    __slots__ = (
        "_grpc_channel",
        "_loop",
        "_metadata",
        "_methods",
        "_open_grpc",
        "_under_way",
        "channel",
        "coalescer",
        "exchange",
    )

    def __init__(
        self,
        native: NativeChannel | None,
        open_grpc: Callable[[], grpc.aio.Channel],
        exchange: FailOpen,
        *,
        metadata: Metadata,
        linger_s: float,
    ) -> None:
        self._open_grpc = open_grpc
        self._grpc_channel = open_grpc() if native is None else None
        self.channel = native or self.grpc_channel
        self.exchange = exchange
        self._loop = asyncio.get_running_loop()
        ask = self._ask_grpc if native is None else partial(self._ask_native, native)
        self.coalescer = Coalescer(ask, linger_s=linger_s, loop=self._loop)
        self._metadata = metadata
        # Bytes in and out: what a peer sends in place of an answer is judged by us, not logged by gRPC.
        self._methods = Methods(self.channel)
        self._under_way: set[asyncio.Task[list[Decision]]] = set()

    @property
    def grpc_channel(self) -> grpc.aio.Channel:
        """That of gRPC, opened when it is first needed."""
        if self._grpc_channel is None:
            self._grpc_channel = self._open_grpc()
        return self._grpc_channel

    def begin(self, requests: Sequence[bytes], timeout_s: float) -> asyncio.Task[list[Decision]]:
        """Ask checks within so many seconds; closing waits for the answer."""
        task = self._loop.create_task(self._decisions(requests, timeout_s))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    def unasked(self, requests: Sequence[bytes], timeout_s: float) -> list[Decision]:
        """The decisions on checks while the breaker is not closed. They are the probe, when one is due."""
        if self.exchange.breaker.begin_probe():
            self.begin(requests, timeout_s)
        return self.exchange.not_asked(len(requests))

    async def close(self) -> None:
        """Let what is under way end, within its deadlines."""
        await self.coalescer.finish()
        if self._under_way:
            # Cancelling this cancels no checks, as gather would.
            await asyncio.wait(self._under_way)
        await self.channel.close()
        if self._grpc_channel is not None:
            await self._grpc_channel.close()

    def _ask_native(
        self, channel: NativeChannel, requests: Sequence[bytes], timeout_s: float, told: Told
    ) -> None:
        """Ask checks, and tell of the decisions on them; without a task, which costs as much as the call."""
        count = len(requests)

        def done(call: NodeCall) -> None:
            try:
                if call.answer is None:
                    decisions = self.exchange.failed(call.code, call.details, count)
                else:
                    decisions = self.exchange.answered(call.answer, count)
            except Exception as error:  # noqa: BLE001 - whatever it is, those who wait need an answer
                decisions = last_resort(error, count)
            told(decisions)

        path, question = path_of(requests), question_of(requests)
        try:
            channel.begin(path, question, done, timeout_s=timeout_s, metadata=self._metadata)
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait need an answer
            told(self.exchange.broken(error, count))

    def _ask_grpc(self, requests: Sequence[bytes], timeout_s: float, told: Told) -> None:
        """The same over gRPC's own channel."""

        def done(task: asyncio.Task[list[Decision]]) -> None:
            if task.cancelled():
                # Mostly since the loop ends; closing the client still waits for this.
                told(self.exchange.broken(asyncio.CancelledError(), len(requests)))
            else:
                told(task.result())  # which never raises

        self.begin(requests, timeout_s).add_done_callback(done)

    async def _decisions(self, requests: Sequence[bytes], timeout_s: float) -> list[Decision]:
        """The decisions on checks, within so many seconds; never raises."""
        try:
            return await self._answered(requests, timeout_s)
        except Exception as error:  # noqa: BLE001 - whatever gRPC raises, those who wait need an answer
            return self.exchange.broken(error, len(requests))

    async def _answered(self, requests: Sequence[bytes], timeout_s: float) -> list[Decision]:
        count = len(requests)
        method = self._methods[path_of(requests)]
        try:
            # Of a call that ends well without a message gRPC has None.
            answer: bytes | None = await method(
                question_of(requests), timeout=timeout_s, metadata=self._metadata
            )
        except (CallError, grpc.aio.AioRpcError) as error:
            return self.exchange.failed(error.code(), error.details() or "", count)
        return self.exchange.answered(answer, count)
