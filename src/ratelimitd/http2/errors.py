"""Errors of connections and streams: the closed set of causes, and checks common to several frames.

Texts are constants: they never contain input of a peer.
"""

from __future__ import annotations

import enum

from ratelimitd_wire import frames
from ratelimitd_wire.codes import ErrorCode


class Cause(enum.StrEnum):
    """Why a stream or a connection ended: finer than HTTP/2's error codes, and few enough for a metric label."""

    # Protocol errors of the peer.
    PREFACE = "preface"
    HTTP1 = "http1"
    TLS = "tls"
    PROTOCOL = "protocol"
    FRAME_SIZE = "frame_size"
    FLOW_CONTROL = "flow_control"
    COMPRESSION = "compression"
    MALFORMED = "malformed"
    STREAM_CLOSED = "stream_closed"

    # Exceeded limits (see limits.py).
    TOO_MANY_STREAMS = "too_many_streams"
    HEADER_BLOCK = "header_block"
    HEADER_BOMB = "header_bomb"
    SEND_BUFFER = "send_buffer"
    UNREAD_ANSWERS = "unread_answers"
    RAPID_RESET = "rapid_reset"
    PROVOKED_RESET = "provoked_reset"
    SETTINGS_FLOOD = "settings_flood"
    PING_FLOOD = "ping_flood"
    WINDOW_UPDATE_FLOOD = "window_update_flood"
    EMPTY_DATA_FLOOD = "empty_data_flood"
    PRIORITY_FLOOD = "priority_flood"
    STALE_FRAME_FLOOD = "stale_frame_flood"
    UNKNOWN_FRAME_FLOOD = "unknown_frame_flood"

    # Timeouts, reported by the owner of the connection.
    SLOW_PREFACE = "slow_preface"
    SLOW_HEADERS = "slow_headers"
    SLOW_FRAME = "slow_frame"
    SETTINGS_TIMEOUT = "settings_timeout"
    STALLED_WINDOW = "stalled_window"
    KEEPALIVE_TIMEOUT = "keepalive_timeout"

    # No error.
    PEER_RESET = "peer_reset"
    OWNER = "owner"


class ConnectionFailureError(Exception):
    """A connection error (RFC 9113 §5.4.1). Never leaves this package: it becomes a GOAWAY and an event."""

    def __init__(self, code: ErrorCode, cause: Cause, message: str) -> None:
        super().__init__(message)  # equivalent: its text is read from `message`
        self.code = code
        self.cause = cause
        self.message = message


class StreamFailureError(Exception):
    """A stream error (RFC 9113 §5.4.2). Never leaves this package: it becomes a RST_STREAM and an event."""

    def __init__(self, code: ErrorCode, cause: Cause) -> None:
        super().__init__(cause)
        self.code = code
        self.cause = cause


def without_padding(flags: int, payload: bytes) -> bytes:
    """Return a payload of DATA or HEADERS without its padding (§6.1).

    Raises:
        ConnectionFailureError: the padding is longer than the payload, or its length is missing.
    """
    if not flags & frames.PADDED:
        return payload
    end = len(payload) - payload[0] if payload else 0
    if end < 1:
        raise ConnectionFailureError(
            ErrorCode.PROTOCOL_ERROR, Cause.PROTOCOL, "the padding is longer than its frame"
        )
    return payload[1:end]


def demand_size(payload: bytes, size: int) -> None:
    """Check that a payload has exactly the size of its type.

    Raises:
        ConnectionFailureError: it has another size (§4.2: this ends the connection if the frame can change its state).
    """
    if len(payload) != size:
        raise ConnectionFailureError(
            ErrorCode.FRAME_SIZE_ERROR, Cause.FRAME_SIZE, "a frame has not the size of its type"
        )


def demand_connection(stream_id: int) -> None:
    """Check that a frame is on stream 0.

    Raises:
        ConnectionFailureError: the frame is on another stream.
    """
    if stream_id:
        raise ConnectionFailureError(
            ErrorCode.PROTOCOL_ERROR, Cause.PROTOCOL, "a frame of the connection is on a stream"
        )


def demand_stream(stream_id: int) -> None:
    """Check that a frame is not on stream 0.

    Raises:
        ConnectionFailureError: the frame is on stream 0.
    """
    if not stream_id:
        raise ConnectionFailureError(
            ErrorCode.PROTOCOL_ERROR, Cause.PROTOCOL, "a frame of a stream is on the connection"
        )
