"""One node's side of one bucket: the view by which it decides, and its unsettled spends.

Does no I/O and reads no clock. The view is the base, the latest state from the store, less the node's spends since. The
node decides on it while its unsettled spends stay within its share of the remaining tokens; a bucket closer to its
limit is decided by the store.

A local decision must cost no more than one in a node's own table, so the share is cached. The remaining tokens of the
base only grow until a newer base arrives, so the share is recomputed only when the cached one is too small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

from ratelimitd.algorithms import Decide
from ratelimitd.ledger.accounts import ACCOUNTS, BucketState, Refund, Run
from ratelimitd.ledger.protocol import ColdSpend, Spends
from ratelimitd.ledger.shared_state import Ask, SharedState, Update, standing
from ratelimitd.model import COST_EXCEEDS_LIMIT, Limit, Outcome

SHARES_OF_REMAINING: Final = 2
"""A node's unsettled tokens may be 1/(2N) of the remaining ones: half of them for all nodes together."""

SHARES_OF_LAST_HALF: Final = 4
"""1/(4N) once no more than half of the capacity is left: the rest is used up soon, and the store may grant it to others
before a node settles its share. With callers on all nodes at once, the excess was up to 4 % of the limit per window
with 1/(2N), and is below 1 % with 1/(4N) (ADR 0023)."""

SHARES_OF_CAPACITY: Final = 100
"""At least 1/(100N) of the capacity, whatever is left: a smaller excess is not worth a round trip."""

TIGHT_SHARE_PERCENT: Final = 9
"""With tight shares, the unsettled tokens of all nodes are at most this part of the capacity; a tenth with the 1 % that
is always allowed."""

STALE_US: Final = 1_000_000
"""Age of a batch in flight that indicates an outage."""

LEAST_PENDING_RUNS: Final = 1_000
"""Runs of unsent spends above which refilled ones are dropped."""

MAX_REFUNDS: Final = 256
"""Limit of refunds of a bucket in one batch. Their cost for a log is quadratic: 500 block the store for 0.1 s, 2,000
for 2 s."""

_UNKNOWN: Final = -1

_NO_ASKS: Final[list[Ask]] = []
"""Never modified; saves a list of 56 bytes for most views, which have no asks."""


