"""The rules file: YAML text to rule drafts and back, for ``rules apply``, ``rules export`` and RULES_FILE.

Reports all errors of a file at once, each with its place. Opens no file and calls no node.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

import yaml

from ratelimitd.errors import FieldViolation, RuleInvalidError
from ratelimitd.model import DEFAULT_LIMIT
from ratelimitd.rules.store import (
    DEFAULT_ALGORITHM,
    FIRST_LIMIT,
    LIMIT_FIELDS,
    MAX_RULES,
    LimitDraft,
    PlanDraft,
    RuleDraft,
    in_order,
)
from ratelimitd.rules.validation import MAX_QUOTED_CHARS, stored_limit, validated
from ratelimitd.rules.yaml_reader import Node, YamlError, read_yaml_file

MAX_FILE_BYTES: Final = 64 * 1024 * 1024
"""Fits an export of ``MAX_RULES`` rules with the longest ASCII endpoints."""

RULES_KEY: Final = "rules"

FIELDS: Final[Mapping[str, str]] = {
    "id": "text",
    "endpoint": "text",
    "identifier_type": "text",
    "limit": "a whole number",
    "window_seconds": "a whole number",
    "algorithm": "text",
    "enabled": "true or false",
    "limits": "a list",
    "plans": "a mapping",
}
"""The fields of a rule in the order of the contract, and the names of their types."""

WINDOW: Final = "window"
"""Alternative to ``window_seconds``: a duration such as ``1m``."""

WINDOW_PATTERN: Final = re.compile("[1-9][0-9]{0,9}[smhd]")
DURATION: Final = "a duration such as 30s, 1m, 12h or 1d"
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}

RULE_TYPES: Final = {**FIELDS, WINDOW: DURATION}

LIMIT_TYPES: Final = {
    **{name: RULE_TYPES.get(name, "text") for name in (*LIMIT_FIELDS, WINDOW)},
    "burst": "a whole number",
    "anchor_day": "a whole number",
}

_PLACEHOLDERS: Final[Mapping[str, Any]] = {
    "endpoint": "*",
    "identifier_type": "user",
    "limit": 1,
    "window_seconds": 1,
    "algorithm": DEFAULT_ALGORITHM.value,
}
"""Substitutes for missing or mistyped values, so that one run reports all errors; the algorithm's is its default."""

_REQUIRED: Final = tuple(name for name in _PLACEHOLDERS if name != "algorithm")

_NUMBERS: Final[Mapping[str, Any]] = {name: _PLACEHOLDERS[name] for name in FIRST_LIMIT}
"""Substitutes for the numbers of a limit."""

TYPES: Final[Mapping[str, tuple[type, str]]] = {
    "text": (str, "string"),
    DURATION: (str, "string"),
    "a whole number": (int, "integer"),
    "true or false": (bool, "boolean"),
    "a list": (list, "array"),
    "a mapping": (dict, "object"),
}
"""Name of a type → its class, and its name in JSON Schema."""

_ADDED: Final = (("id", ""), ("enabled", True))
"""Defaults of fields that a rule omits."""

_NOT_PLAIN_IN_YAML: Final = re.compile("[\u007f-\u009f\u2028\u2029\ufeff\ufffe\uffff]")

_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def parse_rules(data: bytes, types: Collection[str] | None = None) -> tuple[RuleDraft, ...]:
    """Return the rules of a file in its order; a given id is in lower case.

    ``types`` are the identifier types that rules may have or combine.

    Raises:
        RuleInvalidError: names every violated field by its place, such as ``rules[3].limit``; ``rules`` stands for the
            whole file.
    """
    try:
        document = read_yaml_file(data, MAX_FILE_BYTES)
    except YamlError as error:
        _refuse(str(error))
    violations: list[FieldViolation] = []
    drafts = [_draft(index, item, violations, types) for index, item in enumerate(_items(document))]
    violations += _duplicates(drafts)
    if violations:
        raise RuleInvalidError(*violations)
    return tuple(draft for draft in drafts if draft is not None)


