"""Encodes the arguments of the scripts of holds, and decodes their replies. Pure.

As in :mod:`ratelimitd.cluster.redis.codec`, every reply is validated.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Any, Final

from ratelimitd.buckets.keys import STORED_KEY_BYTES
from ratelimitd.cluster.redis.codec import (
    ANSWER_BYTES,
    NUMBERS,
    Request,
    bucket_key,
    holds_key,
    load,
    outcomes_of,
    packed_checks,
    prefix,
)
from ratelimitd.errors import StoreCorruptError
from ratelimitd.ledger.shared_holds import HoldCall, HoldReply, Made, StepCall, Stepped, StepReply
from ratelimitd.model import MAX_TIME_US, Limit

_MORE: Final = ("concurrency.lua", "holds.lua")

HOLD: Final = load("hold", *_MORE)
"""Makes one hold, or a part of one; idempotent."""

HOLD_STEP: Final = load("hold_step", *_MORE)
"""Settles, extends or withdraws one hold."""

_HOLD: Final = Struct("<8s8sQIQ")
_MADE: Final = Struct("<BQI")
_FOUND: Final = Struct(f"{STORED_KEY_BYTES}s{ANSWER_BYTES}s")
_STEP: Final = Struct("<BQq8s")
_LIMIT: Final = Struct("<BQIII")
_STEPPED: Final = Struct("<BQQQ")

_MADE_BY: Final = {int(one): one for one in Made}
_STEPPED_BY: Final = {int(one): one for one in Stepped}


def _keys(tag: int, number: bytes, names: Sequence[bytes]) -> list[bytes]:
    """Return the key of the record, under ``tag``, then two for each bucket: its own, and that of its open holds."""
    keys = [prefix(tag) + b"hold:" + number]
    for name in names:
        keys += (bucket_key(name), holds_key(name))
    return keys


def hold_request(tag: int, call: HoldCall) -> Request:
    """Return keys and arguments of ``HOLD``."""
    head = _HOLD.pack(call.check_digest, call.attempt, call.ttl_us, call.most, call.longest_us)
    return _keys(tag, call.number, call.names), [head + packed_checks(call.checks)]


def hold_reply(call: HoldCall, reply: Any) -> tuple[int, HoldReply]:
    """Return the number of malformed values, and the result of a hold.

    Raises:
        StoreCorruptError: no reply to this.
    """
    if isinstance(reply, bytes) and len(reply) >= _MADE.size:
        made, expire_us, corrupt = _MADE.unpack_from(reply)
        kind, answers, names = _MADE_BY.get(made), reply[_MADE.size :], call.names
        if kind is Made.FOUND:
            found = [*_FOUND.iter_unpack(answers)] if len(answers) % _FOUND.size == 0 else []
            names, answers = [name for name, _ in found], b"".join([one for _, one in found])
        outcomes = _outcomes(answers, len(names)) or ()
        is_whole = bool(outcomes) or kind in {Made.OF_ANOTHER_CHECK, Made.OVER}
        is_sound = expire_us <= MAX_TIME_US and corrupt <= 2 * len(call.checks)
        if kind is not None and is_whole and is_sound:
            return corrupt, HoldReply(kind, expire_us, outcomes, names if outcomes else ())
    message = "the reply of the shared state to a hold is malformed"
    raise StoreCorruptError(message)


def step_request(tag: int, call: StepCall) -> Request:
    """Return keys and arguments of ``HOLD_STEP``."""
    head = _STEP.pack(call.step, call.amount, call.at_us, call.attempt)
    limits = b"".join([_packed(call.limits.get(name)) for name in call.names])
    return _keys(tag, call.number, call.names), [head + limits]


def _packed(limit: Limit | None) -> bytes:
    if limit is None:
        return bytes(_LIMIT.size)
    kind = NUMBERS[limit.algorithm]
    return _LIMIT.pack(kind, limit.revision, limit.limit, limit.burst, limit.window_seconds)


def step_reply(call: StepCall, reply: Any) -> StepReply:
    """Decode the result of a step.

    Raises:
        StoreCorruptError: no reply to this.
    """
    if isinstance(reply, bytes) and len(reply) >= _STEPPED.size:
        stepped, expire_us, given_back, owed = _STEPPED.unpack_from(reply)
        kind, answers = _STEPPED_BY.get(stepped), reply[_STEPPED.size :]
        outcomes = _outcomes(answers, len(call.names)) if answers else ()
        if kind is not None and outcomes is not None and expire_us <= MAX_TIME_US:
            return StepReply(kind, expire_us, given_back, owed, outcomes)
    message = "the reply of the shared state to a step of a hold is malformed"
    raise StoreCorruptError(message)


def _outcomes(answers: bytes, count: int) -> Sequence[Any] | None:
    return outcomes_of(answers) if len(answers) == count * ANSWER_BYTES else None
