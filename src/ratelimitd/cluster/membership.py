"""The nodes that are alive, the time they share, and the status that each publishes.

Each node sends a heartbeat every second and is counted until its last one is too old. The answer brings the store's
time, and shows whether all nodes name the buckets by the same secret. See ADR 0029.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from ratelimitd.clock import Clock
from ratelimitd.errors import (
    RateLimitdError,
    StartupError,
    StoreMisconfiguredError,
    StoreOverloadedError,
    StoreUnavailableError,
)
from ratelimitd.model import US_PER_S

if TYPE_CHECKING:
    from ratelimitd.cluster.redis.store import Heartbeat, RedisStore

KEPT_S: Final = 60
"""How long the last status of a node is kept after its end, so that it is shown as gone."""

MAX_NODES: Final = 200
"""Limit of statuses that are read, against a store full of names; nodes alive come first."""


class StatusBoard:
    """Publishes the status of the node ``incarnation``, and reads those of the others; their bytes are opaque."""

    def __init__(
        self, store: RedisStore, members: Membership, incarnation: str, clock: Clock
    ) -> None:
        self._store = store
        self._members = members
        self._incarnation = incarnation
        self._clock = clock
        self._seen_us: dict[str, int] = {}

    def note_members(self) -> None:
        """Remember the nodes alive; called every few seconds, so that a node that is gone is still read."""
        now_us = self._clock.monotonic_us()
        # Nodes alive come last, so that they are dropped last.
        for name in self._members.alive:
            self._seen_us.pop(name, None)
            self._seen_us[name] = now_us
        oldest_us = now_us - KEPT_S * US_PER_S
        kept = [(name, at_us) for name, at_us in self._seen_us.items() if at_us > oldest_us]
        self._seen_us = dict(kept[-MAX_NODES:])

    def publish(self, status: bytes) -> None:
        """Publish the status of this node."""
        self._store.put_status(self._incarnation, status, KEPT_S * 1_000)

    async def read(self) -> Mapping[str, bytes]:
        """Return the last statuses of the other nodes, by incarnation.

        Raises:
            RateLimitdError: the store answered an error, or its connection was lost; a late answer is waited for.
        """
        self.note_members()
        names = [name for name in self._seen_us if name != self._incarnation]
        if not names:
            return {}
        answer: asyncio.Future[list[bytes | None] | RateLimitdError]
        answer = asyncio.get_running_loop().create_future()

        def take(reply: list[bytes | None] | RateLimitdError) -> None:
            if not answer.done():  # else the caller has left
                answer.set_result(reply)

        self._store.read_statuses(names, take)
        found = await answer
        if isinstance(found, RateLimitdError):
            raise found
        return {name: one for name, one in zip(names, found, strict=True) if one is not None}

    def leave(self) -> None:
        """Remove the status of this node."""
        self._store.remove_status(self._incarnation)


SAMPLES: Final = 8
"""Answers kept, one per second: a clock that drifts by 100 ppm is then off by less than 1 ms."""

_NS_PER_US: Final = 1_000

_log = logging.getLogger(__name__)


class _Sample(NamedTuple):
    round_trip_us: int
    ahead_us: int
    """How far the store's clock is ahead of the node's monotonic one."""


class SharedTime:
    """The store's time, which all nodes follow; the machine's own until the first answer.

    The store reads its clock between request and reply, so the recent answer with the shortest round trip is used.
    """

    def __init__(
        self,
        machine_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._machine_ns = machine_ns
        self._monotonic_ns = monotonic_ns
        self._samples: deque[_Sample] = deque(maxlen=SAMPLES)

    @property
    def is_known(self) -> bool:
        """Whether the store's time is known."""
        return bool(self._samples)

    @property
    def round_trip_us(self) -> int:
        """Longest round trip of the last few answers; 0 before the first."""
        return max((sample.round_trip_us for sample in self._samples), default=0)

    def add_sample(self, store_us: int, sent_us: int, received_us: int) -> None:
        """Take one answer: requested at ``sent_us``, received at ``received_us``, both monotonic."""
        middle_us = (sent_us + received_us) // 2
        self._samples.append(_Sample(received_us - sent_us, store_us - middle_us))

    def wall_us(self) -> int:
        """Return the microseconds since the Unix epoch."""
        return self.wall_ns() // _NS_PER_US

    def wall_ns(self) -> int:
        """Return the nanoseconds since the Unix epoch."""
        if not self._samples:
            return self._machine_ns()
        return self._monotonic_ns() + min(self._samples).ahead_us * _NS_PER_US


