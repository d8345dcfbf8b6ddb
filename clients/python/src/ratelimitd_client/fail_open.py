"""Turns what a call ends with into decisions: the only place that fails open, or closed. Does no I/O. See ADR 0034.

An answer, a status, bytes that mean nothing: each becomes decisions here and is reported to the breaker and to the log.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Self, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from ratelimitd_client.check import PEEK, batch_of
from ratelimitd_client.clock import Clock
from ratelimitd_client.decision import (
    MAX_BATCH_LIMITS,
    MAX_LIMITS,
    TOO_MANY_HOLDS,
    Decision,
    OnUnavailable,
    Reason,
    decision_of,
    refused,
    too_many_holds,
    unchecked,
)
from ratelimitd_client.log_throttle import LogThrottle
from ratelimitd_wire.breaker import US_PER_S, Breaker
from ratelimiter.v1 import ratelimiter_pb2 as pb

CHECK: Final = "/ratelimiter.v1.RateLimiter/CheckRateLimit"
BATCH: Final = "/ratelimiter.v1.RateLimiter/CheckRateLimitBatch"

HOLD: Final = "/ratelimiter.v1.RateLimiterHolds/Hold"
SETTLE: Final = "/ratelimiter.v1.RateLimiterHolds/Settle"
EXTEND: Final = "/ratelimiter.v1.RateLimiterHolds/Extend"
PATHS: Final = (CHECK, BATCH, HOLD, SETTLE, EXTEND)

MAX_ANSWER_BYTES: Final = 65_536
"""Limit of the answer to one check: some 150 bytes for each limit that judged. A longer one is not parsed."""

MAX_HOLD_ANSWER_BYTES: Final = 2 * MAX_ANSWER_BYTES
"""Likewise of the calls of holds: an answer to a check, and the text of a hold, which is no longer."""

GARBLED: Final = "GARBLED"
"""The error of an answer that is no message of the contract, or has not one answer for each check."""

STATUS_KEY: Final = "grpc-status-details-bin"
"""The metadata key in which gRPC libraries look for the ``google.rpc.Status`` of a call."""

DOMAIN: Final = "ratelimitd"
"""The domain of the ``ErrorInfo`` of a node."""

HTTP1_PEER: Final = "http1.x server"
"""Part of the details of UNAVAILABLE where the peer answers HTTP/1.1: gRPC's words, and so the native channel's."""

RECOVERY_US: Final = 250_000
"""Pause of an open breaker before a probe. Short, since no caller waits for a probe: a service that returns is used
again within a second."""

# equivalent: how much longer a random pause may be is not to be seen to the µs
JITTER_US: Final = 125_000
"""Upper bound of the random addition to the pause, which spreads the probes of many clients."""

_LOG: Final = logging.getLogger("ratelimitd_client")

M = TypeVar("M", bound=Message)


def read(kind: type[M], answer: bytes | None) -> M:
    """Return the message of an answer; an empty one if there is none, it is too long or does not parse."""
    if answer is None or len(answer) > MAX_HOLD_ANSWER_BYTES:
        return kind()
    try:
        return kind.FromString(answer)
    except DecodeError:
        return kind()


class CallError(Exception):
    """A call that ended without an answer.

    Attributes:
        reason: the node's reason, by the ``ErrorInfo`` of its ``google.rpc.Status``; empty if there is none.
        is_final: another attempt would end alike.
    """

    def __init__(
        self, code: grpc.StatusCode, details: str = "", status_details: bytes = b""
    ) -> None:
        super().__init__(code.name)
        self.code: Final = code
        self.details: Final = details
        self.reason: Final = _reason_of(status_details)
        self.is_final: Final = code not in _TRANSIENT

    @classmethod
    def of(cls, error: grpc.RpcError) -> Self:
        """Return what an error of gRPC's channel means."""
        trailers: dict[str, bytes] = dict(error.trailing_metadata() or ())  # type: ignore[arg-type]
        return cls(error.code(), error.details() or "", trailers.get(STATUS_KEY, b""))

    @classmethod
    def of_closed(cls) -> Self:
        """Return the error of a call of a client that was closed, which is not tried again."""
        return cls(grpc.StatusCode.FAILED_PRECONDITION, "the client is closed")


_TRANSIENT: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)


def _reason_of(status_details: bytes) -> str:
    info = ErrorInfo()
    for detail in read(Status, status_details).details:
        # A detail of this type may be no message of it.
        with suppress(DecodeError):
            if detail.Unpack(info) and info.domain == DOMAIN:
                return info.reason
    return ""


def call_of(requests: Sequence[bytes]) -> tuple[str, bytes]:
    """Return the path and the message of the call that carries these checks."""
    return (CHECK, requests[0]) if len(requests) == 1 else (BATCH, batch_of(requests))


