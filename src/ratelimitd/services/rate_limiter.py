"""The RateLimiter service: check one, check many.

A check, and a batch of few, is answered at once, with bytes: no task, no await. A long batch is answered in slices, so
that it never holds up the event loop for long. Never decides anything itself; see ADR 0009 for batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, Protocol

from ratelimitd.errors import CheckInvalidError, FieldViolation, InvalidInputError
from ratelimitd.model import Check, Decision
from ratelimitd.rpc.interface import Call, Methods
from ratelimitd.rules.book import RuleBook
from ratelimitd.services.bulk_checks import (
    MAX_ANSWER_BYTES,
    BulkChecker,
    BulkChecks,
    Question,
)
from ratelimitd.services.convert import answer_of, check_of, invalid_answer_of
from ratelimitd.services.varints import varint
from ratelimitd.services.wire import (
    ITEM_TAG,
    WireBatch,
    WireCheck,
    count_top_level,
    parse_batch,
    parse_check,
    split_batch,
)
from ratelimitd.stats import CheckStats
from ratelimiter.v1 import ratelimiter_pb2

SERVICE: Final = "ratelimiter.v1.RateLimiter"

MAX_BATCH_ITEMS: Final = 1_000
"""Checks in one call."""

SLICE_ITEMS: Final = 100
"""Checks that are answered at a stretch: 0.5 ms of the event loop; 1.6 ms when each is malformed in the dearest way."""

COUNT_ABOVE_BYTES: Final = 65_536
"""Longer batches are counted before they are parsed. Two million empty items fit into 4 MiB, and would take 330 MB of
memory only to be refused; 64 KiB of them take 5 MB, and an honest batch is seldom longer."""

_REQUESTS_FIELD: Final = 1

_RESPONSE_PREFIXES: Final = tuple(ITEM_TAG + varint(size) for size in range(MAX_ANSWER_BYTES + 1))
"""``BatchRateLimitResponse.responses`` by length; it has the number of ``BatchRateLimitRequest.requests``."""

AnswerItems = Callable[[int, int], bytes]
"""(start, stop) → the answers to these items of a batch, as a ``BatchRateLimitResponse``."""


class Checker(BulkChecker, Protocol):
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
        self._bulk = BulkChecks(limiter, stats, perf_counter_s)

    def methods(self) -> Methods:
        """The handlers by path."""
        return Methods(
            unary={
                f"/{SERVICE}/CheckRateLimit": self.check_rate_limit,
                f"/{SERVICE}/CheckRateLimitBatch": self.check_rate_limit_batch,
            },
            bulk={f"/{SERVICE}/CheckRateLimit": self._bulk.answer_calls},
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

    def check_rate_limit_batch(self, data: bytes, _call: Call) -> bytes | Awaitable[bytes]:
        """Answer up to ``MAX_BATCH_ITEMS`` checks; a malformed one is told so in its own answer.

        More than ``SLICE_ITEMS`` are answered later, slice by slice. Between two slices other calls have their turn,
        and a caller that leaves ends its batch there: what was decided until then stays charged.

        Raises:
            InvalidInputError: the bytes are no batch, or there are too many items; nothing was charged.
        """
        started_s = self._perf_counter_s()
        items = split_batch(data, MAX_BATCH_ITEMS)
        if items is not None and len(items) > SLICE_ITEMS:
            return self._answer_long(data, items, started_s)
        questions = self._bulk.read(items or ())
        if items is not None and None not in questions:
            answers = self._answer_in_bulk(items, questions, self._limiter.book, 0, len(items))
            self._observe(started_s, len(items))
            return answers
        requests = self._parsed(data)
        if len(requests) > SLICE_ITEMS:
            return self._answer_in_slices(partial(self._answer, requests), len(requests), started_s)
        answers = self._answer(requests, 0, len(requests))
        self._observe(started_s, len(requests))
        return answers

    def _parsed(self, data: bytes) -> Sequence[WireCheck]:
        """The items of a batch, for the general way.

        Raises:
            InvalidInputError: the bytes are no batch, or there are too many items.
        """
        try:
            return _parse_bounded(data).requests
        except InvalidInputError:
            self._stats.invalid_total += 1
            raise

    async def _answer_long(self, data: bytes, items: Sequence[bytes], started_s: float) -> bytes:
        """Read all items, then answer all: of a batch that is none, nothing is charged."""
        book = self._limiter.book
        questions: list[Question | None] = []
        for start in range(0, len(items), SLICE_ITEMS):
            # Also before the first one: splitting a long batch was a turn of its own.
            await asyncio.sleep(0)
            read = self._bulk.read(items[start : start + SLICE_ITEMS])
            if None in read:
                requests = self._parsed(data)
                parsed = partial(self._answer, requests)
                return await self._answer_in_slices(parsed, len(requests), started_s)
            questions += read
        answer = partial(self._answer_in_bulk, items, questions, book)
        return await self._answer_in_slices(answer, len(items), started_s)

    async def _answer_in_slices(self, answer: AnswerItems, count: int, started_s: float) -> bytes:
        slices = []
        for start in range(0, count, SLICE_ITEMS):
            await asyncio.sleep(0)
            slices.append(answer(start, start + SLICE_ITEMS))
        self._observe(started_s, count)
        # Messages one behind the other are one message with the repeated fields of all of them.
        return b"".join(slices)

    def _answer_in_bulk(  # noqa: PLR0917 - the first three are bound
        self,
        items: Sequence[bytes],
        questions: Sequence[Question | None],
        book: RuleBook | None,
        start: int,
        stop: int,
    ) -> bytes:
        parts = []
        asked = questions[start:stop]
        if self._limiter.book is not book:
            # It has changed between two slices, and new rules hold from the next check on.
            asked = self._bulk.read(items[start:stop])
        for index, answer in enumerate(self._bulk.answer(asked), start):
            if answer is None:
                parts.append(self._answer_each([parse_check(items[index])], index))
            else:
                parts += (_RESPONSE_PREFIXES[len(answer)], answer)
        return b"".join(parts)

    def _answer(self, requests: Sequence[WireCheck], start: int, stop: int) -> bytes:
        return self._answer_each(requests[start:stop], start)

    def _answer_each(self, requests: Sequence[WireCheck], start: int) -> bytes:
        """The answers to ``requests``, of which the first is item ``start`` of its batch."""
        answers = []
        for index, verdict in enumerate(self._decide([*map(_check_or_error, requests)]), start):
            if isinstance(verdict, CheckInvalidError):
                self._stats.invalid_total += 1
                answers.append(invalid_answer_of(verdict, f"requests[{index}]."))
            else:
                answers.append(answer_of(verdict))
        return ratelimiter_pb2.BatchRateLimitResponse(responses=answers).SerializeToString()

    def _decide(
        self, items: Sequence[Check | CheckInvalidError]
    ) -> Sequence[Decision | CheckInvalidError]:
        """A verdict for each item: the limiter's, or the reason why it was not asked."""
        decided = iter(
            self._limiter.check_batch([item for item in items if isinstance(item, Check)])
        )
        return [next(decided) if isinstance(item, Check) else item for item in items]

    def _observe(self, started_s: float, checks: int) -> None:
        if checks:
            self._stats.observe_latency(self._perf_counter_s() - started_s, checks)


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


def _check_or_error(message: WireCheck) -> Check | CheckInvalidError:
    try:
        return check_of(message)
    except CheckInvalidError as error:
        return error
