"""Answers to requests that are HTTP/2 but not gRPC: a browser, a probe, a proxy that was set up wrong.

A person reads these, so they are real HTTP answers with a body. Never for anything that claims to be gRPC.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from ratelimitd.http2.answers import static_block


class PlainAnswer(NamedTuple):
    """A header block, and the body that follows it; there is none behind the headers of an answer to HEAD."""

    head_block: bytes
    body: bytes


def plain_answer(method: bytes, *, is_grpc: bool) -> PlainAnswer | None:
    """What to answer to a request of that method; ``None`` if it is one of gRPC."""
    if method != b"POST":
        return _HEAD_NOT_ALLOWED if method == b"HEAD" else _METHOD_NOT_ALLOWED
    return None if is_grpc else _UNSUPPORTED_MEDIA_TYPE


def _answer(status: int, body: bytes, *fields: tuple[bytes, bytes]) -> PlainAnswer:
    block = static_block(
        (
            (b":status", b"%d" % status),
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", b"%d" % len(body)),
            *fields,
        )
    )
    return PlainAnswer(block, body)


_METHOD_NOT_ALLOWED: Final = _answer(
    405, b"This port speaks gRPC: POST with content-type application/grpc.\n", (b"allow", b"POST")
)
_HEAD_NOT_ALLOWED: Final = _METHOD_NOT_ALLOWED._replace(body=b"")
_UNSUPPORTED_MEDIA_TYPE: Final = _answer(
    415, b"This port speaks gRPC: the content-type must be application/grpc.\n"
)
