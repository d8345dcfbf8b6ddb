"""gRPC's messages on a stream: a flag, a length, the message – cut out of DATA frames however these are split.

Compressed messages are inflated here, and never beyond the bound on messages, whatever a few kilobytes claim to hold.
Never knows what a message means. What is refused is refused with grpcio's status and text, which the tests compare.
"""

from __future__ import annotations

import enum
import zlib
from base64 import b64encode
from collections.abc import Iterator
from typing import Final, NamedTuple
from urllib.parse import quote

from ratelimitd.http2.headers import static_block
from ratelimitd.http2.sending import UnaryAnswer
from ratelimitd.rpc.interface import RpcError, StatusCode
from ratelimitd_wire.static_table import Field

PREFIX_BYTES: Final = 5
"""A flag, 0 or 1 for compressed, and the length in four bytes."""

ENCODINGS: Final = b"identity, deflate, gzip"
"""What ``grpc-encoding`` may say; for ``grpc-accept-encoding``."""


class Encoding(enum.Enum):
    """How the compressed messages of a call are; the value is zlib's window parameter for it."""

    IDENTITY = None
    DEFLATE = zlib.MAX_WBITS
    """In the format of zlib (RFC 1950), which is what HTTP means by the name."""
    GZIP = zlib.MAX_WBITS | 16


_KEPT_SIZES: Final = 1_024
_KEPT_PREFIXES: Final = tuple(size.to_bytes(PREFIX_BYTES, "big") for size in range(_KEPT_SIZES))
"""Of the sizes of checks and their answers: looked up in 30 ns, made in 90."""


PREFIXES: Final = {size + PREFIX_BYTES: _KEPT_PREFIXES[size] for size in range(_KEPT_SIZES)}
"""By the length of a body that is one uncompressed message: its first octets."""


def prefix_of(size: int) -> bytes:
    """What stands in front of a message of ``size`` octets: answers are small, and are never compressed."""
    return _KEPT_PREFIXES[size] if size < _KEPT_SIZES else size.to_bytes(PREFIX_BYTES, "big")


def framed(message: bytes) -> bytes:
    """A message as it goes out."""
    return prefix_of(len(message)) + message


def only_message(body: bytes) -> bytes | None:
    """The message of a body that is exactly one, uncompressed; ``None`` for any other body.

    What most calls are: it spares them a :class:`MessageReader`. Of at most 4 GiB, so a bound on messages bounds
    the body.
    """
    size = len(body) - PREFIX_BYTES
    if size < 0:
        return None
    prefix = _KEPT_PREFIXES[size] if size < _KEPT_SIZES else size.to_bytes(PREFIX_BYTES, "big")
    return body[PREFIX_BYTES:] if body.startswith(prefix) else None


class Part(NamedTuple):
    """A message as it came: possibly compressed."""

    compressed: bool
    content: bytes


