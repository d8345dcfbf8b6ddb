"""The sessions of the asyncio client: in each event loop a channel, the calls in flight, and its leases."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, Literal, TypeAlias, get_args

import grpc
import grpc.aio

from ratelimitd_client.async_hold import AsyncHold
from ratelimitd_client.batching import Answer, Batcher, Send
from ratelimitd_client.check import MS_PER_S, hold_of, request_of, require_number
from ratelimitd_client.clock import Clock
from ratelimitd_client.decision import Decision, OnUnavailable, Reason, unchecked
from ratelimitd_client.fail_open import HOLD, CallError, FailOpen, call_of, last_resort, read
from ratelimitd_client.leases import MAX_LEASE_MS, TTL_S, Bucket, Leases
from ratelimitd_client.observers import Observer
from ratelimitd_client.sessions import DEFAULT_TIMEOUT_S, LATE_S, Arguments, methods_of
from ratelimitd_client.transport.channel import NativeChannel, open_native_channel
from ratelimitd_client.transport.grpc_channel import Metadata, RenewedChannel, open_async_channel
from ratelimitd_client.transport.link import NodeCall
from ratelimitd_client.transport.tls import Tls
from ratelimiter.v1 import ratelimiter_pb2 as pb

MAX_LINGER_US: Final = 1_000_000

Transport = Literal["native", "grpcio"]
DEFAULT_TRANSPORT: Final = "native"

Leave: TypeAlias = Callable[[bool], None]
"""As :meth:`.NativeChannel.leave`, of one call."""


class AsyncSessions(Arguments[asyncio.AbstractEventLoop, "AsyncSession"]):
    """The asyncio client's sessions, one in each event loop that uses it."""

    _sleep = staticmethod(asyncio.sleep)

    def __init__(
        self,
        target: str = "127.0.0.1:9090",
        *,
        tls: Tls | None = None,
        token: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        on_unavailable: OnUnavailable = "allow",
        observer: Observer | None = None,
        linger_us: int = 0,
        lease_ms: int = 0,
        options: Mapping[str, int | str] | None = None,
        transport: Transport = DEFAULT_TRANSPORT,
        clock: Clock | None = None,
    ) -> None:
        """Create a client; it connects with its first call, once in each event loop.

        Args:
            target: ``host:port``, or any gRPC name such as ``dns:///limiter.internal:9090``; the addresses of a name
                are used in turn.
            tls: see :class:`Tls`; ``None`` sends plaintext, the token included.
            token: bearer token of a role, sent with every call.
            timeout_s: deadline of a check in seconds.
            on_unavailable: answer to a check that no node has answered usably in time: ``"allow"`` lets it through,
                ``"deny"`` denies it, to be tried again after a second.
            observer: is told of every decision, beside :attr:`counts`; see :mod:`ratelimitd_client.observers`.
            linger_us: how long a check waits, in µs, to be batched with others, and at most half of its deadline.
                With 0 it is batched with those of the same event-loop iteration, and with those that come while two
                calls are in flight; it waits for nothing if the check before it was alone.
            lease_ms: how long, in ms and at most 1,000, tokens of a bucket that is asked for often are held to decide
                its checks here; 0 asks a node about every check. See :mod:`ratelimitd_client.leases`.
            options: gRPC channel options, added to the client's own or replacing them.
            transport: what carries the checks. ``native`` is the client's own HTTP/2, which takes less than half the
                CPU; ``grpcio`` is gRPC's channel. ``options``, or a target that only gRPC knows, imply the latter.
            clock: source of the time for pauses and for the calendar.

        Raises:
            ValueError, TypeError: an argument is not valid.
        """
        if transport not in get_args(Transport):
            message = "transport must be native or grpcio"
            raise ValueError(message)
        require_number("linger_us", linger_us, 0, MAX_LINGER_US)
        require_number("lease_ms", lease_ms, 0, MAX_LEASE_MS)
        super().__init__(
            target,
            tls=tls,
            token=token,
            timeout_s=timeout_s,
            on_unavailable=on_unavailable,
            observer=observer,
            options=options,
            clock=clock,
        )
        self._linger_s = linger_us / 1_000_000
        self._lease_s = lease_ms / MS_PER_S
        self._is_native = transport == "native" and not options
        self._process: int | None = None
        """The process that opened the first session."""
        self._fail_open = self._new_fail_open()
        # Separate: the lock of the other may have been held at the fork.
        self._forked = _ForkedSession(self._new_fail_open())

    def _opened(self) -> AsyncSession:
        """Return the session of the running event loop, opened if it has none."""
        if not self._closed and self._process == os.getpid():
            session = self._sessions.get(asyncio.get_running_loop())
            if session is not None:
                return session
        return self._open()

    def _current(self) -> AsyncSession | None:
        if self._process == os.getpid():
            return self._sessions.get(asyncio.get_running_loop())
        return None

    def _open(self) -> AsyncSession:
        self._require_open()
        if self._process not in {None, os.getpid()}:
            return self._forked
        # An application may run one loop after another, as asgiref does for each request of a blocking server.
        for other in list(self._sessions):
            if other.is_closed():
                self._sessions.pop(other, None)
        self._process = os.getpid()
        native = None
        if self._is_native:
            tls_failed = self._fail_open.tls_failed
            native = open_native_channel(self._target, self._tls, tls_failed)
        session = AsyncSession(
            native,
            lambda: self._grpc(open_async_channel),
            self._fail_open,
            metadata=self._metadata,
            linger_s=self._linger_s,
        )
        if self._lease_s:
            acquire = partial(_lease, session, self._timeout_s)
            session.leases = Leases(acquire, lease_s=self._lease_s, loop=session.loop)
        self._sessions[session.loop] = session
        return session


