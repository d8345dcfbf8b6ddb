"""One unary call of gRPC over HTTP/2: what is sent for it, and what the frames of its answer mean.

The mapping of HTTP to gRPC follows PROTOCOL-HTTP2.md and http-grpc-status-mapping.md of the gRPC project.
"""

from __future__ import annotations

import math
from base64 import b64decode
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import unquote_to_bytes

import grpc

from ratelimitd_client.fail_open import STATUS_KEY
from ratelimitd_client.transport.payloads import decode_block, encode_block
from ratelimitd_wire.codes import ErrorCode

_STATUS_KEY: Final = STATUS_KEY.encode()

PREFIX_BYTES: Final = 5
"""Prefix of a message: a compression flag, and the length in 4 octets."""

MAX_TEXT_BYTES: Final = 1_024
"""How much of an error's text is read."""

MAX_TIMEOUT: Final = 99_999_999
"""grpc-timeout has at most eight digits."""

HEAD_CACHE_SIZE: Final = 16
"""Header blocks whose meaning is cached: a node answers every check with the same two."""

_STATUS: Final = {str(code.value[0]).encode(): code for code in grpc.StatusCode}

_STATUS_OF_HTTP: Final = {
    b"400": grpc.StatusCode.INTERNAL,
    b"401": grpc.StatusCode.UNAUTHENTICATED,
    b"403": grpc.StatusCode.PERMISSION_DENIED,
    b"404": grpc.StatusCode.UNIMPLEMENTED,
    b"429": grpc.StatusCode.UNAVAILABLE,
    b"502": grpc.StatusCode.UNAVAILABLE,
    b"503": grpc.StatusCode.UNAVAILABLE,
    b"504": grpc.StatusCode.UNAVAILABLE,
}

_STATUS_OF_RESET: Final = {
    ErrorCode.REFUSED_STREAM: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.CANCEL: grpc.StatusCode.CANCELLED,
    ErrorCode.ENHANCE_YOUR_CALM: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.INADEQUATE_SECURITY: grpc.StatusCode.PERMISSION_DENIED,
}


class Call:
    """A request, and in the end its answer or the status that came instead.

    Args:
        block: header block of the request.
        message: the request itself.
        max_answer_bytes: limit of the answer.

    Attributes:
        stream_id: 0 until the call is sent.
        place: its number among the calls of the connection that had to wait for a stream.
        body: the message with its prefix.
        unsent: octets at the end of the body that wait for the peer's windows.
        window_bytes: the peer's window of this stream; maintained while something is unsent.
        ended: the outcome is known: ``answer``, or else ``code``, ``details`` and ``status_details``.
        unprocessed: no server has begun to process the call, so it may be sent again.
    """

    __slots__ = (
        "_begun",
        "_max_answer_bytes",
        "answer",
        "block",
        "body",
        "code",
        "details",
        "ended",
        "place",
        "received",
        "status_details",
        "stream_id",
        "unprocessed",
        "unsent",
        "window_bytes",
    )

    def __init__(self, block: bytes, message: bytes, max_answer_bytes: int) -> None:
        self.body: bytes = b"\0" + len(message).to_bytes(4, "big") + message
        self._max_answer_bytes = max_answer_bytes
        self.block: bytes = block
        self.restart()

    def restart(self) -> None:
        """Reset the call to before it was sent."""
        self.unsent: int = len(self.body)
        self.window_bytes: int = 0
        self.stream_id: int = 0
        self.place: int = 0
        self.received: bytes | bytearray = b""
        self.answer: bytes | None = None
        self.code: grpc.StatusCode = grpc.StatusCode.OK
        self.details: str = ""
        self.status_details: bytes = b""
        self.ended: bool = False
        self.unprocessed: bool = False
        self._begun = False

    def fail(self, code: grpc.StatusCode, details: str = "", *, unprocessed: bool = False) -> None:
        """End the call with a status."""
        self.code = code
        self.details = details
        self.unprocessed = unprocessed
        self.ended = True

    def take_block(self, block: bytes, *, last: bool) -> None:
        """Process a header block.

        Raises:
            PeerError: it is malformed.
        """
        head = read_head(block)
        if last:
            self._end(head)
        elif self._begun:
            self.fail(grpc.StatusCode.INTERNAL, "the trailers do not end the answer")
        elif head.is_informational:
            pass
        elif head.refusal is not None:
            self.fail(head.refusal, "the answer is not gRPC")
        else:
            self._begun = True

    def take_data(self, data: bytes) -> None:
        """Process a part of the body."""
        if not self._begun:
            self.received = data  # the connection counts it as buffered
            self.fail(grpc.StatusCode.INTERNAL, "the answer has no headers")
            return
        # Usually there is one part. Appending further ones to bytes would copy all before them each time.
        if not self.received:
            self.received = data
        else:
            if isinstance(self.received, bytes):
                self.received = bytearray(self.received)
            self.received += data
        received = self.received
        if len(received) < PREFIX_BYTES:
            return
        size = int.from_bytes(received[1:PREFIX_BYTES], "big")
        if received[0]:
            self.fail(grpc.StatusCode.INTERNAL, "the answer is compressed")
        elif size > self._max_answer_bytes:
            self.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "the answer is too long")
        elif len(received) > PREFIX_BYTES + size:
            self.fail(grpc.StatusCode.INTERNAL, "more than one message came")

    def end_without_trailers(self) -> None:
        """End the call when its stream ends with the body."""
        self.fail(grpc.StatusCode.UNKNOWN, "the answer has no status")

    def _end(self, head: Head) -> None:
        received = self.received
        if head.status is None:
            refusal = None if self._begun else head.refusal
            self.fail(refusal or grpc.StatusCode.UNKNOWN, "the answer has no status")
        elif head.status is not grpc.StatusCode.OK:
            self.fail(head.status, head.text)
            self.status_details = head.status_details
        elif len(received) < PREFIX_BYTES or len(received) != PREFIX_BYTES + int.from_bytes(
            received[1:PREFIX_BYTES], "big"
        ):
            self.fail(grpc.StatusCode.INTERNAL, "the message is incomplete")
        else:
            self.answer = bytes(received[PREFIX_BYTES:])
            self.ended = True


