"""The rule book: an immutable snapshot of all rules, replaced whole, that selects the rule of each check.

A check in flight keeps the book it started with. See ADR 0001 for the precedence, ADR 0013 for the updates of a book.

A book is two indexes, by (endpoint, identifier type) and by id, each split into ``SHARDS`` dicts. A new book shares
every unchanged dict with its predecessor: an edit of one rule of 100,000 copies three or four dicts of about 400
entries (20 µs) instead of two of 100,000 (several ms, during which no check would be answered).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Final, Self

from ratelimitd.model import EVERY_ENDPOINT, EVERYBODY, GLOBAL_ENDPOINT, Match, Rule, types_within
from ratelimitd.rules.store import in_steps

SHARDS: Final = 256
"""Dicts per index; a power of two. At 100,000 rules each holds about 400, and the tuple of them is copied in 0.5 µs."""

RULES_PER_STEP: Final = 256
"""Rules applied between two yields to the event loop: about 0.5 ms."""

_MASK: Final = SHARDS - 1

_Pair = tuple[str, str]
_Shards = tuple[dict[_Pair, Rule], ...]
_IdShards = tuple[dict[str, Rule], ...]


class RuleBook:
    """Every rule as of one ``revision`` of the store, at most one per id and per (endpoint, identifier type).

    Shards depend on the process's own ``hash`` and never leave the process. Endpoints compare byte for byte.
    """

    __slots__ = ("_by_id", "_by_pair", "_plans", "_types", "revision")

    def __init__(  # noqa: PLR0917 -- its parts
        self,
        by_pair: _Shards,
        by_id: _IdShards,
        types: Counter[str],
        plans: Counter[str],
        revision: int,
    ) -> None:
        self._by_pair = by_pair
        self._by_id = by_id
        self._types = types
        self._plans = plans
        self.revision: Final = revision

    @classmethod
    def empty(cls) -> Self:
        """Return a book without rules."""
        # All shards share one empty dict: an editor copies a shard before it writes.
        no_pairs: dict[_Pair, Rule] = {}
        no_ids: dict[str, Rule] = {}
        return cls((no_pairs,) * SHARDS, (no_ids,) * SHARDS, Counter(), Counter(), 0)

    @classmethod
    def of(cls, rules: Iterable[Rule], revision: int) -> RuleBook:
        """Return a book of these rules; of two with the same id or pair, the later one wins."""
        editor = BookEditor(cls.empty())
        for rule in rules:
            editor.put(rule)
        return editor.finish(revision)

    def match(self, endpoint: str, identifier_type: str) -> Rule | None:
        """Return the deciding rule: the endpoint's own if enabled, else the enabled ``*`` rule, else ``None``."""
        return self._enabled(endpoint, identifier_type) or self._enabled(
            GLOBAL_ENDPOINT, identifier_type
        )

    def applicable(self, endpoint: str, types: Sequence[str]) -> Iterator[tuple[Rule, str]]:
        """Yield every rule that applies to a check with identities of ``types``, and the endpoint of its bucket.

        For each type, product of types, and ``all``: the rule that :meth:`match` returns, and the enabled ``**`` rule.
        Single types come first, in the order of ``types``, then products, then ``all``.
        """
        for one in self._made_of(types):
            rule = self.match(endpoint, one)
            if rule is not None:
                yield rule, endpoint
            rule = self._enabled(EVERY_ENDPOINT, one)
            if rule is not None:
                yield rule, EVERY_ENDPOINT

    def considered(self, endpoint: str, types: Sequence[str]) -> Iterator[tuple[Rule, Match]]:
        """Yield every rule of this endpoint, ``*`` and ``**``, and whether it applies, as :meth:`applicable`."""
        named = self._made_of(types)
        for one in (*named, *sorted(self._types.keys() - named)):
            own = self._enabled(endpoint, one)
            for place in (endpoint, GLOBAL_ENDPOINT, EVERY_ENDPOINT):
                rule = self._by_pair[hash(place) & _MASK].get((place, one))
                if rule is None:
                    continue
                match = Match.JUDGES
                if one not in named:
                    match = Match.NOT_NAMED
                elif not rule.enabled:
                    match = Match.DISABLED
                elif place == GLOBAL_ENDPOINT and own is not None:
                    match = Match.OVERRIDDEN
                yield rule, match

    def _made_of(self, types: Sequence[str]) -> list[str]:
        made = [one for one in self._types if set(types_within(one)).issubset(types)]
        return sorted(made, key=lambda one: _place(one, types))

    def _enabled(self, endpoint: str, identifier_type: str) -> Rule | None:
        rule = self._by_pair[hash(endpoint) & _MASK].get((endpoint, identifier_type))
        return rule if rule is not None and rule.enabled else None

    def candidates(self, endpoint: str, identifier_type: str) -> tuple[Rule, ...]:
        """Return the endpoint's own rule and the ``*`` rule, in order of precedence, enabled or not.

        ``**`` has one candidate, its own rule, which applies in addition to the others.
        """
        found = []
        names = (endpoint,) if endpoint == EVERY_ENDPOINT else (endpoint, GLOBAL_ENDPOINT)
        for name in dict.fromkeys(names):
            rule = self._by_pair[hash(name) & _MASK].get((name, identifier_type))
            if rule is not None:
                found.append(rule)
        return tuple(found)

    def get(self, rule_id: str) -> Rule | None:
        """Return the rule with this id."""
        return self._by_id[hash(rule_id) & _MASK].get(rule_id)

    def rules(self) -> Iterator[Rule]:
        """Yield every rule, in no particular order."""
        for shard in self._by_id:
            yield from shard.values()

    def __len__(self) -> int:
        return self._types.total()

    @property
    def types(self) -> Collection[str]:
        """The identifier types of the rules."""
        return self._types.keys()

    @property
    def plans(self) -> Collection[str]:
        """The plans that rules name."""
        return self._plans.keys()

    def parts(self) -> list[object]:
        """Return the dicts of the book, for the owner to free in steps."""
        return [*self._by_pair, *self._by_id]


