"""One server of the shared state as a node sees it: whether checks may ask it, and what became of those that did.

Never talks to the server: callers report results.
"""

from __future__ import annotations

from collections.abc import Callable

from ratelimitd.clock import Clock
from ratelimitd.cluster.pending import Timers
from ratelimitd.counters import CheckStats
from ratelimitd.errors import (
    BreakerOpenError,
    RateLimitdError,
    StoreSlowError,
    StoreUnavailableError,
)
from ratelimitd_wire.breaker import Breaker, State


class StoreServer:
    """The breaker of one server. ``report`` takes one line for an operator when it opens, and one when it closes.

    Attributes:
        name: for people.
        tag: one of the hash tags that it holds, for probes.
        is_open: whether checks are to be answered without it. A plain attribute, for every check looks at it.
    """

    __slots__ = (
        "_breaker",
        "_clock",
        "_counted_now",
        "_failed_at_us",
        "_failed_now",
        "_has_failed",
        "_refuses_batches",
        "_report",
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
        timers: Timers,
        report: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self.name = name
        self.tag = tag
        self.is_open = False
        self._breaker = breaker
        self._clock = clock
        self._stats = stats
        self._timers = timers
        self._report = report
        self._failed_at_us: int | None = None
        self._counted_now = self._failed_now = False
        """In this turn: an error, and one that the breaker was told."""
        self._has_failed = self._refuses_batches = False

    @property
    def state(self) -> State:
        """Of the breaker."""
        return self._breaker.state

    def open_error(self) -> BreakerOpenError:
        """What a check meets while the breaker is open."""
        retry_at_us = self._breaker.retry_at_us or 0
        return BreakerOpenError(max(0, retry_at_us - self._clock.monotonic_us()))

    def begins_probe(self) -> bool:
        """Whether it is to be probed now; the one who asks has to, and to tell."""
        return self._breaker.begin_probe()

    def met(self) -> None:
        """A first check of a bucket went well. Of a server that does not take batches that says nothing good."""
        if not self._refuses_batches:
            self.answered()

    def refused(self, error: RateLimitdError) -> None:
        """A batch did not go well that checks wait for."""
        if isinstance(error, StoreUnavailableError):
            self._refuses_batches = True
        self.failed(error)

    def answered(self) -> None:
        """A round trip of checks, or the probe, went well."""
        self._refuses_batches = False
        # To tell a breaker that has nothing to forget costs a check that waits 1.5 µs.
        if self._has_failed:
            self._breaker.succeeded()
            # While it is open this changes nothing, and the probe has still to be told.
            self._follow("closed")
            self._has_failed = self.is_open

    def failed(self, error: RateLimitdError) -> None:
        """A round trip of checks, or the probe, did not.

        What was sent in one turn is one round trip and fails in one turn: only one of its errors counts. One that says
        nothing about the server counts for nothing; nor does one, for the breaker, that was under way when another
        failed: both have met one pause of the server, however many waited through it.
        """
        if not isinstance(error, StoreUnavailableError) or self._failed_now:
            return
        if not self._counted_now:
            self._counted_now = True
            self._timers.call_soon(self._turn_is_over)
            self._stats.shared_state_errors_total += 1
        now_us = self._clock.monotonic_us()
        if isinstance(error, StoreSlowError) and self._was_under_way(now_us - error.waited_us):
            return
        self._failed_now = True
        self._failed_at_us = now_us
        self._has_failed = True
        self._breaker.failed()
        self._follow(f"open: {error}")

    def left(self) -> None:
        """It holds nothing any more, and is forgotten."""
        if self.is_open:
            self._tell("nothing is asked there any more, and its open circuit breaker is gone")

    def synced(self) -> None:
        """A batch went well that no checks wait for."""
        self._refuses_batches = False

    def sync_failed(self, error: RateLimitdError) -> None:
        """A round trip of the sync job did not go well: it is counted, and opens nothing."""
        if isinstance(error, StoreUnavailableError):
            self._stats.shared_state_errors_total += 1

    def _was_under_way(self, sent_us: int) -> bool:
        """Whether what was sent then was on its way when another failed."""
        return self._failed_at_us is not None and sent_us < self._failed_at_us

    def _follow(self, what: str) -> None:
        """Go by the breaker, and tell what it is now if it was not."""
        was_open, self.is_open = self.is_open, not self._breaker.allows()
        if self.is_open is not was_open:
            self._tell(f"the circuit breaker is {what}")

    def _tell(self, what: str) -> None:
        # A server that has not been found yet has no name.
        where = f"shared state at {self.name}" if self.name else "shared state"
        self._report(f"{where}: {what}")

    def _turn_is_over(self) -> None:
        self._counted_now = self._failed_now = False
