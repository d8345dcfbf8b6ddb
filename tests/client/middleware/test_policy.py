"""How a request is treated: what it is charged, the check, and what its caller is answered."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratelimitd_client import (
    AsyncRateLimiterClient,
    Check,
    Counts,
    Decision,
    RateLimiterClient,
    Reason,
)
from ratelimitd_client.decision import unchecked
from ratelimitd_client.middleware import Identity, Options, limited
from ratelimitd_client.middleware.policy import Charge, Policy, require_kind
from ratelimitd_client.middleware.request_info import RequestInfo
from ratelimitd_client.testing import AsyncFakeRateLimiter, FakeRateLimiter, ManualClock

INFO = RequestInfo("GET", "/orders/{id}", None, lambda: None, "192.0.2.7", lambda name: [])
CHECK = Check("192.0.2.7", "ip", "/orders/{id}")


@pytest.fixture(params=[FakeRateLimiter, AsyncFakeRateLimiter], ids=["blocking", "asyncio"])
def decide(request):
    """Asks a policy about a request; returns the decision and the checks that were made."""

    async def decided(options=None, info=INFO, *, limiter=None, policy=None):
        policy = policy or Policy(options, clock=ManualClock())
        limiter = limiter or request.param()
        if request.param is FakeRateLimiter:
            return policy.decide(limiter, "request", info), limiter.checks
        return await policy.decide_async(limiter, "request", info), limiter.checks

    decided.fake = request.param
    return decided


async def test_a_request_is_checked_for_its_identity_and_route(decide):
    decision, checks = await decide()
    assert decision.allowed
    assert checks == [CHECK]


def test_options_that_are_something_else_are_refused():
    with pytest.raises(TypeError, match=r"options must be Options\(…\), not dict"):
        Policy({"exempt": ["/healthz"]})


async def test_cost_and_type_are_those_of_the_view(decide):
    view = limited(cost=3, identifier_type="ip")(lambda: None)
    info = INFO._replace(view=view, user=lambda: "alice")
    assert (await decide(info=info))[1] == [Check("192.0.2.7", "ip", "/orders/{id}", 3)]


async def test_what_is_exempt_asks_nobody_and_calls_no_function(decide):
    def fails(request):
        raise AssertionError

    options = Options(identify=fails, exempt=["/orders/{id}"], on_error="raise")
    assert await decide(options) == (None, [])


async def test_a_function_says_who_it_is_or_leaves_it_to_the_rest(decide):
    options = Options(identify=lambda request: Identity(request, "api_key"))
    assert (await decide(options))[1] == [Check("request", "api_key", "/orders/{id}")]
    assert (await decide(Options(identify=lambda request: None)))[1] == [CHECK]


async def test_a_request_without_identity_is_let_through_with_a_warning(decide, caplog):
    assert await decide(info=INFO._replace(peer=None)) == (None, [])
    assert "neither user nor key nor address" in caplog.text


async def test_a_request_without_identity_is_counted_for_whom_the_options_name(decide, caplog):
    options = Options(anonymous=Identity("nobody"))
    _, checks = await decide(options, INFO._replace(peer=None))
    assert checks == [Check("nobody", "user", "/orders/{id}")]
    assert not caplog.records


def raises(*_):
    return {}["alice"]


@pytest.mark.parametrize(
    "options",
    [
        {"identify": raises},
        {"identify": lambda request: "alice"},
        {"endpoint": raises},
        {"cost": raises},
        {"cost": lambda request: -1},
    ],
    ids=["identify", "no-identity", "endpoint", "cost", "no-cost"],
)
async def test_an_exception_of_a_function_follows_the_users_choice(decide, caplog, options):
    assert await decide(Options(**options)) == (None, [])
    assert "a function of the options" in caplog.text
    assert "alice" not in caplog.text
    with pytest.raises((KeyError, TypeError, ValueError)):
        await decide(Options(**options, on_error="raise"))


async def test_a_user_who_cannot_be_told_follows_it_as_well(decide):
    info = INFO._replace(user=raises)
    assert await decide(info=info) == (None, [])
    with pytest.raises(KeyError):
        await decide(Options(on_error="raise"), info)


SEVEN = {f"t{number}": "x" for number in range(7)}


@pytest.mark.parametrize(
    ("named", "also"),
    [
        ({"tenant": "acme", "model": "m1"}, {"tenant": "acme", "model": "m1"}),
        ([Identity("acme", "tenant"), Identity("m1", "model")], {"tenant": "acme", "model": "m1"}),
        ((Identity("acme", "tenant"), Identity("other", "tenant")), {"tenant": "acme"}),
        ({"ip": "198.51.100.1", "tenant": "acme"}, {"tenant": "acme"}),
        ({"tenant": "", "model": None, "user": "alice"}, {"user": "alice"}),
        ({"tenant": "k" * 300}, {"tenant": Identity("k" * 300, "tenant").identifier}),
        (SEVEN, SEVEN),
        ({}, {}),
        ([], {}),
        (None, {}),
    ],
    ids=[
        "mapping", "objects", "twice", "the-first-again", "empty", "long", "seven", "none",
        "no-object", "nothing",
    ],
)  # fmt: skip
async def test_a_function_says_who_else_a_request_is_counted_for(decide, caplog, named, also):
    _, checks = await decide(Options(identities=lambda request: named))
    assert checks == [Check("192.0.2.7", "ip", "/orders/{id}", also=also)]
    assert not caplog.records


@pytest.mark.parametrize(
    "identities",
    [
        raises,
        lambda request: "alice",
        lambda request: 7,
        lambda request: [("tenant", "alice")],
        lambda request: {"tenant": 7},
        lambda request: {"Tenant": "alice"},
        lambda request: {"ip+user": "alice"},
        lambda request: {"all": "alice"},
        lambda request: {7: "alice"},
        lambda request: {**SEVEN, "tenant": "alice"},
    ],
    ids=[
        "raises", "text", "number", "pairs", "no-text", "no-type", "a-product", "everybody",
        "no-name", "eight",
    ],
)  # fmt: skip
async def test_a_mistake_about_others_leaves_the_first_identity_its_limit(
    decide, caplog, identities
):
    _, checks = await decide(Options(identities=identities))
    assert checks == [CHECK]
    assert "counted for its first identity only" in caplog.text
    assert "alice" not in caplog.text
    with pytest.raises((KeyError, TypeError, ValueError)):
        await decide(Options(identities=identities, on_error="raise"))


async def test_a_request_without_identity_is_counted_for_the_others_that_it_has(decide, caplog):
    options = Options(identities=lambda request: {"tenant": "acme", "model": "m1"})
    _, checks = await decide(options, INFO._replace(peer=None))
    assert checks == [Check("acme", "tenant", "/orders/{id}", also={"model": "m1"})]
    assert not caplog.records


async def test_a_view_says_who_else_its_requests_are_counted_for(decide):
    view = limited(identities=lambda request: {"tenant": request})(lambda: None)
    options = Options(identities=raises, on_error="raise")
    _, checks = await decide(options, INFO._replace(view=view))
    assert checks == [Check("192.0.2.7", "ip", "/orders/{id}", also={"tenant": "request"})]


def test_a_check_that_the_node_refuses_is_denied_with_a_warning(caplog):
    error = "also[0].identifier_type: must be one of user, ip, api_key"
    refused = Decision(False, 0, 0, 0, Reason.INVALID_REQUEST, error=error)
    assert Policy(clock=ManualClock()).denied(refused).status == 429
    assert error in caplog.text


async def test_every_identity_of_a_request_is_charged(decide):
    limiter = decide.fake()
    limiter.limit("/orders/{id}", "tenant", 1)
    policy = Policy(Options(identities=lambda request: {"tenant": "acme"}), clock=ManualClock())
    allowed, _ = await decide(limiter=limiter, policy=policy)
    other = INFO._replace(peer="192.0.2.8")
    denied, _ = await decide(info=other, limiter=limiter, policy=policy)
    assert (allowed.allowed, denied.allowed) == (True, False)


class Broken:
    """A limiter of an application's own, of which each check raises."""

    checks = ()

    def check(self, *_, **__):
        raise RuntimeError


