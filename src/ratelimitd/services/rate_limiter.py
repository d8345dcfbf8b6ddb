"""The RateLimiter service: check one, check many.

Both answer at once, with bytes: no task, no await. Never decides anything itself; see ADR 0009 for batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from ratelimitd.errors import CheckInvalidError, FieldViolation, InvalidInputError
from ratelimitd.model import Check, Decision
from ratelimitd.rpc.interface import Call, Methods
from ratelimitd.services.convert import answer_of, check_of, invalid_answer_of
from ratelimitd.services.wire import WireBatch, count_top_level, parse_batch, parse_check
from ratelimitd.stats import CheckStats
from ratelimiter.v1 import ratelimiter_pb2

SERVICE: Final = "ratelimiter.v1.RateLimiter"

MAX_BATCH_ITEMS: Final = 1_000
"""Checks in one call: about 2 ms of the event loop."""

COUNT_ABOVE_BYTES: Final = 65_536
"""Longer batches are counted before they are parsed. Two million empty items fit into 4 MiB, and would take 330 MB of
memory only to be refused; 64 KiB of them take 5 MB, and an honest batch is seldom longer."""

_REQUESTS_FIELD: Final = 1


class Checker(Protocol):
    """What this service needs of a :class:`ratelimitd.limiter.Limiter`."""

    def check(self, check: Check) -> Decision:
        """Answer one check; raises ``CheckInvalidError`` for a timestamp it refuses, and nothing else."""

    def check_batch(self, checks: Sequence[Check]) -> Sequence[Decision | CheckInvalidError]:
        """Answer checks as one by one in their order; answer i is to check i."""


class RateLimiterService:
    """Handlers of the check path. ``perf_counter_s`` is in seconds and measures how long a check takes."""

    def __init__(
        self, limiter: Checker, stats: CheckStats, perf_counter_s: Callable[[], float]
    ) -> None:
        self._limiter = limiter
        self._stats = stats
        self._perf_counter_s = perf_counter_s

    def methods(self) -> Methods:
        """The handlers by path."""
        return Methods(
            unary={
                f"/{SERVICE}/CheckRateLimit": self.check_rate_limit,
                f"/{SERVICE}/CheckRateLimitBatch": self.check_rate_limit_batch,
            }
        )

    def check_rate_limit(self, data: bytes, _call: Call) -> bytes:
        """Answer one check.

        Raises:
            InvalidInputError: the message is malformed; nothing was charged.
        """
        started_s = self._perf_counter_s()
        try:
            decision = self._limiter.check(check_of(parse_check(data)))
        except InvalidInputError:
            self._stats.invalid_total += 1
            raise
        answer = answer_of(decision).SerializeToString()
        self._stats.observe_latency(self._perf_counter_s() - started_s)
        return answer

    def check_rate_limit_batch(self, data: bytes, _call: Call) -> bytes:
        """Answer up to ``MAX_BATCH_ITEMS`` checks; a malformed one is told so in its own answer.

        Raises:
            InvalidInputError: the bytes are no batch, or there are too many items; nothing was charged.
        """
        started_s = self._perf_counter_s()
        try:
            batch = _parse_bounded(data)
        except InvalidInputError:
            self._stats.invalid_total += 1
            raise
        verdicts = self._decide(_checks_of(batch))
        answers = ratelimiter_pb2.BatchRateLimitResponse(
            responses=[
                invalid_answer_of(verdict)
                if isinstance(verdict, CheckInvalidError)
                else answer_of(verdict)
                for verdict in verdicts
            ]
        ).SerializeToString()
        if verdicts:
            self._stats.observe_latency(self._perf_counter_s() - started_s, len(verdicts))
        return answers

    def _decide(
        self, items: Sequence[Check | CheckInvalidError]
    ) -> Sequence[Decision | CheckInvalidError]:
        """A verdict for each item: the limiter's, or the reason why it was not asked."""
        decided = iter(
            self._limiter.check_batch([item for item in items if isinstance(item, Check)])
        )
        verdicts = [next(decided) if isinstance(item, Check) else item for item in items]
        self._stats.invalid_total += sum(
            isinstance(verdict, CheckInvalidError) for verdict in verdicts
        )
        return verdicts


def _parse_bounded(data: bytes) -> WireBatch:
    if len(data) > COUNT_ABOVE_BYTES:
        _refuse_above_bound(count_top_level(data, _REQUESTS_FIELD, MAX_BATCH_ITEMS))
    batch = parse_batch(data)
    _refuse_above_bound(len(batch.requests))
    return batch


def _refuse_above_bound(items: int) -> None:
    if items > MAX_BATCH_ITEMS:
        violation = FieldViolation("requests", f"must be at most {MAX_BATCH_ITEMS} items")
        raise InvalidInputError(violation)


def _checks_of(batch: WireBatch) -> list[Check | CheckInvalidError]:
    items: list[Check | CheckInvalidError] = []
    for index, message in enumerate(batch.requests):
        try:
            items.append(check_of(message, f"requests[{index}]."))
        except CheckInvalidError as error:
            items.append(error)
    return items
