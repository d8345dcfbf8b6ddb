"""Periodic jobs of a running node, each short enough for one event-loop iteration.

They sweep expired buckets and assignments, advance the table's tick, compare the clock with the wall clock, sample
health, and measure the loop's lag. They never wait and do no I/O.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from ratelimitd.buckets.table import BucketTable
from ratelimitd.clock import SKEW_ALARM_US, Clock
from ratelimitd.counters import RollingMax
from ratelimitd.model import US_PER_S
from ratelimitd.observe.health import Health
from ratelimitd.observe.metrics import Runtime
from ratelimitd.rules.assignments import Assignments

TICK_S: Final = 0.1
SWEEP_SHARDS: Final = 4
"""Shards swept in a tick, about 0.4 ms; a full table of a million buckets takes 40 s."""

SWEEP_ASSIGNMENTS: Final = 100
"""Shards of each type's assignments swept in a tick, about 0.2 ms; all of them take four minutes."""

SAMPLE_S: Final = 1.0

LAG_STRETCH_US: Final = 10 * US_PER_S

_log = logging.getLogger(__name__)


class Upkeep:
    """The periodic jobs of one node; ``table`` has its local buckets, ``None`` in a cluster.

    ``loop_time_s`` returns the event loop's time in seconds.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        table: BucketTable | None,
        assignments: Assignments,
        health: Health,
        runtime: Runtime,
        loop_time_s: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._table = table
        self._assignments = assignments
        self._health = health
        self._runtime = runtime
        self._loop_time_s = loop_time_s
        self._started_us = clock.monotonic_us()
        self._due_s = loop_time_s() + TICK_S
        self._lag = RollingMax(LAG_STRETCH_US)
        self._clock_is_wrong = False

    def tick(self) -> None:
        """Run the jobs due every :data:`TICK_S` seconds."""
        now_s = self._loop_time_s()
        lag_s = max(0.0, now_s - self._due_s)
        self._due_s = now_s + TICK_S
        self._runtime.loop_lag_s = self._lag.add(round(now_s * US_PER_S), lag_s)
        now_us = self._clock.now_us()
        self._assignments.sweep(now_us, SWEEP_ASSIGNMENTS)
        if self._table is not None:
            self._table.tick = 1 + (self._clock.monotonic_us() - self._started_us) // US_PER_S
            self._table.sweep(now_us, SWEEP_SHARDS)

    def sample(self) -> None:
        """Run the jobs due every :data:`SAMPLE_S` seconds."""
        self._health.sample()
        self._runtime.clock_error_us = error_us = self._clock.remeasure()
        self._report_clock(error_us)

    def _report_clock(self, error_us: int) -> None:
        """Log the start and the end of the alarm; meanwhile the metric shows the error."""
        was_wrong, self._clock_is_wrong = self._clock_is_wrong, abs(error_us) > SKEW_ALARM_US
        followed = "the shared state's clock" if self._table is None else "the wall clock"
        if self._clock_is_wrong and not was_wrong:
            _log.error(
                "%s is %.1f s %s the node's clock, which follows at 10 ms a second",
                followed,
                abs(error_us) / US_PER_S,
                "ahead of" if error_us > 0 else "behind",
            )
        elif was_wrong and not self._clock_is_wrong:
            _log.warning("the node's clock is within a second of %s again", followed)


GC_THRESHOLDS: Final = (1_000, 10, 200)
"""New container objects per collection of the youngest generation, then collections of one generation per collection of
the next: a full one every 2 million objects. The default is every 70,000: with 1,000 large calls waiting, 8 to 35 ms
every 0.7 s. Garbage that only a full one frees stays below 30 MB: 1.5 KB and 100 objects per closed connection.
"""


# A full garbage collection walks every container object, and nothing runs meanwhile: 40 ms for the modules alone, up
# to 350 ms with a book of 100,000 rules, less than 0.1 ms once all of them are frozen (CPython 3.11). Buckets do not
# count: a million of them, bytes in dicts of bytes, add nothing measurable.
def tidy() -> None:
    """Collect garbage and freeze the rest. Takes tens of milliseconds: not while serving."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


@contextmanager
def whole_load() -> Iterator[None]:
    """Disable garbage collection during the load of a whole rule book, then freeze the book.

    Cyclic garbage of the load is never freed. It is little, and a book is loaded whole only at the start and after the
    database was replaced.
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
