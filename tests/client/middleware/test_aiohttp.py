"""The middleware for aiohttp, in its real server, with a limiter that asks nobody."""

import contextlib

import pytest
from aiohttp import WSServerHandshakeError, web
from aiohttp.test_utils import TestClient, TestServer

from ratelimitd_client import Check
from ratelimitd_client.middleware import Identity, Options, limited
from ratelimitd_client.middleware.aiohttp import DECISION, setup
from ratelimitd_client.testing import AsyncFakeRateLimiter, FakeRateLimiter


@limited(cost=2)
async def order(request):
    return web.json_response({"left": request[DECISION].remaining_tokens})


async def stream(request):
    response = web.StreamResponse(headers={"RateLimit": "own"})
    await response.prepare(request)
    await response.write(b"ab")
    return response


@limited(exempt=True)
async def health(request):
    return web.Response(text="ok")


async def forbidden(request):
    raise web.HTTPForbidden


class Reports(web.View):
    @limited(cost=3)
    async def post(self):
        return web.Response(text="written")

    async def get(self):
        return web.Response(text="read")


async def live(request):
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    await socket.close()
    return socket


def application(limiter, options=None):
    app, mounted = web.Application(), web.Application()
    setup(app, limiter, options)
    mounted.router.add_get(r"/orders/{order_id:\d+}", order)
    app.add_subapp("/api/", mounted)
    app.router.add_get("/stream", stream)
    app.router.add_get("/live", live)
    app.router.add_get("/health", health)
    app.router.add_get("/forbidden", forbidden)
    app.router.add_view("/reports/{report}", Reports)
    return app


@pytest.fixture
def limiter():
    limiter = AsyncFakeRateLimiter()
    limiter.limit("*", "ip", 4)
    return limiter


@contextlib.asynccontextmanager
async def caller(app):
    async with TestServer(app) as server, TestClient(server) as client:
        yield client


async def test_a_request_beyond_the_limit_is_answered_429_before_its_handler(limiter):
    async with caller(application(limiter)) as client:
        answers = [await client.get(f"/api/orders/{number}") for number in range(3)]
        lefts = [(await answer.json())["left"] for answer in answers[:2]]
        text = await answers[2].text()
    assert [answer.status for answer in answers] == [200, 200, 429]
    assert lefts == [2, 0]
    assert [answer.headers["RateLimit"] for answer in answers] == [
        f'"default";r={left};t=60' for left in (2, 0, 0)
    ]
    assert answers[2].headers["Retry-After"] == "60"
    assert answers[2].headers["RateLimit-Policy"] == '"default";q=4;w=60'
    assert answers[2].headers["Content-Type"] == "text/plain; charset=utf-8"
    assert text == "Too many requests. Try again in 60 s.\n"
    assert limiter.checks == [Check("127.0.0.1", "ip", "/api/orders/{order_id}", 2)] * 3


async def test_a_denial_is_json_for_those_that_ask_for_it(limiter):
    async with caller(application(limiter, Options(cost=5, denied_text="No."))) as client:
        answer = await client.get("/stream", headers={"Accept": "application/json"})
        assert (answer.status, await answer.json()) == (429, {"detail": "No."})


async def test_headers_come_with_errors_and_streams_too_and_leave_the_applications_own(limiter):
    async with caller(application(limiter, Options(x_ratelimit=True))) as client:
        streamed, refused = await client.get("/stream"), await client.get("/forbidden")
    assert streamed.headers.getall("RateLimit") == ["own"]
    assert streamed.headers["X-RateLimit-Remaining"] == "3"
    assert (refused.status, refused.headers["X-RateLimit-Remaining"]) == (403, "3")


async def test_paths_that_do_not_exist_are_one_endpoint(limiter):
    async with caller(application(limiter)) as client:
        answers = [await client.get(f"/{number}") for number in range(5)]
    assert [answer.status for answer in answers] == [404] * 4 + [429]
    assert {check.endpoint for check in limiter.checks} == {"unmatched"}


async def test_what_is_exempt_asks_nobody(limiter):
    async with caller(application(limiter)) as client:
        answer = await client.get("/health")
    assert answer.status == 200
    assert not limiter.checks


async def test_methods_of_a_view_have_their_own_cost(limiter):
    async with caller(application(limiter)) as client:
        await client.get("/reports/7")
        await client.post("/reports/7")
    assert [(check.endpoint, check.cost) for check in limiter.checks] == [
        ("/reports/{report}", 1),
        ("/reports/{report}", 3),
    ]


async def test_a_websocket_is_checked_before_it_is_accepted(limiter):
    async with caller(application(limiter, Options(cost=4))) as client:
        async with client.ws_connect("/live") as socket:
            assert socket._response.headers["RateLimit"] == '"default";r=0;t=60'
        with pytest.raises(WSServerHandshakeError) as denied:
            await client.ws_connect("/live")
    assert denied.value.status == 429


async def test_a_forged_header_counts_only_from_a_trusted_proxy(limiter):
    forged = {"X-Forwarded-For": "203.0.113.9"}
    for options in (None, Options(trusted_proxies=["127.0.0.1"])):
        async with caller(application(limiter, options)) as client:
            await client.get("/stream", headers=forged)
    assert [check.identifier for check in limiter.checks] == ["127.0.0.1", "203.0.113.9"]


async def test_functions_are_given_the_request(limiter):
    def identify(request: web.Request):
        return Identity(request.headers["X-Tenant"], "api_key")

    async def identities(request: web.Request):
        return {"tenant": request.headers["X-Tenant"]}

    options = Options(identify=identify, identities=identities)
    async with caller(application(limiter, options)) as client:
        await client.get("/stream", headers={"X-Tenant": "acme"})
        # It fails without the header: let through, as nothing else was chosen.
        assert (await client.get("/stream")).status == 200
    assert limiter.checks == [Check("acme", "api_key", "/stream", also={"tenant": "acme"})]


async def test_while_the_service_is_away_everything_is_let_through(limiter):
    limiter.available = False
    async with caller(application(limiter)) as client:
        answers = [await client.get("/stream") for _ in range(6)]
    assert {answer.status for answer in answers} == {200}


async def test_what_cannot_be_checked_is_answered_503_where_that_is_chosen(limiter):
    limiter.available = False
    async with caller(application(limiter, Options(on_unavailable="deny"))) as client:
        answer = await client.get("/stream")
        assert await answer.text() == "Temporarily unavailable. Try again in 1 s.\n"
    assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
    assert "RateLimit" not in answer.headers


def test_a_limiter_that_blocks_is_refused_at_the_start():
    with pytest.raises(TypeError, match="AsyncRateLimiterClient"):
        setup(web.Application(), FakeRateLimiter())