class MessageReader:
    """Puts the messages of one call together, without inflating them.

    It holds at most one unfinished message, of at most ``max_message_bytes`` and its prefix, as far as it has come.
    """

    __slots__ = ("_buffer", "_max_message_bytes")

    def __init__(self, max_message_bytes: int) -> None:
        self._buffer = bytearray()
        self._max_message_bytes = max_message_bytes

    @property
    def unfinished_bytes(self) -> int:
        """What is held of a message that is not complete."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[Part]:
        """Take the next bytes, and yield the messages that are complete with them. The caller exhausts it.

        Raises:
            RpcError: RESOURCE_EXHAUSTED for a message over the bound, as soon as its prefix tells; the call is over.
        """
        buffer = self._buffer
        buffer += data
        at = 0
        try:
            while len(buffer) - at >= PREFIX_BYTES:
                start = at + PREFIX_BYTES
                length = int.from_bytes(buffer[at + 1 : start], "big")
                if length > self._max_message_bytes:
                    raise too_large(length, self._max_message_bytes)
                if len(buffer) < start + length:
                    return
                compressed = bool(buffer[at])
                at = start + length
                yield Part(compressed, bytes(buffer[start:at]))
        finally:
            del buffer[:at]


def message_of(part: Part, encoding: Encoding, max_message_bytes: int) -> bytes:
    """The message, inflated where need be.

    Raises:
        RpcError: as :func:`inflated`, and INTERNAL for one that is compressed although no header said how.
    """
    if not part.compressed:
        return part.content
    if encoding is Encoding.IDENTITY:
        text = "Compression bit set but no encoding configured"
        raise RpcError(StatusCode.INTERNAL, text)
    return inflated(part.content, encoding, max_message_bytes)


def inflated(message: bytes, encoding: Encoding, max_message_bytes: int) -> bytes:
    """The message behind a compressed one; no more than the bound is ever made of it.

    Raises:
        RpcError: RESOURCE_EXHAUSTED for one that holds more than the bound, INTERNAL for one that is broken.
    """
    stream = zlib.decompressobj(encoding.value or 0)
    try:
        found = stream.decompress(message, max_message_bytes + 1)
    except zlib.error:
        raise _broken(why="zlib error") from None
    if len(found) > max_message_bytes:
        text = "Decompressed message larger than max"
        raise RpcError(StatusCode.RESOURCE_EXHAUSTED, text)
    if not stream.eof:
        raise _broken(why="data error")
    if stream.unused_data:
        raise _broken(why="not all input consumed")
    return found


def too_large(length: int, max_message_bytes: int) -> RpcError:
    """The end of a call with a message of ``length`` bytes."""
    message = f"SERVER: Received message larger than max ({length} vs. {max_message_bytes})"
    return RpcError(StatusCode.RESOURCE_EXHAUSTED, message)


def _broken(*, why: str) -> RpcError:
    return RpcError(StatusCode.INTERNAL, f"Decompression failed due to {why}")


Fields = tuple[Field, ...]

MAX_MESSAGE_CHARS: Final = 1_024
"""Of a status: what a client takes as trailers is bounded, by 8 KiB with most, and details come on top."""

_UNQUOTED: Final = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")
"""gRPC over HTTP/2, "Percent-Byte-Unencoded": all printable ASCII but the percent sign."""

_HTTP_OK: Final = (b":status", b"200")
_CONTENT_TYPE: Final = (b"content-type", b"application/grpc")


def status_fields(error: RpcError) -> Fields:
    """The trailers that say how a call ended; message and details stay away when there are none."""
    fields = [(b"grpc-status", b"%d" % error.code)]
    if error.message:
        text = quote(error.message[:MAX_MESSAGE_CHARS], safe=_UNQUOTED, errors="replace")
        fields.append((b"grpc-message", text.encode("ascii")))
    if error.details:
        # Unpadded, as gRPC asks of those who send.
        fields.append((b"grpc-status-details-bin", b64encode(error.details).rstrip(b"=")))
    return tuple(fields)


def trailers(error: RpcError) -> bytes:
    """The block that ends a call after its headers were sent."""
    return static_block(status_fields(error))


def trailers_only(error: RpcError, extra: Fields = ()) -> bytes:
    """The block that is the whole answer of a call that failed before anything else was sent."""
    return static_block((_HTTP_OK, _CONTENT_TYPE, *extra, *status_fields(error)))


HEADERS: Final = static_block((_HTTP_OK, _CONTENT_TYPE))
"""Ahead of every message."""

OK_TRAILERS: Final = static_block(((b"grpc-status", b"0"),))
"""Behind the last one."""

UNARY_ANSWER: Final = UnaryAnswer(HEADERS, OK_TRAILERS, prefix_of)
"""A whole answer but for its message."""

OK_TRAILERS_ONLY: Final = trailers_only(RpcError(StatusCode.OK, ""))
"""A stream that ends well without a message."""

ACCEPTED_ENCODINGS: Final[Fields] = ((b"grpc-accept-encoding", ENCODINGS),)
"""The answer to an unknown message encoding."""


MAX_DIGITS: Final = 8
"""gRPC over HTTP/2, "Timeout": at most eight digits, so that no sum of it and a clock overflows anywhere."""

_UNIT_S: Final = {
    ord("H"): 3_600.0,
    ord("M"): 60.0,
    ord("S"): 1.0,
    ord("m"): 1e-3,
    ord("u"): 1e-6,
    ord("n"): 1e-9,
}


_UNITS: Final = frozenset(bytes((unit,)) for unit in _UNIT_S)
_DIGITS: Final = b"0123456789"
_ZERO: Final = ord("0")


def is_positive_timeout(value: bytes) -> bool:
    """Whether a value surely leaves time: for calls whose deadline is not otherwise read, in half the time.

    False says nothing, for a value with leading zeros may do so, too.
    """
    return (
        value.lstrip(_DIGITS) in _UNITS and 1 < len(value) <= MAX_DIGITS + 1 and value[0] != _ZERO
    )


def parse_timeout_s(value: bytes) -> float:
    """The seconds that a value such as ``b"250m"`` stands for; zero is one.

    Raises:
        ValueError: it is not up to eight ASCII digits and a unit.
    """
    digits = value[:-1]
    if not digits.isdigit() or len(digits) > MAX_DIGITS or value[-1] not in _UNIT_S:
        message = "no timeout"
        raise ValueError(message)
    return int(digits) * _UNIT_S[value[-1]]
