"""What ``rules apply`` has to change, decided before anything is changed: rules that are wanted against rules that are.

Pure: no calls, no printing. The order of the steps is part of the plan, because two rules never share an endpoint and
identifier type, not even for a moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ratelimitd.errors import FieldViolation, RuleInvalidError
from ratelimitd.rules.store import EDITABLE, RuleDraft
from ratelimiter.v1 import ratelimiter_pb2 as pb

Pair = tuple[str, str]
"""Endpoint and identifier type: no two rules have the same."""


class Create(NamedTuple):
    """Add a rule."""

    draft: RuleDraft


class Update(NamedTuple):
    """Set ``fields`` of the rule that is ``current`` to their values in ``draft``."""

    current: pb.RateLimit
    draft: RuleDraft
    fields: tuple[str, ...]


class Delete(NamedTuple):
    """Take a rule out."""

    current: pb.RateLimit


Step = Create | Update | Delete


def make_plan(
    wanted: Sequence[RuleDraft], current: Iterable[pb.RateLimit], *, prune: bool
) -> tuple[Step, ...]:
    """Return the steps from ``current`` to ``wanted``, none when there is nothing to do.

    A wanted rule with an id is that rule; one without is the rule for its endpoint and identifier type. With ``prune``,
    rules that nobody wants are deleted – last, unless one is in the way, so that a plan that stops half way has rather
    too many rules than too few.

    Raises:
        RuleInvalidError: no order of steps leads there; names each rule in the way as ``rules[i]``.
    """
    rules = {rule.id: rule for rule in current}
    matches = _matches(wanted, rules)
    matched = {rule.id for rule in matches if rule is not None}
    unwanted = [rule for rule_id, rule in rules.items() if rule_id not in matched]
    if not prune:
        _refuse_taken_pairs(wanted, unwanted)
        unwanted = []
    creates = [Create(draft) for draft, rule in zip(wanted, matches, strict=True) if rule is None]
    updates = [
        Update(rule, draft, fields)
        for draft, rule in zip(wanted, matches, strict=True)
        if rule is not None and (fields := _differences(rule, draft))
    ]
    needed = {_pair(step.draft) for step in creates} | {_pair(step.draft) for step in updates}
    in_the_way = [Delete(rule) for rule in unwanted if _pair(rule) in needed]
    others = [Delete(rule) for rule in unwanted if _pair(rule) not in needed]
    return (*in_the_way, *_ordered(updates, wanted), *creates, *others)


def draft_of(rule: pb.RateLimit) -> RuleDraft:
    """The stored rule as a file would say it."""
    return RuleDraft(
        id=rule.id,
        endpoint=rule.endpoint,
        identifier_type=rule.identifier_type,
        limit=rule.limit,
        window_seconds=rule.window_seconds,
        algorithm=rule.algorithm,
        enabled=rule.enabled or not rule.HasField("enabled"),
    )


def _matches(
    wanted: Iterable[RuleDraft], rules: Mapping[str, pb.RateLimit]
) -> list[pb.RateLimit | None]:
    """The stored rule that each wanted one is, ``None`` for a new one; ids first, since a rule may move."""
    claimed = {draft.id for draft in wanted if draft.id in rules}
    by_pair = {_pair(rule): rule for rule in rules.values() if rule.id not in claimed}
    return [rules.get(draft.id) if draft.id else by_pair.get(_pair(draft)) for draft in wanted]


def _refuse_taken_pairs(
    wanted: Iterable[RuleDraft],
    unwanted: Iterable[pb.RateLimit],
) -> None:
    """Refuse a rule whose endpoint and identifier type belong to a stored rule that is to stay."""
    taken = {_pair(rule): rule.id for rule in unwanted}
    violations = [
        FieldViolation(
            f"rules[{index}].id",
            f"the rule for this endpoint and identifier_type has the id {taken[_pair(draft)]}:"
            " give that one, give none, or delete that rule with --prune",
        )
        for index, draft in enumerate(wanted)
        if _pair(draft) in taken
    ]
    if violations:
        raise RuleInvalidError(*violations)


def _differences(rule: pb.RateLimit, draft: RuleDraft) -> tuple[str, ...]:
    stored = draft_of(rule)
    return tuple(name for name in EDITABLE if getattr(stored, name) != getattr(draft, name))


def _ordered(updates: Sequence[Update], wanted: Sequence[RuleDraft]) -> Iterator[Update]:
    """Yield the updates so that each finds its endpoint and identifier type free."""
    held = {_pair(update.current): update.current.id for update in updates}
    waiting = list(updates)
    while waiting:
        ready: list[Update] = []
        blocked: list[Update] = []
        for update in waiting:
            holder = held.get(_pair(update.draft), update.current.id)
            (ready if holder == update.current.id else blocked).append(update)
        if not ready:
            message = (
                "takes an endpoint from a rule that takes its own in turn: move one elsewhere first"
            )
            raise RuleInvalidError(
                *(
                    FieldViolation(f"rules[{wanted.index(update.draft)}]", message)
                    for update in blocked
                )
            )
        for update in ready:
            held.pop(_pair(update.current), None)
            held[_pair(update.draft)] = update.current.id
        yield from ready
        waiting = blocked


def _pair(rule: RuleDraft | pb.RateLimit) -> Pair:
    return (rule.endpoint, rule.identifier_type)