def dump_rules(drafts: Iterable[RuleDraft]) -> str:
    """Return the YAML text that :func:`parse_rules` reads back as ``drafts``, as people would write it."""
    text: str = yaml.dump(
        {RULES_KEY: [_shortened(_item(draft)) for draft in drafts]},
        Dumper=_DUMPER,
        sort_keys=False,
        allow_unicode=True,
        width=2**31 - 1,
    )
    return text


def dump_rules_json(drafts: Iterable[RuleDraft]) -> str:
    """Return the same file as JSON, which is also YAML, with every field, for programs."""
    items = [_item(draft) for draft in drafts]
    text = json.dumps({RULES_KEY: items}, indent=2, ensure_ascii=False)
    # JSON may hold these unescaped; YAML refuses them or reads them as line ends.
    return _NOT_PLAIN_IN_YAML.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _item(draft: RuleDraft) -> dict[str, Any]:
    """Return a rule as a file represents it: with one limit or a list of limits, and with any plans."""
    absent = (*(FIRST_LIMIT if draft.limits else ()), "limits", "plans")
    item = {field: getattr(draft, field) for field in FIELDS if field not in absent}
    if draft.limits:
        item["limits"] = [*map(_limit_item, draft.limits)]
    if draft.plans:
        item["plans"] = {plan.name: [*map(_limit_item, plan.limits)] for plan in draft.plans}
    return item


