"""Frames (RFC 9113 sections 4 and 6) and header blocks (RFC 7541) as octets. Does not decide whether a frame may come.

The client announces SETTINGS_HEADER_TABLE_SIZE 0 before the peer sends its first block, and uses no dynamic table
either. The meaning of a block therefore depends on its octets alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from ratelimitd_wire.codes import ErrorCode
from ratelimitd_wire.huffman import HpackError, decode, decode_continuation, encode_integer
from ratelimitd_wire.static_table import ENTRY_OVERHEAD_BYTES, STATIC_TABLE, Field

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

FRAME_HEADER_BYTES: Final = 9
MAX_FRAME_BYTES: Final = 16_384
"""Longest payload that both sides may send by default (section 4.2). The client keeps the default."""

STREAM_ID_MASK: Final = 0x7FFF_FFFF
"""Clears the reserved bit of a stream identifier or an increment, which has to be ignored (section 4.1)."""

DATA: Final = 0x0
HEADERS: Final = 0x1
RST_STREAM: Final = 0x3
SETTINGS: Final = 0x4
PUSH_PROMISE: Final = 0x5
PING: Final = 0x6
GOAWAY: Final = 0x7
WINDOW_UPDATE: Final = 0x8
CONTINUATION: Final = 0x9

ACK: Final = 0x1
END_STREAM: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITY: Final = 0x20

HEADER_TABLE_SIZE: Final = 0x1
ENABLE_PUSH: Final = 0x2
MAX_CONCURRENT_STREAMS: Final = 0x3
INITIAL_WINDOW_SIZE: Final = 0x4
MAX_FRAME_SIZE: Final = 0x5
MAX_HEADER_LIST_SIZE: Final = 0x6

MAX_LIST_BYTES: Final = 16_384
"""Limit of an answer's header list, each field with ``ENTRY_OVERHEAD_BYTES``; gRPC's default."""

NO_TABLE: Final = b"\x20"
"""A change of the dynamic table's size to 0 (RFC 7541 section 6.3), which may begin a block."""

# The lowest first octets of the representations of RFC 7541 section 6. Below them are literals without indexing.
_INDEXED: Final = 0x80
_INCREMENTAL: Final = 0x40
_TABLE_SIZE: Final = 0x20

_HUFFMAN: Final = 0x80

_SECRET_NAMES: Final = frozenset({"authorization"})

_STATIC_INDEX: Final = {field: index for index, field in enumerate(STATIC_TABLE, 1)}
_STATIC_NAME_INDEX: Final = {
    name: index for index, (name, _) in reversed(list(enumerate(STATIC_TABLE, 1)))
}

read_header: Callable[[bytes, int], tuple[int, int, int, int, int]] = struct.Struct(
    ">BHBBI"
).unpack_from
"""(upper 8 bits of the length, lower 16, type, flags, stream identifier with its reserved bit)."""

read_setting: Callable[[bytes], Iterator[tuple[int, int]]] = struct.Struct(">HI").iter_unpack

_write_header = struct.Struct(">BHBBI").pack
_write_setting = struct.Struct(">HI").pack


class PeerError(Exception):
    """The peer violated the protocol or a limit, and the connection ends. The text contains nothing from the peer.

    Attributes:
        code: the error code to send in GOAWAY.
    """

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Return a frame; the payload is at most ``MAX_FRAME_BYTES``."""
    return _write_header(0, len(payload), kind, flags, stream_id) + payload


def headers(stream_id: int, block: bytes) -> bytes:
    """Return HEADERS, with CONTINUATION for a block longer than a frame. The stream stays open."""
    if len(block) <= MAX_FRAME_BYTES:
        return frame(HEADERS, END_HEADERS, stream_id, block)
    parts = []
    for at in range(0, len(block), MAX_FRAME_BYTES):
        flags = END_HEADERS if at + MAX_FRAME_BYTES >= len(block) else 0
        kind = CONTINUATION if at else HEADERS
        parts.append(frame(kind, flags, stream_id, block[at : at + MAX_FRAME_BYTES]))
    return b"".join(parts)


def settings(values: dict[int, int]) -> bytes:
    """Return SETTINGS with values by their identifiers."""
    payload = b"".join(_write_setting(name, value) for name, value in values.items())
    return frame(SETTINGS, 0, 0, payload)


def rst_stream(stream_id: int, code: ErrorCode) -> bytes:
    """Return RST_STREAM."""
    return frame(RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))


def go_away(code: ErrorCode) -> bytes:
    """Return GOAWAY. A server opens no streams to the client, so the last stream is 0."""
    return frame(GOAWAY, 0, 0, bytes(4) + code.to_bytes(4, "big"))


def window_update(stream_id: int, increment: int) -> bytes:
    """Return WINDOW_UPDATE; stream 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4, "big"))


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
        raise PeerError(ErrorCode.FRAME_SIZE_ERROR, "a frame has not the size of its type")


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
    index = _STATIC_INDEX.get(encoded)
    if index is not None:
        return bytes((_INDEXED | index,))
    pattern = 0x10 if name in _SECRET_NAMES else 0x00
    name_index = _STATIC_NAME_INDEX.get(encoded[0], 0)
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
        name, at = _string(block, at)
    value, at = _string(block, at)
    return (name, value), at


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    octet = block[at]
    size, at = _integer(block, at + 1, octet, 0x7F)
    string = block[at : at + size]
    if len(string) < size:
        raise _malformed()
    return (decode(string) if octet & _HUFFMAN else string), at + size


def _static(index: int) -> Field:
    if not index:
        raise _malformed()
    return STATIC_TABLE[index - 1]


def _malformed() -> PeerError:
    return PeerError(ErrorCode.COMPRESSION_ERROR, "a header block is malformed")
