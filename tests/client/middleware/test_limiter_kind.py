"""The wrong kind of limiter is found when a middleware is made."""

import pytest

from ratelimitd_client import AsyncRateLimiterClient, RateLimiterClient
from ratelimitd_client.middleware import Options
from ratelimitd_client.middleware.limiter_kind import require_kind
from ratelimitd_client.testing import AsyncFakeRateLimiter, FakeRateLimiter


def test_clients_and_fakes_are_told_apart():
    for blocking in RateLimiterClient(), FakeRateLimiter():
        require_kind(blocking, asynchronous=False)
        with pytest.raises(TypeError, match="must be an AsyncRateLimiterClient"):
            require_kind(blocking, asynchronous=True)
    for asynchronous in AsyncRateLimiterClient(), AsyncFakeRateLimiter():
        require_kind(asynchronous, asynchronous=True)
        with pytest.raises(TypeError, match="must be a RateLimiterClient"):
            require_kind(asynchronous, asynchronous=False)


async def coroutine(request):
    """Nobody would wait for it."""


def test_a_coroutine_is_refused_where_nobody_would_wait_for_it():
    options = Options(identify=coroutine)
    require_kind(AsyncFakeRateLimiter(), options, asynchronous=True)
    with pytest.raises(TypeError, match="identify must be a function that is no coroutine"):
        require_kind(FakeRateLimiter(), options, asynchronous=False)


def test_a_class_is_no_limiter():
    with pytest.raises(TypeError, match="not a class"):
        require_kind(AsyncRateLimiterClient, asynchronous=True)


def test_what_has_no_check_is_no_limiter():
    with pytest.raises(TypeError, match="not str"):
        require_kind("127.0.0.1:9090", asynchronous=False)
