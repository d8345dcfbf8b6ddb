"""What settings.RATELIMITD may hold, and what keeps a server from starting."""

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from ratelimitd_client import AsyncRateLimiterClient, RateLimiterClient
from ratelimitd_client.middleware.django import configured
from ratelimitd_client.testing import FakeRateLimiter
from tests.client.middleware import django_project

LIMITER = FakeRateLimiter()


def configured_of(settings):
    with override_settings(RATELIMITD=settings):
        return configured()


def test_a_client_of_either_kind_is_made_of_what_is_for_it():
    settings = configured_of({"target": "limiter:9090", "timeout_s": 0.1, "token": "t"})
    assert isinstance(settings.blocking_limiter(), RateLimiterClient)
    assert isinstance(settings.async_limiter(), AsyncRateLimiterClient)


def test_the_rest_are_options_of_the_middleware():
    settings = configured_of({"target": "limiter:9090", "cost": 2, "exempt": ["/healthz"]})
    assert settings.options.cost == 2
    assert settings.options.exempt == ["/healthz"]


def test_limiter_and_functions_may_be_named_by_their_paths():
    paths = {"limiter": f"{__name__}.LIMITER", "identify": f"{django_project.__name__}.identify"}
    settings = configured_of(paths)
    assert isinstance(settings.blocking_limiter(), FakeRateLimiter)
    assert settings.options.identify is django_project.identify


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
    settings = configured_of({"limiter": FakeRateLimiter()})
    with pytest.raises(TypeError, match="limiter must be"):
        settings.async_limiter()


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
    settings = configured_of({"target": "limiter:9090", **wrong})
    for make in settings.blocking_limiter, settings.async_limiter:
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))} must be"):
            make()
