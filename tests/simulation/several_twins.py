"""Wrong variants of checks on several shared buckets, each of which the invariants must detect."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from unittest import mock

from ratelimitd.ledger import local_view
from ratelimitd.ledger.accounts import FixedWindowAccount, TokenBucketAccount
from ratelimitd.ledger.local_view import LocalView
from ratelimitd.ledger.several import conclude
from ratelimitd.ledger.shared_state import refunded, standing
from ratelimitd.model import Algorithm
from tests import ledger_model
from tests.simulation.several import Joint, Machine, PartNode
from tests.simulation.several_runs import Several


class AtTheFirstAnswer(Joint):
    """Ends when one bucket has answered."""

    is_over = True


class AllowsAtTheFirstGrant(Machine):
    make_joint = AtTheFirstAnswer


class ButForTheLastAnswer(Joint):
    """Does not wait for the last bucket."""

    @property
    def is_over(self):
        return self.missing <= 1


class AllowsBeforeAllHaveAnswered(Machine):
    make_joint = ButForTheLastAnswer


class KeepsWhatItCharged(Machine):
    """Leaves a denied check charged."""

    @staticmethod
    def give_back(_waiting):
        return False


class SpendsWhatIsReserved(Machine):
    """Spends reserved tokens, whatever the other buckets decide."""

    @staticmethod
    def verdict(joint, at_us):
        is_allowed = conclude(joint.parts, at_us)
        for part in joint.parts:
            if not is_allowed and part.is_reserved:
                part.charge(at_us)
        return is_allowed


class RefundsTwice(PartNode):
    """Sends a refund again in the next batch, as if it had no number."""

    def give_back(self, waiting, refund, charge):
        is_sent, key = super().give_back(waiting, refund, charge), waiting.key
        view = self.views.get(key) or self.pending.get(key)
        if is_sent and view is not None:
            view.give_back(refund)
            self.dirty[key] = view
        return is_sent


class NeverReleases(LocalView):
    """Keeps reserved tokens forever."""

    def release(self, _cost):
        pass


class HoldsNothing(LocalView):
    """Spends tokens that other checks have reserved."""

    def check(self, now_us, members, cost):
        return self._without_others(super().check, now_us, members, cost)

    def reserve(self, now_us, members, cost):
        return self._without_others(super().reserve, now_us, members, cost)

    def _without_others(self, decide, *terms):
        reserved = self.reserved
        self.asked_tokens -= reserved
        outcome = decide(*terms)
        self.asked_tokens += reserved
        return outcome


def _refunds_a_full_bucket(state, rule, refund, _already):
    if state is None:
        return state, 0
    units = min(refund.tokens * rule.window_us, state[0])
    return (state[0] - units, state[1]), -(-units // rule.window_us)


def _refunds_a_later_window(state, _rule, refund, _already):
    if state is None:
        return state, 0
    tokens = min(refund.tokens, state[0])
    return (state[0] - tokens, *state[1:]), tokens


def _of_any_generation(shared, rule, refunds):
    return refunded(shared, rule, [refund._replace(generation=shared[0]) for refund in refunds])


def _without_refunds(shared, rule):
    return standing(shared._replace(refunded=0), rule)


def patched(owner: object, name: str, value: object) -> AbstractContextManager[object]:
    return mock.patch.object(owner, name, value)


TWINS = MappingProxyType(
    {
        "allows at the first grant": ({"machine": AllowsAtTheFirstGrant}, nullcontext),
        "allows before all have answered": ({"machine": AllowsBeforeAllHaveAnswered}, nullcontext),
        "keeps what it charged": ({"machine": KeepsWhatItCharged}, nullcontext),
        "spends what is reserved": ({"machine": SpendsWhatIsReserved}, nullcontext),
        "refunds twice": ({"node": RefundsTwice}, nullcontext),
        "never releases": ({"view": NeverReleases}, nullcontext),
        "holds nothing": ({"view": HoldsNothing}, nullcontext),
        "refunds a full bucket": (
            {},
            lambda: patched(TokenBucketAccount, "refunded", staticmethod(_refunds_a_full_bucket)),
        ),
        "refunds a later window": (
            {},
            lambda: patched(FixedWindowAccount, "refunded", staticmethod(_refunds_a_later_window)),
        ),
        "refunds another generation": (
            {},
            lambda: patched(ledger_model, "refunded", _of_any_generation),
        ),
        "orders states without refunds": (
            {},
            lambda: patched(local_view, "standing", _without_refunds),
        ),
    }
)


def _are_refunds_late(parameters: Several, algorithm: Algorithm) -> bool:
    return bool(parameters.first.rtt_us) and any(
        one.algorithm is algorithm for one in parameters.shards
    )


MATTERS: Mapping[str, Callable[[Several], bool]] = MappingProxyType(
    {
        "refunds a full bucket": lambda parameters: _are_refunds_late(
            parameters, Algorithm.TOKEN_BUCKET
        ),
        "refunds a later window": lambda parameters: _are_refunds_late(
            parameters, Algorithm.FIXED_WINDOW
        ),
        "refunds another generation": lambda parameters: bool(
            parameters.resets and parameters.first.rtt_us
        ),
    }
)
"""In which runs a way can be wrong, where it is right in nearly all."""
