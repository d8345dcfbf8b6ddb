"""Forward auth: ``/v1/auth`` answers whether a proxy may forward a request. See ADR 0061.

Calls CheckRateLimit of gRPC behind the same guard. Any client input results in a decision or a refusal, never in an
error of the node: proxies may be configured to let requests through on errors.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Final, NamedTuple, NoReturn
from urllib.parse import parse_qsl, unquote_to_bytes

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from ratelimitd.errors import FieldViolation, InvalidInputError
from ratelimitd.model import INT32_MAX, IdentifierType
from ratelimitd.rpc.interface import RpcError, StatusCode, UnaryHandler
from ratelimitd.rules.assignments import MAX_IDENTIFIER_BYTES
from ratelimitd.settings.parsing import FORWARDED_FOR, PATH_TEMPLATE, UNMATCHED
from ratelimitd.web.api.connect import ConnectJson
from ratelimitd.web.api.http_call import Requirement, handled, http_call, is_cross_site
from ratelimitd.web.api.json_api import (
    CHECK_METHOD,
    CLIENT_LEFT,
    DENIED,
    Translation,
    limit_fields,
)
from ratelimitd_wire.addresses import ClientAddresses
from ratelimiter.v1 import ratelimiter_pb2

AUTH_PATH: Final = "/v1/auth"

FORBIDDEN: Final = 403
STATUSES: Final = {"429": DENIED, "403": FORBIDDEN}
"""Values of the parameter ``deny``. nginx forwards only 401 and 403."""

MAX_PATH_BYTES: Final = 8_192
"""Longest path; nginx accepts no longer request line by default. Decoding takes at most 2 ms."""

MAX_QUERY_BYTES: Final = 2_048
MAX_COST_DIGITS: Final = 10

URI: Final = "X-Forwarded-Uri"
_METHOD: Final = "X-Forwarded-Method"
_HOST: Final = "X-Forwarded-Host"
_FORWARDING: Final = (FORWARDED_FOR, _METHOD.lower(), URI.lower(), _HOST.lower())

_DIGEST: Final = "sha256:"

_WRONG_ESCAPE: Final = re.compile(rb"%(?![0-9A-Fa-f]{2})")

_log = logging.getLogger(__name__)


class _Template(NamedTuple):
    text: str
    method: str
    """Empty matches any method; likewise ``host``."""
    host: str
    segments: Sequence[bytes | None]
    """``None`` matches any segment."""
    has_rest: bool
    """More segments may follow."""

    @classmethod
    def of(cls, text: str) -> _Template:
        found = PATH_TEMPLATE.fullmatch(text)
        assert found is not None, text  # noqa: S101 -- the settings are valid
        segments = [one for one in found["path"].split("/") if one]
        has_rest = bool(segments) and segments[-1].endswith("...}")
        wanted = [
            None if one.startswith("{") else one.encode()
            for one in segments[: len(segments) - has_rest]
        ]
        return cls(text, found["method"] or "", found["host"] or "", wanted, has_rest)


class PathTemplates:
    """Path templates in order; ``texts`` are valid, see :func:`ratelimitd.settings.parsing.path_templates`."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._templates = [_Template.of(text) for text in texts]

    def endpoint_of(self, method: str, host: str, segments: Sequence[bytes]) -> str:
        """Return the first matching template, or ``UNMATCHED``. HEAD counts as GET; methods match case-insensitively.

        Applications may serve a method in lower case as if it were in upper case.
        """
        method = method.upper()
        method = "GET" if method == "HEAD" else method
        host = host.lower().partition(":")[0].rstrip(".")  # the name, without port and trailing dot
        count = len(segments)
        for text, wanted_method, wanted_host, wanted, has_rest in self._templates:
            length = len(wanted)
            if (
                (length <= count if has_rest else length == count)
                and (not wanted_method or wanted_method == method)
                and (not wanted_host or wanted_host == host)
            ):
                # Not all() of a generator, which takes four times as long.
                for one, segment in zip(wanted, segments, strict=False):
                    if one is not None and one != segment:
                        break
                else:
                    return text
        return UNMATCHED


