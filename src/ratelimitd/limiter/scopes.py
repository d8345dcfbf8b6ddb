"""Finds and caches the limits that judge a check, its scope, by endpoint, identifier types, plans and time.

Decides nothing and charges nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Final, NamedTuple

from ratelimitd.algorithms import DECIDE, Decide
from ratelimitd.algorithms.calendar_window import in_force, window_at
from ratelimitd.algorithms.several import Charge
from ratelimitd.buckets.keys import BucketKeys, joined
from ratelimitd.counters import CheckStats
from ratelimitd.model import (
    ALLOWED,
    BLOCKED_PLAN,
    DENIED,
    INT32_MAX,
    MAX_TIME_US,
    NO_RULE_REMAINING,
    UNLIMITED_PLAN,
    US_PER_S,
    AssignedPlan,
    Check,
    Decision,
    Enforcement,
    Identity,
    Limit,
    LimitStatus,
    Reason,
    Rule,
    types_within,
)
from ratelimitd.rules.assignments import Assignments
from ratelimitd.rules.book import RuleBook

MAX_SCOPES: Final = 4_096
"""Endpoints whose scope is cached; a full cache is cleared, and a look-up takes about 3 µs. Bounds the memory that
callers can fill by sending ever new endpoints (I17), and the time to clear the cache."""

MAX_BY_PLANS: Final = 64
"""Combinations of plans whose scope is cached for one endpoint and the same identifier types."""

MAX_OF_PLANS: Final = 16_384
"""Limits in all scopes cached by plans, together about 6 MB; one endpoint alone may have hundreds."""


_FIRST: Final = (0,)


@dataclass(frozen=True, slots=True)
class Scope:
    """The limits of all checks of one endpoint and the same identifier types, until the next rule book.

    A scope describes one limit. ``several`` are the scopes of all limits, in order, and ``limits`` their limits; both
    are empty for a plain scope: one enforced limit without a calendar, for the check's first identity, and no rule
    passed over. ``counters`` are the rule's allowed and blocked checks. ``endpoint`` is that of the bucket.
    ``rule_limit`` is the limit in the rule; ``limit`` is the one that buckets are judged by, which differs in a
    calendar window. ``plan`` is the limit's, empty for the rule's own.
    """

    rule: Rule
    rule_limit: Limit
    limit: Limit
    key_suffix: bytes
    decide: Decide
    counters: list[int]
    endpoint: str
    identity_indices: tuple[int, ...] = _FIRST
    """Indices of the check's identities that the bucket is for; empty for all callers."""
    would_deny: list[int] | None = None
    """The counter of an observing limit."""
    several: tuple[Scope, ...] = ()
    windows: CalendarScopes | None = None
    """Finds the scope of a time, if a limit has a calendar; this scope itself then judges nothing."""
    plan: str = ""
    passed_over: tuple[LimitStatus, ...] = ()
    """Statuses of rules that are passed over, because the check's identity is unlimited."""
    limits: tuple[Limit, ...] = field(init=False)
    observes: bool = field(init=False)
    """Whether one of ``several`` only observes."""
    charged: tuple[Charge, ...] | None = field(init=False)
    """The charges of ``several``, with key suffixes for keys, if all buckets are for the check's first identity."""

    def __post_init__(self) -> None:
        several, set_derived = self.several, partial(object.__setattr__, self)
        set_derived("limits", tuple([one.limit for one in several]))
        set_derived("observes", any(one.would_deny is not None for one in several))
        charged = None
        if several and all(one.identity_indices == _FIRST for one in several):
            charged = tuple([(one.key_suffix, one.limit, one.decide) for one in several])
        set_derived("charged", charged)

    def at(self, now_us: int) -> Scope:
        """Return the scope that judges checks at ``now_us``."""
        return self if self.windows is None else self.windows.at(now_us)

    @property
    def only_observes(self) -> bool:
        """Whether none of its limits denies a check."""
        return all(one.would_deny is not None for one in self.several or (self,))

    @property
    def identifier_type(self) -> str:
        """The rule's identifier type."""
        return self.rule.identifier_type

    def identifier(self, identifiers: Sequence[bytes]) -> bytes:
        """Return the bucket's identifier for a check with these identifiers."""
        if self.identity_indices == _FIRST:
            return identifiers[0]
        return joined([identifiers[number] for number in self.identity_indices])


