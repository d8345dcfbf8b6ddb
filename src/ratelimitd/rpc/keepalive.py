"""When a connection has lasted long enough, by the clock alone: peers that are slow, silent, stalled or old.

Pure: maps time and connection state to an action.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

from ratelimitd.http2.errors import Cause
from ratelimitd.rpc.interface import TransportLimits

MS_PER_S: Final = 1_000.0

AGE_JITTER: Final = 0.1
"""Of the age: connections that began together must not end together."""


class Step(enum.Enum):
    """What to do with a connection."""

    NOTHING = enum.auto()
    PING = enum.auto()
    GO_AWAY = enum.auto()
    """Ask for no more calls, and close when those in flight have ended."""
    END = enum.auto()
    """Say why, and close."""


class Action(NamedTuple):
    """A step, and for the last one the cause."""

    step: Step
    cause: Cause = Cause.OWNER


class Snapshot(NamedTuple):
    """What a connection looks like: see :class:`ratelimitd.http2.connection.Connection` for the first two."""

    owes: Cause | None
    progress: int
    received: int
    """A number that grows when octets arrive."""
    writing_paused: bool = False
    """The peer does not read what was written for it."""


class Keepalive:
    """One connection's times, all in seconds of the clock that the owner reads.

    ``jitter`` from −1 to 1 spreads the age.
    """

    __slots__ = (
        "_ages_at_s",
        "_ended_at_s",
        "_heard_at_s",
        "_limits",
        "_owes",
        "_owes_since_s",
        "_pinged_at_s",
        "_progress",
        "_received",
        "_went_away",
    )

    def __init__(self, limits: TransportLimits, now_s: float, jitter: float) -> None:
        self._limits = limits
        age_s = limits.max_connection_age_ms / MS_PER_S * (1 + AGE_JITTER * jitter)
        self._ages_at_s = now_s + age_s
        self._ended_at_s = self._ages_at_s + limits.max_connection_age_grace_ms / MS_PER_S
        self._heard_at_s = now_s
        self._pinged_at_s: float | None = None
        self._owes: Cause | None = None
        self._owes_since_s = now_s
        self._progress = 0
        self._received = 0
        self._went_away = False

    def look(self, snapshot: Snapshot, now_s: float) -> Action:
        """What to do now; to be asked about once a second."""
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
        """The cause, if the peer has owed the same for too long and nothing has moved meanwhile."""
        owes = Cause.STALLED_WINDOW if snapshot.writing_paused else snapshot.owes
        if owes is not self._owes or snapshot.progress != self._progress:
            self._owes, self._progress, self._owes_since_s = owes, snapshot.progress, now_s
        if owes is None or now_s - self._owes_since_s < self._limits.stall_timeout_ms / MS_PER_S:
            return None
        return owes

    def _silence(self, snapshot: Snapshot, now_s: float) -> Action:
        """Ask a silent peer for a sign of life, and give up on one that gives none."""
        if snapshot.received != self._received:
            self._received, self._heard_at_s, self._pinged_at_s = snapshot.received, now_s, None
        elif self._pinged_at_s is not None:
            if now_s - self._pinged_at_s >= self._limits.keepalive_timeout_ms / MS_PER_S:
                return Action(Step.END, Cause.KEEPALIVE_TIMEOUT)
        elif now_s - self._heard_at_s >= self._limits.keepalive_interval_ms / MS_PER_S:
            self._pinged_at_s = now_s
            return Action(Step.PING)
        return Action(Step.NOTHING)