async def test_an_error_of_the_limiter_never_breaks_a_request(decide, caplog):
    assert await decide(Options(on_error="raise"), limiter=Broken()) == (None, ())
    assert "the limiter raised an error (RuntimeError" in caplog.text


@pytest.mark.parametrize("hold", [None, 2], ids=["check", "hold"])
@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        (("allow", None, None), True),
        (("deny", None, None), False),
        (("allow", "deny", None), False),
        (("deny", "allow", None), True),
        (("allow", "deny", "allow"), True),
        (("deny", "allow", "deny"), False),
    ],
)
async def test_a_view_goes_before_the_options_and_these_before_the_client(
    decide, choices, expected, hold
):
    client, option, mark = choices
    limiter = decide.fake(on_unavailable=client)
    limiter.available = False
    info = INFO._replace(view=limited(on_unavailable=mark, hold=hold)(lambda: None))
    policy = Policy(Options(on_unavailable=option), clock=ManualClock())
    if decide.fake is FakeRateLimiter:
        decision, held = policy.admit(limiter, "request", info)
    else:
        decision, held = await policy.admit_async(limiter, "request", info)
    assert decision.allowed is expected
    assert decision.reason is Reason.NO_ANSWER
    assert (held is None) == (hold is None)


async def test_an_error_of_the_limiter_denies_if_so_chosen(decide, caplog):
    limiter = Broken()
    limiter.on_unavailable = "allow"
    assert await decide(limiter=limiter) == (None, ())
    decision, _ = await decide(Options(on_unavailable="deny"), limiter=limiter)
    assert (decision.fail_closed, decision.error) == (True, "RuntimeError")
    assert "denied: the limiter raised an error (RuntimeError" in caplog.text
    limiter.on_unavailable = "deny"
    assert (await decide(limiter=limiter))[0].fail_closed


