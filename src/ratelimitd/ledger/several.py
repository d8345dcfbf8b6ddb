"""One check on several shared buckets: all are charged, or none is. Pure; see ADR 0051.

A bucket within the node's share reserves the tokens until all others are decided. A bucket closer to its limit is
decided and charged by the store; the charge is given back if another bucket denies the check.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ratelimitd.algorithms.several import ENFORCE, MORE_THAN_ANY_LIMIT
from ratelimitd.ledger.accounts import ACCOUNTS, Refund
from ratelimitd.ledger.local_view import LocalView
from ratelimitd.ledger.shared_state import SharedState, refunded
from ratelimitd.model import ALLOWED, CONCURRENCY, WITHIN_LIMIT, Limit, Outcome


class Part:
    """One bucket of a check.

    Attributes:
        limit: in force on the node.
        cost: tokens.
        view: the node's view, if that decides.
        outcome: ``None`` until decided; an error if it cannot be decided.
        refund: gives back the store's charge; ``None`` without one, or if it is not known exactly enough.
        shared: the bucket in the store after it allowed the check, including the charge of ``refund``.
        is_reserved: the view has reserved the tokens.
        is_charged: the bucket is charged, by the store, or by the view because the store was late.
    """

    __slots__ = (
        "cost",
        "is_charged",
        "is_reserved",
        "limit",
        "outcome",
        "refund",
        "shared",
        "view",
    )

    def __init__(self, limit: Limit, cost: int) -> None:
        self.limit = limit
        self.cost = cost
        self.view: LocalView | None = None
        self.outcome: Outcome | Exception | None = None
        self.refund: Refund | None = None
        self.shared: SharedState | None = None
        self.is_reserved = self.is_charged = False

    def reserve(self, view: LocalView, now_us: int, members: int) -> Outcome | None:
        """Decide by the node's view, and reserve the tokens if it allows; ``None`` if the store has to decide."""
        return self._held(view, view.reserve(now_us, members, self.cost))

    def reserve_alone(self, view: LocalView, now_us: int) -> Outcome | None:
        """Decide by the node's view regardless of the share, because the store is not asked."""
        outcome = view.peek(now_us, self.cost)
        if outcome[0]:
            view.hold(self.cost)
        return self._held(view, outcome)

    def peek(self, view: LocalView, now_us: int) -> Outcome:
        """Decide by the node's view, and reserve nothing."""
        self.view, self.outcome = view, (outcome := view.peek(now_us, self.cost))
        return outcome

    def release(self, now_us: int) -> None:
        """End the reservation, and decide again, since the bucket may have been used up."""
        if self.view is not None and self.is_reserved:
            self.view.release(self.cost)
            self.outcome = self.view.peek(now_us, self.cost)

    def charge(self, now_us: int) -> None:
        """Spend the reserved tokens."""
        if self.view is not None and self.is_reserved:
            self.outcome = self.view.check_alone(now_us, self.cost)
            self.is_charged = True

    def leave(self, now_us: int) -> None:
        """Make an allowed outcome report the bucket without this check."""
        if not isinstance(self.outcome, tuple) or not self.outcome[0]:
            return
        if self.view is not None:
            _, remaining, reset_time, *_ = self.view.peek(now_us, MORE_THAN_ANY_LIMIT)
        elif self.shared is not None:
            refunds = () if self.refund is None else [self.refund]
            state = refunded(self.shared, self.limit, refunds).state
            rule, account = self.limit, ACCOUNTS[self.limit.algorithm]
            if (rule.limit, rule.burst) != (self.shared.limit, self.shared.burst):
                # A peek is judged by an edit that it does not write.
                if rule.revision >= self.shared.revision:
                    state = account.capped(state, rule)
                else:
                    rule = replace(rule, limit=self.shared.limit, burst=self.shared.burst)
            _, remaining, reset_time, *_ = account.judge(state, rule, now_us, MORE_THAN_ANY_LIMIT)
        else:
            _, remaining, reset_time, *_ = self.outcome
            if self.limit.algorithm is not CONCURRENCY:  # a check takes no slot
                remaining = min(remaining + self.cost, self.limit.capacity)
        self.outcome = (ALLOWED, remaining, reset_time, 0, WITHIN_LIMIT, None)

    def _held(self, view: LocalView, outcome: Outcome | None) -> Outcome | None:
        self.view = view
        self.outcome = outcome
        self.is_reserved = outcome is not None and outcome[0]
        return outcome


def denies(parts: Iterable[Part], errors: tuple[type[Exception], ...] = ()) -> bool:
    """Whether an enforced limit denies the check, or has one of ``errors`` as its outcome."""
    for part in parts:
        outcome = part.outcome
        if part.limit.enforcement is not ENFORCE or outcome is None:
            continue
        if isinstance(outcome, errors) or (isinstance(outcome, tuple) and not outcome[0]):
            return True
    return False


def conclude(parts: Sequence[Part], now_us: int, errors: tuple[type[Exception], ...] = ()) -> bool:
    """End a check with decided parts: spend the reserved tokens or nothing. Returns whether it is allowed.

    A part with an error is not charged, and denies only if the error is one of ``errors``. If the check is denied, the
    caller must give back the store's charges.
    """
    for part in parts:
        part.release(now_us)
    is_allowed = not denies(parts, errors)
    for part in parts:
        if not is_allowed:
            part.leave(now_us)
        elif isinstance(part.outcome, tuple) and part.outcome[0]:
            part.charge(now_us)
    return is_allowed
