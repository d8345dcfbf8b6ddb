"""Holds on shared buckets: calls to the store and its replies, and the result of a hold in several parts. Pure.

The store keeps a record of each hold beside its buckets; in a Cluster, one part of it in each hash tag, for the buckets
there. A call charges a part, or finds it charged before. If all parts are charged, the hold is made; otherwise its
charges are withdrawn. Each attempt has its own name, and a part is given back when all attempts that found it have
withdrawn, so that no attempt revokes a hold that another has reported to its caller.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from ratelimitd.algorithms.several import ENFORCE
from ratelimitd.errors import (
    CheckInvalidError,
    HoldEndedError,
    HoldSettledError,
    HoldsFullError,
    RateLimitdError,
    StoreOverloadedError,
)
from ratelimitd.ledger.holds import OF_ANOTHER_CHECK, OF_WHAT_IS_OVER, Held, longest_life_us
from ratelimitd.ledger.shared_state import StoreCheck
from ratelimitd.model import ALLOWED, CONCURRENCY, MAX_TIME_US, WITHIN_LIMIT, Limit, Outcome

ATTEMPT_BYTES: Final = 8

MAX_ATTEMPTS: Final = 8
"""Concurrent attempts of one hold; with more it cannot be withdrawn, and stays until its end."""


class HoldCall(NamedTuple):
    """A hold, or a part of one, to be made in one step of the store.

    ``checks`` has one check for each bucket. ``most`` is the maximum of holds on a bucket. ``longest_us`` bounds the
    life of the hold, including extensions, by concurrency limits of other parts: see :func:`longest_of_parts_us`.
    """

    number: bytes
    check_digest: bytes
    attempt: bytes
    checks: Sequence[StoreCheck]
    ttl_us: int
    most: int
    longest_us: int = MAX_TIME_US

    @property
    def names(self) -> Sequence[bytes]:
        """The stored names of its buckets."""
        return [check.name for check in self.checks]


class Made(enum.IntEnum):
    """The result of a call; the numbers are those of the script.

    ``FOUND``: another attempt has made the part, or may have. A repeated call gets the same answer.
    """

    MADE = 1
    FOUND = 2
    DENIED = 3
    OF_ANOTHER_CHECK = 4
    FULL = 5
    OVER = 6


class HoldReply(NamedTuple):
    """The answer to a call.

    ``outcomes`` are those of the buckets of ``names``, in the order of the checks; for a part that was found, its own
    buckets and original outcomes; empty if the number was refused. ``expire_us`` is the end of the part, 0 without one.
    """

    made: Made
    expire_us: int
    outcomes: Sequence[Outcome | None]
    names: Sequence[bytes]


class Step(enum.IntEnum):
    """An operation on a hold; the numbers are those of the script."""

    SETTLE = 1
    EXTEND = 2
    WITHDRAW = 3


class StepCall(NamedTuple):
    """A step of a hold on the buckets of ``names``.

    ``amount``: the tokens of a settle, the µs of an extension. ``attempt``: the one to withdraw. ``at_us``: the time of
    the outcomes, ``STORE_TIME`` for that of the store. ``limits``: by which they are judged.
    """

    step: Step
    number: bytes
    names: Sequence[bytes]
    amount: int = 0
    at_us: int = 0
    attempt: bytes = bytes(ATTEMPT_BYTES)
    limits: Mapping[bytes, Limit | None] = MappingProxyType({})


class Stepped(enum.IntEnum):
    """The result of a step; the numbers are those of the script."""

    UNKNOWN = 0
    DONE = 1
    AS_BEFORE = 2
    SETTLED = 3
    ENDED = 4


class StepReply(NamedTuple):
    """The answer to a step: the end of the part, the tokens given back and charged, and the outcomes afterwards."""

    stepped: Stepped
    expire_us: int = 0
    given_back: int = 0
    owed: int = 0
    outcomes: Sequence[Outcome | None] = ()


Part: TypeAlias = tuple[Sequence[int], HoldReply | RateLimitdError]
"""(indices of the hold's charges that a call was for, its answer)."""

PartOfStep: TypeAlias = tuple[Sequence[int], StepReply | RateLimitdError]
"""(indices of the step's names that a call was for, its answer)."""


def longest_of_parts_us(limits: Sequence[Limit], parts: int) -> int:
    """Return the longest life of a hold in several parts, so that all of them end with its slots.

    The only part of a hold knows all its limits, also whether one that observes gives it a slot.
    """
    return longest_life_us(limits) if parts > 1 else MAX_TIME_US


def conclude(
    names: Sequence[bytes], limits: Sequence[Limit], cost: int, parts: Sequence[Part]
) -> Held:
    """Combine the parts of a hold of ``cost`` tokens. Unless the hold is made, the caller must withdraw its parts.

    A denial precedes full buckets and failed parts, because a retry would be denied as well. A failed part that only
    observes is left out; its buckets have no outcome.

    Raises:
        CheckInvalidError: the number belongs to a hold of another check, or to one that has ended or was settled.
        HoldsFullError: a bucket has reached its maximum of holds.
        RateLimitdError: a part could not be made, or its result is unknown.
    """
    replies = [reply for _, reply in parts if isinstance(reply, HoldReply)]
    made = {reply.made for reply in replies}
    if Made.OF_ANOTHER_CHECK in made:
        raise CheckInvalidError(OF_ANOTHER_CHECK)
    if Made.OVER in made:
        raise CheckInvalidError(OF_WHAT_IS_OVER)
    is_denied = Made.DENIED in made
    if not is_denied and Made.FULL in made:
        message = "a bucket has its maximum of holds in flight"
        raise HoldsFullError(message)
    outcomes: dict[bytes, Outcome | None] = {}
    limit_of = dict(zip(names, limits, strict=True))
    for places, reply in parts:
        if isinstance(reply, RateLimitdError):
            is_enforced = any(limits[place].enforcement is ENFORCE for place in places)
            if not is_denied and (is_enforced or not replies):
                raise reply
            continue
        for name, outcome in zip(reply.names, reply.outcomes, strict=True):
            is_withdrawn = is_denied and reply.made is Made.MADE
            outcomes[name] = _without(outcome, limit_of[name], cost) if is_withdrawn else outcome
    if is_denied:
        return Held(names, [outcomes.get(name) for name in names], 0)
    is_first = made == {Made.MADE}
    there = [name for name in names if is_first or name in outcomes]
    there += [name for name in outcomes if name not in limit_of]
    expire_us = min(reply.expire_us for reply in replies)
    return Held(there, [outcomes.get(name) for name in there], expire_us, is_first=is_first)


def conclude_step(count: int, parts: Sequence[PartOfStep], *, field: str) -> StepReply:
    """Combine the parts of a step on ``count`` buckets. ``field`` is the one that a settled hold refuses.

    Raises:
        HoldEndedError: a part had ended.
        HoldSettledError: a part was settled before, and the step extends it or settles another amount.
        RateLimitdError: the result of a part is unknown.
    """
    replies = [reply for _, reply in parts if isinstance(reply, StepReply)]
    stepped = {reply.stepped for reply in replies}
    if Stepped.ENDED in stepped:
        raise HoldEndedError
    if Stepped.SETTLED in stepped:
        raise HoldSettledError(field)
    outcomes: list[Outcome | None] = [None] * count
    for places, reply in parts:
        if isinstance(reply, RateLimitdError):
            raise reply
        for place, outcome in zip(places, reply.outcomes, strict=False):
            outcomes[place] = outcome
    known = [reply for reply in replies if reply.stepped is not Stepped.UNKNOWN]
    return StepReply(
        min([reply.stepped for reply in known], default=Stepped.UNKNOWN),
        min([reply.expire_us for reply in known], default=0),
        sum(reply.given_back for reply in replies),
        sum(reply.owed for reply in replies),
        outcomes,
    )


def has_part(reply: HoldReply | RateLimitdError) -> bool:
    """Whether a part was made or found, or may have been."""
    if isinstance(reply, HoldReply):
        return reply.made in {Made.MADE, Made.FOUND}
    return not isinstance(reply, StoreOverloadedError)


def _without(outcome: Outcome | None, limit: Limit, cost: int) -> Outcome | None:
    """Return an allowed outcome as it is without the hold; others are unchanged."""
    if outcome is None or not outcome[0]:
        return outcome
    taken = 1 if limit.algorithm is CONCURRENCY else cost
    remaining = min(outcome[1] + taken, limit.capacity)
    return ALLOWED, remaining, outcome[2], 0, WITHIN_LIMIT, None