BEAT_S: Final = 1.0
BEAT_TTL_US: Final = 5 * US_PER_S

LEAVE_S: Final = 0.2
"""Longest wait of a leaving node for the acknowledgement; without one, it is counted for five more seconds."""


class Membership:
    """The nodes of a cluster, as seen by one of them.

    ``fingerprint`` returns that of the secret that keys the buckets' names, empty while unknown.
    """

    def __init__(
        self,
        store: RedisStore,
        incarnation: str,
        *,
        fingerprint: Callable[[], str],
        clock: Clock,
        shared_time: SharedTime,
    ) -> None:
        self.count = 1
        """Nodes alive, including this one."""
        self.alive: Sequence[str] = ()
        """Their incarnations, as of the last answer."""
        self._store = store
        self._incarnation = incarnation
        self._fingerprint = fingerprint
        self._clock = clock
        self._shared_time = shared_time
        self._has_other_secret = self._is_refused = False

    async def join(self, timeout_s: float) -> None:
        """Send the first heartbeat, and wait for the answer at most ``timeout_s``.

        Raises:
            StartupError: the other nodes use another secret, so they count the same callers in other buckets.
        """
        await self._beat_and_wait(BEAT_TTL_US, timeout_s)
        if self._has_other_secret:
            message = (
                "KEY_SECRET differs from that of the other nodes in this shared state, so each would count"
                " callers in its own buckets; give all nodes one KEY_SECRET, or one rule database, which stores it"
            )
            raise StartupError(message)

    def beat(self) -> None:
        """Send a heartbeat; the answer is processed when it comes."""
        self._beat(BEAT_TTL_US, lambda: None)

    async def leave(self) -> None:
        """Report that this node ends."""
        await self._beat_and_wait(0, LEAVE_S)

    async def _beat_and_wait(self, ttl_us: int, timeout_s: float) -> None:
        answered = asyncio.Event()
        self._beat(ttl_us, answered.set)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await answered.wait()

    def _beat(self, ttl_us: int, then: Callable[[], None]) -> None:
        sent_us = self._clock.monotonic_us()
        done = partial(self._beat_answered, sent_us, then)
        self._store.beat(self._incarnation, ttl_us, self._fingerprint(), done)

    def _beat_answered(
        self, sent_us: int, then: Callable[[], None], answer: Heartbeat | RateLimitdError
    ) -> None:
        if isinstance(answer, RateLimitdError):
            self._refused(answer)
        else:
            now_us, fingerprint, names = answer
            self._shared_time.add_sample(now_us, sent_us, self._clock.monotonic_us())
            self.alive, self.count = names, max(1, len(names))
            self._is_refused = False
            self._compare(fingerprint)
        then()

    def _refused(self, error: RateLimitdError) -> None:
        """Log once that the store refuses heartbeats; links log that it is unavailable."""
        is_away = isinstance(error, StoreUnavailableError | StoreOverloadedError)
        if isinstance(error, StoreMisconfiguredError) or not is_away:
            if not self._is_refused:
                _log.warning("the nodes of the cluster cannot be counted: %s", error)
            self._is_refused = True

    def _compare(self, fingerprint: str) -> None:
        own = self._fingerprint()
        had_other_secret, self._has_other_secret = (
            self._has_other_secret,
            bool(own) and fingerprint not in {own, ""},  # empty: the store has just lost its data
        )
        if self._has_other_secret and not had_other_secret:
            _log.warning(
                "KEY_SECRET differs from that of the other nodes in this shared state: limits are not shared with them"
            )
