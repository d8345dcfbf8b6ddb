"""The contract's request messages as the server reads them: int32 as int64 and string as bytes.

A protobuf parser truncates an int32 that is too wide to 32 bits (2^32+1 arrives as 1), and refuses a whole message for
one byte that is not UTF-8, without naming the field. The services validate both and name the field: requests are parsed
by classes made from the same descriptors with wider fields. The wire format and the parser (C) are the same. A map is
the list of its entries, because a map has no keys that are bytes.

Answers are written with the generated classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Final, Protocol

from google.protobuf import descriptor_pb2, empty_pb2, field_mask_pb2, message_factory
from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message

from ratelimitd.errors import FieldViolation, InvalidInputError
from ratelimiter.v1 import ratelimiter_pb2

_MORE: Final = 0x80
"""Continuation bit of a varint."""

ONE_BYTE: Final = _MORE
"""Smaller numbers take one byte."""

_MAX_BYTES: Final = 10

_KEPT_BITS: Final = 14
_KEPT: Final = 1 << _KEPT_BITS


def varint(number: int) -> bytes:
    """Return the shortest encoding of a number of at least 0."""
    if number < _KEPT:
        return KEPT[number]
    return _CONTINUED[number & _KEPT - 1] + varint(number >> _KEPT_BITS)


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the varint at ``position`` and the position after it; the end of the data if it is malformed."""
    value = shift = 0
    for byte in data[position : position + _MAX_BYTES]:
        position += 1
        value |= (byte & ~_MORE) << shift
        if byte < _MORE:
            return value, position
        shift += 7
    return value, len(data)


def _short(number: int) -> bytes:
    """Encode a number of at most 14 bits."""
    low, high = number & _MORE - 1, number >> 7
    return bytes((low | _MORE, high)) if high else bytes((low,))


KEPT: Final = tuple(map(_short, range(_KEPT)))
"""Encodings of small numbers: 30 ns to look up, 300 to compute. With the next table, about 1.4 MB."""

_CONTINUED: Final = tuple(
    bytes((number & _MORE - 1 | _MORE, number >> 7 | _MORE)) for number in range(_KEPT)
)
"""The same with the continuation bit."""


WHOLE_MESSAGE: Final = "request"
"""Field name in errors about bytes that are not a message."""

MAX_TOP_LEVEL_FIELDS: Final = 2_000
"""Fields of a large message that are counted, in about 1 ms, before it is refused. The longest batch has half as
many."""

ITEM_TAG: Final = b"\x0a"
"""``BatchRateLimitRequest.requests`` and ``ApplyRateLimitsRequest.rate_limits``: field 1, length-delimited."""

COUNT_ABOVE_BYTES: Final = 16_384
"""Longer messages have their fields counted before they are parsed. 4 MiB of empty entries of a repeated field block
the event loop for 0.2 to 19 s, only to be refused; an honest message other than a batch is seldom longer."""

MAX_FIELDS: Final = 2_000
"""Fields of a long message: a rule of 32 plans has some 330, a batch of 1,000 assignments as many entries."""

MAX_BATCH_FIELDS: Final = 16_000
"""The same of a batch of checks: 1,000 of eight identities have 13,000."""

_LONGEST_PREFIX_BYTES: Final = 3
"""Tag and length of an item of a batch, if that is of less than 16 KiB."""

_Field = descriptor_pb2.FieldDescriptorProto
_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
_GROUP_MARKS: Final = (3, 4)


class WireIdentity(Protocol):
    """``Identity``."""

    identifier: bytes
    identifier_type: bytes


class WireCheck(WireIdentity, Protocol):
    """``RateLimitRequest``; the same in a batch."""

    endpoint: bytes
    tokens_requested: int
    timestamp: int
    peek: bool
    also: Sequence[WireIdentity]
    max_wait_ms: int


class WireBatch(Protocol):
    """``BatchRateLimitRequest``."""

    requests: Sequence[WireCheck]


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


