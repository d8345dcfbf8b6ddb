"""The texts of holds belong to their principals."""

import asyncio
from base64 import urlsafe_b64decode, urlsafe_b64encode

import pytest

from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.counters import CheckStats
from ratelimitd.errors import InvalidInputError
from ratelimitd.limiter.holder import HeldLimit, Holding, SettledHold
from ratelimitd.model import Decision, Reason
from ratelimitd.services import holds
from ratelimitd.services.config import SEAL_BYTES
from ratelimitd.services.convert import CONTRACT_IDENTITIES
from ratelimitd.services.holds import HoldsService
from ratelimiter.v1 import ratelimiter_pb2 as pb

LIMIT = HeldLimit(b"b" * 16, "rule", "default", "pro")
CHECK = pb.RateLimitRequest(identifier="u", identifier_type="user", endpoint="/a")


class Holder:
    """Grants every hold."""

    async def hold(self, *_, lease):
        assert not lease
        return Holding(Decision(True, 1, 0, 0, Reason.WITHIN_LIMIT), [LIMIT], 10**15)

    async def settle(self, *_):
        return SettledHold(known=True)


def service_of(name, stats=None):
    return HoldsService(
        Holder(),
        BucketKeys(b"k" * 32),
        lambda _call: name,
        stats=stats or CheckStats(),
        identities=CONTRACT_IDENTITIES,
        now_s=lambda: 0.0,
    )


def made_by(name):
    """Return the sealed octets of a hold."""
    request = pb.HoldRequest(check=CHECK).SerializeToString()
    hold = pb.HoldResponse.FromString(asyncio.run(service_of(name).hold(request, None))).hold
    return urlsafe_b64decode(hold + "=" * (-len(hold) % 4))


def settle(name, sealed):
    hold = urlsafe_b64encode(sealed).decode().rstrip("=")
    request = pb.SettleRequest(hold=hold, actual=1).SerializeToString()
    answer = asyncio.run(service_of(name).settle(request, None))
    return pb.SettleResponse.FromString(answer).known


@pytest.mark.parametrize(
    ("maker", "other", "ending"),
    [("xa.example", "a.example", b"x"), ("b.example", "prob.example", None)],
)
def test_the_end_of_a_hold_cannot_pass_for_a_part_of_a_principal(maker, other, ending):
    sealed = made_by(maker)
    assert settle(maker, sealed)
    body, seal = sealed[:-SEAL_BYTES], sealed[-SEAL_BYTES:]
    altered = body + ending if ending else body.removesuffix(b"pro")
    assert altered != body
    with pytest.raises(InvalidInputError, match="hold"):
        settle(other, altered + seal)


def test_no_hold_begins_like_an_option_of_a_command():
    request = pb.HoldRequest(check=CHECK).SerializeToString()
    service = service_of("a.example")
    answers = [asyncio.run(service.hold(request, None)) for _ in range(500)]
    assert {pb.HoldResponse.FromString(answer).hold[0] for answer in answers} == {"A"}


def test_an_invalid_hold_counts_as_an_invalid_check():
    stats = CheckStats()
    with pytest.raises(InvalidInputError, match="identifier"):
        asyncio.run(service_of("x", stats).hold(pb.HoldRequest().SerializeToString(), None))
    assert stats.invalid_total == 1


def test_a_hold_of_another_form_is_refused(monkeypatch):
    with monkeypatch.context() as later:
        later.setattr(holds, "_VERSION", holds._VERSION + 1)
        sealed = made_by("a.example")
        assert settle("a.example", sealed)
    with pytest.raises(InvalidInputError):
        settle("a.example", sealed)
