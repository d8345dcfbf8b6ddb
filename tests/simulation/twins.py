"""Wrong variants of the ledger, each of which the invariants must detect."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from unittest import mock

from ratelimitd.ledger.accounts import ACCOUNTS
from ratelimitd.ledger.local_view import LocalView, TightView
from ratelimitd.ledger.protocol import Batch, Reply
from ratelimitd.ledger.shared_state import Settled, SharedState, generation_at, standing
from ratelimitd.model import Algorithm
from tests import ledger_model
from tests.ledger_model import Ledger, first_check, settle
from tests.simulation.first_checks import FirstChecks
from tests.simulation.node import Node
from tests.simulation.scenario import calm_scenario, draining_scenario
from tests.simulation.world import ANSWER_US, World

# Of the view


class NoShare(LocalView):
    """Decides everything on its view."""

    def _work_out_share(self, _now_us):
        return sys.maxsize


class LooseShares(LocalView):
    """Declares tight shares, but uses others."""

    shares = TightView.shares


class AsksDoNotCount(LocalView):
    """Spends tokens for which checks wait."""

    def ask(self, now_us, cost):
        ask = super().ask(now_us, cost)
        self.asked_tokens = 0
        return ask

    def withdraw(self, ask):
        self.asked_tokens = ask.cost
        withdrawn = super().withdraw(ask)
        self.asked_tokens = 0
        return withdrawn


class ForgetsWhatIsInFlight(LocalView):
    """Counts sent spends as settled."""

    def freeze(self):
        update = super().freeze()
        self.in_flight, self.in_flight_tokens = (), 0
        self._recompute()
        return update


class OwnViewTakesPart(NoShare):
    """As specified: decide on the current state; the later of two states, including its own, wins.

    Its own clock is always later.
    """

    def adopt(self, shared):
        rule = self.rule
        generation = self.generation or 0
        own = SharedState(generation, rule.revision, rule.limit, self._state, rule.burst)
        if standing(shared, self.rule) > standing(own, self.rule):
            super().adopt(shared)


class ForgivesNothing(LocalView):
    """Settles all spends of an outage."""

    def forgive_outage(self, _now_us):
        pass


class PaysTwice(LocalView):
    """Charges a late grant in addition to the view's charge."""

    def pay(self, _tokens):
        pass


class NeverWithdraws(LocalView):
    """Leaves an ask in the batch that the view has decided."""

    def withdraw(self, _ask):
        return False


class KnowsNoGenerations(LocalView):
    """Treats the state after a reset like any other, and settles earlier spends."""

    def adopt(self, shared):
        super().adopt(shared._replace(generation=0))

    def acknowledge(self, shared):
        super().acknowledge(shared._replace(generation=0))

    def freeze(self):
        return super().freeze()._replace(generation=1_000)


class EditTrimsNothing(LocalView):
    """Settles all spends under the higher limit after it was lowered."""

    def edit(self, rule):
        if rule.revision >= self.rule.revision:
            self.rule = rule
            self._recompute()

    def _learn(self, shared):
        if shared.revision > self.rule.revision:
            self.rule = replace(
                self.rule, limit=shared.limit, burst=shared.burst, revision=shared.revision
            )


class SeesNoBurst(LocalView):
    """Takes the limit for the capacity."""

    def __init__(self, rule, base):
        super().__init__(replace(rule, burst=0), base and base._replace(burst=0))

    def edit(self, rule):
        super().edit(replace(rule, burst=0))

    def adopt(self, shared):
        super().adopt(shared._replace(burst=0))


class TellsNoEdit(LocalView):
    """Does not send a new limit to the store after a denial."""

    def _recompute(self):
        super()._recompute()
        self.has_newer_limit = False


# Of the store


class NoNumbers(Ledger):
    """Applies every batch that arrives."""

    def apply(self, batch: Batch) -> Reply:
        self._replies.clear()
        reply = super().apply(batch)
        assert reply is not None
        return reply


class MeetsForNothing(Ledger):
    """Decides a first check as if it were a peek."""

    def first_check(self, check):
        return first_check(self.buckets.get(check.name), check)


class OtherSettlement(Ledger):
    """Replaces the settlement."""

    def settle(self, stored, update):
        raise NotImplementedError

    def apply(self, batch: Batch) -> Reply | None:
        with mock.patch.object(ledger_model, "settle", self.settle):
            return super().apply(batch)


class LastWriterWins(OtherSettlement):
    """Replaces the stored state by that of the node."""

    def settle(self, _stored, update):
        return settle(None, update)


class NeverOverdrawn(OtherSettlement):
    """Drops spends that do not fit, as a balance that stops at zero."""

    def settle(self, stored, update):
        settled = settle(stored, update)
        account = ACCOUNTS[update.rule.algorithm]
        rule = ledger_model.ruling_of(settled.shared, update.rule)
        return settled._replace(
            shared=settled.shared._replace(state=account.capped(settled.shared.state, rule))
        )


