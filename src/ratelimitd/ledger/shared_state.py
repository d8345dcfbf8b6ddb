"""A bucket in the shared state, and the effect of a node's update on it. Pure.

The script in the store does the same, and is tested against this model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple, TypeAlias

from ratelimitd.ledger.accounts import ACCOUNTS, BucketState, Refund, Run
from ratelimitd.model import US_PER_S, Limit, Outcome


class SharedState(NamedTuple):
    """A bucket in the store.

    ``generation`` is 0 until the first reset and grows with each. ``revision`` is that of the newest rule book under
    which the bucket was charged, ``limit`` and ``burst`` are those of its rule there. ``state`` is the algorithm's;
    ``None`` is a full bucket. ``refunded`` counts the tokens given back in this generation.
    """

    generation: int
    revision: int
    limit: int
    state: BucketState = None
    burst: int = 0
    refunded: int = 0

    @property
    def capacity(self) -> int:
        """The most tokens at once."""
        return self.burst or self.limit


class Ask(NamedTuple):
    """A check that the store must decide: its time, by the node's clock, and its cost."""

    at_us: int
    cost: int


class Update(NamedTuple):
    """One node's update of one bucket: the checks that it has allowed, and those that the store must decide.

    Attributes:
        rule: the limit of the charges; its ``revision`` is that of the whole rule book.
        generation: of the charged bucket; ``None`` if the node does not know it yet.
        runs: allowed tokens to be charged.
        asks: checks to be decided after that, in order.
        refunds: charges to be given back first.
    """

    rule: Limit
    generation: int | None
    runs: Sequence[Run] = ()
    asks: Sequence[Ask] = ()
    refunds: Sequence[Refund] = ()


class Settled(NamedTuple):
    """The bucket after an update, and which of its asks were granted and charged."""

    shared: SharedState
    grants: tuple[bool, ...]


# equivalent: any past second works
YEAR_2025_S: Final = 1_735_689_600

STORE_TIME: Final = -1
"""Stands for the time of the store's own clock."""


OBSERVES: Final = 4
"""Flag in ``peek`` for an observing limit: its denial denies no other bucket of the check."""


class StoreCheck(NamedTuple):
    """A check that the store decides on the bucket itself: a node's first one on it, or any under ``strict``.

    ``peek`` also marks the checks that the store decides together.
    """

    name: bytes
    rule: Limit
    now_us: int
    cost: int
    peek: int


FirstResult: TypeAlias = tuple[Outcome, SharedState]
"""The outcome of a first check, without a state, and the bucket in the store after it; a missing one is full."""


def within(outcome: Outcome, limit: Limit) -> Outcome:
    """Return an outcome with at most the capacity of ``limit`` remaining.

    The store, or a view that has learned from it, may have decided by a newer limit than the answer names.
    """
    most = limit.capacity
    return outcome if outcome[1] <= most else (outcome[0], most, *outcome[2:])


def standing(shared: SharedState, rule: Limit) -> tuple[int, ...]:
    """Return the sort key of the states of one bucket: the higher one is the later one.

    At the same latest time, a charge increases ``spent``, and a refund decreases it but increases ``refunded``.
    """
    latest_us, spent = ACCOUNTS[rule.algorithm].standing(shared.state)
    return (*shared[:2], latest_us, shared.refunded, spent)


def refund_of(
    shared: SharedState, rule: Limit, tokens: int, *, at_us: int | None = None, later: int = 0
) -> Refund:
    """Return the refund of a charge that the store made just before a state of a bucket.

    The charge was made at ``at_us`` or later, and ``later`` tokens were charged between it and that state.
    """
    account = ACCOUNTS[rule.algorithm]
    if at_us is None:
        at_us, _ = account.standing(shared.state)
    spent = account.spent(shared.state, rule) - later
    return Refund(*shared[:2], at_us, tokens, spent, shared.refunded)


def refunded(shared: SharedState, rule: Limit, refunds: Sequence[Refund]) -> SharedState:
    """Return a bucket after refunds; those of another generation or revision are ignored."""
    state, total = shared.state, shared.refunded
    for refund in refunds:
        already = total - refund.refunded
        # If fewer were given back than before the charge, the store has lost the charge.
        if refund[:2] == shared[:2] and already >= 0:
            state, tokens = ACCOUNTS[rule.algorithm].refunded(state, rule, refund, already)
            total += tokens
    return shared._replace(state=state, refunded=total)


def generation_at(now_us: int) -> int:
    """Return the least generation of a bucket that is reset now: seconds since 2025.

    The stored generation plus one could repeat after the store has lost the last: a node that remembers that one would
    take the reset bucket for an older state.
    """
    return max(0, now_us // US_PER_S - YEAR_2025_S)


def overdrawn(shared: SharedState, rule: Limit) -> int:
    """Return the tokens by which a bucket was overdrawn at its latest spend: the excess of all nodes together."""
    return max(0, _used_at_most(shared, rule) - shared.capacity)


def overdrawn_by_edit(before: SharedState, shared: SharedState, rule: Limit) -> int:
    """Return the part of :func:`overdrawn` that was allowed correctly, ``before`` the capacity was lowered."""
    if before.capacity <= shared.capacity:
        return 0
    account = ACCOUNTS[rule.algorithm]
    ruling = replace(rule, limit=shared.limit, burst=shared.burst)
    latest_us = account.standing(shared.state)[0]
    # The store has capped the debt at the edit; a log still has all tokens in its window.
    left = account.capped(before.state, ruling)
    return max(0, account.used(left, ruling, latest_us) - shared.capacity)


def has_plenty(shared: SharedState, rule: Limit) -> bool:
    """Whether at least half of the capacity was left at the latest spend, and so ever since."""
    return 2 * _used_at_most(shared, rule) <= min(shared.capacity, rule.capacity)


def _used_at_most(shared: SharedState, rule: Limit) -> int:
    """Return the tokens missing at the latest spend, the most until now."""
    account = ACCOUNTS[rule.algorithm]
    latest_us = account.standing(shared.state)[0]
    return account.used(shared.state, rule, latest_us)
