"""The effect of a rule change in words, for the preview before each write. Pure.

Uses the wording of docs/algorithms.md, "When a rule changes". See ADR 0008.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from ratelimitd.model import (
    EVERY_ENDPOINT,
    GLOBAL_ENDPOINT,
    Enforcement,
    Limit,
    Rule,
)
from ratelimitd.rules.assignments import MAX_EXPIRE_TIME
from ratelimitd.rules.book import RuleBook
from ratelimitd.rules.store import FIRST_LIMIT, LimitDraft
from ratelimitd.rules.validation import RuleRow
from ratelimitd.web.pages.rendering import duration, instant, number

LABELS: Final[Mapping[str, str]] = {
    "endpoint": "Endpoint",
    "identifier_type": "Identifier type",
    "limit": "Limit",
    "window_seconds": "Window",
    "algorithm": "Algorithm",
    "limits": "Limits",
    "plans": "Plans",
    "enabled": "Enabled",
}
"""The fields of a rule, in display order."""

_NOT_LIMITS: Final = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""Errors raised while reading invalid stored limits or plans."""


class Difference(NamedTuple):
    """One field before and after; empty where the rule does not exist."""

    label: str
    before: str
    after: str

    @property
    def changed(self) -> bool:
        """Return whether the value changed."""
        return self.before != self.after


def differences(before: Rule | None, after: Rule | None) -> list[Difference]:
    """Return each field of two versions of a rule."""
    return fields_differences(_fields_of(before), _fields_of(after))


