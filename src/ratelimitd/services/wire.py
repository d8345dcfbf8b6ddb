"""The contract's request messages, with wider fields than the generated classes have.

Answers are written with the generated classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, Protocol

from google.protobuf import descriptor_pb2, empty_pb2, field_mask_pb2

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
    plans: Sequence[WirePlan]

    def HasField(self, field_name: str) -> bool:  # noqa: N802 -- protobuf's name
        """Return whether an optional field was sent."""


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
"""Parses the fields that :func:`rules_within` leaves over."""
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
EMPTY: Final = b""
"""``google.protobuf.Empty`` as an answer."""
parse_empty: Final[Callable[[bytes], object]] = _parser(empty_pb2.Empty)
"""Ignores unknown fields."""
