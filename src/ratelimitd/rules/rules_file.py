"""The rules file: YAML text to rule drafts and back, for ``rules apply``, ``rules export`` and RULES_FILE.

Names everything that is wrong with a file at once, each with its place. Never opens a file and never asks a node.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NoReturn

import yaml

from ratelimitd.errors import FieldViolation, RuleInvalidError
from ratelimitd.rules.plain_yaml import Node, YamlError, read_yaml_file
from ratelimitd.rules.store import MAX_RULES, RuleDraft
from ratelimitd.rules.validation import validated

MAX_FILE_BYTES: Final = 64 * 1024 * 1024
"""An export of ``MAX_RULES`` rules with the longest endpoints of ASCII text fits."""

RULES_KEY: Final = "rules"

FIELDS: Final[Mapping[str, str]] = {
    "id": "text",
    "endpoint": "text",
    "identifier_type": "text",
    "limit": "a whole number",
    "window_seconds": "a whole number",
    "algorithm": "text",
    "enabled": "true or false",
}
"""The fields of a rule in the order of the contract, and what a value of each is called."""

_PLACEHOLDERS: Final[Mapping[str, Any]] = {
    "endpoint": "*",
    "identifier_type": "user",
    "limit": 1,
    "window_seconds": 1,
    "algorithm": "token_bucket",
}
"""The fields a rule must have, each with a value to go on with where the file's is missing or of another kind, so that
what is wrong with the others is named in the same run."""

_TYPES: Final = {"text": str, "a whole number": int, "true or false": bool}

_NOT_PLAIN_IN_YAML: Final = re.compile("[\u007f-\u009f\u2028\u2029\ufeff\ufffe\uffff]")

_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def parse_rules(data: bytes) -> tuple[RuleDraft, ...]:
    """Return the rules of a file in its order; a given id is in lower case.

    Raises:
        RuleInvalidError: names every violated field by its place, such as ``rules[3].limit``; ``rules`` stands for the
            whole file.
    """
    try:
        document = read_yaml_file(data, MAX_FILE_BYTES)
    except YamlError as error:
        _refuse(str(error))
    violations: list[FieldViolation] = []
    drafts = [_draft(index, item, violations) for index, item in enumerate(_items(document))]
    violations += _duplicates(drafts)
    if violations:
        raise RuleInvalidError(*violations)
    return tuple(draft for draft in drafts if draft is not None)


def dump_rules(drafts: Iterable[RuleDraft]) -> str:
    """Return the text of a file that :func:`parse_rules` reads back as ``drafts``."""
    items = [{field: getattr(draft, field) for field in FIELDS} for draft in drafts]
    text: str = yaml.dump(
        {RULES_KEY: items}, Dumper=_DUMPER, sort_keys=False, allow_unicode=True, width=2**31 - 1
    )
    return text


def dump_rules_json(drafts: Iterable[RuleDraft]) -> str:
    """Return the same file in JSON, which is YAML as well."""
    items = [{field: getattr(draft, field) for field in FIELDS} for draft in drafts]
    text = json.dumps({RULES_KEY: items}, indent=2, ensure_ascii=False)
    # JSON may hold these as they are; YAML refuses them or takes them for the end of a line.
    return _NOT_PLAIN_IN_YAML.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _items(document: Node) -> list[Node]:
    """Return the items of the one key ``rules``."""
    top = document.value
    if not isinstance(top, dict) or RULES_KEY not in top:
        _refuse(
            "the file must be a mapping with the key rules; an empty book is written as rules: []"
        )
    if unknown := [key for key in top if key != RULES_KEY]:
        _refuse(f"line {top[unknown[0]].line}: unknown key {unknown[0]!r} beside rules")
    items = top[RULES_KEY].value
    if not isinstance(items, list):
        _refuse(f"line {top[RULES_KEY].line}: rules must be a list; an empty one is written as []")
    if len(items) > MAX_RULES:
        _refuse(f"more than {MAX_RULES} rules")
    return items


def _draft(index: int, item: Node, violations: list[FieldViolation]) -> RuleDraft | None:
    """Return the draft of one item, ``None`` when something about it is wrong and was added to ``violations``."""
    if not isinstance(item.value, dict):
        violations.append(_violation(index, "", "must be a mapping of a rule's fields", item.line))
        return None
    fields = item.value
    typed = {name: node.value for name, node in fields.items() if _well_typed(name, node)}
    draft = RuleDraft(**{**_PLACEHOLDERS, **typed})
    found = [*_field_violations(index, item), *_value_violations(index, draft, fields)]
    violations += found
    return None if found else dataclasses.replace(draft, id=draft.id.lower())


def _field_violations(index: int, item: Node) -> Iterator[FieldViolation]:
    """Name the fields that are no fields, that are missing, and that hold another kind of value."""
    fields: Any = item.value
    for name, node in fields.items():
        if name not in FIELDS:
            yield _violation(index, name, _unknown(name), node.line)
        elif not _well_typed(name, node):
            text = isinstance(node.value, bool | int) and FIELDS[name] == "text"
            hint = ": put it in quotes" if text else ""
            yield _violation(index, name, f"must be {FIELDS[name]}{hint}", node.line)
    for name in _PLACEHOLDERS:
        if name not in fields:
            yield _violation(index, name, "is missing", item.line)


def _well_typed(name: str, node: Node) -> bool:
    return name in FIELDS and type(node.value) is _TYPES[FIELDS[name]]


def _value_violations(
    index: int, draft: RuleDraft, fields: Mapping[str, Node]
) -> list[FieldViolation]:
    """Judge the values as the node itself would, and name them by their place in the file."""
    try:
        validated(draft, rule_id=draft.id, revision=0)
    except RuleInvalidError as error:
        names = [(path.removeprefix("rate_limit."), text) for path, text in error.violations]
        return [_violation(index, name, text, fields[name].line) for name, text in names]
    return []


def _duplicates(drafts: Iterable[RuleDraft | None]) -> Iterator[FieldViolation]:
    """Name every rule whose id, or whose endpoint and identifier type, an earlier rule of the file has."""
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


def _unknown(name: str) -> str:
    if name == "etag":
        return "the etag is the node's and changes with every edit: leave it out"
    close = difflib.get_close_matches(name, FIELDS, n=1)
    return "unknown field" + (f" (did you mean {close[0]}?)" if close else "")


def _violation(index: int, name: str, description: str, line: int) -> FieldViolation:
    path = f"{RULES_KEY}[{index}]" + (f".{name}" if name else "")
    return FieldViolation(path, f"{description} (line {line})")


def _refuse(description: str) -> NoReturn:
    """Refuse the file as a whole."""
    raise RuleInvalidError(FieldViolation(RULES_KEY, description)) from None
