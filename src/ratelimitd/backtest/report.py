"""Compares the decisions of rules on the checks of a trace with the recorded ones. See ADR 0063."""

from __future__ import annotations

import enum
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, nlargest
from typing import Final, NamedTuple

from ratelimitd.backtest.replay import Judged, Replayer, Trace
from ratelimitd.backtest.sparing import Demand, sparing
from ratelimitd.backtest.trace import Recorded
from ratelimitd.limiter.scopes import Scope
from ratelimitd.model import US_PER_S, Limit, Rule

BINS: Final = 60
"""Equal parts of a trace's time, for which denials are counted."""

MAX_DEMANDED: Final = 5_000_000
"""Largest trace, in checks, for which sparing limits are computed: the checks are held in memory, 16 bytes each."""

TOP: Final = 20
"""Number of identities and of endpoints listed."""

MAX_RETRIES: Final = 3
RETRY_US: Final = 100_000
"""Retries of a denied check, and the pause before each with ``immediate``."""


class Retries(enum.StrEnum):
    """Behaviour of callers after a denial: none, retry soon, or retry after the retry delay, longer each time."""

    NONE = "none"
    IMMEDIATE = "immediate"
    BACKOFF = "backoff"


class Named(NamedTuple):
    """An identity that would be denied: its digest, its type, and its denials in the trace and in the replay.

    ``longest_s`` is the longest time from a denial to the next allowed check of the same kind, or to the last denial.
    """

    digest: str
    identifier_type: str
    denied_before: int
    denied: int
    longest_s: float


class OfEndpoint(NamedTuple):
    """The checks of one endpoint and the types of their identities."""

    endpoint: str
    identifier_types: str
    checks: int
    denied_before: int
    denied: int


class OfLimit(NamedTuple):
    """A limit of the rules: the denials that it decides, and the identities that it denies.

    ``sparing`` is the smallest limit that, alone, denies nothing to 99 % of the identities that it judges; 0 if
    unknown.
    """

    rule: Rule
    limit: Limit
    plan: str
    denied: int
    identities: int
    identities_denied: int
    sparing: int


class Report(NamedTuple):
    """The decisions of rules on the checks of a trace, compared with the recorded ones.

    Peeks are judged, but not counted. ``retried`` are retries, which no other count includes; ``allowed_later`` are the
    denied checks that a retry passed. ``pauses_s`` are median, 99th percentile and maximum of the times from a denial
    to the next allowed check of the same kind. ``bins`` are the recorded and the new denials in equal parts of the
    time. ``share`` of the identities was recorded. ``evicted`` buckets were dropped to bound memory.
    """

    checks: int
    denied_before: int
    denied: int
    newly_denied: int
    newly_allowed: int
    identities: int
    identities_denied_before: int
    identities_denied: int
    retried: int
    allowed_later: int
    pauses_s: tuple[float, float, float]
    endpoints: list[OfEndpoint]
    limits: list[OfLimit]
    named: list[Named]
    bins: list[tuple[int, int]]
    first_us: int
    last_us: int
    share: float
    lost: int
    holds: int
    unfinished: int
    evicted: int


