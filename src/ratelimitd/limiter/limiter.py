"""The use case: decide checks, reset buckets. The only place that decides to fail open.

Does no I/O and imports no driver: rules come as an immutable book, buckets from a table, time from a clock. A decision
takes no await, no lock and no task; only checks that need the shared state wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple, cast
from zlib import crc32

from ratelimitd.algorithms import token_bucket
from ratelimitd.algorithms.several import Charge, deciding, passes, wait_ms
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.table import BucketTable
from ratelimitd.clock import Clock, TimestampPolicy, bounded, trusted
from ratelimitd.counters import CheckStats
from ratelimitd.errors import (
    BreakerOpenError,
    CheckInvalidError,
    RateLimitdError,
    StoreOverloadedError,
    StoreUnavailableError,
)
from ratelimitd.ledger.shared_state import within
from ratelimitd.limiter.answers import decision_of, fitted, passed
from ratelimitd.limiter.interfaces import Buckets, Journal, Recorder, RemoteBuckets
from ratelimitd.limiter.scopes import (
    Blocked,
    Scope,
    Scopes,
    Unjudged,
    charges_of,
    identifiers_of,
)
from ratelimitd.model import (
    ALLOWED,
    DENIED,
    EVERYBODY,
    US_PER_MS,
    US_PER_S,
    Check,
    Decision,
    Outcome,
    Reason,
    Rule,
)
from ratelimitd.rules.assignments import Assignments
from ratelimitd.rules.book import RuleBook

FAIL_OPEN_REMAINING: Final = 1
FAIL_OPEN_RESET_S: Final = 60
"""The specification's answer while the breaker is open: one token left, reset in 60 s."""

CHECKS_PER_ITERATION: Final = 100
"""Checks of a batch sent to the shared state per event-loop iteration: about 1 ms."""


OnDenied = Callable[[tuple[bytes, Scope | Blocked]], object]
"""Receives the identifier and the scope of a check that a rule or a plan denied; must be cheap."""


class PreparedCheck(NamedTuple):
    """The input of a decision: the check's identifiers, the scope of its limits, and its time, in µs."""

    identifiers: Sequence[bytes]
    scope: Scope
    now_us: int


class _Asked(NamedTuple):
    """A check sent to the shared state, with its pending outcome, or those of several limits."""

    prepared: PreparedCheck
    outcome: Awaitable[Outcome | RateLimitdError | Sequence[Outcome | Exception]]


