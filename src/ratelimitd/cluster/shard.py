"""One server of the shared state as a node sees it: whether checks may ask it, and what became of those that did.

Never talks to the server: whoever does tells it how that went.
"""

from __future__ import annotations

from ratelimitd.breaker import Breaker, State
from ratelimitd.clock import Clock
from ratelimitd.cluster.store import Timers
from ratelimitd.errors import BreakerOpenError, RateLimitdError, StoreUnavailableError
from ratelimitd.stats import CheckStats


class Shard:
    """The breaker of one server.

    Attributes:
        name: for people.
        tag: one of the hash tags that it holds, for probes.
        is_open: whether checks are to be answered without it. A plain attribute, for every check looks at it.
    """

    __slots__ = (
        "_breaker",
        "_clock",
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
        timers: Timers,
    ) -> None:
        self.name = name
        self.tag = tag
        self.is_open = False
        self._breaker = breaker
        self._clock = clock
        self._stats = stats
        self._timers = timers
        self._failed_now = self._has_failed = self._refuses_batches = False

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
            self._has_failed = False
            self._breaker.succeeded()
            self.is_open = not self._breaker.allows()

    def failed(self, error: RateLimitdError) -> None:
        """A round trip of checks, or the probe, did not.

        What was sent in one turn is one round trip and fails in one turn: only the first of its errors counts. One
        that says nothing about the server counts for nothing.
        """
        if not isinstance(error, StoreUnavailableError) or self._failed_now:
            return
        self._failed_now = self._has_failed = True
        self._timers.call_soon(self._turn_is_over)
        self._stats.shared_state_errors_total += 1
        self._breaker.failed()
        self.is_open = not self._breaker.allows()

    def synced(self) -> None:
        """A batch went well that no checks wait for."""
        self._refuses_batches = False

    def sync_failed(self, error: RateLimitdError) -> None:
        """A round trip of the sync job did not go well: it is counted, and opens nothing."""
        if isinstance(error, StoreUnavailableError):
            self._stats.shared_state_errors_total += 1

    def _turn_is_over(self) -> None:
        self._failed_now = False