@dataclass(slots=True)
class _OfKind:
    """Denials of one kind of checks; ``since`` has the first and last denial since an identity was last allowed."""

    before: int = 0
    denied: int = 0
    since: dict[bytes, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class _OfIdentity:
    kind: int
    before: int = 0
    denied: int = 0
    longest_us: int = 0


@dataclass(slots=True)
class _DeniedBy:
    """Denials by one limit."""

    checks: int = 0
    identities: set[bytes] = field(default_factory=set)


def backtest(trace: Trace, rules: Sequence[Rule], retries: Retries = Retries.NONE) -> Report:
    """Replay a trace with these rules."""
    run = _Backtest(trace, rules, retries)
    run.replay()
    return run.report(_sparing(trace, run.replayer.scopes))


def _sparing(trace: Trace, scopes: Sequence[Scope | None]) -> list[tuple[Scope, int, int]]:
    """Return each limit that judges, the number of its buckets, and its sparing limit, 0 if unknown."""
    limits: dict[tuple[str, str, str], tuple[Scope, dict[bytes, Demand]]] = {}
    of_kinds: list[list[tuple[Scope, dict[bytes, Demand]]]] = []
    for kind, scope in zip(trace.kinds, scopes, strict=True):
        singles = () if scope is None or kind.peek else scope.several or (scope,)
        keys = [(one.rule.id, one.rule_limit.name, one.plan) for one in singles]
        of_kinds.append(
            [
                (one, limits.setdefault(key, (one, {}))[1])
                for key, one in zip(keys, singles, strict=True)
            ]
        )
    if trace.checks <= MAX_DEMANDED:
        _demand(trace, of_kinds)
    return [
        (
            scope,
            len(demands),
            sparing(scope.rule_limit, demands.values()) if scope.rule_limit.calendar is None else 0,
        )
        for scope, demands in limits.values()
    ]


def _demand(trace: Trace, of_kinds: Sequence[list[tuple[Scope, dict[bytes, Demand]]]]) -> None:
    """Add the demand of each check on each bucket."""
    for at_us, identity, cost, number, _, further in trace:
        for scope, demands in of_kinds[number]:
            whose = scope.identifier((identity, *further)) if further else identity
            key = whose + scope.key_suffix
            demand = demands.get(key)
            if demand is None:
                demand = demands[key] = array("q")
            demand.append(at_us)
            demand.append(cost)


class _Backtest:
    def __init__(self, trace: Trace, rules: Sequence[Rule], retries: Retries) -> None:
        self.replayer = Replayer(trace, rules)
        self._trace = trace
        self._retries = retries
        self._first_us, self._span_us = trace.first_us, trace.last_us - trace.first_us + 1
        self._kinds = [_OfKind() for _ in trace.kinds]
        self._identities: dict[bytes, _OfIdentity] = {}
        self._limits: defaultdict[tuple[str, str, str], _DeniedBy] = defaultdict(_DeniedBy)
        self._pauses_us = array("q")
        self._bins = [[0, 0] for _ in range(BINS)]
        self._newly_denied = self._newly_allowed = self._retried = self._allowed_later = 0
        self._due: list[tuple[int, int, int, Recorded]] = []

    def replay(self) -> None:
        judge, kinds, table = self.replayer.judge, self._kinds, self.replayer.table
        peeks = [kind.peek for kind in self._trace.kinds]
        next_tick_us = self._trace.first_us
        for check in self._trace:
            at_us, identity, _, number, was_allowed, _ = check
            if at_us >= next_tick_us:
                table.tick = 1 + (at_us - self._trace.first_us) // US_PER_S
                next_tick_us = at_us + US_PER_S
            if self._due:
                self._try_again(at_us)
            judged = judge(check)
            if judged[0] and was_allowed and identity not in kinds[number].since:
                continue
            if not peeks[number]:
                self._count(check, judged)
        self._try_again(self._trace.last_us)

    def _count(self, check: Recorded, judged: Judged) -> None:
        at_us, identity, _, number, was_allowed, _ = check
        of_kind = self._kinds[number]
        if judged[0] and was_allowed:
            self._end_pause(of_kind, identity, at_us)
            return
        found = self._identities.get(identity)
        if found is None:
            found = self._identities[identity] = _OfIdentity(number)
        at = self._bins[(at_us - self._first_us) * BINS // self._span_us]
        if not was_allowed:
            of_kind.before += 1
            found.before += 1
            at[0] += 1
            self._newly_allowed += judged[0]
        if judged[0]:
            self._end_pause(of_kind, identity, at_us)
            return
        self._newly_denied += was_allowed
        of_kind.denied += 1
        found.denied += 1
        at[1] += 1
        since = of_kind.since.get(identity)
        if since is None:
            of_kind.since[identity] = [at_us, at_us]
        else:
            since[1] = at_us
        rule, limit, plan = self.replayer.limit_of(check, judged)
        if rule is not None and limit is not None:
            denied_by = self._limits[rule.id, limit.name, plan]
            denied_by.checks += 1
            denied_by.identities.add(identity)
        if self._retries is not Retries.NONE:
            self._retry(at_us, 0, check, judged)

    def _end_pause(self, of_kind: _OfKind, identity: bytes, until_us: int) -> None:
        since = of_kind.since.pop(identity, None)
        if since is not None:
            self._note_pause(identity, since[0], until_us)

    def _note_pause(self, identity: bytes, since_us: int, until_us: int) -> None:
        pause_us = max(0, until_us - since_us)  # with callers' time it may end before it begins
        found = self._identities[identity]
        found.longest_us = max(found.longest_us, pause_us)
        self._pauses_us.append(pause_us)

    def _retry(self, at_us: int, attempts: int, check: Recorded, judged: Judged) -> None:
        """Schedule a retry of a denied check, if it is within the time of the trace."""
        pause_us = RETRY_US
        if self._retries is Retries.BACKOFF:
            pause_us = max(judged[3], 1 << attempts) * US_PER_S
        if attempts < MAX_RETRIES and at_us + pause_us <= self._trace.last_us:
            # The number keeps the order of retries that are due at the same time.
            heappush(self._due, (at_us + pause_us, self._retried, attempts + 1, check))
            self._retried += 1

    def _try_again(self, now_us: int) -> None:
        while self._due and self._due[0][0] <= now_us:
            at_us, _, attempts, check = heappop(self._due)
            judged = self.replayer.judge((at_us, *check[1:]))
            if judged[0]:
                self._allowed_later += 1
                self._end_pause(self._kinds[check[3]], check[1], at_us)
            else:
                self._retry(at_us, attempts, check, judged)

    def report(self, sparing: Sequence[tuple[Scope, int, int]]) -> Report:
        trace = self._trace
        for of_kind in self._kinds:
            for identity, (since_us, last_us) in of_kind.since.items():
                self._note_pause(identity, since_us, last_us)
        denied = {key: one for key, one in self._identities.items() if one.denied}
        return Report(
            checks=sum(count for kind, count in trace.counts.items() if not kind.peek),
            denied_before=sum(one.before for one in self._kinds),
            denied=sum(one.denied for one in self._kinds),
            newly_denied=self._newly_denied,
            newly_allowed=self._newly_allowed,
            identities=trace.identities,
            identities_denied_before=sum(one.before > 0 for one in self._identities.values()),
            identities_denied=len(denied),
            retried=self._retried,
            allowed_later=self._allowed_later,
            pauses_s=self._pauses_s(),
            endpoints=self._endpoints(),
            limits=[self._of_limit(*one) for one in sparing],
            named=[
                self._named(*item)
                for item in nlargest(TOP, denied.items(), key=lambda item: item[1].denied)
            ],
            bins=[(before, now) for before, now in self._bins],
            first_us=trace.first_us,
            last_us=trace.last_us,
            share=trace.share,
            lost=trace.lost,
            holds=trace.holds,
            unfinished=trace.unfinished,
            evicted=self.replayer.table.evicted_total,
        )

    def _named(self, identity: bytes, of: _OfIdentity) -> Named:
        kind = self._trace.kinds[of.kind].types[0]
        return Named(identity.hex(), kind, of.before, of.denied, of.longest_us / US_PER_S)

    def _pauses_s(self) -> tuple[float, float, float]:
        pauses_us = sorted(self._pauses_us)
        if not pauses_us:
            return 0.0, 0.0, 0.0
        count = len(pauses_us)
        places = (count // 2, -(-count * 99 // 100) - 1, count - 1)
        median, high, longest = [pauses_us[place] / US_PER_S for place in places]
        return median, high, longest

    def _endpoints(self) -> list[OfEndpoint]:
        found: dict[tuple[str, str], OfEndpoint] = {}
        for (kind, count), of_kind in zip(self._trace.counts.items(), self._kinds, strict=True):
            if kind.peek:
                continue
            key = kind.endpoint, ", ".join(kind.types)
            one = found.get(key) or OfEndpoint(*key, 0, 0, 0)
            found[key] = OfEndpoint(
                *key,
                one.checks + count,
                one.denied_before + of_kind.before,
                one.denied + of_kind.denied,
            )
        return nlargest(
            TOP, found.values(), key=lambda one: (one.denied, one.denied_before, one.checks)
        )

    def _of_limit(self, scope: Scope, identities: int, sparing: int) -> OfLimit:
        by = self._limits[scope.rule.id, scope.rule_limit.name, scope.plan]
        return OfLimit(
            scope.rule,
            scope.rule_limit,
            scope.plan,
            by.checks,
            identities,
            len(by.identities),
            sparing,
        )
