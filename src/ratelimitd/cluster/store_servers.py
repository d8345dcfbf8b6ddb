"""The servers of the shared state: a circuit breaker for each, fed with the results of requests.

Sends only probes; callers report the results of their requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from ratelimitd.clock import Clock
from ratelimitd.counters import CheckStats
from ratelimitd.errors import (
    BreakerOpenError,
    RateLimitdError,
    StoreClusterDownError,
    StoreMovingError,
    StoreSlowError,
    StoreUnavailableError,
)
from ratelimitd.model import US_PER_S
from ratelimitd_wire.breaker import Breaker, State

if TYPE_CHECKING:
    from ratelimitd.cluster.redis.store import RedisStore
    from ratelimitd.cluster.sync import Partition

JITTER_US: Final = US_PER_S // 2
"""Longest random delay of a probe: nodes whose breakers opened together do not probe together."""

_log = logging.getLogger(__name__)


_NO_FAULT: Final = (StoreSlowError, StoreMovingError)
"""Errors of a server that answers late or moves a slot, and serves others."""


class StoreServer:
    """The breaker of one server.

    Attributes:
        name: its address; empty while it is unknown.
        tag: one of the hash tags that it holds, for probes.
        is_open: whether checks must be answered without it. A plain attribute, because every check reads it.
    """

    __slots__ = (
        "_breaker",
        "_clock",
        "_counted_now",
        "_failed_now",
        "_has_failed",
        "_refuses_batches",
        "_stats",
        "_timers",
        "is_open",
        "name",
        "tag",
    )

    def __init__(  # noqa: PLR0917 - its parts
        self,
        name: str,
        tag: int,
        breaker: Breaker,
        clock: Clock,
        stats: CheckStats,
        timers: asyncio.AbstractEventLoop,
    ) -> None:
        self.name = name
        self.tag = tag
        self.is_open = False
        self._breaker = breaker
        self._clock = clock
        self._stats = stats
        self._timers = timers
        self._counted_now = self._failed_now = False
        """An error was counted and reported to the breaker in this event-loop iteration."""
        self._has_failed = self._refuses_batches = False

    @property
    def state(self) -> State:
        """State of the breaker."""
        return self._breaker.state

    def open_error(self) -> BreakerOpenError:
        """Return the error for a check that needs the server while the breaker is open."""
        retry_at_us = self._breaker.retry_at_us or 0
        return BreakerOpenError(max(0, retry_at_us - self._clock.monotonic_us()))

    def begins_probe(self) -> bool:
        """Return whether to probe the server now; the caller must do so and report the result."""
        return self._breaker.begin_probe()

    def first_check_succeeded(self) -> None:
        """Report that a first check of a bucket succeeded; ignored while the server refuses batches."""
        if not self._refuses_batches:
            self.answered()

    def refused(self, error: RateLimitdError) -> None:
        """Report that a batch with waiting checks failed."""
        if isinstance(error, StoreUnavailableError) and not isinstance(error, _NO_FAULT):
            self._refuses_batches = True
        self.failed(error)

    def report(self, result: object) -> None:
        """Report the result of a round trip of checks, or of the probe: an error, or anything else for a success."""
        if isinstance(result, RateLimitdError):
            self.failed(result)
        else:
            self.answered()

    def answered(self) -> None:
        """Report that a round trip of checks, or the probe, succeeded."""
        self._refuses_batches = False
        # Calling the breaker takes 1.5 µs, so do it only after a failure.
        if self._has_failed:
            self._breaker.succeeded()
            # An open breaker stays open until the probe has a result.
            self._follow("closed")
            self._has_failed = self.is_open

    def failed(self, error: RateLimitdError) -> None:
        """Report that a round trip of checks, or the probe, failed.

        All requests of one event-loop iteration are one round trip, so only one of their errors counts. An error that
        says nothing about the server does not count. A late answer does not count for the breaker, but the loss of a
        connection that was silent for BREAKER_SILENCE_MS does. A migrating slot is no fault of the server, which still
        serves others. A server that waits for the failover of another is probed soon.
        """
        if not isinstance(error, StoreUnavailableError) or self._failed_now:
            return
        if not self._counted_now:
            self._counted_now = True
            self._timers.call_soon(self._end_iteration)
            self._stats.shared_state_errors_total += 1
        if isinstance(error, _NO_FAULT):
            return
        self._failed_now = True
        self._has_failed = True
        self._breaker.failed(soon=isinstance(error, StoreClusterDownError))
        self._follow(f"open: {error}")

    def left(self) -> None:
        """Report that the server no longer holds a hash tag and is dropped."""
        if self.is_open:
            self._warn("it no longer holds buckets; its open circuit breaker is removed")

    def synced(self) -> None:
        """Report that a batch without waiting checks succeeded."""
        self._refuses_batches = False

    def sync_failed(self, error: RateLimitdError) -> None:
        """Report that a round trip of the sync job failed: counted, but no reason to open the breaker."""
        if isinstance(error, StoreUnavailableError):
            self._stats.shared_state_errors_total += 1

    def _follow(self, what: str) -> None:
        """Copy the breaker's state, and log a change."""
        was_open, self.is_open = self.is_open, not self._breaker.allows()
        if self.is_open is not was_open:
            self._warn(f"the circuit breaker is {what}")

    def _warn(self, what: str) -> None:
        _log.warning(
            "%s: %s", f"shared state at {self.name}" if self.name else "shared state", what
        )

    def _end_iteration(self) -> None:
        self._counted_now = self._failed_now = False