async def test_an_observer_is_told_what_the_middleware_makes_of_a_decision(decide):
    limiter, counts = decide.fake(), Counts()
    options = Options(observer=counts, on_unavailable="deny")
    await decide(options, limiter=limiter)
    limiter.available = False
    view = limited(on_unavailable="allow")(lambda: None)
    for info in (INFO, INFO._replace(view=view)):
        await decide(options, info, limiter=limiter)
    await decide(options, INFO._replace(view=limited(exempt=True)(lambda: None)), limiter=limiter)
    assert (counts.allowed, counts.unanswered) == (1, 2)
    assert (counts.let_through, counts.held_closed) == (1, 1)

    await decide(Options(observer=counts), limiter=Broken())
    assert (counts.unanswered, counts.let_through) == (3, 2)


CLOSED = unchecked(Reason.NOT_ASKED, "", 0.0, "deny")


def test_a_request_that_could_not_be_checked_is_answered_503_without_a_limit():
    text = "Temporarily unavailable. Try again in 1 s."
    for options in (Options(), Options(denied_text="Slow down."), Options(headers=False)):
        answer = Policy(options).denied(CLOSED)
        assert (answer.status, answer.text) == (503, text)
        assert set(answer.headers) == {"Content-Type", "Retry-After"}
    by_function = Options(denied_text=lambda decision: decision.reason)
    assert Policy(by_function).denied(CLOSED).text == "NOT_ASKED"


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=st.text(st.characters(exclude_categories=()), max_size=300),
    peer=st.sampled_from(["192.0.2.7", "10.0.0.1"]),
)
async def test_nothing_that_a_caller_sends_lets_it_through_unchecked(decide, value, peer):
    """(I9)."""
    options = Options(
        api_key_header="x-api-key", trusted_proxies=["10.0.0.1"], endpoint=lambda request: value
    )
    info = INFO._replace(method=value, peer=peer, header=lambda name: [value])
    decision, checks = await decide(options, info)
    assert decision is not None
    assert len(checks) == 1


async def test_a_text_that_cannot_be_made_leaves_the_usual_one(caplog):
    limiter = FakeRateLimiter()
    limiter.limit("/orders/{id}", "ip", 1)
    policy = Policy(Options(denied_text=raises, cost=2))
    decision = policy.decide(limiter, "request", INFO)
    assert policy.denied(decision).body == b"Too many requests. Try again in 60 s.\n"
    assert "denied with the default text: the function denied_text failed (KeyError" in caplog.text
    with pytest.raises(KeyError):
        Policy(Options(denied_text=raises, on_error="raise")).denied(decision)


async def test_for_asyncio_a_user_is_awaited_only_where_one_is_asked_for():
    asked = []

    async def load_user():
        asked.append("loaded")
        return "alice"

    limiter = AsyncFakeRateLimiter()
    given_info = INFO._replace(load_user=load_user)
    await Policy(Options(exempt={given_info.route})).decide_async(limiter, None, given_info)
    given = Identity("t1", "api_key")
    await Policy(Options(identify=lambda _: given)).decide_async(limiter, None, given_info)
    assert asked == []
    await Policy(Options(identify=lambda _: None)).decide_async(limiter, None, given_info)
    assert asked == ["loaded"]
    assert [check.identifier for check in limiter.checks] == ["t1", "alice"]


