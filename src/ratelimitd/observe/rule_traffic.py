"""The traffic of each rule on this node, for the page: sampled from the counters of the check path.

Reads the counters of all rules every ten seconds, in steps. The busiest rules have a history of 24 hours, in bounded
memory. Reads only the clock that it is given.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import nlargest, nsmallest
from itertools import islice
from statistics import fmean
from types import MappingProxyType
from typing import Final, NamedTuple

from ratelimitd.counters import OTHER_RULES, CheckStats
from ratelimitd.model import US_PER_MS
from ratelimitd.observe import history
from ratelimitd.observe.denials import TOP
from ratelimitd.observe.history import Span
from ratelimitd.observe.node_status import BusyRule

STEP_S: Final = 10

KEPT_RULES: Final = 1_000
"""Rules with a history: 6 KiB each."""

RULES_PER_ITERATION: Final = 100
"""Rules sampled per event-loop iteration, in about 0.5 ms."""

SLOTS: Final = 361
"""Slots of each ring: an hour of samples, or a day of sums of 24 samples, plus the one being written."""

SAMPLES_PER_SLOT: Final = (1, 24)

SPANS: Final[Mapping[str, Span]] = MappingProxyType(
    {name: Span(span.kept_s, max(span.step_s, STEP_S)) for name, span in history.SPANS.items()}
)
"""The spans of the history, with the steps kept here."""

LAST_MINUTE: Final = Span(60, STEP_S)

FADE: Final = 0.5 ** (STEP_S / 600)
"""Traffic of ten minutes ago counts half in the choice of the busiest rules."""

MOST_REPLACED: Final = 10
"""Rules per sample whose history is dropped in favour of busier ones."""

_MAX_COUNT: Final = 2**32 - 1


class Traffic(NamedTuple):
    """Checks that a rule decided since the start, and the time of the last one in ms, up to ten seconds late.

    ``last_ms`` is 0 if it never decided one. ``judged``: it applied to a check, so with no decision of its own it
    applied alongside rules that decided. ``counted``: it has counters of its own.
    """

    allowed: int = 0
    blocked: int = 0
    last_ms: int = 0
    judged: bool = False
    counted: bool = True


class Rates(NamedTuple):
    """Checks per second of a rule in one step, which ended at ``at_ms`` since the Unix epoch."""

    at_ms: int
    allowed_per_s: float
    blocked_per_s: float


class _Past:
    """The counts of one rule, from sample number ``since`` on, in slots that all rules have in common."""

    __slots__ = ("rings", "since")

    def __init__(self, since: int) -> None:
        self.since = since
        empty = bytes(4 * SLOTS)
        self.rings = [(array("I", empty), array("I", empty)) for _ in SAMPLES_PER_SLOT]

    def add(self, number: int, counts: Sequence[int]) -> None:
        for samples, rings in zip(SAMPLES_PER_SLOT, self.rings, strict=True):
            slot = number // samples % SLOTS
            for ring, count in zip(rings, counts, strict=True):
                before = ring[slot] if number % samples else 0
                ring[slot] = min(before + count, _MAX_COUNT)


class _Rule:
    """The state of a rule; ``weight`` is its traffic, which fades."""

    __slots__ = ("allowed", "blocked", "last_ms", "past", "weight")

    def __init__(self) -> None:
        self.allowed = self.blocked = self.last_ms = 0
        self.weight = 0.0
        self.past: _Past | None = None

    def grown(self, allowed: int, blocked: int) -> tuple[int, int]:
        """Set the current counters; return their growth. A pair of counters that was dropped restarts at 0."""
        anew = allowed < self.allowed or blocked < self.blocked
        counts = allowed - (0 if anew else self.allowed), blocked - (0 if anew else self.blocked)
        self.allowed, self.blocked = allowed, blocked
        return counts

    def take(self, counts: tuple[int, int], number: int, now_ms: int) -> None:
        """Add the growth of the counters up to sample ``number``."""
        self.weight = self.weight * FADE + sum(counts)
        if any(counts):
            self.last_ms = now_ms
        if self.past is not None:
            self.past.add(number, counts)


class RuleTraffic:
    """The traffic of the rules of one node; ``now_us`` is the time in µs since the Unix epoch."""

    def __init__(self, stats: CheckStats, now_us: Callable[[], int]) -> None:
        self._stats = stats
        self._now_us = now_us
        self._rules: dict[str, _Rule] = {}
        self._number = -1
        self._ends_ms = [[0] * SLOTS for _ in SAMPLES_PER_SLOT]
        self.busiest: Sequence[BusyRule] = ()
        """The :data:`TOP` busiest rules with their rates of the last minute."""

    async def sample(self) -> None:
        """Take the sample due every :data:`STEP_S` seconds."""
        number = self._number + 1
        now_ms = self._now_us() // US_PER_MS
        counters = iter([*self._stats.by_rule.items(), *self._stats.further_rules.items()])
        seen: dict[str, _Rule] = {}
        while batch := [*islice(counters, RULES_PER_ITERATION)]:
            for rule_id, (allowed, blocked) in batch:
                if rule_id != OTHER_RULES:
                    rule = seen[rule_id] = self._rules.get(rule_id) or _Rule()
                    rule.take(rule.grown(allowed, blocked), number, now_ms)
            await asyncio.sleep(0)
        for samples, ends_ms in zip(SAMPLES_PER_SLOT, self._ends_ms, strict=True):
            ends_ms[number // samples % SLOTS] = now_ms
        self._number, self._rules = number, seen
        self._choose()
        await asyncio.sleep(0)
        self.busiest = self._busiest()

    def of(self, rule_id: str) -> Traffic:
        """Return the decisions of a rule up to now."""
        counters = self._stats.counters_of(rule_id)
        judged = rule_id in self._stats.used_rules
        if counters is None:
            return Traffic(judged=judged, counted=not judged)
        rule = self._rules.get(rule_id) or _Rule()
        allowed, blocked = counters
        is_new = (allowed, blocked) != (rule.allowed, rule.blocked)
        last_ms = self._now_us() // US_PER_MS if is_new else rule.last_ms
        return Traffic(allowed, blocked, last_ms, judged)

    def rates(self, rule_id: str, span: Span) -> Sequence[Rates]:
        """Return the rates of a rule over one of :data:`SPANS`, oldest first; empty if it is not among the busiest."""
        rule = self._rules.get(rule_id)
        if rule is None or rule.past is None or rule.past.since > self._number:
            return ()
        return [*self._rates(rule.past, span)]

    def _rates(self, past: _Past, span: Span) -> Iterator[Rates]:
        samples = span.step_s // STEP_S
        level = SAMPLES_PER_SLOT.index(samples)
        newest = self._number // samples
        allowed, blocked = past.rings[level]
        for slot in range(max(newest - span.most + 1, past.since // samples), newest + 1):
            # The history may start within the first slot, and the newest slot may be incomplete.
            first = max(slot * samples, past.since)
            elapsed_s = STEP_S * (1 + min((slot + 1) * samples - 1, self._number) - first)
            place = slot % SLOTS
            yield Rates(
                self._ends_ms[level][place], allowed[place] / elapsed_s, blocked[place] / elapsed_s
            )

    def _busiest(self) -> Sequence[BusyRule]:
        found = []
        with_past = [(rule_id, rule) for rule_id, rule in self._rules.items() if rule.past]
        for rule_id, _ in nlargest(TOP, with_past, key=lambda one: one[1].weight):
            if rates := self.rates(rule_id, LAST_MINUTE):
                _, allowed_per_s, blocked_per_s = map(fmean, zip(*rates, strict=True))
                found.append(BusyRule(rule_id, allowed_per_s, blocked_per_s))
        return found

    def _choose(self) -> None:
        """Start a history, from the next sample on, for the busiest rules."""
        with_past = [rule for rule in self._rules.values() if rule.past is not None]
        without = [rule for rule in self._rules.values() if rule.past is None and rule.weight]
        free = KEPT_RULES - len(with_past)
        chosen = nlargest(max(free, MOST_REPLACED), without, key=_weight)
        for rule in chosen[:free]:
            rule.past = _Past(self._number + 1)
        quietest = nsmallest(MOST_REPLACED, with_past, key=_weight)
        for rule, other in zip(chosen[free:], quietest, strict=False):
            if rule.weight > 2 * other.weight:
                other.past, rule.past = None, _Past(self._number + 1)


def _weight(rule: _Rule) -> float:
    return rule.weight
