"""The form of a rule: reads what was typed, makes a validated rule of it, and names the wrong fields. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple, Self

from ratelimitd.errors import FieldViolation, RuleInvalidError
from ratelimitd.model import Algorithm, Enforcement, IdentifierType, Limit, Period, Rule
from ratelimitd.rules.store import FIRST_LIMIT, LimitDraft, PlanDraft, RuleDraft, in_order
from ratelimitd.rules.validation import validated

PERIODS: Final = tuple(Period)

DEFAULT_WINDOW_S: Final = "60"

OWN_FIELDS: Final = ("window_seconds", "burst", "period", "time_zone", "anchor_day")
"""The fields of the first limit that can be wrong as such, and that a form has."""

LINE_WORDS: Final = 4
"""Words of a line of further limits, without those that not every limit has."""

_WORDS: Final = {"burst": "burst=", "time_zone": "zone=", "anchor_day": "anchor="}
"""What begins a word for a field that not every limit has, in the order of the line."""

_WHOLE: Final = re.compile(r"[+-]?[0-9]{1,20}")
_IN_LIST: Final = re.compile(r"limits\[([0-9]+)\]\.")
_OF_PLAN: Final = re.compile(r"plans\[([^\]]*)\]")


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


def _plans(text: str) -> tuple[PlanDraft, ...]:
    """The plans of lines as they were typed, in the order of their names."""
    found: dict[str, list[LimitDraft]] = {}
    for line in text.splitlines():
        if line.strip():
            plan, *limit = line.split(maxsplit=1)
            found.setdefault(plan, []).append(_line("".join(limit)))
    return tuple(PlanDraft(plan, tuple(found[plan])) for plan in sorted(found))


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


def whole_number(text: str) -> Any:
    """The number; any other text as it is, for the validation to refuse."""
    return int(text) if _WHOLE.fullmatch(text) else text