async def test_for_asyncio_the_functions_may_be_coroutines():
    async def identify(request):
        return Identity(request)

    async def identities(request):
        return {"tenant": f"of {request}"}

    limiter = AsyncFakeRateLimiter()
    policy = Policy(Options(identify=identify, identities=identities))
    await policy.decide_async(limiter, "alice", INFO)
    assert limiter.checks == [Check("alice", "user", "/orders/{id}", also={"tenant": "of alice"})]


async def test_for_asyncio_a_coroutine_that_fails_follows_the_users_choice():
    async def identify(request):
        raise LookupError

    limiter = AsyncFakeRateLimiter()
    policy = Policy(Options(identify=identify))
    assert await policy.decide_async(limiter, "alice", INFO) is None
    with pytest.raises(LookupError):
        await Policy(Options(identify=identify, on_error="raise")).decide_async(
            limiter, "alice", INFO
        )


def request_info(
    route="/orders/{id}", *, view=None, user=None, peer="192.0.2.7", method="GET", **headers
):
    lines = {name.replace("_", "-"): value for name, value in headers.items()}
    return RequestInfo(method, route, view, lambda: user, peer, lambda name: lines.get(name, []))


def charge(options, given_info, request=None):
    return Policy(options).charge(request, given_info)


def identity(options, given_info, *, given=None, preferred=None):
    return Policy(options).identity(given, given_info, preferred)


def view_with(**marks):
    return limited(**marks)(lambda: None)


def test_the_endpoint_is_the_template_of_the_route():
    assert charge(Options(), request_info()) == Charge("/orders/{id}", 1, None)


def test_the_method_can_be_part_of_the_endpoint():
    options = Options(with_method=True)
    assert charge(options, request_info(method="HEAD")).endpoint == "GET /orders/{id}"
    assert charge(options, request_info(method="X-1")).endpoint == "OTHER /orders/{id}"
    assert charge(options, request_info(None, method="X-1")).endpoint == "unmatched"


def test_what_no_route_matches_is_counted_under_one_name():
    assert charge(Options(), request_info(None)).endpoint == "unmatched"
    assert charge(Options(unmatched="other"), request_info(None)).endpoint == "other"
    assert charge(Options(unmatched=None), request_info(None)) is None


def test_a_function_may_name_the_endpoint_or_leave_it_to_the_route():
    options = Options(endpoint=lambda request: request, with_method=True)
    assert charge(options, request_info(), "own").endpoint == "own"
    assert charge(options, request_info(), None).endpoint == "GET /orders/{id}"
    assert (
        charge(options, request_info(view=view_with(endpoint="shared")), "own").endpoint == "shared"
    )


@pytest.mark.parametrize("endpoint", ["", "*", "/x" * 200, "a\nb", 42])
def test_an_endpoint_that_no_check_can_have_is_unmatched(endpoint):
    assert (
        charge(Options(endpoint=lambda request: endpoint), request_info()).endpoint == "unmatched"
    )


def test_what_is_exempt_is_not_checked():
    options = Options(exempt={"/health", "shared"}, with_method=True)
    assert charge(options, request_info("/health")) is None
    assert charge(options, request_info("/healthy")) is not None
    assert charge(options, request_info(view=view_with(endpoint="shared"))) is None
    assert charge(Options(), request_info(view=view_with(exempt=True))) is None


def test_what_is_counted_under_unmatched_may_be_exempt():
    assert charge(Options(exempt={"unmatched"}), request_info(None)) is None


def test_a_view_says_what_it_costs():
    options = Options(cost=2)
    assert charge(options, request_info()).cost == 2
    assert charge(options, request_info(view=view_with(cost=5))).cost == 5
    assert charge(options, request_info(view=view_with(cost=len)), "four").cost == 4
    assert charge(Options(cost=len), request_info(), "four").cost == 4


def test_what_costs_nothing_is_not_checked():
    assert charge(Options(cost=0), request_info()) is None
    assert charge(Options(cost=len), request_info(), "") is None


def test_a_cost_beyond_what_a_check_can_have_is_the_most_it_can():
    assert charge(Options(cost=int), request_info(), "9" * 20).cost == 2**31 - 1


@pytest.mark.parametrize(
    ("cost", "error"), [(-1, ValueError), ("1", TypeError), (None, TypeError), (True, TypeError)]
)
def test_a_cost_that_is_none_is_an_error_of_the_function(cost, error):
    with pytest.raises(error, match="cost must be"):
        charge(Options(cost=lambda request: cost), request_info())


