"""Maps time and the state of a connection to an action: ping, shut down or end slow, silent, stalled or old peers.

Pure.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

from ratelimitd.http2.errors import Cause
from ratelimitd.rpc.interface import TransportLimits

MS_PER_S: Final = 1_000.0

AGE_JITTER: Final = 0.1
"""Random part of the maximum age, so that connections that began together do not end together."""


class Step(enum.Enum):
    """Actions on a connection."""

    NOTHING = enum.auto()
    PING = enum.auto()
    GO_AWAY = enum.auto()
    """Send GOAWAY, and close when the calls in flight have ended."""
    END = enum.auto()
    """Send the cause, and close."""


class Action(NamedTuple):
    """A step, and the cause of ``END``."""

    step: Step
    cause: Cause = Cause.OWNER


class Snapshot(NamedTuple):
    """State of a connection; for the first two see :class:`ratelimitd.http2.connection.Connection`."""

    owes: Cause | None
    progress: int
    received: int
    """A counter that grows when octets arrive."""
    writing_paused: bool = False
    """The peer does not read."""


class Keepalive:
    """Timers of one connection, in seconds of the owner's clock.

    ``jitter``, from −1 to 1, varies the maximum age.
    """

    __slots__ = (
        "_ages_at_s",
        "_ended_at_s",
        "_limits",
        "_owes",
        "_owes_since_s",
        "_pinged_at_s",
        "_progress",
        "_received",
        "_received_at_s",
        "_went_away",
    )

    def __init__(self, limits: TransportLimits, now_s: float, jitter: float) -> None:
        self._limits = limits
        age_s = limits.max_connection_age_ms / MS_PER_S * (1 + AGE_JITTER * jitter)
        self._ages_at_s = now_s + age_s
        self._ended_at_s = self._ages_at_s + limits.max_connection_age_grace_ms / MS_PER_S
        self._received_at_s = now_s
        self._pinged_at_s: float | None = None
        self._owes: Cause | None = None
        self._owes_since_s = now_s
        self._progress = 0
        self._received = 0
        self._went_away = False

    def look(self, snapshot: Snapshot, now_s: float) -> Action:
        """Return the action that is due; called about once a second."""
        owed = self._owed_too_long(snapshot, now_s)
        if owed is not None:
            return Action(Step.END, owed)
        if now_s >= self._ended_at_s:
            return Action(Step.END)
        silence = self._silence(snapshot, now_s)
        if silence.step is not Step.NOTHING:
            return silence
        if now_s >= self._ages_at_s and not self._went_away:
            self._went_away = True
            return Action(Step.GO_AWAY)
        return Action(Step.NOTHING)

    def _owed_too_long(self, snapshot: Snapshot, now_s: float) -> Cause | None:
        """Return the cause if the peer has owed the same for too long without progress."""
        owes = Cause.STALLED_WINDOW if snapshot.writing_paused else snapshot.owes
        if owes is not self._owes or snapshot.progress != self._progress:
            self._owes, self._progress, self._owes_since_s = owes, snapshot.progress, now_s
        if owes is None or now_s - self._owes_since_s < self._limits.stall_timeout_ms / MS_PER_S:
            return None
        return owes

    def _silence(self, snapshot: Snapshot, now_s: float) -> Action:
        """Ping a silent peer; end the connection if it does not answer."""
        if snapshot.received != self._received:
            self._received, self._received_at_s, self._pinged_at_s = snapshot.received, now_s, None
        elif self._pinged_at_s is not None:
            if now_s - self._pinged_at_s >= self._limits.keepalive_timeout_ms / MS_PER_S:
                return Action(Step.END, Cause.KEEPALIVE_TIMEOUT)
        elif now_s - self._received_at_s >= self._limits.keepalive_interval_ms / MS_PER_S:
            self._pinged_at_s = now_s
            return Action(Step.PING)
        return Action(Step.NOTHING)
