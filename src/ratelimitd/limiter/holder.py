"""Holds: checks whose cost is known afterwards, and work in flight. See ADR 0055.

A hold is judged and answered like a check, fail-open answers included. Its charges are kept beside the buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, TypeAlias

from ratelimitd.algorithms.calendar_window import in_force, window_at
from ratelimitd.algorithms.several import Charge
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.clock import Clock
from ratelimitd.counters import CheckStats
from ratelimitd.errors import (
    CheckInvalidError,
    FieldViolation,
    HoldsFullError,
    StoreUnavailableError,
)
from ratelimitd.ledger.holds import OF_ANOTHER_CHECK, Held, Hold, Holds, OpenHolds
from ratelimitd.ledger.shared_state import within
from ratelimitd.limiter.limiter import Limiter, PreparedCheck
from ratelimitd.limiter.scopes import Scope, charges_of
from ratelimitd.model import (
    ALLOWED,
    CONCURRENCY,
    COST_EXCEEDS_LIMIT,
    WITHIN_LIMIT,
    Check,
    Decision,
    Enforcement,
    InFlight,
    Limit,
    LimitStatus,
    Outcome,
    Rule,
)

NO_LEASE: Final = FieldViolation("lease", "a limit of concurrency is not leased")
"""``lease`` is a field of the hold, not of its check."""

UNANSWERED: Final = StoreUnavailableError("the shared state did not answer about a limit")

_Judged: TypeAlias = Sequence[tuple[Scope, Outcome | StoreUnavailableError]]


class HeldLimit(NamedTuple):
    """A limit that a hold is charged to: its bucket's stored name, and its rule, name and plan, empty if it is gone."""

    bucket: bytes
    rule_id: str
    name: str
    plan: str


class Holding(NamedTuple):
    """The answer to a hold, the limits it is charged to, and its end in µs since the Unix epoch, 0 if it has none."""

    decision: Decision
    limits: Sequence[HeldLimit] = ()
    expire_us: int = 0


class SettledHold(NamedTuple):
    """The result of a settle; see :class:`ratelimitd.ledger.holds.Settled`."""

    known: bool
    limits: Sequence[LimitStatus] = ()


class _Current(NamedTuple):
    """The last fields of a :class:`LimitStatus`."""

    rule: Rule
    limit: Limit
    plan: str


class _InFlight(NamedTuple):
    """A hold made here: (rule id, name) of its limits, and the tokens held on each."""

    limits: Sequence[tuple[str, str]]
    tokens: int