def _place(identifier_type: str, types: Sequence[str]) -> tuple[bool, int, list[int]]:
    parts = types_within(identifier_type)
    return identifier_type == EVERYBODY, len(parts), sorted(map(types.index, parts))


class BookEditor:
    """Builds the successor of a book in steps; the book itself does not change. Not usable after :meth:`finish`."""

    __slots__ = ("_by_id", "_by_pair", "_own_ids", "_own_pairs", "_plans", "_types")

    def __init__(self, book: RuleBook) -> None:
        self._by_pair = list(book._by_pair)  # noqa: SLF001 -- the other half of the same structure
        self._by_id = list(book._by_id)  # noqa: SLF001
        self._own_pairs: set[int] = set()
        self._own_ids: set[int] = set()
        self._types = book._types.copy()  # noqa: SLF001
        self._plans = book._plans.copy()  # noqa: SLF001

    def apply(self, changed: Sequence[Rule], removed_ids: Iterable[str] = ()) -> Iterator[None]:
        """Apply changes in steps, yielding after every ``RULES_PER_STEP``: removals first, then ``changed`` in order.

        Unknown ``removed_ids`` are ignored.
        """
        # Two rules may swap their endpoints: remove all old places before adding new ones.
        gone = chain(removed_ids, (rule.id for rule in changed)) if self._types else ()
        yield from in_steps(self.remove, gone, RULES_PER_STEP)
        yield from in_steps(self.put, changed, RULES_PER_STEP)

    def put(self, rule: Rule) -> None:
        """Add a rule, or replace the one with the same id; another rule with the same pair is removed."""
        self.remove(rule.id)
        pair = (rule.endpoint, rule.identifier_type)
        shard = self._pairs(rule.endpoint)
        holder = shard.get(pair)
        if holder is not None:
            self.remove(holder.id)
        shard[pair] = rule
        self._ids(rule.id)[rule.id] = rule
        self._types[rule.identifier_type] += 1
        if rule.plans:
            self._plans.update(plan.name for plan in rule.plans)

    def remove(self, rule_id: str) -> None:
        """Remove the rule with this id; ignore an unknown id."""
        if rule_id not in self._by_id[hash(rule_id) & _MASK]:
            return
        rule = self._ids(rule_id).pop(rule_id)
        del self._pairs(rule.endpoint)[(rule.endpoint, rule.identifier_type)]
        self._types[rule.identifier_type] -= 1
        if not self._types[rule.identifier_type]:
            del self._types[rule.identifier_type]
        for plan in rule.plans:
            self._plans[plan.name] -= 1
            if not self._plans[plan.name]:
                del self._plans[plan.name]

    def finish(self, revision: int) -> RuleBook:
        """Return the new book."""
        parts = tuple(self._by_pair), tuple(self._by_id)
        return RuleBook(*parts, self._types, self._plans, revision)

    def _pairs(self, endpoint: str) -> dict[_Pair, Rule]:
        index = hash(endpoint) & _MASK
        if index not in self._own_pairs:
            self._own_pairs.add(index)
            self._by_pair[index] = self._by_pair[index].copy()
        return self._by_pair[index]

    def _ids(self, rule_id: str) -> dict[str, Rule]:
        index = hash(rule_id) & _MASK
        if index not in self._own_ids:
            self._own_ids.add(index)
            self._by_id[index] = self._by_id[index].copy()
        return self._by_id[index]
