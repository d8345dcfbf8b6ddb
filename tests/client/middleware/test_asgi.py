"""The middleware for ASGI, around real FastAPI and Starlette applications, with a limiter that asks nobody."""

import contextlib
import json

import httpx
import pytest
from fastapi import APIRouter, FastAPI, WebSocket
from starlette.applications import Starlette
from starlette.authentication import AuthCredentials, AuthenticationBackend, SimpleUser
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Mount, Route

from ratelimitd_client import AsyncRateLimiterClient, Check
from ratelimitd_client.middleware import Identity, Options, limited
from ratelimitd_client.middleware.asgi import DECISION, RateLimitMiddleware
from ratelimitd_client.testing import AsyncFakeRateLimiter, FakeRateLimiter
from tests.servers import free_port


class Users(AuthenticationBackend):
    """Whoever says a name is its bearer."""

    async def authenticate(self, conn):
        name = conn.headers.get("x-name")
        return None if name is None else (AuthCredentials(), SimpleUser(name))


def application(limiter, options=None, *, started=None):
    @contextlib.asynccontextmanager
    async def lifespan(app):
        started.append("started")
        yield
        started.append("stopped")

    app = FastAPI(lifespan=lifespan if started is not None else None)
    app.add_middleware(RateLimitMiddleware, limiter=limiter, options=options)
    app.add_middleware(AuthenticationMiddleware, backend=Users())
    router = APIRouter(prefix="/api")

    @router.get("/orders/{order_id}")
    @limited(cost=2)
    async def order(order_id: int):
        return {"order": order_id}

    @router.get("/stream")
    async def stream():
        return StreamingResponse(iter(["a", "b"]), headers={"RateLimit": "own"})

    @router.get("/health")
    @limited(exempt=True)
    async def health():
        return "ok"

    @router.get("/broken")
    async def broken():
        raise ZeroDivisionError

    @router.websocket("/live/{name}")
    async def live(socket: WebSocket, name: str):
        await socket.accept()
        await socket.close()

    app.include_router(router)
    return app


@pytest.fixture
def limiter():
    limiter = AsyncFakeRateLimiter()
    for kind in ("ip", "user"):
        limiter.limit("*", kind, 4)
    return limiter


def caller(app, peer="192.0.2.7"):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=(peer, 5))
    return httpx.AsyncClient(transport=transport, base_url="http://example.org")


