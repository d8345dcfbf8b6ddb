"""Who is alive: each node gives a sign of life every second, and is counted until the last one is too old.

The same round trip tells the store's time, and whether all nodes name the buckets by the same secret.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

from ratelimitd.clock import Clock
from ratelimitd.cluster.shared_time import SharedTime
from ratelimitd.errors import (
    RateLimitdError,
    StartupError,
    StoreMisconfiguredError,
    StoreOverloadedError,
    StoreUnavailableError,
)
from ratelimitd.model import US_PER_S

BEAT_S: Final = 1.0
BEAT_TTL_US: Final = 5 * US_PER_S

LEAVE_S: Final = 0.2
"""How long a node that leaves waits to be heard; who is not heard is counted for five seconds more."""

Beat = tuple[int, str, tuple[str, ...]]
"""The store's time in µs, the fingerprint that holds in the cluster, and the names of the incarnations alive."""


class Pulse(Protocol):
    """Where nodes give their signs of life."""

    def beat(
        self,
        incarnation: str,
        ttl_us: int,
        fingerprint: str,
        done: Callable[[Beat | RateLimitdError], None],
    ) -> None:
        """Give one that is good for ``ttl_us``; 0: the node leaves."""


class Membership:
    """The nodes of a cluster, as one of them sees it.

    ``fingerprint`` tells the secret that the buckets' names are keyed with from others; empty while that is not known.
    ``report`` takes one line for an operator.
    """

    def __init__(
        self,
        pulse: Pulse,
        incarnation: str,
        *,
        fingerprint: Callable[[], str],
        clock: Clock,
        shared_time: SharedTime,
        report: Callable[[str], None],
    ) -> None:
        self.count = 1
        """Nodes alive, with this one."""
        self.alive: Sequence[str] = ()
        """The names of their incarnations, as the store told them last."""
        self._pulse = pulse
        self._incarnation = incarnation
        self._fingerprint = fingerprint
        self._clock = clock
        self._shared_time = shared_time
        self._report = report
        self._is_stranger = self._is_refused = False

    async def join(self, timeout_s: float) -> None:
        """Give the first sign of life, and wait for the answer at most so long.

        Raises:
            StartupError: the other nodes use another secret: they would count the same callers in other buckets.
        """
        answered = asyncio.Event()
        self._beat(BEAT_TTL_US, answered.set)
        try:
            async with asyncio.timeout(timeout_s):
                await answered.wait()
        except TimeoutError:
            return
        if self._is_stranger:
            message = (
                "KEY_SECRET is not that of the other nodes in this shared state, so that each would count callers in"
                " buckets of its own; give all nodes one KEY_SECRET, or one rules database that keeps it"
            )
            raise StartupError(message)

    def beat(self) -> None:
        """Give a sign of life; the answer is taken in when it comes."""
        self._beat(BEAT_TTL_US, lambda: None)

    async def leave(self) -> None:
        """Tell that this node is no more."""
        answered = asyncio.Event()
        self._beat(0, answered.set)
        try:
            async with asyncio.timeout(LEAVE_S):
                await answered.wait()
        except TimeoutError:
            return

    def _beat(self, ttl_us: int, then: Callable[[], None]) -> None:
        sent_us = self._clock.monotonic_us()
        done = partial(self._heard, sent_us, then)
        self._pulse.beat(self._incarnation, ttl_us, self._fingerprint(), done)

    def _heard(
        self, sent_us: int, then: Callable[[], None], answer: Beat | RateLimitdError
    ) -> None:
        if isinstance(answer, RateLimitdError):
            self._refused(answer)
        else:
            now_us, fingerprint, names = answer
            self._shared_time.note(now_us, sent_us, self._clock.monotonic_us())
            self.alive, self.count = names, max(1, len(names))
            self._is_refused = False
            self._compare(fingerprint)
        then()

    def _refused(self, error: RateLimitdError) -> None:
        """Tell once when the store answers and will not have it; that it is away is for the connections to tell."""
        is_away = isinstance(error, StoreUnavailableError | StoreOverloadedError)
        if isinstance(error, StoreMisconfiguredError) or not is_away:
            if not self._is_refused:
                self._report(f"the nodes of the cluster cannot be counted: {error}")
            self._is_refused = True

    def _compare(self, fingerprint: str) -> None:
        own = self._fingerprint()
        was_stranger, self._is_stranger = self._is_stranger, bool(own) and fingerprint != own
        if self._is_stranger and not was_stranger:
            self._report(
                "KEY_SECRET is not that of the other nodes in this shared state: limits are not shared with them"
            )