class Head(NamedTuple):
    """A header block of an answer.

    Attributes:
        is_informational: the HTTP status is 1xx; another block follows.
        refusal: the status that an answer without gRPC stands for.
        status: grpc-status, if present.
        text: grpc-message.
        status_details: grpc-status-details-bin.
    """

    is_informational: bool
    refusal: grpc.StatusCode | None
    status: grpc.StatusCode | None
    text: str
    status_details: bytes


@lru_cache(maxsize=HEAD_CACHE_SIZE)
def read_head(block: bytes) -> Head:
    """Return the meaning of an answer's header block.

    Raises:
        PeerError: it is malformed.
    """
    fields = dict(decode_block(block))
    http_status = fields.get(b":status", b"")
    refusal = None
    if http_status != b"200":
        refusal = _STATUS_OF_HTTP.get(http_status, grpc.StatusCode.UNKNOWN)
    elif not fields.get(b"content-type", b"").startswith(b"application/grpc"):
        refusal = grpc.StatusCode.UNKNOWN
    number = fields.get(b"grpc-status")
    text = unquote_to_bytes(fields.get(b"grpc-message", b"")[:MAX_TEXT_BYTES])
    return Head(
        is_informational=http_status.startswith(b"1"),
        refusal=refusal,
        status=None if number is None else _STATUS.get(number, grpc.StatusCode.UNKNOWN),
        text=text.decode("utf-8", "replace"),
        status_details=_binary(fields.get(_STATUS_KEY, b"")),
    )


def _binary(value: bytes) -> bytes:
    """Return the value of binary metadata, which need not be padded; empty if it is malformed."""
    try:
        return b64decode(value + b"==")
    except ValueError:
        return b""


def request_block(
    path: str, authority: str, scheme: str, metadata: tuple[tuple[str, str], ...]
) -> bytes:
    """Return the header block of a call, without its deadline."""
    return encode_block(
        [
            (":method", "POST"),
            (":scheme", scheme),
            (":path", path),
            (":authority", authority),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("user-agent", "ratelimitd-client-python"),
            *metadata,
        ]
    )


@lru_cache(maxsize=1_024)
def timeout_field(timeout_ms: int) -> bytes:
    """Return the grpc-timeout field, which ends a call's header block."""
    amount, unit = timeout_ms, "m"
    for longer, size in (("S", 1_000), ("M", 60), ("H", 60)):
        if amount <= MAX_TIMEOUT:
            break
        amount, unit = -(-amount // size), longer
    return encode_block([("grpc-timeout", f"{min(amount, MAX_TIMEOUT)}{unit}")])


def milliseconds(timeout_s: float) -> int:
    """Return a deadline in ms, rounded up, so that deadlines of which little has passed share a cached field."""
    return max(1, math.ceil(timeout_s * 1_000))


def status_of_reset(code: int) -> grpc.StatusCode:
    """Return the status that RST_STREAM stands for."""
    return _STATUS_OF_RESET.get(code, grpc.StatusCode.INTERNAL)  # type: ignore[call-overload,no-any-return]
