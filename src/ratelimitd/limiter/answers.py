"""Builds decisions and statuses from the outcomes of limits. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ratelimitd.ledger.shared_state import within
from ratelimitd.limiter.scopes import Scope
from ratelimitd.model import (
    ALLOWED,
    BLOCKED_PLAN,
    COST_EXCEEDS_LIMIT,
    RESERVED_PLANS,
    WITHIN_LIMIT,
    ConsideredRule,
    Decision,
    LimitStatus,
    Match,
    Outcome,
    Rule,
)


def fitted(outcomes: Sequence[Outcome], scopes: Sequence[Scope]) -> Sequence[Outcome]:
    """Return outcomes that fit the limits of ``scopes``, of which the shared state may have others.

    It does not know the lengths of calendar windows, and may have learned of an edit before this node.
    """
    return [
        (*within(outcome, scope.limit)[:3], scope.limit.full_after_s, *outcome[4:])
        if outcome[4] is COST_EXCEEDS_LIMIT and scope.rule_limit.calendar is not None
        else within(outcome, scope.limit)
        for outcome, scope in zip(outcomes, scopes, strict=True)
    ]


def passed(outcome: Outcome) -> Outcome:
    """Return the outcome of a check that passes; the denial of an observing limit becomes an allowed outcome."""
    return outcome if outcome[0] else (ALLOWED, *outcome[1:3], 0, WITHIN_LIMIT, None)


def decision_of(  # noqa: PLR0917 -- what :meth:`Limiter.judge` returns, and beside it
    scope: Scope,
    first: int,
    outcome: Outcome,
    outcomes: Sequence[Outcome],
    wait_ms: int,
) -> Decision:
    """Return the answer to a check that proceeds after ``wait_ms``; the limit at index ``first`` decides."""
    scopes = scope.several or (scope,)
    statuses = statuses_of(scopes, outcomes)
    statuses.insert(0, statuses.pop(first))
    statuses += scope.passed_over
    limits = tuple(statuses) if len(statuses) > 1 else ()
    decides = scopes[first]
    return Decision(*outcome[:5], decides.rule, decides.rule_limit, limits, wait_ms, decides.plan)


def statuses_of(scopes: Sequence[Scope], outcomes: Sequence[Outcome]) -> list[LimitStatus]:
    """Return the status of each limit."""
    return [
        LimitStatus(*judged[:5], one.rule, one.rule_limit, one.plan)
        for judged, one in zip(outcomes, scopes, strict=True)
    ]


def explained_by(
    rule: Rule,
    match: Match,
    assigned: Mapping[str, str],
    statuses: Sequence[LimitStatus],
    *,
    is_blocked: bool,
) -> ConsideredRule:
    """Return the effect of a rule on a check; ``assigned`` maps the types of its identities to plans."""
    if match is not Match.JUDGES:
        return ConsideredRule(rule, match)
    plan = BLOCKED_PLAN if is_blocked else rule.plan_among(assigned)
    if plan in RESERVED_PLANS:
        return ConsideredRule(rule, Match.PASSED_OVER, (), plan)
    return ConsideredRule(rule, match, tuple(one for one in statuses if one.rule is rule), plan)
