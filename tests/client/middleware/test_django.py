"""The middleware for Django, in Django, through its handlers for WSGI and for ASGI."""

import asyncio

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import AsyncClient, Client, override_settings

from ratelimitd_client import Check
from ratelimitd_client.middleware import Identity
from ratelimitd_client.testing import AsyncFakeRateLimiter, FakeRateLimiter
from tests.client.middleware import django_project

ORDER = Check("127.0.0.1", "ip", "/orders/{order_id}")


class Visitor:
    """Asks the project by one of its two handlers; ``limiter`` is what that asks."""

    def __init__(self, kind):
        self._is_async = kind == "asgi"
        self.limiter = AsyncFakeRateLimiter() if self._is_async else FakeRateLimiter()
        self.options = {}

    async def get(self, path, method="get", *, user_id=None, **headers):
        """An answer; each comes from a handler of its own, made by the options as they are."""
        kind = AsyncClient if self._is_async else Client
        with override_settings(RATELIMITD={"limiter": self.limiter, **self.options}):
            client = kind(raise_request_exception=False)
            if user_id is not None:
                client.cookies["sessionid"] = django_project.session_of(user_id)
            ask = getattr(client, method)
            if self._is_async:
                return await ask(path, headers=headers)
            # Code that blocks has no event loop in its thread.
            return await asyncio.to_thread(ask, path, headers=headers)


@pytest.fixture(params=["wsgi", "asgi"])
def visitor(request):
    visitor = Visitor(request.param)
    visitor.limiter.limit("/orders/{order_id}", "ip", limit=1, window_seconds=60)
    return visitor


async def test_requests_are_let_through_until_the_limit_and_told_of_it(visitor):
    first, second = await visitor.get("/orders/7"), await visitor.get("/orders/8")
    assert (first.status_code, first.content) == (200, b"order 7")
    assert first["RateLimit"] == '"default";r=0;t=60'
    assert "Retry-After" not in first
    assert (second.status_code, second.content) == (429, b"Too many requests. Try again in 60 s.\n")
    assert second["Content-Type"] == "text/plain; charset=utf-8"
    assert second["Retry-After"] == "60"
    assert second["RateLimit-Policy"] == '"default";q=1;w=60'
    assert visitor.limiter.checks == [ORDER] * 2


async def test_what_cannot_be_checked_is_answered_503_where_that_is_chosen(visitor):
    visitor.limiter.available = False
    visitor.options = {"on_unavailable": "deny"}
    for path in ("/orders/7", "/missing"):
        answer = await visitor.get(path)
        assert (answer.status_code, answer["Retry-After"]) == (503, "1")
        assert "RateLimit" not in answer
    assert (await visitor.get("/healthz")).status_code == 200


async def test_routes_are_known_by_their_templates(visitor):
    for path in ("/async/7", "/v1/old/7/"):
        assert (await visitor.get(path)).content == b"order 7"
    assert [check.endpoint for check in visitor.limiter.checks] == [
        "/async/{order_id}",
        "/v1/old/{order_id}/",
    ]


async def test_what_a_view_says_of_itself_is_heeded(visitor):
    for path in ("/search", "/bills", "/healthz"):
        assert (await visitor.get(path)).status_code == 200
    assert (await visitor.get("/bills", "post")).content == b"a bill"
    assert [(check.endpoint, check.cost) for check in visitor.limiter.checks] == [
        ("/find", 3),
        ("/bills", 1),
        ("/bills", 5),
    ]


async def test_head_costs_what_the_method_costs_that_answers_it(visitor):
    assert (await visitor.get("/report", "head")).status_code == 200
    assert [check.cost for check in visitor.limiter.checks] == [4]


async def test_a_view_finds_the_decision_on_its_request(visitor):
    assert (await visitor.get("/search")).content == b"NO_RULE"


async def test_what_no_route_matches_is_counted_as_one(visitor):
    visitor.limiter.limit("unmatched", "ip", limit=2, window_seconds=60)
    answers = [await visitor.get(f"/nothing/{number}") for number in range(3)]
    assert [answer.status_code for answer in answers] == [404, 404, 429]
    assert answers[0]["RateLimit"] == '"default";r=1;t=60'


async def test_what_another_middleware_answers_itself_is_not_checked(visitor):
    assert (await visitor.get("/asset")).content == b"an asset"
    assert visitor.limiter.checks == []


async def test_a_user_who_has_logged_in_is_counted_as_a_user(visitor):
    await visitor.get("/orders/7", user_id=7)
    await visitor.get("/orders/7")
    assert visitor.limiter.checks == [Check("7", "user", "/orders/{order_id}"), ORDER]


@pytest.mark.parametrize("header", ["x-is", "x-is-later"])
async def test_a_user_whom_another_middleware_has_found_counts(visitor, header):
    await visitor.get("/orders/7", user_id=7, **{header: "70"})
    assert visitor.limiter.checks == [Check("70", "user", "/orders/{order_id}")]


async def test_nobody_looks_for_a_user_who_does_not_count(visitor):
    answers = [await visitor.get("/healthz", user_id=8)]
    visitor.options = {"identify": lambda request: Identity("t1")}
    answers.append(await visitor.get("/orders/7", user_id=8))
    assert [answer.status_code for answer in answers] == [200] * 2
    assert not any("Cookie" in answer["Vary"] for answer in answers)
    assert visitor.limiter.checks == [Check("t1", "user", "/orders/{order_id}")]


