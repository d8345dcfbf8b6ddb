"""Checks of one request: all are charged, or none is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias, cast

from ratelimitd.algorithms.several import MORE_THAN_ANY_LIMIT, Charge
from ratelimitd.limiter.interfaces import RemoteBuckets
from ratelimitd.limiter.limiter import Limiter, PreparedCheck
from ratelimitd.limiter.scopes import charges_of
from ratelimitd.model import Check, Decision, Outcome

Decisions: TypeAlias = Sequence[Decision]


class Together:
    """Checks without timestamps, of which all are charged if all pass.

    A bucket of several checks is charged their sum. Peeks do not see these charges, but a denied one denies them.
    ``remaining_s`` returns what :meth:`Limiter.wait` takes: the shared state may be asked twice.
    """

    def __init__(
        self,
        limiter: Limiter,
        checks: Sequence[Check],
        remaining_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._limiter = limiter
        self._remaining_s = remaining_s
        self._checks = checks
        self._now_us = limiter.now_us()
        # A check without others is charged if it passes.
        self._alone = [place for place, one in enumerate(checks) if one.peek or len(checks) == 1]
        self._answers: dict[int, Decision] = {}
        """Answers by the index of their check."""
        self._judged: dict[int, tuple[PreparedCheck, Sequence[Charge]]] = {}
        """Inputs of the decisions on the other checks, and their charges, by the index of the check."""
        self._charges: dict[bytes, Charge] = {}
        self._costs: dict[bytes, int] = {}
        """The charge and the cost of each bucket, by its key."""

    def decide(self) -> Decisions | Awaitable[Decisions]:
        """Answer the checks in order, and charge them if all pass; an awaitable only with shared buckets."""
        for place in self._alone:
            decision = self._limiter.check(self._checks[place], self._now_us)
            if decision is not None:
                self._answers[place] = decision
        if len(self._answers) < len(self._alone):
            return self._decide_alone()
        return self._decide_together()

    async def _decide_alone(self) -> Decisions:
        late = [place for place in self._alone if place not in self._answers]
        asked = [self._checks[place] for place in late]
        found = await self._limiter.wait(asked, self._remaining_s())
        # No answer is an error: only a timestamp causes one.
        self._answers.update(zip(late, cast("Decisions", found), strict=True))
        self._now_us = self._limiter.now_us()
        decisions = self._decide_together()
        return await decisions if isinstance(decisions, Awaitable) else decisions

    def _decide_together(self) -> Decisions | Awaitable[Decisions]:
        rest = [place for place in range(len(self._checks)) if place not in self._answers]
        for place in rest:
            self._prepare(place)
        if not self._charges:
            return self._answer(rest, [])
        peek = any(not one.allowed for one in self._answers.values())
        buckets = self._limiter.buckets
        judge = buckets.peek_each if peek else buckets.apply_each
        try:
            outcomes = judge([*self._charges.values()], self._now_us, [*self._costs.values()])
        except Exception as error:  # noqa: BLE001 - the specification: an unexpected error never denies
            return self._answer(rest, [error] * len(self._charges))
        return self._ask(rest, peek=peek) if outcomes is None else self._answer(rest, outcomes)

    async def _ask(self, rest: Sequence[int], *, peek: bool) -> Decisions:
        charges, costs = [*self._charges.values()], [*self._costs.values()]
        shared = cast("RemoteBuckets", self._limiter.shared)
        outcomes: Sequence[Outcome | Exception]
        try:
            outcomes = await shared.wait_all(
                charges, self._now_us, costs, self._remaining_s(), peek=peek
            )
        except Exception as error:  # noqa: BLE001 - as above
            outcomes = [error] * len(charges)
        return self._answer(rest, outcomes)

    def _prepare(self, place: int) -> None:
        """Answer a check that no limit judges, or add its charges."""
        check = self._checks[place]
        try:
            prepared = self._limiter.prepare(check, self._now_us)
            if isinstance(prepared, Decision):
                self._answers[place] = prepared
                return
            charges = charges_of(prepared.identifiers, prepared.scope)
        except Exception as error:  # noqa: BLE001 - as above
            self._answers[place] = self._limiter.failed(error)
            return
        self._judged[place] = prepared, charges
        for charge in charges:
            key = charge[0]
            self._charges[key] = charge
            self._costs[key] = min(self._costs.get(key, 0) + check.cost, MORE_THAN_ANY_LIMIT)

    def _answer(self, rest: Sequence[int], outcomes: Sequence[Outcome | Exception]) -> Decisions:
        """Answer by the outcomes of the charges; notify the recorder of the checks in ``rest``."""
        by_key = dict(zip(self._charges, outcomes, strict=True))
        for place, (prepared, charges) in self._judged.items():
            found = [by_key[key] for key, _, _ in charges]
            try:
                outcome = found if prepared.scope.several else found[0]
                self._answers[place] = self._limiter.answer(outcome, prepared)
            except Exception as error:  # noqa: BLE001 - as above
                self._answers[place] = self._limiter.failed(error)
        if self._limiter.recorder is not None and self._limiter.book is not None:
            self._record(rest)
        return [self._answers[place] for place in range(len(self._checks))]

    def _record(self, rest: Sequence[int]) -> None:
        passes = all(one.allowed for one in self._answers.values())
        for place in rest:
            check, decision = self._checks[place], self._answers[place]
            if decision.allowed and not passes:
                check = check._replace(peek=True)  # it is not charged
            self._limiter.record(check, self._now_us, decision)
