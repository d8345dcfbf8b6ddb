"""The header blocks of answers: made once where they are always the same, and at the end of a call where not.

No block refers to the dynamic table of a connection or changes it, so one block serves every connection, and the
common answer costs no encoding at all. Never decides a status.
"""

from __future__ import annotations

from base64 import b64encode
from typing import Final
from urllib.parse import quote

from ratelimitd.http2.answers import UnaryAnswer, static_block
from ratelimitd.rpc.interface import RpcError, StatusCode
from ratelimitd.rpc.messages import ENCODINGS, prefix_of
from ratelimitd_wire.static_table import Field

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
"""What a caller is told who compresses in a way that is not known here."""


# How long a caller waits: the header ``grpc-timeout``, as a number of seconds. Never reads a clock.

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
