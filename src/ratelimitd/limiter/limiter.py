"""The use case: decide checks, reset buckets. The only place that says "fail open".

Never does I/O of its own, never imports a driver: rules come as an immutable book, buckets from a table, time from a
clock. A decision takes no await, no lock and no task; only checks that need the shared state wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Final, NamedTuple, TypeAlias, cast
from zlib import crc32

from ratelimitd.algorithms import token_bucket
from ratelimitd.algorithms.several import Charge, deciding, passes, wait_ms
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.clock import Clock, TimestampPolicy, bounded, trusted
from ratelimitd.counters import CheckStats
from ratelimitd.errors import (
    BreakerOpenError,
    CheckInvalidError,
    RateLimitdError,
    StoreOverloadedError,
    StoreUnavailableError,
)
from ratelimitd.limiter.answers import (
    decision_of,
    explained_by,
    passed,
    statuses_of,
)
from ratelimitd.limiter.interfaces import (
    Buckets,
    Journal,
    LocalBuckets,
    Recorder,
    RemoteBuckets,
)
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
    INT32_MAX,
    US_PER_MS,
    US_PER_S,
    Check,
    Decision,
    Enforcement,
    Explained,
    Limit,
    LimitStatus,
    NearRule,
    Outcome,
    Reason,
    Rule,
)
from ratelimitd.rules.assignments import Assignments
from ratelimitd.rules.book import RuleBook
from ratelimitd.rules.nearest import MAX_LOOKED_AT, RULES_PER_STEP, Nearest

FAIL_OPEN_REMAINING: Final = 1
FAIL_OPEN_RESET_S: Final = 60
"""The specification's answer while the breaker is open: one token left, reset in 60 s."""

ASKED_PER_TURN: Final = 100
"""Checks of a batch put to the shared state in one turn of the event loop: about 1 ms."""


OnDenied = Callable[[tuple[bytes, Scope | Blocked]], object]
"""Takes the identifier and the scope of a check that a rule denied, or a plan; as cheap as it can be."""


class Judging(NamedTuple):
    """What judges a check: its identifiers, the scope of its limits, and the time at which it is judged, in µs."""

    identifiers: Sequence[bytes]
    scope: Scope
    now_us: int


class _Asked(NamedTuple):
    """A check that the shared state has been asked about: one outcome, or those of several limits."""

    judging: Judging
    outcome: Awaitable[Outcome | RateLimitdError | Sequence[Outcome | Exception]]


_Foreseen: TypeAlias = tuple[Sequence[Limit], Awaitable[Sequence[Outcome | Exception]]]

_Together: TypeAlias = dict[bytes, tuple[Charge, list[int]]]
"""What several checks charge to each bucket, by its key."""


