"""The store's side of the ledger in Python, for the simulation and as the reference of the Lua scripts. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from ratelimitd.cluster.packed import generation_of, pack
from ratelimitd.ledger.accounts import ACCOUNTS, BucketState, Run
from ratelimitd.ledger.protocol import Batch, Reply
from ratelimitd.ledger.shared_state import (
    FirstResult,
    Settled,
    SharedState,
    StoreCheck,
    Update,
    refunded,
)
from ratelimitd.model import Limit


def settle(stored: SharedState | None, update: Update) -> Settled:
    """Give back what it asks to, charge what a node has allowed, then decide what it asks.

    Spends of an older generation were forgotten by a reset, so they are dropped. Those of a newer one have met a store
    that has lost the reset, or everything: they begin the bucket anew.
    """
    rule, account = update.rule, ACCOUNTS[update.rule.algorithm]
    generation = update.generation
    if stored is None or (generation is not None and generation > stored.generation):
        stored = SharedState(generation or 0, rule.revision, rule.limit, burst=rule.burst)
    runs = update.runs if generation in {None, stored.generation} else ()
    state = stored.state
    if rule.revision >= stored.revision:
        # Most edits are of other rules; only a new limit or burst forgives anything.
        state = state if _is_of(stored, rule) else account.capped(state, rule)
        stored = stored._replace(
            revision=rule.revision, limit=rule.limit, burst=rule.burst, state=state
        )
    ruling = ruling_of(stored, rule)
    if update.refunds:
        stored = refunded(stored, ruling, update.refunds)
        state = stored.state
    if runs:
        if rule.revision < stored.revision and not _is_of(stored, rule):
            # Who spent under an older rule could not know the new one: that takes what there is, and owes nothing.
            runs = fitting(state, ruling, runs)
        state = account.charged(state, ruling, runs) if runs else state
    grants = []
    for at_us, cost in update.asks:
        outcome = account.judge(state, ruling, at_us, cost)
        grants.append(outcome[0])
        state = outcome[5]
    return Settled(stored._replace(state=state), tuple(grants))


def ruling_of(shared: SharedState, rule: Limit) -> Limit:
    """Return the rule as the bucket knows it."""
    if _is_of(shared, rule):
        return rule
    return replace(rule, limit=shared.limit, burst=shared.burst)


def _is_of(shared: SharedState, rule: Limit) -> bool:
    return (shared.limit, shared.burst) == (rule.limit, rule.burst)


def first_check(stored: SharedState | None, check: StoreCheck) -> FirstResult:
    """Decide a first check.

    A peek changes nothing, and a denial nothing but the limit, when it comes under a newer one: those who have not
    heard of that learn it from the bucket, and while all who have are denied nothing is spent that would tell it.
    """
    rule = check.rule
    shared = settle(stored, Update(rule, None)).shared
    ruling = ruling_of(shared, rule)
    outcome = ACCOUNTS[rule.algorithm].judge(shared.state, ruling, check.now_us, check.cost)
    if outcome[0] and not check.peek:
        shared = shared._replace(state=outcome[5])
    elif stored is not None and (check.peek or _is_of(stored, ruling)):
        shared = stored
    return (*outcome[:5], None), shared


def fitting(state: BucketState, rule: Limit, runs: Sequence[Run]) -> Sequence[Run]:
    """The first of ``runs``, as far as they fit into the bucket."""
    room = rule.capacity - ACCOUNTS[rule.algorithm].used(state, rule, runs[-1][0])
    fitting = []
    for at_us, tokens in runs:
        if room > 0:
            fitting.append((at_us, min(tokens, room)))
            room -= tokens
    return fitting


def reset(stored: SharedState | None, rule: Limit, least: int = 0) -> SharedState:
    """A full bucket of the next generation, and of ``least`` at least; see :func:`generation_at`."""
    generation = 0 if stored is None else stored.generation
    return SharedState(max(generation + 1, least), rule.revision, rule.limit, burst=rule.burst)


def updates_of(batch: Batch) -> dict[bytes, Update]:
    """All updates of a batch, by key; a cold spend is one, too."""
    return {
        **batch.updates,
        **{
            key: Update(spent.rule, generation_of(spent.base), spent.runs())
            for key, spent in batch.cold.items()
        },
    }


class Ledger:
    """The store's side: the buckets, and of each sender the last reply.

    Attributes:
        buckets: by key.
    """

    __slots__ = ("_replies", "buckets")

    def __init__(self) -> None:
        self.buckets: dict[bytes, SharedState] = {}
        self._replies: dict[str, Reply] = {}

    def apply(self, batch: Batch) -> Reply | None:
        """Apply a batch once; ``None`` for one that is older than the last of its sender.

        A sender goes on to the next number when it has the reply, so that a gap tells only that the store has lost
        batches that it had acknowledged, as a failover may: what it has not seen is new to it.
        """
        last = self._replies.get(batch.sender)
        if last is not None and batch.number <= last.number:
            return last if batch.number == last.number else None
        settled = {}
        for key, update in updates_of(batch).items():
            settled[key] = one = settle(self.buckets.get(key), update)
            self.buckets[key] = one.shared
        cold = {key: pack(settled.pop(key).shared) for key in batch.cold}
        reply = self._replies[batch.sender] = Reply(batch.number, settled, cold)
        return reply

    def first_check(self, check: StoreCheck) -> FirstResult:
        """Decide a first check. It has no number, so it must not be sent twice: it would be charged twice.

        A bucket that is not there is made only for what is charged.
        """
        stored = self.buckets.get(check.name)
        outcome, shared = first_check(stored, check)
        if stored is not None or (outcome[0] and not check.peek):
            self.buckets[check.name] = shared
        return outcome, shared
