"""The form of a rule: parses the typed values into a validated rule and reports invalid fields. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple, Self

from ratelimitd.errors import FieldViolation, RuleInvalidError
from ratelimitd.model import Algorithm, Enforcement, IdentifierType, Limit, Period, Rule
from ratelimitd.rules.rules_file import window_of
from ratelimitd.rules.store import FIRST_LIMIT, LimitDraft, PlanDraft, RuleDraft, in_order
from ratelimitd.rules.validation import validated

PERIODS: Final = tuple(Period)

DEFAULT_WINDOW_S: Final = "60"

OWN_FIELDS: Final = ("window_seconds", "burst", "period", "time_zone", "anchor_day")
"""Fields of the form whose errors belong to the first limit."""

LINE_WORDS: Final = 4
"""Words of a line for a further limit, without optional ones."""

_WORDS: Final = {"burst": "burst=", "time_zone": "zone=", "anchor_day": "anchor="}
"""Prefixes of the words for optional fields, in their order in the line."""

_STRIPPED: Final = ("limit", "window_seconds", "name", "burst", "time_zone", "anchor_day")

_WHOLE: Final = re.compile(r"[+-]?[0-9]{1,20}")
_IN_LIST: Final = re.compile(r"limits\[([0-9]+)\]\.")
_OF_PLAN: Final = re.compile(r"plans\[([^\]]*)\](?:\.limits\[([0-9]+)\])?")


class RuleForm(NamedTuple):
    """A rule as typed."""

    endpoint: str = ""
    identifier_type: str = IdentifierType.USER
    limit: str = ""
    window_seconds: str = DEFAULT_WINDOW_S
    algorithm: str = Algorithm.TOKEN_BUCKET
    enabled: bool = True
    name: str = ""
    more: str = ""
    """Further limits, one per line: name, limit, window or period, algorithm, then optionally ``burst=N``,
    ``zone=NAME``, ``anchor=DAY`` and ``observe``."""
    observe: bool = False
    burst: str = ""
    period: str = ""
    time_zone: str = ""
    anchor_day: str = ""
    plans: str = ""
    """Limits of plans, one per line: the plan, then as in ``more``."""

    @classmethod
    def of_fields(cls, fields: Mapping[str, str]) -> Self:
        """Return the rule in the fields of a form; an unticked box is not among them."""
        typed: dict[str, Any] = {name: fields.get(name, "") for name in cls._fields}
        for name in _STRIPPED:
            typed[name] = typed[name].strip()
        for name in ("more", "plans"):
            typed[name] = "\n".join(filter(str.strip, typed[name].splitlines()))
        for name in ("enabled", "observe"):
            typed[name] = name in fields
        return cls(**typed)

    @classmethod
    def of_rule(cls, rule: Rule) -> Self:
        """Return a form with the values of a rule."""
        first = LimitDraft.of(rule)
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
            period=first.period or "",
            time_zone=first.time_zone or "",
            anchor_day=str(first.anchor_day or ""),
            plans="\n".join(
                f"{plan.name} {_line_of(limit)}" for plan in rule.plans for limit in plan.limits
            ),
        )

    @classmethod
    def promoting(cls, rule: Rule, name: str) -> Self | None:
        """Return a form with the values of a rule in which limit ``name`` enforces and replaces the first limit.

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

    def checked(self, types: Collection[str] | None = None) -> Rule:
        """Return the validated rule, without an id; ``types`` are the identifier types that it may have or combine.

        Raises:
            RuleInvalidError: names every invalid field by its path in the contract.
        """
        draft = RuleDraft(
            endpoint=self.endpoint,
            identifier_type=in_order(self.identifier_type),
            limit=whole_number(self.limit),
            window_seconds=_seconds(self.window_seconds),
            algorithm=self.algorithm,
            enabled=self.enabled,
            plans=_plans(self.plans),
        )
        first = self._first_limit(draft)
        more = tuple(map(_line, self.more.splitlines()))
        if more or first != LimitDraft("", *(getattr(draft, name) for name in FIRST_LIMIT)):
            numbers = {name: getattr(first, name) for name in FIRST_LIMIT}
            draft = replace(draft, **numbers, limits=(first, *more))
        return validated(draft, rule_id="", revision=0, types=types)

    def _first_limit(self, draft: RuleDraft) -> LimitDraft:
        # With a period, the form's default window does not count as typed.
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

    def errors(self, types: Collection[str] | None = None) -> dict[str, str]:
        """Return the error of each invalid field; empty if the rule is valid. ``types`` as in :meth:`checked`."""
        try:
            self.checked(types)
        except RuleInvalidError as error:
            return form_errors(error.violations)
        return {}


def form_errors(violations: Iterable[FieldViolation]) -> dict[str, str]:
    """Return the errors of the form's fields for the violations of a rule or an assignment."""
    errors: dict[str, str] = {}
    for path, description in violations:
        field = path.removeprefix("rate_limit.").removeprefix("assignment.")
        field = field.removeprefix("identity.")
        if field.endswith(".enforcement"):
            description += f", and before it only {', '.join(_WORDS.values())}"  # noqa: PLW2901
        if of_plan := _OF_PLAN.match(field):
            name, index = of_plan.groups()
            line = f", its line {int(index) + 1}" if index else ""
            errors.setdefault("plans", f"plan {name}{line}: {description}")
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
    """Parse lines of plans, sorted by name."""
    found: dict[str, list[LimitDraft]] = {}
    for line in text.splitlines():
        if line.strip():
            plan, *limit = line.split(maxsplit=1)
            found.setdefault(plan, []).append(_line("".join(limit)))
    return tuple(PlanDraft(plan, tuple(found[plan])) for plan in sorted(found))


def _line_of(limit: Limit) -> str:
    """Return the line of a further limit."""
    draft = LimitDraft.of(limit)
    words = [draft.name, draft.limit, draft.period or draft.window_seconds, draft.algorithm]
    for field, word in _WORDS.items():
        if value := getattr(draft, field):
            words.append(f"{word}{value}")
    if draft.enforcement is Enforcement.OBSERVE:
        words.append(draft.enforcement)
    return " ".join(map(str, words))


def _line(text: str) -> LimitDraft:
    """Parse the line of a further limit; validation reports missing values."""
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
        None if window in PERIODS else _seconds(window),
        more[0] if more else "",
        **fields,
        enforcement=" ".join(options) or Enforcement.ENFORCE.value,
    ).completed()


def _seconds(window: str) -> Any:
    """Return the seconds of a window such as ``60`` or ``1m``; other text unchanged, for validation to refuse."""
    try:
        return window_of(window)
    except ValueError:
        return whole_number(window)


def whole_number(text: str) -> Any:
    """Return the number; other text unchanged, for validation to refuse."""
    return int(text) if _WHOLE.fullmatch(text) else text
