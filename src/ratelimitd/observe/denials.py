"""The most denied endpoints and identifiers of the last minutes, and the endpoints most asked for without a rule.

These paths pay one append to a bounded list; the rest is done ten times a second. Identifiers never leave this
module but masked, with a keyed hash to tell them apart, or on purpose for an operator who asked: see ADR 0029.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from heapq import nlargest
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from ratelimitd.counters import CheckStats
from ratelimitd.model import IdentifierType, types_within
from ratelimitd.observe.logs import masked, shown

# The most frequent items in bounded memory: the sketch of Misra and Gries ("Finding repeated elements", 1982) in the
# form that makes an addition cheap (Anderson et al., "A high-performance algorithm for identifying frequent items in
# data streams", IMC 2017): counters are added until there are twice as many as ``size``; then the count of the middle
# one is taken off all, and those that come to nothing go. So no count is too high, and none is too low by more than
# the sum of all divided by ``size``.

Item = TypeVar("Item", bound=Hashable)

FADED: Final = 0.01
"""Smaller counts are dropped."""


class FrequentItems(Generic[Item]):
    """Counts of the most frequent items, for fewer than twice ``size`` items."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._counts: dict[Item, float] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, item: Item, count: float = 1.0) -> None:
        """Count an item ``count`` times."""
        counts = self._counts
        counts[item] = counts.get(item, 0.0) + count
        if len(counts) >= 2 * self._size:
            middle = sorted(counts.values())[-self._size]
            self._counts = {key: value - middle for key, value in counts.items() if value > middle}

    def fade(self, factor: float) -> None:
        """Multiply every count by ``factor``, so that older denials count less."""
        self._counts = {
            item: count * factor for item, count in self._counts.items() if count * factor > FADED
        }

    def top(self, most: int) -> list[tuple[Item, float]]:
        """Return the ``most`` frequent items with their counts, the most frequent first."""
        return nlargest(most, self._counts.items(), key=lambda entry: entry[1])


FOLD_S: Final = 0.1

MAX_PENDING: Final = 1_000
"""Denials counted per :data:`FOLD_S`, in 0.5 ms: all, up to 10,000 a second. Of more, the last ones are weighted to
represent all."""

SIZE: Final = 256
"""Endpoints and identifiers that are counted: those with more than 0.4 % of the denials are among them."""

HALF_LIFE_S: Final = 60.0

TOP: Final = 10

TOP_UNMATCHED: Final = 100
"""Endpoints without a rule that a node tells an operator who asks."""

PER_MINUTE: Final = 0.6931471805599453
"""ln 2: what fades by half in each minute and grows at a steady rate comes to the rate of a minute divided by it."""


class Denied(Protocol):
    """The part of :class:`ratelimitd.limiter.scopes.Scope` and ``Blocked`` that is used here."""

    @property
    def endpoint(self) -> str:
        """Endpoint of the checks, not of the rule."""

    @property
    def identifier_type(self) -> str:
        """The type of the rule that decides, or of the identity that is blocked."""


class DeniedEndpoint(NamedTuple):
    """An endpoint and its denials per minute, or its checks without a rule."""

    endpoint: str
    per_minute: float


class DeniedIdentifier(NamedTuple):
    """An identifier that may be shown, and its denials per minute.

    ``digest`` is a keyed hash, so that several nodes' numbers of one identifier can be added. ``name`` is the
    identifier itself, only where it was asked for and may be told: never that of an API key.
    """

    digest: str
    identifier_type: str
    masked: str
    per_minute: float
    name: str = ""


class _Noted(Generic[Item]):
    """The last checks of a kind, of which ``total`` returns how many there were."""

    def __init__(self, total: Callable[[], int]) -> None:
        self._items: deque[Item] = deque(maxlen=MAX_PENDING)
        self._total = total
        self._taken = total()
        self.note = self._items.append
        """Takes one. A bound method of the list itself: 30 ns."""

    def take(self) -> tuple[Sequence[Item], float]:
        """Return those since the last call, and the weight by which they stand for all."""
        total = self._total()
        grown, self._taken = total - self._taken, total
        items = [*self._items]
        self._items.clear()
        return items, max(1.0, grown / len(items)) if items else 1.0


class Denials:
    """The denials of one node; ``digest`` makes the keyed hash of an identifier and its type."""

    def __init__(self, stats: CheckStats, *, digest: Callable[[bytes, str], str]) -> None:
        self._stats = stats
        self._digest = digest
        self._denied: _Noted[tuple[bytes, Denied]] = _Noted(self._total)
        self._endpoints: FrequentItems[str] = FrequentItems(SIZE)
        self._identifiers: FrequentItems[tuple[bytes, str]] = FrequentItems(SIZE)
        self.note = self._denied.note
        """Takes (identifier, scope) of a denied check."""
        self._without_rule: _Noted[str] = _Noted(lambda: stats.no_rule_total)
        self._unmatched: FrequentItems[str] = FrequentItems(SIZE)
        self.note_without_rule = self._without_rule.note
        """Takes the endpoint of a check without a rule."""

    def fold(self) -> None:
        """Count the recorded checks; called every :data:`FOLD_S` seconds."""
        denied, weight = self._denied.take()
        endpoints, identifiers = self._endpoints, self._identifiers
        for identifier, scope in denied:
            endpoints.add(scope.endpoint, weight)
            identifiers.add((identifier, scope.identifier_type), weight)
        without_rule, weight = self._without_rule.take()
        for endpoint in without_rule:
            self._unmatched.add(endpoint, weight)

    def fade(self, elapsed_s: float) -> None:
        """Advance the time."""
        factor = 0.5 ** (elapsed_s / HALF_LIFE_S)
        self._endpoints.fade(factor)
        self._identifiers.fade(factor)
        self._unmatched.fade(factor)

    def top_unmatched(self, most: int = TOP) -> list[DeniedEndpoint]:
        """Return the endpoints with the most checks without a rule."""
        return _per_minute(self._unmatched, most)

    def top_endpoints(self) -> list[DeniedEndpoint]:
        """Return the :data:`TOP` endpoints with the most denials."""
        return _per_minute(self._endpoints)

    def top_identifiers(self, *, named: bool = False) -> list[DeniedIdentifier]:
        """Return the :data:`TOP` identifiers with the most denials; ``named``: with names, except API keys."""
        return [
            DeniedIdentifier(
                digest=self._digest(identifier, identifier_type),
                identifier_type=identifier_type,
                masked=masked(identifier, identifier_type),
                per_minute=count * PER_MINUTE,
                name=shown(identifier, identifier_type)
                if named and IdentifierType.API_KEY not in types_within(identifier_type)
                else "",
            )
            for (identifier, identifier_type), count in self._identifiers.top(TOP)
        ]

    def _total(self) -> int:
        """Denials recorded; those of an open breaker are not."""
        return self._stats.blocked_total - self._stats.breaker_denied_total


def _per_minute(endpoints: FrequentItems[str], most: int = TOP) -> list[DeniedEndpoint]:
    return [DeniedEndpoint(endpoint, count * PER_MINUTE) for endpoint, count in endpoints.top(most)]
