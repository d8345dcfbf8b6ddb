"""What settings.RATELIMITD may hold, and what keeps a server from starting."""

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from ratelimitd_client import AsyncRateLimiterClient, RateLimiterClient
from ratelimitd_client.middleware.django import configured
from ratelimitd_client.testing import FakeRateLimiter
from tests.client.middleware import django_project

LIMITER = FakeRateLimiter()


def configured_of(settings, *, asynchronous=False):
    with override_settings(RATELIMITD=settings):
        return configured(asynchronous=asynchronous)


def test_a_client_of_either_kind_is_made_of_what_is_for_it():
    settings = {"target": "limiter:9090", "timeout_s": 0.1, "token": "t"}
    assert isinstance(configured_of(settings)[0], RateLimiterClient)
    assert isinstance(configured_of(settings, asynchronous=True)[0], AsyncRateLimiterClient)


def test_the_rest_are_options_of_the_middleware():
    _, options = configured_of({"target": "limiter:9090", "cost": 2, "exempt": ["/healthz"]})
    assert options.cost == 2
    assert options.exempt == ["/healthz"]


def test_limiter_and_functions_may_be_named_by_their_paths():
    paths = {"limiter": f"{__name__}.LIMITER", "identify": f"{django_project.__name__}.identify"}
    limiter, options = configured_of(paths)
    assert isinstance(limiter, FakeRateLimiter)
    assert options.identify is django_project.identify


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        "127.0.0.1:9090",
        {},
        {"limiter": FakeRateLimiter(), "target": "127.0.0.1:9090"},
        {"limiter": FakeRateLimiter(), "token": "t"},
        {"cost": 2},
        {"timeout_s": 0.1, "token": "t"},
    ],
)
def test_either_a_limiter_or_what_it_is_made_of_is_needed(wrong):
    with pytest.raises(ImproperlyConfigured, match="RATELIMITD must"):
        configured_of(wrong)


def test_a_limiter_of_the_other_kind_is_refused():
    with pytest.raises(TypeError, match="limiter must be"):
        configured_of({"limiter": FakeRateLimiter()}, asynchronous=True)


def test_a_name_that_is_no_option_is_told():
    with pytest.raises(ImproperlyConfigured, match=r"RATELIMITD has unknown names: 5, limit$"):
        configured_of({"target": "limiter:9090", "limit": "5/minute", "cost": 2, 5: 5})


def test_an_option_that_is_not_valid_raises():
    with pytest.raises(ValueError, match=r"^cost must be"):
        configured_of({"target": "limiter:9090", "cost": -1})


def test_a_path_that_leads_nowhere_is_told_with_its_setting():
    with pytest.raises(ImproperlyConfigured, match="RATELIMITD: identify: No module named 'no'"):
        configured_of({"target": "limiter:9090", "identify": "no.such.module"})


@pytest.mark.parametrize("wrong", [{"timeout_s": 0}, {"target": "http://limiter:9090"}])
def test_what_the_client_refuses_raises(wrong):
    for asynchronous in False, True:
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))} must be"):
            configured_of({"target": "limiter:9090", **wrong}, asynchronous=asynchronous)