def segments_of(uri: str) -> list[bytes]:
    """Return the segments of the path of a request target, normalised once, as nginx does.

    Decodes escapes first, so that an encoded slash separates segments and encoded dots count as dots. Omits empty
    segments, the query and a trailing slash.

    Raises:
        InvalidInputError: not a path, longer than ``MAX_PATH_BYTES``, a malformed escape, or a path above the
            root.
    """
    path = uri.partition("?")[0].partition("#")[0]
    if not path.startswith("/"):
        _refuse(URI, "must begin with /")
    if len(path) > MAX_PATH_BYTES:
        _refuse(URI, f"must have a path of at most {MAX_PATH_BYTES} bytes")
    raw = path.encode("latin-1")
    if b"%" in raw:
        if _WRONG_ESCAPE.search(raw):
            _refuse(URI, "must have two hexadecimal digits behind each %")
        raw = unquote_to_bytes(raw)
    if b"\0" in raw:
        _refuse(URI, "must not contain a zero byte")
    segments: list[bytes] = []
    for one in raw.split(b"/"):
        if one == b"..":
            if not segments:
                _refuse(URI, "must not lead above the root")
            segments.pop()
        elif one not in {b"", b"."}:
            segments.append(one)
    return segments


def _refuse(field: str, description: str) -> NoReturn:
    raise InvalidInputError(FieldViolation(field, description))


class Parameters(NamedTuple):
    """Parameters that the proxy's configuration sets in the query of its request."""

    deny: int = DENIED
    cost: int = 1
    endpoint: str = ""
    """Empty: determined by the path."""


def parameters_of(query: str, client_query: str = "") -> Parameters:
    """Return the parameters in a query; ``client_query`` is that of the client's request.

    Raises:
        InvalidInputError: names the first invalid parameter. A client's query that the proxy forwards is refused:
            otherwise clients could choose their endpoint.
    """
    if not query:
        return Parameters()
    client_query = client_query.partition("#")[0]  # as nginx cuts it
    if client_query and f"&{client_query}&" in f"&{query}&":
        _refuse("query", "must be set by the proxy, which passes on the client's query instead")
    if len(query) > MAX_QUERY_BYTES:
        _refuse("query", f"must be at most {MAX_QUERY_BYTES} bytes")
    if not query.isascii():
        _refuse("query", "must be ASCII, with other characters escaped as % and two digits")
    given = parse_qsl(query, keep_blank_values=True)
    found = dict(given)
    if len(found) < len(given) or not found.keys() <= set(Parameters._fields):
        _refuse(
            "query", f"must have each of {', '.join(Parameters._fields)} at most once, and no other"
        )
    deny = found.get("deny", "429")
    if deny not in STATUSES:
        _refuse("deny", "must be 429 or 403")
    cost = found.get("cost", "1")
    is_number = cost.isascii() and cost.isdigit() and len(cost) <= MAX_COST_DIGITS
    if not (is_number and 1 <= int(cost) <= INT32_MAX):
        _refuse("cost", f"must be 1 to {INT32_MAX}")
    if found.get("endpoint") == "":
        _refuse("endpoint", "must not be empty")
    return Parameters(STATUSES[deny], int(cost), found.get("endpoint", ""))