class CalendarScopes:
    """Scopes with calendar limits, one for each interval between two window boundaries; the last two are cached.

    ``find`` returns the scope of a time, and the start and end of its interval, in µs.
    """

    __slots__ = ("_find", "_found")

    def __init__(self, find: Callable[[int], tuple[Scope, int, int]]) -> None:
        self._find = find
        self._found: tuple[tuple[Scope, int, int], ...] = ()

    def at(self, now_us: int) -> Scope:
        """Return the scope of a time."""
        for scope, from_us, until_us in self._found:
            if from_us <= now_us < until_us:
                return scope
        found = self._find(now_us)
        # Two, because callers' clocks cross a boundary some seconds apart.
        self._found = (found, *self._found[:1])
        return found[0]


class Blocked(NamedTuple):
    """Checks of a blocked identity: their endpoint, and the identity's type."""

    endpoint: str
    identifier_type: str


class Unjudged(NamedTuple):
    """The answer to a check that no limit judges, and the index of its blocked identity, if any."""

    decision: Decision
    blocked: int | None = None


@dataclass(frozen=True, slots=True)
class PlanScopes:
    """The scopes of one endpoint and the same identifier types, if some identities may have plans.

    ``assigned`` are (index in a check, type) of the identities to look up, ``named`` the plans that change the limits.
    ``by_plans`` maps the plans of these identities to a scope.
    """

    endpoint: str
    types: tuple[str, ...]
    assigned: tuple[tuple[int, str], ...]
    named: frozenset[str]
    by_plans: dict[tuple[str, ...], Scope | Unjudged] = field(default_factory=dict)
    by_plan: dict[str, Scope | Unjudged] = field(default_factory=dict)
    """The same by the plan of the check's first identity, if only that is looked up."""


_NO_RULE: Final = Decision(ALLOWED, NO_RULE_REMAINING, 0, 0, Reason.NO_RULE)
WITHOUT_RULE: Final = Unjudged(_NO_RULE)
_UNLIMITED: Final = (ALLOWED, INT32_MAX, 0, 0, Reason.UNLIMITED)


