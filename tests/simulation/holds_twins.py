"""Wrong variants of holds, each of which the invariants must detect."""

from contextlib import nullcontext
from types import MappingProxyType
from typing import Any
from unittest import mock

from ratelimitd.algorithms import sliding_window
from ratelimitd.errors import RateLimitdError
from ratelimitd.ledger.accounts import FixedWindowAccount, SlidingWindowAccount
from ratelimitd.ledger.shared_holds import HoldReply, Made, Step, Stepped
from tests.shared_hold_model import HoldStore, Kept
from tests.simulation.holds import Node, Server


class RefundsToAnotherGeneration(Server):
    @staticmethod
    def may_refund(kept, charged):
        is_other = kept.shared.generation != charged.generation
        return is_other or HoldStore.may_refund(kept, charged)


class RefundsToABucketThatWasLost(Server):
    @staticmethod
    def may_refund(kept, charged):
        was_lost = not kept.mark or kept.mark > charged.mark
        return was_lost or HoldStore.may_refund(kept, charged)


class RefundsOverEveryEdit(Server):
    @staticmethod
    def opened(kept, rule):
        shared = HoldStore.opened(kept, rule).shared
        return Kept(shared, kept.mark if kept else 0)


class GivesAllBack(Server):
    """Even tokens that have been refilled since."""

    def settle_bucket(self, number, name, charged, actual):
        return super().settle_bucket(number, name, charged._replace(spent=2**40), actual)


class KnowsNothingOfOtherRefunds(Server):
    """Counts tokens refunded for other holds as missing."""

    def settle_bucket(self, number, name, charged, actual):
        kept = self.buckets.get(name)
        if kept is not None:
            charged = charged._replace(refunded=kept.shared.refunded)
        return super().settle_bucket(number, name, charged, actual)


class SettlesAgain(Server):
    """On every call."""

    def step(self, call):
        record = self.record(call.number)
        if record is not None and call.step is Step.SETTLE:
            self.records[call.number] = record._replace(settled=None)
        return super().step(call)


class OwesNothing(Server):
    """Charges at most the held tokens."""

    @staticmethod
    def owed(_charged, _actual):
        return 0


class OwesByTheNewLimit(Server):
    @staticmethod
    def owing(rule, _charged):
        return rule


class KeepsTheSlotsOfASettledHold(Server):
    def settle_bucket(self, number, name, charged, actual):
        slots = self.slots_of(name)
        end_us = slots.get(number)
        change = super().settle_bucket(number, name, charged, actual)
        if end_us is not None:
            slots[number] = end_us
        return change


class KeepsTheSlotsOfAHoldThatIsOver(Server):
    def slots_of(self, name):
        return self.slots.get(name, {})


class TakesSlotsAgain(Server):
    """When a hold is extended, although a reset has freed them."""

    def _extend(self, call, record):
        for name in call.names:
            entry = record.entries.get(name)
            if entry is not None and entry.charged is not None:
                self.slots.setdefault(name, {})[call.number] = record.end_us
        return super()._extend(call, record)


class ExtendsBeyondTheWindow(Server):
    def _extend(self, call, record):
        return super()._extend(call, record._replace(last_us=2**53))


class WithdrawsForAll(Server):
    """Although another attempt has found the hold."""

    def _withdraw(self, call, record):
        if call.attempt in record.attempts:
            record = record._replace(attempts=(call.attempt,))
        return super()._withdraw(call, record)


class WithdrawsWhateverThereIs(Server):
    """Even a hold of another attempt."""

    def _withdraw(self, call, record):
        return super()._withdraw(call, record._replace(attempts=(call.attempt,)))


class ChargesARepeatedHoldAgain(Server):
    def record(self, number):
        return super().record(number) if self.is_step else None

    is_step = True

    def hold(self, call):
        self.is_step = False
        reply = super().hold(call)
        self.is_step = True
        return reply


class ForgetsASettledHold(Server):
    """A repeated settle is unknown, and a repeated hold is made again."""

    def step(self, call):
        reply = super().step(call)
        if call.step is Step.SETTLE and reply.stepped is Stepped.DONE:
            del self.records[call.number]
        return reply


class ChargesWhatPasses(Server):
    """Although another limit denies."""

    def hold(self, call):
        reply = super().hold(call)
        if reply.made is Made.DENIED:
            for check in call.checks:
                super().hold(call._replace(checks=[check], number=call.number[::-1]))
        return reply


class WithdrawsNothing(Node):
    @staticmethod
    def is_to_be_withdrawn(_reply: HoldReply | RateLimitdError) -> bool:
        return False


class TakesNoAnswerForAYes(Node):
    @staticmethod
    def answers(parts):
        return [part for part in parts if not isinstance(part[1], RateLimitdError)] or parts


class HasOneAttempt(Node):
    """All attempts have the name of the hold."""

    def hold(self, hold, names, done):
        with mock.patch.object(self.world, "attempt", return_value=hold.number[:8]):
            super().hold(hold, names, done)


def reaches_a_later_window():
    def refunded(state, rule, refund, _already):
        if state is None:
            return state, 0
        tokens = min(refund.tokens, state[0])
        return (state[0] - tokens, *state[1:]), tokens

    return mock.patch.object(FixedWindowAccount, "refunded", staticmethod(refunded))


def takes_later_tokens_out():
    def refunded(state, _rule, refund, _already):
        return (state, 0) if state is None else sliding_window.removed(state, 2**62, refund.tokens)

    return mock.patch.object(SlidingWindowAccount, "refunded", staticmethod(refunded))


Parts = dict[str, Any]

TWINS: MappingProxyType[str, tuple[Parts, Any]] = MappingProxyType(
    {
        "refunds to another generation": ({"server": RefundsToAnotherGeneration}, nullcontext),
        "refunds to a bucket that was lost": ({"server": RefundsToABucketThatWasLost}, nullcontext),
        "refunds over every edit": ({"server": RefundsOverEveryEdit}, nullcontext),
        "gives all back": ({"server": GivesAllBack}, nullcontext),
        "knows nothing of other refunds": ({"server": KnowsNothingOfOtherRefunds}, nullcontext),
        "reaches a later window": ({}, reaches_a_later_window),
        "takes later tokens out of a log": ({}, takes_later_tokens_out),
        "settles again": ({"server": SettlesAgain}, nullcontext),
        "owes nothing": ({"server": OwesNothing}, nullcontext),
        "owes by the new limit": ({"server": OwesByTheNewLimit}, nullcontext),
        "keeps the slots of a settled hold": ({"server": KeepsTheSlotsOfASettledHold}, nullcontext),
        "keeps the slots of a hold that is over": (
            {"server": KeepsTheSlotsOfAHoldThatIsOver},
            nullcontext,
        ),
        "takes slots again": ({"server": TakesSlotsAgain}, nullcontext),
        "extends beyond the window": ({"server": ExtendsBeyondTheWindow}, nullcontext),
        "withdraws for all": ({"server": WithdrawsForAll}, nullcontext),
        "withdraws whatever there is": ({"server": WithdrawsWhateverThereIs}, nullcontext),
        "charges a repeated hold again": ({"server": ChargesARepeatedHoldAgain}, nullcontext),
        "forgets a settled hold": ({"server": ForgetsASettledHold}, nullcontext),
        "charges what passes": ({"server": ChargesWhatPasses}, nullcontext),
        "withdraws nothing": ({"node": WithdrawsNothing}, nullcontext),
        "takes no answer for a yes": ({"node": TakesNoAnswerForAYes}, nullcontext),
        "has one attempt": ({"node": HasOneAttempt}, nullcontext),
    }
)
