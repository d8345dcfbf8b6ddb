"""Middleware for aiohttp's server. Your functions take the request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from aiohttp import web
from aiohttp.typedefs import Handler

from ratelimitd_client import AsyncRateLimiter
from ratelimitd_client.decision import Decision
from ratelimitd_client.middleware.holds import HeldRequests
from ratelimitd_client.middleware.options import Options
from ratelimitd_client.middleware.policy import Policy, require_kind
from ratelimitd_client.middleware.request_info import RequestInfo

# Typed keys are newer than the oldest supported aiohttp.
DECISION: Final[Any] = (
    web.RequestKey("ratelimitd_decision", Decision)
    if hasattr(web, "RequestKey")
    else "ratelimitd_decision"
)
"""Key of the request under which a handler finds the ``Decision``, if it was checked."""


def setup(
    app: web.Application,
    limiter: AsyncRateLimiter,
    options: Options[web.Request] | None = None,
) -> None:
    """Check each request of an application and its subapplications before the handler runs.

    Call it before the application starts, and after adding the middlewares that must run first.

    Args:
        app: the application.
        limiter: a client for asyncio, or a fake. The caller closes it.
        options: how requests are counted and answered.

    Raises:
        TypeError: ``limiter`` is not one for asyncio.
    """
    require_kind(limiter, asynchronous=True)
    policy = Policy(options)
    held_requests: HeldRequests[web.Request] = HeldRequests(policy.actual)

    @web.middleware
    async def rate_limit(request: web.Request, handler: Handler) -> web.StreamResponse:
        info = _info_of(request)
        decision, held = await policy.admit_async(limiter, request, info)
        if decision is None:
            return await handler(request)
        if not decision.allowed:
            return _denied(policy, decision, info)
        request[DECISION] = decision
        if held is not None:
            _end_with_the_answer(held_requests.begin(request, held))
        return await handler(request)

    async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
        policy.add_headers(request.get(DECISION), response.headers.setdefault)

    async def finish(_: web.Application) -> None:
        await held_requests.finish()

    app.middlewares.append(rate_limit)
    app.on_cleanup.append(finish)
    # A signal, since a streamed response is sent before the middleware sees it.
    app.on_response_prepare.append(add_headers)


def _end_with_the_answer(ended: Callable[[], None]) -> None:
    """Call ``ended`` when the answer has been sent, or failed.

    aiohttp sends what a handler returns afterwards, a file or a generator, in the task of the request.
    """
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 -- a coroutine runs in a task
    task.add_done_callback(lambda _: ended())


def _info_of(request: web.Request) -> RequestInfo:
    route = request.match_info.route
    resource = route.resource
    return RequestInfo(
        request.method,
        None if resource is None else resource.canonical,
        request.match_info.handler,
        lambda: None,
        request.remote,
        lambda name: request.headers.getall(name, []),
    )


def _denied(policy: Policy[web.Request], decision: Decision, info: RequestInfo) -> web.Response:
    answer = policy.denied(decision, info.header("accept"))
    return web.Response(status=answer.status, headers=answer.headers, body=answer.body)
