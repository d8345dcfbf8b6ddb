"""Which rules are nearly for an endpoint that has none: a typing error misses them, or a path sent for its template.

Pure. Endpoints are compared byte for byte, so that a check of ``/Orders/`` passes a rule of ``/orders`` unlimited.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import IntEnum
from heapq import nsmallest
from itertools import takewhile
from typing import Final, NamedTuple

from ratelimitd.model import EVERY_ENDPOINT, GLOBAL_ENDPOINT, NearRule, Rule, types_within

MAX_NEAREST: Final = 3

MAX_LOOKED_AT: Final = 10_000
"""Rules that are compared with one endpoint, in some 50 ms; of a longer book the first in no particular order."""

RULES_PER_STEP: Final = 32
"""Rules compared between two yields to the event loop: about 0.2 ms, and 1 ms of the most expensive endpoints."""

MAX_SEGMENTS: Final = 16
"""Parts of a path that are compared one by one; what follows counts as one."""

MAX_SLIPS: Final = 2
"""Characters in a row in which a misspelled endpoint may differ; two cover a pair that is swapped."""

METHODS: Final = frozenset(
    {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE"}
)

TEMPLATES: Final = "{<:"
"""How a parameter begins in the templates of the usual frameworks."""


class _Kind(IntEnum):
    """How near an endpoint is, the nearest first."""

    SAME_PATH = 0
    TEMPLATE = 1
    SPELLING = 2
    BEGINNING = 3


class _Form(NamedTuple):
    """An endpoint taken apart; ``segments`` are those of its path without upper case."""

    text: str
    method: str
    path: str
    query: str
    segments: tuple[str, ...]


class _Near(NamedTuple):
    """A near rule with what orders it: kind, whether it is for other types, whether it is off, and the rest."""

    order: tuple[int, bool, bool, int, str, str]
    near: NearRule


class Nearest:
    """The rules that are nearest to an endpoint for identities of ``types``, of all that :meth:`look_at` is given.

    ``only_spelling``: none but those that differ in case, slashes, few letters or names of parameters alone.
    """

    def __init__(
        self, endpoint: str, types: Collection[str], *, only_spelling: bool = False
    ) -> None:
        self._only_spelling = only_spelling
        self._asked = _form(endpoint)
        self._types = types
        self._best: list[_Near] = []

    def look_at(self, rules: Iterable[Rule]) -> None:
        """Compare more rules; those of the endpoint itself, ``*`` and ``**`` are looked at elsewhere."""
        passed = {self._asked.text, GLOBAL_ENDPOINT, EVERY_ENDPOINT}
        near = (self._near(rule) for rule in rules if rule.endpoint not in passed)
        found = [*self._best, *filter(None, near)]
        self._best = nsmallest(MAX_NEAREST, found, key=lambda one: one.order)

    def found(self) -> tuple[NearRule, ...]:
        """Return at most :data:`MAX_NEAREST` rules, the nearest first."""
        return tuple([one.near for one in self._best])

    def _near(self, rule: Rule) -> _Near | None:
        asked, own = self._asked, _form(rule.endpoint)
        shared = _shared(asked.segments, own.segments)
        longest = max(len(asked.segments), len(own.segments))
        whys = _other_parts(asked, own)
        if self._only_spelling and not _is_respelled(asked, own):
            return None
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
        return _Near(order, NearRule(rule, ", ".join(whys)))


def _form(endpoint: str) -> _Form:
    head, _, rest = endpoint.partition(" ")
    method, path = (head.upper(), rest) if rest and head.upper() in METHODS else ("", endpoint)
    path, _, query = path.partition("?")
    segments = tuple(filter(None, path.lower().split("/", MAX_SEGMENTS)))
    return _Form(endpoint, method, path, query, segments)


def _is_placeholder(segment: str) -> bool:
    """Whether a segment stands for any, in a template of one of the usual frameworks, or is meant to."""
    return segment[0] in TEMPLATES or "*" in segment


def _shared(asked: tuple[str, ...], own: tuple[str, ...]) -> int:
    """Return how many segments two paths have in common at their beginning."""
    pairs = zip(asked, own, strict=False)
    return sum(1 for _ in takewhile(_agree, pairs))


def _agree(pair: tuple[str, str]) -> bool:
    one, other = pair
    return one == other or _is_placeholder(one) or _is_placeholder(other)


def _spellings(asked: _Form, own: _Form) -> list[str]:
    """Say in what two equal paths differ."""
    parts = [[part for part in one.path.split("/") if part] for one in (asked, own)]
    whys = ["differs in case"] if parts[0] != parts[1] else []
    shapes = [["" if not part else "x" for part in one.path.split("/")] for one in (asked, own)]
    return [*whys, "differs in slashes"] if shapes[0] != shapes[1] else whys


def _other_parts(asked: _Form, own: _Form) -> list[str]:
    """Say what else than the path differs."""
    whys = []
    if asked.method != own.method:
        whys.append(f"names the method {own.method}" if own.method else "names no method")
    if asked.query != own.query:
        whys.append("has another query" if own.query else "has no query")
    return whys


def _templates(asked: _Form, own: _Form) -> list[str]:
    """Say how two paths of equal length match each other; one segment at least is a placeholder."""
    differing = [
        pair for pair in zip(asked.segments, own.segments, strict=True) if len({*pair}) > 1
    ]
    if any("*" in segment and segment[0] not in TEMPLATES for _, segment in differing):
        return ["has a * that stands for itself alone, since endpoints are no patterns"]
    if all(map(_is_placeholder, [segment for segment, _ in differing])):
        both = all(_is_placeholder(segment) for _, segment in differing)
        return ["names a parameter otherwise" if both else "is one path of this template"]
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
    """Whether two texts differ in one place, of few characters beside those that they share."""
    longest = max(len(asked), len(own))
    if abs(len(asked) - len(own)) > MAX_SLIPS:
        return False
    ahead = _common(asked, own)
    behind = _common(asked[ahead:][::-1], own[ahead:][::-1])
    slips = longest - ahead - behind
    return slips <= MAX_SLIPS and 2 * slips <= ahead + behind


def _common(one: str, other: str) -> int:
    """Return how many characters two texts have in common at their beginning, in few steps."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[:middle]):
            low = middle
        else:
            high = middle - 1
    return low
