"""Payloads of frames (RFC 9113 section 6) and header blocks (RFC 7541). Does not decide whether a frame may come.

The client announces SETTINGS_HEADER_TABLE_SIZE 0 before the peer sends its first block, and uses no dynamic table
either. The meaning of a block therefore depends on its octets alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from ratelimitd_wire.codes import ErrorCode
from ratelimitd_wire.frames import PADDED, STREAM_ID_MASK, FrameType
from ratelimitd_wire.huffman import HpackError, decode_continuation, decode_string, encode_integer
from ratelimitd_wire.static_table import (
    ENTRY_OVERHEAD_BYTES,
    STATIC_INDEX,
    STATIC_NAME_INDEX,
    STATIC_TABLE,
    Field,
)

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, _PRIORITY, RST_STREAM, SETTINGS = map(int, [*FrameType][:5])
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = map(int, [*FrameType][5:])
"""Plain numbers: comparing with them is faster."""

MAX_LIST_BYTES: Final = 16_384
"""Limit of an answer's header list, each field with ``ENTRY_OVERHEAD_BYTES``; gRPC's default."""

NO_TABLE: Final = b"\x20"
"""A change of the dynamic table's size to 0 (RFC 7541 section 6.3), which may begin a block."""

# The lowest first octets of the representations of RFC 7541 section 6. Below them are literals without indexing.
_INDEXED: Final = 0x80
_INCREMENTAL: Final = 0x40
_TABLE_SIZE: Final = 0x20

_SECRET_NAMES: Final = frozenset({"authorization"})

read_header: Callable[[bytes, int], tuple[int, int, int, int, int]] = struct.Struct(
    ">BHBBI"
).unpack_from
"""(upper 8 bits of the length, lower 16, type, flags, stream identifier with its reserved bit)."""

read_setting: Callable[[bytes], Iterator[tuple[int, int]]] = struct.Struct(">HI").iter_unpack


class PeerError(Exception):
    """The peer violated the protocol or a limit, and the connection ends. The text contains nothing from the peer.

    Attributes:
        code: the error code to send in GOAWAY.
    """

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def u32(payload: bytes) -> int:
    """Return the first 31 bits of a payload, without the reserved one."""
    return int.from_bytes(payload[:4], "big") & STREAM_ID_MASK


def without_padding(flags: int, payload: bytes) -> bytes:
    """Return the payload of DATA or HEADERS without its padding (section 6.1).

    Raises:
        PeerError: the padding is longer than the payload, or its length is missing.
    """
    if not flags & PADDED:
        return payload
    end = len(payload) - payload[0] if payload else 0
    if end < 1:
        raise PeerError(ErrorCode.PROTOCOL_ERROR, "the padding is longer than its frame")
    return payload[1:end]


def require_size(payload: bytes, size: int) -> None:
    """Raise PeerError unless a payload has the size of its type."""
    if len(payload) != size:
        raise PeerError(
            ErrorCode.FRAME_SIZE_ERROR, "a frame has a size that its type does not allow"
        )


def encode_block(fields: Iterable[tuple[str, str]]) -> bytes:
    """Return the block of ASCII fields: literals without indexing, secrets as never indexed."""
    return b"".join([_field(name, value) for name, value in fields])


def decode_block(block: bytes) -> list[Field]:
    """Return the fields of a whole block.

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
            elif _TABLE_SIZE <= octet < _INCREMENTAL:
                size, at = _integer(block, at, octet, 0x1F)
                if size or fields:
                    raise _malformed()
                continue
            else:
                field, at = _literal(block, at, octet)
            fields.append(field)
            list_bytes += len(field[0]) + len(field[1]) + ENTRY_OVERHEAD_BYTES
            if list_bytes > MAX_LIST_BYTES:
                raise PeerError(ErrorCode.ENHANCE_YOUR_CALM, "the header list is too large")
    except (HpackError, IndexError):
        raise _malformed() from None
    return fields


def _field(name: str, value: str) -> bytes:
    encoded = (name.encode("ascii"), value.encode("ascii"))
    index = STATIC_INDEX.get(encoded)
    if index is not None:
        return bytes((_INDEXED | index,))
    pattern = 0x10 if name in _SECRET_NAMES else 0x00
    name_index = STATIC_NAME_INDEX.get(encoded[0], 0)
    begin = encode_integer(name_index, 4, pattern)
    named = begin if name_index else begin + _write_string(encoded[0])
    return named + _write_string(encoded[1])


def _write_string(string: bytes) -> bytes:
    return encode_integer(len(string), 7, 0) + string


def _integer(block: bytes, at: int, octet: int, prefix_max: int) -> tuple[int, int]:
    """Return the integer that begins in ``octet``, and the position behind it; ``at`` is behind that octet."""
    value = octet & prefix_max
    return (value, at) if value < prefix_max else decode_continuation(block, at, prefix_max)


def _literal(block: bytes, at: int, octet: int) -> tuple[Field, int]:
    """Return the literal that begins in ``octet`` (RFC 7541 section 6.2), and the position behind it.

    Incremental indexing leaves a table of size 0 unchanged (section 4.4).
    """
    index, at = _integer(block, at, octet, 0x3F if octet >= _INCREMENTAL else 0x0F)
    if index:
        name = _static(index)[0]
    else:
        name, at = decode_string(block, at)
    value, at = decode_string(block, at)
    return (name, value), at


def _static(index: int) -> Field:
    if not index:
        raise _malformed()
    return STATIC_TABLE[index - 1]


def _malformed() -> PeerError:
    return PeerError(ErrorCode.COMPRESSION_ERROR, "a header block is malformed")
