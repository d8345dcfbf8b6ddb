"""The use case: decide checks, reset buckets. The only place that says "fail open".

Never does I/O of its own, never imports a driver: rules come as an immutable book, buckets from a table, time from a
clock. A decision takes no await, no lock and no task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from ratelimitd.algorithms import DECIDE, Decide
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.table import BucketTable
from ratelimitd.clock import Clock
from ratelimitd.errors import CheckInvalidError, StoreUnavailableError
from ratelimitd.model import (
    ALLOWED,
    NO_RULE_REMAINING,
    US_PER_S,
    Check,
    Decision,
    IdentifierType,
    Outcome,
    Reason,
    Rule,
)
from ratelimitd.rules.book import RuleBook
from ratelimitd.stats import CheckStats
from ratelimitd.timestamps import TimestampPolicy, bounded, trusted

FAIL_OPEN_REMAINING: Final = 1
FAIL_OPEN_RESET_S: Final = 60
"""The specification's answer while the breaker is open: one token left, reset in 60 s."""

MAX_SCOPES: Final = 4_096
"""Endpoints whose rule and key scope are remembered; beyond it they are looked up again, which takes about 3 µs. Bounds
what callers who send ever new endpoints can make a node hold (I17), and how long forgetting all of it takes."""


class Journal(Protocol):
    """Where resets are written before they are answered, so that no restart undoes them."""

    async def reset(self, keys: Sequence[bytes]) -> None:
        """Write that the buckets of ``keys`` start afresh; done when it is on disk.

        Raises:
            StoreUnavailableError: it cannot be written.
        """


@dataclass(frozen=True, slots=True)
class Scope:
    """What all checks of one endpoint and identifier type have in common until the next rule book.

    ``counters`` are the rule's allowed and blocked checks.
    """

    rule: Rule
    key_suffix: bytes
    decide: Decide
    counters: list[int]


_NO_RULE: Final = Decision(ALLOWED, NO_RULE_REMAINING, 0, 0, Reason.NO_RULE, None)