class ChargesOnArrival(OtherSettlement):
    """Charges all spends at the time of the last one."""

    def settle(self, stored, update):
        tokens = sum(tokens for _, tokens in update.runs)
        runs = ((update.runs[-1][0], tokens),) if tokens else ()
        return settle(stored, update._replace(runs=runs))


class EditWithoutRevision(OtherSettlement):
    """Keeps the limit that it received first."""

    def settle(self, stored, update):
        if stored is not None:
            rule = ledger_model.ruling_of(stored, update.rule)
            rule = replace(rule, revision=stored.revision)
            update = update._replace(rule=rule)
        return settle(stored, update)


class EveryEditForgives(OtherSettlement):
    """Treats an edit of any rule as one of this rule."""

    def settle(self, stored, update) -> Settled:
        if stored is not None and update.rule.revision > stored.revision:
            account = ACCOUNTS[update.rule.algorithm]
            stored = stored._replace(state=account.capped(stored.state, update.rule))
        return settle(stored, update)


class EveryNewLimitForgives(OtherSettlement):
    """Fills a bucket whose limit was edited, although it is within the new one."""

    def settle(self, stored, update) -> Settled:
        rule = update.rule
        if stored is not None and rule.revision > stored.revision and rule.limit > stored.limit:
            stored = stored._replace(state=None)
        return settle(stored, update)


class GrantsCostOne(OtherSettlement):
    """Charges one token for each granted check, regardless of its cost."""

    def settle(self, stored, update) -> Settled:
        asks = [ask._replace(cost=1) for ask in update.asks]
        return settle(stored, update._replace(asks=asks))


class AsksOfOneTime(OtherSettlement):
    """Decides all checks of a batch at the time of the last one."""

    def settle(self, stored, update) -> Settled:
        last_us = max((ask.at_us for ask in update.asks), default=0)
        asks = [ask._replace(at_us=last_us) for ask in update.asks]
        return settle(stored, update._replace(asks=asks))


class OlderRulesFit(OtherSettlement):
    """Caps all spends from an older rule book, even if this rule was not edited."""

    def settle(self, stored, update) -> Settled:
        if stored is not None and update.rule.revision < stored.revision and update.runs:
            runs = ledger_model.fitting(stored.state, update.rule, update.runs)
            update = update._replace(runs=runs)
        return settle(stored, update)


class ResetWithoutGeneration(World):
    """Fills a bucket without a new generation."""

    @staticmethod
    def made_full(_shared, rule, _now_us):
        return SharedState(0, rule.revision, rule.limit, burst=rule.burst)


class ResetToTheNextGeneration(World):
    """Counts resets as generations, even after the store has lost the count."""

    @staticmethod
    def made_full(shared, rule, _now_us):
        return ledger_model.reset(shared, rule)


class ResetLeavesOneSpent(World):
    """Fills a bucket up to one token less."""

    @staticmethod
    def made_full(shared, rule, now_us):
        full = ledger_model.reset(shared, rule, generation_at(now_us))
        charged = ACCOUNTS[rule.algorithm].charged(None, rule, [(now_us, 1)])
        return full._replace(state=charged)


class CarriesNothing(OtherSettlement):
    """Treats fixed windows separately: an overdraft is not owed in the next."""

    def settle(self, stored, update):
        rule = update.rule
        if rule.algorithm is Algorithm.FIXED_WINDOW and stored is not None and stored.state:
            count, latest_us, *_ = stored.state
            times = [at_us for at_us, _ in (*update.runs, *update.asks)]
            if times and max(times) // rule.window_us > latest_us // rule.window_us:
                stored = stored._replace(state=(min(count, stored.limit), latest_us))
            else:
                stored = stored._replace(state=(count, latest_us))
        return settle(stored, update)


class KnowsNoBurst(OtherSettlement):
    """Takes the limit for the capacity."""

    def settle(self, stored, update):
        return settle(stored, update._replace(rule=replace(update.rule, burst=0)))


# Of the node


class NeverResends(Node):
    """Sends a batch once."""

    def _resend(self, batch, incarnation):
        pass


class SendsAnew(Node):
    """Sends an unanswered batch as a new one, as if it had not arrived."""

    def _resend(self, batch, incarnation):
        if self.incarnation == incarnation and self.sender.outstanding is batch:
            self.sender.acknowledged(Reply(batch.number, {}))
            again = self.sender.freeze(batch.updates.items(), self.now_us)
            self._transmit(again, incarnation)


