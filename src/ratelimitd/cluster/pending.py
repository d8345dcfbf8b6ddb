"""Checks that wait for the shared state, and their answers."""

from __future__ import annotations

from asyncio import AbstractEventLoop, Future, TimerHandle
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

from ratelimitd.clock import Clock
from ratelimitd.errors import RateLimitdError
from ratelimitd.ledger.local_view import LocalView
from ratelimitd.ledger.shared_state import Ask, SharedState
from ratelimitd.model import (
    ALLOWED,
    DENIED,
    INT32_MAX,
    LIMIT_EXCEEDED,
    US_PER_S,
    WITHIN_LIMIT,
    Limit,
    Outcome,
)

if TYPE_CHECKING:
    from ratelimitd.cluster.store_servers import StoreServer
    from ratelimitd.cluster.sync import Partition

NO_DEADLINE_US: Final = 1 << 62
"""A time, in µs, that no clock reaches."""

BEYOND_ANY_LIMIT = INT32_MAX + 1
"""A cost above any limit: its denial contains the remaining tokens and the reset time."""


class PendingCheck:
    """One waiting check.

    Attributes:
        ask: its part of a batch; unset until the store has to decide.
        answer: the outcome, or the error in its place.
        answer_by_us: when its caller needs the answer, by the monotonic clock.
        charged: the node's own view was charged, because the store did not answer in time.
    """

    __slots__ = ("answer", "answer_by_us", "ask", "charged", "cost", "now_us", "peek", "rule")

    def __init__(
        self,
        rule: Limit,
        now_us: int,
        cost: int,
        *,
        peek: bool,
        answer: Future[Outcome | RateLimitdError],
        answer_by_us: int = NO_DEADLINE_US,
    ) -> None:
        self.rule = rule
        self.now_us = now_us
        self.cost = cost
        self.peek = peek
        self.answer = answer
        self.answer_by_us = answer_by_us
        self.ask: Ask
        self.charged = False

    @property
    def is_answered(self) -> bool:
        """Whether it is decided, or the caller has left."""
        return self.answer.done()

    @property
    def has_left(self) -> bool:
        """Whether the caller has left."""
        return self.answer.cancelled()

    def was_allowed(self, shared: SharedState, later: int) -> None:
        """Handle a grant of the store; ``shared`` includes its charge, unless it peeks, and ``later`` tokens."""

    def resolve(self, outcome: Outcome | RateLimitdError) -> None:
        """Answer, unless the caller has left."""
        if not self.answer.done():
            self.answer.set_result(outcome)

    def fail(self, error: Exception) -> None:
        """Raise an unexpected error in the caller."""
        if not self.answer.done():
            self.answer.set_exception(error)


def decided(check: PendingCheck, server: StoreServer, outcome: Outcome | RateLimitdError) -> None:
    """Resolve a check that only the store could decide."""
    server.report(outcome)
    check.resolve(outcome)


def resolve_first(check: PendingCheck, outcome: Outcome, shared: SharedState) -> None:
    """Resolve the first check of a bucket; ``shared`` is the state after it."""
    if outcome[0]:
        check.was_allowed(shared, 0)
    check.resolve(outcome)


def granted(view: LocalView, now_us: int, later: int) -> Outcome:
    """Return the outcome of a check that the store allowed; ``view`` already includes the charge.

    ``later`` tokens were granted after it in the same batch; they count as remaining.
    """
    left = view.peek(now_us, BEYOND_ANY_LIMIT)
    remaining = left[1] + later
    retry_after = 0 if remaining else view.peek(now_us, 1)[3]
    return ALLOWED, remaining, left[2], retry_after, WITHIN_LIMIT, left[5]


def refused(view: LocalView, now_us: int, cost: int) -> Outcome:
    """Return the outcome of a check that the store denied."""
    outcome = view.peek(now_us, cost)
    if not outcome[0]:
        return outcome
    # The store had too few tokens, but there are enough by now: return the shortest delay.
    left = view.peek(now_us, BEYOND_ANY_LIMIT)
    return DENIED, left[1], left[2], 1, LIMIT_EXCEEDED, left[5]


HASH_TAGS: Final = 256
"""Number of hash tags; a bucket's is the first byte of its name. Never changes."""


