"""The road of a request: whatever goes wrong lets it through, unless the user chose to see it."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratelimitd_client import Check
from ratelimitd_client.middleware import Identity, Options, limited
from ratelimitd_client.middleware.arrival import RequestInfo
from ratelimitd_client.middleware.guard import Guard
from ratelimitd_client.testing import AsyncFakeRateLimiter, FakeRateLimiter, ManualClock

ARRIVAL = RequestInfo("GET", "/orders/{id}", None, lambda: None, "192.0.2.7", lambda name: [])
CHECK = Check("192.0.2.7", "ip", "/orders/{id}")


@pytest.fixture(params=["blocking", "asyncio"])
def decide(request):
    """Asks a guard about a request; returns the decision and the checks that were made."""

    async def decided(options=None, arrival=ARRIVAL, *, limiter=None, guard=None):
        guard = guard or Guard(options, clock=ManualClock())
        if request.param == "blocking":
            limiter = limiter or FakeRateLimiter()
            return guard.decide(limiter, "request", arrival), limiter.checks
        limiter = limiter or AsyncFakeRateLimiter()
        return await guard.decide_async(limiter, "request", arrival), limiter.checks

    decided.kind = request.param
    return decided


async def test_a_request_is_checked_for_its_identity_and_route(decide):
    decision, checks = await decide()
    assert decision.allowed
    assert checks == [CHECK]


def test_options_that_are_something_else_are_refused():
    with pytest.raises(TypeError, match=r"options must be Options\(…\), not dict"):
        Guard({"exempt": ["/healthz"]})


async def test_cost_and_type_are_those_of_the_view(decide):
    view = limited(cost=3, identifier_type="ip")(lambda: None)
    arrival = ARRIVAL._replace(view=view, user=lambda: "alice")
    assert (await decide(arrival=arrival))[1] == [Check("192.0.2.7", "ip", "/orders/{id}", 3)]


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
    assert await decide(arrival=ARRIVAL._replace(peer=None)) == (None, [])
    assert "neither user nor key nor address" in caplog.text


async def test_a_request_without_identity_is_counted_for_whom_the_options_name(decide, caplog):
    options = Options(anonymous=Identity("nobody"))
    _, checks = await decide(options, ARRIVAL._replace(peer=None))
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
    arrival = ARRIVAL._replace(user=raises)
    assert await decide(arrival=arrival) == (None, [])
    with pytest.raises(KeyError):
        await decide(Options(on_error="raise"), arrival)


async def test_an_error_of_the_limiter_never_breaks_a_request(decide, caplog):
    class Broken:
        checks = ()

        def check(self, *_, **__):
            raise RuntimeError

    assert await decide(Options(on_error="raise"), limiter=Broken()) == (None, ())
    assert "the limiter raised an error (RuntimeError" in caplog.text


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
    arrival = ARRIVAL._replace(method=value, peer=peer, header=lambda name: [value])
    decision, checks = await decide(options, arrival)
    assert decision is not None
    assert len(checks) == 1


async def test_a_denial_becomes_an_answer_and_a_permission_headers(decide):
    guard = Guard(Options(), clock=ManualClock())
    limiter = FakeRateLimiter() if decide.kind == "blocking" else AsyncFakeRateLimiter()
    limiter.limit("/orders/{id}", "ip", 1)
    allowed, _ = await decide(limiter=limiter, guard=guard)
    assert guard.headers(allowed)["RateLimit"] == '"default";r=0;t=60'
    denied, _ = await decide(limiter=limiter, guard=guard)
    assert guard.denied(denied, ["application/json"]).status == 429


async def test_a_text_that_cannot_be_made_leaves_the_usual_one(caplog):
    limiter = FakeRateLimiter()
    limiter.limit("/orders/{id}", "ip", 1)
    guard = Guard(Options(denied_text=raises, cost=2))
    decision = guard.decide(limiter, "request", ARRIVAL)
    assert guard.denied(decision).body == b"Too many requests. Try again in 60 s.\n"
    assert "denied with the usual text: the function denied_text failed (KeyError" in caplog.text
    with pytest.raises(KeyError):
        Guard(Options(denied_text=raises, on_error="raise")).denied(decision)


async def test_for_asyncio_a_user_is_awaited_only_where_one_is_asked_for():
    asked = []

    async def load_user():
        asked.append("loaded")
        return "alice"

    limiter = AsyncFakeRateLimiter()
    arrived = ARRIVAL._replace(load_user=load_user)
    await Guard(Options(exempt={arrived.route})).decide_async(limiter, None, arrived)
    given = Identity("t1", "api_key")
    await Guard(Options(identify=lambda _: given)).decide_async(limiter, None, arrived)
    assert asked == []
    await Guard(Options(identify=lambda _: None)).decide_async(limiter, None, arrived)
    assert asked == ["loaded"]
    assert [check.identifier for check in limiter.checks] == ["t1", "alice"]


async def test_for_asyncio_the_function_may_be_a_coroutine():
    async def identify(request):
        return Identity(request)

    limiter = AsyncFakeRateLimiter()
    await Guard(Options(identify=identify)).decide_async(limiter, "alice", ARRIVAL)
    assert limiter.checks == [Check("alice", "user", "/orders/{id}")]


async def test_for_asyncio_a_coroutine_that_fails_follows_the_users_choice():
    async def identify(request):
        raise LookupError

    limiter = AsyncFakeRateLimiter()
    guard = Guard(Options(identify=identify))
    assert await guard.decide_async(limiter, "alice", ARRIVAL) is None
    with pytest.raises(LookupError):
        await Guard(Options(identify=identify, on_error="raise")).decide_async(
            limiter, "alice", ARRIVAL
        )
