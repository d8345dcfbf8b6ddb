"""Accuracy of a node: over-admitted and forgiven tokens, and false denials.

Derived from the states that the store returns: charges beyond a bucket's capacity were allowed by nodes that had not
seen each other's spends yet. See the bound in ADR 0023.
"""

from __future__ import annotations

from typing import Final

from ratelimitd.cluster.pending import Bucket
from ratelimitd.counters import CheckStats, RollingMax
from ratelimitd.ledger.shared_state import SharedState, overdrawn, overdrawn_by_edit
from ratelimitd.model import US_PER_S

STRETCH_US: Final = 60 * US_PER_S


class Accuracy:
    """Accuracy counters of one node. Totals are in tokens and cumulative, unless noted.

    Attributes:
        over_admitted_total: allowed here and charged beyond the capacity of a bucket.
        forgiven_total: allowed here and charged nowhere. Decreases when a late grant pays for them.
    """

    def __init__(self, stats: CheckStats) -> None:
        self.over_admitted_total = 0
        self.forgiven_total = 0
        self._stats = stats
        self._worst = RollingMax(STRETCH_US)
        self._largest_promise = RollingMax(STRETCH_US)

    def settled(self, bucket: Bucket, tokens: int, before: SharedState | None, now_us: int) -> None:
        """Account for an acknowledged batch that charged ``tokens`` to a bucket; its view includes the reply.

        ``before`` was its base before that. An excess over a limit that has just been lowered does not count.
        """
        self.take_counts(bucket)
        view = bucket.view
        if view.base is None or not tokens:
            return
        beyond = overdrawn(view.base, view.rule)
        if beyond and before is not None:
            beyond -= overdrawn_by_edit(before, view.base, view.rule)
        if beyond > 0:
            self.over_admitted_total += min(beyond, tokens)
            self._worst.add(now_us, beyond / max(view.rule.limit, view.rule.capacity))

    def take_counts(self, bucket: Bucket) -> None:
        """Add the new counts of the view of a bucket."""
        view = bucket.view
        if view.forgiven:
            self.forgiven_total += view.forgiven
            view.forgiven = 0
        if view.false_positives:
            self._stats.false_positives_total += view.false_positives
            view.false_positives = 0

    def worst_excess(self, now_us: int) -> float:
        """Return the largest overdraft of the last one to two minutes, as a fraction of the limit or larger burst."""
        return self._worst.add(now_us, 0.0)

    def largest_promise(self, now_us: int, promise: float) -> float:
        """Return the largest bound in the same period; ``promise`` is the current one. A slow answer raises both."""
        return self._largest_promise.add(now_us, promise)


def promised_excess(shares: float, members: int, round_trip_us: int, skew_us: int) -> float:
    """Return the bound of the ledger for any interval, as a fraction of the limit, for a window of one second.

    shares + N·r·(RTT + 2·skew); longer windows have a smaller rate, and so less. A burst larger than the limit
    takes its place. ``shares`` is that of the node's views.
    """
    return shares + members * (round_trip_us + 2 * skew_us) / US_PER_S
