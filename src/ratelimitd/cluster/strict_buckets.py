"""Checks on buckets that nodes share, each decided by the shared state itself: ``CONSISTENCY=strict``.

One script call decides all checks of one event-loop iteration. In a Cluster, the parts of a check on several buckets
are decided concurrently, and charges are refunded if one part denies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ratelimitd.algorithms.several import ENFORCE, Charge
from ratelimitd.cluster.gossip import reset_buckets
from ratelimitd.cluster.joint_checks import (
    JointCheck,
    Outcomes,
    PartCheck,
    errors_that_deny,
)
from ratelimitd.cluster.pending import Bucket, decided, resolve_first
from ratelimitd.cluster.redis.codec import JOINED
from ratelimitd.cluster.store_servers import StoreServer
from ratelimitd.cluster.sync import Partition
from ratelimitd.errors import RateLimitdError
from ratelimitd.ledger.accounts import Refund
from ratelimitd.ledger.shared_state import OBSERVES, STORE_TIME, FirstResult, StoreCheck
from ratelimitd.model import CONCURRENCY, Limit, Outcome

if TYPE_CHECKING:
    from ratelimitd.cluster.redis.store import RedisStore


class StrictBuckets:
    """The shared buckets, decided by the store.

    ``stored_name`` maps a key to its name in the store. ``callers_time``: checks are decided at the caller's time
    instead of the store's.
    """

    def __init__(
        self,
        *,
        store: RedisStore,
        tags: Sequence[Partition],
        stored_name: Callable[[bytes], bytes],
        timers: asyncio.AbstractEventLoop,
        callers_time: bool,
        breaker_denies: bool = False,
    ) -> None:
        self._store = store
        self._tags = tags
        self._stored_name = stored_name
        self._timers = timers
        self._callers_time = callers_time
        self.errors_that_deny = errors_that_deny(breaker_denies=breaker_denies)
        self._new_future = asyncio.get_running_loop().create_future
        self.asked_total = 0
        """Checks that the shared state has been asked to decide."""
        self.late_total = 0
        """Always 0: only the store decides."""
        self.given_back_total = 0
        """Tokens that the store charged and that were refunded, because another limit denied the check."""
        self.kept_total = 0
        """Tokens of such checks that were not refunded."""

    def apply(self, *_args: object, **_options: object) -> None:
        """Return ``None``: the shared state decides every check."""

    peek = apply_each = peek_each = apply

    def wait(  # noqa: PLR0917 -- as SharedBuckets.wait
        self,
        key: bytes,
        rule: Limit,
        now_us: int,
        cost: int,
        remaining_s: float | None = None,  # noqa: ARG002 - nobody else decides
        *,
        peek: bool,
    ) -> Awaitable[Outcome | RateLimitdError]:
        """Ask the shared state to decide a check."""
        answer: asyncio.Future[Outcome | RateLimitdError] = self._new_future()
        name = self._stored_name(key)
        server = self._tags[name[0]].server
        if server.is_open:
            answer.set_result(server.open_error())
            return answer
        self.asked_total += 1
        at_us = self._time_of(rule, now_us)
        check = tuple.__new__(StoreCheck, (name, rule, at_us, cost, peek))
        self._store.decide(check, partial(_decided, answer, server))
        return answer

    def _time_of(self, rule: Limit, now_us: int) -> int:
        """Return the time of a check; for a calendar window it is the node's, which has selected the window."""
        return now_us if self._callers_time or rule.calendar is not None else STORE_TIME

    def wait_all(
        self,
        charges: Sequence[Charge],
        now_us: int,
        costs: Sequence[int],
        remaining_s: float | None = None,  # noqa: ARG002 - nobody else decides
        *,
        peek: bool,
        is_counted: bool = True,  # noqa: ARG002 - a node that knows no bucket has no misses
    ) -> Awaitable[Outcomes]:
        """Ask the shared state to decide a check on several buckets."""
        answer: asyncio.Future[Outcomes] = self._new_future()
        if self._store.decides_together:
            self._decide_together(charges, now_us, costs, answer, peek=peek)
            return answer
        JointCheck(self, self._timers, charges, now_us, costs, peek=peek).start(answer)
        return answer

    def _decide_together(
        self,
        charges: Sequence[Charge],
        now_us: int,
        costs: Sequence[int],
        answer: asyncio.Future[Outcomes],
        *,
        peek: bool,
    ) -> None:
        """Ask one server, which charges all buckets or none."""
        together = _Together(len(charges), answer)
        for place, ((key, rule, _), cost) in enumerate(zip(charges, costs, strict=True)):
            name = self._stored_name(key)
            server = self._tags[name[0]].server
            if server.is_open:
                together.decided(place, server.open_error())
                continue
            self.asked_total += 1
            flags = int(peek) | (JOINED if place + 1 < len(charges) else 0)
            if rule.enforcement is not ENFORCE:
                flags |= OBSERVES
            check = StoreCheck(name, rule, self._time_of(rule, now_us), cost, flags)
            self._store.decide(check, partial(together.answered, place, server))

    def judge_part(self, check: PartCheck) -> bool:
        """Return false: the store decides, unless its breaker is open."""
        server = self._tags[self._stored_name(check.key)[0]].server
        if not server.is_open:
            return False
        check.part.outcome = server.open_error()
        return True

    def ask_part(self, check: PartCheck) -> None:
        """Let the store decide."""
        self.asked_total += 1
        name = self._stored_name(check.key)
        at_us = self._time_of(check.rule, check.now_us)
        asked = StoreCheck(name, check.rule, at_us, check.cost, check.peek)
        server = self._tags[name[0]].server
        if check.rule.algorithm is CONCURRENCY:
            self._store.decide(asked, partial(decided, check, server))
        else:
            self._store.first_check(asked, partial(_part_decided, check, server))

    def was_spent(self, check: PartCheck) -> None:
        """Do nothing; never called, as no view reserves tokens."""

    was_released = was_spent

    def give_back(self, check: PartCheck, refund: Refund) -> bool:
        """Queue a refund for the next batch; returns false if too many wait, as while a slot is half moved."""
        name = self._stored_name(check.key)
        tag = self._tags[name[0]]
        bucket = tag.buckets.get(name)
        if bucket is None:
            bucket = tag.buckets[name] = Bucket(check.key, name, tag, check.rule, None)
        if not bucket.view.give_back(refund):
            return False
        tag.touch(bucket)
        tag.flush()
        return True

    async def refresh(self, keys: Sequence[bytes]) -> None:
        """Do nothing: a strict node knows no bucket."""

    async def reset(self, keys: Sequence[bytes], rules: Sequence[Limit]) -> None:
        """Reset buckets to full.

        Raises:
            StoreUnavailableError: the reset may not have been applied.
        """
        names = [*map(self._stored_name, keys)]
        # Strict nodes cache no buckets, so any generation is valid.
        await reset_buckets(self._store, names, rules, lambda _name, _shared: None, now_us=0)


