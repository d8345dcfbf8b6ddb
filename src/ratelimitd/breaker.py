"""The circuit breaker of one shared store: whether checks may ask it, and when to try again after it failed.

Starts no task, takes no lock and reads no clock of its own: whoever talks to the store reports how that went, and a
background job asks :meth:`Breaker.begin_probe` now and then. See ADR 0012.

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

*tripped* is the failure that makes the count reach the threshold. *due* is somebody who would probe at ``retry_at_us``
or later: when the recovery time is over, or when the lease of a probe is that never reported (I16). While the breaker
is open nothing is reported but what was under way before; it says nothing about the store's state now.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from ratelimitd.clock import Clock
from ratelimitd.model import US_PER_S

FAILURE_THRESHOLD: Final = 5
"""Consecutive failed round trips that open the breaker: the specification's number."""

RECOVERY_US: Final = 30 * US_PER_S
"""How long an open breaker waits before the store is tried again: the specification's number."""

LEASE_US: Final = US_PER_S
"""How long a probe may stay silent. Socket timeouts are milliseconds: after a second nobody is waiting any more."""


class State(enum.StrEnum):
    """Checks may ask the store only while it is ``closed``."""

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


class Breaker:
    """The breaker of one store, or of one shard of it.

    ``failure_threshold`` is in consecutive failed round trips, however many checks each carried; times are in µs.
    ``jitter_us`` is drawn each time the breaker opens and added to ``recovery_us``, so that the nodes of a cluster do
    not all come back in the same instant.
    """

    __slots__ = (
        "_clock",
        "_failures",
        "_jitter_us",
        "_threshold",
        "_waits_us",
        "retry_at_us",
        "state",
    )

    def __init__(
        self,
        clock: Clock,
        *,
        failure_threshold: int = FAILURE_THRESHOLD,
        recovery_us: int = RECOVERY_US,
        lease_us: int = LEASE_US,
        jitter_us: Callable[[], int] = lambda: 0,
    ) -> None:
        self._clock = clock
        self._threshold = failure_threshold
        self._waits_us = {Effect.WAIT: recovery_us, Effect.LEND: lease_us}
        self._jitter_us = jitter_us
        self._failures = 0
        self.state = State.CLOSED
        self.retry_at_us: int | None = None
        """When a probe is due, on the monotonic clock; ``None`` while closed."""

    def allows(self) -> bool:
        """Whether a check may ask the store now. Changes nothing, however often it is asked."""
        return self.state is State.CLOSED

    def begin_probe(self) -> bool:
        """Whether the caller is to probe the store now; then it must report, or is replaced when its lease is over."""
        if self.retry_at_us is None or self._clock.monotonic_us() < self.retry_at_us:
            return False
        self._take(Input.DUE)
        return True

    def succeeded(self) -> None:
        """A round trip of checks, or the probe, was answered."""
        self._take(Input.SUCCESS)

    def failed(self) -> None:
        """A round trip of checks, or the probe, was not answered: one call for each, whatever it carried."""
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
            self.retry_at_us = self._clock.monotonic_us() + self._waits_us[effect] + jitter_us
