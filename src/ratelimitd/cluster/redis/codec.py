"""Encodes the arguments of the scripts of the store, and decodes their replies. Pure.

``scripts/*.lua`` describe the same bytes. A store is not trusted: every reply is validated, and a foreign value raises
:class:`StoreCorruptError`, never another exception. See ADR 0027.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha1
from importlib.resources import files
from struct import Struct, error
from types import MappingProxyType
from typing import Any, Final

from ratelimitd.algorithms.sliding_window import MAX_RUNS
from ratelimitd.cluster.packed import (
    HEAD_MASK,
    LATEST_SHIFT,
    SPENT_SHIFT,
    Packed,
    generation_of,
    pack,
)
from ratelimitd.errors import StoreCorruptError
from ratelimitd.ledger.accounts import BucketState
from ratelimitd.ledger.protocol import Batch, ColdSpend, Reply
from ratelimitd.ledger.shared_state import FirstResult, Settled, SharedState, StoreCheck, Update
from ratelimitd.model import (
    ALLOWED,
    COST_EXCEEDS_LIMIT,
    DENIED,
    INT32_MAX,
    LIMIT_EXCEEDED,
    MAX_TIME_US,
    WITHIN_LIMIT,
    Algorithm,
    Limit,
    Outcome,
    Reason,
)

# Decodes a stored bucket to the ledger's state. Only scripts encode buckets.
#
# Little-endian; a full bucket is the head alone (see ``scripts/bucket.lua`` and those of the algorithms). The burst of
# a limit, if any, comes last (4 bytes):
#
#     head:            format (1 byte) · algorithm (1) · generation (4) · revision (8) · limit (4)
#     token bucket:    whole tokens spent (8) · units beyond them (8) · latest_us (8)
#     fixed window:    count (8) · count of the window before (8) · latest_us (8)
#     sliding window:  sum before the first entry (8) · {time in µs (8) · sum up to here (8)} …
#
# A bucket with refunds has FORMAT_OF_REFUNDED, and the number of refunded tokens (8) follows the head. One charged for
# holds has FORMAT_OF_HELD, and a mark (8), which only the store uses, follows that number. A concurrency bucket is a
# sorted set instead.

FORMAT: Final = 1
"""Version of the format; values of other versions are not buckets."""

FORMAT_OF_REFUNDED: Final = 2
"""Format of buckets with refunds."""

FORMAT_OF_HELD: Final = 3
"""Format of buckets charged for holds."""

NUMBERS: Final[Mapping[Algorithm, int]] = MappingProxyType(
    {
        Algorithm.TOKEN_BUCKET: 1,
        Algorithm.FIXED_WINDOW: 2,
        Algorithm.SLIDING_WINDOW: 3,
        Algorithm.CONCURRENCY: 4,
    }
)
"""Number of an algorithm in the store; never changes."""

_LARGEST: Final = MAX_TIME_US  # of every number: the scripts use doubles

_HEAD: Final = Struct("<BBIQI")
_HEADS_OF_MORE: Final = MappingProxyType(
    {
        FORMAT_OF_REFUNDED: Struct(f"<{_HEAD.size}sQ"),
        FORMAT_OF_HELD: Struct(f"<{_HEAD.size}sQQ"),
    }
)
_BURST: Final = Struct("<I")
_NUMBER_BYTES: Final = 8  # of every number of a state
_TOKEN_BUCKET: Final = Struct(f"<{_HEAD.size}xQQQ")
_PAIR_WITH_HEAD: Final = Struct(f"<{_HEAD.size}sQQQ")
_NO_FIELDS: Final = (b"", 0, 0, 0)
_FIXED_WINDOW: Final = Struct(f"<{_HEAD.size}xQQQ")
_PAIR_BYTES: Final = _TOKEN_BUCKET.size  # also of a fixed window
_LOG_HEAD_BYTES: Final = _HEAD.size + 8
_ENTRY_BYTES: Final = 16


def state_of(value: Any, rule: Limit) -> SharedState | None:
    """Decode the state of a bucket of ``rule``; ``None`` if the store has none.

    Raises:
        StoreCorruptError: the value is no bucket of this algorithm.
    """
    return None if value is None else bucket_of(value, rule)


def bucket_of(value: Any, rule: Limit) -> SharedState:
    """Decode a state that must exist."""
    if isinstance(value, bytes) and len(value) >= _HEAD.size:
        burst = 0
        if (len(value) - _HEAD.size) % _NUMBER_BYTES == _BURST.size:
            burst = _BURST.unpack_from(value, len(value) - _BURST.size)[0]
            value = value[: -_BURST.size]
        form, number, generation, revision, limit = _HEAD.unpack_from(value)
        is_ours = form == FORMAT and number == NUMBERS[rule.algorithm]
        is_sound = 1 <= limit <= INT32_MAX and revision <= _LARGEST and generation <= INT32_MAX
        if burst:
            is_sound &= burst <= INT32_MAX and rule.algorithm is Algorithm.TOKEN_BUCKET
        if is_ours and is_sound:
            if len(value) == _HEAD.size:
                return SharedState(generation, revision, limit, None, burst)
            state = _STATES[rule.algorithm](value, rule)
            if state is not None:
                # To call the class itself takes 0.4 µs longer, and this is done for every bucket of every reply.
                return tuple.__new__(SharedState, (generation, revision, limit, state, burst, 0))
        more = _HEADS_OF_MORE.get(form)
        if more is not None and len(value) >= more.size:
            head, refunded, *mark = more.unpack_from(value)
            if max(refunded, *mark, 0) <= _LARGEST:
                plain = bytes((FORMAT,)) + head[1:] + value[more.size :]
                return bucket_of(plain, rule)._replace(burst=burst, refunded=refunded)
    message = "the shared state holds a value that is not a bucket under a bucket's key"
    raise StoreCorruptError(message)


def _token_bucket(value: bytes, rule: Limit) -> BucketState:
    if len(value) != _TOKEN_BUCKET.size:
        return None
    tokens, units, latest_us = _TOKEN_BUCKET.unpack(value)
    if tokens > _LARGEST or units >= rule.window_us or latest_us > _LARGEST:
        return None
    return tokens * rule.window_us + units, latest_us


def _fixed_window(value: bytes, _rule: Limit) -> BucketState:
    if len(value) != _FIXED_WINDOW.size:
        return None
    count, before, latest_us = _FIXED_WINDOW.unpack(value)
    if max(count, before, latest_us) > _LARGEST:
        return None
    return (count, latest_us, before) if before else (count, latest_us)


def _sliding_window(value: bytes, _rule: Limit) -> BucketState:
    """Decode a log in the form of :mod:`ratelimitd.algorithms.sliding_window`: all times, then all sums.

    Validates the ends only, which is enough that no check of the log can fail.
    """
    runs, rest = divmod(len(value) - _LOG_HEAD_BYTES, _ENTRY_BYTES)
    if rest or not 1 <= runs <= MAX_RUNS:
        return None
    cells = array("q", value[_HEAD.size :])
    if sys.byteorder == "big":
        cells.byteswap()
    times, sums = cells[1::2], cells[::2]
    if 0 <= times[0] <= times[-1] <= _LARGEST and 0 <= sums[0] <= sums[-1] <= _LARGEST:
        return times.tobytes() + sums.tobytes()
    return None


def _slots(_value: bytes, _rule: Limit) -> BucketState:
    """Return ``None``: a concurrency bucket has no state beyond the head that a reset returns."""
    return None


_STATES: Final = MappingProxyType(
    {
        Algorithm.TOKEN_BUCKET: _token_bucket,
        Algorithm.FIXED_WINDOW: _fixed_window,
        Algorithm.SLIDING_WINDOW: _sliding_window,
        Algorithm.CONCURRENCY: _slots,
    }
)


LIBRARY: Final = (
    "bucket.lua",
    "token_bucket.lua",
    "fixed_window.lua",
    "sliding_window.lua",
    "ledger.lua",
)
"""Common start of all scripts; the server cannot include one script in another."""

SHEBANG: Final = "#!lua\n"
"""Makes a server without memory, or a replica, refuse the whole script instead of its first write."""


class Script:
    """One script; ``sha`` is the SHA-1 of ``text`` in hexadecimal, as EVALSHA takes it."""

    __slots__ = ("sha", "text")

    def __init__(self, text: bytes) -> None:
        self.text = text
        self.sha = sha1(text, usedforsecurity=False).hexdigest().encode()


def load(name: str, *more: str) -> Script:
    """Load the script ``name``, preceded by the common start and the files ``more``."""
    scripts = files("ratelimitd.cluster.redis") / "scripts"
    names = (*LIBRARY, *more, f"{name}.lua")
    parts = [(scripts / part).read_text(encoding="utf-8") for part in names]
    return Script((SHEBANG + "\n".join(parts)).encode())


SETTLE: Final = load("settle")
"""Applies one batch of one sender, exactly once."""

DECIDE: Final = load("decide", "concurrency.lua")
"""Decides checks in order."""

FIRST_CHECK: Final = load("first_check")
"""Decides one check of each of several buckets, and returns their states."""

RESET: Final = load("reset", "concurrency.lua")
"""Makes a bucket full, and returns its value."""

Request = tuple[list[bytes], list[bytes]]
"""The keys and the arguments of a script."""

_NO_GENERATION: Final = -1

_NUMBER: Final = Struct("<Q")
_UPDATE: Final = Struct("<BiQIIIII")
_UPDATE_OF_ONE_RUN: Final = Struct("<BiQIIIIIQQ")
_HEAD_AND_RUN: Final = Struct(f"<{_UPDATE.size}sQQ")
_ANY_RUN: Final = ((0, 0),)
_PAIR: Final = Struct("<QQ")
_REFUND: Final = Struct("<IQQQQQ")
_COUNT: Final = Struct("<I")
_REFUNDS: Final = 128
_CHECK: Final = Struct("<BBQIIIIq")
_ANSWER: Final = Struct("<HIIQ")
ANSWER_BYTES: Final = _ANSWER.size
_RULE: Final = Struct("<BQIII")

_GRANTED: Final = 1

_NO_ANSWERS: Final = "the reply of the shared state to checks is malformed"

_VERDICTS: Final[Mapping[int, tuple[bool, Reason]]] = {
    1 + (Reason.WITHIN_LIMIT << 8): (ALLOWED, WITHIN_LIMIT),
    Reason.LIMIT_EXCEEDED << 8: (DENIED, LIMIT_EXCEEDED),
    Reason.COST_EXCEEDS_LIMIT << 8: (DENIED, COST_EXCEEDS_LIMIT),
}
"""(allowed, reason) by the first two bytes of an answer; there are no others."""


def bucket_key(key: bytes) -> bytes:
    """Return the store's key of the bucket with stored name ``key`` (:meth:`BucketKeys.stored`)."""
    return _PREFIXES[key[0]] + key


