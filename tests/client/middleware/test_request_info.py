"""Endpoints: one notation for all frameworks, and nothing that a caller makes up."""

import pytest
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, URLResolver, include, path, re_path
from werkzeug.routing import Map, Rule

from ratelimitd_client.middleware.request_info import (
    django_route,
    flask_route,
    is_valid_endpoint,
    with_method,
)


@pytest.mark.parametrize(
    ("method", "endpoint"),
    [
        ("GET", "GET /x"),
        ("HEAD", "GET /x"),
        ("DELETE", "DELETE /x"),
        ("BREW", "OTHER /x"),
        ("get", "OTHER /x"),
        ("", "OTHER /x"),
    ],
)
def test_methods_that_no_standard_knows_are_one(method, endpoint):
    assert with_method(method, "/x") == endpoint


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("/orders/{id}", True),
        ("x" * 255, True),
        ("", False),
        ("*", False),
        ("x" * 256, False),
        ("x" * 1_000_000, False),
        ("/a\nb", False),
        ("/\ud800", False),
        (None, False),
        (42, False),
    ],
)
def test_an_endpoint_is_valid_if_a_check_can_have_it(text, valid):
    assert is_valid_endpoint(text) is valid


def answered(request: HttpRequest, **_: object) -> HttpResponse:
    """A view."""
    return HttpResponse()


@pytest.mark.parametrize(
    ("rule", "template"),
    [
        ("/orders", "/orders"),
        ("/orders/<order_id>", "/orders/{order_id}"),
        ("/orders/<int:order_id>/lines/<uuid:line>", "/orders/{order_id}/lines/{line}"),
        ("/orders/<int(min=1):order_id>", "/orders/{order_id}"),
        ("/<any(orders, bills):kind>/", "/{kind}/"),
        ("/files/<path:name>", "/files/{name}"),
    ],
)
def test_rules_of_flask(rule, template):
    Map([Rule(rule)])  # it is one
    assert flask_route(rule) == template


def first_route(patterns):
    """What Django would say of the first of them when it matches: the texts, joined."""
    texts = []
    pattern: URLPattern | URLResolver = patterns[0]
    while isinstance(pattern, URLResolver):
        texts.append(str(pattern.pattern))
        pattern = pattern.url_patterns[0]
    return "".join([*texts, str(pattern.pattern)])


@pytest.mark.parametrize(
    ("pattern", "template"),
    [
        (path("", answered), "/"),
        (path("orders/", answered), "/orders/"),
        (path("orders/<int:order_id>", answered), "/orders/{order_id}"),
        (path("orders/<order_id>/<slug:line>", answered), "/orders/{order_id}/{line}"),
        (re_path(r"^orders/(?P<order_id>\d+)/$", answered), "/orders/{order_id}/"),
        (re_path(r"^a\.b/(?P<y>(19|20)\d\d(\)|x))/(\w+)\Z", answered), "/a.b/{y}/{}"),
        (re_path(r"^/?tags/(?:old|new)/(?P<tag>[^/]+)$", answered), "/?tags/(?:old|new)/{tag}"),
        (re_path(r"^a\(b\)$", answered), "/a(b)"),
        (re_path(r"orders/(?P<order_id>\d+)/", answered), "/orders/{order_id}/"),
    ],
)
def test_routes_of_django(pattern, template):
    assert django_route(str(pattern.pattern)) == template


def test_routes_of_django_that_include_others():
    view = answered
    by_path = path("v1/<slug:shop>/", include([path("orders/<int:order_id>", view)]))
    assert django_route(first_route([by_path])) == "/v1/{shop}/orders/{order_id}"
    mixed = path("v1/", include([re_path(r"^(?P<shop>\w+)/", include([path("o/<x>", view)]))]))
    assert django_route(first_route([mixed])) == "/v1/{shop}/o/{x}"


def test_a_group_that_never_ends_is_taken_as_it_is():
    assert django_route("^a/(b") == "/a/{}"