class Scopes:
    """Finds the scope of a check by the rules of a book and the plans in ``assignments``.

    ``is_shared``: nodes share the buckets, so that each limit has the revision of the whole book.
    """

    def __init__(
        self, *, keys: BucketKeys, stats: CheckStats, assignments: Assignments, is_shared: bool
    ) -> None:
        self.book: RuleBook | None = None
        """The rules in force; ``None`` until the first book is loaded."""
        self._keys = keys
        self._stats = stats
        self._assignments = assignments
        self._is_shared = is_shared
        self._known: dict[tuple[str, ...], Scope | PlanScopes | None] = {}
        self._of_plans = 0
        assignments.on_types_changed = self._invalidate

    def replace_book(self, book: RuleBook) -> None:
        """Apply a new rule book from the next check on."""
        self.book = book
        self._known = {}
        self._of_plans = 0

    def apart(self) -> Scopes:
        """Return a copy with the same rules and assignments, and with caches and counters of its own."""
        other = copy(self)
        other._known, other._of_plans = {}, 0  # noqa: SLF001 -- of a copy of this
        other._stats = CheckStats()  # noqa: SLF001 -- as above
        return other

    def _invalidate(self) -> None:
        """Invalidate the scopes cached here, and wherever a new object in :attr:`book` invalidates them."""
        if self.book is not None:
            self.replace_book(copy(self.book))

    def find(
        self, endpoint: str, identifier_type: str, also: tuple[str, ...] = ()
    ) -> Scope | PlanScopes | None:
        """Return the scope of all checks of an endpoint and these types, valid until :attr:`book` changes.

        ``None`` without a rule or a book. If identities of these types have plans, :meth:`resolve_plans` finds the
        scope.
        """
        try:
            return self._known[
                (endpoint, identifier_type, *also) if also else (endpoint, identifier_type)
            ]
        except KeyError:
            if self.book is None:
                return None
            return self._remember_scope(self.book, endpoint, (identifier_type, *also))

    def of_check(self, check: Check) -> Scope | PlanScopes | None:
        """Return the scope of a check; see :meth:`find`."""
        also = tuple([kind for kind, _ in check.also])
        return self.find(check.endpoint, check.identifier_type, also)

    def resolve_plans(
        self, identifiers: Sequence[bytes], scopes: PlanScopes, now_us: int
    ) -> Scope | Unjudged:
        """Return the scope of a check with these identifiers at ``now_us``, by their plans."""
        if scopes.by_plan:  # equivalent: it only saves the look-ups below
            found = self._assignments.plan_of(scopes.types[0], identifiers[0], now_us)
            known = scopes.by_plan.get("" if found is None else found[0])
            if known is not None:
                return known
        plans = []
        for number, kind in scopes.assigned:
            found = self._assignments.plan_of(kind, identifiers[number], now_us)
            if found is None:
                plans.append("")
                continue
            plan, _ = found
            if plan == BLOCKED_PLAN:
                return self._blocked(identifiers, scopes, now_us)
            plans.append(plan if plan in scopes.named else "")
        by_plans = tuple(plans)
        return scopes.by_plans.get(by_plans) or self._remember_resolved(scopes, by_plans)

    def _blocked(self, identifiers: Sequence[bytes], scopes: PlanScopes, now_us: int) -> Unjudged:
        """Return the answer to a check with blocked identities, of which that blocked longest decides."""
        ends = {}
        for number, kind in scopes.assigned:
            found = self._assignments.plan_of(kind, identifiers[number], now_us)
            if found is not None and found[0] == BLOCKED_PLAN:
                ends[number] = found[1]
        last = max(ends, key=lambda number: ends[number] or MAX_TIME_US)
        return Unjudged(_denied_until(ends[last], now_us), last)

    def resolve_check(self, check: Check, now_us: int) -> Scope | Unjudged:
        """Return the scope that judges a check at ``now_us``."""
        return self.resolve(self.of_check(check), check, now_us)

    def resolve(
        self, scope: Scope | PlanScopes | None, check: Check, now_us: int
    ) -> Scope | Unjudged:
        """Return the scope that judges a check at ``now_us``, from the result of :meth:`find`."""
        if isinstance(scope, PlanScopes):
            return self.resolve_plans(identifiers_of(check), scope, now_us)
        return scope or WITHOUT_RULE

    def plans_of(self, check: Check, now_us: int) -> tuple[AssignedPlan, ...]:
        """Return the plans that the identities of a check are assigned to at ``now_us``."""
        identities: Sequence[Identity] = ((check.identifier_type, check.identifier), *check.also)
        found = [(kind, self._assignments.plan_of(kind, who, now_us)) for kind, who in identities]
        return tuple([AssignedPlan(kind, *plan) for kind, plan in found if plan is not None])

    def buckets_of(
        self, book: RuleBook, rules: Sequence[Rule], endpoint: str, now_us: int
    ) -> list[tuple[bytes, Limit]]:
        """Return (key suffix, limit) of every bucket of ``rules`` on an endpoint at ``now_us``."""
        found = [
            self._bucket(rule, self._as_of_book(book, limit), endpoint, now_us)
            for rule in rules
            for limit in rule.limits_of_all_plans
        ]
        return [(suffix, limit) for limit, suffix, _, _ in found]

    def _remember_scope(
        self, book: RuleBook, endpoint: str, types: tuple[str, ...]
    ) -> Scope | PlanScopes | None:
        has_type = self._assignments.has_type
        assigned = tuple([(number, kind) for number, kind in enumerate(types) if has_type(kind)])
        scope: Scope | PlanScopes | None
        if assigned:
            plans = [
                plan.name for rule, _ in book.applicable(endpoint, types) for plan in rule.plans
            ]
            scope = PlanScopes(endpoint, types, assigned, frozenset((UNLIMITED_PLAN, *plans)))
        else:
            found = self._resolve_rules(book, endpoint, types, {})
            scope = None if isinstance(found, Unjudged) else found
        if len(self._known) >= MAX_SCOPES:
            self._known = {}
        self._known[endpoint, *types] = scope
        return scope

    def _remember_resolved(self, scopes: PlanScopes, plans: tuple[str, ...]) -> Scope | Unjudged:
        if len(scopes.by_plans) >= MAX_BY_PLANS:
            scopes.by_plans.clear()
            scopes.by_plan.clear()
        assigned = {kind: plan for (_, kind), plan in zip(scopes.assigned, plans, strict=True)}
        # Without a book there are no scopes.
        book: RuleBook = self.book  # type: ignore[assignment]
        found = self._resolve_rules(book, scopes.endpoint, scopes.types, assigned)
        self._of_plans += limits_in(found)
        if self._of_plans > MAX_OF_PLANS:
            # Bulk checks cache scopes, too, until the book changes.
            self._invalidate()
        scopes.by_plans[plans] = found
        # equivalent: by_plan only saves time
        if len(plans) == 1 and scopes.assigned[0][0] == 0:
            scopes.by_plan[plans[0]] = found
        return found

    def _resolve_rules(
        self, book: RuleBook, endpoint: str, types: tuple[str, ...], assigned: Mapping[str, str]
    ) -> Scope | Unjudged:
        scopes: list[Scope] = []
        passed_over: list[LimitStatus] = []
        for rule, place in book.applicable(endpoint, types):
            plan = rule.plan_among(assigned)
            if plan == UNLIMITED_PLAN:
                passed_over.append(LimitStatus(*_UNLIMITED, rule, None, plan))
                continue
            limits = rule.limits_of(plan)
            scopes += [self._new_scope(book, rule, limit, place, types, plan) for limit in limits]
        if not scopes:
            is_unlimited = UNLIMITED_PLAN in assigned.values()
            return Unjudged(_unlimited(passed_over)) if is_unlimited else WITHOUT_RULE
        scope = scopes[0]
        has_calendar = any(one.rule_limit.calendar for one in scopes)
        is_plain = (
            len(scopes) == 1 and scope.would_deny is None and scope.identity_indices == _FIRST
        )
        # A calendar's window is looked up on the general path.
        if not is_plain or passed_over or has_calendar:
            scope = replace(scope, several=tuple(scopes), passed_over=tuple(passed_over))
        if has_calendar:
            scope = replace(scope, windows=CalendarScopes(partial(self._scope_at, scope)))
        return scope

    def _new_scope(  # noqa: PLR0917 -- what a scope is of
        self,
        book: RuleBook,
        rule: Rule,
        limit: Limit,
        endpoint: str,
        types: tuple[str, ...],
        plan: str,
    ) -> Scope:
        self._stats.used_rules.add(rule.id)
        is_observed = limit.enforcement is Enforcement.OBSERVE
        as_of_book = self._as_of_book(book, limit)
        return Scope(
            rule,
            as_of_book,
            _bare(as_of_book),
            self._keys.scope(rule, endpoint, limit),
            DECIDE[limit.algorithm],
            self._stats.rule_counters(rule.id),
            endpoint,
            tuple(types.index(part) for part in types_within(rule.identifier_type)),
            would_deny=self._stats.observed_counter(rule.id, limit.name) if is_observed else None,
            plan=plan,
        )

    def _scope_at(self, scope: Scope, now_us: int) -> tuple[Scope, int, int]:
        """Return a scope with the calendar windows of a time, and the start and end of their overlap, in µs."""
        if scope.several:
            found = [self._scope_at(one, now_us) for one in scope.several]
            several = tuple(one for one, _, _ in found)
            from_us, until_us = max(one[1] for one in found), min(one[2] for one in found)
            return replace(scope, several=several), from_us, until_us
        limit, suffix, from_us, until_us = self._bucket(
            scope.rule, scope.rule_limit, scope.endpoint, now_us
        )
        return replace(scope, limit=limit, key_suffix=suffix), from_us, until_us

    def _bucket(
        self, rule: Rule, limit: Limit, endpoint: str, now_us: int
    ) -> tuple[Limit, bytes, int, int]:
        """Return the limit and the key suffix of buckets at a time, and the start and end of their window, in µs."""
        if limit.calendar is None:
            return limit, self._keys.scope(rule, endpoint, limit), 0, MAX_TIME_US + 1
        window = window_at(limit.calendar, now_us)
        suffix = self._keys.scope(rule, endpoint, limit, window.start_s)
        return in_force(limit, window), suffix, window.start_s * US_PER_S, window.end_s * US_PER_S

    def former_suffix(self, scope: Scope, now_us: int) -> bytes:
        """Return the key suffix of the calendar window before that of a time; its only suffix without a calendar."""
        *_, from_us, _ = self._bucket(scope.rule, scope.rule_limit, scope.endpoint, now_us)
        return self._bucket(scope.rule, scope.rule_limit, scope.endpoint, from_us - 1)[1]

    def _as_of_book(self, book: RuleBook, limit: Limit) -> Limit:
        """Return the limit; if buckets are shared, with the book's revision, which alone orders edits of all rules.

        By its own revision, the global rule would seem older than a deleted rule for one endpoint.
        """
        return replace(limit, revision=book.revision) if self._is_shared else limit


