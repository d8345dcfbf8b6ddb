"""Maps the header list of a request to a route: method, compression, deadline.

Routes are cached per header block, since clients repeat their headers except for the deadline. The HTTP/2 core has
already checked HTTP's own rules.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

from ratelimitd.http2.headers import RequestHead, static_block
from ratelimitd.rpc.interface import (
    BulkHandler,
    Methods,
    RpcError,
    StatusCode,
    TransportError,
    UnaryHandler,
)
from ratelimitd.rpc.messages import (
    ACCEPTED_ENCODINGS,
    Encoding,
    Fields,
    is_positive_timeout,
    parse_timeout_s,
)
from ratelimitd.tracing import TRACEPARENT, is_sampled


class HttpFallback(NamedTuple):
    """Header block and body of an answer; the body is empty for HEAD."""

    head_block: bytes
    body: bytes


def http_fallback(method: bytes, *, is_grpc: bool) -> HttpFallback | None:
    """Return the answer to a request that is not gRPC; ``None`` if it is."""
    if method != b"POST":
        return _HEAD_NOT_ALLOWED if method == b"HEAD" else _METHOD_NOT_ALLOWED
    return None if is_grpc else _UNSUPPORTED_MEDIA_TYPE


def _answer(status: int, body: bytes, *fields: tuple[bytes, bytes]) -> HttpFallback:
    block = static_block(
        (
            (b":status", b"%d" % status),
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", b"%d" % len(body)),
            *fields,
        )
    )
    return HttpFallback(block, body)


_METHOD_NOT_ALLOWED: Final = _answer(
    405, b"This port speaks gRPC: POST with content-type application/grpc.\n", (b"allow", b"POST")
)
_HEAD_NOT_ALLOWED: Final = _METHOD_NOT_ALLOWED._replace(body=b"")
_UNSUPPORTED_MEDIA_TYPE: Final = _answer(
    415, b"This port speaks gRPC: the content-type must be application/grpc.\n"
)


StreamHandler = Callable[[Any, "NativeCall"], AsyncIterator[bytes]]

_TIMEOUT: Final = b"grpc-timeout"
_ENCODING: Final = b"grpc-encoding"
_CONTENT_TYPE: Final = b"content-type"
_MEANINGFUL: Final = frozenset((_TIMEOUT, _ENCODING, _CONTENT_TYPE))
"""Fields that select a route besides the path; all others are metadata."""

_BINARY: Final = b"-bin"
"""End of the names of binary metadata."""

_TRACEPARENT: Final = TRACEPARENT.encode()
_MEANINGFUL_TRACED: Final = _MEANINGFUL | {_TRACEPARENT}
"""The same for traced methods."""

_ENCODINGS: Final = {
    b"identity": Encoding.IDENTITY,
    b"deflate": Encoding.DEFLATE,
    b"gzip": Encoding.GZIP,
}

_GRPC: Final = b"application/grpc"
_AFTER_GRPC: Final = (b"", b"+", b";")
"""Valid continuations of the content type: none, a codec, or parameters."""


class MethodRoute(NamedTuple):
    """One method: its path and its handler."""

    path: str
    unary: UnaryHandler | None = None
    bulk: BulkHandler | None = None
    server_stream: StreamHandler | None = None
    bidi_stream: StreamHandler | None = None
    bulk_unless_sampled: bool = False


class Refusal(NamedTuple):
    """The answer to a refused call: its status, the cause to count, and extra fields."""

    error: RpcError
    cause: TransportError
    fields: Fields = ()


class Peer(NamedTuple):
    """The peer of a connection, in the form of :class:`ratelimitd.rpc.interface.Call`."""

    address: str
    sans: tuple[str, ...] = ()


class Route:
    """How to answer requests with a certain header block; cached with it.

    Exactly one of ``route``, ``refusal`` and ``plain`` is set.

    Attributes:
        route: the requested method.
        refusal: the error of the call.
        plain: the answer to a request that is not gRPC.
        encoding: compression of messages.
        timeout_s: the deadline in the header block; ``None`` without one.
        any_deadline: blocks that differ only in a positive ``grpc-timeout`` may share this route.
        unary, server_stream, bidi_stream: the handler; one of them is set.
        bulk: the bulk handler of the unary method, if any.
        meaningful: fields that may select another route if they vary.
        call: the argument of the handler, shared by all calls without varying fields and deadline.
    """

    __slots__ = (
        "any_deadline",
        "bidi_stream",
        "bulk",
        "call",
        "encoding",
        "meaningful",
        "plain",
        "refusal",
        "route",
        "server_stream",
        "timeout_s",
        "unary",
    )

    def __init__(self) -> None:
        self.route: MethodRoute | None = None
        self.refusal: Refusal | None = None
        self.plain: HttpFallback | None = None
        self.encoding = Encoding.IDENTITY
        self.timeout_s: float | None = None
        self.any_deadline = False
        self.unary: UnaryHandler | None = None
        self.bulk: BulkHandler | None = None
        self.server_stream: StreamHandler | None = None
        self.bidi_stream: StreamHandler | None = None
        self.meaningful = _MEANINGFUL
        self.call: NativeCall | None = None


class NativeCall:
    """A :class:`ratelimitd.rpc.interface.Call`; metadata is looked up on request.

    ``deadline_s`` is a reading of ``monotonic_s``.
    """

    __slots__ = ("_fields", "_monotonic_s", "_peer", "deadline_s", "method")

    def __init__(  # noqa: PLR0917 -- made for every call, and keywords would cost 100 ns
        self,
        method: str,
        fields: Fields,
        peer: Peer,
        monotonic_s: Callable[[], float],
        deadline_s: float | None = None,
    ) -> None:
        self.method = method
        self.deadline_s = deadline_s
        self._fields = fields
        self._peer = peer
        self._monotonic_s = monotonic_s

    @property
    def peer(self) -> str:
        """Address of the peer."""
        return self._peer.address

    @property
    def peer_sans(self) -> Sequence[str]:
        """Names in the verified client certificate; no header can add to them."""
        return self._peer.sans

    def metadata(self, key: str) -> str | None:
        """Return the first value of a key; ``None`` for binary keys, as with grpcio."""
        wanted = key.encode()
        if wanted.endswith(_BINARY) or wanted.startswith(b":"):
            return None
        for name, value in self._fields:
            if name == wanted:
                return _text(value)
        return None

    def values(self, key: str) -> list[str]:
        """Return all values of a key that is not binary."""
        wanted = key.encode()
        return [_text(value) for name, value in self._fields if name == wanted]

    def time_remaining_s(self) -> float | None:
        """Seconds until the deadline."""
        if self.deadline_s is None:
            return None
        return max(0.0, self.deadline_s - self._monotonic_s())


class Router:
    """Finds the routes of the requests of one connection."""

    __slots__ = ("_monotonic_s", "_peer", "_routes")

    def __init__(
        self, routes: Mapping[bytes, MethodRoute], peer: Peer, monotonic_s: Callable[[], float]
    ) -> None:
        self._routes = routes
        self._peer = peer
        self._monotonic_s = monotonic_s

    def read(self, head: RequestHead) -> Route:
        """Return the route of a request, cached for header blocks that differ only in metadata and deadline."""
        model = head.model or head
        kept = model.owner_data
        if kept is None:
            kept = model.owner_data = self._made(model.fields)
        plan: Route = kept  # type: ignore[assignment]  # only this module keeps notes with heads; cast() costs 40 ns
        for name, value in head.varying:
            if name not in plan.meaningful or (name == _TRACEPARENT and not _is_sampled(value)):
                if name.endswith(_BINARY):
                    return self._made(head.fields)
                continue
            if name != _TIMEOUT or not plan.any_deadline or not is_positive_timeout(value):
                return self._made(head.fields)
        if not head.varying:
            head.owner_data = plan
        return plan

    def call(self, plan: Route, head: RequestHead, came_s: float) -> NativeCall:
        """Return the handler's argument for a call that arrived at ``came_s``."""
        timeout_s = plan.timeout_s
        if plan.any_deadline:
            for name, value in head.varying:
                if name == _TIMEOUT:
                    timeout_s = parse_timeout_s(value)
        if timeout_s is None and plan.call is not None and not head.varying:
            return plan.call
        route = cast("MethodRoute", plan.route)  # set: callers have checked
        deadline_s = None if timeout_s is None else came_s + timeout_s
        return NativeCall(route.path, head.fields, self._peer, self._monotonic_s, deadline_s)

    def _made(self, fields: Fields) -> Route:
        plan = Route()
        found = dict(reversed(fields))  # the first of repeated fields counts
        is_grpc = _is_grpc(found.get(_CONTENT_TYPE, b""))
        plan.plain = http_fallback(found.get(b":method", b""), is_grpc=is_grpc)
        if plan.plain is not None:
            return plan
        encoding = _ENCODINGS.get(found.get(_ENCODING, b"identity"))
        path = found.get(b":path", b"")
        if encoding is None:
            plan.refusal = _UNKNOWN_ENCODING
        elif path not in self._routes:
            plan.refusal = _UNKNOWN_METHOD
        elif not all(_is_base64(value) for name, value in fields if name.endswith(_BINARY)):
            plan.refusal = _BAD_BINARY
        else:
            try:
                plan.timeout_s = parse_timeout_s(found[_TIMEOUT]) if _TIMEOUT in found else None
            except ValueError:
                plan.refusal = _BAD_TIMEOUT
                return plan
            plan.route = route = self._routes[path]
            plan.unary = route.unary
            # The bulk handler does not check deadlines.
            plan.bulk = None if plan.timeout_s == 0 else route.bulk
            if route.bulk_unless_sampled:
                plan.meaningful = _MEANINGFUL_TRACED
                if _is_sampled(found.get(_TRACEPARENT, b"")):
                    plan.bulk = None
            plan.any_deadline = (
                bool(plan.timeout_s) and [name for name, _ in fields].count(_TIMEOUT) == 1
            )
            plan.server_stream = route.server_stream
            plan.bidi_stream = route.bidi_stream
            plan.encoding = encoding
            plan.call = NativeCall(route.path, fields, self._peer, self._monotonic_s)
        return plan


