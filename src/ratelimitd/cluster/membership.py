"""Who is alive: each node gives a sign of life every second, and is counted until the last one is too old.

The same round trip tells the store's time, and whether all nodes name the buckets by the same secret.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol

from ratelimitd.clock import Clock
from ratelimitd.errors import (
    RateLimitdError,
    StartupError,
    StoreMisconfiguredError,
    StoreOverloadedError,
    StoreUnavailableError,
)
from ratelimitd.model import US_PER_S

# Where the nodes of a cluster tell how they are doing, and read of each other.
#
# Each puts its status under its own name; who is alive, and so which names there are, is known from the signs of life.
# What a node that hung or was killed said last stays for a minute, so that it is seen to be gone. Never looks into a
# status. See ADR 0029.

KEPT_S: Final = 60
"""How long the last status of a node outlives it."""

MAX_NODES: Final = 200
"""Nodes that are read of, so that a store full of names costs no more than this; those alive come first."""


class Statuses(Protocol):
    """Where statuses are kept."""

    def put(self, incarnation: str, status: bytes, ttl_ms: int) -> None:
        """Replace the status of an incarnation."""

    def remove(self, incarnation: str) -> None:
        """Forget an incarnation."""

    def get(
        self,
        incarnations: Sequence[str],
        done: Callable[[list[bytes | None] | RateLimitdError], None],
    ) -> None:
        """Read the statuses of incarnations, in their order; ``done`` is called exactly once."""


class Members(Protocol):
    """Who is alive."""

    @property
    def alive(self) -> Sequence[str]:
        """The incarnations that gave a sign of life in the last seconds."""


class StatusBoard:
    """The board as the node called ``incarnation`` uses it."""

    def __init__(
        self, statuses: Statuses, members: Members, incarnation: str, clock: Clock
    ) -> None:
        self._statuses = statuses
        self._members = members
        self._incarnation = incarnation
        self._clock = clock
        self._seen_us: dict[str, int] = {}

    def note_members(self) -> None:
        """Remember who is alive; call it every few seconds, so that who is not any more is still asked for."""
        now_us = self._clock.monotonic_us()
        # Those alive last, so that they are the last to be dropped.
        for name in self._members.alive:
            self._seen_us.pop(name, None)
            self._seen_us[name] = now_us
        oldest_us = now_us - KEPT_S * US_PER_S
        kept = [(name, at_us) for name, at_us in self._seen_us.items() if at_us > oldest_us]
        self._seen_us = dict(kept[-MAX_NODES:])

    def publish(self, status: bytes) -> None:
        """Tell how this node is doing."""
        self._statuses.put(self._incarnation, status, KEPT_S * 1_000)

    async def read(self) -> Mapping[str, bytes]:
        """What the other nodes told last, by incarnation.

        Raises:
            RateLimitdError: the store did not answer in time.
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

        self._statuses.get(names, take)
        found = await answer
        if isinstance(found, RateLimitdError):
            raise found
        return {name: one for name, one in zip(names, found, strict=True) if one is not None}

    def leave(self) -> None:
        """This node ends: the others need not wonder where it is."""
        self._statuses.remove(self._incarnation)


# The time of the shared state, as a wall clock for the node's own: all nodes follow one clock, not each its machine's.
#
# Each answer that tells the store's time tells it for a moment between question and answer; the quicker the answer, the
# better it is known. So of the last few the quickest counts.

SAMPLES: Final = 8
"""Answers that are remembered, one a second: a clock that drifts by 100 ppm is off by less than a millisecond then."""

_NS_PER_US: Final = 1_000


class _Sample(NamedTuple):
    round_trip_us: int
    ahead_us: int
    """How far the store's clock is ahead of the node's monotonic one."""


class SharedTime:
    """The store's time; the machine's own until the store has told its."""

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
        """Whether the store has told its time."""
        return bool(self._samples)

    @property
    def round_trip_us(self) -> int:
        """The slowest of the last few answers; 0 before there is one."""
        return max((sample.round_trip_us for sample in self._samples), default=0)

    def note(self, store_us: int, sent_us: int, received_us: int) -> None:
        """The store's time was asked for at ``sent_us`` and came at ``received_us``, both monotonic."""
        middle_us = (sent_us + received_us) // 2
        self._samples.append(_Sample(received_us - sent_us, store_us - middle_us))

    def wall_us(self) -> int:
        """Microseconds since the Unix epoch."""
        return self.wall_ns() // _NS_PER_US

    def wall_ns(self) -> int:
        """Nanoseconds since the Unix epoch."""
        if not self._samples:
            return self._machine_ns()
        return self._monotonic_ns() + min(self._samples).ahead_us * _NS_PER_US


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