def _bare(limit: Limit) -> Limit:
    """Return a limit without the rest of its rule: decisions on objects of one type take a tenth less time."""
    return Limit(**{one.name: getattr(limit, one.name) for one in fields(Limit) if one.init})


def _unlimited(passed_over: Sequence[LimitStatus]) -> Decision:
    """Return the answer to a check of an unlimited identity that no limit judges."""
    rule = passed_over[0].rule if passed_over else None
    limits = tuple(passed_over) if len(passed_over) > 1 else ()
    return Decision(*_UNLIMITED, rule, None, limits, plan=UNLIMITED_PLAN)


def _denied_until(expire_time: int, now_us: int) -> Decision:
    """Return the answer to a check of an identity blocked until ``expire_time`` in Unix seconds; 0 = for good."""
    retry_after = min(-(-(expire_time * US_PER_S - now_us) // US_PER_S), INT32_MAX)
    return Decision(
        DENIED,
        0,
        expire_time,
        retry_after if expire_time else INT32_MAX,
        Reason.BLOCKED,
        plan=BLOCKED_PLAN,
    )


def limits_in(resolved: Scope | Unjudged) -> int:
    """Return the number of limits that a cached scope counts for, at least one."""
    return len(resolved.limits) if isinstance(resolved, Scope) and resolved.limits else 1


def identifiers_of(check: Check) -> Sequence[bytes]:
    """Return the identifiers of a check, its own first."""
    if not check.also:
        return (check.identifier,)
    return (check.identifier, *[identifier for _, identifier in check.also])


def charges_of(identifiers: Sequence[bytes], scope: Scope) -> list[Charge]:
    """Return the charges of a check with these identifiers, in the order of the scope's limits."""
    if scope.charged is not None:
        first = identifiers[0]
        return [(first + suffix, limit, decide) for suffix, limit, decide in scope.charged]
    return [
        (one.identifier(identifiers) + one.key_suffix, one.limit, one.decide)
        for one in scope.several or (scope,)
    ]
