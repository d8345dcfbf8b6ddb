"""The circuit breaker: decides whether to call a peer, and when to probe it after failures. See ADR 0012.

    closed      calls are allowed; opens after ``failure_threshold`` consecutive failures
    open        calls are refused; a probe is due after the recovery time; results of earlier calls are ignored
    half_open   one probe is in flight: its success closes the breaker; its failure opens it again, for one second, two,
                four and so on up to the recovery time; without a result its lease expires (I16)

A failure of a peer that is expected back within seconds opens the breaker for one second each time.

Starts no task: the caller reports results, and calls :meth:`Breaker.begin_probe` periodically. Thread-safe.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from typing import Final

US_PER_S: Final = 1_000_000

FAILURE_THRESHOLD: Final = 5
"""Consecutive failed round trips that open the breaker: the specification's number."""

RECOVERY_US: Final = 30 * US_PER_S
"""Default pause of an open breaker before a probe: the specification's number."""

PROBE_AGAIN_US: Final = US_PER_S
"""Pause after a failed probe, doubled after each further one up to the recovery time: peers often recover soon. Each
pause, also the first, for a peer that is expected back within seconds.
"""

LEASE_US: Final = US_PER_S
"""Lease of a probe, after which another replaces it. Timeouts of calls are milliseconds."""

_MOST_DOUBLED: Final = 32


class State(enum.StrEnum):
    """Calls are allowed only while the breaker is ``closed``."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """The breaker of one peer.

    ``now_us`` reads a monotonic clock; all times are in µs. ``failure_threshold`` counts consecutive failed round trips
    with any number of checks. ``jitter_us`` is drawn each time the breaker opens and added to the pause, so that
    callers that failed together do not probe together.
    """

    __slots__ = (
        "_failures",
        "_jitter_us",
        "_lock",
        "_now_us",
        "_probes",
        "_recovery_us",
        "_threshold",
        "retry_at_us",
        "state",
    )

    def __init__(
        self,
        now_us: Callable[[], int],
        *,
        failure_threshold: int = FAILURE_THRESHOLD,
        recovery_us: int = RECOVERY_US,
        jitter_us: Callable[[], int] = lambda: 0,
    ) -> None:
        self._now_us = now_us
        self._threshold = failure_threshold
        self._recovery_us = recovery_us
        self._jitter_us = jitter_us
        self._lock = threading.Lock()
        self._failures = self._probes = 0
        self.state = State.CLOSED
        self.retry_at_us: int | None = None
        """When a probe is due, on the monotonic clock; ``None`` while closed."""

    def allows(self) -> bool:
        """Return whether the peer may be called now."""
        return self.state is State.CLOSED

    def begin_probe(self) -> bool:
        """Return whether the caller must probe now; it must report the result within the lease."""
        with self._lock:
            if self.retry_at_us is None or self._now_us() < self.retry_at_us:
                return False
            self.state = State.HALF_OPEN
            self.retry_at_us = self._now_us() + LEASE_US
            return True

    def succeeded(self) -> None:
        """Report an answered round trip or probe."""
        if self.state is State.CLOSED and not self._failures:
            return  # the usual case, without the lock
        with self._lock:
            if self.state is not State.OPEN:
                self.state = State.CLOSED
                self._failures, self.retry_at_us = 0, None

    def failed(self, *, soon: bool = False) -> None:
        """Report a round trip or probe without a usable answer, once per round trip.

        ``soon``: the peer is expected back within seconds.
        """
        with self._lock:
            if self.state is State.OPEN:
                return
            self._failures += 1
            if self.state is State.CLOSED and self._failures < self._threshold:
                return
            if soon:
                pause_us = PROBE_AGAIN_US
                self._probes = 0
            elif self.state is State.HALF_OPEN:
                pause_us = PROBE_AGAIN_US << self._probes
                self._probes = min(self._probes + 1, _MOST_DOUBLED)
            else:
                pause_us = self._recovery_us
                self._probes = 0
            pause_us = min(pause_us, self._recovery_us)
            # If the clock or the jitter raises, the state must not change: it would be open without a probe.
            self.retry_at_us = self._now_us() + pause_us + self._jitter_us()
            self.state = State.OPEN
