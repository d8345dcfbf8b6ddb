"""The client for code that blocks: a decision on every check, within its deadline, whatever becomes of the service.

Fails open in one place, :mod:`ratelimitd_client.exchange`. Opens its channel with the first call, in the process
that makes it: a client may be made before a server forks its workers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

import grpc

from ratelimitd_client.channel import CHECKING_OPTIONS, Tls, authorization, open_channel
from ratelimitd_client.check import MAX_BATCH, Check, request_of
from ratelimitd_client.clock import Clock, SystemClock
from ratelimitd_client.decision import Decision
from ratelimitd_client.exchange import FailOpen, path_of, question_of
from ratelimitd_client.native_channel import NativeChannel
from ratelimitd_client.node_client import NodeClient
from ratelimitd_client.targets import require_target

DEFAULT_TIMEOUT_S: Final = 0.02
"""Deadline of a check unless told otherwise: within one network a node answers in a tenth of it."""

MAX_TIMEOUT_S: Final = 3_600
"""No request waits so long for anything."""


class RateLimiterClient:
    """Decides whether requests may proceed. One for a whole process; threads share it. Close it, or use ``with``.

    Args:
        target: ``host:port``, or any gRPC name such as ``dns:///limiter.internal:9090``; the addresses behind a name
            are asked in turn.
        tls: see :class:`Tls`; ``None`` speaks plaintext, and then a token can be read on the wire.
        token: the bearer token of a role, sent with every call.
        timeout_s: deadline of a check in seconds; when it passes, the check is let through.
        options: gRPC channel options, added to the client's own or in their place.
        clock: where pauses and calendar times come from.

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
        options: Mapping[str, int | str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        require_target(target)
        self._target = target
        self._tls = tls
        self._token = token
        self._metadata = authorization(token)
        self._timeout_s = valid_timeout_s(timeout_s)
        self._options = {**CHECKING_OPTIONS, **(options or {})}
        self._clock = SystemClock() if clock is None else clock
        self._sessions: dict[int, _Session] = {}
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel of this process."""
        self._closed = True
        session = self._sessions.pop(os.getpid(), None)
        if session is not None:
            session.channel.close()

    def wait_until_ready(self, timeout_s: float = 5.0) -> bool:
        """Connect, and tell whether that came about in time; else the first check does it, within its own deadline."""
        ready = grpc.channel_ready_future(self._session().channel)
        try:
            ready.result(timeout=timeout_s)
        except grpc.FutureTimeoutError:
            ready.cancel()  # else it is watched for good
            return False
        return True

    @property
    def admin(self) -> NodeClient:
        """Rules, health and metrics over the same channel: messages in and out, errors raised, a deadline of 1 s."""
        return self._session().admin

    def check(
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
        return self._decide([request], timeout_s)[0]

    def check_many(
        self, checks: Iterable[Check], *, timeout_s: float | None = None
    ) -> list[Decision]:
        """Ask up to 1,000 checks in one call; decision i is that on check i. Each counts for itself.

        Raises:
            ValueError: there are more; nothing was sent.
            RuntimeError: the client is closed.
        """
        return self._decide(requests_of(checks), timeout_s)

    def _decide(self, requests: Sequence[bytes], timeout_s: float | None) -> list[Decision]:
        deadline_s = self._timeout_s if timeout_s is None else valid_timeout_s(timeout_s)
        session, count = self._session(), len(requests)
        if not requests:
            return []
        if not session.exchange.breaker.allows():
            if session.exchange.breaker.begin_probe():
                session.probe(requests, deadline_s, self._metadata)
            return session.exchange.not_asked(count)
        method = session.methods[path_of(requests)]
        try:
            # Of a call that ends well without a message gRPC has None.
            answer: bytes | None = method(
                question_of(requests), timeout=deadline_s, metadata=self._metadata
            )
            return session.exchange.answered(answer, count)
        except grpc.RpcError as error:
            return session.failed(error, count)
        except Exception as error:  # noqa: BLE001 - whatever gRPC raises, such as of a channel that another thread closes
            return session.exchange.broken(error, count)

    def _session(self) -> _Session:
        """What this process has open."""
        if self._closed:
            message = "the client is closed"
            raise RuntimeError(message)
        process = os.getpid()
        session = self._sessions.get(process)
        if session is not None:
            return session
        opened = _Session(self._open(), self._token, self._clock)
        # Two threads may come here at once: one of the two is kept. In a forked process its parent's session stays as
        # it is: closing it would say goodbye on the parent's sockets.
        kept = self._sessions.setdefault(process, opened)
        if kept is not opened:
            opened.channel.close()
        return kept

    def _open(self) -> grpc.Channel:
        return open_channel(self._target, tls=self._tls, options=self._options)


class _Session:
    """A channel, and how its calls went so far."""

    __slots__ = ("admin", "channel", "exchange", "methods")

    def __init__(self, channel: grpc.Channel, token: str | None, clock: Clock) -> None:
        self.channel = channel
        self.exchange = FailOpen(clock)
        # Bytes in and out: what a peer sends in place of an answer is judged by us, not logged by gRPC.
        self.methods = Methods(channel)
        self.admin = NodeClient(channel=channel, token=token)

    def probe(
        self,
        requests: Sequence[bytes],
        timeout_s: float,
        metadata: tuple[tuple[str, str], ...],
    ) -> None:
        """Send checks without waiting; the breaker hears the result."""
        count = len(requests)

        def ended(call: grpc.Future[bytes]) -> None:
            try:
                self.exchange.answered(call.result(), count)
            except grpc.RpcError as error:
                self.failed(error, count)

        method = self.methods[path_of(requests)]
        try:
            call = method.future(question_of(requests), timeout=timeout_s, metadata=metadata)
        except Exception as error:  # noqa: BLE001 - as in a check: it never raises
            self.exchange.broken(error, count)
        else:
            call.add_done_callback(ended)

    def failed(self, error: grpc.RpcError, count: int) -> list[Decision]:
        """The decisions on checks whose call raised."""
        return self.exchange.failed(error.code(), error.details() or "", count)


class Methods(dict[str, Any]):
    """The calls of a channel by their paths, each made when it is first needed."""

    def __init__(self, channel: grpc.Channel | grpc.aio.Channel | NativeChannel) -> None:
        super().__init__()
        self._channel = channel

    def __missing__(self, path: str) -> Any:
        method: Any = self._channel.unary_unary(path)
        self[path] = method
        return method


def valid_timeout_s(timeout_s: float) -> float:
    """The deadline, if it is one.

    Raises:
        ValueError: it is not a positive number of seconds, up to an hour.
    """
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        message = f"timeout_s must be a positive number of seconds, up to {MAX_TIMEOUT_S:,}"
        raise ValueError(message)
    return timeout_s


def requests_of(checks: Iterable[Check]) -> list[bytes]:
    """The messages of a batch.

    Raises:
        ValueError: no node takes so many.
    """
    requests = [check.message() for check in checks]
    if len(requests) > MAX_BATCH:
        message = f"a batch holds up to {MAX_BATCH} checks, not {len(requests)}"
        raise ValueError(message)
    return requests
