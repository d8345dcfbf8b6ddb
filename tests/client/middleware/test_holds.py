"""Views that hold: what is held while an answer is under way, and what it is settled with."""

import asyncio
import logging
from contextlib import nullcontext

import flask
import httpx
import pytest
from aiohttp import ServerDisconnectedError, web
from aiohttp.test_utils import TestClient, TestServer
from fastapi import BackgroundTasks, FastAPI, Request
from fastapi.responses import StreamingResponse

from ratelimitd_client import AsyncHold, Decision, Reason
from ratelimitd_client.async_hold import DEFAULT_TTL_S
from ratelimitd_client.middleware import aiohttp as for_aiohttp
from ratelimitd_client.middleware import flask as for_flask
from ratelimitd_client.middleware import holds, limited
from ratelimitd_client.middleware.asgi import RateLimitMiddleware
from ratelimitd_client.middleware.holds import Held, HeldRequests
from ratelimitd_client.testing import AsyncFakeRateLimiter, FakeRateLimiter

LIMIT = 100
ESTIMATE = 40


async def settled(limiter):
    """What is left when all requests that have ended are settled."""
    for _ in range(10):
        await asyncio.sleep(0)
    return left_of(await limiter.check("192.0.2.7", "ip", "/chat", peek=True))


def left_of(decision):
    return decision.remaining_tokens + 1  # a peek answers as if it spent its token


@pytest.fixture
def limiter():
    limiter = AsyncFakeRateLimiter()
    limiter.limit("/chat", "ip", LIMIT)
    return limiter


def asgi_app(limiter, settle):
    app = FastAPI()
    app.add_middleware(RateLimitMiddleware, limiter)
    app.state.seen = []

    @app.get("/chat")
    @limited(hold=ESTIMATE, settle=settle)
    async def chat(request: Request, words: int = 3):
        request.state.tokens = 0

        async def stream():
            for _ in range(words):
                seen = await limiter.check("192.0.2.7", "ip", "/chat", peek=True)
                app.state.seen.append(left_of(seen))
                request.state.tokens += 1
                yield "word "
            if words == 0:
                raise ZeroDivisionError

        return StreamingResponse(stream())

    return app


def used(scope):
    return scope["state"].get("tokens")


def caller(app):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=("192.0.2.7", 5))
    return httpx.AsyncClient(transport=transport, base_url="http://example.org")


async def test_an_answer_is_settled_with_what_it_has_cost(limiter):
    app = asgi_app(limiter, used)
    async with caller(app) as client:
        answer = await client.get("/chat")
    assert answer.text == "word word word "
    assert answer.headers["RateLimit"].startswith(f'"default";r={LIMIT - ESTIMATE}')
    assert app.state.seen == [LIMIT - ESTIMATE] * 3
    assert await settled(limiter) == LIMIT - 3


async def test_an_answer_that_breaks_off_is_settled_with_what_it_has_cost_until_then(limiter):
    async with caller(asgi_app(limiter, used)) as client:
        await client.get("/chat", params={"words": 0})
    assert await settled(limiter) == LIMIT


async def test_without_a_function_what_was_held_stays_charged(limiter):
    async with caller(asgi_app(limiter, None)) as client:
        await client.get("/chat")
    assert await settled(limiter) == LIMIT - ESTIMATE


@pytest.mark.parametrize(
    "settle", [lambda _: 1 / 0, lambda _: -1, lambda _: "3"], ids=["raises", "negative", "text"]
)
async def test_a_function_that_fails_leaves_charged_what_was_held(limiter, settle, caplog):
    async with caller(asgi_app(limiter, settle)) as client:
        assert (await client.get("/chat")).status_code == 200
    assert await settled(limiter) == LIMIT - ESTIMATE
    assert "charged the held tokens" in caplog.text


async def test_a_request_that_cannot_be_held_is_denied(limiter):
    async with caller(asgi_app(limiter, used)) as client:
        await limiter.check("192.0.2.7", "ip", "/chat", cost=LIMIT - ESTIMATE + 1)
        assert (await client.get("/chat")).status_code == 429
    assert await settled(limiter) == ESTIMATE - 1


async def test_tasks_after_an_answer_run_without_its_hold(limiter):
    app, seen = FastAPI(), []
    app.add_middleware(RateLimitMiddleware, limiter)

    async def later():
        seen.append(await settled(limiter))

    @app.get("/chat")
    @limited(hold=ESTIMATE, settle=lambda _: 3)
    async def chat(tasks: BackgroundTasks):
        tasks.add_task(later)

    async with caller(app) as client:
        await client.get("/chat")
    assert seen == [LIMIT - 3]


