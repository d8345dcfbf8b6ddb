"""The application of :mod:`bench.middleware`: one route, behind the limiter that LIMITER names, or none."""

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
"""Long enough that no check fails open on its deadline."""

app = FastAPI()


@app.get(ENDPOINT)
async def orders() -> dict[str, str]:
    """Return a minimal answer."""
    return {"orders": "none"}


def identify(_: Scope) -> Identity:
    """Return the identity of a request for the rule of the benchmarks."""
    return Identity(IDENTIFIER)


def identifier(request: Request) -> str:  # noqa: ARG001 - slowapi goes by the name of the argument
    """Return the same for slowapi."""
    return IDENTIFIER


match os.environ["LIMITER"].partition(" "):
    case ("ratelimitd", _, address):
        limiter = AsyncRateLimiterClient(address, timeout_s=TIMEOUT_S)
        app.add_middleware(RateLimitMiddleware, limiter, Options[Scope](identify=identify))
    case ("slowapi", _, url):
        # The default without headers, which would cost a second round trip; the faster of its two middlewares.
        app.state.limiter = Limiter(identifier, default_limits=["1000000000/day"], storage_uri=url)
        app.add_middleware(SlowAPIASGIMiddleware)
    case _:
        pass