def holds_key(key: bytes) -> bytes:
    """Return the store's key of the open holds of a bucket."""
    return _PREFIXES[key[0]] + b"holds:" + key


def prefix(tag: int) -> bytes:
    """Return the common start of the keys of one hash tag, which are in one slot and so usable in one script."""
    return _PREFIXES[tag]


_PREFIXES: Final = tuple([b"rl1:{%02x}:" % tag for tag in range(256)])


# One batch


def settle_request(tag: int, batch: Batch) -> Request:
    """Return keys and arguments of ``SETTLE``; the state of the sender is stored under the hash tag ``tag``."""
    keys = [_PREFIXES[tag] + b"s:" + batch.sender.encode()]
    keys += [_PREFIXES[name[0]] + name for name in (*batch.updates, *batch.cold)]
    parts = [_NUMBER.pack(batch.number)]
    parts += [_packed(update) for update in batch.updates.values()]
    parts += _packed_cold(batch.cold.values())
    return keys, [b"".join(parts)]


def _packed(update: Update) -> bytes:
    rule, generation, runs, asks, refunds = update
    if generation is None:
        generation = _NO_GENERATION
    kind = NUMBERS[rule.algorithm]
    if len(runs) == 1 and not asks and not refunds:
        # By far the most frequent kind, in half the time.
        return _UPDATE_OF_ONE_RUN.pack(
            kind, generation, rule.revision, rule.limit, rule.burst, rule.window_seconds, 1, 0,
            *runs[0],
        )  # fmt: skip
    if refunds:
        kind += _REFUNDS
    head = _UPDATE.pack(
        kind, generation, rule.revision, rule.limit, rule.burst, rule.window_seconds, len(runs),
        len(asks),
    )  # fmt: skip
    if refunds:
        head += _COUNT.pack(len(refunds)) + b"".join([_REFUND.pack(*refund) for refund in refunds])
    return head + b"".join([_PAIR.pack(*pair) for pair in (*runs, *asks)])


