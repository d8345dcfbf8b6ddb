"""A bucket as the shared state holds it, and what a node's update does to it. Pure.

The script that runs in the store does the same; this is what it is tested against.
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
    which the bucket was charged, ``limit`` and ``burst`` what its rule says there. ``state`` is the algorithm's;
    ``None`` is a full bucket. ``refunded`` counts the tokens that were given back in this generation.
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
    """A check that the store is to decide: when it came, on the node's clock, and its cost."""

    at_us: int
    cost: int


class Update(NamedTuple):
    """What one node says of one bucket: what it has allowed, and what it asks.

    Attributes:
        rule: what was charged under; its ``revision`` is that of the whole rule book, whatever was edited there.
        generation: of the bucket that was charged; ``None`` when the node has not heard of it yet.
        runs: what was allowed and is to be charged.
        asks: what is to be decided, in order, after that.
        refunds: charges that are to be given back before anything else.
    """

    rule: Limit
    generation: int | None
    runs: Sequence[Run] = ()
    asks: Sequence[Ask] = ()
    refunds: Sequence[Refund] = ()


class Settled(NamedTuple):
    """What an update made of a bucket, and which of its asks were granted. Those are charged."""

    shared: SharedState
    grants: tuple[bool, ...]


# equivalent: any second that is over does
YEAR_2025_S: Final = 1_735_689_600

STORE_TIME: Final = -1
"""In the place of a time: the store's own clock at that moment."""


OBSERVES: Final = 4
"""Beside ``peek`` of a check that is one with others: its denial denies no other."""


class StoreCheck(NamedTuple):
    """A check that a bucket itself is to decide: the first one of a node that does not know it, or under ``strict``.

    ``peek`` also tells which checks are one, where the store decides them together.
    """

    name: bytes
    rule: Limit
    now_us: int
    cost: int
    peek: int


Met: TypeAlias = tuple[Outcome, SharedState]
"""The outcome of a first check, without a state, and the bucket as the store has it then; a missing one is full."""


def standing(shared: SharedState, rule: Limit) -> tuple[int, ...]:
    """By what states of one bucket are ordered: the higher one is the later one in the life of the bucket.

    At the same latest time, a charge leaves more spent, and a refund less but more refunded.
    """
    latest_us, spent = ACCOUNTS[rule.algorithm].standing(shared.state)
    return (*shared[:2], latest_us, shared.refunded, spent)


def refund_of(
    shared: SharedState, rule: Limit, tokens: int, *, at_us: int | None = None, later: int = 0
) -> Refund:
    """Return what gives a charge back that the store made just before a state of a bucket.

    ``later`` tokens were charged between the charge, which was not before ``at_us``, and that state; none unless given.
    """
    account = ACCOUNTS[rule.algorithm]
    if at_us is None:
        at_us, _ = account.standing(shared.state)
    spent = account.spent(shared.state, rule) - later
    return Refund(*shared[:2], at_us, tokens, spent, shared.refunded)


def refunded(shared: SharedState, rule: Limit, refunds: Sequence[Refund]) -> SharedState:
    """Return a bucket after refunds; of those, charges of another generation or revision are not given back."""
    state, total = shared.state, shared.refunded
    for refund in refunds:
        already = total - refund.refunded
        # Fewer were given back than before the charge: the store has lost it.
        if refund[:2] == shared[:2] and already >= 0:
            state, tokens = ACCOUNTS[rule.algorithm].refunded(state, rule, refund, already)
            total += tokens
    return shared._replace(state=state, refunded=total)


def generation_at(now_us: int) -> int:
    """The least generation of a bucket that is reset now: seconds since 2025.

    The next after what is stored would come twice where the store has lost the last: a node that remembers it takes
    the bucket that was made full for an older state of its own.
    """
    return max(0, now_us // US_PER_S - YEAR_2025_S)


def overdrawn(shared: SharedState, rule: Limit) -> int:
    """Tokens by which a bucket was overdrawn at its latest spend: what the nodes have allowed too much between them."""
    return max(0, _used_at_most(shared, rule) - shared.capacity)


def overdrawn_by_edit(before: SharedState, shared: SharedState, rule: Limit) -> int:
    """How much of what :func:`overdrawn` says was allowed rightly, ``before`` the capacity was lowered."""
    if before.capacity <= shared.capacity:
        return 0
    account = ACCOUNTS[rule.algorithm]
    ruling = replace(rule, limit=shared.limit, burst=shared.burst)
    latest_us = account.standing(shared.state)[0]
    # What the store has cut off at the edit is not there any more; of a log, what has not left its window is.
    left = account.capped(before.state, ruling)
    return max(0, account.used(left, ruling, latest_us) - shared.capacity)


def has_plenty(shared: SharedState, rule: Limit) -> bool:
    """Whether at least half of the capacity was left even at the latest spend, and so at any time since."""
    return 2 * _used_at_most(shared, rule) <= min(shared.capacity, rule.capacity)


def _used_at_most(shared: SharedState, rule: Limit) -> int:
    """Tokens that were missing at the latest spend; later there are fewer."""
    account = ACCOUNTS[rule.algorithm]
    latest_us = account.standing(shared.state)[0]
    return account.used(shared.state, rule, latest_us)
