"""Dry runs: answer checks without charging or counting them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice
from typing import Final, cast

from ratelimitd.algorithms.several import deciding
from ratelimitd.errors import StoreUnavailableError
from ratelimitd.limiter.answers import (
    decision_of,
    explained_by,
    fitted,
    passed,
    statuses_of,
)
from ratelimitd.limiter.interfaces import RemoteBuckets
from ratelimitd.limiter.limiter import Limiter, proceeding_later
from ratelimitd.limiter.scopes import Scope, Unjudged, charges_of, identifiers_of
from ratelimitd.model import (
    Check,
    Decision,
    Explained,
    LimitStatus,
    NearRule,
    Reason,
)
from ratelimitd.rules.book import RuleBook
from ratelimitd.rules.nearest import MAX_CONSIDERED, RULES_PER_STEP, Nearest


class DryRun:
    """Judges checks by the rules and on the buckets of a limiter."""

    def __init__(self, limiter: Limiter) -> None:
        self._limiter: Final = limiter

    async def explain(self, check: Check) -> Explained:
        """Return the answer that a check would get, and every rule considered for it.

        If nodes share the buckets, the node first renews what it knows of them.

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
        if limiter.shared is not None:
            await limiter.shared.refresh([key for key, _, _ in charges])
        ahead_ms = limiter.ahead_ms(check, charges, now_us)
        charges = proceeding_later(charges, ahead_ms) if ahead_ms else charges
        costs = [check.cost] * len(charges)
        outcomes = limiter.buckets.peek_each(charges, now_us, costs)
        if outcomes is None:
            outcomes, shared = [], cast("RemoteBuckets", limiter.shared)
            for one in await shared.wait_all(charges, now_us, costs, peek=True, is_counted=False):
                if isinstance(one, Exception):
                    raise one
                outcomes.append(one)
        outcomes = fitted(outcomes, scopes)
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
