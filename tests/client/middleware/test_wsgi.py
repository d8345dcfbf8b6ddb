"""The middleware for WSGI, with both its sides watched by the validator of the standard library."""

from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator

import pytest

from ratelimitd_client import Check, Decision
from ratelimitd_client.middleware import Options
from ratelimitd_client.middleware.wsgi import DECISION, RateLimitMiddleware
from ratelimitd_client.testing import AsyncFakeRateLimiter, FakeRateLimiter

found: list[Decision | None] = []
"""What the application found on its requests."""


def endpoint(environ):
    return "/orders/{id}" if environ["PATH_INFO"].startswith("/orders/") else None


def application(environ, start_response):
    own = [("X-RateLimit-Limit", "mine")] if environ["PATH_INFO"] == "/orders/own" else []
    start_response("200 OK", [("Content-Type", "text/plain"), *own])
    found.append(environ.get(DECISION))
    return [b"an order"]


@pytest.fixture
def limiter():
    limiter = FakeRateLimiter()
    limiter.limit("/orders/{id}", "ip", limit=1, window_seconds=60)
    return limiter


def asked(limiter, path="/orders/7", method="GET", *, options=None, **environ):
    """The status, the headers and the body of an answer."""
    app = RateLimitMiddleware(
        validator(application), limiter, options or Options(endpoint=endpoint)
    )
    request = {"REQUEST_METHOD": method, "REMOTE_ADDR": "192.0.2.7", **environ}
    setup_testing_defaults(request)
    request.update(PATH_INFO=path, SCRIPT_NAME="", QUERY_STRING="")
    started = []
    answer = validator(app)(
        request, lambda status, headers, exc_info=None: started.append((status, headers))
    )
    try:
        body = b"".join(answer)
    finally:
        answer.close()
    [(status, headers)] = started
    return status, dict(headers), body


def test_requests_are_let_through_until_the_limit_and_told_of_it(limiter):
    status, headers, body = asked(limiter)
    assert (status, body) == ("200 OK", b"an order")
    assert headers["RateLimit"] == '"default";r=0;t=60'
    status, headers, body = asked(limiter)
    assert status == "429 Too Many Requests"
    assert headers == {
        "Content-Type": "text/plain; charset=utf-8",
        "Content-Length": "38",
        "Retry-After": "60",
        "RateLimit": '"default";r=0;t=60',
        "RateLimit-Policy": '"default";q=1;w=60',
    }
    assert body == b"Too many requests. Try again in 60 s.\n"
    assert limiter.checks == [Check("192.0.2.7", "ip", "/orders/{id}")] * 2


def test_the_application_finds_the_decision_on_a_request_that_was_checked(limiter):
    found.clear()
    asked(limiter)
    asked(limiter, REMOTE_ADDR="")
    assert [decision and decision.remaining_tokens for decision in found] == [0, None]


def test_whoever_takes_json_is_answered_in_json(limiter):
    asked(limiter)
    _, headers, body = asked(limiter, HTTP_ACCEPT="application/json")
    assert headers["Content-Type"] == "application/json"
    assert body == b'{"detail": "Too many requests. Try again in 60 s."}'


def test_a_head_request_is_denied_without_a_body(limiter):
    asked(limiter)
    status, headers, body = asked(limiter, method="HEAD")
    assert (status[:3], headers["Content-Length"], body) == ("429", "38", b"")


def test_headers_of_the_application_stay_as_they_are(limiter):
    options = Options(endpoint=endpoint, x_ratelimit=True)
    _, headers, _ = asked(limiter, "/orders/own", options=options)
    assert headers["X-RateLimit-Limit"] == "mine"
    assert headers["X-RateLimit-Remaining"] == "0"


def test_a_user_whom_the_server_knows_is_counted_as_a_user(limiter):
    asked(limiter, REMOTE_USER="alice")
    assert limiter.checks == [Check("alice", "user", "/orders/{id}")]


def test_forwarded_addresses_count_from_trusted_proxies_alone(limiter):
    asked(limiter, HTTP_X_FORWARDED_FOR="198.51.100.1, 203.0.113.9")
    options = Options(endpoint=endpoint, trusted_proxies=["192.0.2.0/24"])
    asked(limiter, options=options, HTTP_X_FORWARDED_FOR="198.51.100.1, 203.0.113.9")
    assert [check.identifier for check in limiter.checks] == ["192.0.2.7", "203.0.113.9"]


def test_what_the_function_knows_no_endpoint_of_is_counted_as_one(limiter):
    for path in ("/a", "/b"):
        status, headers, _ = asked(limiter, path)
        assert status == "200 OK"
        assert "RateLimit" not in headers
    assert {check.endpoint for check in limiter.checks} == {"unmatched"}


def test_without_anybody_to_ask_about_requests_pass(limiter):
    status, headers, _ = asked(limiter, REMOTE_ADDR="")
    assert status == "200 OK"
    assert "RateLimit" not in headers
    assert limiter.checks == []


def test_what_cannot_be_checked_is_answered_503_where_that_is_chosen(limiter):
    limiter.available = False
    options = Options(endpoint=endpoint, on_unavailable="deny")
    status, headers, _ = asked(limiter, options=options)
    assert (status, headers["Retry-After"]) == ("503 Service Unavailable", "1")
    assert "RateLimit" not in headers


def test_a_function_for_the_endpoint_and_a_limiter_that_blocks_are_needed(limiter):
    for options in (None, Options()):
        with pytest.raises(ValueError, match="endpoint"):
            RateLimitMiddleware(application, limiter, options)
    with pytest.raises(TypeError, match=r"options must be Options\(…\), not dict"):
        RateLimitMiddleware(application, limiter, {"endpoint": endpoint})
    with pytest.raises(TypeError, match="limiter"):
        RateLimitMiddleware(application, AsyncFakeRateLimiter(), Options(endpoint=endpoint))


def test_a_function_says_who_else_a_request_is_counted_for(limiter):
    options = Options(
        endpoint=endpoint, identities=lambda env: {"tenant": env.get("HTTP_X_TENANT")}
    )
    asked(limiter, options=options, HTTP_X_TENANT="acme")
    asked(limiter, options=options)
    assert [check.also for check in limiter.checks] == [{"tenant": "acme"}, {}]


def test_a_coroutine_that_says_who_it_is_is_refused(limiter):
    async def identify(environ):
        """Nobody would wait for it."""

    with pytest.raises(TypeError, match="identify must not be"):
        RateLimitMiddleware(application, limiter, Options(endpoint=endpoint, identify=identify))