def routes_of(methods: Methods) -> Mapping[bytes, MethodRoute]:
    """Return the routes by path, in bytes."""
    routes = {}
    for path, unary in methods.unary.items():
        bulk = methods.bulk.get(path)
        unless_sampled = bulk is not None and methods.bulk_unless_sampled
        routes[path.encode()] = MethodRoute(path, unary, bulk, bulk_unless_sampled=unless_sampled)
    for path, stream in methods.server_stream.items():
        routes[path.encode()] = MethodRoute(path, server_stream=stream)
    for path, bidi in methods.bidi_stream.items():
        routes[path.encode()] = MethodRoute(path, bidi_stream=bidi)
    return routes


def _is_grpc(content_type: bytes) -> bool:
    rest = content_type[len(_GRPC) :]
    return content_type.startswith(_GRPC) and rest[:1] in _AFTER_GRPC


def _is_base64(value: bytes) -> bool:
    """Return whether a value is base64, padded or not, or several with commas between (grpc/grpc PROTOCOL-HTTP2.md)."""
    for part in value.split(b","):
        bare = part.rstrip(b"=")
        try:
            octets = b64decode(bare + b"=" * (-len(bare) % 4), validate=True)
        except ValueError:
            return False
        if b64encode(octets).rstrip(b"=") != bare:
            return False
    return True