async def test_a_request_beyond_the_limit_is_answered_429_before_its_handler(limiter):
    async with caller(application(limiter)) as client:
        answers = [await client.get(f"/api/orders/{number}") for number in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert [answer.headers["RateLimit"] for answer in answers] == [
        f'"default";r={left};t=60' for left in (2, 0, 0)
    ]
    denied = answers[2]
    assert denied.headers["Retry-After"] == "60"
    assert denied.headers["RateLimit-Policy"] == '"default";q=4;w=60'
    assert denied.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert denied.text == "Too many requests. Try again in 60 s.\n"
    assert int(denied.headers["Content-Length"]) == len(denied.content)
    assert limiter.checks == [Check("192.0.2.7", "ip", "/api/orders/{order_id}", 2)] * 3


async def test_a_denial_is_json_for_those_that_ask_for_it(limiter):
    options = Options(cost=5, denied_text="Slow down.")
    async with caller(application(limiter, options)) as client:
        answer = await client.get("/api/stream", headers={"Accept": "application/json"})
    assert (answer.status_code, answer.json()) == (429, {"detail": "Slow down."})


async def test_whoever_is_authenticated_counts_for_themselves(limiter):
    async with caller(application(limiter)) as client:
        await client.get("/api/orders/1", headers={"X-Name": "alice"})
        await client.get("/api/orders/1")
    assert [check.identifier for check in limiter.checks] == ["alice", "192.0.2.7"]


async def test_a_forged_header_never_counts(limiter):
    async with caller(application(limiter)) as client:
        for number in range(3):
            forged = {"X-Forwarded-For": f"203.0.113.{number}"}
            answer = await client.get("/api/orders/1", headers=forged)
    assert answer.status_code == 429
    assert {check.identifier for check in limiter.checks} == {"192.0.2.7"}


async def test_behind_a_trusted_proxy_the_address_it_wrote_counts(limiter):
    app = application(limiter, Options(trusted_proxies=["192.0.2.0/24"]))
    async with caller(app) as client:
        headers = [("X-Forwarded-For", "10.0.0.1"), ("X-Forwarded-For", "203.0.113.9:4711")]
        await client.get("/api/stream", headers=headers)
    assert limiter.checks == [Check("203.0.113.9", "ip", "/api/stream")]


async def test_paths_that_do_not_exist_are_one_endpoint(limiter):
    async with caller(application(limiter)) as client:
        answers = [await client.get(f"/{number}") for number in range(5)]
    assert [answer.status_code for answer in answers] == [404] * 4 + [429]
    assert {check.endpoint for check in limiter.checks} == {"unmatched"}


async def test_what_is_exempt_asks_nobody(limiter):
    async with caller(application(limiter)) as client:
        answer = await client.get("/api/health")
    assert answer.status_code == 200
    assert not limiter.checks
    assert "RateLimit" not in answer.headers


async def test_headers_come_with_errors_and_streams_too_and_leave_the_applications_own(limiter):
    options = Options(x_ratelimit=True)
    async with caller(application(limiter, options)) as client:
        streamed = await client.get("/api/stream")
        wrong = await client.get("/api/orders/x")
    assert streamed.text == "ab"
    assert streamed.headers.get_list("RateLimit") == ["own"]
    assert streamed.headers["X-RateLimit-Remaining"] == "3"
    assert (wrong.status_code, wrong.headers["X-RateLimit-Remaining"]) == (422, "2")


async def test_a_view_finds_the_decision_in_the_scope(limiter):
    found = []

    async def app(scope, receive, send):
        found.append(scope.get(DECISION))
        await JSONResponse({})(scope, receive, send)

    async with caller(RateLimitMiddleware(app, limiter)) as client:
        await client.get("/")
    async with caller(RateLimitMiddleware(app, limiter, Options(unmatched=None))) as client:
        await client.get("/")
    assert [decision and decision.remaining_tokens for decision in found] == [3, None]


async def test_an_error_of_the_application_is_still_its_own(limiter):
    async with caller(application(limiter)) as client:
        assert (await client.get("/api/broken")).status_code == 500


async def test_while_the_service_is_away_everything_is_let_through(limiter):
    limiter.available = False
    async with caller(application(limiter)) as client:
        answers = [await client.get("/api/stream") for _ in range(6)]
    assert {answer.status_code for answer in answers} == {200}


async def test_what_cannot_be_checked_is_answered_503_where_that_is_chosen():
    async with AsyncRateLimiterClient(f"127.0.0.1:{free_port()}", timeout_s=30) as limiter:
        app = application(limiter, Options(on_unavailable="deny"))

        @app.get("/open")
        @limited(on_unavailable="allow")
        async def opened():
            return "open"

        async with caller(app) as client:
            denied = [await client.get("/api/stream") for _ in range(6)]
            allowed = await client.get("/open")
    assert {answer.status_code for answer in denied} == {503}
    assert {answer.headers["Retry-After"] for answer in denied} == {"1"}
    assert "RateLimit" not in denied[0].headers
    assert denied[0].text == "Temporarily unavailable. Try again in 1 s.\n"
    assert (allowed.status_code, allowed.json()) == (200, "open")


async def test_an_error_of_a_users_function_is_the_applications_if_so_chosen(limiter):
    def identify(scope):
        raise KeyError

    async with caller(application(limiter, Options(identify=identify))) as client:
        assert (await client.get("/api/stream")).status_code == 200
    async with caller(application(limiter, Options(identify=identify, on_error="raise"))) as client:
        assert (await client.get("/api/stream")).status_code == 500


async def test_functions_are_given_the_scope(limiter):
    async def identify(scope):
        return Identity(dict(scope["headers"])[b"x-tenant"].decode(), "api_key")

    async with caller(application(limiter, Options(identify=identify))) as client:
        await client.get("/api/stream", headers={"X-Tenant": "acme"})
    assert limiter.checks == [Check("acme", "api_key", "/api/stream")]


async def test_a_function_says_who_else_a_request_is_counted_for(limiter):
    limiter.limit("*", "tenant", limit=1, window_seconds=60)

    async def identities(scope):
        return {"tenant": Headers(scope=scope).get("x-tenant")}

    async with caller(application(limiter, Options(identities=identities))) as client:
        answers = [
            await client.get("/api/stream", headers={"X-Name": name, "X-Tenant": "acme"})
            for name in ("ada", "bob")
        ]
        answers.append(await client.get("/api/stream", headers={"X-Name": "bob"}))
    assert [answer.status_code for answer in answers] == [200, 429, 200]
    assert [(check.identifier, check.also) for check in limiter.checks] == [
        ("ada", {"tenant": "acme"}),
        ("bob", {"tenant": "acme"}),
        ("bob", {}),
    ]


async def test_it_may_stand_around_the_whole_application(limiter):
    async with caller(RateLimitMiddleware(application(AsyncFakeRateLimiter()), limiter)) as client:
        await client.get("/api/orders/1")
    assert [check.endpoint for check in limiter.checks] == ["/api/orders/{order_id}"]


async def test_around_an_application_that_says_where_it_is_mounted_routes_are_found_too(limiter):
    app = Starlette(routes=[Route("/orders/{order_id}", lambda request: JSONResponse({}))])
    app.root_path = "/shop"
    async with caller(RateLimitMiddleware(app, limiter)) as client:
        await client.get("/shop/orders/1")
    assert [check.endpoint for check in limiter.checks] == ["/orders/{order_id}"]


async def test_it_may_stand_before_a_part_of_the_application(limiter):
    async def answer(request):
        return JSONResponse({})

    middleware = [Middleware(RateLimitMiddleware, limiter)]
    within = Starlette(routes=[Route("/things/{thing}", answer)], middleware=middleware)
    app = Starlette(
        routes=[
            Mount("/api/{tenant}", routes=[Route("/orders/{id}", answer)], middleware=middleware),
            Mount("/within", within),
            Route("/single/{id}", answer, middleware=middleware),
            Route("/orders/{other}", answer),
        ]
    )
    async with caller(app) as client:
        for path in ("/api/acme/orders/7", "/within/things/7", "/single/7", "/orders/7"):
            assert (await client.get(path)).status_code == 200
    assert [check.endpoint for check in limiter.checks] == [
        "/api/{tenant}/orders/{id}",
        "/things/{thing}",  # of the application that has the middleware
        "/single/{id}",
    ]


async def test_what_it_stands_before_may_be_mounted_with_it(limiter):
    @limited(cost=2)
    async def answer(request):
        return JSONResponse({})

    within = Starlette(routes=[Route("/things/{thing}", answer)])
    app = Starlette(routes=[Mount("/within", RateLimitMiddleware(within, limiter))])
    async with caller(app) as client:
        assert (await client.get("/within/things/7")).status_code == 200
        assert (await client.get("/within/nothing")).status_code == 404
    assert [(check.endpoint, check.cost) for check in limiter.checks] == [
        ("/within/things/{thing}", 2),
        ("unmatched", 1),
    ]


async def test_an_application_of_another_kind_names_its_endpoints(limiter):
    async def app(scope, receive, send):
        await JSONResponse({})(scope, receive, send)

    async with caller(RateLimitMiddleware(app, limiter)) as client:
        await client.get("/any")
    options = Options(endpoint=lambda scope: f"{scope['path'].split('/')[1]}")
    async with caller(RateLimitMiddleware(app, limiter, options)) as client:
        await client.get("/any/7")
    assert [check.endpoint for check in limiter.checks] == ["unmatched", "any"]


async def converse(app, scope, *events):
    """Speak ASGI with an application: the messages it sends."""
    coming, sent = iter(events), []

    async def receive():
        return next(coming)

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    return sent


def websocket(path, *, extensions=None):
    return {
        "type": "websocket",
        "path": path,
        "root_path": "",
        "query_string": b"",
        "headers": [(b"accept", b"application/json")],
        "client": ("192.0.2.7", 5),
        "subprotocols": [],
        **({} if extensions is None else {"extensions": extensions}),
    }


async def test_a_websocket_is_checked_before_it_is_accepted(limiter):
    app = application(limiter, Options(cost=4))
    scopes = [websocket("/api/live/a", extensions={"websocket.http.response": {}}) for _ in "12"]
    accepted = await converse(app, scopes[0], {"type": "websocket.connect"})
    assert [message["type"] for message in accepted] == ["websocket.accept", "websocket.close"]
    assert (b"ratelimit", b'"default";r=0;t=60') in accepted[0]["headers"]
    start, body = await converse(app, scopes[1], {"type": "websocket.connect"})
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 429)
    assert (b"retry-after", b"60") in start["headers"]
    assert body["type"] == "websocket.http.response.body"
    assert "detail" in json.loads(body["body"])
    assert limiter.checks == [Check("192.0.2.7", "ip", "/api/live/{name}", 4)] * 2


