"""Finds the rules closest to an endpoint without a rule: after a typing error, or for a path in place of its template.

Pure. Endpoints compare byte for byte: a check of ``/Orders/`` does not match a rule of ``/orders`` and is unlimited.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import IntEnum
from heapq import nsmallest
from itertools import takewhile
from operator import itemgetter
from typing import Final, NamedTuple

from ratelimitd.model import EVERY_ENDPOINT, GLOBAL_ENDPOINT, NearRule, Rule, types_within

MAX_NEAREST: Final = 3

MAX_CONSIDERED: Final = 10_000
"""Rules compared with one endpoint, in about 50 ms; of a larger book, the first ones in no particular order."""

RULES_PER_STEP: Final = 32
"""Rules compared between two yields to the event loop: about 0.2 ms; 1 ms for the most expensive endpoints."""

MAX_SEGMENTS: Final = 16
"""Path segments compared individually; the rest counts as one."""

MAX_SLIPS: Final = 2
"""Consecutive characters in which a misspelled endpoint may differ; two cover a swapped pair."""

METHODS: Final = frozenset(
    {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE"}
)

TEMPLATES: Final = "{<:"
"""First characters of a parameter in the path templates of common frameworks."""


class _Kind(IntEnum):
    """How close an endpoint is, the closest first."""

    SAME_PATH = 0
    TEMPLATE = 1
    SPELLING = 2
    BEGINNING = 3


class _Form(NamedTuple):
    """A parsed endpoint; ``segments`` are those of its path in lower case."""

    text: str
    method: str
    path: str
    query: str
    segments: tuple[str, ...]


_Order = tuple[_Kind, bool, bool, int, str, str]
"""The sort key of a near rule: kind, whether for other types, whether disabled, and the rest."""


class Nearest:
    """The rules nearest to an endpoint for identities of ``types``, among all rules passed to :meth:`look_at`.

    ``only_spelling`` selects only rules that differ in nothing but case, slashes, few letters or names of parameters.
    """

    def __init__(
        self, endpoint: str, types: Collection[str], *, only_spelling: bool = False
    ) -> None:
        self._only_spelling = only_spelling
        self._asked = _form(endpoint)
        self._types = types
        self._best: list[tuple[_Order, NearRule]] = []

    def look_at(self, rules: Iterable[Rule]) -> None:
        """Compare more rules; skips those of the endpoint itself, ``*`` and ``**``."""
        passed = {self._asked.text, GLOBAL_ENDPOINT, EVERY_ENDPOINT}
        near = (self._near(rule) for rule in rules if rule.endpoint not in passed)
        found = [*self._best, *filter(None, near)]
        self._best = nsmallest(MAX_NEAREST, found, key=itemgetter(0))

    def found(self) -> tuple[NearRule, ...]:
        """Return at most :data:`MAX_NEAREST` rules, the nearest first."""
        return tuple([near for _, near in self._best])

    def _near(self, rule: Rule) -> tuple[_Order, NearRule] | None:
        asked, own = self._asked, _form(rule.endpoint)
        if self._only_spelling and not _is_respelled(asked, own):
            return None
        shared = _shared(asked.segments, own.segments)
        longest = max(len(asked.segments), len(own.segments))
        whys = _other_parts(asked, own)
        if asked.segments == own.segments:
            kind, whys = _Kind.SAME_PATH, [*_spellings(asked, own), *whys] or ["differs in case"]
        elif shared == len(asked.segments) == len(own.segments):
            kind, whys = _Kind.TEMPLATE, [*_templates(asked, own), *whys]
        elif _is_misspelled("/".join(asked.segments), "/".join(own.segments)):
            kind, whys = _Kind.SPELLING, ["is spelled nearly the same", *whys]
        elif shared and (shared == len(own.segments) or 2 * shared > longest):
            parts = f"{shared} parts" if shared > 1 else "part"
            kind, whys = _Kind.BEGINNING, [f"begins with the same {parts}"]
        else:
            return None
        is_other = not set(types_within(rule.identifier_type)).issubset(self._types)
        if is_other:
            whys.append(f"is for {rule.identifier_type}")
        if not rule.enabled:
            whys.append("is disabled")
        order = (kind, is_other, not rule.enabled, -shared, rule.endpoint, rule.identifier_type)
        return order, NearRule(rule, ", ".join(whys))


def _form(endpoint: str) -> _Form:
    head, _, rest = endpoint.partition(" ")
    method, path = (head.upper(), rest) if rest and head.upper() in METHODS else ("", endpoint)
    path, _, query = path.partition("?")
    segments = tuple(filter(None, path.lower().split("/", MAX_SEGMENTS)))
    return _Form(endpoint, method, path, query, segments)


def _is_placeholder(segment: str) -> bool:
    """Whether a segment is, or resembles, a template parameter of a common framework."""
    return segment[0] in TEMPLATES or "*" in segment


def _shared(asked: tuple[str, ...], own: tuple[str, ...]) -> int:
    """Return the number of leading segments that two paths share."""
    pairs = zip(asked, own, strict=False)
    agree = (a == b or _is_placeholder(a) or _is_placeholder(b) for a, b in pairs)
    return sum(takewhile(bool, agree))


def _spellings(asked: _Form, own: _Form) -> list[str]:
    """Describe the differences in spelling of two equal paths."""
    parts = [[part for part in one.path.split("/") if part] for one in (asked, own)]
    whys = ["differs in case"] if parts[0] != parts[1] else []
    shapes = [["" if not part else "x" for part in one.path.split("/")] for one in (asked, own)]
    return [*whys, "differs in slashes"] if shapes[0] != shapes[1] else whys


def _other_parts(asked: _Form, own: _Form) -> list[str]:
    """Describe the differences outside the path."""
    whys = []
    if asked.method != own.method:
        whys.append(f"names the method {own.method}" if own.method else "names no method")
    if asked.query != own.query:
        whys.append("has another query" if own.query else "has no query")
    return whys


def _templates(asked: _Form, own: _Form) -> list[str]:
    """Describe how two paths of equal length match; at least one segment is a placeholder."""
    differing = [
        pair for pair in zip(asked.segments, own.segments, strict=True) if len({*pair}) > 1
    ]
    if any("*" in segment and segment[0] not in TEMPLATES for _, segment in differing):
        return ["has a literal *, since endpoints are not patterns"]
    if all(map(_is_placeholder, [segment for segment, _ in differing])):
        both = all(_is_placeholder(segment) for _, segment in differing)
        return ["names a parameter differently" if both else "is one path of this template"]
    return ["is the template of this path: callers must send the template"]


def _is_respelled(asked: _Form, own: _Form) -> bool:
    """Whether the same endpoint may be meant: not another number, method or query, and no path of a template."""
    if (asked.method, asked.query) != (own.method, own.query):
        return False
    one, other = _unnamed(asked), _unnamed(own)
    return one == other or (_digits(one) == _digits(other) and _is_misspelled(one, other))


def _unnamed(form: _Form) -> str:
    return "/".join("{parameter}" if _is_placeholder(one) else one for one in form.segments)


def _digits(text: str) -> list[str]:
    return [one for one in text if one.isdigit()]


def _is_misspelled(asked: str, own: str) -> bool:
    """Whether two texts differ in one place only, in few characters."""
    longest = max(len(asked), len(own))
    if abs(len(asked) - len(own)) > MAX_SLIPS:
        return False
    ahead = _common(asked, own)
    behind = _common(asked[ahead:][::-1], own[ahead:][::-1])
    slips = longest - ahead - behind
    return slips <= MAX_SLIPS and 2 * slips <= ahead + behind


def _common(one: str, other: str) -> int:
    """Return the number of leading characters that two texts share, in few steps."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[:middle]):
            low = middle
        else:
            high = middle - 1
    return low
