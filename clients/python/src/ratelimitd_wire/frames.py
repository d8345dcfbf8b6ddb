"""Encoding of HTTP/2 frames, with their types, flags and settings (RFC 9113 §4, §6). Pure.

The connection that receives a frame validates it.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable
from typing import Final

FRAME_HEADER_BYTES: Final = 9

DEFAULT_MAX_FRAME_BYTES: Final = 16_384
"""Longest payload that both sides may send by default (§4.2). Neither server nor client raises it: checks are small."""

STREAM_ID_MASK: Final = 0x7FFF_FFFF
"""Clears the reserved bit of a stream identifier or an increment, which must be ignored (§4.1)."""


class FrameType(enum.IntEnum):
    """The frame types of RFC 9113 §6. Others are ignored (§5.5)."""

    DATA = 0x0
    HEADERS = 0x1
    PRIORITY = 0x2
    RST_STREAM = 0x3
    SETTINGS = 0x4
    PUSH_PROMISE = 0x5
    PING = 0x6
    GOAWAY = 0x7
    WINDOW_UPDATE = 0x8
    CONTINUATION = 0x9


class Setting(enum.IntEnum):
    """The identifiers of settings (RFC 9113 §6.5.2)."""

    HEADER_TABLE_SIZE = 0x1
    ENABLE_PUSH = 0x2
    MAX_CONCURRENT_STREAMS = 0x3
    INITIAL_WINDOW_SIZE = 0x4
    MAX_FRAME_SIZE = 0x5
    MAX_HEADER_LIST_SIZE = 0x6


# Plain integers: on an IntFlag, `&` takes 20 times as long.
ACK: Final = 0x1
END_STREAM: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITY: Final = 0x20

read_header = struct.Struct(">BHHI").unpack_from
"""Reads a frame header: (upper 8 bits of the length, lower 16, type << 8 | flags, stream identifier with its reserved
bit). One comparison checks type and flags."""

_write_header = struct.Struct(">BHBBI").pack
_write_u32 = struct.Struct(">I").pack
_write_two_u32 = struct.Struct(">II").pack
_write_setting = struct.Struct(">HI").pack


def frame(frame_type: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Return a frame; the payload is at most 2²⁴ − 1 octets."""
    size = len(payload)
    return _write_header(size >> 16, size & 0xFFFF, frame_type, flags, stream_id) + payload


def settings(values: Iterable[tuple[int, int]]) -> bytes:
    """Return SETTINGS of (identifier, value) pairs."""
    return frame(FrameType.SETTINGS, 0, 0, b"".join(_write_setting(*value) for value in values))


SETTINGS_ACK: Final = frame(FrameType.SETTINGS, ACK, 0)


def ping(payload: bytes, *, ack: bool = False) -> bytes:
    """Return PING with 8 octets."""
    return frame(FrameType.PING, ACK if ack else 0, 0, payload)


def go_away(last_stream_id: int, code: int, debug: bytes = b"") -> bytes:
    """Return GOAWAY; ``debug`` is a constant text."""
    return frame(FrameType.GOAWAY, 0, 0, _write_two_u32(last_stream_id, code) + debug)


def rst_stream(stream_id: int, code: int) -> bytes:
    """Return RST_STREAM."""
    return frame(FrameType.RST_STREAM, 0, stream_id, _write_u32(code))


def window_update(stream_id: int, increment: int) -> bytes:
    """Return WINDOW_UPDATE; stream 0 is the connection."""
    return frame(FrameType.WINDOW_UPDATE, 0, stream_id, _write_u32(increment))


def headers(
    stream_id: int, block: bytes, *, ended: bool, max_bytes: int = DEFAULT_MAX_FRAME_BYTES
) -> bytes:
    """Return HEADERS, with CONTINUATION for a block longer than ``max_bytes``."""
    flags = END_STREAM if ended else 0
    if len(block) <= max_bytes:
        return frame(FrameType.HEADERS, flags | END_HEADERS, stream_id, block)
    parts = [frame(FrameType.HEADERS, flags, stream_id, block[:max_bytes])]
    for at in range(max_bytes, len(block), max_bytes):
        flags = END_HEADERS if at + max_bytes >= len(block) else 0
        parts.append(frame(FrameType.CONTINUATION, flags, stream_id, block[at : at + max_bytes]))
    return b"".join(parts)


def u32(payload: bytes) -> int:
    """Return the first 32 bits of a payload."""
    return int.from_bytes(payload[:4], "big")
