"""Finding rules in the book: by a part of the endpoint, by type, algorithm and state, a page at a time.

Asks no database. The work is done in slices with a turn of the event loop between two, so that 100,000 rules hold up no
check.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest, nsmallest
from itertools import islice
from typing import Final, NamedTuple, Self
from urllib.parse import urlencode

from ratelimitd.model import Rule
from ratelimitd.rules.book import RuleBook

PAGE_RULES: Final = 50
RULES_PER_TURN: Final = 1_000
"""About 0.4 ms."""

STATES: Final = ("enabled", "disabled")

Place = tuple[str, str]
"""Endpoint and identifier type: rules are in this order, by their bytes."""


class RuleQuery(NamedTuple):
    """What is looked for, and which page of it; an empty field selects all."""

    text: str = ""
    identifier_type: str = ""
    algorithm: str = ""
    state: str = ""
    after: Place | None = None
    """The page begins behind this place."""
    before: Place | None = None
    """The page ends in front of it."""

    @classmethod
    def of_parameters(cls, given: Mapping[str, str]) -> Self:
        """From the parameters of an address."""
        return cls(
            given.get("q", "").strip(),
            given.get("type", ""),
            given.get("algorithm", ""),
            given.get("state", ""),
            _place(given, "after"),
            _place(given, "before"),
        )

    @property
    def selects_all(self) -> bool:
        """Whether every rule matches."""
        return not any(self[:4])

    def matches(self, rule: Rule) -> bool:
        """Whether it is looked for, on whichever page."""
        return (
            self.text.casefold() in rule.endpoint.casefold()
            and self.identifier_type in {"", rule.identifier_type}
            and self.algorithm in {"", rule.algorithm}
            and self.state in {"", STATES[not rule.enabled]}
        )

    def address(self, name: str = "", place: Place | None = None) -> str:
        """The address of the page that ``name``, ``after`` or ``before``, says from ``place`` on."""
        texts = zip(("q", "type", "algorithm", "state"), self[:4], strict=True)
        parameters = {key: value for key, value in texts if value}
        if place is not None:
            parameters |= {name: place[0], f"{name}_type": place[1]}
        return "/rules" + ("?" + urlencode(parameters) if parameters else "")


class Found(NamedTuple):
    """One page of what was found. ``first`` is the number of its first rule, from 1."""

    rules: Sequence[Rule]
    first: int
    total: int

    @property
    def last(self) -> int:
        """The number of its last rule."""
        return self.first + len(self.rules) - 1


async def search(book: RuleBook, query: RuleQuery) -> Found:
    """The page of ``book`` that ``query`` asks for."""
    total = in_front = 0
    page: list[Rule] = []
    rules = book.rules()
    while batch := [*islice(rules, RULES_PER_TURN)]:
        matching = [rule for rule in batch if query.matches(rule)]
        total += len(matching)
        if query.before is not None:
            candidates = [rule for rule in matching if place_of(rule) < query.before]
            in_front += len(candidates)
            page = nlargest(PAGE_RULES, page + candidates, key=place_of)
        else:
            candidates = _behind(query.after, matching)
            in_front += len(matching) - len(candidates)
            page = nsmallest(PAGE_RULES, page + candidates, key=place_of)
        await asyncio.sleep(0)
    if query.before is not None:
        page.reverse()
        in_front -= len(page)
    return Found(page, in_front + 1, total)


def place_of(rule: Rule) -> Place:
    """Where it stands among all rules."""
    return rule.endpoint, rule.identifier_type


def _behind(after: Place | None, rules: Iterable[Rule]) -> list[Rule]:
    return [rule for rule in rules if after is None or place_of(rule) > after]


def _place(given: Mapping[str, str], name: str) -> Place | None:
    return (given[name], given.get(f"{name}_type", "")) if name in given else None
