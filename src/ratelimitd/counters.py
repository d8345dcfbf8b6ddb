"""The counters of the check path: plain integers, read when metrics are collected.

An integer add costs about 36 ns, a bound counter of a metrics library about 231 ns, so the check path adds here and
``observe/`` reads. Reads no clock and takes no lock; the event loop is the only writer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Final

LATENCY_BOUNDS_S: Final = (
    0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0,
)  # fmt: skip
"""Upper bounds of the check latency histogram, in seconds, with edges at 1 ms (the promise) and 2 ms (the alert)."""

MAX_RULE_LABELS: Final = 1_000
"""Rules with a metrics label of their own; the others share ``OTHER_RULES``, which bounds the labels."""

MAX_FURTHER_RULES: Final = 20_000
"""Rules without a label that have counters of their own, 250 bytes each, for the page."""

OTHER_RULES: Final = "other"


class CheckStats:
    """Counters of one process. Every ``*_total`` only grows.

    ``allowed_total`` and ``blocked_total`` count checks decided by a rule. ``NO_RULE`` counts as allowed, and so do
    fail-open answers, which also have two counters of their own. Peeks count like checks.

    The counters of ``transport_causes`` and ``web_causes`` start at 0, so that the first error counts as growth.
    """

    __slots__ = (
        "allowed_total",
        "blocked_total",
        "breaker_denied_total",
        "bucket_missed_total",
        "by_rule",
        "clock_rejected_total",
        "errors_by_transport",
        "fail_open_breaker_total",
        "fail_open_error_total",
        "false_positives_total",
        "forwarding_ignored_total",
        "further_rules",
        "hold_tokens",
        "holds",
        "holds_open",
        "invalid_total",
        "latency_counts",
        "latency_sum_s",
        "no_rule_total",
        "plan_blocked_total",
        "recorded",
        "refused_by_web",
        "shared_state_errors_total",
        "token_guesses",
        "unexpected_total",
        "unlimited_total",
        "used_rules",
        "would_deny",
    )

    def __init__(
        self, transport_causes: Iterable[str] = (), web_causes: Iterable[str] = ()
    ) -> None:
        self.allowed_total = 0
        self.blocked_total = 0
        self.no_rule_total = 0
        self.unlimited_total = 0
        """Checks allowed without a limit, because of the plan ``unlimited``."""
        self.plan_blocked_total = 0
        """Checks denied because of the plan ``blocked``."""
        self.breaker_denied_total = 0
        """Checks denied because the circuit breaker was open and ON_BREAKER_OPEN is ``deny``."""
        self.fail_open_breaker_total = 0
        self.fail_open_error_total = 0
        self.false_positives_total = 0
        self.forwarding_ignored_total = 0
        """Forward-auth requests whose forwarding headers were ignored: their peer is not a trusted proxy."""
        self.shared_state_errors_total = 0
        self.unexpected_total = 0
        """Calls answered INTERNAL: defects."""
        self.invalid_total = 0
        """Malformed checks: single calls refused and batch items answered INVALID_REQUEST."""
        self.clock_rejected_total = 0
        """Caller timestamps out of tolerance, replaced by the node's own clock."""
        self.bucket_missed_total = 0
        """Decided checks whose bucket was unknown. Hits are derived from the answers."""
        self.latency_counts = [0] * (len(LATENCY_BOUNDS_S) + 1)
        self.latency_sum_s = 0.0
        self.by_rule: dict[str, list[int]] = {}
        """Rule id → [allowed, blocked] while the rule exists; at most ``MAX_RULE_LABELS`` ids. ``OTHER_RULES`` counts
        the rules beyond ``further_rules``, and those deleted from it."""
        self.further_rules: dict[str, list[int]] = {}
        """The same for rules without a label; at most ``MAX_FURTHER_RULES``."""
        self.would_deny: dict[str, list[int]] = {}
        """Rule id and name of an observing limit, joined by a comma → [checks that it would have denied]; at most
        ``MAX_RULE_LABELS``, and one entry for all others."""
        self.used_rules: set[str] = set()
        """Ids of the existing rules that have applied to a check since the start."""
        self.errors_by_transport: dict[str, int] = dict.fromkeys(transport_causes, 0)
        """Transport errors by cause; the causes are a closed set."""
        self.token_guesses = {"wrong": 0, "refused": 0}
        """Wrong tokens that were compared, and calls refused after too many wrong ones from their address."""
        self.holds = {"made": 0, "settled": 0, "expired": 0, "refused": 0}
        """On this node: holds made; holds settled; holds made here that ended without a settle here; and holds refused
        because their number is bounded."""
        self.hold_tokens = {"held": 0, "refunded": 0, "debt": 0}
        """Tokens held, tokens given back by settles, and tokens charged by settles in addition."""
        self.holds_open = 0
        """Holds made here that have neither ended nor been settled here."""
        self.recorded = {"written": 0, "lost": 0}
        """Checks in complete trace files, and checks lost because the queue was full or a write failed."""
        self.refused_by_web: dict[str, int] = dict.fromkeys(web_causes, 0)
        """Requests that a page refused, by cause; the causes are a closed set."""

    @property
    def bucket_looked_total(self) -> int:
        """Checks decided by a rule, for which a bucket was looked up."""
        others = self.no_rule_total + self.fail_open_breaker_total + self.fail_open_error_total
        others += self.breaker_denied_total + self.unlimited_total + self.plan_blocked_total
        return self.allowed_total + self.blocked_total - others

    @property
    def bucket_known_total(self) -> int:
        """Checks decided by a rule whose bucket was known."""
        return self.bucket_looked_total - self.bucket_missed_total

    def observe_latency(self, elapsed_s: float, checks: int = 1) -> None:
        """Count ``checks`` checks that took ``elapsed_s`` seconds together, each with an equal part."""
        each_s = elapsed_s / checks
        self.latency_counts[bisect_left(LATENCY_BOUNDS_S, each_s)] += checks
        self.latency_sum_s += elapsed_s

    def rule_counters(self, rule_id: str) -> list[int]:
        """Return the [allowed, blocked] pair of a rule, created on first use."""
        counters = self.counters_of(rule_id)
        if counters is not None:
            return counters
        if len(self.by_rule) < MAX_RULE_LABELS:
            return self.by_rule.setdefault(rule_id, [0, 0])
        others = self.by_rule.setdefault(OTHER_RULES, [0, 0])
        if len(self.further_rules) < MAX_FURTHER_RULES:
            return self.further_rules.setdefault(rule_id, [0, 0])
        return others

    def counters_of(self, rule_id: str) -> list[int] | None:
        """Return the rule's own pair, if it has one."""
        return self.by_rule.get(rule_id) or self.further_rules.get(rule_id)

    def labelled_rules(self) -> Iterator[tuple[str, int, int]]:
        """Yield (id, allowed, blocked) of each label; ``OTHER_RULES`` is the sum of all others."""
        for rule_id, counters in self.by_rule.items():
            pairs = [counters]
            if rule_id == OTHER_RULES:
                pairs += self.further_rules.values()
            yield rule_id, sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)

    def observed_counter(self, rule_id: str, limit: str) -> list[int]:
        """Return the counter of checks that an observing limit would have denied, created on first use."""
        key = f"{rule_id},{limit}"
        if key not in self.would_deny and len(self.would_deny) >= MAX_RULE_LABELS:
            key = f"{OTHER_RULES},{OTHER_RULES}"
        return self.would_deny.setdefault(key, [0])

    def forget_rules(self, exists: Callable[[str], bool]) -> None:
        """Drop the counters of deleted rules, which frees their labels for others.

        Cached counter pairs of such a rule go stale; increments to them are lost.
        """
        gone = [key for key in self.by_rule if key != OTHER_RULES and not exists(key)]
        for key in gone:
            del self.by_rule[key]
        for key in [key for key in self.further_rules if not exists(key)]:
            others = self.by_rule[OTHER_RULES]
            for column, count in enumerate(self.further_rules.pop(key)):
                others[column] += count
        self.used_rules = {rule_id for rule_id in self.used_rules if exists(rule_id)}
        for key in [key for key in self.would_deny if not exists(key.partition(",")[0])]:
            del self.would_deny[key]

    def transport_error(self, cause: str) -> None:
        """Count one transport error by its cause; the causes are a closed set."""
        self.errors_by_transport[cause] = self.errors_by_transport.get(cause, 0) + 1

    def ignored_forwarding(self) -> None:
        """Count one forward-auth request whose forwarding headers were ignored."""
        self.forwarding_ignored_total += 1

    def web_refusal(self, cause: str) -> None:
        """Count one request that a page refused by its cause; the causes are a closed set."""
        self.refused_by_web[cause] = self.refused_by_web.get(cause, 0) + 1


class RollingMax:
    """The largest value of the current period of ``stretch_us`` and of the one before it.

    As a gauge it shows peaks between scrapes every 15 s. Time is passed in.
    """

    def __init__(self, stretch_us: int) -> None:
        self._stretch_us = stretch_us
        self._stretch = 0
        self._current = 0.0
        self._before = 0.0

    def add(self, now_us: int, value: float) -> float:
        """Add a value; return the largest one of this period and the one before it."""
        stretch = now_us // self._stretch_us
        if stretch != self._stretch:
            self._before = self._current if stretch == self._stretch + 1 else 0.0
            self._current, self._stretch = 0.0, stretch
        self._current = max(self._current, value)
        return max(self._current, self._before)
