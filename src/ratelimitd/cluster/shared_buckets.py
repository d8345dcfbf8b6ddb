"""Checks on buckets that nodes share: decided by the node's own view where the ledger allows it, else by the store.

The first check of an unknown bucket is always decided by the store. Most such buckets are used once, so the answer is
packed; it becomes a view when the bucket is used again, was denied, or crossed into its last half. Never fails open: an
error is returned, and the limiter decides what it means. See ADR 0026 and ADR 0032.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from ratelimitd.algorithms import Decide
from ratelimitd.algorithms.several import Charge
from ratelimitd.clock import Clock
from ratelimitd.cluster.cache import BucketCache
from ratelimitd.cluster.gossip import Gossip, reset_buckets
from ratelimitd.cluster.joint_checks import (
    JointCheck,
    Outcomes,
    PartCheck,
    errors_that_deny,
)
from ratelimitd.cluster.membership import Membership
from ratelimitd.cluster.packed import numbers_of, unpack
from ratelimitd.cluster.pending import (
    NO_DEADLINE_US,
    Bucket,
    Deadlines,
    PendingCheck,
    decided,
    resolve_first,
)
from ratelimitd.cluster.refresh import Refresh
from ratelimitd.cluster.sync import Partition
from ratelimitd.counters import CheckStats
from ratelimitd.errors import BreakerOpenError, RateLimitdError, StoreSlowError
from ratelimitd.ledger import cold
from ratelimitd.ledger.accounts import Refund
from ratelimitd.ledger.protocol import ColdSpend
from ratelimitd.ledger.shared_state import STORE_TIME, FirstResult, StoreCheck, within
from ratelimitd.model import CONCURRENCY, COST_EXCEEDS_LIMIT, US_PER_S, Limit, Outcome

if TYPE_CHECKING:
    from ratelimitd.cluster.redis.store import RedisStore

ANSWER_WITHIN: Final = 0.75
"""The part of a caller's remaining time in which a check is answered; the rest is for the way back."""

_TOO_SLOW: Final = "the shared state was too slow for the caller"

MAX_MISSED: Final = 1_000
"""Limit of missed buckets whose check is not sent yet: the checks of the longest batch."""


