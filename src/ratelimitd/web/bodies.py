"""The bodies of requests, read up to a bound."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request

from ratelimitd.rpc.interface import RpcError, StatusCode

MAX_DISCARDED_BYTES: Final = 16 * 1024 * 1024
"""Of a body that is too long so much is read and forgotten: most clients look for the answer only behind their own last
byte, and would see a broken connection instead of the reason."""


class BodyTooLargeError(RpcError):
    """A body is longer than its kind may be."""


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
        message = f"the body must be at most {max_bytes} bytes"
        raise BodyTooLargeError(StatusCode.RESOURCE_EXHAUSTED, message)
    return b"".join(parts)
