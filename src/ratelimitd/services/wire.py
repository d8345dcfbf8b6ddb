"""The contract's request messages as the server reads them: int32 as int64 and string as bytes.

A protobuf parser truncates an int32 that is too wide to 32 bits (2^32+1 arrives as 1), and refuses a whole message for
one byte that is not UTF-8, without naming the field. The services validate both and name the field: requests are parsed
by classes made from the same descriptors with wider fields. The wire format and the parser (C) are the same. A map is
the list of its entries, because a map has no keys that are bytes.

Answers are written with the generated classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Final, Protocol, cast

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


def parse_check(data: bytes) -> WireCheck:
    """Read a ``RateLimitRequest``. Like all of these, raises ``InvalidInputError`` when the bytes are none."""
    return cast("WireCheck", _parse(_RATE_LIMIT, data))


def parse_batch(data: bytes) -> WireBatch:
    """Read a ``BatchRateLimitRequest``."""
    return cast("WireBatch", _parse(_BATCH, data))


def parse_create(data: bytes) -> WireCreate:
    """Read a ``CreateRateLimitRequest``."""
    return cast("WireCreate", _parse(_CREATE, data))


def parse_update(data: bytes) -> WireUpdate:
    """Read an ``UpdateRateLimitRequest``."""
    return cast("WireUpdate", _parse(_UPDATE, data))


def parse_delete(data: bytes) -> WireDelete:
    """Read a ``DeleteRateLimitRequest``."""
    return cast("WireDelete", _parse(_DELETE, data))


def parse_get(data: bytes) -> WireGet:
    """Read a ``GetRateLimitRequest``."""
    return cast("WireGet", _parse(_GET, data))


def parse_list(data: bytes) -> WireList:
    """Read a ``ListRateLimitsRequest``."""
    return cast("WireList", _parse(_LIST, data))


def parse_rule(data: bytes) -> WireRule:
    """Read a ``RateLimit``."""
    return cast("WireRule", _parse(_RULE, data))


def parse_apply(data: bytes) -> WireApply:
    """Read an ``ApplyRateLimitsRequest``, as far as :func:`rules_within` leaves it."""
    return cast("WireApply", _parse(_APPLY, data))


def parse_assign(data: bytes) -> WireAssign:
    """Read an ``AssignPlanRequest``."""
    return cast("WireAssign", _parse(_ASSIGN, data))


def parse_assign_batch(data: bytes) -> WireAssignBatch:
    """Read a ``BatchAssignPlansRequest``."""
    return cast("WireAssignBatch", _parse(_ASSIGN_BATCH, data))


def parse_unassign(data: bytes) -> WireUnassign:
    """Read an ``UnassignPlanRequest``."""
    return cast("WireUnassign", _parse(_UNASSIGN, data))


def parse_get_assignment(data: bytes) -> WireGetAssignment:
    """Read a ``GetAssignmentRequest``."""
    return cast("WireGetAssignment", _parse(_GET_ASSIGNMENT, data))


def parse_assignments(data: bytes) -> WireAssignments:
    """Read a ``ListAssignmentsRequest``."""
    return cast("WireAssignments", _parse(_ASSIGNMENTS, data))


def parse_metrics(data: bytes) -> WireMetrics:
    """Read a ``MetricsRequest``."""
    return cast("WireMetrics", _parse(_METRICS, data))


def parse_reset(data: bytes) -> WireReset:
    """Read a ``ResetRequest``."""
    return cast("WireReset", _parse(_RESET, data))


def parse_hold(data: bytes) -> WireHold:
    """Read a ``HoldRequest``."""
    return cast("WireHold", _parse(_HOLD, data))


def parse_settle(data: bytes) -> WireSettle:
    """Read a ``SettleRequest``."""
    return cast("WireSettle", _parse(_SETTLE, data))


def parse_extend(data: bytes) -> WireExtend:
    """Read an ``ExtendRequest``."""
    return cast("WireExtend", _parse(_EXTEND, data))


def parse_list_unmatched(data: bytes) -> None:
    """Read a ``ListUnmatchedRequest``, which says nothing."""
    _parse(_LIST_UNMATCHED, data)


def parse_list_holds(data: bytes) -> None:
    """Read a ``ListHoldsRequest``, which says nothing."""
    _parse(_LIST_HOLDS, data)


def parse_empty(data: bytes) -> None:
    """Read a ``google.protobuf.Empty``: whatever it carries is unknown to us and ignored."""
    _parse(_EMPTY, data)


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
                raise _no_message(_APPLY)
            yield data[first:position]
            continue
        if fields == MAX_FIELDS:
            raise InvalidInputError(FieldViolation(WHOLE_MESSAGE, "has too many fields"))
        fields += 1
        if tag & 7 in _GROUP_MARKS:
            raise _no_message(_APPLY)
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


def _parse(message_class: type[Message], data: bytes) -> Message:
    if len(data) > COUNT_ABOVE_BYTES:
        at_most = MAX_BATCH_FIELDS if message_class is _BATCH else MAX_FIELDS
        with suppress(IndexError):
            _count_fields(data, 0, len(data), cast("Descriptor", message_class.DESCRIPTOR), at_most)
    try:
        return message_class.FromString(data)
    except DecodeError:
        raise _no_message(message_class) from None


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


def _message(full_name: str) -> type[Message]:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(full_name))


_RATE_LIMIT: Final = _message("ratelimiter.v1.RateLimitRequest")
_BATCH: Final = _message("ratelimiter.v1.BatchRateLimitRequest")
_CREATE: Final = _message("ratelimiter.v1.CreateRateLimitRequest")
_UPDATE: Final = _message("ratelimiter.v1.UpdateRateLimitRequest")
_DELETE: Final = _message("ratelimiter.v1.DeleteRateLimitRequest")
_GET: Final = _message("ratelimiter.v1.GetRateLimitRequest")
_LIST: Final = _message("ratelimiter.v1.ListRateLimitsRequest")
_RULE: Final = _message("ratelimiter.v1.RateLimit")
_APPLY: Final = _message("ratelimiter.v1.ApplyRateLimitsRequest")
_ASSIGN: Final = _message("ratelimiter.v1.AssignPlanRequest")
_ASSIGN_BATCH: Final = _message("ratelimiter.v1.BatchAssignPlansRequest")
_UNASSIGN: Final = _message("ratelimiter.v1.UnassignPlanRequest")
_GET_ASSIGNMENT: Final = _message("ratelimiter.v1.GetAssignmentRequest")
_ASSIGNMENTS: Final = _message("ratelimiter.v1.ListAssignmentsRequest")
_METRICS: Final = _message("ratelimiter.v1.MetricsRequest")
_RESET: Final = _message("ratelimiter.v1.ResetRequest")
_HOLD: Final = _message("ratelimiter.v1.HoldRequest")
_SETTLE: Final = _message("ratelimiter.v1.SettleRequest")
_EXTEND: Final = _message("ratelimiter.v1.ExtendRequest")
_LIST_UNMATCHED: Final = _message("ratelimiter.v1.ListUnmatchedRequest")
_LIST_HOLDS: Final = _message("ratelimiter.v1.ListHoldsRequest")
_EMPTY: Final = _message("google.protobuf.Empty")
