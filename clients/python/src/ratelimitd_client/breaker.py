"""The circuit breaker of a client: whether checks may be sent, and when to try again after they were not answered.

Starts no task and reads no clock of its own; whoever sends checks reports how that went. Threads may share it.

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

*tripped* is the failure that makes the count reach the threshold; *due* is a check at ``retry_at_s`` or later. While
the breaker is open nothing is reported but what was under way before; it says nothing about the service now.
"""

from __future__ import annotations

import enum
import random
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from ratelimitd_client.clock import Clock

FAILURE_THRESHOLD: Final = 5
"""Consecutive calls without a usable answer that open the breaker."""

RECOVERY_S: Final = 0.25
"""How long an open breaker waits before the next probe, without the jitter. A probe is one call whose caller does not
wait for it, so that it may come often: a service that returns is used again within a second."""

JITTER_S: Final = 0.125
"""At most so much is added, by chance: many callers must not come back in one instant."""

LEASE_S: Final = 1.0
"""How long a probe may stay silent before another takes its place. Deadlines are milliseconds."""


class State(enum.StrEnum):
    """Checks are sent while it is ``closed``; else a probe now and then."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Input(enum.StrEnum):
    """What a breaker is told; see the table above."""

    SUCCESS = "success"
    FAILURE = "failure"
    TRIPPED = "tripped"
    DUE = "due"


class Effect(enum.StrEnum):
    """What goes with a transition: to the count of failures, or to the time of the next probe."""

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


def jitter_s() -> float:
    """A pause by chance."""
    return random.uniform(0, JITTER_S)  # noqa: S311 - no secret


class Breaker:
    """The breaker of one client. ``jitter_s`` is drawn each time it opens."""

    __slots__ = ("_clock", "_failures", "_jitter_s", "_lock", "retry_at_s", "state")

    def __init__(self, clock: Clock, *, jitter_s: Callable[[], float] = jitter_s) -> None:
        self._clock = clock
        self._jitter_s = jitter_s
        self._lock = threading.Lock()
        self._failures = 0
        self.state: State = State.CLOSED
        self.retry_at_s: float | None = None
        """When a probe is due, on the monotonic clock; ``None`` while closed."""

    def allows(self) -> bool:
        """Whether a check may be sent now, and waited for."""
        return self.state is State.CLOSED

    def begin_probe(self) -> bool:
        """Whether the caller is to send a probe now; then it must report, or is replaced when its lease is over."""
        with self._lock:
            if self.retry_at_s is None or self._clock.monotonic_s() < self.retry_at_s:
                return False
            self._take(Input.DUE)
            return True

    def succeeded(self) -> None:
        """A call was answered."""
        if self.state is State.CLOSED and not self._failures:
            return  # the plain case, without the lock
        with self._lock:
            self._take(Input.SUCCESS)

    def failed(self) -> None:
        """A call was not answered, or with nothing usable: once for each call, whatever it carried."""
        with self._lock:
            trips = self.state is State.CLOSED and self._failures + 1 >= FAILURE_THRESHOLD
            self._take(Input.TRIPPED if trips else Input.FAILURE)

    def _take(self, event: Input) -> None:
        self.state, effect = TRANSITIONS[self.state, event]
        if effect is Effect.COUNT:
            self._failures += 1
        elif effect is Effect.FORGET:
            self._failures, self.retry_at_s = 0, None
        elif effect is Effect.LEND:
            self.retry_at_s = self._clock.monotonic_s() + LEASE_S
        elif effect is Effect.WAIT:
            self.retry_at_s = self._clock.monotonic_s() + RECOVERY_S + self._jitter_s()
