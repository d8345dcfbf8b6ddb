"""Answers prepared in advance: the octets of a whole answer but for its stream and its message.

Never knows a connection: a prepared answer touches no dynamic table, so that it is right for all of them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Final

from ratelimitd.http2.frames import (
    DEFAULT_MAX_FRAME_BYTES,
    END_HEADERS,
    END_STREAM,
    FrameType,
    frame,
)
from ratelimitd.http2.hpack_encoder import Encoder
from ratelimitd_wire.static_table import Field

_KEPT_SIZES: Final = 1_024
"""Answers to checks are smaller. Larger messages have their DATA header built each time, at 150 ns."""

_pack_stream_id = struct.Struct(">I").pack


def static_block(fields: Iterable[Field]) -> bytes:
    """A header block that neither needs nor changes a dynamic table."""
    encoder = Encoder(max_table_bytes=0)
    encoder.encode(())  # the table size update, which the peer does not need
    return encoder.encode(fields)


class UnaryAnswer:
    """HEADERS, one DATA and trailers, as one string of octets.

    The identifier of the stream stands in it three times, once in each frame header, and nowhere else does anything
    depend on the stream. So an answer is four parts, joined by the four octets of the identifier: 100 ns, where three
    frames built one by one take 500.

    ``prefix_of`` makes what stands in front of a message of so many octets, always equally long: framing of the owner's
    protocol, prepared like the rest.

    Attributes:
        head_block: of the HEADERS.
        trailer_block: of the trailers.
        prefix_bytes: of every prefix.
        prefix_of: see above.
    """

    __slots__ = (
        "_before_message",
        "_behind_message",
        "_first",
        "_middles",
        "_prefixes",
        "head_block",
        "prefix_bytes",
        "prefix_of",
        "trailer_block",
    )

    def __init__(
        self,
        head_block: bytes,
        trailer_block: bytes,
        prefix_of: Callable[[int], bytes] = lambda _size: b"",
    ) -> None:
        self.head_block = head_block
        self.trailer_block = trailer_block
        head = frame(FrameType.HEADERS, END_HEADERS, 0, head_block)
        trailers = frame(FrameType.HEADERS, END_HEADERS | END_STREAM, 0, trailer_block)
        self._first = head[:5]
        self._before_message = head_block
        self._behind_message = trailers[:5]
        self.prefix_of = prefix_of
        self._prefixes = [prefix_of(size) for size in range(_KEPT_SIZES)]
        self.prefix_bytes = len(prefix_of(0))
        self._middles = [
            head_block + _data_header(self.prefix_bytes + size) for size in range(_KEPT_SIZES)
        ]

    def octets(self, stream_id: int, message: bytes) -> bytes:
        """The whole answer; prefix and message fit into one frame."""
        size = len(message)
        if size < _KEPT_SIZES:
            middle, prefix = self._middles[size], self._prefixes[size]
        else:
            middle = self._before_message + _data_header(self.prefix_bytes + size)
            prefix = self.prefix_of(size)
        return _pack_stream_id(stream_id).join(
            (self._first, middle, prefix + message + self._behind_message, self.trailer_block)
        )


def _data_header(size: int) -> bytes:
    """Of a frame of DATA, up to its stream."""
    if size > DEFAULT_MAX_FRAME_BYTES:
        raise ValueError(size)
    return size.to_bytes(3, "big") + bytes((FrameType.DATA, 0))
