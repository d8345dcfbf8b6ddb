"""What the header blocks of a call say: that of the question, and those of the answer. Pure.

The mapping of HTTP to gRPC is that of the protocol's description (PROTOCOL-HTTP2.md and http-grpc-status-mapping.md of
the gRPC project).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import unquote_to_bytes

import grpc

from ratelimitd_client.http2 import blocks
from ratelimitd_wire.codes import ErrorCode

MAX_TEXT_BYTES: Final = 1_024
"""How much of an error's text is read."""

MAX_TIMEOUT: Final = 99_999_999
"""grpc-timeout has eight digits."""

KEPT_HEADS: Final = 16
"""Blocks whose meaning is kept: a node answers all checks with the same two."""

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


class Head(NamedTuple):
    """A header block of an answer."""

    is_informational: bool
    """An HTTP status of 1xx: another block follows in its place."""

    refusal: grpc.StatusCode | None
    """What an answer that is none of gRPC stands for."""

    status: grpc.StatusCode | None
    """grpc-status, if there is one."""

    text: str
    """grpc-message."""


@lru_cache(maxsize=KEPT_HEADS)
def read(block: bytes) -> Head:
    """Return what a block says.

    Raises:
        PeerError: it is malformed.
    """
    fields = dict(blocks.decode(block))
    http_status = fields.get(b":status", b"")
    refusal = None
    if http_status != b"200":
        refusal = _STATUS_OF_HTTP.get(http_status, grpc.StatusCode.UNKNOWN)
    elif not fields.get(b"content-type", b"").startswith(b"application/grpc"):
        refusal = grpc.StatusCode.UNKNOWN
    number = fields.get(b"grpc-status")
    return Head(
        is_informational=http_status.startswith(b"1"),
        refusal=refusal,
        status=None if number is None else _STATUS.get(number, grpc.StatusCode.UNKNOWN),
        text=_text(fields.get(b"grpc-message", b"")),
    )


def question(
    path: str, authority: str, scheme: str, metadata: tuple[tuple[str, str], ...]
) -> bytes:
    """The block of a call, but for its deadline."""
    return blocks.encode(
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
def deadline(timeout_ms: int) -> bytes:
    """The end of a call's block: how many milliseconds it may take."""
    amount, unit = timeout_ms, "m"
    for longer, size in (("S", 1_000), ("M", 60), ("H", 60)):
        if amount <= MAX_TIMEOUT:
            break
        amount, unit = -(-amount // size), longer
    return blocks.encode([("grpc-timeout", f"{min(amount, MAX_TIMEOUT)}{unit}")])


def milliseconds(timeout_s: float) -> int:
    """A deadline as it is sent: rounded up, so that equal ones are sent alike although some time has passed."""
    return max(1, math.ceil(timeout_s * 1_000))


def status_of_reset(code: int) -> grpc.StatusCode:
    """What RST_STREAM stands for."""
    return _STATUS_OF_RESET.get(code, grpc.StatusCode.INTERNAL)  # type: ignore[call-overload,no-any-return]


def _text(encoded: bytes) -> str:
    return unquote_to_bytes(encoded[:MAX_TEXT_BYTES]).decode("utf-8", "replace")