async def test_a_language_that_a_caller_chooses_is_no_limit_of_its_own(visitor):
    for path in ("/en/shop/7", "/de/shop/7"):
        assert (await visitor.get(path)).content == b"order 7"
    assert [check.endpoint for check in visitor.limiter.checks] == [
        "/{language}/shop/{order_id}"
    ] * 2


async def test_where_one_language_has_no_prefix_routes_are_written_without(visitor):
    with override_settings(ROOT_URLCONF=django_project.one_language_plain):
        for asked in ("/shop/7", "/de/shop/7"):
            assert (await visitor.get(asked)).content == b"order 7"
    assert [check.endpoint for check in visitor.limiter.checks] == ["/shop/{order_id}"] * 2


async def test_a_user_who_cannot_be_looked_up_is_let_through(visitor, caplog):
    assert (await visitor.get("/orders/7", user_id=8)).status_code == 200
    assert visitor.limiter.checks == []
    assert "TimeoutError" in caplog.text


async def test_a_function_that_blocks_says_who_it_is_also_for_asyncio(visitor):
    visitor.options = {"identify": f"{django_project.__name__}.identify"}
    await visitor.get("/orders/7", user_id=7)
    await visitor.get("/orders/7")
    assert visitor.limiter.checks == [Check("u7", "user", "/orders/{order_id}"), ORDER]


async def test_a_function_that_blocks_says_who_else_a_request_is_counted_for(visitor):
    visitor.options = {"identities": f"{django_project.__name__}.identities"}
    await visitor.get("/orders/7", user_id=7)
    await visitor.get("/search", user_id=7)
    await visitor.get("/async/7")
    assert [(check.identifier_type, check.also) for check in visitor.limiter.checks] == [
        ("user", {"tenant": "of-7"}),
        ("user", {"tenant": "of-search"}),
        ("ip", {}),
    ]


async def test_a_coroutine_says_who_it_is_for_asyncio():
    visitor = Visitor("asgi")

    def awaited_later(request):
        return django_project.identify_async(request)

    for identify in (django_project.identify_async, awaited_later):
        visitor.options = {"identify": identify}
        await visitor.get("/orders/7")
    assert [check.identifier for check in visitor.limiter.checks] == ["from-a-coroutine"] * 2


async def test_a_coroutine_says_who_else_a_request_is_counted_for_with_asyncio():
    async def identities(request):
        return [Identity("acme", "tenant")]

    visitor = Visitor("asgi")
    visitor.options = {"identities": identities}
    await visitor.get("/orders/7")
    assert [check.also for check in visitor.limiter.checks] == [{"tenant": "acme"}]


async def test_an_error_that_is_to_be_seen_is_answered_500(visitor):
    def fails(request):
        raise RuntimeError

    visitor.options = {"identify": fails, "on_error": "raise"}
    assert (await visitor.get("/orders/7")).status_code == 500


async def test_errors_are_told_of_the_limit_and_headers_of_a_view_stay(visitor):
    visitor.limiter.limit("*", "ip", limit=9, window_seconds=60)
    failed, streamed = await visitor.get("/fails"), await visitor.get("/stream")
    assert (failed.status_code, failed["RateLimit"]) == (500, '"default";r=8;t=60')
    assert streamed["RateLimit"] == "mine"
    assert streamed["RateLimit-Policy"] == '"default";q=9;w=60'


async def test_whoever_takes_json_is_answered_in_json(visitor):
    answers = [await visitor.get("/orders/7", accept="application/json") for _ in range(2)]
    assert answers[1].json() == {"detail": "Too many requests. Try again in 60 s."}


async def test_forwarded_addresses_count_from_trusted_proxies_alone(visitor):
    await visitor.get("/orders/7", x_forwarded_for="198.51.100.1, 203.0.113.9")
    visitor.options = {"trusted_proxies": ["127.0.0.1"]}
    await visitor.get("/orders/7", x_forwarded_for="198.51.100.1, 203.0.113.9")
    assert [check.identifier for check in visitor.limiter.checks] == ["127.0.0.1", "203.0.113.9"]


async def test_without_the_service_requests_pass(visitor):
    visitor.limiter.available = False
    answers = [await visitor.get("/orders/7") for _ in range(3)]
    assert {answer.status_code for answer in answers} == {200}
    assert "RateLimit" not in answers[0]


@pytest.mark.parametrize(
    ("kind", "limiter"), [(Client, AsyncFakeRateLimiter()), (AsyncClient, FakeRateLimiter())]
)
async def test_a_limiter_of_the_other_kind_keeps_the_server_from_starting(kind, limiter):
    with override_settings(RATELIMITD={"limiter": limiter}):
        handler = kind().handler
        with pytest.raises(ImproperlyConfigured, match="RATELIMITD: limiter must be"):
            handler.load_middleware(is_async=kind is AsyncClient)


async def test_a_coroutine_keeps_a_server_that_blocks_from_starting():
    chosen = {"limiter": FakeRateLimiter(), "identify": django_project.identify_async}
    with override_settings(RATELIMITD=chosen):
        handler = Client().handler
        with pytest.raises(ImproperlyConfigured, match="RATELIMITD: identify must not be"):
            handler.load_middleware()