class Holder:
    """Makes, settles and extends holds by the rules of a limiter; ``holds`` keeps them beside the buckets."""

    def __init__(
        self,
        limiter: Limiter,
        holds: Holds,
        *,
        keys: BucketKeys,
        clock: Clock,
        stats: CheckStats,
    ) -> None:
        self._stats = stats
        self._limiter = limiter
        self._holds = holds
        self._keys = keys
        self._clock = clock
        self._open: OpenHolds[_InFlight] = OpenHolds()
        self._counts: dict[tuple[str, str], list[int]] = {}
        """(rule id, name) of a limit → [holds in flight, their tokens]."""

    def resume(self, holds: Iterable[tuple[bytes, int]]) -> None:
        """Count holds in flight from before the restart, (number, end in µs) each; their limits are unknown."""
        for number, end_us in holds:
            # equivalent: tokens are counted by limit
            self._open.add(number, end_us, _InFlight((), 0))
            self._stats.holds_open += 1

    async def hold(
        self, check: Check, number: bytes, check_digest: bytes, ttl_us: int, *, lease: bool
    ) -> Holding:
        """Answer a check, and hold what it charges for ``ttl_us``; see :class:`ratelimitd.ledger.holds.Hold`.

        Raises:
            CheckInvalidError: the timestamp is out of range, the cost is above an enforced limit, the number belongs to
                a hold of another check, or a limit of concurrency is to be leased. Nothing was charged.
            HoldsFullError: the maximum of holds is reached. Nothing was charged.
        """
        limiter, scope = self._limiter, None
        try:
            prepared = limiter.prepare(check)
            if isinstance(prepared, Decision):
                return Holding(prepared)
            scope = prepared.scope
            charges = charges_of(prepared.identifiers, prepared.scope)
            if lease:
                _refuse_lease_of_slots(charges)
            hold = Hold(number, check_digest, charges, prepared.now_us, check.cost, ttl_us)
            held = await self._holds.hold(hold)
            if not held.expire_us:
                _refuse_above_limit(prepared, held.outcomes)
            names = held.names
            # A repeated hold may have other buckets. equivalent: those of a first hold have these names
            if held.expire_us and not held.is_first:
                names = [self._keys.stored(key) for key, _, _ in charges]
            limits, charged = self._of_buckets(names, prepared, held)
            decision = _decided(limiter, prepared, limits)
        except CheckInvalidError:
            raise
        except HoldsFullError:
            self._stats.holds["refused"] += 1
            raise
        except Exception as error:  # noqa: BLE001 - the specification: an unexpected error never denies
            return Holding(limiter.failed(error, scope))
        if not held.expire_us:
            return Holding(decision)
        if held.is_first:
            self._stats.holds["made"] += 1
            self._stats.hold_tokens["held"] += check.cost
            self._forget_ended()  # equivalent: it bounds the memory, and is done before every count
            self._forget(number)  # a previous one, which has ended by the store's clock only
            entry = _InFlight([one[1:3] for one in charged], check.cost)
            self._open.add(number, held.expire_us, entry)
            self._count(entry, 1)
        return Holding(decision, charged or _one_bucket(held), held.expire_us)

    def _of_buckets(
        self, names: Sequence[bytes], prepared: PreparedCheck, held: Held
    ) -> tuple[_Judged, Sequence[HeldLimit]]:
        """Return (limit, outcome) of the limits that judge a hold, and the limits that it is charged to.

        ``names`` are the buckets that the check's limits use now; a repeated hold keeps its original ones. A calendar
        limit also owns the bucket of its previous window. Limits without a bucket in the hold are not judged. Nor are
        limits that denied it while they only observed, and are enforced now.
        """
        owners = {}
        for name, one in zip(names, prepared.scope.several or (prepared.scope,), strict=True):
            owners[name if name in held.names else self._former(prepared, one)] = one
        judged: list[tuple[Scope, Outcome | StoreUnavailableError]] = []
        charged = []
        for name, outcome in zip(held.names, held.outcomes, strict=True):
            owner = owners.get(name)
            did_observe = bool(outcome and not outcome[0] and held.expire_us)
            if owner and not (did_observe and owner.limit.enforcement is Enforcement.ENFORCE):
                # A repeated hold has the outcomes of its first answer, and a limit may have been lowered since.
                judged.append(
                    (owner, UNANSWERED if outcome is None else within(outcome, owner.limit))
                )
            if outcome is not None and outcome[0]:
                owner_fields = (
                    (owner.rule.id, owner.rule_limit.name, owner.plan) if owner else ("", "", "")
                )
                charged.append(HeldLimit(name, *owner_fields))
        return judged, charged

    def _former(self, prepared: PreparedCheck, scope: Scope) -> bytes:
        """Return the stored name of a limit's bucket in the previous calendar window."""
        suffix = self._limiter.scopes.former_suffix(scope, prepared.now_us)
        return self._keys.stored(scope.identifier(prepared.identifiers) + suffix)

    async def settle(
        self, number: bytes, limits: Sequence[HeldLimit], held: int, actual: int
    ) -> SettledHold:
        """Charge ``actual`` tokens instead of the ``held`` ones.

        Raises: as :meth:`ratelimitd.ledger.holds.Holds.settle`.
        """
        now_us = self._clock.now_us()
        current = [self._current(one) for one in limits]
        of_buckets = {
            held.bucket: one and _of_window(one.limit, now_us)
            for held, one in zip(limits, current, strict=True)
        }
        settled = await self._holds.settle(number, of_buckets, actual, now_us)
        self._forget(number)
        if not settled.known:
            return SettledHold(known=False)
        if settled.is_first:
            self._stats.holds["settled"] += 1
            self._stats.hold_tokens["refunded"] += max(0, held - actual)
            self._stats.hold_tokens["debt"] += max(0, actual - held)
        statuses = [
            LimitStatus(*_of_now(within(outcome, one.limit), one.limit, now_us)[:5], *one)
            for one, outcome in zip(current, settled.outcomes, strict=True)
            if one and outcome
        ]
        return SettledHold(known=True, limits=statuses)

    async def extend(self, number: bytes, limits: Sequence[HeldLimit], ttl_us: int) -> int | None:
        """Extend a hold; return its end in µs, ``None`` if the hold is unknown.

        Raises: as :meth:`ratelimitd.ledger.holds.Holds.extend`.
        """
        names = [one.bucket for one in limits]
        expire_us = await self._holds.extend(number, names, ttl_us, self._clock.now_us())
        if expire_us is not None:
            self._open.extend(number, expire_us)
        return expire_us

    def in_flight(self) -> Sequence[InFlight]:
        """Return the holds made here since the start that are in flight, by limit.

        Holds settled on other nodes count until their end. If very many have ended since the last call, some of them
        still count.
        """
        self._forget_ended()
        book = self._limiter.book
        found = []
        for (rule_id, name), (holds, tokens) in self._counts.items():
            rule = book.get(rule_id) if book is not None else None
            if rule is not None:
                found.append(InFlight(rule, name, holds, tokens))
        return found

    def _forget(self, number: bytes) -> None:
        held = self._open.pop(number)
        if held is not None:
            self._count(held, -1)

    def _count(self, held: _InFlight, holds: int) -> None:
        self._stats.holds_open += holds
        for limit in held.limits:
            count = self._counts.setdefault(limit, [0, 0])
            count[0] += holds
            count[1] += holds * held.tokens
            if not count[0]:
                del self._counts[limit]

    def _forget_ended(self) -> None:
        for held in self._open.pop_ended(self._clock.now_us()):
            self._count(held, -1)
            self._stats.holds["expired"] += 1

    def _current(self, held: HeldLimit) -> _Current | None:
        """Return a limit as it is now; ``None`` if it is gone."""
        book = self._limiter.book
        rule = book.get(held.rule_id) if book is not None else None
        if rule is not None:
            for limit in rule.limits_of(held.plan):
                if limit.name == held.name:
                    return _Current(rule, limit, held.plan)
        return None


