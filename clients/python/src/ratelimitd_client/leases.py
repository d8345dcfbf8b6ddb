"""Leases: tokens of a hot bucket that a client holds for a moment, to decide checks without a call.

A lease is a hold, so its tokens are charged before they are used, and nodes admit no more than without. What was not
used is given back when it ends. Only checks of one identity, without a time of their own and without a peek, are
decided by a lease; those that find none are sent as ever, and tell what a bucket has left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeAlias

from ratelimitd_client.async_hold import AsyncHold
from ratelimitd_client.check import MS_PER_S
from ratelimitd_client.decision import Decision

MAX_LEASE_MS: Final = 1_000
"""Longest time of a lease, from when it was asked for."""

HOT: Final = 10
"""Checks of a bucket within the time of a lease from which on it is leased."""

SPARE: Final = 1.5
"""A lease is for so many times the tokens that were asked for in the time of the last."""

PART: Final = 16
"""A lease takes at most this part of what a bucket has left, so that a few clients do not starve each other."""

RENEW: Final = 0.25
"""A lease is renewed when so much of it is left."""

MAX_BUCKETS: Final = 4_096
"""Buckets whose checks are counted. Beyond it counting begins anew."""

TTL_S: Final = 2
"""When a lease ends that its client has left behind: the least that outlives :data:`MAX_LEASE_MS` and a late timer."""

_new: Final = tuple.__new__

Bucket: TypeAlias = tuple[str, str, str]
"""Identifier, identifier type, endpoint."""

Acquire: TypeAlias = Callable[[Bucket, int], Awaitable[AsyncHold]]
"""Holds tokens of a bucket."""


class _Lease:
    """Tokens that are held: ``left`` of ``size``, until ``ends_s`` of the monotonic clock."""

    __slots__ = ("beneath", "ends_s", "hold", "is_renewed", "left", "low", "rest", "size")

    def __init__(self, hold: AsyncHold, size: int, ends_s: float) -> None:
        self.hold = hold
        self.ends_s = ends_s
        _, self.beneath, reset_time, _, *rest = hold.decision
        """Tokens that the bucket has left beside the lease."""
        self.rest = (reset_time, 0, *rest)
        self.size = self.left = size
        self.low = int(size * RENEW)
        self.is_renewed = False


class Leases:
    """The leases of one client on one event loop.

    Args:
        acquire: holds tokens; its hold is not allowed, or holds nothing, where there is no lease.
        lease_s: how long a lease is used.
        loop: its timers end leases.
        now_s: the monotonic clock. Some loops have one that stands still while they run tasks.
    """

    def __init__(
        self,
        acquire: Acquire,
        *,
        lease_s: float,
        loop: asyncio.AbstractEventLoop,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._acquire = acquire
        self._lease_s = lease_s
        self._loop = loop
        self._now_s = now_s
        self._leases: dict[Bucket, _Lease] = {}
        self._asked: dict[Bucket, int] = {}
        """Tokens asked for without a lease since the last timer; -1 of a bucket that is not leased until then."""
        self._is_counting = False
        self._is_closed = False
        self._tasks: set[asyncio.Task[object]] = set()

    def take(self, bucket: Bucket, cost: int) -> Decision | None:
        """Decide a check; ``None`` if it is to be sent."""
        # What is no bucket or no cost is refused where it is sent.
        try:
            lease = self._leases.get(bucket)
        except TypeError:  # a part has no hash
            return None
        if lease is None or cost.__class__ is not int:
            return None
        left = lease.left - cost
        # A process that was suspended, or whose loop was blocked, may decide checks that waited before its timers run.
        if left < 0 or cost < 1 or self._now_s() >= lease.ends_s:
            return None
        lease.left = left
        if left < lease.low and not lease.is_renewed:
            lease.is_renewed = True
            self._start(self._renew(bucket, lease))
        # Of the answer only what is left changes. Two tuples are joined in half the time that unpacking one takes.
        return _new(Decision, (True, lease.beneath + left) + lease.rest)  # noqa: RUF005

    def record(self, bucket: Bucket, cost: int, decision: Decision) -> None:
        """Count a check that was sent, and lease its bucket if it is hot and has enough left."""
        asked = self._asked
        count = asked.get(bucket, 0)
        if count < 0 or bucket in self._leases:
            return
        if len(asked) >= MAX_BUCKETS:
            asked.clear()
        asked[bucket] = count = count + cost
        self._count()
        if count >= HOT * cost and decision.limit:
            size = _size(count, decision.remaining_tokens)
            asked[bucket] = -1
            if size >= HOT * cost:
                self._start(self._begin(bucket, size))

    async def close(self) -> None:
        """Give back what is left of all leases, and take no more."""
        self._is_closed = True
        for bucket in list(self._leases):
            self._end(bucket, self._leases[bucket])
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _count(self) -> None:
        """Start the timer that forgets what was counted, unless it runs."""
        if not self._is_counting:
            self._is_counting = True
            self._loop.call_later(self._lease_s, self._count_anew)

    def _count_anew(self) -> None:
        self._is_counting = False
        self._asked.clear()

    def _start(self, work: Coroutine[Any, Any, object]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _begin(self, bucket: Bucket, size: int) -> None:
        last_s = self._now_s() + MAX_LEASE_MS / MS_PER_S
        hold = await self._acquire(bucket, size)
        now_s = self._now_s()
        left_s = min(self._lease_s, last_s - now_s)
        # A suspended process may find the answer before its deadline.
        if self._is_closed or left_s <= 0:
            await hold.settle(0)
            return
        if not hold.is_held:
            self._asked[bucket] = -1
            self._count()  # a renewal may be refused while no check is counted
            return
        former = self._leases.get(bucket)
        lease = self._leases[bucket] = _Lease(hold, size, now_s + left_s)
        self._asked.pop(bucket, None)
        self._loop.call_later(left_s, self._end, bucket, lease)
        if former is not None:
            await former.hold.settle(former.size - former.left)

    async def _renew(self, bucket: Bucket, lease: _Lease) -> None:
        """Follow a lease that is used up early by a larger one."""
        size = _size(lease.size, lease.beneath)
        if size >= HOT:
            await self._begin(bucket, size)

    def _end(self, bucket: Bucket, lease: _Lease) -> None:
        if self._leases.get(bucket) is not lease:
            return  # it was followed by another, and settled then
        del self._leases[bucket]
        used = lease.size - lease.left
        size = _size(used, lease.beneath)
        is_hot = used >= HOT and not (lease.is_renewed or self._is_closed)
        if is_hot and size >= HOT:
            self._start(self._begin(bucket, size))
        self._start(lease.hold.settle(used))


def _size(asked: int, left: int) -> int:
    """Return the tokens to lease of a bucket that has ``left``, after ``asked`` in the time of the last lease."""
    return min(int(asked * SPARE), left // PART)
