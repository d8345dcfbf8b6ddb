"""The HTTP side of a node: joins the routes of all areas and wraps them in common checks and headers.

The only module that imports them all. ``/metrics``, ``/healthz``, ``/readyz`` and ``/v1/auth`` are for machines and
exempt from the checks of pages and JSON. See ADR 0028.
"""

from __future__ import annotations

import ipaddress
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Match, Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ratelimitd.fair_queue import FairQueue
from ratelimitd.observe.exposition import Page
from ratelimitd.web.api.forward_auth import AUTH_PATH, ForwardAuth
from ratelimitd.web.api.http_call import is_cross_site, peer_of, settled
from ratelimitd.web.api.json_api import CLIENT_LEFT, HttpCheck, JsonApi
from ratelimitd.web.pages.audit import AuditPages
from ratelimitd.web.pages.backtest import BacktestPage
from ratelimitd.web.pages.errors import ANSWERS, HEADERS, Cause, Count, Refused, plain
from ratelimitd.web.pages.login import LoginPages
from ratelimitd.web.pages.overview import OverviewPage
from ratelimitd.web.pages.page_base import Frame, accepts_html
from ratelimitd.web.pages.plans import PlansPage
from ratelimitd.web.pages.rendering import look
from ratelimitd.web.pages.rules import RulesPages
from ratelimitd.web.pages.sessions import Sessions
from ratelimitd.web.pages.try_page import TryPage
from ratelimitd.web.parts import Parts, Readiness, ReadPoints

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)

SECURITY_HEADERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Content-Security-Policy": POLICY,
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
        # Not no-referrer: browsers would then send Origin: null with our own forms.
        "Referrer-Policy": "same-origin",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }
)

SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})


def with_security_headers(app: ASGIApp, count: Count) -> ASGIApp:
    """Add the headers to each answer, and refuse cross-site requests from browsers."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        found = app
        if scope["method"] not in SAFE_METHODS and is_cross_site(Headers(scope=scope)):
            count(Cause.CROSS_SITE)
            found = plain(ANSWERS[Cause.CROSS_SITE])
        await found(scope, receive, send_guarded)

    return answer


FOR_MACHINES: Final = frozenset({"/metrics", "/healthz", "/readyz", AUTH_PATH})
"""Served under any ``Host``, because a proxy may forward its client's."""

_HOST: Final = re.compile(r"(\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(:[0-9]{1,5})?")
"""RFC 9110 section 7.2, without user information, escapes and zones, which our names never contain."""


def _without_connect(app: ASGIApp) -> ASGIApp:
    """Refuse CONNECT on every path: after a 2xx answer, the connection would no longer speak HTTP."""
    headers = {**HEADERS, "Allow": "GET, HEAD, POST"}

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        found = app
        if scope.get("method") == "CONNECT":
            found = PlainTextResponse("this is not a proxy\n", 405, headers)
        await found(scope, receive, send)

    return answer


def worker_application(
    *,
    points: ReadPoints,
    readiness: Callable[[], Readiness | Awaitable[Readiness]],
    others: ASGIApp,
    auth: ForwardAuth | None = None,
) -> ASGIApp:
    """Return an application with the machine endpoints, ``auth`` if served here, and ``others`` for the rest."""
    # Not the queue of large calls, which would delay scrapes while there are many.
    scrapes = FairQueue(time.monotonic)

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n", headers=HEADERS)

    async def readyz(_: Request) -> Response:
        ready, reason = await settled(readiness())
        text = "ready" if ready else "not ready"
        text += f": {reason}\n" if reason else "\n"
        return PlainTextResponse(text, status_code=200 if ready else 503, headers=HEADERS)

    async def scrape(request: Request) -> Response:
        page = Page(request.headers.get("accept", ""), await settled(points()))
        headers = {**HEADERS, "Content-Type": page.content_type}
        return StreamingResponse(_paced(page, scrapes, peer_of(request)), headers=headers)

    routes: list[BaseRoute] = [
        Route("/metrics", scrape),
        Route("/healthz", healthz),
        Route("/readyz", readyz),
    ]
    if auth is not None:
        routes.append(Route(AUTH_PATH, auth))
    return _without_connect(Starlette(routes=[*routes, Mount("/", others)]))