def _decided(limiter: Limiter, prepared: PreparedCheck, judged: _Judged) -> Decision:
    """Return the answer to a hold with these outcomes.

    Raises:
        CheckInvalidError: the hold is repeated, and none of its limits applies any more.
    """
    if not judged:
        raise CheckInvalidError(OF_ANOTHER_CHECK)
    if not prepared.scope.several:
        return limiter.answer(judged[0][1], prepared)
    scope = replace(prepared.scope, several=tuple([one for one, _ in judged]))
    return limiter.answer([outcome for _, outcome in judged], prepared._replace(scope=scope))


def _of_window(limit: Limit, now_us: int) -> Limit:
    """Return the limit of a bucket: that of a calendar is a fixed window, of the decades from the epoch to its end."""
    if limit.calendar is None:
        return limit
    return in_force(limit, window_at(limit.calendar, now_us))


def _of_now(outcome: Outcome, limit: Limit, now_us: int) -> Outcome:
    """Return the outcome of a bucket, or that of a fresh one if its calendar window is over."""
    if limit.calendar is None:
        return outcome
    end_s = window_at(limit.calendar, now_us).end_s
    if outcome[2] <= end_s:
        return outcome
    return (ALLOWED, limit.capacity, end_s, 0, WITHIN_LIMIT, None)


def _one_bucket(held: Held) -> Sequence[HeldLimit]:
    """Return a bucket by which a hold is found that observing limits have denied, and none has charged.

    Without one its settle could not end it, and it would count as in flight until its end.
    """
    answered = zip(held.names, held.outcomes, strict=True)
    return [HeldLimit(name, "", "", "") for name, outcome in answered if outcome is not None][:1]


def _refuse_lease_of_slots(charges: Sequence[Charge]) -> None:
    """Refuse a lease on a concurrency limit: checks take no slot, but a lease would."""
    if any(limit.algorithm is CONCURRENCY for _, limit, _ in charges):
        raise CheckInvalidError(NO_LEASE)


def _refuse_above_limit(prepared: PreparedCheck, outcomes: Sequence[Outcome | None]) -> None:
    """Refuse a hold whose cost exceeds an enforced limit: the caller must split it, not retry."""
    for one, outcome in zip(prepared.scope.several or (prepared.scope,), outcomes, strict=True):
        if outcome is not None and outcome[4] is COST_EXCEEDS_LIMIT and one.would_deny is None:
            message = f"is above the limit of {one.limit.capacity} tokens"
            raise CheckInvalidError(FieldViolation("tokens_requested", message))
