"""Peers on a port of TLS whose first octets are not TLS: what they are told before the connection is closed.

The other way round, TLS on a plaintext port, is the business of :mod:`ratelimitd.http2.preface`. Never does I/O.
"""

from __future__ import annotations

from typing import Final

from ratelimitd.http2 import frames
from ratelimitd.http2.errors import Cause, ErrorCode
from ratelimitd.http2.preface import PREFACE, mistaken_protocol, undecided

TLS_RECORD: Final = b"\x16"
"""What TLS begins with: a record of the handshake."""

_TEXT: Final = b"This port speaks gRPC over TLS only.\n"
_TO_HTTP1: Final = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_TEXT), _TEXT)
)
_TO_HTTP2: Final = frames.go_away(0, ErrorCode.INADEQUATE_SECURITY, b"this port speaks TLS")
"""Without the SETTINGS that should come first: to grpc's core these mean that it has arrived, so it tries again at once
and for ever, 400 times a second; like this it backs off."""


def answer_to(octets: bytes) -> bytes | None:
    """What to say in the peer's own words, empty when nothing is known of them; ``None`` while it is not clear."""
    if octets.startswith(PREFACE):
        return _TO_HTTP2
    if undecided(octets):
        return None
    return _TO_HTTP1 if mistaken_protocol(octets)[0] is Cause.HTTP1 else b""
