"""What users write around middleware, for the type checkers alone: no part of it may be of unknown type."""
# mypy: disallow-untyped-defs, disallow-untyped-calls, disallow-any-generics, check-untyped-defs

from collections.abc import MutableMapping
from typing import Any, assert_type

from aiohttp import web
from fastapi import FastAPI, Request
from starlette.applications import Starlette
from starlette.middleware import Middleware

from ratelimitd_client import AsyncRateLimiterClient, Decision
from ratelimitd_client.middleware import Identity, Options, limited
from ratelimitd_client.middleware.aiohttp import setup
from ratelimitd_client.middleware.asgi import RateLimitMiddleware, Scope
from ratelimitd_client.testing import AsyncFakeRateLimiter


def identify(scope: Scope) -> Identity | None:
    """By a header."""
    tenant = Request(scope).headers.get("x-tenant")
    return None if tenant is None else Identity(tenant, "api_key")


async def identify_slowly(request: web.Request) -> Identity | None:
    """By what has to be looked up."""
    return Identity(request.headers["X-Tenant"])


async def identities(scope: Scope) -> list[Identity]:
    """The tenant, too."""
    return [Identity(Request(scope).headers.get("x-tenant", ""), "tenant")]


def denied(decision: Decision) -> str:
    """A text of one's own."""
    return f"{decision.limit} are enough."


@limited(cost=2, identifier_type="ip", identities=lambda request: {"tenant": request.headers["x"]})
@limited(on_unavailable="deny")
async def order(order_id: int) -> int:
    """A marked view is still what it was."""
    return order_id


def applications() -> tuple[FastAPI, Starlette, web.Application]:
    """One of each kind."""
    options: Options[Scope] = Options(trusted_proxies=["10.0.0.0/8"], exempt={"/healthz"})
    fastapi = FastAPI()
    fastapi.add_middleware(RateLimitMiddleware, AsyncRateLimiterClient("limiter:9090"), options)
    fastapi.add_middleware(
        RateLimitMiddleware,
        limiter=AsyncFakeRateLimiter(),
        options=Options(
            identify=identify,
            identities=identities,
            endpoint=lambda scope: str(scope["path"]),
            cost=lambda scope: len(scope["query_string"]),
            anonymous=Identity("nobody"),
            on_error="raise",
            on_unavailable="deny",
            denied_text=denied,
        ),
    )
    starlette = Starlette(middleware=[Middleware(RateLimitMiddleware, AsyncFakeRateLimiter())])
    app = web.Application()
    setup(app, AsyncRateLimiterClient("limiter:9090"), Options(identify=identify_slowly))
    return fastapi, starlette, app


async def marked() -> None:
    """Types pass through."""
    assert_type(await order(7), int)
    scope: MutableMapping[str, Any] = {}
    assert_type(identify(scope), Identity | None)
