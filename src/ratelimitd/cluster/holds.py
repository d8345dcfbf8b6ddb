"""Holds on buckets that nodes share: always decided by the shared state, never by a node's view. See ADR 0055.

One script call makes a hold on all its buckets; in a Cluster, concurrent calls do, one per hash tag. Their answers are
combined in :mod:`ratelimitd.ledger.shared_holds`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ratelimitd.algorithms.several import ENFORCE
from ratelimitd.clock import Clock
from ratelimitd.cluster.store_servers import StoreServer
from ratelimitd.cluster.sync import Partition
from ratelimitd.errors import (
    HoldsFullError,
    RateLimitdError,
    StoreMisconfiguredError,
    StoreUnavailableError,
)
from ratelimitd.ledger.holds import MAX_HOLDS, MAX_HOLDS_PER_BUCKET, Held, Hold, OpenHolds, Settled
from ratelimitd.ledger.shared_holds import (
    ATTEMPT_BYTES,
    HoldCall,
    Step,
    StepCall,
    Stepped,
    StepReply,
    conclude,
    conclude_step,
    has_part,
    longest_of_parts_us,
)
from ratelimitd.ledger.shared_state import OBSERVES, STORE_TIME, StoreCheck
from ratelimitd.model import CONCURRENCY, Limit

if TYPE_CHECKING:
    from ratelimitd.cluster.redis.store import RedisStore

RETRIES: Final = 1
"""Retries of an unanswered call; calls are idempotent."""

WITHDRAW_TRIES: Final = 3
WITHDRAW_PAUSE_S: Final = 0.1

MAX_WITHDRAWALS: Final = 1_000
"""Limit of withdrawals in flight; beyond it, the charges of a hold that was not made stay."""


_Done: TypeAlias = Callable[[Any], None]
_Answers: TypeAlias = list[tuple[Sequence[int], Any]]


class SharedHolds:
    """Makes, settles and extends holds on shared buckets.

    ``tags`` are the partitions by hash tag; ``stored_name`` maps a key to its name in the store. ``store_time``:
    buckets are charged at the store's time instead of the hold's. ``changed`` is called with each bucket that a hold
    has changed, and whether other nodes should be notified.
    """

    def __init__(
        self,
        *,
        store: RedisStore,
        tags: Sequence[Partition],
        stored_name: Callable[[bytes], bytes],
        clock: Clock,
        timers: asyncio.AbstractEventLoop,
        store_time: bool,
        changed: Callable[[bytes, bool], None] | None,
        max_holds: int = MAX_HOLDS,
        max_per_bucket: int = MAX_HOLDS_PER_BUCKET,
    ) -> None:
        self._store = store
        self._tags = tags
        self._stored_name = stored_name
        self._timers = timers
        self._store_time = store_time
        self._changed = changed or (lambda _name, _is_low: None)  # a strict node has no views
        self._max_per_bucket = max_per_bucket
        self._now_us = clock.monotonic_us
        self._max_holds = max_holds
        self._open: OpenHolds[None] = OpenHolds()
        self._withdrawals = 0
        self._new_future = asyncio.get_running_loop().create_future

    async def hold(self, hold: Hold) -> Held:
        """Charge all buckets and keep the hold; see :class:`ratelimitd.ledger.holds.Holds`."""
        self._require_room(hold.number)
        names = [self._stored_name(key) for key, _, _ in hold.charges]
        parts = self._parts(hold.number, names)
        attempt = secrets.token_bytes(ATTEMPT_BYTES)
        checks = [
            StoreCheck(
                name,
                limit,
                self._time_of(limit, hold.now_us),
                hold.cost,
                0 if limit.enforcement is ENFORCE else OBSERVES,
            )
            for name, (_, limit, _) in zip(names, hold.charges, strict=True)
        ]
        limits = [limit for _, limit, _ in hold.charges]
        longest_us = longest_of_parts_us(limits, len(parts))
        calls = [
            HoldCall(
                hold.number,
                hold.check_digest,
                attempt,
                [checks[place] for place in places],
                hold.ttl_us,
                self._max_per_bucket,
                longest_us,
            )
            for places in parts
        ]
        asks = [
            partial(self._store.hold, self._tag(hold.number, call.names[0]), call) for call in calls
        ]
        answered = self._ask_all(parts, names, asks)
        withdraw = partial(self._withdraw_all, hold.number, attempt, names)
        try:
            # Charges must be tracked even if the caller leaves.
            answers = await asyncio.shield(answered)
        except asyncio.CancelledError:
            answered.add_done_callback(lambda made: withdraw(made.result()))
            raise
        try:
            held = conclude(names, limits, hold.cost, answers)
        except Exception:
            withdraw(answers)
            raise
        if not held.expire_us:
            withdraw(answers)
            return held
        withdraw([one for one in answers if isinstance(one[1], RateLimitdError)])
        self._open.add(hold.number, self._now_us() + hold.ttl_us, None)
        outcomes = dict(zip(held.names, held.outcomes, strict=True))
        for name, limit in zip(names, limits, strict=True):
            outcome = outcomes.get(name)
            if outcome is not None and outcome[0] and limit.algorithm is not CONCURRENCY:
                self._changed(name, 2 * outcome[1] < limit.capacity)
        return held

    async def settle(
        self, number: bytes, limits: Mapping[bytes, Limit | None], actual: int, now_us: int
    ) -> Settled:
        """Charge what a hold has cost; see :class:`ratelimitd.ledger.holds.Holds`."""
        at_us = STORE_TIME if self._store_time else now_us
        call = StepCall(Step.SETTLE, number, [*limits], actual, at_us, limits=limits)
        reply = await self._step(call, "actual")
        self._open.pop(number)
        for name in limits if reply.given_back or reply.owed else ():
            self._changed(name, reply.owed > 0)
        known = reply.stepped is not Stepped.UNKNOWN
        return Settled(known, reply.stepped is Stepped.DONE, reply.outcomes if known else ())

    async def extend(
        self, number: bytes, names: Sequence[bytes], ttl_us: int, now_us: int
    ) -> int | None:
        """Extend a hold; see :class:`ratelimitd.ledger.holds.Holds`."""
        reply = await self._step(StepCall(Step.EXTEND, number, names, ttl_us, now_us), "hold")
        if reply.stepped is Stepped.UNKNOWN:
            return None
        self._open.extend(number, self._now_us() + ttl_us)
        return reply.expire_us

    async def _step(self, call: StepCall, field: str) -> StepReply:
        for name in call.names:
            if (server := self._server_of(name)).is_open:
                raise server.open_error()
        parts = self._parts(call.number, call.names)
        calls = [call._replace(names=[call.names[place] for place in places]) for places in parts]
        asks = [
            partial(self._store.step_hold, self._tag(one.number, one.names[0]), one)
            for one in calls
        ]
        answers = await self._ask_all(parts, call.names, asks)
        return conclude_step(len(call.names), answers, field=field)

    def _require_room(self, number: bytes) -> None:
        """Check that another hold may be made; those open by this node's clock are an upper bound.

        Raises:
            HoldsFullError: the maximum is reached.
        """
        self._open.pop_ended(self._now_us())
        if len(self._open) >= self._max_holds and number not in self._open:
            message = f"the node has {self._max_holds} holds in flight, its maximum"
            raise HoldsFullError(message)

    def _time_of(self, limit: Limit, now_us: int) -> int:
        """Return the time of a charge; for a calendar window it is the hold's, by which the window was selected."""
        return STORE_TIME if self._store_time and limit.calendar is None else now_us

    def _tag(self, number: bytes, name: bytes) -> int:
        """Return the hash tag under which the record of a hold on a bucket is stored.

        With one server it depends on the number only: a settle may name fewer buckets than the hold, in any order.
        """
        return number[0] if self._store.decides_together else name[0]

    def _parts(self, number: bytes, names: Sequence[bytes]) -> Sequence[Sequence[int]]:
        """Return the indexes of the buckets in each call of a hold."""
        by_tag: dict[int, list[int]] = {}
        for place, name in enumerate(names):
            by_tag.setdefault(self._tag(number, name), []).append(place)
        return [*by_tag.values()]

    def _server_of(self, name: bytes) -> StoreServer:
        return self._tags[name[0]].server

    def _ask_all(
        self,
        parts: Sequence[Sequence[int]],
        names: Sequence[bytes],
        asks: Sequence[Callable[[_Done], None]],
    ) -> asyncio.Future[_Answers]:
        """Send all calls concurrently, with retries; returns their answers. An open breaker answers with its error."""
        all_there: asyncio.Future[_Answers] = self._new_future()
        answers: _Answers = []

        def answered(places: Sequence[int], reply: Any) -> None:
            answers.append((places, reply))
            if len(answers) == len(parts) and not all_there.done():
                all_there.set_result(answers)

        if not parts:
            all_there.set_result(answers)
        for places, ask in zip(parts, asks, strict=True):
            server = self._server_of(names[places[0]])
            if server.is_open:
                answered(places, server.open_error())
            else:
                self._ask(server, ask, partial(answered, places), RETRIES)
        return all_there

    def _ask(
        self, server: StoreServer, ask: Callable[[_Done], None], done: _Done, retries: int
    ) -> None:
        def answered(reply: Any) -> None:
            server.report(reply)
            if retries and _may_be_repeated(reply) and not server.is_open:
                self._ask(server, ask, done, retries - 1)
            else:
                done(reply)

        ask(answered)

    def _withdraw_all(
        self, number: bytes, attempt: bytes, names: Sequence[bytes], answers: _Answers
    ) -> None:
        """Refund the charges of an attempt that made no hold, on servers whose breakers are closed."""
        for places, reply in answers:
            of_part = [names[place] for place in places]
            is_reached = not self._server_of(of_part[0]).is_open
            if has_part(reply) and is_reached and self._withdrawals < MAX_WITHDRAWALS:
                call = StepCall(Step.WITHDRAW, number, of_part, attempt=attempt)
                self._withdrawals += 1
                self._withdraw(self._tag(number, of_part[0]), call, WITHDRAW_TRIES - 1)

    def _withdraw(self, tag: int, call: StepCall, tries: int) -> None:
        def answered(reply: StepReply | RateLimitdError) -> None:
            # Not reported to the breaker: no caller waits for it.
            is_lost = isinstance(reply, RateLimitdError)
            if is_lost and tries and not self._server_of(call.names[0]).is_open:
                pause_s = WITHDRAW_PAUSE_S * (WITHDRAW_TRIES - tries)
                self._timers.call_later(pause_s, self._withdraw, tag, call, tries - 1)
                return
            self._withdrawals -= 1
            for name in call.names if isinstance(reply, StepReply) and reply.given_back else ():
                self._changed(name, False)  # noqa: FBT003 -- the second of two

        self._store.step_hold(tag, call, answered)


def _may_be_repeated(reply: object) -> bool:
    return isinstance(reply, StoreUnavailableError) and not isinstance(
        reply, StoreMisconfiguredError
    )