def with_host_check(app: ASGIApp, hosts: Collection[str], count: Count) -> ASGIApp:
    """Answer 421 to page requests whose ``Host`` is not a name of this node.

    ``hosts`` are its names in addition to ``localhost`` and addresses. Addresses are allowed: a page of a foreign site
    has that site's name, regardless of its DNS records.
    """
    names = frozenset(host.lower() for host in hosts) | {"localhost"}

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        found = app
        if scope["type"] == "http" and scope["path"] not in FOR_MACHINES:
            name = _host_name(Headers(scope=scope).get("host", ""))
            if name not in names and not _is_address(name):
                count(Cause.UNKNOWN_HOST)
                found = plain(ANSWERS[Cause.UNKNOWN_HOST])
        await found(scope, receive, send)

    return answer


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _host_name(host: str) -> str:
    """Return the name or address in a ``Host`` header, without port and brackets; empty if malformed."""
    found = _HOST.fullmatch(host.lower())
    return (found["address"] or found["name"]) if found else ""


async def _paced(page: Page, queue: FairQueue, peer: str) -> AsyncIterator[bytes]:
    """Yield the pieces of a page; the queue bounds the pieces of all scrapes per event-loop iteration."""
    pieces = page.pieces()
    while (piece := await queue.run(peer, partial(next, pieces, None))) is not None:
        yield piece


METHOD_NOT_ALLOWED: Final = 405

STATUS_TITLES = {
    404: "There is no such page",
    METHOD_NOT_ALLOWED: "This page does not accept that method",
}


def _methods_of(scope: Scope, routes: Iterable[BaseRoute]) -> set[str]:
    """Return the methods that routes accept for the path of a request."""
    return {
        method
        for route in routes
        if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE
        for method in route.methods or ()
    }


def application(parts: Parts) -> ASGIApp:
    """Return the ASGI application of a node."""
    static, _ = look()
    sessions = Sessions(parts.admin_token, parts.now_s, session_of=parts.session_of)
    frame = Frame(parts, sessions)
    api = JsonApi(
        parts.methods,
        admit=parts.admit,
        translate=parts.translate,
        http_check=HttpCheck(parts.now_s, parts.ratelimit_headers),
        queue=parts.queue,
    )
    routes: list[BaseRoute] = [
        *OverviewPage(frame).routes(),
        static.route(),
        *LoginPages(frame).routes(),
        *RulesPages(frame).routes(),
        *PlansPage(frame).routes(),
        *TryPage(frame).routes(),
        *BacktestPage(frame).routes(),
        *AuditPages(frame).routes(),
        *api.routes(),
    ]

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101 -- registered for this exception
        title = STATUS_TITLES.get(error.status_code, str(error.detail))
        if accepts_html(request):
            response = frame.message(request, title, "", error.status_code)
        else:
            response = PlainTextResponse(f"{title}\n", error.status_code, headers=error.headers)
        if error.status_code == METHOD_NOT_ALLOWED:
            # Not the error's own: that names the methods of one route of several with this path.
            response.headers["Allow"] = ", ".join(sorted(_methods_of(request.scope, routes)))
        return response

    async def left(_request: Request, _error: Exception) -> Response:
        return Response(status_code=CLIENT_LEFT)

    people = Starlette(
        routes=routes,
        middleware=[Middleware(with_security_headers, count=parts.refused)],
        exception_handlers={
            HTTPException: http_error,
            Refused: frame.refuse,
            ClientDisconnect: left,
        },
    )
    whole = worker_application(
        points=parts.points, readiness=parts.readiness, others=people, auth=parts.auth
    )
    return with_host_check(whole, parts.hosts, parts.refused)