class Limiter:
    """Decides checks by the rules of a book on the buckets of a table.

    ``on_error`` hears of the exception behind a fail-open answer, for the log; it must not raise.
    """

    def __init__(
        self,
        *,
        buckets: BucketTable,
        clock: Clock,
        stats: CheckStats,
        timestamps: str,
        key_secret: bytes,
        journal: Journal | None = None,
        on_error: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        self._buckets = buckets
        self._clock = clock
        self._stats = stats
        self._timestamps = TimestampPolicy(timestamps)
        self._keys = BucketKeys(key_secret)
        self._journal = journal
        self._on_error = on_error
        self._one_reset = asyncio.Lock()
        self._book: RuleBook | None = None
        self._scopes: dict[tuple[str, IdentifierType], Scope | None] = {}

    @property
    def book(self) -> RuleBook | None:
        """The rules in force; ``None`` until a first book is there."""
        return self._book

    def replace_book(self, book: RuleBook) -> None:
        """Put new rules in force, whole, from the next check on."""
        self._book = book
        self._scopes = {}

    def check(self, check: Check) -> Decision:
        """Answer one check, and charge it if it is allowed and not a peek.

        Raises:
            CheckInvalidError: the policy is ``caller`` and the timestamp is out of range. Nothing else: whatever goes
                wrong inside is answered fail-open.
        """
        try:
            return self._decide(check, self._clock.now_us())
        except CheckInvalidError:
            raise
        except Exception as error:  # noqa: BLE001 - the specification: an unexpected error never denies
            return self._fail_open(Reason.FAIL_OPEN_ERROR, error)

    def check_batch(self, checks: Sequence[Check]) -> list[Decision | CheckInvalidError]:
        """Answer ``checks`` as :meth:`check` would in their order; answer i is to check i.

        Checks of one identifier are decided together, as the specification asks. A check whose timestamp is refused
        has its error for an answer; its neighbours do not notice.
        """
        answers: list[Decision | CheckInvalidError | None] = [None] * len(checks)
        for index in sorted(range(len(checks)), key=lambda index: checks[index].identifier):
            try:
                answers[index] = self.check(checks[index])
            except CheckInvalidError as error:
                answers[index] = error
        return answers  # type: ignore[return-value]  # sorted() yields every index once

    async def reset(
        self, identifier: bytes, identifier_type: IdentifierType, endpoint: str
    ) -> Sequence[Rule]:
        """Let the buckets of one identifier on one endpoint start afresh; one that does not exist is as good as reset.

        Returns the rules whose buckets these are. A disabled rule is among them, so that enabling it does not bring old
        spends back.

        Raises:
            StoreUnavailableError: there is no rule book yet, or the reset could not be made durable; then the bucket
                is as it was, but for what was spent while the journal was trying.
        """
        # A caller that gives up half way must not leave a bucket that is reset in memory only.
        return await asyncio.shield(self._reset(identifier, identifier_type, endpoint))

    async def _reset(
        self, identifier: bytes, identifier_type: IdentifierType, endpoint: str
    ) -> Sequence[Rule]:
        # One at a time: else a reset that fails could put a bucket back over a later one that was answered.
        async with self._one_reset:
            if self._book is None:
                message = "no rules are loaded yet"
                raise StoreUnavailableError(message)
            rules = self._book.candidates(endpoint, identifier_type)
            keys = [identifier + self._keys.scope(rule, endpoint) for rule in rules]
            removed = [(key, self._buckets.remove(key)) for key in keys]
            if self._journal is None or not keys:
                return rules
            try:
                await self._journal.reset(keys)
            except StoreUnavailableError:
                for key, value in removed:
                    if value is not None:
                        self._buckets.put_back(key, value)
                raise
            return rules

    def now_us(self) -> int:
        """The node's time, in µs since the Unix epoch."""
        return self._clock.now_us()

    def scope(self, endpoint: str, identifier_type: IdentifierType) -> Scope | None:
        """What all checks of an endpoint have in common until :attr:`book` changes; ``None`` without rule or book."""
        try:
            return self._scopes[endpoint, identifier_type]
        except KeyError:
            if self._book is None:
                return None
            return self._remember_scope(self._book, endpoint, identifier_type)

    def charge(self, identifier: bytes, scope: Scope, now_us: int, cost: int) -> Outcome:
        """Answer one check of ``scope`` at ``now_us``, and charge it if it is allowed.

        For checks that come in bulk: whatever this raises was not charged, and :meth:`check` is to answer instead.
        """
        outcome = self._buckets.apply(
            identifier + scope.key_suffix, scope.rule, scope.decide, now_us, cost
        )
        if outcome[0]:
            self._stats.allowed_total += 1
            scope.counters[0] += 1
        else:
            self._stats.blocked_total += 1
            scope.counters[1] += 1
        return outcome

    def _decide(self, check: Check, now_us: int) -> Decision:
        scope = self.scope(check.endpoint, check.identifier_type)
        if scope is None and self._book is None:
            return self._fail_open(Reason.FAIL_OPEN_ERROR, None)
        if check.timestamp:
            rule = None if scope is None else scope.rule
            now_us = self._check_time_us(check.timestamp, now_us, rule)
        if scope is None:
            self._stats.allowed_total += 1
            self._stats.no_rule_total += 1
            return _NO_RULE
        if not check.peek:
            outcome = self.charge(check.identifier, scope, now_us, check.cost)
        else:
            outcome = self._peek(check, scope, now_us)
        return Decision(*outcome[:5], scope.rule)

    def _peek(self, check: Check, scope: Scope, now_us: int) -> Outcome:
        key = check.identifier + scope.key_suffix
        outcome = self._buckets.peek(key, scope.rule, scope.decide, now_us, check.cost)
        if outcome[0]:
            self._stats.allowed_total += 1
            scope.counters[0] += 1
        else:
            self._stats.blocked_total += 1
            scope.counters[1] += 1
        return outcome

    def _check_time_us(self, timestamp: int, now_us: int, rule: Rule | None) -> int:
        if self._timestamps is TimestampPolicy.CALLER:
            return trusted(timestamp)
        if self._timestamps is TimestampPolicy.SERVER or rule is None:
            return now_us
        at_us = bounded(timestamp, now_us, rule.window_us)
        if at_us is None:
            self._stats.clock_rejected_total += 1
            return now_us
        return at_us

    def _remember_scope(
        self, book: RuleBook, endpoint: str, identifier_type: IdentifierType
    ) -> Scope | None:
        rule = book.match(endpoint, identifier_type)
        scope = None
        if rule is not None:
            suffix = self._keys.scope(rule, endpoint)
            scope = Scope(rule, suffix, DECIDE[rule.algorithm], self._stats.rule_counters(rule.id))
        if len(self._scopes) >= MAX_SCOPES:
            self._scopes = {}
        self._scopes[endpoint, identifier_type] = scope
        return scope

    def _fail_open(self, reason: Reason, error: Exception | None) -> Decision:
        """Allow without a check, as the specification answers a failure; nothing is charged."""
        stats = self._stats
        stats.allowed_total += 1
        if reason is Reason.FAIL_OPEN_BREAKER:
            stats.fail_open_breaker_total += 1
            reset_time = -(-self._clock.now_us() // US_PER_S) + FAIL_OPEN_RESET_S
            return Decision(ALLOWED, FAIL_OPEN_REMAINING, reset_time, 0, reason, None)
        stats.fail_open_error_total += 1
        if error is not None:
            self._on_error(error)
        return Decision(ALLOWED, FAIL_OPEN_REMAINING, 0, 0, reason, None)
