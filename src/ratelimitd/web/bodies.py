"""The bodies of requests, read and inflated up to a bound."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request

from ratelimitd.rpc.framing import Encoding, inflated
from ratelimitd.rpc.interface import RpcError, StatusCode

MAX_DISCARDED_BYTES: Final = 16 * 1024 * 1024
"""Of a body that is too long so much is read and forgotten: most clients look for the answer only behind their own last
byte, and would see a broken connection instead of the reason."""


class BodyTooLargeError(RpcError):
    """A body is longer than its kind may be."""


class EncodingUnsupportedError(RpcError):
    """A body is compressed in a way that nobody here can undo."""


async def body_of(request: Request, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        BodyTooLargeError: it has more than ``max_bytes``.
        starlette.requests.ClientDisconnect: the caller left before its end.
    """
    parts = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= max_bytes:
            parts.append(part)
        elif size > MAX_DISCARDED_BYTES:
            break
    if size > max_bytes:
        raise _too_large(max_bytes)
    return b"".join(parts)


def uncompressed(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """What a body holds. Not more is ever made of it than it may hold.

    Raises:
        BodyTooLargeError: it holds more.
        EncodingUnsupportedError: it is compressed otherwise than with gzip.
        RpcError: INVALID_ARGUMENT for what is no gzip.
    """
    if encoding == "identity" or not body:
        return body
    if encoding != "gzip":
        message = "a body may be compressed with gzip only"
        raise EncodingUnsupportedError(StatusCode.UNIMPLEMENTED, message)
    try:
        return inflated(body, Encoding.GZIP, max_bytes)
    except RpcError as error:
        if error.code is StatusCode.RESOURCE_EXHAUSTED:
            raise _too_large(max_bytes) from None
        raise RpcError(StatusCode.INVALID_ARGUMENT, "the body is no gzip") from None


def _too_large(max_bytes: int) -> BodyTooLargeError:
    message = f"the body must be at most {max_bytes} bytes"
    return BodyTooLargeError(StatusCode.RESOURCE_EXHAUSTED, message)