class Breakers:
    """The servers by hash tag; a breaker opens after ``failures`` and is probed after ``recovery_s``.

    ``random`` returns a number from 0 to 1.
    """

    def __init__(
        self,
        store: RedisStore,
        clock: Clock,
        timers: asyncio.AbstractEventLoop,
        *,
        stats: CheckStats,
        failures: int,
        recovery_s: int,
        random: Callable[[], float],
    ) -> None:
        self._store = store
        self._clock = clock
        self._timers = timers
        self._stats = stats
        self._failures = failures
        self._recovery_us = recovery_s * US_PER_S
        self._random = random
        self._servers: dict[str, StoreServer] = {}

    def of_tag(self, tag: int) -> StoreServer:
        """Return the server that holds a hash tag now."""
        name = self._store.server_of(tag)
        server = self._servers.get(name)
        if server is None:
            breaker = Breaker(
                self._clock.monotonic_us,
                failure_threshold=self._failures,
                recovery_us=self._recovery_us,
                jitter_us=lambda: int(self._random() * JITTER_US),
            )
            server = StoreServer(name, tag, breaker, self._clock, self._stats, self._timers)
            self._servers[name] = server
        return server

    def watch(self, tags: Iterable[Partition]) -> None:
        """Follow hash tags that have moved, and probe servers whose breakers are due."""
        held = {}
        for tag in tags:
            server = tag.server = self.of_tag(tag.number)
            server.tag = tag.number
            held[server.name] = server
        for name, server in self._servers.items():
            if name not in held:
                server.left()
        self._servers = held
        for server in held.values():
            # Without a connection the probe would fail and delay the next one by the whole recovery time. Reconnecting,
            # at least once a second, detects a recovered server sooner.
            if self._store.is_connected(server.tag) and server.begins_probe():
                self._store.probe(server.tag, server.report)

    @property
    def state(self) -> State:
        """State of the worst breaker."""
        states = {server.state for server in self._servers.values()}
        for state in (State.OPEN, State.HALF_OPEN):
            if state in states:
                return state
        return State.CLOSED

    @property
    def retry_after_us(self) -> int:
        """Time until the last open breaker is probed; 0 while none is open."""
        open_ones = [server for server in self._servers.values() if server.is_open]
        return max((server.open_error().retry_after_us for server in open_ones), default=0)