def fields_differences(
    before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> list[Difference]:
    """Like :func:`differences`, for unvalidated fields."""
    found: list[Difference] = []
    for name, label in LABELS.items():
        row = Difference(label, _shown(name, before), _shown(name, after))
        if name == "limits":
            found += _limit_differences(row)
        elif name != "plans" or row.before or row.after:
            found.append(row)
    return found


def _limit_differences(row: Difference) -> list[Difference]:
    """Return a row per limit of two stored lists, and one for their order; empty if neither is a list."""
    try:
        was, will = _list_shown(row.before), _list_shown(row.after)
    except _NOT_LIMITS:
        return [row]
    found = [
        Difference(f"Limit {name}", was.get(name, ""), will.get(name, "")) for name in was | will
    ]
    before, after = [
        [name for name in one if name in was.keys() & will.keys()] for one in (was, will)
    ]
    if before != after:
        found.append(Difference("Order of limits", ", ".join(before), ", ".join(after)))
    return found


def assignment_differences(
    before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> list[Difference]:
    """Like :func:`fields_differences`, for an assignment."""
    return [
        Difference(label, _shown_of_assignment(name, before), _shown_of_assignment(name, after))
        for name, label in (("plan", "Plan"), ("expire_time", "Until"), ("note", "Note"))
    ]


def _shown_of_assignment(name: str, fields: Mapping[str, Any] | None) -> str:
    value = (fields or {}).get(name) or ""
    if name == "expire_time" and isinstance(value, int) and value <= MAX_EXPIRE_TIME:
        return instant(value)
    return str(value)


def _fields_of(rule: Rule | None) -> dict[str, Any] | None:
    return None if rule is None else RuleRow.of(rule)._asdict()


def consequences(before: Rule | None, after: Rule | None, book: RuleBook) -> list[str]:
    """Return the effects of the change on callers; ``book`` still holds ``before``."""
    if before and after and not any(one.changed for one in differences(before, after)):
        return ["Nothing changes."]
    was = before if before and before.enabled else None
    will = after if after and after.enabled else None
    if was is None:
        if will is None:
            return ["The rule is not enabled, so nothing changes for callers."]
        return [_begins(will, before, book)]
    if will is None:
        return [_ends(was, book), _COMES_BACK]
    if (was.endpoint, was.identifier_type) != (will.endpoint, will.identifier_type):
        return [_ends(was, book), _begins(will, before, book), _OTHER_BUCKETS]
    return _edited(was, will)


def summary(rule: Rule) -> str:
    """Summarise a rule."""
    plans = ", ".join(plan.name for plan in rule.plans)
    return "; ".join(map(limit_summary, rule.limits)) + (f"; plans {plans}" if plans else "")


def limit_summary(limit: Limit | LimitDraft) -> str:
    """Summarise a limit, without its name."""
    name = limit.algorithm.replace("_", " ")
    burst = f", burst {number(limit.burst)}" if limit.burst else ""
    observed = ", observed" if limit.enforcement == Enforcement.OBSERVE else ""
    return f"{number(limit.limit)} in {window_text(limit)}, {name}{burst}{observed}"


def window_text(limit: Limit | LimitDraft) -> str:
    """Return the window of a limit: its length, or its calendar period."""
    draft = limit if isinstance(limit, LimitDraft) else LimitDraft.of(limit)
    calendar = draft.calendar_text
    return f"a {calendar}" if calendar else duration(draft.window_seconds)


_COMES_BACK: Final = (
    "What was spent is kept until it expires: a rule that comes back with the same endpoint, identifier type, window"
    " and algorithm finds it again."
)
_OTHER_BUCKETS: Final = (
    "What was spent under the old endpoint and identifier type does not count under the new ones."
)
_ORDER: Final = (
    "Every limit stays as it is. Their order only decides which of equal limits an answer names."
)
_AFRESH: Final = (
    "All buckets start full: a bucket belongs to one window and algorithm, so a used-up limit is whole again."
    " The old buckets stay until they expire; reverting this change finds them, with what was spent."
)


OF_BUCKET: Final = ("algorithm", "window_seconds", "calendar")
"""The fields of a limit whose change leads to other buckets."""


def _edited(was: Rule, will: Rule) -> list[str]:
    if was.has_list or will.has_list:
        sentences = _list_edited(was.limits, will.limits)
    else:
        sentences = [_limit_edited(was, will)] if _numbers(was) != _numbers(will) else []
    return sentences + _plans_edited(was, will)


def _plans_edited(was: Rule, will: Rule) -> list[str]:
    before = {plan.name: plan.limits for plan in was.plans}
    after = {plan.name: plan.limits for plan in will.plans}
    sentences = [
        f"The plan {name} has the rule's own limits." for name in before if name not in after
    ]
    for name, limits in after.items():
        if name in before:
            sentences += [f"Plan {name}: {text}" for text in _list_edited(before[name], limits)]
        else:
            shown = "; ".join(map(limit_summary, limits))
            sentences.append(
                f"Identities assigned to the plan {name} have their own limits: {shown}."
            )
    return sentences


def _numbers(limit: Limit) -> list[Any]:
    return [getattr(limit, field) for field in (*FIRST_LIMIT, "burst", "calendar")]


def _list_edited(was: Sequence[Limit], will: Sequence[Limit]) -> list[str]:
    before = {limit.name: limit for limit in was}
    after = {limit.name: limit for limit in will}
    sentences = [f"The limit {name} is removed." for name in before if name not in after]
    for name, limit in after.items():
        if name not in before:
            sentences.append(
                f"{name}: {limit_summary(limit)} from now on, and all buckets are full."
            )
            continue
        if _numbers(limit) != _numbers(before[name]):
            sentences.append(f"{name}: {_limit_edited(before[name], limit)}")
        if limit.enforcement != before[name].enforcement:
            observes = limit.enforcement is Enforcement.OBSERVE
            what = "only observes from now on" if observes else "denies from now on"
            sentences.append(f"{name} {what}, and keeps what it counted.")
    if not sentences and [*before] != [*after]:
        return [_ORDER]
    return sentences


def _limit_edited(was: Limit, will: Limit) -> str:
    if any(getattr(was, field) != getattr(will, field) for field in OF_BUCKET):
        return _AFRESH
    if will.capacity > was.capacity:
        more = number(will.capacity - was.capacity)
        return f"What was spent stays spent, and everybody has {more} more at once."
    if will.capacity == was.capacity:
        refill = f"{number(will.limit)} in {duration(will.window_seconds)}"
        return f"What was spent stays spent, and is refilled by {refill} from now on."
    most = duration(will.full_after_s)
    if will.burst:
        waits = f"callers that spent more may wait, at most {most}"
        return f"What was spent stays spent, but counts as the new burst at most: {waits}."
    waits = f"callers that spent more may wait, at most one window of {most}"
    return f"What was spent stays spent, but counts as the new limit at most: {waits}."


def _begins(will: Rule, before: Rule | None, book: RuleBook) -> str:
    """Return whose checks the rule decides from now on, and what decided them until now."""
    until_now = _next_best(will, before, book)
    return f"{_whose(will)} are decided by this rule from now on. Until now: {until_now}."


def _ends(was: Rule, book: RuleBook) -> str:
    from_now_on = _next_best(was, was, book)
    whose = _whose(was)
    return f"{whose} are no longer decided by this rule. From now on: {from_now_on}."


def _whose(rule: Rule) -> str:
    if rule.endpoint == GLOBAL_ENDPOINT:
        return (
            f"Checks of {rule.identifier_type} on every endpoint without an enabled rule of its own"
        )
    if rule.endpoint == EVERY_ENDPOINT:
        return f"Checks of {rule.identifier_type} on all endpoints together"
    no_pattern = ", the name of one endpoint and no pattern," if "*" in rule.endpoint else ""
    return f"Checks of {rule.identifier_type} on {rule.endpoint}{no_pattern}"


def _next_best(rule: Rule, without: Rule | None, book: RuleBook) -> str:
    """Return what decides the checks of ``rule`` if neither it nor ``without`` does."""
    others: Sequence[Rule] = book.candidates(rule.endpoint, rule.identifier_type)
    for other in others:
        if other.enabled and (without is None or other.id != without.id):
            return f"the rule of {other.endpoint} ({summary(other)})"
    if rule.endpoint == EVERY_ENDPOINT:
        return "no rule over all endpoints; the rules of single endpoints and of * hold in any case"
    return "no rule, so they are all allowed"


def _shown(name: str, fields: Mapping[str, Any] | None) -> str:
    value = None if fields is None else fields.get(name)
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "plans":
        return _plans_shown(str(value))
    if name == "window_seconds" and isinstance(value, int):
        spelt, seconds = duration(value), f"{number(value)} s"
        return spelt if spelt == seconds else f"{spelt} ({seconds})"
    return number(value) if isinstance(value, int) else str(value)


def _list_shown(stored: str) -> dict[str, str]:
    """Return the limits of a stored list by name; raises an error if it is invalid."""
    if not stored:
        return {}
    first, *more = json.loads(stored)
    noted = f", burst {number(first['burst'])}" if "burst" in first else ""
    if "period" in first:
        noted += f", {window_text(LimitDraft(**{**dict.fromkeys(FIRST_LIMIT), **first}))}"
    noted += ", observed" if "enforcement" in first else ""
    shown = {first["name"]: f"the first{noted}"}
    return shown | {limit["name"]: limit_summary(LimitDraft(**limit)) for limit in more}


def _plans_shown(stored: str) -> str:
    """Return stored plans in words, or unchanged if invalid."""
    try:
        return "; ".join(
            f"{plan}: "
            + ", ".join(f"{limit['name']} {limit_summary(LimitDraft(**limit))}" for limit in limits)
            for plan, limits in json.loads(stored).items()
        )
    except _NOT_LIMITS:
        return stored
