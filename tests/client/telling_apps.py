"""Applications behind the middleware that say what the limiter answered, for the tests of outages."""

import os
import time
from contextvars import ContextVar

from fastapi import FastAPI
from flask import Flask

from ratelimitd_client import AsyncRateLimiterClient, RateLimiterClient
from ratelimitd_client.middleware import Identity, Options, limited
from ratelimitd_client.middleware.asgi import RateLimitMiddleware
from ratelimitd_client.middleware.flask import setup

TOLD: ContextVar[tuple[str, str, float]] = ContextVar("TOLD")
"""The decision on the request that is answered, and how long it was waited for."""


def tell(decision, began_s):
    TOLD.set((decision.reason, decision.error, time.perf_counter() - began_s))
    return decision


class AsyncTelling(AsyncRateLimiterClient):
    async def check(self, *args, **keywords):
        began_s = time.perf_counter()
        return tell(await super().check(*args, **keywords), began_s)


class Telling(RateLimiterClient):
    def check(self, *args, **keywords):
        began_s = time.perf_counter()
        return tell(super().check(*args, **keywords), began_s)


def told():
    reason, error, waited_s = TOLD.get()
    return {"reason": reason, "error": error, "waited_s": waited_s}


NODE, TIMEOUT_S = os.environ["RATELIMITD"], float(os.environ["TIMEOUT_S"])
OPTIONS: Options[object] = Options(identify=lambda _request: Identity("u"))

asgi = FastAPI()
asgi.add_middleware(RateLimitMiddleware, AsyncTelling(NODE, timeout_s=TIMEOUT_S), OPTIONS)

wsgi = Flask(__name__)
setup(wsgi, Telling(NODE, timeout_s=TIMEOUT_S), OPTIONS)


@asgi.get("/many")
@asgi.get("/once")
async def _asgi():
    return told()


@asgi.get("/closed")
@limited(on_unavailable="deny")
async def _asgi_closed():
    return told()


@wsgi.get("/many")
@wsgi.get("/once")
def _wsgi():
    return told()


@wsgi.get("/closed")
@limited(on_unavailable="deny")
def _wsgi_closed():
    return told()