class Bucket:
    """One bucket.

    Attributes:
        key: key on this node; empty while unknown: the bucket was cold and has not been used since.
        name: name in the store.
        tag: its partition of the store.
        view: the node's view of it.
        is_dirty: has unsettled spends that no batch contains.
        is_watched: a check was denied, or was a peek, since the last background read.
        is_queued: is read again in the background.
        is_cached: is in the cache, by its key; otherwise it exists until it is settled.
    """

    __slots__ = ("is_cached", "is_dirty", "is_queued", "is_watched", "key", "name", "tag", "view")

    def __init__(  # noqa: PLR0917 - called for every miss
        self, key: bytes, name: bytes, tag: Partition, rule: Limit, base: SharedState | None
    ) -> None:
        self.key = key
        self.name = name
        self.tag = tag
        self.view = tag.make_view(rule, base)
        self.is_dirty = self.is_watched = self.is_queued = self.is_cached = False

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to settle. A dirty bucket is unsettled even if a reset has dropped its spends."""
        return self.view.is_clean and not self.is_dirty


class Requested:
    """Checks that wait for the next batch, and those in the batch in flight."""

    __slots__ = ("_taken", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[bytes, list[PendingCheck]] = {}
        self._taken: dict[bytes, list[PendingCheck]] = {}

    @property
    def are_waiting(self) -> bool:
        """Whether checks wait for the next batch."""
        return bool(self._waiting)

    @property
    def are_taken(self) -> bool:
        """Whether the batch in flight contains checks."""
        return bool(self._taken)

    def wait(self, bucket: Bucket, check: PendingCheck) -> None:
        """Add a check to the next batch."""
        check.ask = bucket.view.ask(check.now_us, check.cost)
        self._waiting.setdefault(bucket.name, []).append(check)

    def withdraw(self, bucket: Bucket, check: PendingCheck) -> bool:
        """Remove a check from the next batch; false if it was sent."""
        waiting = self._waiting.get(bucket.name, [])
        if check not in waiting:
            return False
        bucket.view.withdraw(check.ask)
        waiting.remove(check)
        if not waiting:
            del self._waiting[bucket.name]
        return True

    def take(self, bucket: Bucket) -> None:
        """Move the waiting checks of a bucket into the batch."""
        if bucket.name in self._waiting:
            self._taken[bucket.name] = self._waiting.pop(bucket.name)

    def decide(
        self, bucket: Bucket, grants: Sequence[bool], shared: SharedState | None = None
    ) -> None:
        """Resolve the checks of a bucket in the batch, in order; its view includes the rest of the reply.

        ``shared``: the state after the batch; ``None`` if it was sent again, since the reply may show a later state.
        """
        if grants:
            bucket.view.record_grants(grants)
        verdicts = [*zip(self._taken.pop(bucket.name, ()), grants, strict=True)]
        later = sum(check.cost for check, is_granted in verdicts if is_granted)
        for check, is_granted in verdicts:
            if is_granted:
                later -= check.cost
                if shared is not None and not check.is_answered:
                    check.was_allowed(shared, later)
            _decide(bucket, check, later if is_granted else None)

    def forget_taken(self) -> None:
        """Drop the checks of a batch that will not be answered."""
        self._taken = {}


def _decide(bucket: Bucket, check: PendingCheck, later: int | None) -> None:
    """Resolve a check: denied if ``later`` is ``None``, else granted, with ``later`` tokens granted after it."""
    view, now_us, cost = bucket.view, check.now_us, check.cost
    if check.is_answered:
        if later is not None and check.charged:
            view.pay(cost)
    elif later is None:
        check.resolve(refused(view, now_us, cost))
    else:
        check.resolve(granted(view, now_us, later))


class _Wait(NamedTuple):
    until_us: int
    number: int
    bucket: Bucket
    check: PendingCheck


class Deadlines:
    """Deadlines of waiting checks, with one timer: each waits for ``answer_s``, or until its caller needs the answer.

    ``give_up`` is called for each check that was not answered in time or whose caller has left.
    """

    def __init__(
        self,
        clock: Clock,
        timers: AbstractEventLoop,
        answer_s: float,
        give_up: Callable[[Bucket, PendingCheck], None],
    ) -> None:
        self._clock = clock
        self._timers = timers
        self._answer_s = answer_s
        self._give_up = give_up
        self._numbers = count()
        self._waits: list[_Wait] = []
        """A heap."""
        self._timer: TimerHandle | None = None

    def add(self, bucket: Bucket, check: PendingCheck) -> None:
        """Add a check that begins to wait."""
        now_us = self._clock.monotonic_us()
        until_us = min(now_us + round(self._answer_s * US_PER_S), check.answer_by_us)
        wait = _Wait(until_us, next(self._numbers), bucket, check)
        heappush(self._waits, wait)
        if self._waits[0] is wait:
            self._look_later(now_us)

    def _look_later(self, now_us: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        wait_us = max(0, self._waits[0].until_us - now_us)
        self._timer = self._timers.call_later(wait_us / US_PER_S, self._look)

    def _look(self) -> None:
        now_us = self._clock.monotonic_us()
        try:
            self._give_up_late(now_us)
        finally:
            # A failure of one check must not delay the others.
            if self._waits:
                self._look_later(now_us)

    def _give_up_late(self, now_us: int) -> None:
        while self._waits:
            until_us, _, bucket, check = self._waits[0]
            is_answered = check.is_answered
            if until_us > now_us and not is_answered:
                return
            heappop(self._waits)
            if not is_answered or check.has_left:
                self._give_up(bucket, check)