def _packed_cold(spends: Iterable[ColdSpend]) -> Iterator[bytes]:
    """Pack cold spends. Many in a row have the same rule and generation: their head is packed once."""
    rule, base, head = None, 0, b""
    for spend in spends:
        its_rule, its_base, at_us, cost, refilled, _ = spend
        if refilled:
            yield _packed(Update(its_rule, generation_of(its_base), spend.runs()))
            continue
        if its_rule is not rule or (its_base ^ base) & HEAD_MASK:
            rule, base = its_rule, its_base
            head = _packed(Update(rule, generation_of(base), _ANY_RUN))[: _UPDATE.size]
        yield _HEAD_AND_RUN.pack(head, at_us, cost)


def settle_reply(batch: Batch, reply: Any) -> Reply | None:
    """Decode the reply to a batch; ``None`` if a later one of the same sender was applied first.

    Raises:
        StoreCorruptError: it is no reply to this batch.
    """
    if reply == 0:
        return None
    grants, values = _settled(batch, reply)
    settled, new = {}, tuple.__new__  # calling the class itself takes 0.2 µs longer
    first = 0
    of_updates, of_cold = values[: len(batch.updates)], values[len(batch.updates) :]
    for (key, update), value in zip(batch.updates.items(), of_updates, strict=True):
        shared = bucket_of(value, update.rule)
        if update.asks:
            after = first + len(update.asks)
            granted = tuple([grant == _GRANTED for grant in grants[first:after]])
            settled[key] = Settled(shared, granted)
            first = after
        else:
            settled[key] = new(Settled, (shared, ()))
    return Reply(batch.number, settled, _packed_buckets(batch.cold, of_cold))