class SharedBuckets:
    """The shared buckets of one node.

    ``stored_name`` maps a key to its name in the store. A check waits ``answer_s`` for the store, or less if its caller
    waits less, then the node's view decides it. ``decides_alone``: while a breaker is open, the node's view decides
    checks, instead of a ``BreakerOpenError``; ``breaker_denies``: that error denies a check.
    """

    def __init__(
        self,
        *,
        store: RedisStore,
        tags: Sequence[Partition],
        cache: BucketCache,
        stored_name: Callable[[bytes], bytes],
        clock: Clock,
        timers: asyncio.AbstractEventLoop,
        stats: CheckStats,
        membership: Membership,
        gossip: Gossip,
        refresh: Refresh,
        answer_s: float,
        decides_alone: bool = False,
        breaker_denies: bool = False,
    ) -> None:
        self._store = store
        self._tags = tags
        self._cache = cache
        self._stored_name = stored_name
        self._clock = clock
        self._membership = membership
        self._gossip = gossip
        self._stats = stats
        self._refresh = refresh
        self._decides_alone = decides_alone
        self.errors_that_deny = errors_that_deny(breaker_denies=breaker_denies)
        self._timers = timers
        self._new_future = asyncio.get_running_loop().create_future
        self._first_checks: dict[bytes, list[PendingCheck]] = {}
        self._missed: dict[bytes, bytes] = {}
        """Names of missed buckets by key, from :meth:`apply` or :meth:`peek` to :meth:`wait`."""
        self._answer_s = answer_s
        self._deadlines = Deadlines(clock, timers, answer_s, self._give_up)
        self.asked_total = 0
        """Checks of known buckets that the store was asked to decide."""
        self.late_total = 0
        """Those of them that the node's view decided after a timeout."""
        self.given_back_total = 0
        """Tokens that the store charged and that were refunded, because another limit denied the check."""
        self.kept_total = 0
        """Tokens of such checks that were not refunded."""

    # Called by the limiter

    def apply(  # noqa: PLR0917 -- called once a check: keywords would cost it 50 ns
        self, key: bytes, rule: Limit, decide: Decide, now_us: int, cost: int
    ) -> Outcome | None:
        """Decide and charge a check by the node's view; ``None``: the store must decide.

        Raises:
            BreakerOpenError: the store must decide, and its breaker is open.
        """
        # The usual case is inlined, here and in _by_view: a call is 50 ns of a check's 1,500.
        bucket = self._cache.young.get(key)
        if bucket is None:
            found = self._charged_cold(key, rule, decide, now_us, cost)
            if not isinstance(found, Bucket):
                return found
            bucket = found
        view, tag = bucket.view, bucket.tag
        if view.rule is not rule:
            self._note_rule(bucket, rule)
        if tag.server.is_open:
            if self._decides_alone:
                return within(self._alone(bucket, now_us, cost), rule)
            raise tag.server.open_error()
        members = self._membership.count
        outcome = view.check(now_us, members, cost)
        if view.rule is not rule and outcome is not None:
            outcome = within(outcome, rule)
        if outcome is None or not outcome[0]:
            return self._not_allowed(bucket, outcome)
        if not bucket.is_dirty:
            tag.touch(bucket)
        if view.unsent.tokens * members >= view.shared_out and view.is_due(now_us, members):
            tag.flush()
        return outcome

    def peek(
        self, key: bytes, rule: Limit, _decide: Decide, now_us: int, cost: int
    ) -> Outcome | None:
        """Decide a check by the node's view, without charging it."""
        bucket = self._cache.get(key) or self._known(key, rule)
        if bucket is None:
            return None
        if bucket.view.rule is not rule:
            self._note_rule(bucket, rule)
        if bucket.tag.server.is_open and not self._decides_alone:
            raise bucket.tag.server.open_error()
        self._watch(bucket)
        return bucket.view.peek(now_us, cost)

    def wait(  # noqa: PLR0917 -- as apply
        self,
        key: bytes,
        rule: Limit,
        now_us: int,
        cost: int,
        remaining_s: float | None = None,
        *,
        peek: bool,
    ) -> Awaitable[Outcome | RateLimitdError]:
        """Let the store decide a check."""
        by_us, answer = self._answer_by_us(remaining_s), self._new_future()
        check = PendingCheck(rule, now_us, cost, peek=peek, answer=answer, answer_by_us=by_us)
        name = self._missed.pop(key, None)
        # The miss was looked up a moment ago: check again only what may have changed since.
        if name is None or name in (tag := self._tags[name[0]]).buckets or tag.server.is_open:
            bucket = self._cache.get(key) or self._known(key, rule)
            if bucket is not None:
                self._decide(bucket, check)
                return check.answer
            name = self._missed.pop(key)
        self._ask_first(key, name, check, is_counted=True)
        return check.answer

    def apply_each(
        self, charges: Sequence[Charge], now_us: int, costs: Sequence[int]
    ) -> Sequence[Outcome] | None:
        """Decide a check on several buckets by the node's views, and charge all or none.

        ``None``: nothing was charged, and :meth:`wait_all` decides.
        """
        return JointCheck(self, self._timers, charges, now_us, costs, peek=False).at_once()

    def peek_each(
        self, charges: Sequence[Charge], now_us: int, costs: Sequence[int]
    ) -> Sequence[Outcome] | None:
        """Decide as :meth:`apply_each` would, without charging."""
        return JointCheck(self, self._timers, charges, now_us, costs, peek=True).at_once()

    def wait_all(
        self,
        charges: Sequence[Charge],
        now_us: int,
        costs: Sequence[int],
        remaining_s: float | None = None,
        *,
        peek: bool,
        is_counted: bool = True,
    ) -> Awaitable[Outcomes]:
        """Let the store decide where the node's views cannot."""
        answer: asyncio.Future[Outcomes] = self._new_future()
        by_us = self._answer_by_us(remaining_s)
        joint = JointCheck(
            self,
            self._timers,
            charges,
            now_us,
            costs,
            peek=peek,
            is_counted=is_counted,
            answer_by_us=by_us,
        )
        joint.start(answer)
        return answer

    def _answer_by_us(self, remaining_s: float | None) -> int:
        """Return when a caller needs its answer, if that is before two round trips are over."""
        if remaining_s is None or remaining_s * ANSWER_WITHIN >= 2 * self._answer_s:
            return NO_DEADLINE_US
        return self._clock.monotonic_us() + round(remaining_s * ANSWER_WITHIN * US_PER_S)

    async def refresh(self, keys: Sequence[bytes]) -> None:
        """Read buckets in use, and let the store decide the next check of others; skips servers whose breaker is open.

        A read that fails leaves a view as it is; it is repeated in the background.
        """
        reads = []
        for name in map(self._stored_name, keys):
            if not self._tags[name[0]].server.is_open:
                reads.append(asyncio.Event())
                self._refresh.reread(name, reads[-1].set)
        for read in reads:
            await read.wait()

    async def reset(self, keys: Sequence[bytes], rules: Sequence[Limit]) -> None:
        """Reset buckets to full, on every node.

        Raises:
            StoreUnavailableError: the reset may not have been applied.
        """
        names, now_us = [*map(self._stored_name, keys)], self._clock.now_us()
        await reset_buckets(self._store, names, rules, self._refresh.was_reset, now_us=now_us)

    # Parts of checks on several buckets

    def judge_part(self, check: PartCheck) -> bool:
        """Decide by the view, without charging; false if the bucket is unknown."""
        try:
            bucket = self._cache.get(check.key) or self._known(check.key, check.rule)
        except BreakerOpenError as error:
            check.part.outcome = error
            return True
        if bucket is None:
            return False
        if bucket.view.rule is not check.rule:
            self._note_rule(bucket, check.rule)
        self._judge_part(bucket, check)
        return True

    def _judge_part(self, bucket: Bucket, check: PartCheck) -> Outcome | RateLimitdError | None:
        view, part, now_us = bucket.view, check.part, check.now_us
        check.bucket, check.is_known = bucket, True
        if bucket.tag.server.is_open and not self._decides_alone:
            part.outcome = error = bucket.tag.server.open_error()
            return error
        if check.peek:
            self._watch(bucket)
            return part.peek(view, now_us)
        if bucket.tag.server.is_open:
            return part.reserve_alone(view, now_us)
        outcome = part.reserve(view, now_us, self._membership.count)
        return outcome if outcome is None or outcome[0] else self._not_allowed(bucket, outcome)

    def ask_part(self, check: PartCheck) -> None:
        """Let the store decide."""
        if check.is_known:
            self._ask(check.bucket, check)
        else:
            name = self._missed.pop(check.key, None) or self._stored_name(check.key)
            self._ask_first(check.key, name, check, is_counted=check.is_counted)

    def was_spent(self, check: PartCheck) -> None:
        """Queue what a view has spent for the next batch."""
        bucket = check.bucket
        if not bucket.is_dirty:
            bucket.tag.touch(bucket)
        if bucket.view.is_due(check.now_us, self._membership.count):
            bucket.tag.flush()

    def was_released(self, check: PartCheck) -> None:
        """Drop a bucket that was evicted while its view held reserved tokens."""
        check.bucket.tag.drop_if_settled(check.bucket)

    def give_back(self, check: PartCheck, refund: Refund) -> bool:
        """Queue a refund for the next batch; returns false while the breaker is open, or if too many refunds wait."""
        key, rule = check.key, check.rule
        try:
            bucket = self._cache.get(key) or self._known(key, rule)
        except BreakerOpenError:
            return False
        if bucket is None:  # evicted since it was charged
            name = self._missed.pop(key)
            bucket = self._in_use(
                Bucket(key, name, self._tags[name[0]], rule, check.part.shared), key
            )
        if not bucket.view.give_back(refund):
            return False
        bucket.tag.touch(bucket)
        bucket.tag.flush()
        return True

    # Unknown buckets

    def _ask_first(self, key: bytes, name: bytes, check: PendingCheck, *, is_counted: bool) -> None:
        """Send the first check of an unknown bucket to the store; further ones wait for its answer.

        A concurrency bucket has no view: the store decides each check.
        """
        if check.answer_by_us < NO_DEADLINE_US:
            # In time for its caller, who would count a later answer as none.
            wait_s = (check.answer_by_us - self._clock.monotonic_us()) / US_PER_S
            self._timers.call_later(max(0.0, wait_s), check.resolve, StoreSlowError(_TOO_SLOW))
        if check.rule.algorithm is CONCURRENCY:
            asked = StoreCheck(name, check.rule, STORE_TIME, check.cost, peek=True)
            self._store.decide(asked, partial(decided, check, self._tags[name[0]].server))
            return
        waiting = self._first_checks.get(key)
        if waiting is not None:
            waiting.append(check)
            return
        self._first_checks[key] = [check]
        fields = name, check.rule, check.now_us, check.cost, check.peek
        # Calling the class itself takes 0.5 µs longer.
        first = tuple.__new__(StoreCheck, fields)
        self._store.first_check(first, partial(self._first_answered, key, name, is_counted))

    def _first_answered(
        self,
        key: bytes,
        name: bytes,
        is_counted: bool,  # noqa: FBT001 - bound by position
        result: FirstResult | RateLimitdError,
    ) -> None:
        checks = self._first_checks.pop(key)
        tag = self._tags[name[0]]
        if isinstance(result, RateLimitdError):
            tag.server.failed(result)
            stale = self._cache.take_stale(name)
            if stale is None:
                if isinstance(result, StoreSlowError):
                    self._refresh.learn(name, checks[0].rule)
                for check in checks:
                    check.resolve(result)
            else:
                self._decide_by_stale(Bucket(key, name, tag, checks[0].rule, stale), checks)
            return
        tag.server.first_check_succeeded()
        outcome, shared = result
        first = checks[0]
        self._stats.bucket_missed_total += is_counted and not first.is_answered
        resolve_first(first, outcome, shared)
        is_noteworthy = not first.peek and _is_noteworthy(first, outcome)
        bucket = tag.bucket(name)
        if bucket is not None:  # made while the breaker was open
            self._refresh.adopt(bucket, shared)
        elif is_noteworthy or len(checks) > 1:
            bucket = Bucket(key, name, tag, first.rule, shared)
        else:
            self._cache.put_packed(name, shared)
            return
        if not bucket.is_cached:
            self._in_use(bucket, key)
        if is_noteworthy and outcome[0]:
            self._gossip.settled(bucket, None)
        elif is_noteworthy:
            self._watch(bucket)
        self._decide_each(bucket, checks[1:])

    def _decide_by_stale(self, bucket: Bucket, checks: Sequence[PendingCheck]) -> None:
        """Decide by the last known state, because the store did not answer; only the first check was sent."""
        first, *others = checks
        decide = bucket.view.peek if first.peek else bucket.view.presume
        first.resolve(decide(first.now_us, first.cost))
        self._decide_each(self._in_use(bucket, bucket.key), others)
        # Once packed again, its state would be trusted.
        self._refresh.reread(bucket.name)

    def _decide_each(self, bucket: Bucket, checks: Sequence[PendingCheck]) -> None:
        for check in checks:
            try:
                self._decide(bucket, check)
            except Exception as error:  # noqa: BLE001 - the checks behind it must be answered
                check.fail(error)

    # Known buckets

    def _charged_cold(  # noqa: PLR0917 -- as apply
        self, key: bytes, rule: Limit, decide: Decide, now_us: int, cost: int
    ) -> Outcome | Bucket | None:
        """Charge an idle bucket without creating a view, or return its bucket; ``None`` if it is unknown."""
        name, cache = self._stored_name(key), self._cache
        tag = self._tags[name[0]]
        if tag.server.is_open or rule.algorithm is CONCURRENCY:
            return cache.get_old(key) or self._known(key, rule, name)
        packed = cache.pop_packed(name)
        if packed is None or name in tag.buckets:
            return cache.get_old(key) or self._charged_again(key, name, rule, decide, now_us, cost)
        if type(packed) is int and not rule.burst and len(tag.cold) < tag.most_cold:
            limit, state = numbers_of(packed)
            members = self._membership.count
            if limit == rule.limit and (
                outcome := cold.spend(
                    state, rule, decide, now_us, members, cost, tag.make_view.share_of
                )
            ):
                cache.cold += 1
                at_us = now_us if state is None or state[1] < now_us else state[1]
                # Calling the class itself takes 0.3 µs longer.
                tag.cold[name] = tuple.__new__(ColdSpend, (rule, packed, at_us, cost, 0, 1))
                return outcome
        return self._in_use(Bucket(key, name, tag, rule, unpack(packed)), key)

    def _charged_again(  # noqa: PLR0917 -- as apply
        self, key: bytes, name: bytes, rule: Limit, decide: Decide, now_us: int, cost: int
    ) -> Outcome | Bucket | None:
        """Add a check to the cold spend of a bucket, or return the bucket; ``None`` if it is unknown."""
        tag = self._tags[name[0]]
        spent = tag.cold.get(name)
        if spent is not None and spent.rule is rule:
            members, share_of = self._membership.count, tag.make_view.share_of
            base = numbers_of(spent.base)[1]
            added = cold.add(spent, base, decide, now_us, members, cost, share_of)
            if added is not None:
                tag.cold[name] = added[1]
                return added[0]
        bucket = tag.bucket(name)
        if bucket is not None:
            return self._in_use(bucket, key)
        self._miss(key, name)
        return None

    def _known(self, key: bytes, rule: Limit, name: bytes = b"") -> Bucket | None:
        """Return a bucket that is known but not in use: packed, or evicted before everything was settled.

        Else remember the miss for :meth:`wait`, and return ``None``.
        """
        name = name or self._missed.get(key) or self._stored_name(key)
        tag = self._tags[name[0]]
        is_of_slots = rule.algorithm is CONCURRENCY
        bucket = None if is_of_slots else tag.bucket(name)
        if bucket is None:
            if tag.server.is_open and (not self._decides_alone or is_of_slots or tag.is_full):
                raise tag.server.open_error()
            shared = None if is_of_slots else self._cache.take_packed(name)
            if shared is None and tag.server.is_open:
                shared = self._cache.take_stale(name)
            elif shared is None:
                self._miss(key, name)
                return None
            bucket = Bucket(key, name, tag, rule, shared)
            if shared is None:
                bucket.view.start_alone(self._clock.now_us(), self._membership.count)
        return self._in_use(bucket, key)

    def _miss(self, key: bytes, name: bytes) -> None:
        """Remember the name for :meth:`wait`."""
        if len(self._missed) >= MAX_MISSED:
            self._missed.clear()
        self._missed[key] = name

    def _in_use(self, bucket: Bucket, key: bytes) -> Bucket:
        bucket.key = key
        self._cache.add(bucket)
        return bucket

    def _decide(self, bucket: Bucket, check: PendingCheck) -> None:
        if check.is_answered:
            return
        rule, now_us, cost = check.rule, check.now_us, check.cost
        if rule is not bucket.view.rule:
            self._note_rule(bucket, rule)
        outcome: Outcome | RateLimitdError | None
        if isinstance(check, PartCheck):
            outcome = self._judge_part(bucket, check)
        elif check.peek:
            outcome = bucket.view.peek(now_us, cost)
        elif not bucket.tag.server.is_open:
            outcome = self._by_view(bucket, now_us, cost)
        elif self._decides_alone:
            outcome = self._alone(bucket, now_us, cost)
        else:
            outcome = bucket.tag.server.open_error()
        if outcome is None:
            self._ask(bucket, check)
        else:
            check.resolve(outcome)

    def _ask(self, bucket: Bucket, check: PendingCheck) -> None:
        self.asked_total += 1
        bucket.tag.ask(bucket, check)
        self._deadlines.add(bucket, check)

    def _give_up(self, bucket: Bucket, check: PendingCheck) -> None:
        if not check.is_answered:
            self.late_total += 1
        bucket.tag.give_up(bucket, check)

    def _by_view(self, bucket: Bucket, now_us: int, cost: int) -> Outcome | None:
        view, members = bucket.view, self._membership.count
        outcome = view.check(now_us, members, cost)
        if outcome is None or not outcome[0]:
            return self._not_allowed(bucket, outcome)
        if not bucket.is_dirty:
            bucket.tag.touch(bucket)
        if view.is_due(now_us, members):
            bucket.tag.flush()
        return outcome

    def _not_allowed(self, bucket: Bucket, outcome: Outcome | None) -> Outcome | None:
        """Handle a check that was denied (an outcome), or that the view cannot decide (``None``)."""
        if outcome is None:
            return None
        # Most denials find it watched: the call would cost them 50 ns.
        if not bucket.is_watched and outcome[4] is not COST_EXCEEDS_LIMIT:
            self._watch(bucket)
        if bucket.view.has_newer_limit and not bucket.is_dirty:
            # Nothing is spent, so no other batch would carry the new limit to the store.
            bucket.tag.touch(bucket)
        return outcome

    def _watch(self, bucket: Bucket) -> None:
        """Let a bucket be read again in the background."""
        if not bucket.is_watched:
            self._refresh.queue.watch(bucket, self._clock.monotonic_us())

    @staticmethod
    def _alone(bucket: Bucket, now_us: int, cost: int) -> Outcome:
        outcome = bucket.view.check_alone(now_us, cost)
        if outcome[0] and not bucket.is_dirty:
            bucket.tag.touch(bucket)
        return outcome

    @staticmethod
    def _note_rule(bucket: Bucket, rule: Limit) -> None:
        """Apply a rule to the view, unless the view has a newer one from another node."""
        view = bucket.view
        if rule.revision >= view.rule.revision:
            view.edit(rule)


def _is_noteworthy(check: PendingCheck, outcome: Outcome) -> bool:
    """Return whether the bucket of a first check needs a view: it was denied, or may have entered its last half."""
    if outcome[4] is COST_EXCEEDS_LIMIT:
        return False  # no state of the bucket changes that
    left, half = outcome[1], check.rule.capacity // 2
    return not outcome[0] or left <= half <= left + check.cost