class _Together:
    """The outcomes of a check that one server decides."""

    def __init__(self, count: int, answer: asyncio.Future[Outcomes]) -> None:
        self._outcomes: list[Outcome | Exception | None] = [None] * count
        self._answer = answer

    def answered(self, place: int, server: StoreServer, outcome: Outcome | RateLimitdError) -> None:
        """Handle the server's answer for one bucket."""
        server.report(outcome)
        self.decided(place, outcome)

    def decided(self, place: int, outcome: Outcome | Exception) -> None:
        """Record an outcome; the last one answers the check, unless the caller has left."""
        self._outcomes[place] = outcome
        outcomes = [one for one in self._outcomes if one is not None]
        if len(outcomes) == len(self._outcomes) and not self._answer.done():
            self._answer.set_result(outcomes)


def _part_decided(
    check: PartCheck, server: StoreServer, result: FirstResult | RateLimitdError
) -> None:
    server.report(result)
    if isinstance(result, RateLimitdError):
        check.resolve(result)
    else:
        resolve_first(check, *result)


def _decided(
    answer: asyncio.Future[Outcome | RateLimitdError],
    server: StoreServer,
    outcome: Outcome | RateLimitdError,
) -> None:
    server.report(outcome)
    if not answer.done():
        answer.set_result(outcome)