class WireLimitList(Protocol):
    """``LimitList``."""

    limits: Sequence[WireLimit]


class WirePlan(Protocol):
    """An entry of ``RateLimit.plans``."""

    key: bytes
    value: WireLimitList


class WireRule(Protocol):
    """``RateLimit``. Whether ``enabled`` was sent, ``HasField`` knows."""

    id: bytes
    endpoint: bytes
    identifier_type: bytes
    limit: int
    window_seconds: int
    algorithm: bytes
    enabled: bool
    etag: bytes
    limits: Sequence[WireLimit]
    plans: Sequence[WirePlan]

    def HasField(self, field_name: str) -> bool:  # noqa: N802 -- protobuf's name
        """Whether an optional field was sent."""


class WireCreate(Protocol):
    """``CreateRateLimitRequest``."""

    rate_limit: WireRule


class WireMask(Protocol):
    """``google.protobuf.FieldMask``."""

    paths: Sequence[bytes]


class WireUpdate(Protocol):
    """``UpdateRateLimitRequest``."""

    rate_limit: WireRule
    update_mask: WireMask


class WireDelete(Protocol):
    """``DeleteRateLimitRequest``."""

    id: bytes
    etag: bytes


class WireGet(Protocol):
    """``GetRateLimitRequest``."""

    id: bytes
    endpoint: bytes
    identifier_type: bytes


class WireList(Protocol):
    """``ListRateLimitsRequest``."""

    endpoint: bytes
    identifier_type: bytes
    page_size: int
    page_token: bytes
    unused: bool


class WireApply(Protocol):
    """``ApplyRateLimitsRequest`` without its rules."""

    prune: bool
    dry_run: bool
    revision: int
    as_of: int


class WireAssignment(Protocol):
    """``Assignment``."""

    identity: WireIdentity
    plan: bytes
    expire_time: int
    note: bytes
    etag: bytes


class WireAssign(Protocol):
    """``AssignPlanRequest``."""

    assignment: WireAssignment


class WireAssignBatch(Protocol):
    """``BatchAssignPlansRequest``."""

    assignments: Sequence[WireAssignment]


class WireGetAssignment(Protocol):
    """``GetAssignmentRequest``."""

    identity: WireIdentity


class WireUnassign(WireGetAssignment, Protocol):
    """``UnassignPlanRequest``."""

    etag: bytes


class WireAssignments(Protocol):
    """``ListAssignmentsRequest``."""

    plan: bytes
    identifier_type: bytes
    identifier_prefix: bytes
    page_size: int
    page_token: bytes


class WireMetrics(Protocol):
    """``MetricsRequest``."""

    names: Sequence[bytes]


class WireHold(Protocol):
    """``HoldRequest``."""

    check: WireCheck
    hold_id: bytes
    ttl_seconds: int
    lease: bool


class WireSettle(Protocol):
    """``SettleRequest``."""

    hold: bytes
    actual: int


class WireExtend(Protocol):
    """``ExtendRequest``."""

    hold: bytes
    ttl_seconds: int


class WireReset(WireIdentity, Protocol):
    """``ResetRequest``."""

    endpoint: bytes
    also: Sequence[WireIdentity]


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
                return None  # parsers take a longer one only up to a point; or it is cut off
        position = start + size
        items.append(data[start:position])
    return items if position == end else None


def rules_within(data: bytes, others: bytearray) -> Iterator[bytes]:
    """Yield the rules of an ``ApplyRateLimitsRequest``, unparsed; add its other fields to ``others``.

    Raises:
        InvalidInputError: the bytes are no such message, or have too many other fields.
    """
    position, fields = 0, 0
    while position < len(data):
        start = position
        tag, position = read_varint(data, position)
        if tag == ITEM_TAG[0]:
            size, first = read_varint(data, position)
            position = first + size
            if data[first - 1] >= ONE_BYTE or position > len(data):
                raise _no_message(ratelimiter_pb2.ApplyRateLimitsRequest)
            yield data[first:position]
            continue
        if fields == MAX_FIELDS:
            raise InvalidInputError(FieldViolation(WHOLE_MESSAGE, "has too many fields"))
        fields += 1
        if tag & 7 in _GROUP_MARKS:
            raise _no_message(ratelimiter_pb2.ApplyRateLimitsRequest)
        position = _after(data, position, tag & 7)
        others += data[start:position]


