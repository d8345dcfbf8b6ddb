"""What a change of a rule would do, in words: for the preview that stands before each write. Pure.

The words are those of docs/algorithms.md, "When a rule changes". See ADR 0008.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, Self

from ratelimitd.errors import FieldViolation, RuleInvalidError
from ratelimitd.model import (
    EVERY_ENDPOINT,
    GLOBAL_ENDPOINT,
    Algorithm,
    Enforcement,
    IdentifierType,
    Limit,
    Period,
    Rule,
)
from ratelimitd.rules.assignments import MAX_EXPIRE_TIME
from ratelimitd.rules.book import RuleBook
from ratelimitd.rules.store import FIRST_LIMIT, LimitDraft, PlanDraft, RuleDraft, in_order
from ratelimitd.rules.validation import RuleRow, validated
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
    found: list[Difference] = []
    for name, label in LABELS.items():
        row = Difference(label, _shown(name, before), _shown(name, after))
        if name == "limits":
            found += _limit_differences(row)
        elif name != "plans" or row.before or row.after:
            found.append(row)
    return found


def _limit_differences(row: Difference) -> list[Difference]:
    """A row for each limit of two lists as they are stored, and one for their order; nothing where there are none."""
    try:
        was, will = _list_shown(row.before), _list_shown(row.after)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
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
    """As :func:`fields_differences`, of an assignment."""
    return [
        Difference(label, _shown_of_assignment(name, before), _shown_of_assignment(name, after))
        for name, label in (("plan", "Plan"), ("expire_time", "Until"), ("note", "Note"))
    ]


def _shown_of_assignment(name: str, fields: Mapping[str, Any] | None) -> str:
    value = (fields or {}).get(name) or ""
    if name == "expire_time" and isinstance(value, int) and value <= MAX_EXPIRE_TIME:
        return instant(value)
    return str(value)


def fields_of(rule: Rule | None) -> dict[str, Any] | None:
    """The fields that are shown of a rule."""
    return None if rule is None else RuleRow.of(rule)._asdict()


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
    plans = ", ".join(plan.name for plan in rule.plans)
    return "; ".join(map(limit_summary, rule.limits)) + (f"; plans {plans}" if plans else "")


def limit_summary(limit: Limit | LimitDraft) -> str:
    """A limit in a few words, without its name."""
    name = limit.algorithm.replace("_", " ")
    burst = f", burst {number(limit.burst)}" if limit.burst else ""
    observed = ", observed" if limit.enforcement == Enforcement.OBSERVE else ""
    return f"{number(limit.limit)} in {_window(limit)}, {name}{burst}{observed}"


def _window(limit: Limit | LimitDraft) -> str:
    if isinstance(limit, LimitDraft):
        calendar = limit.period, limit.time_zone, limit.anchor_day
        return _calendar_shown(*calendar) if limit.period else duration(limit.window_seconds)
    return _calendar_shown(*limit.calendar) if limit.calendar else duration(limit.window_seconds)


def _calendar_shown(period: str, time_zone: str, anchor_day: int | None) -> str:
    anchor = f" from day {anchor_day}" if period == Period.MONTH else ""
    return f"a {period}{anchor} of {time_zone}"


_COMES_BACK: Final = (
    "What was spent is kept until it expires: a rule that comes back with the same endpoint, identifier type, window"
    " and algorithm finds it again."
)
_OTHER_BUCKETS: Final = (
    "What was spent under the old endpoint and identifier type does not count under the new ones."
)
_ORDER: Final = "Every limit stays as it is. Their order decides nothing, but which of equal ones an answer names."
_AFRESH: Final = (
    "All buckets start afresh: window and algorithm belong to a bucket, so a used-up limit is whole"
    " again. The old buckets stay until they expire; taking this change back finds them, with what was spent."
)


OF_BUCKET: Final = ("algorithm", "window_seconds", "calendar")
"""The fields of a limit of which other values lead to other buckets."""


def _edited(was: Rule, will: Rule) -> list[str]:
    if was.has_list or will.has_list:
        told = _list_edited(was.limits, will.limits)
    else:
        told = [_limit_edited(was, will)] if _numbers(was) != _numbers(will) else []
    return told + _plans_edited(was, will)


def _plans_edited(was: Rule, will: Rule) -> list[str]:
    before = {plan.name: plan.limits for plan in was.plans}
    after = {plan.name: plan.limits for plan in will.plans}
    told = [f"The plan {name} has the rule's own limits." for name in before if name not in after]
    for name, limits in after.items():
        if name in before:
            told += [f"Plan {name}: {text}" for text in _list_edited(before[name], limits)]
        else:
            shown = "; ".join(map(limit_summary, limits))
            told.append(f"Who is assigned to the plan {name} has limits of its own: {shown}.")
    return told


def _numbers(limit: Limit) -> list[Any]:
    return [getattr(limit, field) for field in (*FIRST_LIMIT, "burst", "calendar")]


def _list_edited(was: Sequence[Limit], will: Sequence[Limit]) -> list[str]:
    before = {limit.name: limit for limit in was}
    after = {limit.name: limit for limit in will}
    told = [f"There is no limit {name} from now on." for name in before if name not in after]
    for name, limit in after.items():
        if name not in before:
            told.append(f"{name}: {limit_summary(limit)} from now on, and all buckets are full.")
            continue
        if _numbers(limit) != _numbers(before[name]):
            told.append(f"{name}: {_limit_edited(before[name], limit)}")
        if limit.enforcement != before[name].enforcement:
            observes = limit.enforcement is Enforcement.OBSERVE
            what = "only observes from now on" if observes else "denies from now on"
            told.append(f"{name} {what}, and keeps what it counted.")
    return told or [_ORDER]


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
    if rule.endpoint == EVERY_ENDPOINT:
        return f"Checks of {rule.identifier_type} on all endpoints together"
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
    if name == "plans":
        return _plans_shown(str(value))
    if name == "window_seconds" and isinstance(value, int):
        spelt, seconds = duration(value), f"{number(value)} s"
        return spelt if spelt == seconds else f"{spelt} ({seconds})"
    return number(value) if isinstance(value, int) else str(value)


def _list_shown(stored: str) -> dict[str, str]:
    """The limits of a stored list by their names; raises an error if it is none."""
    if not stored:
        return {}
    first, *more = json.loads(stored)
    noted = f", burst {number(first['burst'])}" if "burst" in first else ""
    if "period" in first:
        noted += f", {_window(LimitDraft(**{**dict.fromkeys(FIRST_LIMIT), **first}))}"
    noted += ", observed" if "enforcement" in first else ""
    shown = {first["name"]: f"the first{noted}"}
    return shown | {limit["name"]: limit_summary(LimitDraft(**limit)) for limit in more}


def _plans_shown(stored: str) -> str:
    """Stored plans; as they are stored if they are none."""
    try:
        return "; ".join(
            f"{plan}: "
            + ", ".join(f"{limit['name']} {limit_summary(LimitDraft(**limit))}" for limit in limits)
            for plan, limits in json.loads(stored).items()
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return stored


DEFAULT_WINDOW_S: Final = "60"

_WHOLE: Final = re.compile(r"[+-]?[0-9]{1,20}")


class RuleForm(NamedTuple):
    """A rule as it was typed."""

    endpoint: str = ""
    identifier_type: str = IdentifierType.USER
    limit: str = ""
    window_seconds: str = DEFAULT_WINDOW_S
    algorithm: str = Algorithm.TOKEN_BUCKET
    enabled: bool = True
    name: str = ""
    more: str = ""
    """Further limits, one a line: name, limit, window in seconds or period, algorithm, then what it has of ``burst=N``,
    ``zone=NAME`` and ``anchor=DAY``, and ``observe`` if it only does that."""
    observe: bool = False
    burst: str = ""
    period: str = ""
    time_zone: str = ""
    anchor_day: str = ""
    plans: str = ""
    """Limits of plans, one a line: the plan, then as in ``more``."""

    @classmethod
    def of_fields(cls, fields: Mapping[str, str]) -> Self:
        """From the fields of a form; a box that is not ticked is not among them."""
        return cls(
            endpoint=fields.get("endpoint", ""),
            identifier_type=fields.get("identifier_type", ""),
            limit=fields.get("limit", "").strip(),
            window_seconds=fields.get("window_seconds", "").strip(),
            algorithm=fields.get("algorithm", ""),
            enabled="enabled" in fields,
            name=fields.get("name", "").strip(),
            more="\n".join(filter(str.strip, fields.get("more", "").splitlines())),
            observe="observe" in fields,
            burst=fields.get("burst", "").strip(),
            period=fields.get("period", ""),
            time_zone=fields.get("time_zone", "").strip(),
            anchor_day=fields.get("anchor_day", "").strip(),
            plans="\n".join(filter(str.strip, fields.get("plans", "").splitlines())),
        )

    @classmethod
    def of_rule(cls, rule: Rule) -> Self:
        """With the values of a rule."""
        return cls(
            endpoint=rule.endpoint,
            identifier_type=rule.identifier_type,
            limit=str(rule.limit),
            window_seconds="" if rule.calendar else str(rule.window_seconds),
            algorithm=rule.algorithm,
            enabled=rule.enabled,
            name=rule.name if rule.has_list else "",
            more="\n".join(map(_line_of, rule.more)),
            observe=rule.enforcement is Enforcement.OBSERVE,
            burst=str(rule.burst or ""),
            period=rule.calendar.period if rule.calendar else "",
            time_zone=rule.calendar.time_zone if rule.calendar else "",
            anchor_day=_anchor_day(rule),
            plans="\n".join(
                f"{plan.name} {_line_of(limit)}" for plan in rule.plans for limit in plan.limits
            ),
        )

    @classmethod
    def promoting(cls, rule: Rule, name: str) -> Self | None:
        """With the values of a rule whose limit ``name`` enforces, in the place of the first.

        ``None`` if no limit of this name only observes.
        """
        for limit in rule.limits:
            if limit.name == name and limit.enforcement is Enforcement.OBSERVE:
                fields = ("name", *FIRST_LIMIT, "burst", "calendar")
                first = {field: getattr(limit, field) for field in fields}
                first["enforcement"] = Enforcement.ENFORCE
                more = tuple(other for other in rule.more if other is not limit)
                return cls.of_rule(replace(rule, **first, more=more))
        return None

    def checked(self) -> Rule:
        """The rule, without an id.

        Raises:
            RuleInvalidError: names every field that is wrong, by its path in the contract.
        """
        draft = RuleDraft(
            endpoint=self.endpoint,
            identifier_type=in_order(self.identifier_type),
            limit=whole_number(self.limit),
            window_seconds=whole_number(self.window_seconds),
            algorithm=self.algorithm,
            enabled=self.enabled,
            plans=_plans(self.plans),
        )
        first = self._first_limit(draft)
        more = tuple(map(_line, self.more.splitlines()))
        if more or first != LimitDraft("", *(getattr(draft, name) for name in FIRST_LIMIT)):
            numbers = {name: getattr(first, name) for name in FIRST_LIMIT}
            draft = replace(draft, **numbers, limits=(first, *more))
        return validated(draft, rule_id="", revision=0)

    def _first_limit(self, draft: RuleDraft) -> LimitDraft:
        # What the window is unless it is typed, is no window that was meant beside a period.
        is_window = self.period not in PERIODS or self.window_seconds not in {"", DEFAULT_WINDOW_S}
        return LimitDraft(
            self.name,
            draft.limit,
            draft.window_seconds if is_window else None,
            draft.algorithm,
            burst=whole_number(self.burst) if self.burst else 0,
            period=self.period or None,
            time_zone=self.time_zone or None,
            anchor_day=whole_number(self.anchor_day) if self.anchor_day else None,
            enforcement=Enforcement.OBSERVE if self.observe else Enforcement.ENFORCE,
        ).completed()

    def errors(self) -> dict[str, str]:
        """What is wrong with which field; empty when nothing is."""
        try:
            self.checked()
        except RuleInvalidError as error:
            return form_errors(error.violations)
        return {}


def form_errors(violations: Iterable[FieldViolation]) -> dict[str, str]:
    """What is wrong with which field of the form, of the violations of a rule or an assignment."""
    errors: dict[str, str] = {}
    for path, description in violations:
        field = path.removeprefix("rate_limit.").removeprefix("assignment.")
        field = field.removeprefix("identity.")
        if of_plan := _OF_PLAN.match(field):
            errors.setdefault("plans", f"{of_plan[1]}: {description}")
            continue
        place = _IN_LIST.match(field)
        if place is None:
            errors[field.replace("limits", "more")] = description
        elif place[1] == "0":
            name = field.partition(".")[2]
            errors[name if name in OWN_FIELDS else "name"] = description
        else:
            errors.setdefault("more", f"line {place[1]}: {description}")
    return errors


_IN_LIST: Final = re.compile(r"limits\[([0-9]+)\]\.")
_OF_PLAN: Final = re.compile(r"plans\[([^\]]*)\]")


def _plans(text: str) -> tuple[PlanDraft, ...]:
    """The plans of lines as they were typed, in the order of their names."""
    found: dict[str, list[LimitDraft]] = {}
    for line in text.splitlines():
        if line.strip():
            plan, *limit = line.split(maxsplit=1)
            found.setdefault(plan, []).append(_line("".join(limit)))
    return tuple(PlanDraft(plan, tuple(found[plan])) for plan in sorted(found))


OWN_FIELDS: Final = ("window_seconds", "burst", "period", "time_zone", "anchor_day")
"""The fields of the first limit that can be wrong as such, and that a form has."""


def _line_of(limit: Limit) -> str:
    """A further limit as it is typed."""
    calendar = limit.calendar
    words = [limit.name, limit.limit, calendar.period if calendar else limit.window_seconds]
    words.append(limit.algorithm)
    if limit.burst:
        words.append(f"{_WORDS['burst']}{limit.burst}")
    if calendar:
        words.append(f"{_WORDS['time_zone']}{calendar.time_zone}")
    if _anchor_day(limit):
        words.append(f"{_WORDS['anchor_day']}{_anchor_day(limit)}")
    if limit.enforcement is Enforcement.OBSERVE:
        words.append(limit.enforcement)
    return " ".join(map(str, words))


def _anchor_day(limit: Limit) -> str:
    calendar = limit.calendar
    return str(calendar.anchor_day) if calendar and calendar.period is Period.MONTH else ""


def _line(text: str) -> LimitDraft:
    """A further limit as it was typed; what is missing is left for the validation to refuse."""
    words = text.split()
    name, limit, window, *more = *words, "", "", ""
    options = words[LINE_WORDS:]
    fields: dict[str, Any] = {}
    for field, word in _WORDS.items():
        if options and options[0].startswith(word):
            value = options.pop(0).removeprefix(word)
            fields[field] = value if field == "time_zone" else whole_number(value)
    if window in PERIODS:
        fields["period"] = window
    return LimitDraft(
        name,
        whole_number(limit),
        None if window in PERIODS else whole_number(window),
        more[0] if more else "",
        **fields,
        enforcement=" ".join(options) or Enforcement.ENFORCE.value,
    ).completed()


LINE_WORDS: Final = 4
"""Words of a line of further limits, without those that not every limit has."""

_WORDS: Final = {"burst": "burst=", "time_zone": "zone=", "anchor_day": "anchor="}
"""What begins a word for a field that not every limit has, in the order of the line."""

PERIODS: Final = tuple(Period)


def whole_number(text: str) -> Any:
    """The number; any other text as it is, for the validation to refuse."""
    return int(text) if _WHOLE.fullmatch(text) else text
