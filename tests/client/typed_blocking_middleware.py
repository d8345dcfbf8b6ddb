"""What users write around middleware that blocks and around gRPC's, for the type checkers alone."""
# mypy: disallow-untyped-defs, disallow-untyped-calls, disallow-any-generics, check-untyped-defs

from concurrent.futures import ThreadPoolExecutor
from typing import Any, assert_type
from wsgiref.types import WSGIEnvironment

import grpc
import grpc.aio
from django.http import HttpRequest, HttpResponse
from flask import Flask, Request

from ratelimitd_client import AsyncRateLimiterClient, RateLimiterClient
from ratelimitd_client.middleware import Identity, Options, grpc_aio, grpc_server, limited
from ratelimitd_client.middleware.flask import setup
from ratelimitd_client.middleware.grpc_server import Call
from ratelimitd_client.middleware.wsgi import RateLimitMiddleware
from ratelimitd_client.testing import AsyncFakeRateLimiter, FakeRateLimiter


def by_key(request: Request) -> Identity | None:
    """By a parameter."""
    key = request.args.get("key")
    return Identity(key, "api_key") if key else None


def tenant_of(request: Request) -> dict[str, str | None]:
    """By a header, which may be missing."""
    return {"tenant": request.headers.get("X-Tenant")}


def by_method(call: Call) -> Identity | None:
    """By what came with the call."""
    return Identity(call.header("tenant")[0]) if call.peer is None else None


def endpoint(environ: WSGIEnvironment) -> str | None:
    """By the path."""
    return "/orders/{id}" if str(environ["PATH_INFO"]).startswith("/orders/") else None


@limited(cost=2)
def order(request: HttpRequest) -> HttpResponse:
    """A marked view is still what it was."""
    return HttpResponse(request.path)


RATELIMITD: dict[str, object] = {"limiter": FakeRateLimiter(), "trusted_proxies": ["10.0.0.0/8"]}


def applications() -> tuple[Flask, RateLimitMiddleware, grpc.Server, grpc.aio.Server]:
    """One of each kind."""
    limiter, async_limiter = RateLimiterClient("limiter:9090"), AsyncRateLimiterClient()
    app = Flask("shop")
    setup(app, limiter)
    setup(app, FakeRateLimiter(), Options(identify=by_key, cost=lambda request: len(request.data)))
    setup(app, limiter, Options(identities=tenant_of))
    wsgi = RateLimitMiddleware(app, limiter, Options(endpoint=endpoint))
    interceptor = grpc_server.RateLimitInterceptor(limiter, Options(identify=by_method))
    server = grpc.server(ThreadPoolExecutor(), interceptors=[interceptor])
    options: Options[Call] = Options(exempt={"/grpc.health.v1.Health/Check"})
    async_server = grpc.aio.server(
        interceptors=[
            grpc_aio.RateLimitInterceptor(async_limiter, options),
            grpc_aio.RateLimitInterceptor(AsyncFakeRateLimiter()),
        ]
    )
    return app, wsgi, server, async_server


def marked(request: HttpRequest, call: Call) -> None:
    """Types pass through."""
    assert_type(order(request), HttpResponse)
    assert_type(call.header("x-api-key"), list[str])
    context: Any = call.context
    assert context is not None
