"""Checks on several shared buckets: all are charged, or none is. See ADR 0051.

Requests all parts concurrently, and answers when every part is decided. The decision itself is in
:mod:`ratelimitd.ledger.several`.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, Future
from collections.abc import Sequence
from typing import Protocol, TypeAlias

from ratelimitd.algorithms.several import ENFORCE, Charge
from ratelimitd.cluster.pending import NO_DEADLINE_US, Bucket, PendingCheck
from ratelimitd.errors import BreakerOpenError
from ratelimitd.ledger.accounts import Refund
from ratelimitd.ledger.several import Part, conclude, denies
from ratelimitd.ledger.shared_state import SharedState, refund_of
from ratelimitd.model import CONCURRENCY, Outcome

Outcomes: TypeAlias = Sequence[Outcome | Exception]
"""Outcome of each bucket of a check; an error if it could not be decided."""


class PartCheck(PendingCheck):
    """The part of a waiting check that concerns one bucket.

    Attributes:
        key: the bucket's key on this node.
        bucket: the bucket; unset unless ``is_known``.
        part: its reservation and outcome.
        is_counted: an unknown bucket counts as a miss.
    """

    __slots__ = ("_is_resolved", "_joint", "bucket", "is_counted", "is_known", "key", "part")

    bucket: Bucket

    def __init__(self, joint: JointCheck, charge: Charge, cost: int, *, peek: bool) -> None:
        self.key, self.rule, _ = charge
        self.now_us, self.cost = joint.now_us, cost
        self.peek = peek or self.rule.algorithm is CONCURRENCY  # only holds take slots
        self.answer_by_us = joint.answer_by_us
        self.charged = self.is_counted = self.is_known = False
        self.part = Part(self.rule, cost)
        self._joint = joint
        self._is_resolved = False

    @property
    def is_answered(self) -> bool:
        """Whether it is decided."""
        return self._is_resolved

    @property
    def has_left(self) -> bool:
        """False: a part is decided even if the caller has left."""
        return False

    def was_allowed(self, shared: SharedState, later: int) -> None:
        """Record the state of the bucket, and the refund of the charge."""
        self.part.shared = shared
        if not self.peek:
            at_us = self.ask.at_us if later else None
            self.part.refund = refund_of(shared, self.rule, self.cost, at_us=at_us, later=later)

    def resolve(self, outcome: Outcome | Exception) -> None:
        """Record the outcome or error, unless there is one; the last part concludes the check."""
        if self._is_resolved:
            return
        self._is_resolved = True
        part = self.part
        if part.outcome is None:  # not decided by this node's view
            part.outcome, part.view = outcome, None
            part.is_charged = isinstance(outcome, tuple) and outcome[0] and not self.peek
        self._joint.decided()

    def fail(self, error: Exception) -> None:
        """Record an unexpected error, unless there is an outcome."""
        self.resolve(error)


class PartDecider(Protocol):
    """Decides the parts: by the views of a node, or always by the store."""

    errors_that_deny: tuple[type[Exception], ...]
    given_back_total: int
    kept_total: int

    def judge_part(self, check: PartCheck) -> bool:
        """Decide by the node's view, without charging; false if the bucket is unknown."""

    def ask_part(self, check: PartCheck) -> None:
        """Let the store decide."""

    def was_spent(self, check: PartCheck) -> None:
        """Settle tokens that were reserved in a view and are now charged."""

    def was_released(self, check: PartCheck) -> None:
        """Handle the release of tokens that a view had reserved."""

    def give_back(self, check: PartCheck, refund: Refund) -> bool:
        """Refund what the store has charged; false if it stays charged."""


