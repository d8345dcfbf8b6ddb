"""Protobuf messages as the server reads them: int32 as int64, uint32 as uint64, string as bytes, and bounded.

A protobuf parser truncates larger numbers to 32 bits (2^32+1 becomes 1), and refuses a whole message for one byte that
is not UTF-8, without naming the field. The services validate both and name the field: requests are parsed by classes
made from the same descriptors with wider fields. The wire format and the parser (C) are the same. A map becomes a list
of its entries, because map keys cannot be bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, Final, TypeVar

from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message

from ratelimitd.errors import FieldViolation, InvalidInputError

MessageT = TypeVar("MessageT", bound=Message)

WHOLE_MESSAGE: Final = "request"
"""Field name in errors about bytes that are not a message."""

COUNT_ABOVE_BYTES: Final = 16_384
"""Fields of longer messages are counted before parsing: 4 MiB of empty entries of a repeated field would block the
event loop for 0.2 to 19 s. Honest messages other than batches are seldom longer."""

MAX_FIELDS: Final = 2_000
"""Fields of a long message: a rule with 32 plans has about 330, a batch of 1,000 assignments 1,000 entries."""

_VARINT, _FIXED64, LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
GROUP_MARKS: Final = (3, 4)

_Field = descriptor_pb2.FieldDescriptorProto
_WIDER: Final = {
    _Field.TYPE_INT32: _Field.TYPE_INT64,
    _Field.TYPE_UINT32: _Field.TYPE_UINT64,
    _Field.TYPE_STRING: _Field.TYPE_BYTES,
}

_MORE: Final = 0x80
"""Continuation bit of a varint."""

ONE_BYTE: Final = _MORE
"""Smaller varints take one byte."""

_MAX_BYTES: Final = 10

KEPT_BITS: Final = 14
KEPT_NUMBERS: Final = 1 << KEPT_BITS
LOW_BITS: Final = KEPT_NUMBERS - 1
TWICE_KEPT: Final = KEPT_NUMBERS << KEPT_BITS
"""Smaller numbers are encoded by two look-ups: of the low bits in ``CONTINUED``, of the others in ``KEPT``."""


def varint(number: int) -> bytes:
    """Return the shortest encoding of a number of at least 0."""
    if number < KEPT_NUMBERS:
        return KEPT[number]
    if number < TWICE_KEPT:  # as below, without the call
        return CONTINUED[number & LOW_BITS] + KEPT[number >> KEPT_BITS]
    return CONTINUED[number & LOW_BITS] + varint(number >> KEPT_BITS)


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the varint at ``position`` and the position after it, which is the end of the data if it is malformed."""
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


KEPT: Final = tuple(map(_short, range(KEPT_NUMBERS)))
"""Encodings of small numbers: 30 ns to look up, 300 to compute. With the next table, about 1.4 MB."""

CONTINUED: Final = tuple(
    bytes((number & _MORE - 1 | _MORE, number >> 7 | _MORE)) for number in range(KEPT_NUMBERS)
)
"""The same with the continuation bit."""


def no_message(message_class: type[Message]) -> InvalidInputError:
    """Return the error of bytes that are not a message of a class."""
    text = f"the bytes are not a {message_class.DESCRIPTOR.name} message"
    return InvalidInputError(FieldViolation(WHOLE_MESSAGE, text))


def parsed(message_class: type[MessageT], data: bytes) -> MessageT:
    """Parse a message of a class.

    Raises:
        InvalidInputError: the bytes are malformed.
    """
    try:
        return message_class.FromString(data)
    except DecodeError:
        raise no_message(message_class) from None


def _count_fields(  # noqa: PLR0917 -- a part of the data without a copy
    data: bytes, position: int, end: int, message: Descriptor, left: int
) -> int:
    """Subtract from ``left`` the fields of a message and of its messages with repeated fields; return the rest.

    Malformed bytes may raise ``IndexError`` or end the count early: the parser will refuse them.

    Raises:
        InvalidInputError: the message has more fields.
    """
    within = _holders(message)
    while position < end:
        if not left:
            raise InvalidInputError(FieldViolation(WHOLE_MESSAGE, "has too many fields"))
        left -= 1
        # Nearly all varints take one byte; a call for each would take three times as long.
        tag, position = data[position], position + 1
        if tag >= ONE_BYTE:
            tag, position = read_varint(data, position - 1)
        if tag & 7 != LENGTH_DELIMITED:
            position = after_field(data, position, tag & 7)
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
        field.number << 3 | LENGTH_DELIMITED: field.message_type
        for field in message.fields
        if field.message_type is not None
        and (
            any(one.is_repeated for one in field.message_type.fields)
            or _holders(field.message_type)
        )
    }


def after_field(data: bytes, position: int, wire_type: int) -> int:
    """Return the position after a field whose tag ends at ``position``."""
    if wire_type == LENGTH_DELIMITED:
        length, position = read_varint(data, position)
        return position + length
    if wire_type == _VARINT:
        return read_varint(data, position)[1]
    # The start and end tags of a group have no body: its fields are skipped one by one.
    return position + {_FIXED64: 8, _FIXED32: 4}.get(wire_type, 0)


def widened_pool(files: Iterable[descriptor_pb2.FileDescriptorProto]) -> DescriptorPool:
    """Return a pool of these files, each after its imports, with wider fields. Changes ``files``."""
    pool = DescriptorPool()
    for file in files:
        for message in file.message_type:
            _widen(message)
        pool.Add(file)
    return pool


def _widen(message: descriptor_pb2.DescriptorProto) -> None:
    message.options.map_entry = False
    for field in message.field:
        field.type = _WIDER.get(field.type, field.type)
    for nested in message.nested_type:
        _widen(nested)


def parser(
    pool: DescriptorPool, contract: type[Message], max_fields: int = MAX_FIELDS
) -> Callable[[bytes], Any]:
    """Return a parser of the contract's messages of a class, by the class of a widened pool."""
    descriptor = pool.FindMessageTypeByName(contract.DESCRIPTOR.full_name)
    from_string = message_factory.GetMessageClass(descriptor).FromString

    def parse(data: bytes) -> Message:
        if len(data) > COUNT_ABOVE_BYTES:
            with suppress(IndexError):
                _count_fields(data, 0, len(data), descriptor, max_fields)
        try:
            return from_string(data)
        except DecodeError:
            raise no_message(contract) from None

    return parse