def _is_sampled(traceparent: bytes) -> bool:
    return is_sampled(traceparent.decode("latin-1"))


def _text(value: bytes) -> str:
    """Decode a value as grpcio does."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


_UNKNOWN_METHOD: Final = Refusal(
    RpcError(StatusCode.UNIMPLEMENTED, "Method not found!"), TransportError.UNKNOWN_METHOD
)
_UNKNOWN_ENCODING: Final = Refusal(
    RpcError(StatusCode.UNIMPLEMENTED, "grpc-encoding names an unknown compression"),
    TransportError.BAD_REQUEST,
    ACCEPTED_ENCODINGS,
)
_BAD_BINARY: Final = Refusal(
    RpcError(StatusCode.INTERNAL, "binary metadata (-bin) must be base64"),
    TransportError.BAD_REQUEST,
)
_BAD_TIMEOUT: Final = Refusal(
    RpcError(StatusCode.INTERNAL, "Error parsing 'grpc-timeout' metadata"),
    TransportError.BAD_REQUEST,
)


def peer_of(transport: asyncio.BaseTransport) -> Peer:
    """Return the peer of a connection."""
    sock: socket.socket | None = transport.get_extra_info("socket")
    ssl_object = transport.get_extra_info("ssl_object")
    certificate = None if ssl_object is None else ssl_object.getpeercert()
    address = address_of(
        None if sock is None else sock.family, transport.get_extra_info("peername")
    )
    return Peer(address, sans_of(certificate or {}))


def address_of(family: int | None, name: Any) -> str:
    """Return ``ipv4:127.0.0.1:50000``, ``ipv6:[::1]:50000`` or ``unix:``; ``name`` is the socket's peer name.

    IPv4-mapped addresses become IPv4. A peer that has left has no name, and must not count as local.
    """
    if family == socket.AF_UNIX:
        return "unix:"
    if not name:
        return "unknown:"
    if family == socket.AF_INET:
        return f"ipv4:{name[0]}:{name[1]}"
    mapped = ipaddress.IPv6Address(name[0]).ipv4_mapped
    return f"ipv6:[{name[0]}]:{name[1]}" if mapped is None else f"ipv4:{mapped}:{name[1]}"


_IP: Final = "IP Address"
_SAN_KINDS: Final = frozenset({"DNS", "URI", "email", _IP})
_INVALID: Final = "<invalid>"
"""Text of :mod:`ssl` for an IP address of another length than 4 or 16 bytes."""


def sans_of(certificate: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of a certificate in the form of :mod:`ssl`, as ``Call.peer_sans`` has them."""
    return tuple(
        str(ipaddress.ip_address(name)) if kind == _IP else name
        for kind, name in certificate.get("subjectAltName", ())
        if kind in _SAN_KINDS and name != _INVALID
    )
