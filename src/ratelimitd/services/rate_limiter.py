"""The RateLimiter service: check one, check many.

Checks and short batches are answered at once, with bytes, without a task or an await. Long batches are answered in
slices, which share one time budget with those of all other callers. Checks that only the shared state can decide are
awaited together for a whole batch. The limiter makes all decisions; see ADR 0009 for batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple, cast

from ratelimitd.counters import CheckStats
from ratelimitd.errors import CheckInvalidError, FieldViolation, InvalidInputError
from ratelimitd.fair_queue import FairQueue, FairSlots
from ratelimitd.limiter.limiter import Limiter
from ratelimitd.model import Check, Decision
from ratelimitd.rpc.interface import Call, Methods
from ratelimitd.rules.book import RuleBook
from ratelimitd.services.bulk_checks import MAX_ANSWER_BYTES, BulkChecks, ParsedCheck
from ratelimitd.services.convert import (
    CONTRACT_IDENTITIES,
    Identities,
    answer_of,
    check_of,
    invalid_answer_of,
)
from ratelimitd.services.wire import (
    ITEM_TAG,
    WireCheck,
    count_items,
    parse_batch,
    parse_check,
    split_batch,
)
from ratelimitd.services.wire_format import varint
from ratelimiter.v1 import ratelimiter_pb2

SERVICE: Final = "ratelimiter.v1.RateLimiter"

MAX_BATCH_ITEMS: Final = 1_000
"""Checks in one call."""

MAX_LONG_BATCHES: Final = 8
"""Long batches in progress; others wait unparsed. Each in progress holds about 5,000 objects, all of which a full
garbage collection visits: 100 ms with 64 batches, 10 ms with 8."""

SHORT_ITEMS: Final = 100
"""Checks of a batch that are answered in one step: 0.5 ms of the event loop, at worst 1.6 ms for malformed ones."""

SLICE_ITEMS: Final = 50
"""Checks per step of a longer batch."""

MAX_ASKS: Final = 2
"""Short batches, or slices of long ones, that wait for the shared state at a time. Under 1,000 batches, other callers'
checks have a p99 of 10 ms with 100 checks ahead of them, 15 ms with 200."""

COUNT_ABOVE_BYTES: Final = 65_536
"""Items of longer batches are counted before parsing. 4 MiB hold two million empty items, which would take 330 MB to
parse; 64 KiB take 5 MB. Honest batches are seldom longer."""

_RESPONSE_PREFIXES: Final = tuple(ITEM_TAG + varint(size) for size in range(MAX_ANSWER_BYTES + 1))
"""Tag and length of an item of ``BatchRateLimitResponse.responses``, whose field number is that of
``BatchRateLimitRequest.requests``."""


class Waiting(NamedTuple):
    """An item of a batch that waits for the shared state."""

    item: int
    check: Check


Parts = Sequence[bytes | Waiting]
"""Answers to items of a batch: pieces of a ``BatchRateLimitResponse``, in order."""

Verdicts = Sequence[Decision | CheckInvalidError]
"""The shared state's decisions on checks that waited, in their order."""

AnswerItems = Callable[[int, int], Parts]
"""(start, stop) → the answers to these items of a batch."""