def _shortened(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a rule or limit without defaults, and with windows as durations."""
    shortened: dict[str, Any] = {}
    for name, value in fields.items():
        if name == "window_seconds":
            shortened[WINDOW] = duration_of(value)
        elif name == "limits":
            shortened[name] = [*map(_shortened, value)]
        elif name == "plans":
            shortened[name] = {plan: [*map(_shortened, limits)] for plan, limits in value.items()}
        elif (name, value) not in _ADDED:
            shortened[name] = value
    return shortened


def _limit_item(limit: LimitDraft) -> dict[str, Any]:
    fields = stored_limit(limit)
    if "enforcement" in fields:
        fields["enforcement"] = str(limit.enforcement)
    if "period" in fields:
        fields["period"] = str(limit.period)
        del fields["window_seconds"]  # its nominal length, which the period implies
    return fields


def _items(document: Node) -> list[Node]:
    """Return the items of the key ``rules``."""
    top = document.value
    if not isinstance(top, dict) or RULES_KEY not in top:
        _refuse(
            "the file must be a mapping with the key rules; an empty book is written as rules: []"
        )
    if unknown := [key for key in top if key != RULES_KEY]:
        shown = unknown[0][:MAX_QUOTED_CHARS]
        _refuse(f"line {top[unknown[0]].line}: unknown key {shown!r} beside rules")
    items = top[RULES_KEY].value
    if not isinstance(items, list):
        _refuse(f"line {top[RULES_KEY].line}: rules must be a list; an empty one is written as []")
    if len(items) > MAX_RULES:
        _refuse(f"more than {MAX_RULES} rules")
    return items


def _draft(
    index: int, item: Node, violations: list[FieldViolation], types: Collection[str] | None
) -> RuleDraft | None:
    """Return the draft of an item; ``None`` if it has errors, which are added to ``violations``."""
    place = f"{RULES_KEY}[{index}]"
    found: list[FieldViolation] = []
    if not isinstance(item.value, dict):
        violations.append(_violation(place, "", "must be a mapping of a rule's fields", item.line))
        return None
    given = item.value.get("limits")
    has_list = given is not None and given.value
    required = [name for name in _REQUIRED if not (has_list and name in FIRST_LIMIT)]
    typed = _typed(place, item, RULE_TYPES, required=required, violations=found)
    limits = _limits(f"{place}.limits", typed.pop("limits", ()), found)
    plans = typed.pop("plans", {})
    typed["plans"] = tuple(_plan(place, name, plans[name], found) for name in sorted(plans))
    first = {name: getattr(limits[0], name) for name in FIRST_LIMIT} if limits else {}
    draft = RuleDraft(**{**_PLACEHOLDERS, **first, **typed}, limits=limits)
    draft = dataclasses.replace(draft, identifier_type=in_order(draft.identifier_type))
    found += _value_violations(place, draft, item, types)
    violations += found
    return None if found else _normal(dataclasses.replace(draft, id=draft.id.lower()))


def _plan(place: str, name: str, item: Node, violations: list[FieldViolation]) -> PlanDraft:
    """Return a plan, with a substitute if its value is not a list."""
    place = f"{place}.plans[{name[:MAX_QUOTED_CHARS]}]"
    if isinstance(item.value, list):
        return PlanDraft(name, _limits(place, item.value, violations))
    violations.append(_violation(place, "", "must be a list of limits", item.line))
    return PlanDraft(name, (LimitDraft("", **_NUMBERS),))


def _limits(
    place: str, items: Iterable[Node], violations: list[FieldViolation]
) -> tuple[LimitDraft, ...]:
    return tuple(
        _limit(f"{place}[{number}]", number, limit, violations)
        for number, limit in enumerate(items)
    )


def _limit(place: str, number: int, item: Node, violations: list[FieldViolation]) -> LimitDraft:
    """Return one limit of a list, with substitutes for missing or mistyped fields."""
    substitutes = {**_NUMBERS}
    if not isinstance(item.value, dict):
        text = "must be a mapping of a limit's fields"
        violations.append(_violation(place, "", text, item.line))
        return LimitDraft(name=f"limit-{number}", **substitutes)
    if "period" in item.value:
        substitutes["window_seconds"] = None
    required = [name for name in FIRST_LIMIT if name in _REQUIRED and substitutes[name] is not None]
    typed = _typed(place, item, LIMIT_TYPES, required=required, violations=violations)
    name = typed.pop("name", f"limit-{number}" if "name" in item.value else "")
    draft = LimitDraft(name, **{**substitutes, **typed}).completed()
    if draft.window_seconds is None:  # the period is invalid
        return dataclasses.replace(draft, window_seconds=_PLACEHOLDERS["window_seconds"])
    return draft


def _normal(draft: RuleDraft) -> RuleDraft:
    """Return the draft as a node returns it: first limits named, and no list for a single limit without a name."""
    plans = tuple(PlanDraft(plan.name, _named(plan.limits)) for plan in draft.plans)
    draft = dataclasses.replace(draft, plans=plans)
    if not draft.limits:
        return draft
    named, *more = _named(draft.limits)
    is_plain = named == LimitDraft(DEFAULT_LIMIT, *(getattr(named, name) for name in FIRST_LIMIT))
    if not more and is_plain:
        return dataclasses.replace(draft, limits=())
    return dataclasses.replace(draft, limits=(named, *more))


def _named(limits: Sequence[LimitDraft]) -> tuple[LimitDraft, ...]:
    first, *more = limits
    return dataclasses.replace(first, name=first.name or DEFAULT_LIMIT), *more


def _typed(
    place: str,
    item: Node,
    types: Mapping[str, str],
    *,
    required: Iterable[str],
    violations: list[FieldViolation],
) -> dict[str, Any]:
    """Return the well-typed fields of a mapping; an unknown, missing or mistyped field is a violation."""
    fields: Any = item.value
    typed = {}
    for name, node in fields.items():
        if name not in types:
            shown = name[:MAX_QUOTED_CHARS]
            violations.append(_violation(place, shown, _unknown(name, types), node.line))
        elif type(node.value) is TYPES[types[name]][0]:
            typed[name] = node.value
        else:
            text = isinstance(node.value, bool | int) and types[name] == "text"
            hint = ": put it in quotes" if text else ""
            violations.append(_violation(place, name, f"must be {types[name]}{hint}", node.line))
    missing = [name for name in required if name not in fields]
    if WINDOW in fields:
        missing = [name for name in missing if name != "window_seconds"]
        _read_window(place, typed, fields, violations)
    for name in missing:
        hint = (
            ": identities without a plan need it" if "plans" in fields and name == "limit" else ""
        )
        violations.append(_violation(place, name, f"is missing{hint}", item.line))
    return typed


def _read_window(
    place: str, typed: dict[str, Any], fields: Mapping[str, Node], violations: list[FieldViolation]
) -> None:
    """Replace a window by its seconds."""
    text = typed.pop(WINDOW, None)
    line = fields[WINDOW].line
    if "window_seconds" in fields:
        violations.append(_violation(place, WINDOW, "give it without window_seconds", line))
    elif text is not None:
        try:
            typed["window_seconds"] = window_of(text)
        except ValueError as error:
            violations.append(_violation(place, WINDOW, str(error), line))


def window_of(text: str) -> int:
    """Return the seconds of a window such as ``30s``, ``1m``, ``12h`` or ``1d``.

    Raises:
        ValueError: the text is not a window; the message names the format.
    """
    if WINDOW_PATTERN.fullmatch(text) is None:
        message = f"must be {DURATION}"
        raise ValueError(message)
    return int(text[:-1]) * _UNITS_S[text[-1]]


def duration_of(seconds: int) -> str:
    """Return a window as :func:`window_of` reads it, in its largest unit."""
    unit = next(unit for unit in ("d", "h", "m", "s") if seconds % _UNITS_S[unit] == 0)
    return f"{seconds // _UNITS_S[unit]}{unit}"


def _value_violations(
    place: str, draft: RuleDraft, item: Node, types: Collection[str] | None
) -> list[FieldViolation]:
    """Return the violations that the node's own validation finds, with their places in the file."""
    try:
        validated(draft, rule_id=draft.id, revision=0, types=types)
    except RuleInvalidError as error:
        # In a file, a plan is its list of limits.
        names = [
            (path.removeprefix("rate_limit.").replace("].limits", "]"), text)
            for path, text in error.violations
        ]
        return [_named_violation(place, name, text, item) for name, text in names]
    return []


def _named_violation(place: str, path: str, text: str, item: Node) -> FieldViolation:
    """Return a violation of a field such as ``limits[1].name``, by the field and the line that the file has for it."""
    found = _innermost(item, path)
    of_window = path.removesuffix("window_seconds")
    if of_window != path and isinstance(found.value, dict) and WINDOW in found.value:
        path, found = of_window + WINDOW, found.value[WINDOW]
    return _violation(place, path, text, found.line)


def _innermost(item: Node, path: str) -> Node:
    """Return the innermost part of the path that the file has."""
    for step in re.findall(r"[^.\[\]]+", path):
        parts: Any = item.value
        if isinstance(parts, dict) and step in parts:
            item = parts[step]
        elif isinstance(parts, list) and step.isdecimal() and int(step) < len(parts):
            item = parts[int(step)]
        else:
            break
    return item


def _duplicates(drafts: Iterable[RuleDraft | None]) -> Iterator[FieldViolation]:
    """Yield every rule with the id, or the endpoint and identifier type, of an earlier rule."""
    first_by_key: dict[tuple[str, ...], int] = {}
    for index, draft in enumerate(drafts):
        if draft is None:
            continue
        for field, key in (
            ("id", (draft.id,)),
            ("endpoint", (draft.endpoint, draft.identifier_type)),
        ):
            first = first_by_key.setdefault(key, index)
            if first != index and key != ("",):
                what = "id" if field == "id" else "endpoint and identifier_type"
                yield FieldViolation(
                    f"{RULES_KEY}[{index}].{field}", f"same {what} as {RULES_KEY}[{first}]"
                )


def _unknown(name: str, known: Iterable[str]) -> str:
    if name == "etag":
        return "the node sets the etag, which changes with every edit: leave it out"
    if name in LIMIT_TYPES and name not in known:
        return "is a field of a limit: write the rule's limits as a list under limits"
    # A longer name is no misspelt one, and takes 0.3 ms to compare.
    close = difflib.get_close_matches(name[:MAX_QUOTED_CHARS], known, n=1)
    return "unknown field" + (f" (did you mean {close[0]}?)" if close else "")


def _violation(place: str, name: str, description: str, line: int) -> FieldViolation:
    path = place + (f".{name}" if name else "")
    return FieldViolation(path, f"{description} (line {line})")


def _refuse(description: str) -> NoReturn:
    raise RuleInvalidError(FieldViolation(RULES_KEY, description)) from None
