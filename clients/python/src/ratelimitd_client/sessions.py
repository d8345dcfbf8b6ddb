"""What a client is made of: its arguments, and the sessions of the blocking one.

A session is an open channel with the calls in flight on it. The blocking client has one per process, the asyncio client
one per event loop (:mod:`ratelimitd_client.async_sessions`). A session never raises for what a call ends with:
:class:`FailOpen` turns it into decisions.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, Generic, TypeVar

import grpc
import grpc.aio

from ratelimitd_client.check import valid_timeout_s
from ratelimitd_client.clock import Clock, SystemClock
from ratelimitd_client.decision import Decision, OnUnavailable, require_on_unavailable
from ratelimitd_client.fail_open import PATHS, SETTLE, CallError, FailOpen, call_of, read
from ratelimitd_client.observers import Counts, Observer, Report, report_to
from ratelimitd_client.transport.grpc_channel import (
    CHECKING_OPTIONS,
    ChannelT,
    Metadata,
    RenewedChannel,
    authorization,
    open_channel,
)
from ratelimitd_client.transport.targets import require_target
from ratelimitd_client.transport.tls import Tls, require_tls
from ratelimiter.v1 import ratelimiter_pb2 as pb

DEFAULT_TIMEOUT_S: Final = 0.02
"""Default deadline of a check. Within one network a node answers in a tenth of it."""

HEALTH: Final = "/grpc.health.v1.Health/Check"

LATE_S: Final = 1.0
"""How long after its deadline the answer to a hold is awaited, to give back what it holds."""

Owner = TypeVar("Owner")
SessionT = TypeVar("SessionT")


class Arguments(Generic[Owner, SessionT]):
    """The validated arguments of a client, and its open sessions: of a process or an event loop each."""

    def __init__(
        self,
        target: str = "127.0.0.1:9090",
        *,
        tls: Tls | None = None,
        token: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        on_unavailable: OnUnavailable = "allow",
        observer: Observer | None = None,
        options: Mapping[str, int | str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Create a client; it connects with its first call.

        The arguments are those of :meth:`.AsyncSessions.__init__`, without ``linger_us``, ``lease_ms`` and
        ``transport``.

        Raises:
            ValueError, TypeError: an argument is not valid.
        """
        require_target(target)
        require_tls(tls)
        require_on_unavailable(on_unavailable)
        self._target = target
        self._tls = tls
        self._token = token
        self._metadata = authorization(token)
        self._timeout_s = valid_timeout_s(timeout_s)
        self.on_unavailable: Final[OnUnavailable] = on_unavailable
        self._options = {**CHECKING_OPTIONS, **(options or {})}
        self._clock = SystemClock() if clock is None else clock
        self._closed = False
        self._sessions: dict[Owner, SessionT] = {}
        self.counts: Final[Counts] = Counts()
        self._report: Report = self.counts.decided
        self._observed: Report | None = None
        if observer is not None:
            self._report = report_to(self._clock, self.counts, observer)
            self._observed = report_to(self._clock, observer)

    def _grpc(self, open_with: Callable[..., ChannelT]) -> RenewedChannel[ChannelT]:
        return RenewedChannel(
            lambda tls: open_with(self._target, tls=tls, options=self._options), self._tls
        )

    def _new_fail_open(self) -> FailOpen:
        return FailOpen(self._clock, self.on_unavailable, target=self._target)

    def _require_open(self) -> None:
        if self._closed:
            message = "the client is closed"
            raise RuntimeError(message)


class Sessions(Arguments[int, "Session"]):
    """The blocking client's sessions, one in each process that uses it."""

    _sleep = staticmethod(time.sleep)

    def _opened(self) -> Session:
        """Return the session of this process, opened if it has none."""
        session = self._sessions.get(os.getpid())
        if session is not None and not self._closed:
            return session
        self._require_open()
        opened = Session(self._grpc(open_channel), self._new_fail_open(), self._metadata)
        # Two threads may get here at once: one session is kept. After a fork the parent's session stays untouched:
        # closing it would send GOAWAY on the parent's sockets.
        kept = self._sessions.setdefault(os.getpid(), opened)
        if kept is not opened:
            opened.close()
        return kept

    def _current(self) -> Session | None:
        return self._sessions.get(os.getpid())


