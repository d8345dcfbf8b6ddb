"""The time of the shared state, as a wall clock for the node's own: all nodes follow one clock, not each its machine's.

Each answer that tells the store's time tells it for a moment between question and answer; the quicker the answer, the
better it is known. So of the last few the quickest counts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

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
