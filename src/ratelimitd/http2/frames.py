"""Frames as octets (RFC 9113 §4, §6): their numbers, how ours are built, and what every payload shares.

Never decides whether a frame may come: that is the state of connection and stream.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable
from typing import Final

from ratelimitd.http2.errors import Cause, ConnectionFailureError
from ratelimitd_wire.codes import ErrorCode

FRAME_HEADER_BYTES: Final = 9

DEFAULT_MAX_FRAME_BYTES: Final = 16_384
"""What both sides may send unless told otherwise (§4.2). We never tell otherwise: checks are small, and a peer that can
make us wait for 16 MiB before the first look at a frame is of no use."""

STREAM_ID_MASK: Final = 0x7FFF_FFFF
"""Takes the reserved bit off a stream identifier or an increment; it has to be ignored (§4.1)."""


class FrameType(enum.IntEnum):
    """The types of RFC 9113 §6. Others are ignored (§5.5)."""

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


# Plain numbers: on an IntFlag, `&` takes 20 times as long.
ACK: Final = 0x1
END_STREAM: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITY: Final = 0x20

read_header = struct.Struct(">BHHI").unpack_from
"""(upper 8 bits of the length, lower 16, type << 8 | flags, stream identifier with its reserved bit): four numbers of
one machine word each, and one comparison tells type and flags."""

_write_header = struct.Struct(">BHBBI").pack
_write_u32 = struct.Struct(">I").pack
_write_two_u32 = struct.Struct(">II").pack
_write_setting = struct.Struct(">HI").pack
_read_u32 = struct.Struct(">I").unpack_from


def frame(frame_type: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """One frame; the payload is at most 2²⁴ − 1 octets."""
    size = len(payload)
    return _write_header(size >> 16, size & 0xFFFF, frame_type, flags, stream_id) + payload


def settings(values: Iterable[tuple[int, int]]) -> bytes:
    """SETTINGS of (identifier, value)."""
    return frame(FrameType.SETTINGS, 0, 0, b"".join(_write_setting(*value) for value in values))


SETTINGS_ACK: Final = frame(FrameType.SETTINGS, ACK, 0)


def ping(payload: bytes, *, ack: bool = False) -> bytes:
    """PING with 8 octets."""
    return frame(FrameType.PING, ACK if ack else 0, 0, payload)


def go_away(last_stream_id: int, code: int, debug: bytes = b"") -> bytes:
    """GOAWAY; ``debug`` is a constant text of ours."""
    return frame(FrameType.GOAWAY, 0, 0, _write_two_u32(last_stream_id, code) + debug)


def rst_stream(stream_id: int, code: int) -> bytes:
    """RST_STREAM."""
    return frame(FrameType.RST_STREAM, 0, stream_id, _write_u32(code))


def window_update(stream_id: int, increment: int) -> bytes:
    """WINDOW_UPDATE; stream 0 is the connection."""
    return frame(FrameType.WINDOW_UPDATE, 0, stream_id, _write_u32(increment))


def headers(
    stream_id: int, block: bytes, *, ended: bool, max_bytes: int = DEFAULT_MAX_FRAME_BYTES
) -> bytes:
    """HEADERS, and CONTINUATION where the block is over what the peer takes in a frame."""
    flags = END_STREAM if ended else 0
    if len(block) <= max_bytes:
        return frame(FrameType.HEADERS, flags | END_HEADERS, stream_id, block)
    parts = [frame(FrameType.HEADERS, flags, stream_id, block[:max_bytes])]
    for at in range(max_bytes, len(block), max_bytes):
        flags = END_HEADERS if at + max_bytes >= len(block) else 0
        parts.append(frame(FrameType.CONTINUATION, flags, stream_id, block[at : at + max_bytes]))
    return b"".join(parts)


def u32(payload: bytes, at: int = 0) -> int:
    """32 bits of a payload, which has them."""
    number: int = _read_u32(payload, at)[0]
    return number


def without_padding(flags: int, payload: bytes) -> bytes:
    """What a payload of DATA or HEADERS holds between the length of its padding and the padding (§6.1).

    Raises:
        ConnectionFailureError: the padding is longer than the payload, or its length is missing.
    """
    if not flags & PADDED:
        return payload
    end = len(payload) - payload[0] if payload else 0
    if end < 1:
        raise ConnectionFailureError(
            ErrorCode.PROTOCOL_ERROR, Cause.PROTOCOL, "the padding is longer than its frame"
        )
    return payload[1:end]


def demand_size(payload: bytes, size: int) -> None:
    """See that a payload has exactly the size of its type.

    Raises:
        ConnectionFailureError: it has not (§4.2: what can change the state of the connection must end it).
    """
    if len(payload) != size:
        raise ConnectionFailureError(
            ErrorCode.FRAME_SIZE_ERROR, Cause.FRAME_SIZE, "a frame has not the size of its type"
        )


def demand_connection(stream_id: int) -> None:
    """See that a frame is on stream 0.

    Raises:
        ConnectionFailureError: it is not.
    """
    if stream_id:
        raise ConnectionFailureError(
            ErrorCode.PROTOCOL_ERROR, Cause.PROTOCOL, "a frame of the connection is on a stream"
        )


def demand_stream(stream_id: int) -> None:
    """See that a frame is not on stream 0.

    Raises:
        ConnectionFailureError: it is.
    """
    if not stream_id:
        raise ConnectionFailureError(
            ErrorCode.PROTOCOL_ERROR, Cause.PROTOCOL, "a frame of a stream is on the connection"
        )
