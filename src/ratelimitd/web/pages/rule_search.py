"""The search in the rules: filter, sort order and pages."""

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
RULES_PER_ITERATION: Final = 100
"""Rules per event-loop iteration: about 0.5 ms when sorting by traffic."""

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
"""Sort keys; ties sort by endpoint, then identifier type."""


def _match(traffic: Traffic) -> int:
    return traffic.last_ms or int(traffic.judged)


DEFAULT_SORT: Final = "endpoint"
MOST_FIRST: Final = frozenset({"allowed", "blocked", "match"})
"""Sorted in descending order when first selected."""

NEAR: Final = 2
"""Number of linked pages on each side of the current one."""

_PAGE: Final = re.compile(r"[1-9][0-9]{0,5}")


class RuleQuery(NamedTuple):
    """A filter, a sort order and a page; an empty field selects all."""

    text: str = ""
    identifier_type: str = ""
    algorithm: str = ""
    state: str = ""
    sort: str = DEFAULT_SORT
    """One of SORTS; a leading ``-`` sorts in descending order."""
    page: int = 1

    @classmethod
    def of_parameters(cls, given: Mapping[str, str]) -> Self:
        """Return the query in the parameters of an address, without invalid ones."""
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
        """Return whether every rule matches."""
        return not any(self[:4])

    def matches(self, rule: Rule) -> bool:
        """Return whether a rule matches the filter."""
        return (
            self.text.casefold() in rule.endpoint.casefold()
            and self.identifier_type in {"", rule.identifier_type}
            and self.algorithm in {"", rule.algorithm}
            and self.state in {"", STATES[not rule.enabled]}
        )

    def address(self, **changes: Any) -> str:
        """Return the address of this query with changes."""
        *texts, sort, page = self._replace(**changes)
        parameters = dict(zip(("q", "type", "algorithm", "state"), texts, strict=True))
        parameters["sort"] = "" if sort == DEFAULT_SORT else sort
        parameters["page"] = "" if page == 1 else str(page)
        parameters = {key: value for key, value in parameters.items() if value}
        return "/rules" + ("?" + urlencode(parameters) if parameters else "")

    def sorted_by(self, name: str) -> str:
        """Return the address of the rules sorted by ``name``, with the direction reversed if already sorted by it."""
        first, second = (f"-{name}", name) if name in MOST_FIRST else (name, f"-{name}")
        return self.address(sort=second if self.sort == first else first, page=1)

    def direction(self, name: str) -> str:
        """Return the sort direction of ``name`` as an ARIA value; empty if not sorted by it."""
        return {name: "ascending", f"-{name}": "descending"}.get(self.sort, "")


class Found(NamedTuple):
    """One page of results. ``first`` is the number of its first rule, from 1; ``page`` is its number, of ``pages``."""

    rules: Sequence[Rule]
    first: int
    total: int
    page: int
    pages: int

    @property
    def last(self) -> int:
        """Return the number of its last rule."""
        return self.first + len(self.rules) - 1

    @property
    def near(self) -> Sequence[int]:
        """Return the linked pages: the first, the last and those near this one; 0 marks a gap."""
        shown = {1, self.pages, *range(self.page - NEAR, self.page + NEAR + 1)}
        found: list[int] = []
        for number in sorted(shown & {*range(1, self.pages + 1)}):
            if found and number > found[-1] + 1:
                found.append(number - 1 if number == found[-1] + 2 else 0)
            found.append(number)
        return found


async def search(book: RuleBook, query: RuleQuery, traffic: TrafficOf) -> Found:
    """Return the page of ``book`` that ``query`` selects; beyond the last page, the last."""
    key_of, is_down = SORTS[query.sort.removeprefix("-")], query.sort.startswith("-")

    def placed(rule: Rule) -> tuple[Any, ...]:
        return (key_of(rule, traffic), rule.endpoint, rule.identifier_type, rule)

    runs = []
    rules = book.rules()
    while batch := [*islice(rules, RULES_PER_ITERATION)]:
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
        if number % RULES_PER_ITERATION == 0:
            await asyncio.sleep(0)
    return Found(found, first + 1, total, page, pages)
