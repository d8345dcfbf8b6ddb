"""Dry runs: answer checks without charging or counting them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from itertools import islice
from typing import Final, TypeAlias, cast

from ratelimitd.algorithms.several import Charge, deciding, passes
from ratelimitd.errors import BreakerOpenError, StoreUnavailableError
from ratelimitd.limiter.answers import decision_of, explained_by, passed, statuses_of
from ratelimitd.limiter.interfaces import RemoteBuckets
from ratelimitd.limiter.limiter import Limiter, proceeding_later
from ratelimitd.limiter.scopes import Scope, Unjudged, charges_of, identifiers_of
from ratelimitd.model import (
    INT32_MAX,
    Check,
    Decision,
    Enforcement,
    Explained,
    Limit,
    LimitStatus,
    NearRule,
    Outcome,
    Reason,
)
from ratelimitd.rules.book import RuleBook
from ratelimitd.rules.nearest import MAX_CONSIDERED, RULES_PER_STEP, Nearest

_Foreseen: TypeAlias = tuple[Sequence[Limit], Awaitable[Sequence[Outcome | Exception]]]

_Together: TypeAlias = dict[bytes, tuple[Charge, list[int]]]
"""Key of a bucket → its charge, and the costs of all checks on it."""


class DryRun:
    """Judges checks by the rules and on the buckets of a limiter."""

    def __init__(self, limiter: Limiter) -> None:
        self._limiter: Final = limiter

    def all_pass(self, checks: Sequence[Check], now_us: int) -> bool | Awaitable[bool]:
        """Whether all checks would pass at ``now_us``, one after the other.

        Ignores timestamps. Checks may have a bucket in common: that of a rule for all endpoints or all callers, or of
        one identity. Returns an awaitable only with shared buckets. An undetermined outcome counts as passing: the
        later charge fails in the same way, and answers the failure.
        """
        together: _Together = {}
        foreseen = [self._foresee(check, now_us, together) for check in checks]
        for charge, costs in together.values():
            if len(costs) > 1:
                cost = min(sum(costs), INT32_MAX)
                foreseen.append(self._foresee_charges([charge], [charge[1]], now_us, cost))
        asked = [one for one in foreseen if not isinstance(one, bool)]
        pass_here = False not in foreseen
        return self._all_pass_there(asked) if asked and pass_here else pass_here

    def _foresee(self, check: Check, now_us: int, together: _Together) -> bool | _Foreseen:
        try:
            scope = self._limiter.scopes.resolve_check(check, now_us)
            if isinstance(scope, Unjudged):
                return scope.decision.allowed
            scope = scope.at(now_us)
            charges = charges_of(identifiers_of(check), scope)
            for charge in () if check.peek else charges:
                together.setdefault(charge[0], (charge, []))[1].append(check.cost)
        except Exception as error:  # noqa: BLE001 - charging meets it again, and reports it
            return self._passes_without_answer(error)
        return self._foresee_charges(charges, scope.limits or (scope.limit,), now_us, check.cost)

    def _foresee_charges(
        self, charges: Sequence[Charge], limits: Sequence[Limit], now_us: int, cost: int
    ) -> bool | _Foreseen:
        try:
            # A charge looks up each bucket again, and counts the look-up.
            outcomes = self._limiter.buckets.peek_all(charges, now_us, cost)
            if outcomes is None:
                return limits, self._ask(charges, now_us, cost)
            return passes(limits, outcomes)
        except Exception as error:  # noqa: BLE001 - as above
            return self._passes_without_answer(error)

    def _ask(
        self, charges: Sequence[Charge], now_us: int, cost: int
    ) -> Awaitable[Sequence[Outcome | Exception]]:
        """Ask the shared state, since only shared buckets leave a check undecided."""
        shared = cast("RemoteBuckets", self._limiter.shared)
        return shared.wait_all(charges, now_us, cost, peek=True, is_counted=False)

    async def _all_pass_there(self, asked: Sequence[_Foreseen]) -> bool:
        all_pass = True
        for limits, foreseen in asked:
            try:
                outcomes = await foreseen
            except Exception as error:  # noqa: BLE001 - as above
                all_pass &= self._passes_without_answer(error)
                continue
            for limit, outcome in zip(limits, outcomes, strict=True):
                if limit.enforcement is not Enforcement.ENFORCE:
                    continue
                if isinstance(outcome, Exception):
                    all_pass &= self._passes_without_answer(outcome)
                else:
                    all_pass &= outcome[0]
        return all_pass

    def _passes_without_answer(self, error: Exception) -> bool:
        return not (isinstance(error, BreakerOpenError) and self._limiter.breaker_denies)

    async def explain(self, check: Check) -> Explained:
        """Return the answer that a check would get as a peek, and every rule considered for it.

        Raises:
            CheckInvalidError: as :meth:`ratelimitd.limiter.limiter.Limiter.check`.
            StoreUnavailableError: no rules are loaded yet, or the shared state did not answer.
            StoreOverloadedError, BreakerOpenError: the shared state was not called.
        """
        limiter, book = self._limiter, self._limiter.book
        if book is None:
            message = "no rules are loaded yet"
            raise StoreUnavailableError(message)
        types = (check.identifier_type, *(kind for kind, _ in check.also))
        now_us = limiter.now_us()
        scopes = limiter.scopes.apart()
        plans, resolved = scopes.plans_of(check, now_us), scopes.resolve_check(check, now_us)
        if check.timestamp:
            now_us = limiter.check_time_us(check.timestamp, now_us, resolved, is_counted=False)
        considered = [*book.considered(check.endpoint, types)]
        if isinstance(resolved, Unjudged):
            decision, statuses = resolved.decision, cast("Sequence[LimitStatus]", ())
        else:
            decision, statuses = await self._foreseen(check, resolved, now_us)
        is_blocked = decision.reason is Reason.BLOCKED
        assigned = {one.identifier_type: one.plan for one in plans}
        has_none = decision.reason is Reason.NO_RULE
        # A rule for * also judges checks whose endpoint is misspelled.
        is_other = all(rule.endpoint != check.endpoint for rule, _ in considered)
        return Explained(
            decision,
            tuple(
                [
                    explained_by(*one, assigned, statuses, is_blocked=is_blocked)
                    for one in considered
                ]
            ),
            plans,
            await _nearest(book, Nearest(check.endpoint, types, only_spelling=not has_none))
            if has_none or is_other
            else (),
        )

    async def _foreseen(
        self, check: Check, scope: Scope, now_us: int
    ) -> tuple[Decision, Sequence[LimitStatus]]:
        limiter, scope = self._limiter, scope.at(now_us)
        scopes = scope.several or (scope,)
        charges = charges_of(identifiers_of(check), scope)
        ahead_ms = limiter.ahead_ms(check, charges, now_us)
        charges = proceeding_later(charges, ahead_ms) if ahead_ms else charges
        outcomes = limiter.buckets.peek_all(charges, now_us, check.cost)
        if outcomes is None:
            outcomes = []
            for one in await self._ask(charges, now_us, check.cost):
                if isinstance(one, Exception):
                    raise one
                outcomes.append(one)
        first = deciding([one.limit for one in scopes], outcomes)
        judged, decides = outcomes[first], scopes[first]
        allowed = judged[0] or decides.would_deny is not None
        judged = passed(judged) if allowed else judged
        decision = decision_of(scope, first, judged, outcomes, ahead_ms)
        return decision, statuses_of(scopes, outcomes)


async def _nearest(book: RuleBook, nearest: Nearest) -> tuple[NearRule, ...]:
    """Return the nearest rules of a book; yields to the event loop after each step."""
    rules = islice(book.rules(), MAX_CONSIDERED)
    while some := [*islice(rules, RULES_PER_STEP)]:
        nearest.look_at(some)
        await asyncio.sleep(0)
    return nearest.found()
