"""A bucket as the shared state holds it, and what a node's update does to it. Pure.

The script that runs in the store does the same; this is what it is tested against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple, TypeAlias

from ratelimitd.ledger.accounts import ACCOUNTS, BucketState, Run
from ratelimitd.model import US_PER_S, Outcome, Rule


class SharedState(NamedTuple):
    """A bucket in the store.

    ``generation`` is 0 until the first reset and grows with each. ``revision`` is that of the newest rule book under
    which the bucket was charged, ``limit`` what its rule says there. ``state`` is the algorithm's; ``None`` is a full
    bucket.
    """

    generation: int
    revision: int
    limit: int
    state: BucketState = None


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
    """

    rule: Rule
    generation: int | None
    runs: Sequence[Run] = ()
    asks: Sequence[Ask] = ()


class Settled(NamedTuple):
    """What an update made of a bucket, and which of its asks were granted. Those are charged."""

    shared: SharedState
    grants: tuple[bool, ...]


YEAR_2025_S: Final = 1_735_689_600

STORE_TIME: Final = -1
"""In the place of a time: the store's own clock at that moment."""


class StoreCheck(NamedTuple):
    """A check that a bucket itself is to decide: the first one of a node that does not know it, or under ``strict``."""

    name: bytes
    rule: Rule
    now_us: int
    cost: int
    peek: bool


Met: TypeAlias = tuple[Outcome, SharedState]
"""The outcome of a first check, without a state, and the bucket as the store has it then; a missing one is full."""


def standing(shared: SharedState, rule: Rule) -> tuple[int, ...]:
    """By what states of one bucket are ordered: the higher one is the later one in the life of the bucket."""
    return (*shared[:2], *ACCOUNTS[rule.algorithm].standing(shared.state))


def settle(stored: SharedState | None, update: Update) -> Settled:
    """Charge what a node has allowed, then decide what it asks.

    Spends of an older generation were forgotten by a reset, so they are dropped. Those of a newer one have met a store
    that has lost the reset, or everything: they begin the bucket anew.
    """
    rule, account = update.rule, ACCOUNTS[update.rule.algorithm]
    generation = update.generation
    if stored is None or (generation is not None and generation > stored.generation):
        stored = SharedState(generation or 0, rule.revision, rule.limit)
    runs = update.runs if generation in {None, stored.generation} else ()
    state = stored.state
    if rule.revision > stored.revision:
        # Most edits are of other rules; only a new limit forgives anything.
        state = state if rule.limit == stored.limit else account.capped(state, rule)
        stored = stored._replace(revision=rule.revision, limit=rule.limit)
    ruling = rule if rule.limit == stored.limit else replace(rule, limit=stored.limit)
    if runs:
        if rule.revision < stored.revision and rule.limit != stored.limit:
            # Who spent under an older rule could not know the new one: that takes what there is, and owes nothing.
            runs = _fitting(state, ruling, runs)
        state = account.charged(state, ruling, runs) if runs else state
    grants = []
    for at_us, cost in update.asks:
        outcome = account.judge(state, ruling, at_us, cost)
        grants.append(outcome[0])
        state = outcome[5]
    return Settled(stored._replace(state=state), tuple(grants))


def first_check(stored: SharedState | None, check: StoreCheck) -> Met:
    """Decide a first check.

    A peek changes nothing, and a denial nothing but the limit, when it comes under a newer one: those who have not
    heard of that learn it from the bucket, and while all who have are denied nothing is spent that would tell it.
    """
    rule = check.rule
    shared = settle(stored, Update(rule, None)).shared
    ruling = rule if rule.limit == shared.limit else replace(rule, limit=shared.limit)
    outcome = ACCOUNTS[rule.algorithm].judge(shared.state, ruling, check.now_us, check.cost)
    if outcome[0] and not check.peek:
        shared = shared._replace(state=outcome[5])
    elif stored is not None and (check.peek or shared.limit == stored.limit):
        shared = stored
    return (*outcome[:5], None), shared


def _fitting(state: BucketState, rule: Rule, runs: Sequence[Run]) -> Sequence[Run]:
    """The first of ``runs``, as far as they fit into the bucket."""
    room = rule.limit - ACCOUNTS[rule.algorithm].used(state, rule, runs[-1][0])
    fitting = []
    for at_us, tokens in runs:
        if room > 0:
            fitting.append((at_us, min(tokens, room)))
            room -= tokens
    return fitting


def reset(stored: SharedState | None, rule: Rule, least: int = 0) -> SharedState:
    """A full bucket of the next generation, and of ``least`` at least; see :func:`generation_at`."""
    generation = 0 if stored is None else stored.generation
    return SharedState(max(generation + 1, least), rule.revision, rule.limit)


def generation_at(now_us: int) -> int:
    """The least generation of a bucket that is reset now: seconds since 2025.

    The next after what is stored would come twice where the store has lost the last: a node that remembers it takes
    the bucket that was made full for an older state of its own.
    """
    return max(0, now_us // US_PER_S - YEAR_2025_S)


def overdrawn(shared: SharedState, rule: Rule) -> int:
    """Tokens by which a bucket was overdrawn at its latest spend: what the nodes have allowed too much between them."""
    return max(0, _used_at_most(shared, rule) - shared.limit)


def overdrawn_by_edit(before: SharedState, shared: SharedState, rule: Rule) -> int:
    """How much of what :func:`overdrawn` says was allowed rightly, ``before`` the limit was lowered."""
    if before.limit <= shared.limit:
        return 0
    account = ACCOUNTS[rule.algorithm]
    ruling = replace(rule, limit=shared.limit)
    latest_us = account.standing(shared.state)[0]
    # What the store has cut off at the edit is not there any more; of a log, what has not left its window is.
    left = account.capped(before.state, ruling)
    return max(0, account.used(left, ruling, latest_us) - shared.limit)


def has_plenty(shared: SharedState, rule: Rule) -> bool:
    """Whether at least half of the limit was left even at the latest spend, and so at any time since."""
    return 2 * _used_at_most(shared, rule) <= min(shared.limit, rule.limit)


def _used_at_most(shared: SharedState, rule: Rule) -> int:
    """Tokens that were missing at the latest spend; later there are fewer."""
    account = ACCOUNTS[rule.algorithm]
    latest_us = account.standing(shared.state)[0]
    return account.used(shared.state, rule, latest_us)
