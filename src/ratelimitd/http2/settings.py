"""The peer's SETTINGS (RFC 9113 §6.5), the preface, and answers to peers of other protocols.

Our own settings never change after the first SETTINGS.
"""

from __future__ import annotations

import struct
from typing import Final

from ratelimitd.http2.errors import Cause, ConnectionFailureError
from ratelimitd.http2.hpack_decoder import DEFAULT_MAX_BYTES
from ratelimitd.http2.streams import DEFAULT_WINDOW_BYTES, MAX_WINDOW_BYTES
from ratelimitd_wire.codes import ErrorCode
from ratelimitd_wire.frames import DEFAULT_MAX_FRAME_BYTES, Setting

_MAX_MAX_FRAME_BYTES: Final = 2**24 - 1

_pairs = struct.Struct(">HI").iter_unpack


class PeerSettings:
    """The peer's settings that matter to a server.

    ENABLE_PUSH and MAX_CONCURRENT_STREAMS bound pushes, which we never send. MAX_HEADER_LIST_SIZE is advisory, and our
    answers are smaller than any honest value.
    """

    __slots__ = ("header_table_bytes", "initial_window_bytes", "max_frame_bytes")

    def __init__(self) -> None:
        self.header_table_bytes = DEFAULT_MAX_BYTES
        self.initial_window_bytes = DEFAULT_WINDOW_BYTES
        self.max_frame_bytes = DEFAULT_MAX_FRAME_BYTES

    def apply(self, payload: bytes) -> int:
        """Apply the values of a SETTINGS frame; unknown ones are ignored.

        Returns the smallest HEADER_TABLE_SIZE between the old and the new one, which an encoder must signal (RFC 7541
        §4.2).

        Raises:
            ConnectionFailureError: a value is out of its range, or the payload is not a list of settings.
        """
        if len(payload) % 6:
            raise ConnectionFailureError(
                ErrorCode.FRAME_SIZE_ERROR, Cause.FRAME_SIZE, "a SETTINGS frame ends within a value"
            )
        smallest_table_bytes = self.header_table_bytes
        for identifier, value in _pairs(payload):
            if identifier == Setting.HEADER_TABLE_SIZE:
                self.header_table_bytes = value
                smallest_table_bytes = min(smallest_table_bytes, value)
            elif identifier == Setting.ENABLE_PUSH:
                _demand(value <= 1)
            elif identifier == Setting.INITIAL_WINDOW_SIZE:
                _demand(value <= MAX_WINDOW_BYTES, ErrorCode.FLOW_CONTROL_ERROR)
                self.initial_window_bytes = value
            elif identifier == Setting.MAX_FRAME_SIZE:
                _demand(DEFAULT_MAX_FRAME_BYTES <= value <= _MAX_MAX_FRAME_BYTES)
                self.max_frame_bytes = value
        return smallest_table_bytes


def _demand(valid: bool, code: ErrorCode = ErrorCode.PROTOCOL_ERROR) -> None:  # noqa: FBT001 -- what is demanded
    if not valid:
        raise ConnectionFailureError(code, Cause.PROTOCOL, "a setting is out of its range")


PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

_TLS_HANDSHAKE: Final = 0x16
_TLS_UNEXPECTED_MESSAGE: Final = bytes((0x15, 3, 1, 0, 2, 2, 10))
"""A fatal alert, so that the client reports a TLS error instead of a closed connection."""

_HTTP1_METHODS: Final = (
    b"GET ",
    b"HEAD ",
    b"POST ",
    b"PUT ",
    b"DELETE ",
    b"CONNECT ",
    b"OPTIONS ",
    b"TRACE ",
    b"PATCH ",
)
_HTTP1_TEXT: Final = b"This port speaks gRPC over HTTP/2 only.\n"
_HTTP1_ANSWER: Final = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_HTTP1_TEXT), _HTTP1_TEXT)
)


def undecided(octets: bytes) -> bool:
    """Return whether octets may be the incomplete beginning of the preface or of an HTTP/1 request."""
    return any(known.startswith(octets) for known in (PREFACE, *_HTTP1_METHODS))


def mistaken_protocol(octets: bytes) -> tuple[Cause, bytes]:
    """Return the protocol of a peer that does not begin with the preface, and an error answer in that protocol.

    The answer is empty for unknown protocols.
    """
    if octets.startswith(_HTTP1_METHODS):
        return Cause.HTTP1, _HTTP1_ANSWER
    if octets[0] == _TLS_HANDSHAKE:
        return Cause.TLS, _TLS_UNEXPECTED_MESSAGE
    return Cause.PREFACE, b""