class RepeatedFirstChecks(FirstChecks):
    """Repeats an unanswered first check, as if it had a number."""

    def send(self, first_check):
        super().send(first_check)
        self.world.after(ANSWER_US // 2, self._again, first_check)

    def _again(self, first_check):
        if self.is_on_its_way(first_check):
            super().send(first_check)


class RepeatsFirstChecks(Node):
    """Lets two first checks be charged for one."""

    make_first_checks = RepeatedFirstChecks


class ChargesWhatItLetThrough(Node):
    """Treats an unanswered first check as not charged."""

    def first_check_failed(self, waiting):
        super().first_check_failed(waiting)
        key, cost = waiting[0].key, waiting[0].cost
        self._use(key, self.make_view(self.rule, None))
        self.views[key].check_alone(self.now_us, cost)
        self.dirty[key] = self.views[key]


class ForgetsWhatItEvicts(Node):
    """Drops an evicted bucket with its unsettled spends."""

    def _evict(self):
        super()._evict()
        for key in self.pending:
            self.dirty.pop(key, None)
            view = self.pending[key]
            view.unsent.remove_latest(view.unsent.tokens)


class NeverReadsAgain(Node):
    """Keeps denying until gossip arrives."""

    def _reread(self):
        pass


class WarmsWithoutTheSpend(Node):
    """Makes a view of a cold bucket without its spend."""

    def _warm(self, key):
        self.cold.pop(key, None)
        spent = self.sent_cold.get(key)
        view = super()._warm(key)
        if spent is not None:
            view.in_flight, view.in_flight_tokens = (), 0
            view.adopt(spent.base)
        return view


class AddsBesideTheSpend(Node):
    """Treats the second check of a cold bucket as its first."""

    def _add_cold(self, waiting):
        spent = self.cold[waiting.key]
        is_added = super()._add_cold(waiting)
        if is_added:
            added = self.cold[waiting.key]
            self.cold[waiting.key] = added._replace(cost=added.cost - spent.cost, refilled=0)
        return is_added


class AddsToWhatIsInFlight(Node):
    """Adds a check to a spend that was already sent."""

    def _spend_cold(self, waiting):
        key = waiting.key
        if key not in self.sent_cold:
            return super()._spend_cold(waiting)
        self.cold[key] = self.sent_cold[key]
        is_added = self._add_cold(waiting)
        spent = self.cold.pop(key)
        if is_added:
            self.sent_cold[key] = spent
        return is_added


class AddsBeyondTheShare(Node):
    """Adds checks to a cold spend as if nothing were unsettled."""

    def _add_cold(self, waiting):
        members, self.members = self.members, 0
        is_added = super()._add_cold(waiting)
        self.members = members
        return is_added


class SpendsAgainWhatIsInFlight(Node):
    """Treats a cold bucket as settled as soon as its spend is sent."""

    def flush(self):
        super().flush()
        for key, spent in self.sent_cold.items():
            self.packed[key] = spent.base


# Each with the parts of a run that it replaces, and its scenario where another than that of faults has to catch it.
TWINS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "no share": {"view": NoShare},
        "loose shares": {"view": LooseShares, "scenario": draining_scenario},
        "asks do not count": {"view": AsksDoNotCount, "scenario": calm_scenario},
        "forgets what is in flight": {"view": ForgetsWhatIsInFlight},
        "the specification's rule on views": {"view": OwnViewTakesPart},
        "forgives nothing": {"view": ForgivesNothing},
        "pays twice": {"view": PaysTwice},
        "never withdraws": {"view": NeverWithdraws},
        "knows no generations": {"view": KnowsNoGenerations},
        "an edit trims nothing": {"view": EditTrimsNothing},
        "tells no edit": {"view": TellsNoEdit},
        "sees no burst": {"view": SeesNoBurst, "scenario": calm_scenario},
        "no numbers": {"ledger": NoNumbers},
        "meets for nothing": {"ledger": MeetsForNothing},
        "last writer wins": {"ledger": LastWriterWins},
        "never overdrawn": {"ledger": NeverOverdrawn},
        "charges on arrival": {"ledger": ChargesOnArrival},
        "edit without revision": {"ledger": EditWithoutRevision},
        "every edit forgives": {"ledger": EveryEditForgives},
        "every new limit forgives": {"ledger": EveryNewLimitForgives},
        "grants cost one": {"ledger": GrantsCostOne},
        "asks of one time": {"ledger": AsksOfOneTime, "scenario": draining_scenario},
        "older rules fit": {"ledger": OlderRulesFit},
        "knows no burst": {"ledger": KnowsNoBurst},
        "carries nothing": {"ledger": CarriesNothing},
        "reset without generation": {"world": ResetWithoutGeneration},
        "reset to the next generation": {"world": ResetToTheNextGeneration},
        "reset leaves one spent": {"world": ResetLeavesOneSpent},
        "never resends": {"node": NeverResends},
        "sends anew": {"node": SendsAnew},
        "meets again": {"node": RepeatsFirstChecks},
        "charges what it let through": {"node": ChargesWhatItLetThrough},
        "forgets what it evicts": {"node": ForgetsWhatItEvicts},
        "never reads again": {"node": NeverReadsAgain},
        "warms without the spend": {"node": WarmsWithoutTheSpend},
        "adds beside the spend": {"node": AddsBesideTheSpend},
        "adds to what is in flight": {"node": AddsToWhatIsInFlight},
        "adds beyond the share": {"node": AddsBeyondTheShare},
        "spends again what is in flight": {"node": SpendsAgainWhatIsInFlight},
    }
)
