"""The contract's request messages, with wider fields than the generated classes have.

The protocols describe those that several functions read. Answers are written with the generated classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, Final, Protocol

from google.protobuf import descriptor_pb2, empty_pb2, field_mask_pb2
from google.protobuf.message import Message

from ratelimitd.errors import FieldViolation, InvalidInputError
from ratelimitd.services.wire_format import (
    GROUP_MARKS,
    MAX_FIELDS,
    ONE_BYTE,
    WHOLE_MESSAGE,
    after_field,
    no_message,
    parser,
    read_varint,
    widened_pool,
)
from ratelimiter.v1 import ratelimiter_pb2

MAX_TOP_LEVEL_FIELDS: Final = 2_000
"""Fields of a large message that are counted, in about 1 ms, before it is refused. The longest batch has half of
them."""

ITEM_TAG: Final = b"\x0a"
"""``BatchRateLimitRequest.requests`` and ``ApplyRateLimitsRequest.rate_limits``: field 1, length-delimited."""

MAX_BATCH_FIELDS: Final = 16_000
"""The same for a batch of checks: 1,000 with eight identities have 13,000 fields."""

_LONGEST_PREFIX_BYTES: Final = 3
"""Tag and length of an item of a batch below 16 KiB."""


class WireIdentity(Protocol):
    """``Identity``."""

    identifier: bytes
    identifier_type: bytes


class WireCheck(WireIdentity, Protocol):
    """``RateLimitRequest``, alone or in a batch."""

    endpoint: bytes
    tokens_requested: int
    timestamp: int
    peek: bool
    also: Sequence[WireIdentity]
    max_wait_ms: int


class WireLimit(Protocol):
    """``Limit``."""

    name: bytes
    limit: int
    window_seconds: int
    algorithm: bytes
    burst: int
    period: int
    time_zone: bytes
    anchor_day: int
    enforcement: int


class WireRule(Protocol):
    """``RateLimit``. ``HasField`` shows whether ``enabled`` was sent."""

    id: bytes
    endpoint: bytes
    identifier_type: bytes
    limit: int
    window_seconds: int
    algorithm: bytes
    enabled: bool
    etag: bytes
    limits: Sequence[WireLimit]
    plans: Sequence[Any]

    def HasField(self, field_name: str) -> bool:  # noqa: N802 -- protobuf's name
        """Return whether an optional field was sent."""


class WireAssignment(Protocol):
    """``Assignment``."""

    identity: WireIdentity
    plan: bytes
    expire_time: int
    note: bytes
    etag: bytes


class WireHold(Protocol):
    """``HoldRequest``."""

    check: WireCheck
    hold_id: bytes
    ttl_seconds: int
    lease: bool


class WireReset(WireIdentity, Protocol):
    """``ResetRequest``."""

    endpoint: bytes
    also: Sequence[WireIdentity]


def text_of(raw: bytes) -> str:
    """Decode a field. Invalid UTF-8 becomes lone surrogates, which validation refuses."""
    return raw.decode("utf-8", "surrogateescape")


def split_batch(data: bytes, at_most: int) -> list[bytes] | None:
    """Split a ``BatchRateLimitRequest`` into unparsed items, in 0.15 µs each.

    ``None`` unless the bytes are up to ``at_most`` consecutive items.
    """
    items: list[bytes] = []
    position, end = 0, len(data)
    while position < end and len(items) < at_most:
        start = position + 2
        if data[position] != ITEM_TAG[0] or start > end:
            return None
        size = data[position + 1]
        if size >= ONE_BYTE:
            size, start = read_varint(data, position + 1)
            if start > position + _LONGEST_PREFIX_BYTES or data[start - 1] >= ONE_BYTE:
                return None  # cut off, or longer than parsers accept in all cases
        position = start + size
        items.append(data[start:position])
    return items if position == end else None


def rules_within(data: bytes, others: bytearray) -> Iterator[bytes]:
    """Yield the rules of an ``ApplyRateLimitsRequest``, unparsed; add its other fields to ``others``.

    Raises:
        InvalidInputError: the bytes are not such a message, or have too many other fields.
    """
    position, fields = 0, 0
    while position < len(data):
        start = position
        tag, position = read_varint(data, position)
        if tag == ITEM_TAG[0]:
            size, first = read_varint(data, position)
            position = first + size
            if data[first - 1] >= ONE_BYTE or position > len(data):
                raise no_message(ratelimiter_pb2.ApplyRateLimitsRequest)
            yield data[first:position]
            continue
        if fields == MAX_FIELDS:
            raise InvalidInputError(FieldViolation(WHOLE_MESSAGE, "has too many fields"))
        fields += 1
        if tag & 7 in GROUP_MARKS:
            raise no_message(ratelimiter_pb2.ApplyRateLimitsRequest)
        position = after_field(data, position, tag & 7)
        others += data[start:position]


def count_items(data: bytes, at_most: int) -> int:
    """Count the items of a ``BatchRateLimitRequest`` without parsing it.

    Stops at ``at_most`` + 1. Malformed bytes end the count early: the parser will refuse them.

    Raises:
        InvalidInputError: the message has more than ``MAX_TOP_LEVEL_FIELDS`` fields.
    """
    found = position = fields = 0
    while position < len(data) and found <= at_most:
        if fields == MAX_TOP_LEVEL_FIELDS:
            message = f"has more than {MAX_TOP_LEVEL_FIELDS} fields"
            raise InvalidInputError(FieldViolation(WHOLE_MESSAGE, message))
        fields += 1
        tag, position = read_varint(data, position)
        found += tag == ITEM_TAG[0]
        position = after_field(data, position, tag & 7)
    return found


_POOL: Final = widened_pool(
    descriptor_pb2.FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
    for module in (empty_pb2, field_mask_pb2, ratelimiter_pb2)
)
_parser: Final = partial(parser, _POOL)


# Each parses the message of its row, and raises InvalidInputError for malformed bytes.
parse_check: Final[Callable[[bytes], WireCheck]] = _parser(ratelimiter_pb2.RateLimitRequest)
parse_batch: Final = _parser(ratelimiter_pb2.BatchRateLimitRequest, MAX_BATCH_FIELDS)
parse_rule: Final[Callable[[bytes], WireRule]] = _parser(ratelimiter_pb2.RateLimit)
parse_hold: Final[Callable[[bytes], WireHold]] = _parser(ratelimiter_pb2.HoldRequest)
parse_settle: Final = _parser(ratelimiter_pb2.SettleRequest)
parse_extend: Final = _parser(ratelimiter_pb2.ExtendRequest)

_parser_of: Final = cache(_parser)


def parse(contract: type[Message], data: bytes) -> Any:
    """Parse any other message of the contract; ``Empty`` may have unknown fields.

    Raises:
        InvalidInputError: the bytes are malformed.
    """
    return _parser_of(contract)(data)  # type: ignore[arg-type] # the class has a hash, its messages do not


EMPTY: Final = b""
"""``google.protobuf.Empty`` as an answer."""
