"""The rules that are looked for, in the order that is asked for, a page at a time."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from heapq import merge
from itertools import islice
from typing import Any, Final, NamedTuple, Self
from urllib.parse import urlencode

from ratelimitd.model import Rule
from ratelimitd.observe.rule_traffic import Traffic
from ratelimitd.rules.book import RuleBook
from ratelimitd.rules.validation import MAX_ENDPOINT_CHARS

PAGE_RULES: Final = 50
RULES_PER_TURN: Final = 100
"""About 0.5 ms, if they are sorted by their traffic."""

STATES: Final = ("enabled", "disabled")

TrafficOf = Callable[[str], Traffic]
"""Returns the traffic of a rule by its id."""

SORTS: Final[Mapping[str, Callable[[Rule, TrafficOf], Any]]] = {
    "endpoint": lambda rule, _: rule.endpoint,
    "type": lambda rule, _: rule.identifier_type,
    "limit": lambda rule, _: rule.limit,
    "allowed": lambda rule, traffic: traffic(rule.id).allowed,
    "blocked": lambda rule, traffic: traffic(rule.id).blocked,
    "match": lambda rule, traffic: _match(traffic(rule.id)),
}
"""What rules are sorted by; among equals by endpoint, then identifier type."""


def _match(traffic: Traffic) -> int:
    return traffic.last_ms or int(traffic.judged)


DEFAULT_SORT: Final = "endpoint"
MOST_FIRST: Final = frozenset({"allowed", "blocked", "match"})
"""Sorted from the top down when they are first chosen."""

NEAR: Final = 2
"""Numbers of pages on each side of the current one that there are links to."""

_PAGE: Final = re.compile(r"[1-9][0-9]{0,5}")


class RuleQuery(NamedTuple):
    """What is looked for, in which order, and which page of it; an empty field selects all."""

    text: str = ""
    identifier_type: str = ""
    algorithm: str = ""
    state: str = ""
    sort: str = DEFAULT_SORT
    """One of SORTS; with a ``-`` in front from the top down."""
    page: int = 1

    @classmethod
    def of_parameters(cls, given: Mapping[str, str]) -> Self:
        """From the parameters of an address; what makes no sense is left out."""
        sort, page = given.get("sort", ""), given.get("page", "")
        number = int(page) if _PAGE.fullmatch(page) else 1
        return cls(
            given.get("q", "").strip()[:MAX_ENDPOINT_CHARS],
            given.get("type", ""),
            given.get("algorithm", ""),
            given.get("state", ""),
            sort if sort.removeprefix("-") in SORTS else DEFAULT_SORT,
            number,
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

    def address(self, **changes: Any) -> str:
        """The address of this query with changes."""
        *texts, sort, page = self._replace(**changes)
        parameters = dict(zip(("q", "type", "algorithm", "state"), texts, strict=True))
        parameters["sort"] = "" if sort == DEFAULT_SORT else sort
        parameters["page"] = "" if page == 1 else str(page)
        parameters = {key: value for key, value in parameters.items() if value}
        return "/rules" + ("?" + urlencode(parameters) if parameters else "")

    def sorted_by(self, name: str) -> str:
        """The address of the rules sorted by ``name``; in the other direction if they are already."""
        first, second = (f"-{name}", name) if name in MOST_FIRST else (name, f"-{name}")
        return self.address(sort=second if self.sort == first else first, page=1)

    def direction(self, name: str) -> str:
        """How the rules are sorted by ``name``, as ARIA says it; empty if they are not."""
        return {name: "ascending", f"-{name}": "descending"}.get(self.sort, "")


class Found(NamedTuple):
    """One page of results. ``first`` is the number of its first rule, from 1; ``page`` its own, of ``pages``."""

    rules: Sequence[Rule]
    first: int
    total: int
    page: int
    pages: int

    @property
    def last(self) -> int:
        """The number of its last rule."""
        return self.first + len(self.rules) - 1

    @property
    def near(self) -> Sequence[int]:
        """The pages that there are links to: the first, the last and those near this one; 0 stands for a gap."""
        shown = {1, self.pages, *range(self.page - NEAR, self.page + NEAR + 1)}
        found: list[int] = []
        for number in sorted(shown & {*range(1, self.pages + 1)}):
            if found and number > found[-1] + 1:
                found.append(number - 1 if number == found[-1] + 2 else 0)
            found.append(number)
        return found


async def search(book: RuleBook, query: RuleQuery, traffic: TrafficOf) -> Found:
    """The page of ``book`` that ``query`` asks for; behind the last page it is the last."""
    key_of, is_down = SORTS[query.sort.removeprefix("-")], query.sort.startswith("-")

    def placed(rule: Rule) -> tuple[Any, ...]:
        return (key_of(rule, traffic), rule.endpoint, rule.identifier_type, rule)

    runs = []
    rules = book.rules()
    while batch := [*islice(rules, RULES_PER_TURN)]:
        runs.append(sorted(map(placed, filter(query.matches, batch)), reverse=is_down))
        await asyncio.sleep(0)
    total = sum(map(len, runs))
    pages = max(1, -(-total // PAGE_RULES))
    page = min(query.page, pages)
    first = PAGE_RULES * (page - 1)
    found: list[Rule] = []
    for number, (*_, rule) in enumerate(islice(merge(*runs, reverse=is_down), first + PAGE_RULES)):
        if number >= first:
            found.append(rule)
        if number % RULES_PER_TURN == 0:
            await asyncio.sleep(0)
    return Found(found, first + 1, total, page, pages)