class RateLimiterService:
    """Handlers of the check path.

    ``perf_counter_s`` is in seconds and measures the latency of checks; ``queue`` runs the slices of long batches.
    """

    def __init__(
        self,
        limiter: Limiter,
        stats: CheckStats,
        perf_counter_s: Callable[[], float],
        queue: FairQueue,
        *,
        identities: Identities = CONTRACT_IDENTITIES,
    ) -> None:
        self._identities = identities
        self._limiter = limiter
        self._stats = stats
        self._perf_counter_s = perf_counter_s
        self._queue = queue
        self._long_batches = FairSlots(MAX_LONG_BATCHES)
        self._asks = FairSlots(MAX_ASKS)
        self._bulk = BulkChecks(limiter, stats, perf_counter_s, identities)

    def methods(self) -> Methods:
        """Return the handlers by path."""
        return Methods(
            unary={
                f"/{SERVICE}/CheckRateLimit": self.check_rate_limit,
                f"/{SERVICE}/CheckRateLimitBatch": self.check_rate_limit_batch,
            },
            bulk={f"/{SERVICE}/CheckRateLimit": self._bulk.answer_calls},
        )

    def check_rate_limit(self, data: bytes, call: Call) -> bytes | Awaitable[bytes]:
        """Answer one check.

        Raises:
            InvalidInputError: the message is malformed; nothing was charged.
        """
        started_s = self._perf_counter_s()
        try:
            check = check_of(parse_check(data), self._identities)
            decision = self._limiter.check(check)
        except InvalidInputError:
            self._stats.invalid_total += 1
            raise
        if decision is None:
            return self._wait_for_one(check, call.time_remaining_s(), started_s)
        answer = answer_of(decision).SerializeToString()
        self._stats.observe_latency(self._perf_counter_s() - started_s)
        return answer

    async def _wait_for_one(
        self, check: Check, remaining_s: float | None, started_s: float
    ) -> bytes:
        [verdict] = await self._limiter.wait([check], remaining_s)
        if isinstance(verdict, CheckInvalidError):
            self._stats.invalid_total += 1
            raise verdict
        self._observe(started_s, 1)
        return answer_of(verdict).SerializeToString()

    def check_rate_limit_batch(self, data: bytes, call: Call) -> bytes | Awaitable[bytes]:
        """Answer up to ``MAX_BATCH_ITEMS`` checks; a malformed one gets its error in its own answer.

        More than ``SHORT_ITEMS`` are answered later, slice by slice, in rotation with other callers' large calls. If
        the caller leaves, the batch ends after the current slice; decided checks stay charged.

        Raises:
            InvalidInputError: the bytes are not a batch, or there are too many items; nothing was charged.
        """
        started_s = self._perf_counter_s()
        items = split_batch(data, MAX_BATCH_ITEMS)
        if items is not None and len(items) > SHORT_ITEMS:
            return self._answer_long(call.peer, data, started_s)
        checks = self._bulk.read(items or ())
        if items is not None and None not in checks:
            parts = self._answer_in_bulk(items, checks, self._limiter.scopes.book, 0, len(items))
            return self._joined(call, parts, started_s)
        requests = self._parsed(data)
        if len(requests) > SHORT_ITEMS:
            parsed = partial(self._answer, requests)
            return self._answer_in_slices(call.peer, parsed, len(requests), started_s)
        return self._joined(call, self._answer(requests, 0, len(requests)), started_s)

    def _parsed(self, data: bytes) -> Sequence[WireCheck]:
        """Parse the items of a batch, for the general path.

        Raises:
            InvalidInputError: the bytes are not a batch, or there are too many items.
        """
        try:
            if len(data) > COUNT_ABOVE_BYTES:
                _refuse_above_bound(count_items(data, MAX_BATCH_ITEMS))
            requests: Sequence[WireCheck] = parse_batch(data).requests
            _refuse_above_bound(len(requests))
        except InvalidInputError:
            self._stats.invalid_total += 1
            raise
        return requests

    async def _answer_long(self, peer: str, data: bytes, started_s: float) -> bytes:
        """Read all items, then answer all: nothing is charged if one is malformed."""
        async with self._long_batches.held(peer):
            # Split again, in 0.15 ms: keeping a million items of waiting batches caused garbage collections of 50 ms.
            items = cast("list[bytes]", split_batch(data, MAX_BATCH_ITEMS))
            book = self._limiter.scopes.book
            checks: list[ParsedCheck | None] = []
            for start in range(0, len(items), SLICE_ITEMS):
                messages = items[start : start + SLICE_ITEMS]
                read = await self._queue.run(peer, partial(self._bulk.read, messages))
                if None in read:
                    requests = self._parsed(data)
                    parsed = partial(self._answer, requests)
                    return await self._answer_in_slices(peer, parsed, len(requests), started_s)
                checks += read
            answer = partial(self._answer_in_bulk, items, checks, book)
            return await self._answer_in_slices(peer, answer, len(items), started_s)

    async def _answer_in_slices(
        self, peer: str, answer: AnswerItems, count: int, started_s: float
    ) -> bytes:
        slices: list[tuple[Parts, asyncio.Task[Verdicts] | None]] = []
        async with asyncio.TaskGroup() as asking:
            for start in range(0, count, SLICE_ITEMS):
                parts = await self._queue.run(peer, partial(answer, start, start + SLICE_ITEMS))
                asked: asyncio.Task[Verdicts] | None = None
                if checks := _waiting(parts):
                    await self._asks.take(peer)
                    asked = asking.create_task(self._limiter.wait(checks))
                    # Also after a task that was cancelled before it began.
                    asked.add_done_callback(lambda _: self._asks.release())
                slices.append((parts, asked))
        answers: list[bytes] = []
        for parts, asked in slices:
            if asked is None:
                answers += cast("Sequence[bytes]", parts)
            else:
                settle = partial(self._settled, parts, iter(asked.result()))
                answers += await self._queue.run(peer, settle)
        self._observe(started_s, count)
        return b"".join(answers)

    def _joined(self, call: Call, parts: Parts, started_s: float) -> bytes | Awaitable[bytes]:
        """Return the answer to a short batch, at once unless an item waits for the shared state."""
        checks = _waiting(parts)
        if checks:
            return self._wait_for_many(call, parts, checks, started_s)
        self._observe(started_s, len(parts))
        # The concatenation of messages is one message with the repeated fields of all of them.
        return b"".join(cast("Sequence[bytes]", parts))

    async def _wait_for_many(
        self, call: Call, parts: Parts, checks: Sequence[Check], started_s: float
    ) -> bytes:
        async with self._asks.held(call.peer):
            verdicts = await self._limiter.wait(checks, call.time_remaining_s())
        answers = self._settled(parts, iter(verdicts))
        self._observe(started_s, len(parts))
        return b"".join(answers)

    def _settled(
        self, parts: Parts, verdicts: Iterator[Decision | CheckInvalidError]
    ) -> list[bytes]:
        """Return the answers to items, with verdicts in place of those that waited."""
        return [
            part if isinstance(part, bytes) else self._item(part.item, next(verdicts))
            for part in parts
        ]

    def _answer_in_bulk(  # noqa: PLR0917 - the first three are bound
        self,
        items: Sequence[bytes],
        checks: Sequence[ParsedCheck | None],
        book: RuleBook | None,
        start: int,
        stop: int,
    ) -> Parts:
        parts: list[bytes | Waiting] = []
        asked = checks[start:stop]
        if self._limiter.scopes.book is not book:
            # The rules have changed since the items were read: read them again.
            asked = self._bulk.read(items[start:stop])
        for index, answer in enumerate(self._bulk.answer(asked), start):
            if answer is None:
                parts += self._answer_each([parse_check(items[index])], index)
            else:
                parts.append(_RESPONSE_PREFIXES[len(answer)] + answer)
        return parts

    def _answer(self, requests: Sequence[WireCheck], start: int, stop: int) -> Parts:
        return self._answer_each(requests[start:stop], start)

    def _answer_each(self, requests: Sequence[WireCheck], start: int) -> Parts:
        """Answer ``requests``; the first is item ``start`` of its batch."""
        checks = [_check_or_error(request, self._identities) for request in requests]
        decided = iter(
            self._limiter.check_batch([check for check in checks if isinstance(check, Check)])
        )
        parts: list[bytes | Waiting] = []
        for index, check in enumerate(checks, start):
            verdict = next(decided) if isinstance(check, Check) else check
            if verdict is None:
                parts.append(Waiting(index, cast("Check", check)))
            else:
                parts.append(self._item(index, verdict))
        return parts

    def _item(self, index: int, verdict: Decision | CheckInvalidError) -> bytes:
        """Return the encoded answer of item ``index``."""
        if isinstance(verdict, CheckInvalidError):
            self._stats.invalid_total += 1
            answer = invalid_answer_of(verdict, f"requests[{index}].")
        else:
            answer = answer_of(verdict)
        return ratelimiter_pb2.BatchRateLimitResponse(responses=[answer]).SerializeToString()

    def _observe(self, started_s: float, checks: int) -> None:
        if checks:
            self._stats.observe_latency(self._perf_counter_s() - started_s, checks)


def _waiting(parts: Parts) -> list[Check]:
    """Return the checks of items that wait for the shared state."""
    return [part.check for part in parts if isinstance(part, Waiting)]


def _refuse_above_bound(items: int) -> None:
    if items > MAX_BATCH_ITEMS:
        violation = FieldViolation("requests", f"must be at most {MAX_BATCH_ITEMS} items")
        raise InvalidInputError(violation)


def _check_or_error(message: WireCheck, identities: Identities) -> Check | CheckInvalidError:
    try:
        return check_of(message, identities)
    except CheckInvalidError as error:
        return error
