"""Middleware for aiohttp's server. Your functions are given the request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from aiohttp import web
from aiohttp.typedefs import Handler

from ratelimitd_client import AsyncRateLimiter
from ratelimitd_client.decision import Decision
from ratelimitd_client.middleware.arrival import RequestInfo
from ratelimitd_client.middleware.guard import Guard
from ratelimitd_client.middleware.limiter_kind import require_kind
from ratelimitd_client.middleware.options import Options

# Typed keys are newer than the rest that is needed of aiohttp.
DECISION: Final[Any] = (
    web.RequestKey("ratelimitd_decision", Decision)
    if hasattr(web, "RequestKey")
    else "ratelimitd_decision"
)
"""Where a handler finds in the request how it was decided, if it was checked."""


def setup(
    app: web.Application,
    limiter: AsyncRateLimiter,
    options: Options[web.Request] | None = None,
) -> None:
    """Check each request of an application and of what is mounted in it, before its handler runs.

    Call it after the middlewares that are to run before it were added, and before the application starts.

    Args:
        app: the application.
        limiter: a client for asyncio, or a fake. The caller closes it.
        options: how requests are counted and answered.

    Raises:
        TypeError: the limiter is one that blocks, or none.
    """
    require_kind(limiter, asynchronous=True)
    guard = Guard(options)

    @web.middleware
    async def rate_limit(request: web.Request, handler: Handler) -> web.StreamResponse:
        arrival = _arrival(request)
        decision = await guard.decide_async(limiter, request, arrival)
        if decision is not None:
            if not decision.allowed:
                return _denied(guard, decision, arrival)
            request[DECISION] = decision
        return await handler(request)

    async def tell(request: web.Request, response: web.StreamResponse) -> None:
        decision: Decision | None = request.get(DECISION)
        if decision is not None:
            for name, value in guard.headers(decision).items():
                response.headers.setdefault(name, value)

    app.middlewares.append(rate_limit)
    # A response that a handler streams has left before the middleware sees it.
    app.on_response_prepare.append(tell)


def _arrival(request: web.Request) -> RequestInfo:
    route = request.match_info.route
    resource = route.resource

    def header(name: str) -> Sequence[str]:
        return request.headers.getall(name, [])

    return RequestInfo(
        request.method,
        None if resource is None else resource.canonical,
        request.match_info.handler,
        lambda: None,
        request.remote,
        header,
    )


def _denied(guard: Guard[web.Request], decision: Decision, arrival: RequestInfo) -> web.Response:
    answer = guard.denied(decision, arrival.header("accept"))
    return web.Response(status=answer.status, headers=answer.headers, body=answer.body)
