"""Endpoints: nothing that a caller makes up becomes one."""

import pytest

from ratelimitd_client.middleware.endpoint import is_valid_endpoint, with_method


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