async def test_a_limiter_that_is_away_lets_requests_through(limiter, caplog):
    caplog.set_level(logging.ERROR)
    limiter.available = False
    async with caller(asgi_app(limiter, used)) as client:
        assert (await client.get("/chat")).text == "word word word "


async def test_a_stream_of_aiohttp_is_settled_when_its_handler_ends(limiter):
    tokens = web.RequestKey("tokens", int)

    @limited(hold=ESTIMATE, settle=lambda request: request[tokens])
    async def chat(request):
        response = web.StreamResponse()
        await response.prepare(request)
        request[tokens] = 7
        await response.write(b"words")
        return response

    app = web.Application()
    for_aiohttp.setup(app, limiter)
    app.router.add_get("/chat", chat)
    limiter.limit("/chat", "ip", LIMIT)
    async with TestClient(TestServer(app)) as client:
        assert await (await client.get("/chat")).text() == "words"
    left = await limiter.check("127.0.0.1", "ip", "/chat", peek=True)
    assert left_of(left) == LIMIT - 7


@pytest.mark.parametrize("words", [3, 0], ids=["whole", "fails"])
async def test_a_body_that_a_handler_of_aiohttp_returns_is_held_until_it_is_sent(limiter, words):
    tokens = web.RequestKey("tokens", int)
    seen = []

    @limited(hold=ESTIMATE, settle=lambda request: request[tokens])
    async def chat(request):
        request[tokens] = 0

        async def body():
            await settled(limiter)
            for number in range(words):
                seen.append(left_of(await limiter.check("127.0.0.1", "ip", "/chat", peek=True)))
                request[tokens] = number + 1
                yield b"word "
            if words == 0:
                raise ZeroDivisionError

        return web.Response(body=body())

    app = web.Application()
    for_aiohttp.setup(app, limiter)
    app.router.add_get("/chat", chat)
    async with TestClient(TestServer(app)) as client:
        with nullcontext() if words else pytest.raises(ServerDisconnectedError):
            await (await client.get("/chat")).text()
    assert seen == [LIMIT - ESTIMATE] * words
    left = await limiter.check("127.0.0.1", "ip", "/chat", peek=True)
    assert left_of(left) == LIMIT - words


def flask_app():
    limiter = FakeRateLimiter()
    limiter.limit("/chat", "ip", LIMIT)
    app = flask.Flask("chat")
    for_flask.setup(app, limiter)
    return app, limiter


def asked(app):
    return app.test_client().get("/chat", environ_base={"REMOTE_ADDR": "192.0.2.7"})


def left_in(limiter):
    return left_of(limiter.check("192.0.2.7", "ip", "/chat", peek=True))


def test_a_stream_of_flask_is_settled_when_it_is_closed():
    app, limiter = flask_app()

    @app.route("/chat")
    @limited(hold=ESTIMATE, settle=lambda request: request.environ["tokens"])
    def chat():
        environ = flask.request.environ

        def stream():
            environ["tokens"] = 5
            yield "words"

        return flask.Response(stream())

    answer = asked(app)
    assert left_in(limiter) == LIMIT - ESTIMATE
    assert answer.text == "words"
    answer.close()
    assert left_in(limiter) == LIMIT - 5


def test_a_stream_of_flask_that_fails_when_it_is_closed_is_settled():
    app, limiter = flask_app()

    @app.route("/chat")
    @limited(hold=ESTIMATE, settle=lambda _: 5)
    def chat():
        def stream():
            try:
                yield "words"
                yield "more words"
            finally:
                raise ZeroDivisionError

        return flask.Response(stream())

    answer = asked(app)
    assert next(answer.response) == b"words"
    with pytest.raises(ZeroDivisionError):
        answer.close()
    assert left_in(limiter) == LIMIT - 5


def test_a_file_of_flask_is_settled_when_it_is_closed(tmp_path):
    (tmp_path / "words").write_text("words")
    app, limiter = flask_app()

    @app.route("/chat")
    @limited(hold=ESTIMATE, settle=lambda _: 5)
    def chat():
        return flask.send_file(tmp_path / "words", mimetype="text/plain")

    with asked(app) as answer:
        assert answer.text == "words"
    assert left_in(limiter) == LIMIT - 5


