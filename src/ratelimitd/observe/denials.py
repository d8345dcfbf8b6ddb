"""The endpoints and identifiers with the most denials, and the endpoints with the most checks without a rule, recently.

Each such check costs one append to a bounded list; the counting runs ten times a second. Identifiers leave this module
only masked, with a keyed hash to tell them apart, or unmasked at an operator's request: see ADR 0029.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from heapq import nlargest
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from ratelimitd.counters import CheckStats
from ratelimitd.model import IdentifierType, types_within
from ratelimitd.observe.logs import masked, shown
from ratelimitd.rules.book import RuleBook

# The most frequent items in bounded memory: the sketch of Misra and Gries ("Finding repeated elements", 1982) in the
# variant with cheap additions (Anderson et al., "A high-performance algorithm for identifying frequent items in data
# streams", IMC 2017). At twice ``size`` counters, the median count is subtracted from all, and counters that reach 0
# are dropped. So counts are never too high, and too low by at most the sum of all divided by ``size``.

Item = TypeVar("Item", bound=Hashable)

FADED: Final = 0.01
"""Smaller counts are dropped."""


class FrequentItems(Generic[Item]):
    """Counts of the most frequent items; tracks fewer than twice ``size`` items."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._counts: dict[Item, float] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, item: Item, count: float = 1.0) -> None:
        """Add ``count`` to an item."""
        counts = self._counts
        counts[item] = counts.get(item, 0.0) + count
        if len(counts) >= 2 * self._size:
            middle = sorted(counts.values())[-self._size]
            self._counts = {key: value - middle for key, value in counts.items() if value > middle}

    def fade(self, factor: float) -> None:
        """Multiply every count by ``factor``, so that older denials weigh less."""
        self._counts = {
            item: count * factor for item, count in self._counts.items() if count * factor > FADED
        }

    def drop(self, is_unwanted: Callable[[Item], bool]) -> None:
        """Forget the items for which ``is_unwanted`` returns true."""
        self._counts = {key: value for key, value in self._counts.items() if not is_unwanted(key)}

    def top(self, most: int) -> list[tuple[Item, float]]:
        """Return the ``most`` frequent items with their counts, the most frequent first."""
        return nlargest(most, self._counts.items(), key=lambda entry: entry[1])


FOLD_S: Final = 0.1

MAX_PENDING: Final = 1_000
"""Denials recorded per :data:`FOLD_S`, counted in 0.5 ms: all, up to 10,000 a second. Above that, the last ones are
weighted to represent all."""

SIZE: Final = 256
"""Tracked endpoints and identifiers: each one with more than 0.4 % of the denials is among them."""

HALF_LIFE_S: Final = 60.0

TOP: Final = 10

TOP_UNMATCHED: Final = 100
"""Endpoints without a rule that a node reports to an operator on request."""

PER_MINUTE: Final = 0.6931471805599453
"""ln 2: a count that halves every minute and grows at a steady rate converges to the rate per minute divided by it."""


class Denied(Protocol):
    """The part of :class:`ratelimitd.limiter.scopes.Scope` and ``Blocked`` used here."""

    @property
    def endpoint(self) -> str:
        """Endpoint of the checks, not of the rule."""

    @property
    def identifier_type(self) -> str:
        """The type of the deciding rule, or of the blocked identity."""


class DeniedEndpoint(NamedTuple):
    """An endpoint with its denials per minute, or its checks without a rule."""

    endpoint: str
    per_minute: float


class DeniedIdentifier(NamedTuple):
    """An identifier with its denials per minute.

    ``digest`` is a keyed hash that identifies it when counts of several nodes are added. ``name`` is the identifier
    itself, set only on request, and never for an API key.
    """

    digest: str
    identifier_type: str
    masked: str
    per_minute: float
    name: str = ""


class _RecentChecks(Generic[Item]):
    """The last checks of one kind; ``total`` returns the number of all of them."""

    def __init__(self, total: Callable[[], int]) -> None:
        self._items: deque[Item] = deque(maxlen=MAX_PENDING)
        self._total = total
        self._taken = total()
        self.record = self._items.append
        """Records one check. A bound method of the list itself: 30 ns."""

    def take(self) -> tuple[Sequence[Item], float]:
        """Return the checks recorded since the last call, and the weight of each that makes them represent all."""
        total = self._total()
        grown, self._taken = total - self._taken, total
        items = [*self._items]
        self._items.clear()
        return items, max(1.0, grown / len(items)) if items else 1.0


class Denials:
    """The denials of one node; ``digest`` computes the keyed hash of an identifier and its type."""

    def __init__(self, stats: CheckStats, *, digest: Callable[[bytes, str], str]) -> None:
        self._stats = stats
        self._digest = digest
        self._denied: _RecentChecks[tuple[bytes, Denied]] = _RecentChecks(self._total)
        self._endpoints: FrequentItems[str] = FrequentItems(SIZE)
        self._identifiers: FrequentItems[tuple[bytes, str]] = FrequentItems(SIZE)
        self.record = self._denied.record
        """Records (identifier, scope) of a denied check."""
        self._without_rule: _RecentChecks[str] = _RecentChecks(lambda: stats.no_rule_total)
        self._unmatched: FrequentItems[str] = FrequentItems(SIZE)
        self.record_without_rule = self._without_rule.record
        """Records the endpoint of a check without a rule."""

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

    def forget_matched(self, book: RuleBook) -> None:
        """Forget the endpoints that have a rule in ``book``, which is in force now.

        One whose checks are of another identifier type is listed again after the next of them.
        """
        self.fold()
        self._unmatched.drop(
            lambda endpoint: any(rule.enabled for rule, _ in book.considered(endpoint, ()))
        )

    def fade(self, elapsed_s: float) -> None:
        """Fade all counts for the elapsed time."""
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
        """Return the :data:`TOP` identifiers with the most denials; ``named``: including names, except API keys."""
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
        """Number of recorded denials; excludes those of an open breaker."""
        return self._stats.blocked_total - self._stats.breaker_denied_total


def _per_minute(endpoints: FrequentItems[str], most: int = TOP) -> list[DeniedEndpoint]:
    return [DeniedEndpoint(endpoint, count * PER_MINUTE) for endpoint, count in endpoints.top(most)]