def test_an_identity_is_looked_for_in_order():
    options = Options(api_key_header="X-API-Key")
    key = {"x_api_key": ["k1"]}
    given = Identity("t1", "user")
    assert identity(options, request_info(user="alice", **key), given=given) == given
    assert identity(options, request_info(user="alice", **key)) == Identity("alice", "user")
    assert identity(options, request_info(user="", **key)) == Identity("k1", "api_key")
    assert identity(options, request_info()) == Identity("192.0.2.7", "ip")


def test_a_header_with_a_key_counts_only_where_it_is_named_and_sent_once():
    assert identity(Options(), request_info(x_api_key=["k1"])) == Identity("192.0.2.7", "ip")
    options = Options(api_key_header="X-API-Key")
    for keys in ([""], [" "], ["k1", "k2"], ["k1,k2"]):
        assert identity(options, request_info(x_api_key=keys)) == Identity("192.0.2.7", "ip")


def test_an_address_in_a_header_counts_only_from_a_trusted_proxy():
    forged = request_info(x_forwarded_for=["203.0.113.9"])
    assert identity(Options(), forged) == Identity("192.0.2.7", "ip")
    trusting = Options(trusted_proxies=["192.0.2.7"])
    assert identity(trusting, forged) == Identity("203.0.113.9", "ip")
    other = Options(trusted_proxies=["192.0.2.7"], forwarded_header="CF-Connecting-IP")
    assert identity(other, forged) == Identity("192.0.2.7", "ip")
    assert identity(other, request_info(cf_connecting_ip=["2001:db8::7"])) == Identity(
        "2001:db8::", "ip"
    )


def test_a_view_may_ask_for_a_type_of_identity_and_has_the_usual_one_without():
    assert identity(Options(), request_info(user="alice"), preferred="ip") == Identity(
        "192.0.2.7", "ip"
    )
    assert identity(Options(), request_info(), preferred="user") == Identity("192.0.2.7", "ip")
    alice, key = request_info(user="alice"), Identity("k", "api_key")
    assert identity(Options(), alice, preferred="tenant") == Identity("alice")
    assert identity(Options(), alice, given=key, preferred="user") == Identity("alice")
    assert identity(Options(), alice, given=key, preferred="tenant") == key


def test_who_has_no_identity_is_whom_the_options_name():
    nobody = Identity("nobody", "user")
    assert identity(Options(), request_info(peer=None)) is None
    assert identity(Options(anonymous=nobody), request_info(peer=None)) == nobody
    assert (
        identity(Options(anonymous=nobody), request_info(peer="testclient"), preferred="ip")
        == nobody
    )


def test_a_user_is_not_looked_up_for_an_identity_that_was_given():
    def fails():
        raise AssertionError

    given_info = request_info()._replace(user=fails)
    assert identity(Options(), given_info, given=Identity("t1"))


def test_something_else_in_place_of_an_identity_is_an_error_of_the_function():
    with pytest.raises(TypeError, match="identify must return an Identity or None, not str"):
        identity(Options(), request_info(), given="alice")


@pytest.mark.parametrize(
    "given", [Identity(""), Identity("", "api_key"), Identity("no address", "ip")]
)
def test_who_names_nobody_is_counted_as_without_a_name_and_not_let_through(given):
    assert identity(Options(), request_info(), given=given) == Identity("192.0.2.7", "ip")
    assert identity(Options(), request_info(peer=None), given=given) is None


NOW_S = 1_700_006_400.0
DENIED = Decision(
    False, 0, int(NOW_S) + 60, 12, Reason.LIMIT_EXCEEDED, 5, 60, "r1", decided_at_s=NOW_S
)
ALLOWED = Decision(
    True, 4, int(NOW_S) + 60, 0, Reason.WITHIN_LIMIT, 5, 60, "r1", decided_at_s=NOW_S
)
UNLIMITED = Decision(True, 1, 0, 0, Reason.NO_RULE)
REFUSED = Decision(False, 0, 0, 0, Reason.INVALID_REQUEST)


def test_a_denial_is_a_429_with_a_text_and_the_headers_of_the_limit():
    assert Policy(Options()).denied(DENIED) == (
        429,
        {
            "Content-Type": "text/plain; charset=utf-8",
            "Retry-After": "12",
            "RateLimit-Policy": '"default";q=5;w=60',
            "RateLimit": '"default";r=0;t=12',
        },
        b"Too many requests. Try again in 12 s.\n",
        "Too many requests. Try again in 12 s.",
    )