def count_top_level(data: bytes, number: int, at_most: int) -> int:
    """Count the length-delimited fields of this number, without parsing the message.

    Stops at ``at_most`` + 1. Bytes that are no message end the count early: the parser will refuse them.

    Raises:
        InvalidInputError: the message has more than ``MAX_TOP_LEVEL_FIELDS`` fields.
    """
    wanted_tag = number << 3 | _LENGTH_DELIMITED
    found = position = fields = 0
    while position < len(data) and found <= at_most:
        if fields == MAX_TOP_LEVEL_FIELDS:
            message = f"has more than {MAX_TOP_LEVEL_FIELDS} fields"
            raise InvalidInputError(FieldViolation(WHOLE_MESSAGE, message))
        fields += 1
        tag, position = read_varint(data, position)
        found += tag == wanted_tag
        position = _after(data, position, tag & 7)
    return found


def _no_message(message_class: type[Message]) -> InvalidInputError:
    text = f"the bytes are no {message_class.DESCRIPTOR.name} message"
    return InvalidInputError(FieldViolation(WHOLE_MESSAGE, text))


def _count_fields(  # noqa: PLR0917 -- a part of the data without a copy
    data: bytes, position: int, end: int, message: Descriptor, left: int
) -> int:
    """Return how many of ``left`` fields remain after a message and those in it that hold repeated fields.

    Bytes that are no message may raise ``IndexError`` or end the count early: the parser will refuse them.

    Raises:
        InvalidInputError: the message has more fields.
    """
    within = _holders(message)
    while position < end:
        if not left:
            raise InvalidInputError(FieldViolation(WHOLE_MESSAGE, "has too many fields"))
        left -= 1
        # Nearly all numbers take one byte; a call for each would take three times as long.
        tag, position = data[position], position + 1
        if tag >= ONE_BYTE:
            tag, position = read_varint(data, position - 1)
        if tag & 7 != _LENGTH_DELIMITED:
            position = _after(data, position, tag & 7)
            continue
        length, position = data[position], position + 1
        if length >= ONE_BYTE:
            length, position = read_varint(data, position - 1)
        if tag in within:
            left = _count_fields(data, position, position + length, within[tag], left)
        position += length
    return left


@cache
def _holders(message: Descriptor) -> Mapping[int, Descriptor]:
    """Return the messages within a message that hold repeated fields, by their tags."""
    return {
        field.number << 3 | _LENGTH_DELIMITED: field.message_type
        for field in message.fields
        if field.message_type is not None
        and (
            any(one.is_repeated for one in field.message_type.fields)
            or _holders(field.message_type)
        )
    }


def _after(data: bytes, position: int, wire_type: int) -> int:
    """The position behind a field whose tag ends at ``position``."""
    if wire_type == _LENGTH_DELIMITED:
        length, position = read_varint(data, position)
        return position + length
    if wire_type == _VARINT:
        return read_varint(data, position)[1]
    # The two marks of a group have no body of their own: its fields are stepped over one by one.
    return position + {_FIXED64: 8, _FIXED32: 4}.get(wire_type, 0)


def _widened(file: FileDescriptor) -> descriptor_pb2.FileDescriptorProto:
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    nested = [entry for message in proto.message_type for entry in message.nested_type]
    for entry in nested:
        entry.options.map_entry = False
    for message in (*proto.message_type, *nested):
        for field in message.field:
            if field.type == _Field.TYPE_INT32:
                field.type = _Field.TYPE_INT64
            elif field.type == _Field.TYPE_STRING:
                field.type = _Field.TYPE_BYTES
    return proto