class LocalView:
    """A bucket as one node sees it.

    Attributes:
        rule: in force on this node; its ``revision`` is that of the whole rule book, or of a newer state of the store.
        base: the latest state of the store, ``None`` for a full bucket.
        unsent: spends since the last batch.
        in_flight: the runs of spends in the batch in flight.
        in_flight_tokens: their sum.
        asks: checks that wait for the next batch.
        refunds: charges of the store that the next batch gives back.
        reserved: tokens of checks that wait for other buckets, and are within the share of this one.
        forgiven: allowed tokens that are never charged. The caller that counts them resets it to 0.
        has_newer_limit: the limit is newer than that of the store's last state. Any update corrects the store; a denial
            causes none, so that one must be sent.
        shared_out: lower bound of the unsettled tokens allowed to all nodes together; -1 until computed.
        false_positives: denied checks that the next state of the store would have allowed. The caller that counts them
            resets it to 0.
    """

    shares: ClassVar[float] = 1 / SHARES_OF_REMAINING + 1 / SHARES_OF_CAPACITY
    """Upper bound of the unsettled tokens of all nodes together, as a part of the capacity."""

    __slots__ = (
        "_account",
        "_decide",
        "_denials",
        "_denied_at_us",
        "_denied_cost",
        "_is_contended",
        "_latest_us",
        "_state",
        "_trim_at",
        "asked_in_flight",
        "asked_tokens",
        "asks",
        "base",
        "false_positives",
        "forgiven",
        "generation",
        "has_newer_limit",
        "in_flight",
        "in_flight_tokens",
        "refunds",
        "reserved",
        "rule",
        "shared_out",
        "unsent",
    )

    def __init__(self, rule: Limit, base: SharedState | None) -> None:
        self.rule = rule
        self._account = ACCOUNTS[rule.algorithm]
        self.base = base
        self.generation = None if base is None else base.generation
        self.unsent = Spends(rule)
        self.in_flight: Sequence[Run] = ()
        self.in_flight_tokens = 0
        self.asks = _NO_ASKS
        self.forgiven = self.false_positives = 0
        self.asked_tokens = self.asked_in_flight = self.reserved = 0
        self.refunds: Sequence[Refund] = ()
        self._trim_at = LEAST_PENDING_RUNS
        self._is_contended = False
        self._denials = self._denied_at_us = self._denied_cost = 0
        self._state: BucketState
        self._latest_us: int
        self.has_newer_limit: bool
        self.shared_out: int
        self._decide: Decide
        if base is not None:
            self._learn(base)
        self._recompute()

    @property
    def is_clean(self) -> bool:
        """Whether nothing is unsettled, so that a new view of the same rule and base is equivalent."""
        return not (
            self.unsent.tokens or self.in_flight_tokens or self.asked_tokens or self.refunds
        )

    @staticmethod
    def share_of(rule: Limit, remaining: int) -> int:
        """Return the unsettled tokens allowed to all nodes together, with ``remaining`` tokens left."""
        capacity = rule.capacity
        shares = SHARES_OF_LAST_HALF if 2 * remaining <= capacity else SHARES_OF_REMAINING
        return max(remaining // shares, capacity // SHARES_OF_CAPACITY)

    # Deciding

    def check(self, now_us: int, members: int, cost: int) -> Outcome | None:
        """Decide one check now; ``None`` if the store has to decide it, by :meth:`ask`.

        ``now_us`` is the node's clock, or the caller's time; ``members`` the number of live nodes, including this one.
        """
        # Through a local name: calling a function in a slot as a method is slow.
        decide = self._decide
        outcome = decide(self._state, self.rule, now_us, cost)
        if not outcome[0]:
            return self._denied(outcome, now_us, cost)
        unsent = self.unsent
        planned = (self.in_flight_tokens + unsent.tokens + self.asked_tokens + cost) * members
        if planned > self.shared_out and planned > self._work_out_share(now_us):
            return self._unless_crowded(now_us, members, cost)
        self._state = outcome[5]
        # A call costs 60 ns, a comparison 15. equivalent: >= assigns the value it has
        if now_us > self._latest_us:  # noqa: PLR1730
            self._latest_us = now_us
        unsent.add(self._latest_us, cost)
        return outcome

    def reserve(self, now_us: int, members: int, cost: int) -> Outcome | None:
        """Decide as :meth:`check` does, and reserve the tokens of an allowed check until :meth:`release`.

        They count towards the share, but are not spent, because other buckets of the check may deny it.
        """
        outcome = self.peek(now_us, cost)
        if not outcome[0]:
            return self._denied(outcome, now_us, cost)
        planned = (self.in_flight_tokens + self.unsent.tokens + self.asked_tokens + cost) * members
        if planned > self.shared_out and planned > self._work_out_share(now_us):
            return self._unless_crowded(now_us, members, cost)
        self.hold(cost)
        return outcome

    def hold(self, cost: int) -> None:
        """Reserve tokens, without deciding a check."""
        self.asked_tokens += cost
        self.reserved += cost

    def release(self, cost: int) -> None:
        """End a reservation; if all buckets allow the check, :meth:`check_alone` then spends its tokens."""
        self.asked_tokens -= cost
        self.reserved -= cost

    def give_back(self, refund: Refund) -> bool:
        """Give back a charge of the store with the next batch; false if :data:`MAX_REFUNDS` wait for it."""
        if len(self.refunds) >= MAX_REFUNDS:
            return False
        self.refunds = (*self.refunds, refund)
        return True

    def start_alone(self, now_us: int, members: int) -> None:
        """Begin with this node's part of a full bucket, because the store is unreachable and others may use theirs.

        The parts of the others count as spent, are never settled, and are dropped with the next state of the store.
        """
        capacity = self.rule.capacity
        of_others = capacity - -(-capacity // members)
        if of_others:
            self._state = self._account.charged(None, self.rule, [(now_us, of_others)])

    def end_alone(self) -> None:
        """Drop the parts of the others, because the store has the bucket full."""
        if self.base is None and self.is_clean:
            self._recompute()

    def check_alone(self, now_us: int, cost: int) -> Outcome:
        """Decide one check by the view, because the store did not answer in time."""
        outcome = self.presume(now_us, cost)
        if outcome[0]:
            self._latest_us = max(self._latest_us, now_us)
            self.unsent.add(self._latest_us, cost)
            if len(self.unsent) > self._trim_at:
                self._trim(now_us)
        return outcome

    def presume(self, now_us: int, cost: int) -> Outcome:
        """Decide one check that the store may have charged: it is not settled, and ends with the store's next state."""
        outcome = self.peek(now_us, cost)
        if not outcome[0]:
            return self._denied(outcome, now_us, cost)
        self._state = outcome[5]
        return outcome

    def peek(self, now_us: int, cost: int) -> Outcome:
        """Judge one check by the view, and charge nothing."""
        decide = self._decide
        return decide(self._state, self.rule, now_us, cost)

    def ask(self, now_us: int, cost: int) -> Ask:
        """Add a check to the next batch; the store decides it as of ``now_us``."""
        ask = Ask(max(now_us, self._latest_us), cost)
        if self.asks is _NO_ASKS:
            self.asks = []
        self.asks.append(ask)
        self.asked_tokens += cost
        return ask

    def withdraw(self, ask: Ask) -> bool:
        """Remove a check from the next batch; false if a batch in flight contains it."""
        for index, one in enumerate(self.asks):
            if one is ask:
                del self.asks[index]
                self.asked_tokens -= ask.cost
                return True
        return False

    def was_decided_alone(self, ask: Ask) -> None:
        """Stop counting a check in flight, because :meth:`check_alone` has allowed and counted it."""
        cost = min(ask.cost, self.asked_in_flight)  # none after the batch was abandoned
        self.asked_tokens -= cost
        self.asked_in_flight -= cost

    def is_due(self, now_us: int, members: int) -> bool:
        """Whether the next batch should be sent immediately: the share is used up, or a check waits."""
        if self.asks:
            return True
        unsent = self.unsent.tokens * members
        if unsent < self.shared_out or not unsent:
            return False
        return unsent >= self.share_of(self.rule, self._remaining(now_us))

    # Settling

    def resume(self, spent: ColdSpend, *, in_flight: bool) -> None:
        """Add a cold spend to this new view, which has no spends yet."""
        if in_flight:
            self.in_flight, self.in_flight_tokens = spent.runs(), spent.cost
        else:
            self.unsent.resume(spent.at_us, spent.cost, spent.refilled)
        self._recompute()

    def freeze(self) -> Update:
        """Return this bucket's update in the next batch, in flight from now on. No other may be in flight."""
        self.in_flight, self.in_flight_tokens = self.unsent.runs(), self.unsent.tokens
        self.unsent.begin(self.rule)
        self._trim_at = LEAST_PENDING_RUNS
        asks: Sequence[Ask] = ()
        if self.asks:
            asks, self.asks = tuple(self.asks), _NO_ASKS
        self.asked_in_flight = self.asked_tokens - self.reserved
        refunds, self.refunds = self.refunds, ()
        return Update(self.rule, self.generation, self.in_flight, asks, refunds)

    def acknowledge(self, shared: SharedState) -> None:
        """Adopt the state after the batch in flight was applied."""
        self.asked_tokens -= self.asked_in_flight
        self.asked_in_flight = 0
        if self.generation is None or shared.generation <= self.generation:
            self.in_flight, self.in_flight_tokens = (), 0
        self.adopt(shared)

    def abandon(self) -> int:
        """Drop the batch in flight, whose result is unknown; return its tokens."""
        lost = self.in_flight_tokens
        self.in_flight, self.in_flight_tokens = (), 0
        self.asked_tokens -= self.asked_in_flight
        self.asked_in_flight = 0
        self._recompute()
        return lost

    def adopt(self, shared: SharedState) -> None:
        """Adopt a state of the store. The latest becomes the base, in any order of arrival."""
        if self.base is None or standing(shared, self.rule) > standing(self.base, self.rule):
            self.base = shared
        self._learn(shared)
        if self.generation is None:
            self.generation = shared.generation
        elif shared.generation > self.generation:
            # The bucket was reset: drop its spends, as the store drops those in flight.
            self.generation = shared.generation
            self.forgiven += self.in_flight_tokens + self.unsent.tokens
            self.in_flight, self.in_flight_tokens = (), 0
            self.unsent.begin(self.rule)
        self._recompute()
        if self._denials:
            self._judge_denials()

    def forgive_outage(self, now_us: int) -> None:
        """After an outage, forgive spends that have been refilled meanwhile.

        Called on the first reply, before its states are adopted. Spends of refilled tokens were correct, and parallel
        spends of several nodes cannot be undone. Charged in full, they would lock the caller out for as many windows as
        there are nodes.
        """
        lacking = self._account.used(self._state, self.rule, now_us) - self.in_flight_tokens
        excess = self.unsent.tokens - max(0, lacking)
        # Few views have an excess. The oldest first: they have left the window or the log.
        if excess > 0:
            self.forgiven += self.unsent.remove_oldest(excess)
            self._recompute()

    def record_grants(self, grants: Sequence[bool]) -> None:
        """Record whether the store denied any check of a batch."""
        self._is_contended = not all(grants)

    def pay(self, tokens: int) -> None:
        """Correct a double charge: the view had charged the check before the store's late grant arrived."""
        # Tokens that are no longer unsettled were forgiven, but are charged after all.
        self.forgiven -= tokens - self.unsent.remove_latest(tokens)
        self._recompute()

    def edit(self, rule: Limit) -> None:
        """Apply an edited rule; no more than its capacity is settled.

        If another rule was edited, only the revision changes. A book older than the current rule has no effect.
        """
        if rule.revision < self.rule.revision:
            return
        before, self.rule = self.rule, rule
        if (rule.limit, rule.burst) != (before.limit, before.burst):
            self.forgiven += self.unsent.remove_latest(self.unsent.tokens - rule.capacity)
            self._recompute()

    # Inside

    def _learn(self, shared: SharedState) -> None:
        """Adopt the limit and burst of a state that another node charged under a newer rule book."""
        if shared.revision > self.rule.revision:
            rule = replace(
                self.rule, limit=shared.limit, burst=shared.burst, revision=shared.revision
            )
            if rule.capacity < self.rule.capacity:
                self.forgiven += self.unsent.remove_latest(self.unsent.tokens - rule.capacity)
            self.rule = rule

    def _work_out_share(self, now_us: int) -> int:
        """Compute and cache the unsettled tokens allowed to all nodes together."""
        self.shared_out = self.share_of(self.rule, self._remaining(now_us))
        return self.shared_out

    def _remaining(self, now_us: int) -> int:
        """Return the tokens that the base has left at ``now_us``, negative if it is overdrawn."""
        if self.base is None:
            return self.rule.capacity
        return self.rule.capacity - self._account.used(self.base.state, self.rule, now_us)

    def _unless_crowded(self, now_us: int, members: int, cost: int) -> Outcome | None:
        """Return ``None`` if the waiting checks leave room for one more, else a denial.

        The waiting checks never exceed the tokens left. If the store denied a check of the last batch, the other nodes
        are assumed to have as many waiting.
        """
        if not self.asked_tokens:
            return None
        asked = ((now_us, self.asked_tokens * (members if self._is_contended else 1)),)
        crowded = self._account.charged(self._state, self.rule, asked)
        outcome = self._account.judge(crowded, self.rule, now_us, cost)
        return None if outcome[0] else self._denied((*outcome[:5], self._state), now_us, cost)

    def _denied(self, outcome: Outcome, now_us: int, cost: int) -> Outcome:
        """Record a denial until the store confirms it, and return it."""
        if outcome[4] is not COST_EXCEEDS_LIMIT:
            if not self._denials:
                self._denied_at_us, self._denied_cost = now_us, cost
            elif cost < self._denied_cost:
                self._denied_cost = cost
            self._denials += 1
        return outcome

    def _judge_denials(self) -> None:
        """Count the denials that the new state would have allowed: as many as fit, at the time of the first one.

        Tokens freed since then were not available, and are subtracted as if none of them had been spent.
        """
        at_us, rule, account = self._denied_at_us, self.rule, self._account
        room = rule.capacity - account.used(self._state, rule, at_us)
        # equivalent: with <= no tokens are freed in no time
        if room >= self._denied_cost and at_us < self._latest_us:
            room -= account.freed(rule, at_us, self._latest_us)
        self.false_positives += max(0, min(self._denials, room // self._denied_cost))
        self._denials = 0

    def _trim(self, now_us: int) -> None:
        """Bound unsettled spends in a long outage: forgive now those that the first reply would forgive."""
        self.forgive_outage(now_us)
        self._trim_at = max(LEAST_PENDING_RUNS, 2 * len(self.unsent))

    def _recompute(self) -> None:
        rule, account, base = self.rule, self._account, self.base
        state: Any = None
        self.has_newer_limit = False
        if base is not None:
            state = base.state
            if (base.limit, base.burst) != (rule.limit, rule.burst):
                state = account.capped(state, rule)
                # At the same revision the limit differs when an assignment to a plan has ended.
                self.has_newer_limit = rule.revision >= base.revision
        if self.in_flight:
            state = account.charged(state, rule, self.in_flight)
        if self.unsent.tokens:
            state = account.charged(state, rule, self.unsent.runs())
        self._state = state
        self._latest_us = account.standing(state)[0]
        self.shared_out = _UNKNOWN
        # An overdrawn state has its own decide function.
        self._decide = account.judge_of(state, rule)


class TightView(LocalView):
    """A view with tight shares: nodes together exceed a limit by less, and ask the store more often."""

    shares = TIGHT_SHARE_PERCENT / 100 + 1 / SHARES_OF_CAPACITY

    __slots__ = ()

    @staticmethod
    def share_of(rule: Limit, remaining: int) -> int:
        """Return the share of other views, at most :data:`TIGHT_SHARE_PERCENT` of the capacity."""
        return min(LocalView.share_of(rule, remaining), rule.capacity * TIGHT_SHARE_PERCENT // 100)