def _packed_buckets(cold: Mapping[bytes, ColdSpend], values: Sequence[Any]) -> dict[bytes, Packed]:
    """Decode the states after cold spends, which must exist, and pack them.

    Many states share a head: only the first of them is decoded in full, the rest in a third of the time.
    """
    packed: dict[bytes, Packed] = {}
    by_algorithm: dict[Algorithm, dict[bytes, int]] = {}
    rule, window_us, has_units, heads = None, 0, False, {}
    read = zip(cold.items(), values, _fields_of(values), strict=True)
    for (name, spend), value, (head, spent, units, latest_us) in read:
        if spend[0] is not rule:
            rule = spend[0]
            window_us, has_units = rule.window_us, rule.algorithm is Algorithm.TOKEN_BUCKET
            heads = by_algorithm.setdefault(rule.algorithm, {})
        known = heads.get(head)
        if known and spent <= _LARGEST and latest_us <= _LARGEST and units < window_us:
            # Of a fixed window, units are the count of the window before, which its packed form omits.
            number = spent * window_us + units if has_units else spent
            packed[name] = number << SPENT_SHIFT | latest_us << LATEST_SHIFT | known
            continue
        packed[name] = state = pack(bucket_of(value, rule))
        if head and type(state) is int:
            heads[head] = state & HEAD_MASK | 1
    return packed


def _fields_of(values: Sequence[Any]) -> Iterable[tuple[bytes, int, int, int]]:
    """Return head, two numbers and time of each value of that size; decodes all at once if possible."""
    try:
        if {*map(len, values)} == {_PAIR_BYTES}:
            return _PAIR_WITH_HEAD.iter_unpack(b"".join(values))
    except TypeError:  # not all are bytes
        pass
    return [
        _PAIR_WITH_HEAD.unpack(value)
        if isinstance(value, bytes) and len(value) == _PAIR_BYTES
        else _NO_FIELDS
        for value in values
    ]


