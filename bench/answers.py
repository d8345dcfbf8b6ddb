"""Counts answered calls in the bytes from a server, and stops at the first that is not a success.

Parses every frame, so an answer counts once, regardless of read boundaries. Decodes a header block only when first
seen; while the dynamic table is unchanged, equal bytes have equal meaning.
"""

import re

from hpack import Decoder

from ratelimitd_wire import frames
from ratelimitd_wire.frames import (
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER_BYTES,
    FrameType,
    read_header,
)

WINDOW_BYTES = (1 << 30) - 1
"""What the server may send on each stream and on the connection before it needs a window update."""
DEFAULT_WINDOW_BYTES = 65_535
ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE = 0x2, 0x3, 0x4

GREETING = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    + frames.settings([(ENABLE_PUSH, 0), (INITIAL_WINDOW_SIZE, WINDOW_BYTES)])
    + frames.window_update(0, WINDOW_BYTES - DEFAULT_WINDOW_BYTES)
)

# Type << 8 | flags; padded or continued frames match none of these.
_DATA_END = FrameType.DATA << 8 | END_STREAM
_HEAD = FrameType.HEADERS << 8 | END_HEADERS
_HEAD_END = _HEAD | END_STREAM

NO_MESSAGE = "a call that ended without a message"


class WrongAnswerError(Exception):
    """The server did not answer with success; the run is invalid."""

    def __init__(self, what: object) -> None:
        super().__init__(f"instead of a success: {what}")


class Answers:
    """The server's side of one connection with ``streams`` calls open at a time.

    ``credit`` is the number of DATA bytes that the server still accepts, ``to_send`` pending protocol output; the user
    decrements the first and empties the second. With ``allowed``, each answer must have a message whose DATA matches
    it.
    """

    def __init__(self, streams: int, allowed: re.Pattern[bytes] | None = None) -> None:
        self.credit = DEFAULT_WINDOW_BYTES
        self.to_send = b""
        self._streams = streams
        self._allowed = allowed
        self._unread = 0
        """Messages verified minus calls ended."""
        self._rest = b""
        self._owed = 0
        self._decoder = Decoder()
        self._good: dict[int, set[bytes]] = {_HEAD: set(), _HEAD_END: set()}
        """Header blocks of successes, by the kind of their frame."""

    def feed(self, octets: bytes) -> int:
        """Return the number of calls that these bytes complete.

        Raises:
            WrongAnswerError: a call did not succeed, or the server ended the call or the connection.
        """
        octets = self._rest + octets
        at, last, answered = 0, len(octets) - FRAME_HEADER_BYTES, 0
        good, verified = self._good, self._allowed is not None
        while at <= last:
            _, length, kind, stream_id = read_header(octets, at)
            if at + length > last:
                break
            payload = at + FRAME_HEADER_BYTES
            at = payload + length
            if kind in good:  # HEADERS
                if octets[payload:at] not in good[kind]:
                    self._learn(kind, octets[payload:at])
                answered += kind & END_STREAM
            elif kind <= _DATA_END:
                self._owed += length
                answered += kind
                if verified and length:
                    self._verify(octets[payload:at])
            else:
                self._other(kind, octets[payload:at], stream_id)
        self._rest = octets[at:]
        if self._owed > WINDOW_BYTES // 2:
            self.to_send += frames.window_update(0, self._owed)
            self._owed = 0
        if verified:
            self._end(answered)
        return answered

    def _verify(self, message: bytes) -> None:
        if self._allowed and not self._allowed.match(message):
            raise WrongAnswerError(message)
        self._unread += 1

    def _end(self, answered: int) -> None:
        self._unread -= answered
        if self._unread < 0:
            raise WrongAnswerError(NO_MESSAGE)

    def _learn(self, kind: int, block: bytes) -> None:
        before = list(self._decoder.header_table.dynamic_entries)
        fields = dict(self._decoder.decode(block, raw=True))
        status = fields.get(b":status", b"200"), fields.get(b"grpc-status", b"0")
        if status != (b"200", b"0") or not fields.keys() & {b":status", b"grpc-status"}:
            raise WrongAnswerError(fields)
        if before != list(self._decoder.header_table.dynamic_entries):
            for blocks in self._good.values():
                blocks.clear()  # indexes have shifted
        else:
            self._good[kind].add(block)

    def _other(self, kind: int, payload: bytes, stream_id: int) -> None:
        frame_type, flags = kind >> 8, kind & 0xFF
        if frame_type == FrameType.WINDOW_UPDATE:
            if stream_id == 0:
                self.credit += int.from_bytes(payload, "big")
        elif frame_type == FrameType.SETTINGS:
            if not flags & frames.ACK:
                self._settings(payload)
        elif frame_type == FrameType.PING:
            if not flags & frames.ACK:
                self.to_send += frames.frame(FrameType.PING, frames.ACK, 0, payload)
        else:
            raise WrongAnswerError((frame_type, flags, payload))

    def _settings(self, payload: bytes) -> None:
        for at in range(0, len(payload), 6):
            name, value = (
                int.from_bytes(payload[at : at + 2], "big"),
                int.from_bytes(payload[at + 2 : at + 6], "big"),
            )
            if name == MAX_CONCURRENT_STREAMS and value < self._streams:
                raise WrongAnswerError({"streams at a time": value})
        self.to_send += frames.SETTINGS_ACK