class Session:
    """The channel of one process, used by all of its threads."""

    def __init__(
        self, renewed: RenewedChannel[grpc.Channel], fail_open: FailOpen, metadata: Metadata
    ) -> None:
        self._renewed = renewed
        self.fail_open = fail_open
        self.allows: Callable[[], bool] = fail_open.breaker.allows
        self._metadata = metadata
        self._methods = methods_of(self.grpc_channel)
        self._is_closed = False

    @property
    def grpc_channel(self) -> grpc.Channel:
        """The open channel."""
        return self._renewed.channel

    def wait_until_ready(self, timeout_s: float) -> bool:
        """Connect, and return whether a peer answered in time."""
        # Not channel_ready_future, whose thread is in gRPC for up to 0.2 s longer: the child of a fork could crash.
        check_health: Any = self.grpc_channel.unary_unary(HEALTH)
        try:
            with _call_errors():
                check_health(b"", timeout=timeout_s, wait_for_ready=True)
        except CallError as error:
            # Any other status comes from a peer that was reached.
            return error.code not in {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
        return True

    def close(self) -> None:
        """Close the channel."""
        self._is_closed = True
        self.grpc_channel.close()

    def ask(self, request: bytes, timeout_s: float) -> Decision:
        """Send one check and return its decision."""
        return self.ask_many([request], timeout_s)[0]

    def ask_many(self, requests: Sequence[bytes], timeout_s: float) -> list[Decision]:
        """Send checks in one call and return their decisions."""
        count = len(requests)
        try:
            path, message = call_of(requests)
            # gRPC returns None for a call that ends with OK and without a message.
            answer: bytes | None = self._methods[path](
                message, timeout=timeout_s, metadata=self._metadata
            )
            return self.fail_open.answered(answer, count)
        except grpc.RpcError as error:
            return self._failed(error, count)
        except Exception as error:  # noqa: BLE001 - gRPC raises ValueError for a channel that another thread closed
            return self.fail_open.broken(error, count)

    def call(self, path: str, message: bytes, timeout_s: float) -> bytes | None:
        """Send a message and return the answer; ``None`` of a call that ends with OK and without one.

        Raises:
            CallError: it ended with another status, or the session is closed.
        """
        if self._is_closed:
            raise CallError.of_closed()
        with _call_errors():
            answer: bytes | None = self._methods[path](
                message, timeout=timeout_s, metadata=self._metadata
            )
            return answer

    def call_or_give_back(self, path: str, message: bytes, timeout_s: float) -> bytes | None:
        """As :meth:`call`, of a hold; what it holds is given back if the caller has left before the answer."""
        if self._is_closed:
            raise CallError.of_closed()
        with _call_errors():
            call: grpc.Future[bytes | None] = self._methods[path].future(
                message, timeout=timeout_s + LATE_S, metadata=self._metadata
            )
            try:
                return call.result(timeout=timeout_s)
            except BaseException as error:  # also of gevent.Timeout, and where a greenlet is killed
                call.add_done_callback(self._give_back)
                if not isinstance(error, grpc.FutureTimeoutError):
                    raise
        raise CallError(grpc.StatusCode.DEADLINE_EXCEEDED)

    def _give_back(self, call: grpc.Future[bytes | None]) -> None:
        with suppress(Exception):  # it ended without an answer, or the channel was closed
            if hold := read(pb.HoldResponse, call.result()).hold:
                request = pb.SettleRequest(hold=hold).SerializeToString()
                settling = self._methods[SETTLE].future(
                    request, timeout=LATE_S, metadata=self._metadata
                )
                # gRPC cancels a call without a reference.
                settling.add_done_callback(lambda _: None)

    def unasked(self, requests: Sequence[bytes], timeout_s: float) -> list[Decision]:
        """Return decisions while the breaker is not closed. If a probe is due, send the checks as one."""
        if self.fail_open.breaker.begin_probe():
            if self._renewed.renew():
                self._methods = methods_of(self.grpc_channel)
            self._probe(self.fail_open.probe_of(requests), timeout_s)
        return self.fail_open.not_asked(len(requests))

    def _probe(self, requests: Sequence[bytes], timeout_s: float) -> None:
        """Send checks without waiting, and report the result to the breaker."""
        count = len(requests)

        def ended(call: grpc.Future[bytes]) -> None:
            try:
                self.fail_open.answered(call.result(), count)
            except grpc.RpcError as error:
                self._failed(error, count)

        try:
            path, message = call_of(requests)
            call = self._methods[path].future(message, timeout=timeout_s, metadata=self._metadata)
        except Exception as error:  # noqa: BLE001 - as in ask_many
            self.fail_open.broken(error, count)
        else:
            call.add_done_callback(ended)

    def _failed(self, error: grpc.RpcError, count: int) -> list[Decision]:
        return self.fail_open.failed(error.code(), error.details() or "", count)


@contextmanager
def _call_errors() -> Iterator[None]:
    """Raise what gRPC raises as CallError."""
    try:
        yield
    except grpc.RpcError as error:
        raise CallError.of(error) from None
    except Exception as error:  # noqa: BLE001 - gRPC raises ValueError for a channel that another thread closed
        raise CallError(grpc.StatusCode.CANCELLED, type(error).__name__) from None


def methods_of(channel: grpc.Channel | grpc.aio.Channel) -> dict[str, Any]:
    """Return the calls of a channel by path, bytes in and out: gRPC would log answers that it cannot parse."""
    return {path: channel.unary_unary(path) for path in PATHS}
