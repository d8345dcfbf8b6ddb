"""A check that waits for the shared state, and how it is answered when that has answered."""

from __future__ import annotations

from asyncio import AbstractEventLoop, Future
from collections import deque
from collections.abc import Callable, Sequence
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
    Outcome,
    Rule,
)

if TYPE_CHECKING:
    from ratelimitd.cluster.sync import Partition

BEYOND_ANY_LIMIT = INT32_MAX + 1
"""A cost that no bucket has: the denial tells what is left, and when all of it is back."""


class PendingCheck:
    """One check that waits.

    Attributes:
        ask: what a batch asks for it; there is none before it is known that the store has to decide.
        answer: to the check: an outcome, or the error that stands for it.
        charged: whether the node's own view was charged when the store did not answer in time.
    """

    __slots__ = ("answer", "ask", "charged", "cost", "now_us", "peek", "rule")

    def __init__(
        self,
        rule: Rule,
        now_us: int,
        cost: int,
        *,
        peek: bool,
        answer: Future[Outcome | RateLimitdError],
    ) -> None:
        self.rule = rule
        self.now_us = now_us
        self.cost = cost
        self.peek = peek
        self.answer = answer
        self.ask: Ask
        self.charged = False

    def resolve(self, outcome: Outcome | RateLimitdError) -> None:
        """Answer, unless the caller has left."""
        if not self.answer.done():
            self.answer.set_result(outcome)

    def fail(self, error: Exception) -> None:
        """Raise an unexpected error in the caller."""
        if not self.answer.done():
            self.answer.set_exception(error)


def granted(view: LocalView, now_us: int, later: int = 0) -> Outcome:
    """What a check is told that the store has allowed and charged; ``view`` has heard of it.

    ``later`` tokens were granted behind it in the same batch: it is told what was left before those.
    """
    left = view.peek(now_us, BEYOND_ANY_LIMIT)
    remaining = left[1] + later
    retry_after = 0 if remaining else view.peek(now_us, 1)[3]
    return ALLOWED, remaining, left[2], retry_after, WITHIN_LIMIT, left[5]


def refused(view: LocalView, now_us: int, cost: int) -> Outcome:
    """What a check is told that the store has not allowed."""
    outcome = view.peek(now_us, cost)
    if not outcome[0]:
        return outcome
    # There was not enough when the store was asked, and by now there is: it may try again as soon as it can be told.
    left = view.peek(now_us, BEYOND_ANY_LIMIT)
    return DENIED, left[1], left[2], 1, LIMIT_EXCEEDED, left[5]


HASH_TAGS: Final = 256
"""Buckets are spread over so many parts by the first byte of their name. Never changes."""


class Bucket:
    """One bucket.

    Attributes:
        key: its key on this node.
        name: its name in the store.
        tag: the part of the store that it belongs to.
        view: what this node knows of it.
        is_dirty: whether there is something to settle that no batch carries yet.
        is_denied: whether a check of it was denied since it was last read for that.
        is_watched: whether it is read again now and then.
        is_cached: whether checks find it by its key; else it lives until it is settled.
    """

    __slots__ = ("is_cached", "is_denied", "is_dirty", "is_watched", "key", "name", "tag", "view")

    def __init__(  # noqa: PLR0917 - made for every miss
        self, key: bytes, name: bytes, tag: Partition, rule: Rule, base: SharedState | None
    ) -> None:
        self.key = key
        self.name = name
        self.tag = tag
        self.view = LocalView(rule, base)
        self.is_dirty = self.is_denied = self.is_watched = self.is_cached = False


class Requested:
    """Those that wait for the next batch, and those that the last one has taken, until it is answered."""

    __slots__ = ("_taken", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[bytes, list[PendingCheck]] = {}
        self._taken: dict[bytes, list[PendingCheck]] = {}

    @property
    def are_waiting(self) -> bool:
        """Whether there are any for the next batch."""
        return bool(self._waiting)

    @property
    def are_taken(self) -> bool:
        """Whether the last batch has taken any along."""
        return bool(self._taken)

    def wait(self, bucket: Bucket, check: PendingCheck) -> None:
        """Let the next batch take a check along."""
        check.ask = bucket.view.ask(check.now_us, check.cost)
        self._waiting.setdefault(bucket.name, []).append(check)

    def withdraw(self, bucket: Bucket, check: PendingCheck) -> None:
        """Do not take a check to the store, unless a batch has done so already."""
        waiting = self._waiting.get(bucket.name, [])
        if check not in waiting:
            return
        bucket.view.withdraw(check.ask)
        waiting.remove(check)
        if not waiting:
            del self._waiting[bucket.name]

    def take(self, bucket: Bucket) -> None:
        """A batch takes along what waits of a bucket."""
        if bucket.name in self._waiting:
            self._taken[bucket.name] = self._waiting.pop(bucket.name)

    def decide(self, bucket: Bucket, grants: Sequence[bool]) -> None:
        """The store has decided what the batch took along of a bucket, in order; its view has heard of the rest."""
        if grants:
            bucket.view.note_grants(grants)
        verdicts = [*zip(self._taken.pop(bucket.name, ()), grants, strict=True)]
        later = sum(check.cost for check, is_granted in verdicts if is_granted)
        for check, is_granted in verdicts:
            if is_granted:
                later -= check.cost
            _decide(bucket, check, later if is_granted else None)

    def forget_taken(self) -> None:
        """The batch will not be answered."""
        self._taken = {}


def _decide(bucket: Bucket, check: PendingCheck, later: int | None) -> None:
    """The store has refused a check (``None``), or granted it and so many tokens behind it."""
    view, now_us, cost = bucket.view, check.now_us, check.cost
    if check.answer.done():
        if later is not None and check.charged:
            view.pay(cost)
    elif later is None:
        check.resolve(refused(view, now_us, cost))
    else:
        check.resolve(granted(view, now_us, later))


class _Wait(NamedTuple):
    until_us: int
    bucket: Bucket
    check: PendingCheck


class Deadlines:
    """The checks that wait, all for ``answer_s``, so in the order of time; one timer for all.

    ``give_up`` is called for each that was not answered in time, and for each whose caller has left.
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
        self._waits: deque[_Wait] = deque()

    def add(self, bucket: Bucket, check: PendingCheck) -> None:
        """A check waits from now on."""
        if not self._waits:
            self._timers.call_later(self._answer_s, self._look)
        until_us = self._clock.monotonic_us() + round(self._answer_s * US_PER_S)
        self._waits.append(_Wait(until_us, bucket, check))

    def _look(self) -> None:
        now_us = self._clock.monotonic_us()
        try:
            self._give_up_late(now_us)
        finally:
            # One failure must not keep the others waiting.
            if self._waits:
                wait_us = max(0, self._waits[0].until_us - now_us)
                self._timers.call_later(wait_us / US_PER_S, self._look)

    def _give_up_late(self, now_us: int) -> None:
        while self._waits:
            until_us, bucket, check = self._waits[0]
            is_answered = check.answer.done()
            if until_us > now_us and not is_answered:
                return
            self._waits.popleft()
            if not is_answered or check.answer.cancelled():
                self._give_up(bucket, check)