class ForwardAuth:
    """The ASGI application of :data:`AUTH_PATH`; ``handler`` answers checks, ``now_s`` is the node's Unix time.

    ``identifiers`` are identifier types by header, in order, and ``endpoints`` path templates, in order. ``ignored``
    counts a request whose forwarding headers were ignored. ``revision`` is the revision of the ``RateLimit`` fields.
    """

    def __init__(
        self,
        handler: UnaryHandler,
        *,
        identifiers: Mapping[str, str],
        endpoints: Sequence[str],
        trusted_proxies: Sequence[str],
        ignored: Callable[[], None],
        admit: Requirement,
        translate: Translation,
        now_s: Callable[[], float],
        revision: str,
    ) -> None:
        self._handler = handler
        self._admit = admit
        self._translate = translate
        self._now_s = now_s
        self._revision = revision
        self._ignored = ignored
        self._proxies = ClientAddresses(trusted_proxies)
        self._no_proxies = ClientAddresses()
        self._templates = PathTemplates(endpoints)
        self._identifiers = identifiers
        self._has_warned = False

    def trusts(self, peer: str | None) -> bool:
        """Return whether the peer is in TRUSTED_PROXIES; a peer that has left is not known to be."""
        return bool(peer) and self._proxies.trusts(peer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, of any method."""
        response = await self.answer(Request(scope, receive))
        response.headers["Cache-Control"] = "no-store"
        await response(scope, receive, send)

    async def answer(self, request: Request) -> Response:
        """Return the answer to one request; never raises."""
        try:
            return await self._decide(request)
        except ClientDisconnect:
            return Response(status_code=CLIENT_LEFT)
        except Exception as error:  # noqa: BLE001 -- the edge: any error is answered
            return _failure(request, self._translate(error, CHECK_METHOD))

    async def _decide(self, request: Request) -> Response:
        call = http_call(request, CHECK_METHOD)
        try:
            self._admit(call)
        except RpcError as error:
            # Has names of settings, and nothing that was sent. The log bounds how often it is repeated.
            _log.warning("requests to %s are refused by their Authorization: %s", AUTH_PATH, error)
            raise
        headers = request.headers
        peer = request.client.host if request.client else None
        is_trusted = self.trusts(peer)
        if not is_trusted and any(name in headers for name in _FORWARDING):
            self.ignore()
        uri = _only(headers, URI) if is_trusted else None
        if uri is None and is_cross_site(headers):
            # A browser on the node's host: browsers add no forwarding header to cross-site requests without a
            # preflight.
            return PlainTextResponse("This request came from another site\n", FORBIDDEN)
        parameters = parameters_of(
            request.scope["query_string"].decode("latin-1"), (uri or "").partition("?")[2]
        )
        message = ratelimiter_pb2.RateLimitRequest(
            endpoint=parameters.endpoint or self._endpoint(request, uri),
            tokens_requested=parameters.cost,
        )
        self._identify(message, headers, peer, is_trusted=is_trusted)
        data = message.SerializeToString()
        answer = await handled(self._handler, data, call, receive=request.receive)
        return self._response_to(
            ratelimiter_pb2.RateLimitResponse.FromString(answer), parameters.deny
        )

    def _endpoint(self, request: Request, uri: str | None) -> str:
        """Return the endpoint of the client's request; ``uri`` comes from a trusted proxy."""
        if uri is None:
            return UNMATCHED
        method = _only(request.headers, _METHOD) or request.method
        host = _only(request.headers, _HOST) or request.headers.get("host", "")
        return self._templates.endpoint_of(method, host, segments_of(uri))

    def _identify(
        self,
        message: ratelimiter_pb2.RateLimitRequest,
        headers: Headers,
        peer: str | None,
        *,
        is_trusted: bool,
    ) -> None:
        """Set the identities of a check: the configured headers that are present, else the address of the client."""
        address = self._proxies.of(peer, headers.getlist(FORWARDED_FOR) if is_trusted else ())
        found: dict[str, str] = {}
        for header, kind in self._identifiers.items():
            identifier: str | None
            if header == FORWARDED_FOR:
                identifier = address
            else:
                identifier = self._identifier(_only(headers, header), kind, is_trusted=is_trusted)
            if identifier:
                found.setdefault(kind, identifier)
        if not found:
            if address is None:
                _refuse("X-Forwarded-For", "must name the address of the client")
            found[IdentifierType.IP] = address
        first, *also = found.items()
        message.identifier_type, message.identifier = first
        for kind, identifier in also:
            message.also.add(identifier_type=kind, identifier=identifier)

    def _identifier(self, text: str | None, kind: str, *, is_trusted: bool) -> str | None:
        """Return the identifier in a header; a header with an address counts from trusted proxies only."""
        if not text:
            return None
        if kind == IdentifierType.IP:
            return self._no_proxies.of(text) if is_trusted else None
        raw = text.encode("latin-1")
        # Hash values that look like a digest, too: otherwise they would share the identity of the hashed text.
        if len(raw) <= MAX_IDENTIFIER_BYTES and not text.startswith(_DIGEST):
            try:
                return raw.decode()
            except UnicodeDecodeError:
                pass
        return f"{_DIGEST}{sha256(raw).hexdigest()}"

    def _response_to(self, decision: ratelimiter_pb2.RateLimitResponse, deny: int) -> Response:
        fields = limit_fields(decision, self._now_s(), self._revision)
        if decision.allowed:
            return Response(headers=fields)
        wait_s = decision.retry_after_seconds
        again = f" Try again in {wait_s} s." if wait_s else ""
        return PlainTextResponse(f"Too many requests.{again}\n", deny, fields)

    def ignore(self) -> None:
        """Count something that is ignored because its peer is not in TRUSTED_PROXIES, and log the first time."""
        self._ignored()
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "forwarding headers of %s are ignored from peers that are not in TRUSTED_PROXIES: their checks"
                " count for the peer's address and the endpoint %s, and their connections to SPOE_LISTEN are closed;"
                " later ones are only counted, not logged",
                AUTH_PATH,
                UNMATCHED,
            )


def _failure(request: Request, error: RpcError) -> Response:
    response = ConnectJson().failure(error)
    is_denied = b"deny=403" in request.scope["query_string"].split(b"&")
    if error.code is StatusCode.INVALID_ARGUMENT and is_denied:
        response.status_code = FORBIDDEN
    return response


def _only(headers: Headers, name: str) -> str | None:
    """Return the value of a header.

    Raises:
        InvalidInputError: it occurs more than once. One value may be the client's, and which one an application
            uses is unknown here.
    """
    values = headers.getlist(name)
    if len(values) > 1:
        _refuse(name, "must be sent once")
    return values[0] if values else None
