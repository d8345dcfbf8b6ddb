"""What goes out for checks and what becomes of what comes back: the part that both clients have in common.

The only place that fails open. Whatever a call ends with – an answer, a status, bytes that mean nothing – becomes
decisions here, and the breaker and the log hear of it. Never does I/O itself. See ADR 0034.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import grpc
from google.protobuf.message import DecodeError

from ratelimitd_client.check import batch_of
from ratelimitd_client.clock import Clock
from ratelimitd_client.decision import Decision, Reason, decision_of, let_through, refused
from ratelimitd_client.pace import LogThrottle
from ratelimitd_wire.breaker import US_PER_S, Breaker
from ratelimiter.v1 import ratelimiter_pb2 as pb

CHECK: Final = "/ratelimiter.v1.RateLimiter/CheckRateLimit"
BATCH: Final = "/ratelimiter.v1.RateLimiter/CheckRateLimitBatch"

MAX_ANSWER_BYTES: Final = 4_096
"""More than the answer to one check ever takes: what is longer is not ours, and is not parsed. Empty messages in
4 MiB would take longer than a deadline."""

GARBLED: Final = "GARBLED"
"""What came in place of an answer, when it was no message of the contract, or not one for each check."""

RECOVERY_US: Final = 250_000
"""Pause of an open breaker before a probe. A probe is a call whose caller does not wait for it, so it may come often: a
service that returns is used again within a second."""

JITTER_US: Final = 125_000
"""At most this is added at random, so that callers do not return at one instant."""

_LOG: Final = logging.getLogger("ratelimitd_client")


def path_of(requests: Sequence[bytes]) -> str:
    """The method that answers so many checks."""
    return CHECK if len(requests) == 1 else BATCH


def question_of(requests: Sequence[bytes]) -> bytes:
    """The message that asks them."""
    return requests[0] if len(requests) == 1 else batch_of(requests)


def last_resort(error: BaseException, count: int) -> list[Decision]:
    """The decisions on ``count`` checks where what their call ended with could not be turned into any.

    As when a clock of the application's raises; so this reads the system's clock and does not log.
    """
    now_s = time.time()
    return [let_through(Reason.NO_ANSWER, type(error).__name__, now_s) for _ in range(count)]


class FailOpen:
    """Turns what calls end with into decisions. Threads may share it."""

    __slots__ = ("_clock", "_warnings", "breaker")

    def __init__(self, clock: Clock) -> None:
        self.breaker: Breaker = Breaker(
            lambda: int(clock.monotonic_s() * US_PER_S),
            recovery_us=RECOVERY_US,
            jitter_us=lambda: random.randrange(JITTER_US),  # noqa: S311 - no secret
        )
        self._clock = clock
        self._warnings = _Warnings(clock)

    def answered(self, answer: bytes | None, count: int) -> list[Decision]:
        """The decisions on ``count`` checks that a node's answer holds; ``None``: there was none, and no error."""
        messages = _messages(answer, count)
        if messages is None:
            return self._let_through(GARBLED, count)
        self.breaker.succeeded()
        now_s = self._clock.now_s()
        return [decision_of(message, now_s) for message in messages]

    def failed(self, code: grpc.StatusCode, details: str, count: int) -> list[Decision]:
        """The decisions on ``count`` checks whose call ended with a status."""
        if code is grpc.StatusCode.INVALID_ARGUMENT and count == 1:
            # Bad input fails open nowhere. In a batch such a check has this answer from the node.
            self.breaker.succeeded()
            return [refused(details, self._clock.now_s())]
        return self._let_through(code.name, count)

    def broken(self, error: BaseException, count: int) -> list[Decision]:
        """The decisions on ``count`` checks whose call ended with an error that is no status; never raises."""
        try:
            return self._let_through(type(error).__name__, count)
        except Exception as defect:  # noqa: BLE001 - whatever it is, those who wait need an answer
            return last_resort(defect, count)

    def not_asked(self, count: int) -> list[Decision]:
        """Return decisions on ``count`` checks that are not sent, because the breaker is not closed."""
        now_s = self._clock.now_s()
        return [let_through(Reason.NOT_ASKED, "", now_s) for _ in range(count)]

    def _let_through(self, why: str, count: int) -> list[Decision]:
        self.breaker.failed()
        self._warnings.warn(why)
        now_s = self._clock.now_s()
        return [let_through(Reason.NO_ANSWER, why, now_s) for _ in range(count)]


def _messages(answer: bytes | None, count: int) -> Sequence[pb.RateLimitResponse] | None:
    """One message for each check, or ``None`` if that is not what came."""
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
            return None  # an empty message parses as anything: a denial without a reason, and without an end
    return messages


class _Warnings:
    """One line a second at most. It tells no more than the name of a status: what a peer writes is not ours to log."""

    __slots__ = ("_pace",)

    def __init__(self, clock: Clock) -> None:
        self._pace = LogThrottle(clock)

    def warn(self, why: str) -> None:
        """A call had no usable answer."""
        calls = self._pace.count()
        if not calls:
            return
        # A logging filter of the application's that raises must not cost anybody the answer.
        with suppress(Exception):
            _LOG.warning(
                "the rate limiter gave no usable answer (%s), %d since the last warning: its checks are let through",
                why,
                calls,
            )