class AsyncSession:
    """The channels of one event loop, and the calls in flight.

    Attributes:
        ask: sends one check, batched with others, and returns the future of its decision.
    """

    def __init__(
        self,
        native: NativeChannel | None,
        open_grpc: Callable[[], RenewedChannel[grpc.aio.Channel]],
        fail_open: FailOpen,
        *,
        metadata: Metadata,
        linger_s: float,
    ) -> None:
        self._open_grpc = open_grpc
        self._native = native
        self._grpc: RenewedChannel[grpc.aio.Channel] | None = None
        self.fail_open = fail_open
        self.allows: Callable[[], bool] = fail_open.breaker.allows
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        send: Send = self._send_grpc
        if native is not None:
            send = partial(self._send_native, native)
        self.batcher: Batcher = Batcher(send, linger_s=linger_s, loop=self.loop)
        self.ask: Callable[[bytes, float], asyncio.Future[Decision]] = self.batcher.add
        self._metadata = metadata
        self._methods = {} if native is not None else methods_of(self.grpc_channel)
        self._under_way: set[asyncio.Future[Any]] = set()
        self.leases: Leases | None = None
        self._is_closed = False

    @property
    def grpc_channel(self) -> grpc.aio.Channel:
        """The channel of gRPC, opened when it is first needed."""
        if self._grpc is None:
            self._grpc = self._open_grpc()
        return self._grpc.channel

    @property
    def channel(self) -> NativeChannel | grpc.aio.Channel:
        """The channel that carries the checks."""
        return self._native or self.grpc_channel

    async def wait_until_ready(self, timeout_s: float) -> bool:
        """Connect, and return whether that succeeded in time."""
        try:
            await asyncio.wait_for(self.channel.channel_ready(), timeout_s)
        except (TimeoutError, grpc.aio.UsageError):  # UsageError: gRPC's channel was closed
            return False
        return True

    async def close(self) -> None:
        """Close the channels, after the calls in flight have ended."""
        if self.leases is not None:
            await self.leases.close()
        await self.batcher.finish()
        while self._under_way:  # a cancelled hold adds a task that gives it back
            # Unlike gather, this cancels no call when it is cancelled.
            await asyncio.wait(self._under_way)
        self._is_closed = True
        if self._native is not None:
            await self._native.close()
        if self._grpc is not None:
            await self._grpc.channel.close()

    def ask_many(self, requests: Sequence[bytes], timeout_s: float) -> asyncio.Task[list[Decision]]:
        """Send checks in one call; the task returns their decisions. Closing waits for it."""
        task = self.loop.create_task(self._decisions(requests, timeout_s))
        self.keep(task)
        return task

    def keep(self, work: asyncio.Future[Any]) -> None:
        """Let :meth:`close` wait for a task or a future."""
        self._under_way.add(work)
        work.add_done_callback(self._under_way.discard)

    async def call(self, path: str, message: bytes, timeout_s: float) -> bytes | None:
        """Send a message and return the answer; ``None`` of a call that ends with OK and without one.

        The call continues when its caller is cancelled. Closing waits for it.

        Raises:
            CallError: it ended with another status, or the session is closed.
        """
        return await _answer_of(self._begin(path, message, timeout_s)[0])

    async def call_or_give_back(self, path: str, message: bytes, timeout_s: float) -> bytes | None:
        """As :meth:`call`, of a hold; what it holds is given back if the caller is cancelled, or the answer is late."""
        call, leave = self._begin(path, message, timeout_s + LATE_S)
        try:
            return await _answer_of(call, timeout_s)
        except (asyncio.CancelledError, CallError) as error:
            if leave is not None:
                leave(isinstance(error, CallError))
            self.keep(self.loop.create_task(self._give_back(call)))
            raise

    async def _give_back(self, call: asyncio.Future[bytes | None]) -> None:
        with suppress(CallError):
            held = read(pb.HoldResponse, await _answer_of(call))
            # Not reported to the breaker: the answer was of no use.
            not_held = unchecked(Reason.NO_ANSWER, "", 0.0)
            await AsyncHold(not_held, hold=held.hold, session=self).settle(0)

    def _begin(
        self, path: str, message: bytes, timeout_s: float
    ) -> tuple[asyncio.Future[bytes | None], Leave | None]:
        """As :meth:`_start`, with the future of the answer, which closing waits for."""
        if self._is_closed:
            raise CallError.of_closed()
        # A hold may have come to another event loop, or to a forked process, where no call of this session would end.
        if self.loop is not asyncio.get_running_loop():
            raise CallError(
                grpc.StatusCode.FAILED_PRECONDITION, "the hold is of another event loop"
            )
        answer, leave = self._start(path, message, timeout_s)
        call = asyncio.ensure_future(answer, loop=self.loop)
        self.keep(call)
        call.add_done_callback(_mark_retrieved)
        return call, leave

    def _start(
        self, path: str, message: bytes, timeout_s: float
    ) -> tuple[Awaitable[bytes | None], Leave | None]:
        """Start a call; return what to await for its answer, and over the client's own channel how to leave it.

        Errors that are no status are raised as they are, by what is awaited.
        """
        channel = self._native
        if channel is None:
            return self._call_grpc(path, message, timeout_s), None
        answer: asyncio.Future[bytes | None] = self.loop.create_future()

        def done(call: NodeCall) -> None:
            if answer.done():  # it was cancelled
                return
            if call.answer is None:
                answer.set_exception(CallError(call.code, call.details, call.status_details))
            else:
                answer.set_result(call.answer)

        try:
            call = channel.begin(path, message, done, timeout_s=timeout_s, metadata=self._metadata)
        except Exception as error:  # noqa: BLE001 - see above
            answer.set_exception(error)
            return answer, None

        def cancelled(_: object) -> None:
            if answer.cancelled():
                channel.cancel(call)

        answer.add_done_callback(cancelled)
        return answer, lambda is_overdue: channel.leave(call, is_overdue=is_overdue)

    async def _call_grpc(self, path: str, message: bytes, timeout_s: float) -> bytes | None:
        try:
            answer: bytes | None = await self._methods[path](
                message, timeout=timeout_s, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise CallError.of(error) from None
        return answer

    def unasked(self, requests: Sequence[bytes], timeout_s: float) -> list[Decision]:
        """Return decisions while the breaker is not closed. If a probe is due, send the checks as one."""
        if self.fail_open.breaker.begin_probe():
            if self._grpc is not None and self._grpc.renew() and self._native is None:
                self._methods = methods_of(self.grpc_channel)
            self.ask_many(self.fail_open.probe_of(requests), timeout_s)
        return self.fail_open.not_asked(len(requests))

    def _send_native(
        self, channel: NativeChannel, requests: Sequence[bytes], timeout_s: float, answer: Answer
    ) -> None:
        """Send a batch and pass its decisions to ``answer``; without a task, which would double the cost of a call."""
        count = len(requests)

        def done(call: NodeCall) -> None:
            try:
                if call.answer is None:
                    decisions = self.fail_open.failed(call.code, call.details, count)
                else:
                    decisions = self.fail_open.answered(call.answer, count)
            except Exception as error:  # noqa: BLE001 - such as of the application's clock; callers need an answer
                decisions = last_resort(error, count, self.fail_open.on_unavailable)
            answer(decisions)

        try:
            path, message = call_of(requests)
            channel.begin(path, message, done, timeout_s=timeout_s, metadata=self._metadata)
        except Exception as error:  # noqa: BLE001 - callers need an answer
            answer(self.fail_open.broken(error, count))

    def _send_grpc(self, requests: Sequence[bytes], timeout_s: float, answer: Answer) -> None:
        """As :meth:`_send_native`, over gRPC's channel."""

        def done(task: asyncio.Task[list[Decision]]) -> None:
            if task.cancelled():
                # Usually because the loop ends; a close in progress still waits for this.
                answer(self.fail_open.broken(asyncio.CancelledError(), len(requests)))
            else:
                answer(task.result())  # never raises

        self.ask_many(requests, timeout_s).add_done_callback(done)

    async def _decisions(self, requests: Sequence[bytes], timeout_s: float) -> list[Decision]:
        count = len(requests)
        try:
            path, message = call_of(requests)
            try:
                answer = await self._start(path, message, timeout_s)[0]
            except CallError as error:
                return self.fail_open.failed(error.code, error.details, count)
            return self.fail_open.answered(answer, count)
        except Exception as error:  # noqa: BLE001 - callers need an answer, whatever gRPC raises
            return self.fail_open.broken(error, count)


async def _answer_of(
    call: asyncio.Future[bytes | None], timeout_s: float | None = None
) -> bytes | None:
    """Return the answer to a call, which continues when the caller is cancelled, or the time is over.

    Raises:
        CallError: the call ended with another status than OK, or has not ended in time.
    """
    await asyncio.wait([call], timeout=timeout_s)
    if not call.done():
        raise CallError(grpc.StatusCode.DEADLINE_EXCEEDED)
    try:
        return call.result()
    except CallError:
        raise
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - as in _decisions; gRPC's channel was closed
        raise CallError(grpc.StatusCode.CANCELLED, type(error).__name__) from None


def _mark_retrieved(call: asyncio.Future[bytes | None]) -> None:
    """Prevent that asyncio logs the error of a call whose caller was cancelled."""
    if not call.cancelled():
        call.exception()


async def _lease(session: AsyncSession, timeout_s: float, bucket: Bucket, tokens: int) -> AsyncHold:
    """Hold tokens for a lease; a node that does not answer is reported by the checks."""
    identifier, identifier_type, endpoint = bucket
    request = request_of(identifier, identifier_type, endpoint, cost=tokens)
    message = hold_of(request, TTL_S, "", lease=True)
    try:
        answer = await session.call_or_give_back(HOLD, message, timeout_s)
    except CallError as error:
        return AsyncHold(unchecked(Reason.NO_ANSWER, error.code.name, 0.0))
    decision, held = session.fail_open.held(answer)
    return AsyncHold(decision, cost=tokens, hold=held.hold, session=session)


class ForkedError(RuntimeError):
    """The asyncio client was used before this process was forked. gRPC for asyncio would hang here.

    Create the client in each worker, or in the parent without using it there.
    """

    def __init__(self) -> None:
        super().__init__(
            "the client was used before this process was forked: use it only after the fork"
        )


class _ForkedSession(AsyncSession):
    """Sends no check, and warns, in a process forked after the client was used."""

    def __init__(self, fail_open: FailOpen) -> None:
        self.fail_open = fail_open
        self.allows = lambda: False
        self.leases = None

    @property
    def grpc_channel(self) -> grpc.aio.Channel:
        raise ForkedError

    async def wait_until_ready(self, timeout_s: float) -> bool:  # noqa: ARG002
        raise ForkedError

    def unasked(self, requests: Sequence[bytes], timeout_s: float) -> list[Decision]:  # noqa: ARG002
        return self.fail_open.broken(ForkedError(), len(requests))
