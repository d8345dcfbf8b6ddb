"""Wrong variants of the ledger, each of which the oracle has to catch: what would go unnoticed is not demanded."""

import sys

from ratelimitd.ledger.batches import Batch, Ledger, Reply
from ratelimitd.ledger.shared_state import SharedState, settle, standing
from ratelimitd.ledger.view import View
from tests.simulation.cluster import Node


class NoShare(View):
    """Decides everything on its view."""

    def _work_out_share(self, _now_us):
        return sys.maxsize


class ForgetsWhatIsInFlight(View):
    """Takes what it has sent for settled."""

    def freeze(self):
        update = super().freeze()
        self.in_flight.remove_latest(self.in_flight.tokens)
        self._recompute()
        return update


class OwnViewTakesPart(View):
    """The specification's rule for conflicts, with the node's own view on one side: its clock is always later."""

    def hear(self, shared):
        own = SharedState(self.generation or 0, self.rule.revision, self.rule.limit, self._state)
        if standing(shared, self.rule) > standing(own, self.rule):
            super().hear(shared)


class ForgivesNothing(View):
    """Settles all that was spent in an outage."""

    def forgive_outage(self, _now_us):
        pass


class PaysTwice(View):
    """Charges a late grant beside what the view has charged."""

    def pay(self, _tokens):
        pass


class NeverWithdraws(View):
    """Leaves an ask in the batch which the view has decided."""

    def withdraw(self, _ask):
        return False


class KnowsNoGenerations(View):
    """Takes the state after a reset for any other, and settles what it spent before."""

    def hear(self, shared):
        super().hear(shared._replace(generation=0))

    def acknowledge(self, shared):
        super().acknowledge(shared._replace(generation=0))

    def freeze(self):
        return super().freeze()._replace(generation=1_000)


class NoNumbers(Ledger):
    """Applies whatever arrives."""

    def apply(self, batch: Batch) -> Reply:
        self._replies.clear()
        reply = super().apply(batch)
        assert reply is not None
        return reply


class LastWriterWins(Ledger):
    """Puts what a node says over what is there."""

    def apply(self, batch: Batch) -> Reply:
        settled = {key: settle(None, update) for key, update in batch.updates.items()}
        self.buckets.update({key: one.shared for key, one in settled.items()})
        return Reply(batch.number, settled)


class NeverResends(Node):
    """Sends a batch once."""

    def _transmit(self, batch, incarnation):
        def back(reply: Reply) -> None:
            if self.incarnation == incarnation:
                self._acknowledged(reply)

        self.simulation.send(batch, back)


TWINS = {
    "no share": {"view": NoShare},
    "forgets what is in flight": {"view": ForgetsWhatIsInFlight},
    "own view takes part": {"view": OwnViewTakesPart},
    "forgives nothing": {"view": ForgivesNothing},
    "pays twice": {"view": PaysTwice},
    "never withdraws": {"view": NeverWithdraws},
    "knows no generations": {"view": KnowsNoGenerations},
    "no numbers": {"ledger": NoNumbers},
    "last writer wins": {"ledger": LastWriterWins},
    "never resends": {"node": NeverResends},
}