def replaced(reply: Any) -> int:
    """Return how many malformed values the store replaced, from the reply to a batch."""
    match reply:
        # equivalent: none is 0 in either way
        case [bytes(), int() as count, *values] if 0 <= count <= len(values):
            return count
    return 0


def _settled(batch: Batch, reply: Any) -> tuple[bytes, Sequence[Any]]:
    """Return the grants, and the value of each bucket."""
    match reply:
        case [bytes() as grants, int(), *values]:
            asks = sum([len(update.asks) for update in batch.updates.values()])
            if len(grants) == asks and len(values) == len(batch.updates) + len(batch.cold):
                return grants, values
    message = "the reply of the shared state to a batch is malformed"
    raise StoreCorruptError(message)


# Checks


JOINED: Final = 2
"""Flag of a check for :data:`DECIDE`, beside ``peek``: joined with the next one; all are charged, or none."""


def checks_request(checks: Sequence[StoreCheck]) -> Request:
    """Return keys and arguments of ``DECIDE`` for checks, and of ``FIRST_CHECK`` for checks of different buckets."""
    return [bucket_key(check[0]) for check in checks], [packed_checks(checks)]


def packed_checks(checks: Sequence[StoreCheck]) -> bytes:
    """Encode checks."""
    arguments = [
        _CHECK.pack(
            NUMBERS[rule.algorithm],
            peek,
            rule.revision,
            rule.limit,
            rule.burst,
            rule.window_seconds,
            cost,
            now_us,
        )
        for _, rule, now_us, cost, peek in checks
    ]
    return b"".join(arguments)


def decided(checks: Sequence[StoreCheck], reply: Any) -> list[Outcome | None]:
    """Decode the outcomes of checks, without states.

    ``None``: the value was no bucket, or the answer is impossible.

    Raises:
        StoreCorruptError: no reply to these.
    """
    if isinstance(reply, bytes) and len(reply) == len(checks) * _ANSWER.size:
        return outcomes_of(reply)
    raise StoreCorruptError(_NO_ANSWERS)


def outcomes_of(answers: bytes) -> list[Outcome | None]:
    """Decode complete answers to checks; ``None`` for a missing or impossible one."""
    return [_outcome(*answer) for answer in _ANSWER.iter_unpack(answers)]


def first_checked(
    checks: Sequence[StoreCheck], reply: Any
) -> tuple[int, list[FirstResult | StoreCorruptError]]:
    """Return the number of malformed values, and the outcome and state of each check, or the error of reading it.

    Raises:
        StoreCorruptError: no reply to these.
    """
    match reply:
        case [int() as count, *values] if len(values) == len(checks) and 0 <= count <= len(checks):
            return count, [
                _first_result(check[1], value) for check, value in zip(checks, values, strict=True)
            ]
    raise StoreCorruptError(_NO_ANSWERS)


def _first_result(rule: Limit, reply: Any) -> FirstResult | StoreCorruptError:
    try:
        outcome = _outcome(*_ANSWER.unpack_from(reply))
        if outcome is not None:
            return outcome, bucket_of(reply[_ANSWER.size :], rule)
    except StoreCorruptError as no_bucket:
        return no_bucket
    except (TypeError, error):
        pass
    return StoreCorruptError(_NO_ANSWERS)


def _outcome(head: int, remaining: int, retry_after: int, reset_time: int) -> Outcome | None:
    """Decode the answer to a check; ``None`` if it is impossible."""
    verdict = _VERDICTS.get(head)
    if verdict is None or remaining | retry_after > INT32_MAX or reset_time > MAX_TIME_US:
        return None
    return verdict[0], remaining, reset_time, retry_after, verdict[1], None


# Resets


def reset_request(name: bytes, rule: Limit, least: int) -> Request:
    """Return keys and arguments of ``RESET`` for a bucket, with its rule and the least generation."""
    argument = _RULE.pack(
        NUMBERS[rule.algorithm], rule.revision, rule.limit, rule.burst, rule.window_seconds
    )
    return [bucket_key(name), holds_key(name)], [argument, b"%d" % least]