@pytest.mark.parametrize(
    "accept", [["application/json"], ["text/html", "Application/Problem+JSON;q=0.5"]]
)
def test_it_is_json_for_those_that_ask_for_it(accept):
    _, headers, body, text = Policy(Options()).denied(DENIED, accept)
    assert headers["Content-Type"] == "application/json"
    assert json.loads(body) == {"detail": text}
    assert text == "Too many requests. Try again in 12 s."


def test_where_waiting_does_not_help_nothing_is_said_of_it():
    _, headers, body, _ = Policy(Options()).denied(REFUSED, ["*/*"])
    assert set(headers) == {"Content-Type"}
    assert body == b"Too many requests.\n"


@pytest.mark.parametrize(
    "text", ["Nie wieder, nächstes Mal.", lambda decision: f"{decision.limit} are enough."]
)
def test_the_text_can_be_ones_own(text):
    body = Policy(Options(denied_text=text)).denied(DENIED).body.decode()
    assert body == ("5 are enough.\n" if callable(text) else f"{text}\n")


def test_a_function_for_the_text_that_returns_none_is_at_fault():
    with pytest.raises(TypeError, match="denied_text must return text, not NoneType"):
        Policy(Options(denied_text=lambda _: None, on_error="raise")).denied(DENIED)


def test_an_allowed_request_is_told_of_the_limit_as_well():
    policy = Policy(Options(policy="users", x_ratelimit=True))
    assert policy.headers(ALLOWED) == {
        "RateLimit-Policy": '"users";q=5;w=60',
        "RateLimit": '"users";r=4;t=60',
        "X-RateLimit-Limit": "5",
        "X-RateLimit-Remaining": "4",
        "X-RateLimit-Reset": str(int(NOW_S) + 60),
    }
    assert policy.headers(UNLIMITED) == {}


def test_headers_follow_the_revision_of_the_options():
    assert Policy(Options(headers_revision="draft-7")).headers(ALLOWED) == {
        "RateLimit-Policy": "5;w=60",
        "RateLimit": "limit=5, remaining=4, reset=60",
    }
    with pytest.raises(ValueError, match="is one of draft-11, draft-7, draft-6"):
        Options(headers_revision="draft-12")


def test_without_the_headers_of_the_limit_a_denial_still_says_when_to_come_back():
    policy = Policy(Options(headers=False))
    assert policy.headers(ALLOWED) == {}
    assert policy.headers(DENIED) == {"Retry-After": "12"}
    assert policy.headers(REFUSED) == {}


def test_one_warning_a_second_counts_those_that_were_left_out(caplog):
    clock = ManualClock()
    policy = Policy(clock=clock)
    for _ in range(3):
        policy.warn("broken")
    clock.advance(1)
    policy.warn("broken")
    assert [record.getMessage() for record in caplog.records] == [
        "broken; 1 such requests since the last warning",
        "broken; 3 such requests since the last warning",
    ]
    assert {record.name for record in caplog.records} == {"ratelimitd_client.middleware"}


def test_an_exception_is_told_by_its_type_and_place_but_not_by_what_it_says(caplog):
    try:
        {}["alice"]
    except KeyError as error:
        Policy(clock=ManualClock()).warn("broken", error)
    [record] = caplog.records
    assert f"(KeyError, {__file__}:" in record.getMessage()
    assert "alice" not in caplog.text


def test_an_exception_that_was_never_raised_has_no_place(caplog):
    Policy(clock=ManualClock()).warn("broken", KeyError("alice"))
    assert caplog.records[0].getMessage().startswith("broken (KeyError); ")


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
    for name in ("identify", "identities"):
        options = Options(**{name: coroutine})
        require_kind(AsyncFakeRateLimiter(), options, asynchronous=True)
        with pytest.raises(TypeError, match=f"{name} must not be a coroutine function"):
            require_kind(FakeRateLimiter(), options, asynchronous=False)


def test_a_class_is_no_limiter():
    with pytest.raises(TypeError, match="not a class"):
        require_kind(AsyncRateLimiterClient, asynchronous=True)


def test_what_has_no_check_is_no_limiter():
    with pytest.raises(TypeError, match="not str"):
        require_kind("127.0.0.1:9090", asynchronous=False)