class Limiter:
    """Decides checks by the rules of a book on buckets: a node's own, or ``shared`` ones; exactly one is given.

    ``breaker_denies``: while the breaker is open, checks are denied instead of allowed. ``on_error`` hears of
    the exception behind a fail-open answer, for the log; it must not raise. That the shared state is away is no such
    exception: who talks to it tells that once, not once a check. ``on_denied`` must not raise, either, nor must
    ``on_unmatched``, which takes the endpoint of a check without a rule.
    ``assignments`` are the plans of identities, none unless given. ``recorder`` hears of every check that is answered
    while there are rules; callers of :meth:`charge` and :meth:`judge` tell it themselves.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        stats: CheckStats,
        timestamps: str,
        keys: BucketKeys,
        buckets: LocalBuckets | None = None,
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
        self._buckets: Buckets
        self._reset_buckets: Callable[[Sequence[bytes], Sequence[Limit]], Awaitable[None]]
        if buckets is not None and shared is None:
            self._buckets, self._reset_buckets = buckets, partial(self._reset_own, buckets)
        elif shared is not None and buckets is None:
            self._buckets, self._reset_buckets = shared, shared.reset
        else:
            message = "a limiter decides on its own buckets or on shared ones"
            raise ValueError(message)
        self._own = buckets
        self._shared = shared
        self._breaker_denies = breaker_denies
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
        """Put new rules in force, whole, from the next check on."""
        self.scopes.replace_book(book)

    def check(
        self, check: Check, now_us: int | None = None, *, is_noted: bool = True
    ) -> Decision | None:
        """Answer one check at ``now_us``, the node's time unless given, and charge it if it is allowed and not a peek.

        Not ``is_noted``: the caller tells the recorder. ``None``, only where buckets are shared: nothing was charged,
        and :meth:`wait` brings the answer.

        Raises:
            CheckInvalidError: the policy is ``caller`` and the timestamp is out of range. Nothing else: whatever goes
                wrong inside is answered fail-open.
        """
        try:
            now_us = self._clock.now_us() if now_us is None else now_us
            return self._decide(check, now_us, is_noted=is_noted)
        except CheckInvalidError:
            raise
        except Exception as error:  # noqa: BLE001 - the specification: an unexpected error never denies
            return self.failed(error)

    def check_batch(
        self, checks: Sequence[Check], now_us: int | None = None
    ) -> list[Decision | CheckInvalidError | None]:
        """Answer ``checks`` as :meth:`check` would in their order; answer i is to check i.

        Checks of one identifier are decided together, as the specification asks, unless different identifiers may share
        a bucket. A check whose timestamp is refused
        has its error for an answer; its neighbours do not notice.
        """
        answers: list[Decision | CheckInvalidError | None] = [None] * len(checks)
        order: Iterable[int] = range(len(checks))
        shares = self.scopes.book is not None and EVERYBODY in self.scopes.book.types
        if not (shares or any(check.also for check in checks)):
            order = sorted(order, key=lambda index: checks[index].identifier)
        for index in order:
            try:
                answers[index] = self.check(checks[index], now_us)
            except CheckInvalidError as error:
                answers[index] = error
        return answers

    async def wait(self, checks: Sequence[Check]) -> list[Decision | CheckInvalidError]:
        """Answer checks for which :meth:`check` or :meth:`check_batch` returned ``None``; all are sent at once."""
        asked = []
        for index, check in enumerate(checks):
            if index and index % ASKED_PER_TURN == 0:
                await asyncio.sleep(0)
            asked.append(self._ask(check))
        return [await self._awaited(check, one) for check, one in zip(checks, asked, strict=True)]

    async def _awaited(
        self, check: Check, asked: _Asked | Decision | CheckInvalidError
    ) -> Decision | CheckInvalidError:
        if not isinstance(asked, _Asked):
            return asked
        try:
            decision = self.answer(await asked.outcome, asked.judging)
        except Exception as error:  # noqa: BLE001 - as in check
            decision = self.failed(error)
        self._note(check, asked.judging.now_us, decision)
        return decision

    def _note(self, check: Check, at_us: int, decision: Decision) -> None:
        recorder = self.recorder
        if recorder is not None and crc32(check.identifier, recorder.seed) < recorder.below:
            recorder.note(check.identifier, check, at_us, allowed=decision.allowed)

    def all_pass(self, checks: Sequence[Check], now_us: int) -> bool | Awaitable[bool]:
        """Whether checks would all pass at ``now_us``, one after the other; charges and counts nothing.

        Knows no timestamps. Checks may share a bucket: of a rule over all endpoints, for everybody or for one of their
        identities. An awaitable only where buckets are shared. An undetermined outcome counts as passing: the later
        charge meets the same failure and answers it.
        """
        together: _Together = {}
        foreseen = [self._foresee(check, now_us, together) for check in checks]
        for charge, costs in together.values():
            if len(costs) > 1:
                cost = min(sum(costs), INT32_MAX)
                foreseen.append(self._foresee_charges([charge], [charge[1]], now_us, cost))
        asked = [one for one in foreseen if not isinstance(one, bool)]
        pass_here = False not in foreseen
        return self._all_pass_there(asked) if asked and pass_here else pass_here

    async def reset(self, identifier: bytes, identifier_type: str, endpoint: str) -> Sequence[Rule]:
        """Let the buckets of one identifier on one endpoint start afresh; one that does not exist is as good as reset.

        ``identifier_type`` is a rule's; ``identifier`` that of a bucket, such as :func:`joined` ones. Rules over all
        endpoints have their buckets on ``**``.

        Returns the rules whose buckets these are. A disabled rule is among them, so that enabling it does not bring old
        spends back.

        Raises:
            StoreUnavailableError: there is no rule book yet, or the reset could not be made durable; then the bucket
                has its old value again, without the spends made during the write.
            StoreOverloadedError: the shared state has so much to do that it was not even asked.
        """
        # A caller that gives up half way must not leave a bucket that is reset in memory only.
        return await asyncio.shield(self._reset(identifier, identifier_type, endpoint))

    async def _reset(
        self, identifier: bytes, identifier_type: str, endpoint: str
    ) -> Sequence[Rule]:
        # One at a time: else a reset that fails could put a bucket back over a later one that was answered.
        async with self._one_reset:
            book = self.scopes.book
            if book is None:
                message = "no rules are loaded yet"
                raise StoreUnavailableError(message)
            rules = book.candidates(endpoint, identifier_type)
            buckets = self.scopes.buckets_of(book, rules, endpoint, self._clock.now_us())
            keys = [identifier + suffix for suffix, _ in buckets]
            await self._reset_buckets(keys, [limit for _, limit in buckets])
            return rules

    async def _reset_own(
        self, buckets: LocalBuckets, keys: Sequence[bytes], _limits: Sequence[Limit]
    ) -> None:
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

    async def explain(self, check: Check) -> Explained:
        """Return the answer that a check would get as a peek, and every rule that was looked at for it.

        Counts nothing.

        Raises:
            CheckInvalidError: as :meth:`check`.
            StoreUnavailableError: no rules are loaded yet, or the shared state did not answer.
            StoreOverloadedError, BreakerOpenError: the shared state was not asked.
        """
        if self.scopes.book is None:
            message = "no rules are loaded yet"
            raise StoreUnavailableError(message)
        types = (check.identifier_type, *(kind for kind, _ in check.also))
        now_us = self._clock.now_us()
        scopes = self.scopes.apart()
        plans, judging = scopes.plans_of(check, now_us), scopes.judging_of(check, now_us)
        if check.timestamp:
            now_us = self._check_time_us(check.timestamp, now_us, judging, is_counted=False)
        book = self.scopes.book
        looked_at = [*book.looked_at(check.endpoint, types)]
        if isinstance(judging, Unjudged):
            decision, statuses = judging.decision, cast("Sequence[LimitStatus]", ())
        else:
            decision, statuses = await self._foreseen(check, judging, now_us)
        is_blocked = decision.reason is Reason.BLOCKED
        assigned = {one.identifier_type: one.plan for one in plans}
        has_none = decision.reason is Reason.NO_RULE
        # A rule for * judges what was meant for another, too.
        is_other = all(rule.endpoint != check.endpoint for rule, _ in looked_at)
        return Explained(
            decision,
            tuple(
                [explained_by(*one, assigned, statuses, is_blocked=is_blocked) for one in looked_at]
            ),
            plans,
            await _nearest(book, Nearest(check.endpoint, types, only_spelling=not has_none))
            if has_none or is_other
            else (),
        )

    async def _foreseen(
        self, check: Check, scope: Scope, now_us: int
    ) -> tuple[Decision, Sequence[LimitStatus]]:
        scope = scope.at(now_us)
        scopes = scope.several or (scope,)
        charges = charges_of(identifiers_of(check), scope)
        ahead_ms = self._ahead_ms(check, charges, now_us)
        charges = _ahead(charges, ahead_ms) if ahead_ms else charges
        outcomes = self._buckets.peek_all(charges, now_us, check.cost)
        if outcomes is None:
            # Only shared buckets leave it undecided.
            shared: RemoteBuckets = self._shared  # type: ignore[assignment]
            found = await shared.wait_all(charges, now_us, check.cost, peek=True, is_counted=False)
            outcomes = []
            for one in found:
                if isinstance(one, Exception):
                    raise one
                outcomes.append(one)
        first = deciding([one.limit for one in scopes], outcomes)
        judged, decides = outcomes[first], scopes[first]
        allowed = judged[0] or decides.would_deny is not None
        judged = passed(judged) if allowed else judged
        decision = decision_of(scope, first, judged, outcomes, ahead_ms)
        return decision, statuses_of(scopes, outcomes)

    def now_us(self) -> int:
        """The node's time, in µs since the Unix epoch."""
        return self._clock.now_us()

    def charge(self, identifier: bytes, scope: Scope, now_us: int, cost: int) -> Outcome | None:
        """Answer one check of ``scope`` at ``now_us``, and charge it if it is allowed.

        For bulk checks, and of a plain scope. If this returns ``None`` or raises, nothing was charged, and
        the caller uses :meth:`check`.
        """
        outcome = self._buckets.apply(
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

    def _decide(self, check: Check, now_us: int, *, is_noted: bool) -> Decision | None:
        scope = (
            self.scopes.of_check(check)
            if check.also
            else self.scopes.find(check.endpoint, check.identifier_type)
        )
        if isinstance(scope, Scope):
            judging: Scope | Unjudged = scope
        elif self.scopes.book is None:
            return self._fail_open(Reason.FAIL_OPEN_ERROR)
        else:
            judging = self.scopes.judging_by(scope, check, now_us)
        if check.timestamp:
            now_us = self._check_time_us(check.timestamp, now_us, judging)
        if isinstance(judging, Scope):
            decision = self._decide_by(check, judging, now_us)
        else:
            decision = self._decide_unjudged(check, judging)
        if self.recorder is not None and is_noted and decision is not None:
            self._note(check, now_us, decision)
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
            return Decision(*outcome[:5], scope.rule, scope.told, (), 0, scope.plan)
        key = check.identifier + scope.key_suffix
        outcome = self._buckets.peek(key, scope.limit, scope.decide, now_us, check.cost)
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
        """Answer one check of a scope with several; as :meth:`charge`, for checks that have these identifiers.

        ``ahead_ms``: all of them are token buckets, and the check proceeds so much later.

        Returns:
            Which of ``scope.several`` decides, the check's outcome, and those of all in their order; ``None`` if
            nothing was charged, and the caller uses :meth:`wait`.
        """
        if scope.windows is not None:
            scope = scope.windows.at(now_us)
        charges = charges_of(identifiers, scope)
        if ahead_ms:
            charges = _ahead(charges, ahead_ms)
        judge_all = self._buckets.peek_all if peek else self._buckets.apply_all
        outcomes = judge_all(charges, now_us, cost)
        return None if outcomes is None else self._judged(identifiers, scope, outcomes)

    def _judged(
        self, identifiers: Sequence[bytes], scope: Scope, outcomes: Sequence[Outcome]
    ) -> tuple[int, Outcome, Sequence[Outcome]]:
        """Count a check by the outcomes of its limits, and return it as :meth:`judge` does."""
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
        ahead_ms = self._ahead_ms(check, charges_of(identifiers, scope), now_us)
        judged = self.judge(
            identifiers, scope, now_us, check.cost, peek=check.peek, ahead_ms=ahead_ms
        )
        return None if judged is None else decision_of(scope, *judged, ahead_ms)

    def _ahead_ms(self, check: Check, charges: Sequence[Charge], now_us: int) -> int:
        """Return how much later, in ms, a check may proceed; 0: it passes now, or not even then."""
        if not check.max_wait_ms or self._own is None:
            return 0
        buckets = self._own.states(charges)
        return wait_ms(buckets, now_us, check.cost, check.max_wait_ms)

    def _foresee(self, check: Check, now_us: int, together: _Together) -> bool | _Foreseen:
        try:
            scope = self.scopes.judging_of(check, now_us)
            if isinstance(scope, Unjudged):
                return scope.decision.allowed
            scope = scope.at(now_us)
            charges = charges_of(identifiers_of(check), scope)
            for charge in () if check.peek else charges:
                together.setdefault(charge[0], (charge, []))[1].append(check.cost)
        except Exception as error:  # noqa: BLE001 - charging meets it again, and reports it
            return self._passes_without_answer(error)
        return self._foresee_charges(charges, scope.limits or (scope.limit,), now_us, check.cost)

    def _foresee_charges(
        self, charges: Sequence[Charge], limits: Sequence[Limit], now_us: int, cost: int
    ) -> bool | _Foreseen:
        try:
            # Each bucket is looked up again when it is charged, and counts then.
            outcomes = self._buckets.peek_all(charges, now_us, cost)
            if outcomes is not None or self._shared is None:
                return outcomes is None or passes(limits, outcomes)
            return limits, self._shared.wait_all(charges, now_us, cost, peek=True, is_counted=False)
        except Exception as error:  # noqa: BLE001 - as above
            return self._passes_without_answer(error)

    async def _all_pass_there(self, asked: Sequence[_Foreseen]) -> bool:
        all_pass = True
        for limits, foreseen in asked:
            try:
                outcomes = await foreseen
            except Exception as error:  # noqa: BLE001 - as above
                all_pass &= self._passes_without_answer(error)
                continue
            for limit, outcome in zip(limits, outcomes, strict=True):
                if limit.enforcement is not Enforcement.ENFORCE:
                    continue
                if isinstance(outcome, Exception):
                    all_pass &= self._passes_without_answer(outcome)
                else:
                    all_pass &= outcome[0]
        return all_pass

    def _passes_without_answer(self, error: Exception) -> bool:
        return not (isinstance(error, BreakerOpenError) and self._breaker_denies)

    def judging(self, check: Check) -> Judging | Decision:
        """Return what judges a check now, or the answer to one that no limit judges, which is counted.

        Raises:
            CheckInvalidError: as :meth:`check`.
        """
        now_us = self._clock.now_us()
        if self.scopes.book is None:
            return self._fail_open(Reason.FAIL_OPEN_ERROR)
        scope = self.scopes.judging_of(check, now_us)
        if check.timestamp:
            now_us = self._check_time_us(check.timestamp, now_us, scope)
        if isinstance(scope, Unjudged):
            return self._decide_unjudged(check, scope)
        return Judging(identifiers_of(check), scope.at(now_us), now_us)

    def _ask(self, check: Check) -> _Asked | Decision | CheckInvalidError:
        """Ask the shared state about a check, or answer it without asking."""
        try:
            judging = self.judging(check)
            if isinstance(judging, Decision):
                # The rules have changed since it was found that the shared state has to be asked.
                return judging
            identifiers, scope, now_us = judging
            shared = cast("RemoteBuckets", self._shared)
            if scope.several:
                charges = charges_of(identifiers, scope)
                outcomes = shared.wait_all(charges, now_us, check.cost, peek=check.peek)
                return _Asked(judging, outcomes)
            key = check.identifier + scope.key_suffix
            outcome = shared.wait(key, scope.limit, now_us, check.cost, peek=check.peek)
            return _Asked(judging, outcome)
        except CheckInvalidError as error:
            return error
        except Exception as error:  # noqa: BLE001 - the specification: an unexpected error never denies
            return self.failed(error)

    def answer(
        self, outcome: Outcome | RateLimitdError | Sequence[Outcome | Exception], judging: Judging
    ) -> Decision:
        """Return the answer to a check with this outcome, or those of several limits, and count it."""
        if isinstance(outcome, RateLimitdError):
            return self.failed(outcome)
        if judging.scope.several:
            return self._answer_several(cast("Sequence[Outcome | Exception]", outcome), judging)
        return self._counted(cast("Outcome", outcome), judging.identifiers[0], judging.scope)

    def _answer_several(
        self, outcomes: Sequence[Outcome | Exception], judging: Judging
    ) -> Decision:
        """Answer by the limits that were reached; one that was not makes an answer that allows fail open."""
        identifiers, judged_by, _ = judging
        there = [*zip(judged_by.several, outcomes, strict=True)]
        answered = [outcome for outcome in outcomes if not isinstance(outcome, Exception)]
        scopes = [one for one, outcome in there if not isinstance(outcome, Exception)]
        limits = [one.limit for one in scopes]
        failures = [
            outcome
            for one, outcome in there
            if isinstance(outcome, Exception) and (one.would_deny is None or not answered)
        ]
        if failures and passes(limits, answered):
            is_open = [error for error in failures if isinstance(error, BreakerOpenError)]
            return self.failed((is_open or failures)[0])
        scope = (
            replace(judged_by, several=tuple(scopes)) if len(answered) < len(there) else judged_by
        )
        return decision_of(scope, *self._judged(identifiers, scope, answered), 0)

    def _counted(self, outcome: Outcome, identifier: bytes, scope: Scope) -> Decision:
        self._count(outcome, (identifier,), scope)
        return Decision(*outcome[:5], scope.rule, scope.told, plan=scope.plan)

    def _count(self, outcome: Outcome, identifiers: Sequence[bytes], scope: Scope) -> None:
        if outcome[0]:
            self._stats.allowed_total += 1
            scope.counters[0] += 1
        else:
            self._stats.blocked_total += 1
            scope.counters[1] += 1
            self._on_denied((scope.identifier(identifiers), scope))

    def _check_time_us(
        self, timestamp: int, now_us: int, judging: Scope | Unjudged, *, is_counted: bool = True
    ) -> int:
        if self._timestamps is TimestampPolicy.CALLER:
            return trusted(timestamp)
        if self._timestamps is TimestampPolicy.SERVER or isinstance(judging, Unjudged):
            return now_us
        window_us = min(one.window_us for one in judging.limits or (judging.limit,))
        at_us = bounded(timestamp, now_us, window_us)
        if at_us is None:
            self._stats.clock_rejected_total += is_counted
            return now_us
        return at_us

    def failed(self, error: Exception) -> Decision:
        """Answer a check that an error kept from being decided: fail open, or deny while the breaker is open."""
        if isinstance(error, BreakerOpenError):
            return self._without_shared_state(error.retry_after_us)
        if not isinstance(error, StoreUnavailableError | StoreOverloadedError):
            self._on_error(error)
        return self._fail_open(Reason.FAIL_OPEN_ERROR)

    def _without_shared_state(self, retry_after_us: int) -> Decision:
        if not self._breaker_denies:
            return self._fail_open(Reason.FAIL_OPEN_BREAKER)
        self._stats.blocked_total += 1
        self._stats.breaker_denied_total += 1
        retry_after_s = max(1, -(-retry_after_us // US_PER_S))
        reset_time = -(-self._clock.now_us() // US_PER_S) + retry_after_s
        return Decision(DENIED, 0, reset_time, retry_after_s, Reason.FAIL_OPEN_BREAKER)

    def _fail_open(self, reason: Reason) -> Decision:
        """Allow without a check, as the specification answers a failure; nothing is charged."""
        stats = self._stats
        stats.allowed_total += 1
        if reason is Reason.FAIL_OPEN_BREAKER:
            stats.fail_open_breaker_total += 1
            reset_time = -(-self._clock.now_us() // US_PER_S) + FAIL_OPEN_RESET_S
            return Decision(ALLOWED, FAIL_OPEN_REMAINING, reset_time, 0, reason)
        stats.fail_open_error_total += 1
        return Decision(ALLOWED, FAIL_OPEN_REMAINING, 0, 0, reason)


async def _nearest(book: RuleBook, nearest: Nearest) -> tuple[NearRule, ...]:
    """Return the nearest rules of a book; other calls have their turn between two steps."""
    rules = islice(book.rules(), MAX_LOOKED_AT)
    while some := [*islice(rules, RULES_PER_STEP)]:
        nearest.look_at(some)
        await asyncio.sleep(0)
    return nearest.found()


def _ahead(charges: Sequence[Charge], ahead_ms: int) -> list[Charge]:
    """Return the charges of a check that proceeds so much later."""
    decide = partial(token_bucket.decide_ahead, ahead_us=ahead_ms * US_PER_MS)
    return [(key, limit, decide) for key, limit, _ in charges]
