"""What a change of a rule would do, in words: for the preview that stands before each write. Pure.

The words are those of docs/algorithms.md, "When a rule changes". See ADR 0008.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from ratelimitd.model import GLOBAL_ENDPOINT, Rule
from ratelimitd.rules.book import RuleBook
from ratelimitd.web.rendering import duration, number

LABELS: Final[Mapping[str, str]] = {
    "endpoint": "Endpoint",
    "identifier_type": "Identifier type",
    "limit": "Limit",
    "window_seconds": "Window",
    "algorithm": "Algorithm",
    "enabled": "Enabled",
}
"""The fields of a rule, in the order in which they are shown."""


class Difference(NamedTuple):
    """One field before and after; empty where there is no rule."""

    label: str
    before: str
    after: str

    @property
    def changed(self) -> bool:
        """Whether it is another value."""
        return self.before != self.after


def differences(before: Rule | None, after: Rule | None) -> list[Difference]:
    """Each field of two versions of a rule."""
    return fields_differences(fields_of(before), fields_of(after))


def fields_differences(
    before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> list[Difference]:
    """As :func:`differences`, for fields of which nothing is certain."""
    return [
        Difference(label, _shown(name, before), _shown(name, after))
        for name, label in LABELS.items()
    ]


def fields_of(rule: Rule | None) -> dict[str, Any] | None:
    """The fields that are shown of a rule."""
    return None if rule is None else {name: getattr(rule, name) for name in LABELS}


def consequences(before: Rule | None, after: Rule | None, book: RuleBook) -> list[str]:
    """What the change means for callers; ``book`` still holds ``before``."""
    was = before if before is not None and before.enabled else None
    will = after if after is not None and after.enabled else None
    if (
        before is not None
        and after is not None
        and not any(difference.changed for difference in differences(before, after))
    ):
        return ["Nothing changes."]
    if was is None and will is None:
        return ["The rule is not enabled, so nothing changes for callers."]
    if was is None and will is not None:
        return [_begins(will, before, book)]
    if will is None and was is not None:
        return [_ends(was, book), _COMES_BACK]
    assert was is not None  # noqa: S101 -- as the lines above leave it
    assert will is not None  # noqa: S101
    if _pair(was) != _pair(will):
        return [_ends(was, book), _begins(will, before, book), _OTHER_BUCKETS]
    return _edited(was, will)


def summary(rule: Rule) -> str:
    """The rule in a few words."""
    name = rule.algorithm.replace("_", " ")
    return f"{number(rule.limit)} in {duration(rule.window_seconds)}, {name}"


_COMES_BACK: Final = (
    "What was spent is kept until it expires: a rule that comes back with the same endpoint, identifier type, window"
    " and algorithm finds it again."
)
_OTHER_BUCKETS: Final = (
    "What was spent under the old endpoint and identifier type does not count under the new ones."
)
_AFRESH: Final = (
    "Everybody starts afresh: window and algorithm belong to a bucket, so whoever had used up the limit has all of it"
    " again. The old buckets stay until they expire; taking this change back finds them, with what was spent."
)


def _edited(was: Rule, will: Rule) -> list[str]:
    if (was.algorithm, was.window_seconds) != (will.algorithm, will.window_seconds):
        return [_AFRESH]
    if will.limit > was.limit:
        more = number(will.limit - was.limit)
        return [f"What was spent stays spent, and everybody has {more} more at once."]
    window = duration(will.window_seconds)
    waits = f"whoever spent more may wait, and for no longer than one window of {window}"
    return [f"What was spent stays spent, but counts as the new limit at most: {waits}."]


def _begins(will: Rule, before: Rule | None, book: RuleBook) -> str:
    """Whose checks it decides from now on, and what decided them until now."""
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
    return f"Checks of {rule.identifier_type} on {rule.endpoint}"


def _next_best(rule: Rule, without: Rule | None, book: RuleBook) -> str:
    """What decides the checks of ``rule`` when neither it nor ``without`` does."""
    others: Sequence[Rule] = book.candidates(rule.endpoint, rule.identifier_type)
    for other in others:
        if other.enabled and (without is None or other.id != without.id):
            return f"the rule of {other.endpoint} ({summary(other)})"
    return "no rule, so they are all allowed"


def _pair(rule: Rule) -> tuple[str, str]:
    return rule.endpoint, rule.identifier_type


def _shown(name: str, fields: Mapping[str, Any] | None) -> str:
    value = None if fields is None else fields.get(name)
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "window_seconds" and isinstance(value, int):
        spelt, seconds = duration(value), f"{number(value)} s"
        return spelt if spelt == seconds else f"{spelt} ({seconds})"
    return number(value) if isinstance(value, int) else str(value)
