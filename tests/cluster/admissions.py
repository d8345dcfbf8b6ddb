"""Logs of callers' answers, and the proof of over-admission from them.

A caller only knows that a decision was made between sending and receiving. So over-admission is *proven* when
admissions that certainly lie in an interval cost more than the interval allows; there are no false positives.
``slack_s`` widens the interval of each decision, for differing clocks of nodes. All times are seconds of the monotonic
clock.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from ratelimitd.algorithms import DECIDE
from ratelimitd.model import Algorithm, Reason, Rule

FAIL_OPEN = {Reason.FAIL_OPEN_BREAKER, Reason.FAIL_OPEN_ERROR}


@dataclass(slots=True)
class Asked:
    """One check as seen by its caller. Without an answer it may or may not have been charged."""

    key: str
    cost: int
    node: int
    sent_s: float
    received_s: float = math.inf
    allowed: bool = False
    reason: int = 0

    @property
    def answered(self) -> bool:
        return self.received_s != math.inf

    @property
    def failed_open(self) -> bool:
        """Allowed without a decision, and so without a charge."""
        return self.reason in FAIL_OPEN


@dataclass
class Log:
    """Checks of callers, in the order of sending. Adding ``wall_s`` to their times yields Unix time."""

    entries: list[Asked]
    wall_s: float = 0.0

    def of(self, key: str) -> Log:
        """Return the checks of one key."""
        return Log([entry for entry in self.entries if entry.key == key], self.wall_s)

    def between(self, from_s: float, to_s: float = math.inf) -> Log:
        """Return the checks sent in an interval."""
        return Log([one for one in self.entries if from_s <= one.sent_s < to_s], self.wall_s)

    @property
    def keys(self) -> Collection[str]:
        return dict.fromkeys(entry.key for entry in self.entries)

    @property
    def admitted(self) -> list[Asked]:
        """Checks that were decided and allowed."""
        return [one for one in self.entries if one.allowed and not one.failed_open]

    @property
    def unknown(self) -> list[Asked]:
        """Checks without an answer."""
        return [entry for entry in self.entries if not entry.answered]

    @property
    def reasons(self) -> dict[str, int]:
        """Count of each reason, for messages."""
        names = sorted(
            Reason(entry.reason).name if entry.answered else "NO_ANSWER" for entry in self.entries
        )
        return {name: len(list(group)) for name, group in groupby(names)}


def tokens(entries: Iterable[Asked]) -> int:
    """Return their total cost."""
    return sum(entry.cost for entry in entries)


def entitled(log: Log, rule: Rule) -> int:
    """Return the tokens of one key's checks that a single node would have allowed, by the project's own algorithm."""
    decide, state, total = DECIDE[rule.algorithm], None, 0
    for entry in log.entries:
        now_us = int((entry.sent_s + log.wall_s) * 1_000_000)
        outcome: tuple[Any, ...] = decide(state, rule, now_us, entry.cost)
        state = outcome[5]
        total += entry.cost if outcome[0] else 0
    return total


def excess(log: Log, rule: Rule, *, slack_s: float = 0.0) -> float:
    """Return the largest proven excess of any key in any interval; below 0 if there is none.

    An interval allows, with a token bucket, the limit and the refill of its length; with windows, the limit for each
    window that it touches (fixed), or for each that fits in it, and one more (sliding).
    """
    worst = -math.inf
    for key in log.keys:
        spans = [
            Span(entry.sent_s - slack_s, entry.received_s + slack_s, entry.cost)
            for entry in log.of(key).admitted
        ]
        worst = max(worst, _EXCESS[rule.algorithm](spans, rule, log.wall_s))
    return worst


class Span(NamedTuple):
    """An admission: earliest and latest time, and cost."""

    earliest_s: float
    latest_s: float
    cost: int


def _bucket_excess(spans: Sequence[Span], rule: Rule, _wall_s: float) -> float:
    """Return the largest excess between any start and any end, over limit + rate × length.

    A tree over the starts stores the tokens certainly allowed since each of them, and the best start; admissions are
    added by their latest time.
    """
    rate = rule.limit / rule.window_seconds
    begins = sorted(spans)
    places = {id(span): place for place, span in enumerate(begins)}
    size = 1 << len(begins).bit_length()
    costs = [0.0] * (2 * size)
    bests = [-math.inf] * (2 * size)
    worst = -math.inf
    for span in sorted(spans, key=lambda span: span.latest_s):
        at = size + places[id(span)]
        costs[at] = span.cost
        bests[at] = span.cost + rate * span.earliest_s
        while at > 1:
            at //= 2
            left, right = 2 * at, 2 * at + 1
            costs[at] = costs[left] + costs[right]
            bests[at] = max(bests[left] + costs[right], bests[right])
        worst = max(worst, bests[1] - rate * span.latest_s)
    return worst - rule.limit


def _log_excess(spans: Sequence[Span], rule: Rule, _wall_s: float) -> float:
    """Return the largest excess of consecutive windows over as many limits."""
    if not spans:
        return -math.inf
    length_s = max(span.latest_s for span in spans) - min(span.earliest_s for span in spans)
    return max(
        _most_within(spans, windows * rule.window_seconds) - windows * rule.limit
        for windows in range(1, math.ceil(length_s / rule.window_seconds) + 2)
    )


def _most_within(spans: Sequence[Span], length_s: float) -> int:
    """Return the most tokens that were certainly allowed in any interval with an open start."""
    most = level = 0
    inside: list[tuple[float, int]] = []
    for span in sorted(spans, key=lambda span: span.latest_s):
        heapq.heappush(inside, (span.earliest_s, span.cost))
        level += span.cost
        while inside and inside[0][0] <= span.latest_s - length_s:
            level -= heapq.heappop(inside)[1]
        most = max(most, level)
    return most


def _window_excess(spans: Sequence[Span], rule: Rule, wall_s: float) -> float:
    """Return the largest excess of consecutive aligned windows over as many limits."""
    length_s = rule.window_seconds
    sure: dict[tuple[int, int], int] = {}
    for span in spans:
        windows = (
            int((span.earliest_s + wall_s) // length_s),
            int((span.latest_s + wall_s) // length_s),
        )
        sure[windows] = sure.get(windows, 0) + span.cost
    worst = -math.inf
    for begin in {begin for begin, _ in sure}:
        level = 0
        for end, cost in sorted(
            (end, cost) for (since, end), cost in sure.items() if since >= begin
        ):
            level += cost
            worst = max(worst, level - (end - begin + 1) * rule.limit)
    return worst


_EXCESS = {
    Algorithm.TOKEN_BUCKET: _bucket_excess,
    Algorithm.SLIDING_WINDOW: _log_excess,
    Algorithm.FIXED_WINDOW: _window_excess,
}