def _pool() -> DescriptorPool:
    pool = DescriptorPool()
    for module in (empty_pb2, field_mask_pb2, ratelimiter_pb2):
        pool.Add(_widened(module.DESCRIPTOR))
    return pool


_POOL: Final = _pool()


def _parser(contract: type[Message], max_fields: int = MAX_FIELDS) -> Callable[[bytes], Any]:
    """Return what reads the messages of a class of the contract, by the class with wider fields."""
    descriptor = _POOL.FindMessageTypeByName(contract.DESCRIPTOR.full_name)
    from_string = message_factory.GetMessageClass(descriptor).FromString

    def parse(data: bytes) -> Message:
        if len(data) > COUNT_ABOVE_BYTES:
            with suppress(IndexError):
                _count_fields(data, 0, len(data), descriptor, max_fields)
        try:
            return from_string(data)
        except DecodeError:
            raise _no_message(contract) from None

    return parse


# Each reads the message that its row names, and raises InvalidInputError when the bytes are none.
parse_check: Final[Callable[[bytes], WireCheck]] = _parser(ratelimiter_pb2.RateLimitRequest)
parse_batch: Final[Callable[[bytes], WireBatch]] = _parser(
    ratelimiter_pb2.BatchRateLimitRequest, MAX_BATCH_FIELDS
)
parse_create: Final[Callable[[bytes], WireCreate]] = _parser(ratelimiter_pb2.CreateRateLimitRequest)
parse_update: Final[Callable[[bytes], WireUpdate]] = _parser(ratelimiter_pb2.UpdateRateLimitRequest)
parse_delete: Final[Callable[[bytes], WireDelete]] = _parser(ratelimiter_pb2.DeleteRateLimitRequest)
parse_get: Final[Callable[[bytes], WireGet]] = _parser(ratelimiter_pb2.GetRateLimitRequest)
parse_list: Final[Callable[[bytes], WireList]] = _parser(ratelimiter_pb2.ListRateLimitsRequest)
parse_rule: Final[Callable[[bytes], WireRule]] = _parser(ratelimiter_pb2.RateLimit)
parse_apply: Final[Callable[[bytes], WireApply]] = _parser(ratelimiter_pb2.ApplyRateLimitsRequest)
"""As far as :func:`rules_within` leaves it."""
parse_assign: Final[Callable[[bytes], WireAssign]] = _parser(ratelimiter_pb2.AssignPlanRequest)
parse_assign_batch: Final[Callable[[bytes], WireAssignBatch]] = _parser(
    ratelimiter_pb2.BatchAssignPlansRequest
)
parse_unassign: Final[Callable[[bytes], WireUnassign]] = _parser(
    ratelimiter_pb2.UnassignPlanRequest
)
parse_get_assignment: Final[Callable[[bytes], WireGetAssignment]] = _parser(
    ratelimiter_pb2.GetAssignmentRequest
)
parse_assignments: Final[Callable[[bytes], WireAssignments]] = _parser(
    ratelimiter_pb2.ListAssignmentsRequest
)
parse_metrics: Final[Callable[[bytes], WireMetrics]] = _parser(ratelimiter_pb2.MetricsRequest)
parse_reset: Final[Callable[[bytes], WireReset]] = _parser(ratelimiter_pb2.ResetRequest)
parse_hold: Final[Callable[[bytes], WireHold]] = _parser(ratelimiter_pb2.HoldRequest)
parse_settle: Final[Callable[[bytes], WireSettle]] = _parser(ratelimiter_pb2.SettleRequest)
parse_extend: Final[Callable[[bytes], WireExtend]] = _parser(ratelimiter_pb2.ExtendRequest)
parse_list_unmatched: Final[Callable[[bytes], object]] = _parser(
    ratelimiter_pb2.ListUnmatchedRequest
)
parse_list_holds: Final[Callable[[bytes], object]] = _parser(ratelimiter_pb2.ListHoldsRequest)
parse_empty: Final[Callable[[bytes], object]] = _parser(empty_pb2.Empty)
"""Whatever it carries is unknown to us and ignored."""
