"""The rules suggested for a check without a rule, and the reasons."""

import pytest

from ratelimitd.model import Algorithm, Rule
from ratelimitd.rules.nearest import MAX_NEAREST, Nearest


def rule_of(endpoint, identifier_type="user", *, enabled=True):
    return Rule(
        f"{endpoint} {identifier_type}",
        endpoint,
        identifier_type,
        enabled=enabled,
        limit=1,
        window_seconds=60,
        algorithm=Algorithm.TOKEN_BUCKET,
    )


def nearest(asked, *rules, types=("user",)):
    found = Nearest(asked, types)
    for rule in rules:
        found.look_at([rule_of(rule) if isinstance(rule, str) else rule])
    return [(near.rule.endpoint, near.why) for near in found.found()]


@pytest.mark.parametrize(
    ("asked", "endpoint", "why"),
    [
        ("/Orders", "/orders", "differs in case"),
        ("/orders/", "/orders", "differs in slashes"),
        ("orders", "/orders", "differs in slashes"),
        ("//a/b", "/a/b", "differs in slashes"),
        ("/Orders/", "/orders", "differs in case, differs in slashes"),
        ("/orders", "GET /orders", "names the method GET"),
        ("POST /orders", "GET /orders", "names the method GET"),
        ("POST /orders", "/orders", "names no method"),
        ("get /orders", "GET /orders", "differs in case"),
        ("/orders?page=2", "/orders", "has no query"),
        ("/orders?page=2", "/orders?page=1", "has another query"),
        ("GET /Orders?x", "/orders", "differs in case, names no method, has no query"),
    ],
)
def test_same_path_in_another_spelling_is_near(asked, endpoint, why):
    assert nearest(asked, endpoint) == [(endpoint, why)]


@pytest.mark.parametrize(
    ("asked", "endpoint", "why"),
    [
        ("/orders/42", "/orders/{id}", "is the template"),
        ("/orders/42/items", "/orders/<int:id>/items", "is the template"),
        ("/orders/42", "/Orders/:id", "is the template"),
        ("/files/a", "/files/{path:.*}", "is the template"),
        ("GET /orders/42", "/orders/{id}", "is the template"),
        ("/orders/{id}", "/orders/{order_id}", "names a parameter otherwise"),
        ("/orders/{id}", "/orders/42", "is one path of this template"),
        ("/orders/42", "/orders/*", "has a * that stands for itself alone"),
        ("/orders/42", "/ord*/42", "has a * that stands for itself alone"),
    ],
)
def test_template_of_the_path_is_near(asked, endpoint, why):
    [(found, said)] = nearest(asked, endpoint)
    assert (found, said.startswith(why)) == (endpoint, True)


def test_template_reports_other_differences():
    [(_, why)] = nearest("POST /orders/42", "GET /orders/{id}")
    assert why.endswith("callers must send the template, names the method GET")


@pytest.mark.parametrize("slip", ["/ordes", "/ordesr", "/orderss", "/0rders", "/orders-v"])
def test_typing_error_is_near(slip):
    assert nearest(slip, "/orders") == [("/orders", "is spelled nearly the same")]


@pytest.mark.parametrize(
    ("asked", "endpoint", "why"),
    [
        ("/orders/42", "/orders", "begins with the same part"),
        ("/a/b/c/d", "/a/b", "begins with the same 2 parts"),
        ("/shop/v1/items/sold", "/shop/v1/items/returned", "begins with the same 3 parts"),
        ("/shop/v1/orders/42", "/shop/v1/orders/{id}/items", "begins with the same 4 parts"),
    ],
)
def test_path_with_the_same_beginning_is_near(asked, endpoint, why):
    assert nearest(asked, endpoint) == [(endpoint, why)]


@pytest.mark.parametrize(
    ("asked", "endpoint"),
    [
        ("/orders", "/carts"),
        ("/api/orders", "/api/customers"),
        ("/a", "/b"),
        ("/orders", "/"),
        ("/", "/orders"),
        ("/orders", "/orders"),
        ("/orders", "*"),
        ("/orders", "**"),
        ("/orders-of-today", "/orders"),
    ],
)
def test_other_endpoints_and_those_matched_elsewhere_are_not_near(asked, endpoint):
    assert nearest(asked, endpoint) == []


def test_only_spelling_selects_other_spellings_only():
    found = Nearest("/orders/42", ["user"], only_spelling=True)
    others = ["/Orders/42", "GET /orders/42", "/orders/{id}", "/orders/43", "/orders"]
    found.look_at([rule_of(other) for other in others])
    assert [near.rule.endpoint for near in found.found()] == ["/Orders/42"]


@pytest.mark.parametrize(
    ("asked", "endpoint", "why"),
    [
        ("GET /orders/{id}", "GET /order/{id}", "is spelled nearly the same"),
        ("GET /orders/{id}", "GET /orders/{order}", "names a parameter otherwise"),
        ("GET /orders/{id}", "GET /Orders/{id}/", "differs in case, differs in slashes"),
        ("GET /orders/{id}", "/orders/{id}", None),
        ("GET /orders/{id}", "GET /orders/id", None),
        ("GET /orders/{id}", "GET /orders/7", None),
        ("GET /orders/{id}", "GET /orders/{id}/items", None),
        ("/v1/orders", "/v2/orders", None),
    ],
)
def test_another_spelling_of_a_template_is_found(asked, endpoint, why):
    found = Nearest(asked, ["user"], only_spelling=True)
    found.look_at([rule_of(endpoint)])
    assert [near.why for near in found.found()] == ([why] if why else [])


def test_nearest_come_first_and_are_few():
    far_to_near = ["/orders", "/orders/42/itms", "/orders/{id}/items", "/orders/42/Items"]
    found = nearest("/orders/42/items", *far_to_near)
    assert [endpoint for endpoint, _ in found] == [*reversed(far_to_near)][:MAX_NEAREST]
    assert len(found) == MAX_NEAREST == 3


def test_rules_that_would_not_apply_come_later_with_the_reason():
    rules = [rule_of("/Orders", "ip"), rule_of("/ORDERS", enabled=False), rule_of("/orders/")]
    assert nearest("/orders", *rules) == [
        ("/orders/", "differs in slashes"),
        ("/ORDERS", "differs in case, is disabled"),
        ("/Orders", "differs in case, is for ip"),
    ]


def test_rules_of_all_and_of_products_are_for_checks_that_name_their_types():
    rules = [rule_of("/Orders", "all"), rule_of("/ORDERS", "tenant+user")]
    assert [why for _, why in nearest("/orders", *rules, types=("user", "tenant"))] == [
        "differs in case",
        "differs in case",
    ]
    assert nearest("/orders", *rules)[1] == ("/ORDERS", "differs in case, is for tenant+user")


def test_only_a_bounded_number_of_segments_is_compared():
    [(_, why)] = nearest("/a" * 120 + "/x", "/a" * 120 + "/longer")
    assert why == "begins with the same 15 parts"
