"""The application of :mod:`bench.middleware`: one route, and before it the limiter that LIMITER names, or none."""

import os

from fastapi import FastAPI
from slowapi import Limiter
from slowapi.middleware import SlowAPIASGIMiddleware
from starlette.requests import Request

from bench.servers import ENDPOINT
from ratelimitd_client import AsyncRateLimiterClient
from ratelimitd_client.middleware import Identity, Options
from ratelimitd_client.middleware.asgi import RateLimitMiddleware, Scope

IDENTIFIER = "user-000000000000000000000000000000042"
TIMEOUT_S = 5.0
"""No check of a run may be let through for the deadline."""

app = FastAPI()


@app.get(ENDPOINT)
async def orders() -> dict[str, str]:
    """As little as an application does."""
    return {"orders": "none"}


def identify(_: Scope) -> Identity:
    """Who a request is counted for, as the rule of the benchmarks wants it."""
    return Identity(IDENTIFIER)


def identifier(request: Request) -> str:  # noqa: ARG001 - slowapi goes by the name of the argument
    """The same for slowapi."""
    return IDENTIFIER


match os.environ["LIMITER"].partition(" "):
    case ("ratelimitd", _, address):
        limiter = AsyncRateLimiterClient(address, timeout_s=TIMEOUT_S)
        app.add_middleware(RateLimitMiddleware, limiter, Options[Scope](identify=identify))
    case ("slowapi", _, url):
        # As it comes: without headers, which would cost it a second round trip; of its two middlewares the faster.
        app.state.limiter = Limiter(identifier, default_limits=["1000000000/day"], storage_uri=url)
        app.add_middleware(SlowAPIASGIMiddleware)
    case _:
        pass
