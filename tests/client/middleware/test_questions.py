"""From a request to what is asked about it: who, what and how much, and in which order that is looked for."""

import pytest

from ratelimitd_client.middleware import Identity, Options, limited
from ratelimitd_client.middleware.arrival import RequestInfo
from ratelimitd_client.middleware.questions import Place, Questions


def arrival(
    route="/orders/{id}", *, view=None, user=None, peer="192.0.2.7", method="GET", **headers
):
    lines = {name.replace("_", "-"): value for name, value in headers.items()}
    return RequestInfo(method, route, view, lambda: user, peer, lambda name: lines.get(name, []))


def place(options, arrived, request=None):
    return Questions(options).place(request, arrived)


def identity(options, arrived, *, given=None, wanted=None):
    return Questions(options).identity(given, arrived, wanted)


def view_with(**marks):
    return limited(**marks)(lambda: None)


def test_the_endpoint_is_the_template_of_the_route():
    assert place(Options(), arrival()) == Place("/orders/{id}", 1, None)


def test_the_method_can_be_part_of_the_endpoint():
    options = Options(with_method=True)
    assert place(options, arrival(method="HEAD")).endpoint == "GET /orders/{id}"
    assert place(options, arrival(method="X-1")).endpoint == "OTHER /orders/{id}"
    assert place(options, arrival(None, method="X-1")).endpoint == "unmatched"


def test_what_no_route_matches_is_counted_under_one_name():
    assert place(Options(), arrival(None)).endpoint == "unmatched"
    assert place(Options(unmatched="other"), arrival(None)).endpoint == "other"
    assert place(Options(unmatched=None), arrival(None)) is None


def test_a_function_may_name_the_endpoint_or_leave_it_to_the_route():
    options = Options(endpoint=lambda request: request, with_method=True)
    assert place(options, arrival(), "own").endpoint == "own"
    assert place(options, arrival(), None).endpoint == "GET /orders/{id}"
    assert place(options, arrival(view=view_with(endpoint="shared")), "own").endpoint == "shared"


@pytest.mark.parametrize("endpoint", ["", "*", "/x" * 200, "a\nb", 42])
def test_an_endpoint_that_no_check_can_have_is_unmatched(endpoint):
    assert place(Options(endpoint=lambda request: endpoint), arrival()).endpoint == "unmatched"


def test_what_is_exempt_is_not_checked():
    options = Options(exempt={"/health", "shared"}, with_method=True)
    assert place(options, arrival("/health")) is None
    assert place(options, arrival("/healthy")) is not None
    assert place(options, arrival(view=view_with(endpoint="shared"))) is None
    assert place(Options(), arrival(view=view_with(exempt=True))) is None


def test_what_is_counted_under_unmatched_may_be_exempt():
    assert place(Options(exempt={"unmatched"}), arrival(None)) is None


def test_a_view_says_what_it_costs():
    options = Options(cost=2)
    assert place(options, arrival()).cost == 2
    assert place(options, arrival(view=view_with(cost=5))).cost == 5
    assert place(options, arrival(view=view_with(cost=len)), "four").cost == 4
    assert place(Options(cost=len), arrival(), "four").cost == 4


def test_what_costs_nothing_is_not_checked():
    assert place(Options(cost=0), arrival()) is None
    assert place(Options(cost=len), arrival(), "") is None


def test_a_cost_beyond_what_a_check_can_have_is_the_most_it_can():
    assert place(Options(cost=int), arrival(), "9" * 20).cost == 2**31 - 1


@pytest.mark.parametrize(
    ("cost", "error"), [(-1, ValueError), ("1", TypeError), (None, TypeError), (True, TypeError)]
)
def test_a_cost_that_is_none_is_an_error_of_the_function(cost, error):
    with pytest.raises(error, match="cost must be"):
        place(Options(cost=lambda request: cost), arrival())


def test_an_identity_is_looked_for_in_order():
    options = Options(api_key_header="X-API-Key")
    key = {"x_api_key": ["k1"]}
    given = Identity("t1", "user")
    assert identity(options, arrival(user="alice", **key), given=given) == given
    assert identity(options, arrival(user="alice", **key)) == Identity("alice", "user")
    assert identity(options, arrival(user="", **key)) == Identity("k1", "api_key")
    assert identity(options, arrival()) == Identity("192.0.2.7", "ip")


def test_a_header_with_a_key_counts_only_where_it_is_named_and_sent_once():
    assert identity(Options(), arrival(x_api_key=["k1"])) == Identity("192.0.2.7", "ip")
    options = Options(api_key_header="X-API-Key")
    for keys in ([""], [" "], ["k1", "k2"], ["k1,k2"]):
        assert identity(options, arrival(x_api_key=keys)) == Identity("192.0.2.7", "ip")


def test_an_address_in_a_header_counts_only_from_a_trusted_proxy():
    forged = arrival(x_forwarded_for=["203.0.113.9"])
    assert identity(Options(), forged) == Identity("192.0.2.7", "ip")
    trusting = Options(trusted_proxies=["192.0.2.7"])
    assert identity(trusting, forged) == Identity("203.0.113.9", "ip")
    other = Options(trusted_proxies=["192.0.2.7"], forwarded_header="CF-Connecting-IP")
    assert identity(other, forged) == Identity("192.0.2.7", "ip")
    assert identity(other, arrival(cf_connecting_ip=["2001:db8::7"])) == Identity(
        "2001:db8::", "ip"
    )


def test_a_view_may_ask_for_a_type_of_identity_and_has_the_usual_one_without():
    assert identity(Options(), arrival(user="alice"), wanted="ip") == Identity("192.0.2.7", "ip")
    assert identity(Options(), arrival(), wanted="user") == Identity("192.0.2.7", "ip")


def test_who_has_no_identity_is_whom_the_options_name():
    nobody = Identity("nobody", "user")
    assert identity(Options(), arrival(peer=None)) is None
    assert identity(Options(anonymous=nobody), arrival(peer=None)) == nobody
    assert identity(Options(anonymous=nobody), arrival(peer="testclient"), wanted="ip") == nobody


def test_a_user_is_not_looked_up_for_an_identity_that_was_given():
    def fails():
        raise AssertionError

    arrived = arrival()._replace(user=fails)
    assert identity(Options(), arrived, given=Identity("t1"))


def test_something_else_in_place_of_an_identity_is_an_error_of_the_function():
    with pytest.raises(TypeError, match="identify must return an Identity or None, not str"):
        identity(Options(), arrival(), given="alice")


@pytest.mark.parametrize(
    "given", [Identity(""), Identity("", "api_key"), Identity("no address", "ip")]
)
def test_who_names_nobody_is_counted_as_without_a_name_and_not_let_through(given):
    assert identity(Options(), arrival(), given=given) == Identity("192.0.2.7", "ip")
    assert identity(Options(), arrival(peer=None), given=given) is None
