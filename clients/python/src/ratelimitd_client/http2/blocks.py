"""Header blocks (RFC 7541) without a dynamic table: lists of fields to octets and back. Pure.

We tell the peer to keep no table (SETTINGS_HEADER_TABLE_SIZE 0) before it sends its first block, and use none
ourselves: so what a block means depends on nothing but its octets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ratelimitd_client.http2.errors import PeerError
from ratelimitd_wire import huffman
from ratelimitd_wire.codes import ErrorCode
from ratelimitd_wire.static_table import STATIC_TABLE, Field

MAX_LIST_BYTES: Final = 16_384
"""Of an answer's fields, each with ``FIELD_OVERHEAD_BYTES``; gRPC's own default."""

FIELD_OVERHEAD_BYTES: Final = 32
"""What a field counts beside its octets (RFC 9113 section 6.5.2). It makes a list of empty fields end, too."""

NO_TABLE: Final = b"\x20"
"""A change of the table's size to 0 (section 6.3), which may begin a block."""

MAX_CONTINUATION_OCTETS: Final = 5
"""Of an integer: 35 bits hold every value with a meaning. More octets are zeros, sent to waste our time."""

_INDEXED: Final = 0x80
_FOR_THE_TABLE: Final = 0x40
_TABLE_SIZE: Final = 0x20
"""The lowest first octets of the representations of section 6; below them are literals for no table."""

_CONTINUED: Final = 0x80
_HUFFMAN: Final = 0x80

_SECRET_NAMES: Final = frozenset({"authorization"})

_STATIC_INDEX: Final = {field: index for index, field in enumerate(STATIC_TABLE, 1)}
_STATIC_NAME_INDEX: Final = {
    name: index for index, (name, _) in reversed(list(enumerate(STATIC_TABLE, 1)))
}


def encode(fields: Iterable[tuple[str, str]]) -> bytes:
    """Return the block of ASCII fields: literals without indexing; secrets as never indexed."""
    return b"".join([_field(name, value) for name, value in fields])


def decode(block: bytes) -> list[Field]:
    """Return the fields of a whole block, names and values as they are.

    Raises:
        PeerError: it is malformed, needs a dynamic table, or its fields are more than ``MAX_LIST_BYTES``.
    """
    fields: list[Field] = []
    at = list_bytes = 0
    try:
        while at < len(block):
            octet = block[at]
            at += 1
            if octet >= _INDEXED:
                index, at = _integer(block, at, octet, 0x7F)
                field = _static(index)
            elif _TABLE_SIZE <= octet < _FOR_THE_TABLE:
                size, at = _integer(block, at, octet, 0x1F)
                if size or fields:
                    raise _malformed()
                continue
            else:
                field, at = _literal(block, at, octet)
            fields.append(field)
            list_bytes += len(field[0]) + len(field[1]) + FIELD_OVERHEAD_BYTES
            if list_bytes > MAX_LIST_BYTES:
                raise PeerError(ErrorCode.ENHANCE_YOUR_CALM, "the header list is too large")
    except IndexError:
        raise _malformed() from None
    return fields


def _field(name: str, value: str) -> bytes:
    encoded = (name.encode("ascii"), value.encode("ascii"))
    index = _STATIC_INDEX.get(encoded)
    if index is not None:
        return bytes((_INDEXED | index,))
    pattern = 0x10 if name in _SECRET_NAMES else 0x00
    name_index = _STATIC_NAME_INDEX.get(encoded[0], 0)
    begin = _write_integer(name_index, 0x0F, pattern)
    named = begin if name_index else begin + _write_string(encoded[0])
    return named + _write_string(encoded[1])


def _write_string(string: bytes) -> bytes:
    return _write_integer(len(string), 0x7F, 0) + string


def _write_integer(value: int, prefix_max: int, pattern: int) -> bytes:
    """Encode a number of at least 0; ``pattern`` holds the bits in front of the prefix in its first octet."""
    if value < prefix_max:
        return bytes((pattern | value,))
    octets = bytearray((pattern | prefix_max,))
    value -= prefix_max
    while value >= _CONTINUED:
        octets.append(value & 0x7F | _CONTINUED)
        value >>= 7
    octets.append(value)
    return bytes(octets)


def _integer(block: bytes, at: int, octet: int, prefix_max: int) -> tuple[int, int]:
    """The integer that begins in ``octet``, and the position behind it; ``at`` is behind that octet."""
    value = octet & prefix_max
    if value < prefix_max:
        return value, at
    for count in range(MAX_CONTINUATION_OCTETS):
        more = block[at]
        at += 1
        value += (more & 0x7F) << (7 * count)
        if more < _CONTINUED:
            return value, at
    raise _malformed()


def _literal(block: bytes, at: int, octet: int) -> tuple[Field, int]:
    """A literal whose first octet is given (section 6.2), and the position behind it.

    One that is to be added to the table leaves a table of size 0 as it is (section 4.4).
    """
    index, at = _integer(block, at, octet, 0x3F if octet >= _FOR_THE_TABLE else 0x0F)
    if index:
        name = _static(index)[0]
    else:
        name, at = _string(block, at)
    value, at = _string(block, at)
    return (name, value), at


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    octet = block[at]
    size, at = _integer(block, at + 1, octet, 0x7F)
    string = block[at : at + size]
    if len(string) < size:
        raise _malformed()
    if not octet & _HUFFMAN:
        return string, at + size
    try:
        return huffman.decode(string), at + size
    except huffman.HpackError:
        raise PeerError(ErrorCode.COMPRESSION_ERROR, "a string is no Huffman code") from None


def _static(index: int) -> Field:
    if not index:
        raise _malformed()
    return STATIC_TABLE[index - 1]


def _malformed() -> PeerError:
    return PeerError(ErrorCode.COMPRESSION_ERROR, "a header block is malformed")
