"""The circuit breaker: whether a peer may be asked, and when to try again after it failed.

Starts no task and reads no clock of its own: the caller reports results, and asks :meth:`Breaker.begin_probe` from time
to time. Threads may share it. See ADR 0012.

The transitions, as data in ``TRANSITIONS``:

    state      input     next       effect
    closed     success   closed     forget
    closed     failure   closed     count
    closed     tripped   open       wait
    open       success   open       none
    open       failure   open       none
    open       due       half_open  lend
    half_open  success   closed     forget
    half_open  failure   open       wait
    half_open  due       half_open  lend

*tripped* is the failure that reaches the threshold. *due* is a request to probe at ``retry_at_us`` or later: the
recovery time is over, or the lease of a probe that never reported (I16). Reports while the breaker is open are of calls
that began before, and change nothing.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

US_PER_S: Final = 1_000_000

FAILURE_THRESHOLD: Final = 5
"""Consecutive failed round trips that open the breaker: the specification's number."""

RECOVERY_US: Final = 30 * US_PER_S
"""Default pause of an open breaker before a probe: the specification's number."""

LEASE_US: Final = US_PER_S
"""How long a probe may stay silent before another replaces it. Timeouts are milliseconds."""


class State(enum.StrEnum):
    """The peer is asked only while the breaker is ``closed``."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Input(enum.StrEnum):
    """Input of the table above."""

    SUCCESS = "success"
    FAILURE = "failure"
    TRIPPED = "tripped"
    DUE = "due"


class Effect(enum.StrEnum):
    """Effect of a transition on the count of failures or on the time of the next probe."""

    NONE = "none"
    COUNT = "count"
    FORGET = "forget"
    WAIT = "wait"
    LEND = "lend"


TRANSITIONS: Final[Mapping[tuple[State, Input], tuple[State, Effect]]] = MappingProxyType(
    {
        (State.CLOSED, Input.SUCCESS): (State.CLOSED, Effect.FORGET),
        (State.CLOSED, Input.FAILURE): (State.CLOSED, Effect.COUNT),
        (State.CLOSED, Input.TRIPPED): (State.OPEN, Effect.WAIT),
        (State.OPEN, Input.SUCCESS): (State.OPEN, Effect.NONE),
        (State.OPEN, Input.FAILURE): (State.OPEN, Effect.NONE),
        (State.OPEN, Input.DUE): (State.HALF_OPEN, Effect.LEND),
        (State.HALF_OPEN, Input.SUCCESS): (State.CLOSED, Effect.FORGET),
        (State.HALF_OPEN, Input.FAILURE): (State.OPEN, Effect.WAIT),
        (State.HALF_OPEN, Input.DUE): (State.HALF_OPEN, Effect.LEND),
    }
)
"""(state, input) → (next state, effect). A pair that is not here cannot happen."""


class Breaker:
    """The breaker of one peer.

    ``now_us`` reads a monotonic clock; all times are in µs. ``failure_threshold`` is in consecutive failed round trips,
    however many checks each carried. ``jitter_us`` is drawn each time the breaker opens and added to ``recovery_us``,
    so that callers that failed together do not probe together.
    """

    __slots__ = (
        "_failures",
        "_jitter_us",
        "_lock",
        "_now_us",
        "_threshold",
        "_waits_us",
        "retry_at_us",
        "state",
    )

    def __init__(
        self,
        now_us: Callable[[], int],
        *,
        failure_threshold: int = FAILURE_THRESHOLD,
        recovery_us: int = RECOVERY_US,
        lease_us: int = LEASE_US,
        jitter_us: Callable[[], int] = lambda: 0,
    ) -> None:
        self._now_us = now_us
        self._threshold = failure_threshold
        self._waits_us = {Effect.WAIT: recovery_us, Effect.LEND: lease_us}
        self._jitter_us = jitter_us
        self._lock = threading.Lock()
        self._failures = 0
        self.state = State.CLOSED
        self.retry_at_us: int | None = None
        """When a probe is due, on the monotonic clock; ``None`` while closed."""

    def allows(self) -> bool:
        """Return whether the peer may be asked now."""
        return self.state is State.CLOSED

    def begin_probe(self) -> bool:
        """Return whether the caller is to probe now. It must report, or is replaced when its lease is over."""
        with self._lock:
            if self.retry_at_us is None or self._now_us() < self.retry_at_us:
                return False
            self._take(Input.DUE)
            return True

    def succeeded(self) -> None:
        """Report a round trip, or the probe, that was answered."""
        if self.state is State.CLOSED and not self._failures:
            return  # the usual case, without the lock
        with self._lock:
            self._take(Input.SUCCESS)

    def failed(self) -> None:
        """Report a round trip, or the probe, without a usable answer: one call for each, whatever it carried."""
        with self._lock:
            trips = self.state is State.CLOSED and self._failures + 1 >= self._threshold
            self._take(Input.TRIPPED if trips else Input.FAILURE)

    def _take(self, event: Input) -> None:
        self.state, effect = TRANSITIONS[self.state, event]
        if effect is Effect.COUNT:
            self._failures += 1
        elif effect is Effect.FORGET:
            self._failures, self.retry_at_us = 0, None
        elif effect is not Effect.NONE:
            jitter_us = self._jitter_us() if effect is Effect.WAIT else 0
            self.retry_at_us = self._now_us() + self._waits_us[effect] + jitter_us
