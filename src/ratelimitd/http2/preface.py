"""The first octets of a connection (RFC 9113 §3.4): whether they are HTTP/2, and a clear answer when they are not.

Never waits for more octets than are needed to tell.
"""

from __future__ import annotations

from typing import Final

from ratelimitd.http2.errors import Cause

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

_TLS_HANDSHAKE: Final = 0x16
_TLS_UNEXPECTED_MESSAGE: Final = bytes((0x15, 3, 1, 0, 2, 2, 10))
"""A fatal alert: the client's error names TLS instead of a closed connection."""

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
    """Whether octets that do not begin with the whole preface may still become it, or a request of HTTP/1."""
    return any(known.startswith(octets) for known in (PREFACE, *_HTTP1_METHODS))


def mistaken_protocol(octets: bytes) -> tuple[Cause, bytes]:
    """Say what a peer speaks that does not begin with the preface, and in its own words that we do not.

    The answer is empty when nothing is known that it would understand.
    """
    if octets.startswith(_HTTP1_METHODS):
        return Cause.HTTP1, _HTTP1_ANSWER
    if octets[0] == _TLS_HANDSHAKE:
        return Cause.TLS, _TLS_UNEXPECTED_MESSAGE
    return Cause.PREFACE, b""
