"""The HTTP side of a node: the routes of all areas joined, with what holds for each of them around.

The only module that knows them all. ``/metrics``, ``/healthz`` and ``/readyz`` are for machines and stand outside of
what pages and JSON are held to. See ADR 0028.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from ratelimitd.rpc.interface import Call, Methods
from ratelimitd.rules.book import RuleBook
from ratelimitd.web import pages
from ratelimitd.web.audit_page import audit_routes
from ratelimitd.web.audit_trail import AuditReader, AuditTrail
from ratelimitd.web.frame import Frame, accepts_html
from ratelimitd.web.http_call import Requirement
from ratelimitd.web.json_api import JsonApi, Translation
from ratelimitd.web.live_stream import LiveStatus
from ratelimitd.web.login_pages import LoginPages
from ratelimitd.web.overview import OverviewPage
from ratelimitd.web.pages import HostCheck, Metrics, Readiness, front_page
from ratelimitd.web.refusals import Count, Refused
from ratelimitd.web.rendering import look
from ratelimitd.web.rules_pages import RulesPages
from ratelimitd.web.security import Guard
from ratelimitd.web.service_calls import ServiceCalls
from ratelimitd.web.sessions import Sessions
from ratelimitd.web.try_page import TryPage

STATUS_TITLES = {404: "There is no such page", 405: "This page is not for that"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the HTTP side is given of its node."""

    node_id: str
    metrics: Metrics
    readiness: Callable[[], Readiness | Awaitable[Readiness]]
    grpc_address: Callable[[], str]
    hosts: Collection[str]
    """Its names beside ``localhost`` and addresses."""
    methods: Methods
    """The services, each method behind its role."""
    book: Callable[[], RuleBook | None]
    """The rule book of this moment, ``None`` while there is none."""
    audit: AuditReader
    live: LiveStatus
    """What the overview shows."""
    may_read: Requirement
    may_administer: Requirement
    actor: Callable[[Call], str]
    """Who the log names for a call."""
    admit: Requirement
    """Lets a call pass that may be made."""
    translate: Translation
    """What a call failed with is told to its caller."""
    admin_token: str
    now_s: Callable[[], float]
    """Unix time that never steps back."""
    refused: Count
    """Counts one request that was refused."""


def application(parts: Parts) -> ASGIApp:
    """The ASGI application of a node."""
    static, templates = look()
    sessions = Sessions(parts.admin_token, parts.now_s)
    frame = Frame(
        node_id=parts.node_id,
        may_read=parts.may_read,
        sessions=sessions,
        count=parts.refused,
        templates=templates,
    )
    services = ServiceCalls(parts.methods, frame)
    trail = AuditTrail(parts.audit)
    api = JsonApi(parts.methods, admit=parts.admit, translate=parts.translate, now_s=parts.now_s)
    overview = OverviewPage(
        frame,
        parts.live,
        front_page(parts.grpc_address),
        may_administer=parts.may_administer,
        actor=parts.actor,
    )
    routes: list[BaseRoute] = [
        *overview.routes(),
        static.route(),
        *LoginPages(frame, sessions, parts.refused, parts.now_s).routes(),
        *RulesPages(frame, services, parts.book, trail).routes(),
        *TryPage(frame, services, parts.now_s).routes(),
        *audit_routes(frame, trail),
        *api.routes(),
    ]

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101 -- what it is registered for
        title = STATUS_TITLES.get(error.status_code, str(error.detail))
        if accepts_html(request):
            return await frame.message(request, title, "", error.status_code)
        return PlainTextResponse(f"{title}\n", error.status_code, headers=error.headers)

    people = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, count=parts.refused)],
        exception_handlers={HTTPException: http_error, Refused: frame.refuse},
    )
    whole = pages.application(metrics=parts.metrics, readiness=parts.readiness, others=people)
    return HostCheck(whole, parts.hosts, parts.refused)
