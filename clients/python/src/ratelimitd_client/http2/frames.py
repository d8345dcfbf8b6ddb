"""Frames as octets (RFC 9113 sections 4 and 6): their numbers, and how ours are built.

Never decides whether a frame may come.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Final

from ratelimitd_client.http2.errors import PeerError
from ratelimitd_wire.codes import ErrorCode

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

FRAME_HEADER_BYTES: Final = 9
MAX_FRAME_BYTES: Final = 16_384
"""What both sides may send unless told otherwise (section 4.2). This client keeps the default."""

STREAM_ID_MASK: Final = 0x7FFF_FFFF
"""Takes the reserved bit off a stream identifier or an increment; it has to be ignored (section 4.1)."""

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

read_header: Callable[[bytes, int], tuple[int, int, int, int, int]] = struct.Struct(
    ">BHBBI"
).unpack_from
"""(upper 8 bits of the length, lower 16, type, flags, stream identifier with its reserved bit)."""

read_setting: Callable[[bytes], Iterator[tuple[int, int]]] = struct.Struct(">HI").iter_unpack

_write_header = struct.Struct(">BHBBI").pack
_write_setting = struct.Struct(">HI").pack


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """One frame; the payload is at most ``MAX_FRAME_BYTES``."""
    return _write_header(0, len(payload), kind, flags, stream_id) + payload


def headers(stream_id: int, block: bytes) -> bytes:
    """HEADERS, and CONTINUATION where the block is over what a frame takes. The stream goes on."""
    if len(block) <= MAX_FRAME_BYTES:
        return frame(HEADERS, END_HEADERS, stream_id, block)
    parts = []
    for at in range(0, len(block), MAX_FRAME_BYTES):
        flags = END_HEADERS if at + MAX_FRAME_BYTES >= len(block) else 0
        kind = CONTINUATION if at else HEADERS
        parts.append(frame(kind, flags, stream_id, block[at : at + MAX_FRAME_BYTES]))
    return b"".join(parts)


def settings(values: dict[int, int]) -> bytes:
    """SETTINGS of values by their identifiers."""
    payload = b"".join(_write_setting(name, value) for name, value in values.items())
    return frame(SETTINGS, 0, 0, payload)


def rst_stream(stream_id: int, code: ErrorCode) -> bytes:
    """RST_STREAM."""
    return frame(RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))


def go_away(code: ErrorCode) -> bytes:
    """GOAWAY. A server opens no streams to us, so none of them is the last."""
    return frame(GOAWAY, 0, 0, bytes(4) + code.to_bytes(4, "big"))


def window_update(stream_id: int, increment: int) -> bytes:
    """WINDOW_UPDATE; stream 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4, "big"))


def u32(payload: bytes) -> int:
    """The 31 bits that a payload begins with, without the reserved one."""
    return int.from_bytes(payload[:4], "big") & STREAM_ID_MASK


def without_padding(flags: int, payload: bytes) -> bytes:
    """What a payload of DATA or HEADERS holds between the length of its padding and the padding (section 6.1).

    Raises:
        PeerError: the padding is longer than the payload, or its length is missing.
    """
    if not flags & PADDED:
        return payload
    end = len(payload) - payload[0] if payload else 0
    if end < 1:
        raise PeerError(ErrorCode.PROTOCOL_ERROR, "the padding is longer than its frame")
    return payload[1:end]


def demand_size(payload: bytes, size: int) -> None:
    """See that a payload has exactly the size of its type.

    Raises:
        PeerError: it has not.
    """
    if len(payload) != size:
        raise PeerError(ErrorCode.FRAME_SIZE_ERROR, "a frame has not the size of its type")
