"""One node's side of one bucket: its view, on which it decides, and what it has still to settle.

Never does I/O and never reads a clock. The view is the base, the last state that came from the store, less what the
node has spent since. The node decides on it while what it has not settled stays within its share of what is left; a
bucket that is closer to its limit is decided by the store.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

from ratelimitd.ledger.accounts import ACCOUNTS, BucketState
from ratelimitd.ledger.shared_state import Ask, SharedState, Update, standing
from ratelimitd.ledger.spends import Spends
from ratelimitd.model import Outcome, Rule

SHARES_OF_REMAINING: Final = 2
"""A node may hold back 1/2N of what is left: all nodes together half of it."""

SHARES_OF_LIMIT: Final = 100
"""Or 1/100N of the limit, whatever is left: the smallest excess that is worth no round trip."""

STALE_US: Final = 1_000_000
"""A batch that was frozen longer ago has met an outage."""


class Terms(NamedTuple):
    """What a node knows when it is asked: the time on its clock in µs, and how many nodes are alive, with itself."""

    now_us: int
    members: int


class View:
    """A bucket as one node sees it.

    Attributes:
        rule: in force on this node.
        base: the latest state that came from the store, ``None`` while it has none of this bucket.
        unsent: what was allowed since the last batch was frozen.
        in_flight: what that batch carries.
        asks: checks that wait for the next batch.
        forgiven: tokens that were allowed and are charged nowhere, since the view began.
    """

    __slots__ = (
        "_account",
        "_state",
        "asked_in_flight",
        "asked_tokens",
        "asks",
        "base",
        "forgiven",
        "generation",
        "in_flight",
        "rule",
        "unsent",
    )

    def __init__(self, rule: Rule, base: SharedState | None) -> None:
        self.rule = rule
        self._account = ACCOUNTS[rule.algorithm]
        self.base = base
        self.generation = None if base is None else base.generation
        self.unsent = Spends()
        self.in_flight = Spends()
        self.asks: list[Ask] = []
        self.forgiven = 0
        self.asked_tokens = self.asked_in_flight = 0
        self._state: BucketState = None
        self._recompute()

    # Deciding

    def check(self, terms: Terms, cost: int) -> Outcome | None:
        """Decide one check on the spot; ``None`` if the store is to decide it, which :meth:`ask` brings about."""
        outcome = self._judged(terms.now_us, cost)
        if not outcome[0]:
            return outcome
        if self._within_share(terms, cost):
            self._spend(outcome, cost)
            return outcome
        if not self.asked_tokens:
            return None
        # Those that wait will take what is left, or others have: no more are to wait than there is left for.
        asked = ((terms.now_us, self.asked_tokens),)
        crowded = self._account.charged(self._state, self.rule, asked)
        outcome = self._account.judge(crowded, self.rule, terms.now_us, cost)
        return None if outcome[0] else (*outcome[:5], self._state)

    def check_alone(self, now_us: int, cost: int) -> Outcome:
        """Decide one check by the view, for the store has not answered in time."""
        outcome = self._judged(now_us, cost)
        if outcome[0]:
            self._spend(outcome, cost)
        return outcome

    def ask(self, now_us: int, cost: int) -> Ask:
        """Let the next batch take a check to the store, to be decided as of ``now_us``."""
        ask = Ask(max(now_us, self._account.standing(self._state)[0]), cost)
        self.asks.append(ask)
        self.asked_tokens += cost
        return ask

    def withdraw(self, ask: Ask) -> bool:
        """Take back what no batch has taken yet, for it was decided otherwise; false: one has."""
        if not any(one is ask for one in self.asks):
            return False
        self.asks = [one for one in self.asks if one is not ask]
        self.asked_tokens -= ask.cost
        return True

    def is_due(self, terms: Terms) -> bool:
        """Whether the next batch should not wait for its time: the share is used up, or somebody waits."""
        if self.asks:
            return True
        unsent = self.unsent.tokens
        return (
            unsent >= 1
            and unsent * SHARES_OF_REMAINING * terms.members >= self._remaining(terms.now_us)
            and unsent * SHARES_OF_LIMIT * terms.members >= self.rule.limit
        )

    # Settling

    def freeze(self) -> Update:
        """What the next batch says of this bucket; from now on it is in flight. Nothing else may be."""
        self.in_flight, self.unsent = self.unsent, Spends()
        asks, self.asks = tuple(self.asks), []
        self.asked_in_flight = sum(ask.cost for ask in asks)
        return Update(self.rule, self.generation, self.in_flight.runs(self.rule), asks)

    def acknowledge(self, shared: SharedState) -> None:
        """The batch has arrived, and this is the state that it left."""
        self.asked_tokens -= self.asked_in_flight
        self.asked_in_flight = 0
        if self.generation is None or shared.generation <= self.generation:
            self.in_flight = Spends()
        self.hear(shared)

    def hear(self, shared: SharedState) -> None:
        """A state came from the store. Of two the later one is the base, in whatever order they come."""
        if self.base is None or standing(shared, self.rule) > standing(self.base, self.rule):
            self.base = shared
        if shared.revision > self.rule.revision:
            # Others have heard of an edit before us, and this state is what their limit made of it.
            self.edit(replace(self.rule, limit=shared.limit, revision=shared.revision))
        if self.generation is None:
            self.generation = shared.generation
        elif shared.generation > self.generation:
            # The spends were of a bucket that is no more; the store drops what is in flight of them, too.
            self.generation = shared.generation
            self.forgiven += self.in_flight.tokens + self.unsent.tokens
            self.in_flight, self.unsent = Spends(), Spends()
        self._recompute()

    def forgive_outage(self, now_us: int) -> None:
        """The store is back after an outage: settle no more than the view still lacks.

        To be called at the first word from it and before anything of it is adopted. What was refilled meanwhile was
        spent rightly, and what all nodes spent beside each other cannot be taken back: charged in full, it would lock
        the caller out for as many windows as there are nodes.
        """
        lacking = self._account.used(self._state, self.rule, now_us) - self.in_flight.tokens
        self.forgiven += self.unsent.remove(self.unsent.tokens - max(0, lacking))
        self._recompute()

    def pay(self, tokens: int) -> None:
        """A grant came after the view had decided and charged the check: the store has charged it, too."""
        # What is no longer to be settled was forgiven, and is charged after all.
        self.forgiven -= tokens - self.unsent.remove(tokens)
        self._recompute()

    def edit(self, rule: Rule) -> None:
        """A newer rule is in force: no more is settled than it allows."""
        self.rule = rule
        self.forgiven += self.unsent.remove(self.unsent.tokens - rule.limit)
        self._recompute()

    # Inside

    def _judged(self, now_us: int, cost: int) -> Outcome:
        return self._account.judge(self._state, self.rule, now_us, cost)

    def _spend(self, outcome: Outcome, cost: int) -> None:
        self._state = outcome[5]
        self.unsent.add(self._account.standing(self._state)[0], cost)

    def _remaining(self, now_us: int) -> int:
        """Tokens that the base has left at ``now_us``."""
        if self.base is None:
            return self.rule.limit
        return max(0, self.rule.limit - self._account.used(self.base.state, self.rule, now_us))

    def _within_share(self, terms: Terms, cost: int) -> bool:
        planned = self.in_flight.tokens + self.unsent.tokens + self.asked_tokens + cost
        planned *= terms.members
        return (
            planned * SHARES_OF_REMAINING <= self._remaining(terms.now_us)
            or planned * SHARES_OF_LIMIT <= self.rule.limit
        )

    def _recompute(self) -> None:
        state = None if self.base is None else self.base.state
        if self.base is not None and self.base.revision < self.rule.revision:
            state = self._account.capped(state, self.rule)
        for spends in (self.in_flight, self.unsent):
            runs = spends.runs_for_view(self.rule)
            if runs:
                state = self._account.charged(state, self.rule, runs)
        self._state = state