class FailOpen:
    """Turns results of calls into decisions. Threads may share it.

    Args:
        clock: source of the time.
        on_unavailable: whether checks without a usable answer are allowed or denied.
        target: names the service in the log.
    """

    def __init__(
        self, clock: Clock, on_unavailable: OnUnavailable = "allow", *, target: str = ""
    ) -> None:
        self.on_unavailable: OnUnavailable = on_unavailable
        self._target = target
        self._is_http1_logged = False
        self._is_tls_logged = False
        self.breaker: Breaker = Breaker(
            lambda: int(clock.monotonic_s() * US_PER_S),
            recovery_us=RECOVERY_US,
            jitter_us=lambda: random.randrange(JITTER_US),  # noqa: S311 - no secret
        )
        self._clock = clock
        self._throttle = LogThrottle(clock)

    def answered(self, answer: bytes | None, count: int) -> list[Decision]:
        """Return the ``count`` decisions of an answer. ``None``: the call ended with OK, without a message."""
        messages = _messages(answer, count)
        if messages is None:
            return self._unchecked(GARBLED, count)
        self.breaker.succeeded()
        now_s = self._clock.now_s()
        if count == 1:  # the usual case, without the time that a comprehension takes to begin
            return [decision_of(messages[0], now_s)]
        # Shared only where it may be needed, since a limit takes 2 octets or more.
        is_short = len(answer or b"") <= 2 * MAX_BATCH_LIMITS
        max_limits = MAX_LIMITS if is_short else min(MAX_LIMITS, MAX_BATCH_LIMITS // count)
        return [decision_of(message, now_s, max_limits) for message in messages]

    def held(self, answer: bytes | None) -> tuple[Decision, pb.HoldResponse]:
        """Return the decision of an answer to a hold, and the answer; an empty one if it has no meaning."""
        message = read(pb.HoldResponse, answer)
        if not message.answer.reason:
            return self._unchecked(GARBLED, 1)[0], pb.HoldResponse()
        self.breaker.succeeded()
        return decision_of(message.answer, self._clock.now_s()), message

    def not_held(self, error: CallError) -> Decision:
        """Return the decision on a hold whose call ended with a status."""
        if error.reason == TOO_MANY_HOLDS:
            self.breaker.succeeded()
            return too_many_holds(self._clock.now_s())
        return self.failed(error.code, error.details, 1)[0]

    def failed(self, code: grpc.StatusCode, details: str, count: int) -> list[Decision]:
        """Return decisions on ``count`` checks whose call ended with a status."""
        if code is grpc.StatusCode.INVALID_ARGUMENT and count == 1:
            # Bad input never fails open. In a batch the node answers such a check with INVALID_REQUEST.
            self.breaker.succeeded()
            return [refused(details, self._clock.now_s())]
        if HTTP1_PEER in details and not self._is_http1_logged:
            self._is_http1_logged = True
            with suppress(Exception):  # as in _unchecked
                _LOG.warning(
                    "%s answers HTTP/1.1, not gRPC; a node's gRPC port is 9090 by default",
                    self._target,
                )
        return self._unchecked(code.name, count)

    def tls_failed(self, reason: str) -> None:
        """Log once why a TLS connection failed. Never raises."""
        if not self._is_tls_logged:
            self._is_tls_logged = True
            with suppress(Exception):  # as in _unchecked
                _LOG.warning("no TLS connection to %s: %s", self._target, reason)

    def broken(self, error: BaseException, count: int) -> list[Decision]:
        """Return decisions on ``count`` checks whose call raised an error without a status. Never raises."""
        try:
            return self._unchecked(type(error).__name__, count)
        except Exception as defect:  # noqa: BLE001 - callers need an answer
            return last_resort(defect, count, self.on_unavailable)

    def not_asked(self, count: int) -> list[Decision]:
        """Return decisions on ``count`` checks that are not sent, because the breaker is not closed."""
        now_s = self._clock.now_s()
        return [unchecked(Reason.NOT_ASKED, "", now_s, self.on_unavailable) for _ in range(count)]

    def probe_of(self, requests: Sequence[bytes]) -> Sequence[bytes]:
        """Return what a probe sends in place of checks that are not sent: what is denied must not be charged."""
        if self.on_unavailable == "allow":
            return requests
        return [request + PEEK for request in requests]

    def _unchecked(self, why: str, count: int) -> list[Decision]:
        self.breaker.failed()
        calls = self._throttle.count()
        if calls:
            # A logging filter of the application that raises must not cost the answer. `why` is the name of a status
            # or of a class: text of the peer is not logged.
            with suppress(Exception):
                _LOG.warning(
                    "no usable answer from the rate limiter (%s), %d since the last warning: the client %s unless"
                    " the middleware or a view has its own on_unavailable",
                    why,
                    calls,
                    "allows checks" if self.on_unavailable == "allow" else "denies checks",
                )
        now_s = self._clock.now_s()
        return [unchecked(Reason.NO_ANSWER, why, now_s, self.on_unavailable) for _ in range(count)]


def last_resort(
    error: BaseException, count: int, on_unavailable: OnUnavailable = "allow"
) -> list[Decision]:
    """Return decisions when :class:`FailOpen` itself failed, such as when the application's clock raises.

    Reads the system's clock and does not log.
    """
    now_s, why = time.time(), type(error).__name__
    return [unchecked(Reason.NO_ANSWER, why, now_s, on_unavailable) for _ in range(count)]


def _messages(answer: bytes | None, count: int) -> Sequence[pb.RateLimitResponse] | None:
    """Return one message for each check, or ``None`` if the answer is something else."""
    if answer is None or len(answer) > MAX_ANSWER_BYTES * count:
        return None
    messages: Sequence[pb.RateLimitResponse]
    try:
        if count == 1:
            messages = [pb.RateLimitResponse.FromString(answer)]
        else:
            messages = pb.BatchRateLimitResponse.FromString(answer).responses
    except DecodeError:
        return None
    if len(messages) != count:
        return None
    for message in messages:
        if not (
            message.allowed or message.reason or message.reset_time or message.retry_after_seconds
        ):
            return None  # an empty message parses as any type; as this one it is a denial without reason or end
    return messages
