"""Adapts an HTTP request to the call interface of the services, so that pages and JSON are handled like gRPC callers.

Reads the body and awaits the handler's answer. Authorizes nothing: the handler's own guard does so, based on this call.
See ADR 0017.
"""

from __future__ import annotations

import asyncio
import inspect
import ipaddress
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.types import Receive

from ratelimitd.retry import cancel_all
from ratelimitd.rpc.interface import Call, RpcError, StatusCode, UnaryHandler
from ratelimitd.rpc.messages import Encoding, inflated

Requirement = Callable[[Call], None]
"""Lets a call pass or raises ``RpcError``: the check of a role."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HttpCall:
    """A :class:`ratelimitd.rpc.interface.Call` made from an HTTP request.

    It has no certificate and no deadline. ``authorization`` replaces the header of this name for a logged-in visitor;
    empty: the request's header applies.
    """

    method: str
    peer: str
    headers: Headers
    authorization: str = ""
    peer_sans: Sequence[str] = ()

    def metadata(self, key: str) -> str | None:
        """Return the first value of a header by its lower-case name, or ``None``."""
        if key == "authorization" and self.authorization:
            return self.authorization
        return self.headers.get(key)

    def values(self, key: str) -> list[str]:
        """Return all values of a header by its lower-case name."""
        return self.headers.getlist(key)

    def time_remaining_s(self) -> None:
        """Return ``None``: HTTP requests carry no deadline here."""


def http_call(request: HTTPConnection, method: str, authorization: str = "") -> HttpCall:
    """Return the call of ``method``, a full path such as ``/ratelimiter.v1.RateLimiter/CheckRateLimit``."""
    return HttpCall(method, peer_of(request), request.headers, authorization)


def peer_of(request: HTTPConnection) -> str:
    """Return the peer in gRPC's format: ``ipv4:127.0.0.1:50000`` or ``ipv6:[::1]:50000``.

    An IPv4 peer on a dual-stack socket is returned as IPv4. ``unknown:`` is never loopback.
    """
    client = request.client
    try:
        address = ipaddress.ip_address(client.host if client else "")
    except ValueError:
        return "unknown:"
    port = client.port if client else 0
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return f"ipv6:[{address}]:{port}"
        address = address.ipv4_mapped
    return f"ipv4:{address}:{port}"


_OWN_SITE: Final = frozenset({"same-origin", "none"})
"""``none`` is a user action, such as reloading a form."""


def is_cross_site(headers: Headers) -> bool:
    """Return whether a browser marks the request as cross-origin; other programs send no such headers."""
    if headers.get("sec-fetch-site", "none") not in _OWN_SITE:
        return True
    origin = headers.get("origin")
    # Ignore the scheme: a proxy that terminates TLS speaks HTTP to this node.
    return (
        origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower()
    )


async def settled(value: T | Awaitable[T]) -> T:
    """Return a value, awaiting it if necessary."""
    return await value if inspect.isawaitable(value) else value


async def handled(
    handler: UnaryHandler,
    data: bytes,
    call: Call,
    *,
    receive: Receive,
    deadline_s: float | None = None,
) -> bytes:
    """Return the answer of a handler, unless the deadline passes or the caller disconnects first.

    ``receive`` returns, after the body, when the caller disconnects; ``deadline_s`` is on the event loop's clock.

    Raises:
        RpcError: raised by the handler, or DEADLINE_EXCEEDED.
        starlette.requests.ClientDisconnect: the client has disconnected.
    """
    exceeded = RpcError(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
    remaining_s = None if deadline_s is None else deadline_s - asyncio.get_running_loop().time()
    if remaining_s is not None and remaining_s <= 0:
        raise exceeded
    answer = handler(data, call)
    if isinstance(answer, bytes):
        return answer
    working = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(_left(receive))
    both = (working, leaving)
    try:
        await asyncio.wait(both, timeout=remaining_s, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect if leaving.done() else exceeded
    finally:
        await cancel_all(*both)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


MAX_DISCARDED_BYTES: Final = 16 * 1024 * 1024
"""Bytes of an oversized body that are read and discarded: most clients read the answer only after sending everything,
and would otherwise see a broken connection instead of the reason."""


class BodyTooLargeError(RpcError):
    """A body is longer than its kind may be."""


class EncodingUnsupportedError(RpcError):
    """The body has an unsupported Content-Encoding."""


async def body_of(request: Request, max_bytes: int) -> bytes:
    """Return the whole body.

    Raises:
        BodyTooLargeError: it has more than ``max_bytes``.
        starlette.requests.ClientDisconnect: the caller disconnected before its end.
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
    """Decompress a body, in memory bounded by ``max_bytes``.

    Raises:
        BodyTooLargeError: its content is longer.
        EncodingUnsupportedError: its encoding is not gzip.
        RpcError: INVALID_ARGUMENT if it is not valid gzip.
    """
    if encoding == "identity" or not body:
        return body
    if encoding.lower() not in {"gzip", "x-gzip"}:  # RFC 9110 8.4.1
        message = "a body may be compressed with gzip only"
        raise EncodingUnsupportedError(StatusCode.UNIMPLEMENTED, message)
    try:
        return inflated(body, Encoding.GZIP, max_bytes)
    except RpcError as error:
        if error.code is StatusCode.RESOURCE_EXHAUSTED:
            raise _too_large(max_bytes) from None
        raise RpcError(StatusCode.INVALID_ARGUMENT, "the body is not gzip") from None


def _too_large(max_bytes: int) -> BodyTooLargeError:
    message = f"the body must be at most {max_bytes} bytes"
    return BodyTooLargeError(StatusCode.RESOURCE_EXHAUSTED, message)