async def test_a_server_that_cannot_answer_a_websocket_closes_it(limiter):
    app = application(limiter, Options(cost=5))
    [close] = await converse(app, websocket("/api/live/a"), {"type": "websocket.connect"})
    assert (close["type"], close["code"]) == ("websocket.close", 1008)


async def test_the_lifespan_is_passed_on(limiter):
    started = []
    app = application(limiter, started=started)
    events = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    await converse(app, {"type": "lifespan", "state": {}}, *events)
    assert started == ["started", "stopped"]
    assert not limiter.checks


class Nameless:
    is_authenticated = True

    @property
    def identity(self):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("user", "identifier"),
    [
        (None, "192.0.2.7"),
        (SimpleUser("alice"), "alice"),
        (type("Keyed", (Nameless,), {"pk": 7})(), "7"),
        (type("Named", (Nameless,), {"identity": "", "display_name": "Alice"})(), "Alice"),
        (Nameless(), "192.0.2.7"),
        (type("Stranger", (Nameless,), {"is_authenticated": False, "pk": 7})(), "192.0.2.7"),
    ],
)
async def test_a_user_is_told_by_what_its_class_has(limiter, user, identifier):
    async def app(scope, receive, send):
        """Answers nothing."""

    scope = {**websocket("/x"), "user": user}
    await converse(RateLimitMiddleware(app, limiter), scope)
    assert limiter.checks[0].identifier == identifier


def test_a_limiter_that_blocks_is_refused_at_the_start():
    with pytest.raises(TypeError, match="AsyncRateLimiterClient"):
        RateLimitMiddleware(application(AsyncFakeRateLimiter()), FakeRateLimiter())