class JointCheck:
    """One check on several buckets, with a cost for each."""

    def __init__(  # noqa: PLR0917 - what a check is
        self,
        buckets: PartDecider,
        timers: AbstractEventLoop,
        charges: Sequence[Charge],
        now_us: int,
        costs: Sequence[int],
        *,
        peek: bool,
        is_counted: bool = False,
        answer_by_us: int = NO_DEADLINE_US,
    ) -> None:
        self.now_us = now_us
        self.answer_by_us = answer_by_us
        self._buckets = buckets
        self._timers = timers
        self._checks = [
            PartCheck(self, charge, cost, peek=peek)
            for charge, cost in zip(charges, costs, strict=True)
        ]
        self._parts = [check.part for check in self._checks]
        self._is_counted = is_counted
        self._missing = 0
        self._answer: Future[Outcomes]

    def at_once(self) -> Sequence[Outcome] | None:
        """Decide now, if no part has to wait; else charge nothing and return ``None``."""
        unknown = self._judge()
        if not unknown and denies(self._parts):
            self._fill()
        for part in self._parts:
            if not isinstance(part.outcome, tuple):
                self._withdraw()
                return None
        self._conclude()
        return [part.outcome for part in self._parts if isinstance(part.outcome, tuple)]

    def start(self, answer: Future[Outcomes]) -> None:
        """Ask the store for all parts that the node cannot decide; ``answer`` gets the outcomes."""
        self._answer = answer
        unknown = self._judge()
        if denies(self._parts, self._buckets.errors_that_deny) or any(map(_never_passes, unknown)):
            # The check will be denied: charge no other bucket, only peek.
            self._fill()
            for check in unknown:
                check.peek = True
        for check in unknown[:1]:  # at most one miss per check
            check.is_counted = self._is_counted
        asked = [check for check in self._checks if check.part.outcome is None]
        self._missing = len(asked)
        if not asked:
            self._finish()
        for check in asked:
            try:
                self._buckets.ask_part(check)
            except Exception as error:  # noqa: BLE001 - the other parts wait for this one
                check.fail(error)

    def decided(self) -> None:
        """Count a decided part; the last one finishes the check."""
        self._missing -= 1
        if not self._missing:
            # Deferred: other buckets of the same reply are not updated yet.
            self._timers.call_soon(self._finish)

    def _judge(self) -> Sequence[PartCheck]:
        """Let the views decide; returns the parts whose buckets are unknown."""
        try:
            return [check for check in self._checks if not self._buckets.judge_part(check)]
        except Exception:
            self._withdraw()
            raise

    def _fill(self) -> None:
        """Peek at the views of undecided parts, instead of asking the store."""
        for part in self._parts:
            if part.outcome is None and part.view is not None:
                part.peek(part.view, self.now_us)

    def _withdraw(self) -> None:
        for check in self._checks:
            if check.part.is_reserved:
                check.part.release(self.now_us)
                self._buckets.was_released(check)

    def _finish(self) -> None:
        defect: Exception | None = None
        try:
            self._conclude()
        except Exception as error:  # noqa: BLE001 - the caller waits, and fails open
            defect = error
        if self._answer.done():
            return
        if defect is None:
            outcomes = [part.outcome for part in self._parts if part.outcome is not None]
            self._answer.set_result(outcomes)
        else:
            self._answer.set_exception(defect)

    def _conclude(self) -> None:
        errors = self._buckets.errors_that_deny
        is_allowed = conclude(self._parts, self.now_us, errors)
        for check in self._checks:
            part = check.part
            if part.is_reserved and part.is_charged:
                self._buckets.was_spent(check)
            elif part.is_reserved:
                self._buckets.was_released(check)
            elif part.is_charged and not is_allowed:
                self._give_back(check)

    def _give_back(self, check: PartCheck) -> None:
        refund = check.part.refund
        if refund is not None and self._buckets.give_back(check, refund):
            self._buckets.given_back_total += check.cost
        else:
            self._buckets.kept_total += check.cost


def _never_passes(check: PartCheck) -> bool:
    """Return whether an enforced limit denies the cost, whatever its bucket holds."""
    rule = check.rule
    is_of_slots = rule.algorithm is CONCURRENCY
    return rule.enforcement is ENFORCE and not is_of_slots and check.cost > rule.capacity


def errors_that_deny(*, breaker_denies: bool) -> tuple[type[Exception], ...]:
    """Return the errors that deny a check as a limit would."""
    return (BreakerOpenError,) if breaker_denies else ()
