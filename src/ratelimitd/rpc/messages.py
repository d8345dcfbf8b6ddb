"""Length-prefixed gRPC messages (flag, length, message): framing, inflation, status trailers and timeouts.

Messages are inflated up to the bound on messages, so that a few kilobytes cannot become gigabytes. Refusals have
grpcio's status and text, which the tests compare. The content of messages is not interpreted.
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
"""Supported values of ``grpc-encoding``, for ``grpc-accept-encoding``."""


class Encoding(enum.Enum):
    """Compression of the messages of a call; the value is zlib's window parameter."""

    IDENTITY = None
    DEFLATE = zlib.MAX_WBITS
    """The zlib format (RFC 1950), as in HTTP."""
    GZIP = zlib.MAX_WBITS | 16


_KEPT_SIZES: Final = 1_024
_KEPT_PREFIXES: Final = tuple(size.to_bytes(PREFIX_BYTES, "big") for size in range(_KEPT_SIZES))
"""Prefixes for the sizes of checks and their answers: 30 ns to look up, 90 to build."""


PREFIXES: Final = {size + PREFIX_BYTES: _KEPT_PREFIXES[size] for size in range(_KEPT_SIZES)}
"""Prefix by the length of a body of one uncompressed message."""


def prefix_of(size: int) -> bytes:
    """Return the prefix of a message of ``size`` octets; answers are never compressed."""
    return _KEPT_PREFIXES[size] if size < _KEPT_SIZES else size.to_bytes(PREFIX_BYTES, "big")


def framed(message: bytes) -> bytes:
    """Return a message with its prefix."""
    return prefix_of(len(message)) + message


def only_message(body: bytes) -> bytes | None:
    """Return the message of a body of exactly one uncompressed message; else ``None``.

    Spares most calls a :class:`MessageReader`. The message has at most 4 GiB, so a bound on messages bounds the body.
    """
    size = len(body) - PREFIX_BYTES
    if size < 0:
        return None
    prefix = _KEPT_PREFIXES[size] if size < _KEPT_SIZES else size.to_bytes(PREFIX_BYTES, "big")
    return body[PREFIX_BYTES:] if body.startswith(prefix) else None


class Part(NamedTuple):
    """A received message, possibly compressed."""

    compressed: bool
    content: bytes


class MessageReader:
    """Assembles the messages of one call, without inflating them.

    Holds at most one incomplete message, of at most ``max_message_bytes`` and its prefix.
    """

    __slots__ = ("_buffer", "_max_message_bytes")

    def __init__(self, max_message_bytes: int) -> None:
        self._buffer = bytearray()
        self._max_message_bytes = max_message_bytes

    @property
    def unfinished_bytes(self) -> int:
        """Octets of an incomplete message."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[Part]:
        """Add bytes, and yield the messages that they complete. The caller must exhaust it.

        Raises:
            RpcError: RESOURCE_EXHAUSTED as soon as a prefix announces a message over the bound; the call is over.
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
    """Return the message, inflated if it is compressed.

    Raises:
        RpcError: as :func:`inflated`, and INTERNAL for a compressed message without ``grpc-encoding``.
    """
    if not part.compressed:
        return part.content
    if encoding is Encoding.IDENTITY:
        text = "Compression bit set but no encoding configured"
        raise RpcError(StatusCode.INTERNAL, text)
    return inflated(part.content, encoding, max_message_bytes)


def inflated(message: bytes, encoding: Encoding, max_message_bytes: int) -> bytes:
    """Inflate a message, up to the bound.

    Raises:
        RpcError: RESOURCE_EXHAUSTED if the result exceeds the bound, INTERNAL if the message is broken.
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
    """Return the error of a message of ``length`` bytes."""
    message = f"SERVER: Received message larger than max ({length} vs. {max_message_bytes})"
    return RpcError(StatusCode.RESOURCE_EXHAUSTED, message)


def _broken(*, why: str) -> RpcError:
    return RpcError(StatusCode.INTERNAL, f"Decompression failed due to {why}")


Fields = tuple[Field, ...]

MAX_MESSAGE_CHARS: Final = 1_024
"""Longest status message: most clients limit trailers to 8 KiB, including details."""

_UNQUOTED: Final = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")
"""gRPC over HTTP/2, "Percent-Byte-Unencoded": printable ASCII except the percent sign."""

_HTTP_OK: Final = (b":status", b"200")
_CONTENT_TYPE: Final = (b"content-type", b"application/grpc")


def status_fields(error: RpcError) -> Fields:
    """Return the trailers of a call, with message and details if there are any."""
    fields = [(b"grpc-status", b"%d" % error.code)]
    if error.message:
        text = quote(error.message[:MAX_MESSAGE_CHARS], safe=_UNQUOTED, errors="replace")
        fields.append((b"grpc-message", text.encode("ascii")))
    if error.details:
        # Unpadded, as gRPC requires of senders.
        fields.append((b"grpc-status-details-bin", b64encode(error.details).rstrip(b"=")))
    return tuple(fields)


def trailers(error: RpcError) -> bytes:
    """Return the trailers after headers were sent, encoded."""
    return static_block(status_fields(error))


def trailers_only(error: RpcError, extra: Fields = ()) -> bytes:
    """Return the header block of an answer that consists of trailers only."""
    return static_block((_HTTP_OK, _CONTENT_TYPE, *extra, *status_fields(error)))


HEADERS: Final = static_block((_HTTP_OK, _CONTENT_TYPE))
"""Headers of an answer."""

OK_TRAILERS: Final = static_block(((b"grpc-status", b"0"),))
"""Trailers of a successful answer."""

UNARY_ANSWER: Final = UnaryAnswer(HEADERS, OK_TRAILERS, prefix_of)
"""A unary answer without its message."""

OK_TRAILERS_ONLY: Final = trailers_only(RpcError(StatusCode.OK, ""))
"""A successful stream without messages."""

ACCEPTED_ENCODINGS: Final[Fields] = ((b"grpc-accept-encoding", ENCODINGS),)
"""Fields of the answer to an unknown encoding."""


MAX_DIGITS: Final = 8
"""gRPC over HTTP/2, "Timeout": at most eight digits, so that adding it to a clock never overflows."""

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
    """Return true for a positive timeout without leading zeros, in half the time of parsing it.

    False proves nothing: a value with a leading zero may be positive, too.
    """
    return (
        value.lstrip(_DIGITS) in _UNITS and 1 < len(value) <= MAX_DIGITS + 1 and value[0] != _ZERO
    )


def parse_timeout_s(value: bytes) -> float:
    """Return the seconds of a value such as ``b"250m"``; zero is valid.

    Raises:
        ValueError: it is not up to eight ASCII digits and a unit.
    """
    digits = value[:-1]
    if not digits.isdigit() or len(digits) > MAX_DIGITS or value[-1] not in _UNIT_S:
        message = "no timeout"
        raise ValueError(message)
    return int(digits) * _UNIT_S[value[-1]]