class Limiter:
    """Decides checks by the rules of a book, either on a node's own ``buckets`` or on ``shared`` ones.

    ``breaker_denies``: while the breaker is open, checks are denied instead of allowed. ``on_error`` receives the
    exception behind a fail-open answer, for the log. It does not receive an unreachable or overloaded shared state,
    which the client of that state logs once, not for every check. ``on_unmatched`` receives the endpoint of a check
    without a rule. ``on_error``, ``on_denied`` and ``on_unmatched`` must not raise. ``assignments`` are the plans of
    identities, none by default. ``recorder`` is notified of every check answered while rules are loaded; callers of
    :meth:`charge` and :meth:`judge` notify it themselves.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        stats: CheckStats,
        timestamps: str,
        keys: BucketKeys,
        buckets: BucketTable | None = None,
        shared: RemoteBuckets | None = None,
        journal: Journal | None = None,
        breaker_denies: bool = False,
        on_error: Callable[[Exception], None] = lambda _: None,
        on_denied: OnDenied = lambda _: None,
        on_unmatched: Callable[[str], object] = lambda _: None,
        assignments: Assignments | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.recorder: Final = recorder
        self.buckets: Buckets
        if buckets is not None and shared is None:
            self.buckets = buckets
        elif shared is not None and buckets is None:
            self.buckets = shared
        else:
            message = "a limiter decides on its own buckets or on shared ones"
            raise ValueError(message)
        self._own = buckets
        self.shared: Final = shared
        self.breaker_denies: Final = breaker_denies
        self._clock = clock
        self._stats = stats
        self._timestamps = TimestampPolicy(timestamps)
        self._journal = journal
        self._on_error = on_error
        self._on_denied = on_denied
        self._on_unmatched = on_unmatched
        self._one_reset = asyncio.Lock()
        self.scopes = Scopes(
            keys=keys,
            stats=stats,
            assignments=Assignments() if assignments is None else assignments,
            is_shared=shared is not None,
        )

    @property
    def book(self) -> RuleBook | None:
        """The rules in force; ``None`` until the first book is loaded."""
        return self.scopes.book

    def replace_book(self, book: RuleBook) -> None:
        """Apply a new rule book from the next check on."""
        self.scopes.replace_book(book)

    def check(
        self, check: Check, now_us: int | None = None, *, is_recorded: bool = True
    ) -> Decision | None:
        """Answer one check at ``now_us``, the node's time unless given, and charge it if it is allowed and not a peek.

        If ``is_recorded`` is false, the caller notifies the recorder. ``None``, only with shared buckets: nothing was
        charged, and :meth:`wait` returns the answer.

        Raises:
            CheckInvalidError: the policy is ``caller`` and the timestamp is out of range. Any other error is answered
                fail-open.
        """
        try:
            now_us = self._clock.now_us() if now_us is None else now_us
            return self._decide(check, now_us, is_recorded=is_recorded)
        except CheckInvalidError:
            raise
        except Exception as error:  # noqa: BLE001 - the specification: an unexpected error never denies
            return self.failed(error)

    def check_batch(self, checks: Sequence[Check]) -> list[Decision | CheckInvalidError | None]:
        """Answer ``checks`` as :meth:`check` does; answer i belongs to check i.

        Checks of one identifier are decided together, as the specification requires, unless different identifiers may
        share a bucket. A check with an invalid timestamp is answered by its error; the others are not affected.
        """
        answers: list[Decision | CheckInvalidError | None] = [None] * len(checks)
        order: Iterable[int] = range(len(checks))
        shares = self.scopes.book is not None and EVERYBODY in self.scopes.book.types
        if not (shares or any(check.also for check in checks)):
            order = sorted(order, key=lambda index: checks[index].identifier)
        for index in order:
            try:
                answers[index] = self.check(checks[index])
            except CheckInvalidError as error:
                answers[index] = error
        return answers

    async def wait(
        self, checks: Sequence[Check], remaining_s: float | None = None
    ) -> list[Decision | CheckInvalidError]:
        """Answer checks for which :meth:`check` or :meth:`check_batch` returned ``None``; all are sent together.

        ``remaining_s``: how long their caller waits, ``None`` if that is not known.
        """
        asked = []
        for index, check in enumerate(checks):
            if index and index % CHECKS_PER_ITERATION == 0:
                await asyncio.sleep(0)
            asked.append(self._ask(check, remaining_s))
        return [await self._awaited(check, one) for check, one in zip(checks, asked, strict=True)]

    async def _awaited(
        self, check: Check, asked: _Asked | Decision | CheckInvalidError
    ) -> Decision | CheckInvalidError:
        if not isinstance(asked, _Asked):
            return asked
        try:
            decision = self.answer(await asked.outcome, asked.prepared)
        except Exception as error:  # noqa: BLE001 - as in check
            decision = self.failed(error)
        self.record(check, asked.prepared.now_us, decision)
        return decision

    def record(self, check: Check, at_us: int, decision: Decision) -> None:
        """Notify the recorder of an answered check."""
        recorder = self.recorder
        if recorder is not None and crc32(check.identifier, recorder.seed) < recorder.below:
            recorder.record(check.identifier, check, at_us, allowed=decision.allowed)

    async def reset(self, identifier: bytes, identifier_type: str, endpoint: str) -> Sequence[Rule]:
        """Reset the buckets of one identifier on one endpoint; missing buckets count as reset.

        ``identifier_type`` is that of a rule; ``identifier`` is that of a bucket, possibly :func:`joined`. Rules for
        all endpoints have their buckets on ``**``.

        Returns:
            The rules of these buckets. Disabled rules are included, so that enabling one does not bring old spends
            back.

        Raises:
            StoreUnavailableError: no rules are loaded yet, or the reset could not be made durable. Then the bucket has
                its old value again, without the spends made during the write.
            StoreOverloadedError: the shared state is overloaded; no reset was sent.
        """
        # A cancelled caller must not leave a bucket that is reset in memory only.
        return await asyncio.shield(self._reset(identifier, identifier_type, endpoint))

    async def _reset(
        self, identifier: bytes, identifier_type: str, endpoint: str
    ) -> Sequence[Rule]:
        # One at a time: else a failed reset could restore a bucket after a later reset of it was answered. The shared
        # state restores none, and one silent server must not delay the resets on others.
        async with self._one_reset if self._own is not None else nullcontext():
            book = self.scopes.book
            if book is None:
                message = "no rules are loaded yet"
                raise StoreUnavailableError(message)
            rules = book.candidates(endpoint, identifier_type)
            buckets = self.scopes.buckets_of(book, rules, endpoint, self._clock.now_us())
            keys = [identifier + suffix for suffix, _ in buckets]
            if self._own is not None:
                await self._reset_own(self._own, keys)
            else:
                shared = cast("RemoteBuckets", self.shared)
                await shared.reset(keys, [limit for _, limit in buckets])
            return rules

    async def _reset_own(self, buckets: BucketTable, keys: Sequence[bytes]) -> None:
        removed = [(key, buckets.remove(key)) for key in keys]
        if self._journal is None or not keys:
            return
        try:
            await self._journal.reset(keys)
        except StoreUnavailableError:
            for key, value in removed:
                if value is not None:
                    buckets.put_back(key, value)
            raise

    def now_us(self) -> int:
        """The node's time, in µs since the Unix epoch."""
        return self._clock.now_us()

    def charge(self, identifier: bytes, scope: Scope, now_us: int, cost: int) -> Outcome | None:
        """Answer one check of a plain ``scope`` at ``now_us``, and charge it if it is allowed.

        Bulk checks call this. If it returns ``None`` or raises, nothing was charged, and they call :meth:`check`.
        """
        outcome = self.buckets.apply(
            identifier + scope.key_suffix, scope.limit, scope.decide, now_us, cost
        )
        if outcome is None:
            return None
        if outcome[0]:
            self._stats.allowed_total += 1
            scope.counters[0] += 1
        else:
            self._stats.blocked_total += 1
            scope.counters[1] += 1
            self._on_denied((identifier, scope))
        return outcome

    def _decide(self, check: Check, now_us: int, *, is_recorded: bool) -> Decision | None:
        scope = (
            self.scopes.of_check(check)
            if check.also
            else self.scopes.find(check.endpoint, check.identifier_type)
        )
        if isinstance(scope, Scope):
            resolved: Scope | Unjudged = scope
        elif self.scopes.book is None:
            return self._fail_open(Reason.FAIL_OPEN_ERROR)
        else:
            resolved = self.scopes.resolve(scope, check, now_us)
        if check.timestamp:
            now_us = self.check_time_us(check.timestamp, now_us, resolved)
        if isinstance(resolved, Scope):
            decision = self._decide_by(check, resolved, now_us)
        else:
            decision = self._decide_unjudged(check, resolved)
        if self.recorder is not None and is_recorded and decision is not None:
            self.record(check, now_us, decision)
        return decision

    def _decide_by(self, check: Check, scope: Scope, now_us: int) -> Decision | None:
        if scope.windows is not None:
            scope = scope.windows.at(now_us)
        if scope.several or (check.max_wait_ms and self._own is not None):
            return self._decide_several(check, scope, now_us)
        if not check.peek:
            outcome = self.charge(check.identifier, scope, now_us, check.cost)
            if outcome is None:
                return None
            return Decision(*outcome[:5], scope.rule, scope.rule_limit, (), 0, scope.plan)
        key = check.identifier + scope.key_suffix
        outcome = self.buckets.peek(key, scope.limit, scope.decide, now_us, check.cost)
        return None if outcome is None else self._counted(outcome, check.identifier, scope)

    def _decide_unjudged(self, check: Check, unjudged: Unjudged) -> Decision:
        decision, stats = unjudged.decision, self._stats
        if unjudged.blocked is not None:
            stats.blocked_total += 1
            stats.plan_blocked_total += 1
            kinds = (check.identifier_type, *[kind for kind, _ in check.also])
            identifier = identifiers_of(check)[unjudged.blocked]
            self._on_denied((identifier, Blocked(check.endpoint, kinds[unjudged.blocked])))
            return decision
        stats.allowed_total += 1
        if decision.plan:
            stats.unlimited_total += 1
        else:
            stats.no_rule_total += 1
            self._on_unmatched(check.endpoint)
        return decision

    def judge(
        self,
        identifiers: Sequence[bytes],
        scope: Scope,
        now_us: int,
        cost: int,
        *,
        peek: bool = False,
        ahead_ms: int = 0,
    ) -> tuple[int, Outcome, Sequence[Outcome]] | None:
        """Answer one check on the limits of ``scope.several``, and charge it if it is allowed and not a ``peek``.

        ``ahead_ms``: the check proceeds that much later; all enforced limits must be token buckets.

        Returns:
            The index in ``scope.several`` of the deciding limit, the check's outcome, and the outcomes of all limits;
            ``None`` if nothing was charged and the caller must use :meth:`wait`.
        """
        if scope.windows is not None:
            scope = scope.windows.at(now_us)
        own = self._own
        if own is None or peek or ahead_ms or not scope.charged:
            judge_each = self.buckets.peek_each if peek else self.buckets.apply_each
        else:
            charged = own.charge_each(identifiers[0], scope.charged, now_us, cost)
            if charged is not None:
                # As :meth:`_judged` does for allowed outcomes.
                first, allowed = charged
                if scope.observes:
                    first = deciding(scope.limits, allowed)
                self._stats.allowed_total += 1
                scope.several[first].counters[0] += 1
                return first, allowed[first], allowed
            judge_each = own.apply_any
        charges = charges_of(identifiers, scope)
        if ahead_ms:
            charges = proceeding_later(charges, ahead_ms)
        outcomes = judge_each(charges, now_us, [cost] * len(charges))
        return None if outcomes is None else self._judged(identifiers, scope, outcomes)

    def _judged(
        self, identifiers: Sequence[bytes], scope: Scope, outcomes: Sequence[Outcome]
    ) -> tuple[int, Outcome, Sequence[Outcome]]:
        """Count a check by the outcomes of its limits; return as :meth:`judge`."""
        if self.shared is not None:
            outcomes = fitted(outcomes, scope.several)
        first = deciding(scope.limits, outcomes)
        outcome, decides = outcomes[first], scope.several[first]
        if scope.observes and (outcome[0] or decides.would_deny is not None):
            for one, judged in zip(scope.several, outcomes, strict=True):
                if not judged[0] and one.would_deny is not None:
                    one.would_deny[0] += 1
            outcome = passed(outcome)
        self._count(outcome, identifiers, decides)
        return first, outcome, outcomes

    def _decide_several(self, check: Check, scope: Scope, now_us: int) -> Decision | None:
        if not scope.several:
            scope = replace(scope, several=(scope,))
        identifiers = identifiers_of(check)
        ahead_ms = self.ahead_ms(check, charges_of(identifiers, scope), now_us)
        judged = self.judge(
            identifiers, scope, now_us, check.cost, peek=check.peek, ahead_ms=ahead_ms
        )
        return None if judged is None else decision_of(scope, *judged, ahead_ms)

    def ahead_ms(self, check: Check, charges: Sequence[Charge], now_us: int) -> int:
        """Return how much later, in ms, a check may proceed; 0: it passes now, or not even then."""
        if not check.max_wait_ms or self._own is None:
            return 0
        buckets = self._own.states(charges)
        return wait_ms(buckets, now_us, check.cost, check.max_wait_ms)

    def prepare(self, check: Check, now_us: int | None = None) -> PreparedCheck | Decision:
        """Return the input of a decision at ``now_us``, the node's time unless given.

        If no limit judges the check, count it and return its answer.

        Raises:
            CheckInvalidError: as :meth:`check`.
        """
        now_us = self._clock.now_us() if now_us is None else now_us
        if self.scopes.book is None:
            return self._fail_open(Reason.FAIL_OPEN_ERROR)
        scope = self.scopes.resolve_check(check, now_us)
        if check.timestamp:
            now_us = self.check_time_us(check.timestamp, now_us, scope)
        if isinstance(scope, Unjudged):
            return self._decide_unjudged(check, scope)
        return PreparedCheck(identifiers_of(check), scope.at(now_us), now_us)

    def _ask(
        self, check: Check, remaining_s: float | None
    ) -> _Asked | Decision | CheckInvalidError:
        """Ask the shared state about a check, or answer it without asking."""
        try:
            prepared = self.prepare(check)
            if isinstance(prepared, Decision):
                # The rules have changed since the check was found to need the shared state.
                return prepared
            identifiers, scope, now_us = prepared
            shared = cast("RemoteBuckets", self.shared)
            if scope.several:
                charges = charges_of(identifiers, scope)
                costs = [check.cost] * len(charges)
                outcomes = shared.wait_all(charges, now_us, costs, remaining_s, peek=check.peek)
                return _Asked(prepared, outcomes)
            key = check.identifier + scope.key_suffix
            outcome = shared.wait(
                key, scope.limit, now_us, check.cost, remaining_s, peek=check.peek
            )
            return _Asked(prepared, outcome)
        except CheckInvalidError as error:
            return error
        except Exception as error:  # noqa: BLE001 - the specification: an unexpected error never denies
            return self.failed(error)

    def answer(
        self,
        outcome: Outcome | Exception | Sequence[Outcome | Exception],
        prepared: PreparedCheck,
    ) -> Decision:
        """Count a check with this outcome, or those of several limits, and return its answer."""
        if isinstance(outcome, Exception):
            return self.failed(outcome)
        if prepared.scope.several:
            return self._answer_several(cast("Sequence[Outcome | Exception]", outcome), prepared)
        return self._counted(cast("Outcome", outcome), prepared.identifiers[0], prepared.scope)

    def _answer_several(
        self, outcomes: Sequence[Outcome | Exception], prepared: PreparedCheck
    ) -> Decision:
        """Answer by the limits with an outcome; if they allow and another has failed, fail open."""
        identifiers, judged_by, _ = prepared
        there = [*zip(judged_by.several, outcomes, strict=True)]
        answered = [outcome for outcome in outcomes if not isinstance(outcome, Exception)]
        scopes = [one for one, outcome in there if not isinstance(outcome, Exception)]
        limits = [one.limit for one in scopes]
        errors = [(one, outcome) for one, outcome in there if isinstance(outcome, Exception)]
        enforced = [error for one, error in errors if one.would_deny is None]
        failures = enforced or [error for _, error in errors if not answered]
        if failures and passes(limits, answered):
            is_open = [error for error in failures if isinstance(error, BreakerOpenError)]
            return self.failed((is_open or failures)[0], judged_by)
        scope = (
            replace(judged_by, several=tuple(scopes)) if len(answered) < len(there) else judged_by
        )
        return decision_of(scope, *self._judged(identifiers, scope, answered), 0)

    def _counted(self, outcome: Outcome, identifier: bytes, scope: Scope) -> Decision:
        self._count(outcome, (identifier,), scope)
        outcome = within(outcome, scope.limit)
        return Decision(*outcome[:5], scope.rule, scope.rule_limit, plan=scope.plan)

    def _count(self, outcome: Outcome, identifiers: Sequence[bytes], scope: Scope) -> None:
        if outcome[0]:
            self._stats.allowed_total += 1
            scope.counters[0] += 1
        else:
            self._stats.blocked_total += 1
            scope.counters[1] += 1
            self._on_denied((scope.identifier(identifiers), scope))

    def check_time_us(
        self, timestamp: int, now_us: int, resolved: Scope | Unjudged, *, is_counted: bool = True
    ) -> int:
        """Return the time of a check with a timestamp; ``is_counted``: count a timestamp out of tolerance.

        Raises:
            CheckInvalidError: as :meth:`check`.
        """
        if self._timestamps is TimestampPolicy.CALLER:
            return trusted(timestamp)
        if self._timestamps is TimestampPolicy.SERVER or isinstance(resolved, Unjudged):
            return now_us
        window_us = min(one.window_us for one in resolved.limits or (resolved.limit,))
        at_us = bounded(timestamp, now_us, window_us)
        if at_us is None:
            self._stats.clock_rejected_total += is_counted
            return now_us
        return at_us

    def failed(self, error: Exception, scope: Scope | None = None) -> Decision:
        """Answer a check that failed with ``error``: fail open, or deny if the open breaker denies.

        ``scope``: the limits that would have judged it; if all of them observe, the breaker denies nothing either.
        """
        if not isinstance(error, BreakerOpenError):
            if not isinstance(error, StoreUnavailableError | StoreOverloadedError):
                self._on_error(error)
            return self._fail_open(Reason.FAIL_OPEN_ERROR)
        if not self.breaker_denies or (scope is not None and scope.only_observes):
            return self._fail_open(Reason.FAIL_OPEN_BREAKER)
        self._stats.blocked_total += 1
        self._stats.breaker_denied_total += 1
        retry_after_s = max(1, -(-error.retry_after_us // US_PER_S))
        reset_time = -(-self._clock.now_us() // US_PER_S) + retry_after_s
        return Decision(DENIED, 0, reset_time, retry_after_s, Reason.FAIL_OPEN_BREAKER)

    def _fail_open(self, reason: Reason) -> Decision:
        """Allow without a decision, as the specification requires after a failure; nothing is charged."""
        stats = self._stats
        stats.allowed_total += 1
        if reason is Reason.FAIL_OPEN_BREAKER:
            stats.fail_open_breaker_total += 1
            reset_time = -(-self._clock.now_us() // US_PER_S) + FAIL_OPEN_RESET_S
            return Decision(ALLOWED, FAIL_OPEN_REMAINING, reset_time, 0, reason)
        stats.fail_open_error_total += 1
        return Decision(ALLOWED, FAIL_OPEN_REMAINING, 0, 0, reason)


def proceeding_later(charges: Sequence[Charge], ahead_ms: int) -> list[Charge]:
    """Return the charges of a check that proceeds ``ahead_ms`` later; observing windows are charged at once."""
    ahead = partial(token_bucket.decide_ahead, ahead_us=ahead_ms * US_PER_MS)
    return [
        (key, limit, ahead if decide is token_bucket.decide else decide)
        for key, limit, decide in charges
    ]
