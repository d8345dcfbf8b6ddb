"""What one worker has counted, all the processes together that it has been: such numbers never sink.

A process that ended takes what it counted since its last report with it; nothing else is forgotten. Pure.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from ratelimitd.observe.metrics import DEFINITIONS
from ratelimitd.stats import MAX_RULE_LABELS
from ratelimitd.workers.merging import added, number
from ratelimitd.workers.messages import Reading, Report

COUNTED: Final = frozenset(
    definition.name for definition in DEFINITIONS if definition.kind != "gauge"
)
"""The metrics that only grow."""

MAX_LABELS: Final = 2 * MAX_RULE_LABELS
"""Values of one label that are kept: those of rules in use, and as many of rules that may be gone."""


class Tally:
    """The counters and histograms of one worker."""

    def __init__(self) -> None:
        self._base: dict[str, dict[str, Reading]] = {}
        """What processes counted that have ended."""
        self._last: dict[str, dict[str, Reading]] = {}
        """What the present process said last."""

    def take(self, report: Report) -> None:
        """A report of the present process."""
        for name in COUNTED & report.keys():
            last = self._last.setdefault(name, {})
            for label, reading in report[name].items():
                # It may begin anew in the same process, too: a rule was dropped, and is there again.
                if label in last and number(reading) < number(last[label]):
                    self._add_to_base(name, label, last[label])
                last[label] = reading
            self._forget_unused(name, report[name].keys())

    def process_ended(self) -> None:
        """The next report is one of a new process, which counts from 0."""
        for name, readings in self._last.items():
            for label, reading in readings.items():
                self._add_to_base(name, label, reading)
        self._last.clear()

    def report(self) -> Report:
        """What has been counted so far."""
        total = {name: dict(readings) for name, readings in self._base.items()}
        for name, readings in self._last.items():
            found = total.setdefault(name, {})
            for label, reading in readings.items():
                found[label] = added(found[label], reading) if label in found else reading
        return total

    def _add_to_base(self, name: str, label: str, reading: Reading) -> None:
        base = self._base.setdefault(name, {})
        base[label] = added(base[label], reading) if label in base else reading

    def _forget_unused(self, name: str, used: Collection[str]) -> None:
        """Bound the labels: those of rules that are gone would be kept for ever."""
        for readings in (self._base.get(name, {}), self._last[name]):
            if len(readings) > MAX_LABELS:
                for label in readings.keys() - used:
                    del readings[label]