def test_a_request_of_flask_whose_environ_a_wrapper_copies_is_settled():
    limiter = FakeRateLimiter()
    limiter.limit("/chat", "ip", LIMIT)
    app = flask.Flask("chat")
    below = app.wsgi_app
    app.wsgi_app = lambda environ, start_response: below(dict(environ), start_response)
    for_flask.setup(app, limiter)

    @app.route("/chat")
    @limited(hold=ESTIMATE, settle=lambda _: 5)
    def chat():
        return "words"

    asked(app).close()
    assert left_in(limiter) == LIMIT - 5


def test_an_answer_of_flask_that_another_one_replaces_is_settled():
    limiter = FakeRateLimiter()
    limiter.limit("/chat", "ip", LIMIT)
    app = flask.Flask("chat")
    # Called last, since it is added first.
    app.after_request(lambda _: flask.Response("other words"))
    for_flask.setup(app, limiter)

    @app.route("/chat")
    @limited(hold=ESTIMATE, settle=lambda _: 5)
    def chat():
        return "words"

    with asked(app) as answer:
        assert answer.text == "other words"
    assert left_in(limiter) == LIMIT - 5


def test_a_request_of_flask_that_is_denied_is_not_settled():
    app, _ = flask_app()
    settles = []

    @app.route("/chat")
    @limited(hold=LIMIT, settle=lambda request: settles.append(request) or LIMIT)
    def chat():
        return "words"

    for status in (200, 429):
        with asked(app) as answer:
            assert answer.status_code == status
    assert len(settles) == 1


def _raise(*_):
    raise ZeroDivisionError


@pytest.mark.parametrize("propagates", [False, True])
@pytest.mark.parametrize("fails", ["view", "before", "after", "after the headers"])
def test_a_request_of_flask_that_fails_is_settled_once(fails, propagates):
    limiter = FakeRateLimiter()
    limiter.limit("/chat", "ip", LIMIT)
    settles = []
    app = flask.Flask("chat")
    app.config["PROPAGATE_EXCEPTIONS"] = propagates
    if fails == "after the headers":  # those that are added first are called last
        app.after_request(_raise)
    for_flask.setup(app, limiter)
    if fails == "before":
        app.before_request(_raise)
    if fails == "after":
        app.after_request(_raise)

    @app.route("/chat")
    @limited(hold=ESTIMATE, settle=lambda request: settles.append(request) or 5)
    def chat():
        return _raise() if fails == "view" else "words"

    with nullcontext() if not propagates else pytest.raises(ZeroDivisionError):
        asked(app).close()
    assert [type(request) for request in settles] == [flask.Request]
    assert left_in(limiter) == LIMIT - 5


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"hold": 1, "cost": 1}, "cost and hold exclude each other"),
        ({"settle": used}, "settle needs hold"),
        ({"hold": -1}, "hold must be"),
        ({"hold": 1, "settle": 5}, "settle must be a function"),
        ({"hold": 1, "settle": asyncio.sleep}, "settle must be a function"),
    ],
)
def test_a_mark_that_makes_no_sense_is_an_error(arguments, what):
    with pytest.raises(ValueError, match=what):
        limited(**arguments)


class UnansweredHold(AsyncHold):
    """A hold whose extension no node answers."""

    def __init__(self):
        super().__init__(Decision(True, 1, 0, 0, Reason.WITHIN_LIMIT))
        self.extending = asyncio.Event()
        self.timeout_s = 0.0
        self.settled_with = []

    async def extend(self, *_, timeout_s):
        self.timeout_s = timeout_s
        self.extending.set()
        await asyncio.Event().wait()

    async def settle(self, actual, **_):
        self.settled_with.append(actual)
        return True


async def test_a_long_request_keeps_its_hold_also_if_no_node_answers_for_a_while(monkeypatch):
    hold = UnansweredHold()
    monkeypatch.setattr(holds, "EXTEND_S", 0.0)
    requests = HeldRequests(lambda held, _: held.cost)
    end = requests.begin("request", Held(hold, 5, None))
    await hold.extending.wait()
    assert hold.timeout_s == DEFAULT_TTL_S  # the rest of its life
    end()
    end()
    for _ in range(10):
        await asyncio.sleep(0)
    # At once, and not when the extension ends.
    assert hold.settled_with == [5]
    await requests.finish()
