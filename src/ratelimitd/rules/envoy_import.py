"""Converts the limits of an envoyproxy/ratelimit configuration to rule drafts, with notes on limits without equivalent.

Maps descriptors as :mod:`ratelimitd.services.convert_envoy` maps them to checks. Opens no file and calls no node. See
ADR 0033.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, Final, NamedTuple, NoReturn

from ratelimitd.errors import FieldViolation, RuleInvalidError
from ratelimitd.model import (
    DEFAULT_LIMIT,
    EVERY_ENDPOINT,
    GLOBAL_ENDPOINT,
    INT32_MAX,
    Algorithm,
    Enforcement,
    IdentifierType,
)
from ratelimitd.rules.store import LimitDraft, RuleDraft
from ratelimitd.rules.validation import validated
from ratelimitd.rules.yaml_reader import Node, YamlError, read_yaml_file

MAX_FILE_BYTES: Final = 4 * 1024 * 1024
"""Far above the size of real files."""

UNNAMED_TYPE: Final = IdentifierType.API_KEY
"""Identifier type of a limit whose descriptor names none."""

_DAY_S: Final = 86_400

_UNITS: Final = {
    "second": 1,
    "minute": 60,
    "hour": 3_600,
    "day": _DAY_S,
    "week": 7 * _DAY_S,
    "month": 30 * _DAY_S,
    "year": 365 * _DAY_S,
}
"""Seconds per unit, as in its ``UnitToDivider``. Its units are aligned to the Unix epoch, as fixed windows are here."""

_UNLIMITED: Final = (INT32_MAX, 1)
"""Requests and seconds of a rule that never denies, which keeps the ``*`` rule from applying."""

_OBSERVE: Final = ("shadow_mode", "quota_mode")
"""Keys of a descriptor whose limit never denies."""

_TRUE: Final = frozenset({"true", "yes", "on", "y"})

_LIMIT_KEYS: Final = frozenset({"unit", "requests_per_unit", "name", "unlimited", "replaces"})
_KEYS: Final = frozenset({"key", "value", "rate_limit", "descriptors", *_OBSERVE})
_TOP_KEYS: Final = frozenset({"domain", "descriptors"})


class Note(NamedTuple):
    """A remark on one place of the file."""

    line: int
    place: str
    text: str

    def __str__(self) -> str:
        """One line."""
        return f"line {self.line}: {self.place}: {self.text}"


class Imported(NamedTuple):
    """The rules of a file, notes in file order, the keys to add to ENVOY_IDENTIFIERS, and the limits left out."""

    rules: Sequence[RuleDraft]
    notes: Sequence[Note]
    new_identifiers: Mapping[str, str]
    left_out: int


class _Entry(NamedTuple):
    """One level of a descriptor; a ``value`` of ``None`` matches any."""

    key: str
    value: str | None


class _Limit(NamedTuple):
    """A descriptor with a limit, and the levels above it."""

    line: int
    entries: tuple[_Entry, ...]
    fields: Mapping[str, Node]
    observes: bool
    lost: tuple[Note, ...]
    """Notes on properties that its rule does not have."""


def import_config(data: bytes, identifiers: Mapping[str, str]) -> Imported:
    """Return the rules of a file for a node with these ``identifiers``, key → type.

    Raises:
        RuleInvalidError: the file has another format, or a value that envoyproxy/ratelimit refuses, too.
    """
    notes: list[Note] = []
    domain, top = _domain_and_descriptors(data, notes)
    limits = [*_limits(top, (), domain, notes)]
    new = dict.fromkeys(_new_keys(limits, identifiers), UNNAMED_TYPE)
    every = {**identifiers, **new}
    rules: dict[tuple[str, str], RuleDraft] = {}
    sources: dict[tuple[str, str], _Limit] = {}
    for limit in limits:
        place = _place(domain, limit.entries)
        _verify(limit.fields, limit.line, place)
        try:
            rule = _rule(domain, limit, every)
            if (rule.endpoint, rule.identifier_type) in rules:
                _leave_out("an earlier limit has the same endpoint and type")
        except ValueError as reason:
            notes.append(Note(limit.line, place, str(reason)))
            continue
        notes += limit.lost
        rules[rule.endpoint, rule.identifier_type] = rule
        sources[rule.endpoint, rule.identifier_type] = limit
    notes += _charged_together(sources, domain)
    notes += _charged_without_key(sources, domain, every)
    return Imported([*rules.values()], sorted(notes), new, len(limits) - len(rules))


def _domain_and_descriptors(data: bytes, notes: list[Note]) -> tuple[str, Node]:
    try:
        document = read_yaml_file(data, MAX_FILE_BYTES)
    except YamlError as error:
        _refuse(str(error))
    top: Any = document.value if isinstance(document.value, dict) else {}
    domain = _text(top.get("domain"))
    if not domain:
        _refuse("the file must be a mapping with a domain and descriptors")
    notes += _unknown(top, _TOP_KEYS, domain)
    return domain, top.get("descriptors", Node([], document.line))


def _limits(
    items: Node, above: tuple[_Entry, ...], domain: str, notes: list[Note]
) -> Iterator[_Limit]:
    """Yield every limit of a list of descriptors and of nested ones; add other findings to ``notes``."""
    descriptors = items.value
    if descriptors is None:
        return
    if not isinstance(descriptors, list):
        _refuse(f"line {items.line}: {_place(domain, above)}: descriptors must be a list")
    for item in descriptors:
        fields: Any = item.value if isinstance(item.value, dict) else {}
        key = _text(fields.get("key"))
        if not key:
            _refuse(f"line {item.line}: {_place(domain, above)}: a descriptor must have a key")
        entries = (*above, _Entry(key, _text(fields.get("value")) or None))
        place = _place(domain, entries)
        notes += _unknown(fields, _KEYS | _LIMIT_KEYS, place)
        notes += [
            Note(fields[name].line, place, f"{name} is ignored: it belongs under rate_limit")
            for name in fields.keys() & _LIMIT_KEYS
        ]
        value: Any = fields.get("rate_limit", Node(None, item.line)).value
        if value is not None:
            limit = value if isinstance(value, dict) else {}
            observes = any(_is_true(fields.get(name)) for name in _OBSERVE)
            lost = tuple(_lost(fields, limit, place))
            yield _Limit(item.line, entries, limit, observes, lost)
        elif "descriptors" not in fields:
            notes.append(Note(item.line, place, "has no limit, so it needs no rule"))
        if "descriptors" in fields:
            yield from _limits(fields["descriptors"], entries, domain, notes)


def _lost(fields: Mapping[str, Node], limit: Mapping[str, Node], place: str) -> Iterator[Note]:
    """Yield a note for each property of a limit that its rule does not have."""
    if _is_true(fields.get("quota_mode")):
        text = "quota_mode has no equivalent: the limit only observes, and reports no quota"
        yield Note(fields["quota_mode"].line, place, text)
    if "name" in limit:
        yield Note(limit["name"].line, place, "the name of the limit has no equivalent")


def _unknown(fields: Mapping[str, Node], known: frozenset[str], place: str) -> list[Note]:
    names = fields.keys() - known
    return [Note(fields[name].line, place, f"{name} has no equivalent") for name in names]


def _new_keys(limits: Sequence[_Limit], identifiers: Mapping[str, object]) -> Iterator[str]:
    """Yield the keys that must be identifiers because each of their values has its own limit."""
    for limit in limits:
        if any(entry.key in identifiers for entry in limit.entries):
            continue
        open_keys = [entry.key for entry in limit.entries if entry.value is None]
        if len(open_keys) == 1:
            yield open_keys[0]


def _charged_together(sources: Mapping[tuple[str, str], _Limit], domain: str) -> Iterator[Note]:
    """Yield a note for each two limits that one descriptor charges; envoyproxy/ratelimit charges only the deepest."""
    for (endpoint, kind), limit in sources.items():
        kinds = kind.split("+")
        for size in range(1, len(kinds)):
            for fewer in combinations(kinds, size):
                other = sources.get((endpoint, "+".join(fewer)))
                if other is not None and not _is_true(other.fields.get("unlimited")):
                    text = (
                        f"a descriptor with these keys also charges the limit of line {other.line}; if Envoy sends the"
                        " descriptor of that limit, too, a request charges it twice"
                    )
                    yield Note(limit.line, _place(domain, limit.entries), text)


def _charged_without_key(
    sources: Mapping[tuple[str, str], _Limit], domain: str, identifiers: Mapping[str, str]
) -> Iterator[Note]:
    """Yield a note for each limit of an API key that also counts a descriptor without it, whose last value is one."""
    for (endpoint, kind), limit in sources.items():
        keys = [one.key for one in limit.entries if one.key in identifiers]
        unlimited = _is_true(limit.fields.get("unlimited"))
        if kind == UNNAMED_TYPE.value and keys and endpoint != domain and not unlimited:
            text = (
                f"a descriptor without {keys[0]} is limited, too, by its last value; if Envoy sends it, give"
                f" {keys[0]} a type of its own"
            )
            yield Note(limit.line, _place(domain, limit.entries), text)


def _rule(domain: str, limit: _Limit, identifiers: Mapping[str, str]) -> RuleDraft:
    """Return the rule equivalent to a limit.

    Raises:
        ValueError: no rule is equivalent; the message says why.
    """
    requests, window_seconds = _numbers(limit.fields)
    entries = limit.entries
    named: dict[str, _Entry] = {}
    for entry in entries:
        if entry.key in identifiers:
            named.setdefault(identifiers[entry.key], entry)
    rest = [entry for entry in entries if not any(entry is one for one in named.values())]
    for key in (entry.key for entry in named.values() if entry.value is not None):
        _leave_out(
            f"it is for one {identifiers[key]} only, and a rule is for all of them; without {key} in ENVOY_IDENTIFIERS"
            " it could be a rule"
        )
    for entry in rest:
        if entry.value is None:
            _leave_out(f"it is for each value of {entry.key}, and a rule is for one")
        if entry.value.endswith("*"):
            _leave_out(f"it is for all values of {entry.key} with a prefix, and a rule is for one")
    endpoint = "/".join([domain, *(f"{entry.key}={entry.value}" for entry in rest)])
    if endpoint in {GLOBAL_ENDPOINT, EVERY_ENDPOINT}:
        _leave_out(f"a node refuses the domain {domain}, which in a rule means other endpoints")
    numbers = (requests, window_seconds, Algorithm.FIXED_WINDOW.value)
    observed = LimitDraft(DEFAULT_LIMIT, *numbers, enforcement=Enforcement.OBSERVE.value)
    draft = RuleDraft(
        endpoint,
        "+".join(sorted(named)) or UNNAMED_TYPE.value,
        *numbers,
        limits=(observed,) if limit.observes else (),
    )
    try:
        validated(draft, rule_id="", revision=0)
    except RuleInvalidError as error:
        _leave_out("; ".join(violation.description for violation in error.violations))
    return draft


def _verify(fields: Mapping[str, Node], line: int, place: str) -> None:
    """Refuse values of a ``rate_limit`` that envoyproxy/ratelimit refuses, too."""
    unit = fields.get("unit", Node(None, line))
    requests = fields.get("requests_per_unit", Node(0, line))
    if _is_true(fields.get("unlimited")):
        if _text(unit):
            _refuse(f"line {unit.line}: {place}: unit and unlimited exclude each other")
    elif _text(unit).lower() not in _UNITS:
        _refuse(f"line {unit.line}: {place}: unit must be one of {', '.join(_UNITS)}")
    number = requests.value
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        _refuse(f"line {requests.line}: {place}: requests_per_unit must be a whole number")


def _numbers(fields: Mapping[str, Node]) -> tuple[int, int]:
    """Return requests and seconds of a verified ``rate_limit``."""
    if "replaces" in fields:
        _leave_out("replaces has no equivalent: every limit applies in addition to the others")
    if unknown := sorted(fields.keys() - _LIMIT_KEYS):
        _leave_out(f"{', '.join(unknown)} has no equivalent")
    if _is_true(fields.get("unlimited")):
        return _UNLIMITED
    requests: Any = fields.get("requests_per_unit", Node(0, 0)).value
    if requests == 0:
        _leave_out("a limit is at least 1; deny requests that must never pass in Envoy's routes")
    return requests, _UNITS[_text(fields["unit"]).lower()]


def _place(domain: str, entries: Sequence[_Entry]) -> str:
    levels = (e.key if e.value is None else f"{e.key}={e.value}" for e in entries)
    return "/".join([domain, *levels])


def _text(node: Node | None) -> str:
    """Return a scalar as written in the file; empty for null."""
    return "" if node is None or node.value is None else node.text


def _is_true(node: Node | None) -> bool:
    """Return whether a flag is set, also in the words of YAML 1.1, which envoyproxy/ratelimit reads."""
    return _text(node).lower() in _TRUE


def _leave_out(reason: str) -> NoReturn:
    message = f"left out: {reason}"
    raise ValueError(message)


def _refuse(description: str) -> NoReturn:
    raise RuleInvalidError(FieldViolation("file", description)) from None
