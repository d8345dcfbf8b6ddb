"""The interceptor for gRPC servers with threads, and the form in which both interceptors know calls."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from ratelimitd_client import Check, RateLimiterClient
from ratelimitd_client.decision import Decision, LimitStatus, Reason
from ratelimitd_client.fail_open import STATUS_KEY
from ratelimitd_client.middleware import Identity, Options
from ratelimitd_client.middleware.grpc_server import (
    Call,
    RateLimitInterceptor,
    behaviour_of,
    info_of,
    peer_of,
    status_of,
    with_behaviour,
)
from ratelimitd_client.testing import AsyncFakeRateLimiter, FakeRateLimiter
from tests.client.middleware.grpc_shop import (
    BLOCKING,
    EXEMPT,
    LIST,
    SERVICE,
    SUM,
    TALK,
    UNARY,
    RequestId,
    ask,
    error_details,
    service_of,
)

DENIED = grpc.StatusCode.RESOURCE_EXHAUSTED


@contextmanager
def shop(limiter, options=None, address="127.0.0.1:0", before=()):
    """A channel to a server with the interceptor, behind others."""
    interceptors = [*before, RateLimitInterceptor(limiter, options)]
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads, interceptors=interceptors)
        server.add_generic_rpc_handlers([service_of(BLOCKING)])
        port = server.add_insecure_port(address)
        server.start()
        try:
            with grpc.insecure_channel(address.replace(":0", f":{port}")) as channel:
                yield channel
        finally:
            server.stop(None).wait()


@pytest.fixture
def limiter():
    limiter = FakeRateLimiter()
    limiter.limit("*", "ip", limit=1, window_seconds=60)
    return limiter


@pytest.mark.parametrize(
    ("method", "answers"),
    [(UNARY, [b"x"]), (LIST, [b"x", b"x"]), (SUM, [b"xx"]), (TALK, [b"x", b"x"])],
)
def test_calls_of_every_kind_are_let_through_until_the_limit(limiter, method, answers):
    with shop(limiter) as channel:
        given, code, _, metadata = ask(channel, method)
        assert (given, code) == (answers, grpc.StatusCode.OK)
        assert metadata == {
            "ratelimit": '"default";r=0;t=60',
            "ratelimit-policy": '"default";q=1;w=60',
        }
        given, code, details, metadata = ask(channel, method)
    assert (given, code) == ([], DENIED)
    assert details == "Too many requests. Try again in 60 s."
    assert metadata["retry-after"] == "60"
    assert error_details(code, details, metadata) == (60, [("", "limit default: 1 in 60 s")])
    assert limiter.checks == [Check("127.0.0.1", "ip", method)] * 2


def test_a_handler_may_set_metadata_of_its_own(limiter):
    with shop(limiter) as channel:
        assert ask(channel, UNARY, b"own")[3] == {"own": "yes"}


def test_metadata_of_interceptors_before_it_stays(limiter):
    with shop(limiter, before=[RequestId()]) as channel:
        metadata = ask(channel, UNARY)[3]
    assert (metadata["x-request-id"], metadata["ratelimit"]) == ("7", '"default";r=0;t=60')


def test_a_mark_on_a_handler_is_heeded_and_what_is_no_method_is_not_checked(limiter):
    with shop(limiter) as channel:
        assert ask(channel, EXEMPT)[0] == [b"x"]
        assert ask(channel, f"/{SERVICE}/Nothing")[1] is grpc.StatusCode.UNIMPLEMENTED
    assert limiter.checks == []


def test_an_api_key_comes_in_the_metadata(limiter):
    with shop(limiter, Options(api_key_header="X-API-Key")) as channel:
        ask(channel, UNARY, metadata=[("x-api-key", "k")])
        ask(channel, UNARY)
    assert limiter.checks == [Check("k", "api_key", UNARY), Check("127.0.0.1", "ip", UNARY)]


def test_functions_are_given_the_call(limiter):
    def identify(call):
        assert call.context.peer().startswith("ipv4:")
        return Identity(f"{call.method} {call.peer.partition(':')[0]}")

    def identities(call):
        return {"tenant": "".join(call.header("x-tenant"))}

    with shop(limiter, Options(identify=identify, identities=identities)) as channel:
        ask(channel, UNARY, metadata=[("x-tenant", "acme")])
        ask(channel, UNARY)
    assert {check.identifier for check in limiter.checks} == {f"{UNARY} 127.0.0.1"}
    assert [check.also for check in limiter.checks] == [{"tenant": "acme"}, {}]


def test_a_call_that_cannot_be_checked_is_unavailable_where_that_is_chosen(limiter):
    limiter.available = False
    with shop(limiter, Options(on_unavailable="deny")) as channel:
        given, code, details, metadata = ask(channel, LIST)
    assert (given, code) == ([], grpc.StatusCode.UNAVAILABLE)
    assert details == "Temporarily unavailable. Try again in 1 s."
    assert metadata["retry-after"] == "1"
    assert error_details(code, details, metadata) == (1, [])


def test_a_denial_names_each_limit_that_was_exceeded_and_no_identifier():
    limit = LimitStatus("id", "burst", "user", False, 0, 5, 3, 10, 1, observed=False)
    limits = (
        limit,
        limit._replace(name="day", identifier_type="tenant", limit=500, window_seconds=86_400),
        limit._replace(name="calm", allowed=True),
        limit._replace(name="candidate", observed=True),
    )
    denied = Decision(False, 0, 5, 3, Reason.LIMIT_EXCEEDED, 10, 1, "id", limits=limits)
    for retry_after_s, delay_s in ((3, 3), (0, None)):
        status = status_of(denied._replace(retry_after_seconds=retry_after_s), DENIED, "no")
        found = error_details(DENIED, "no", {STATUS_KEY: status.SerializeToString()})
        assert found == (
            delay_s,
            [("user", "limit burst: 10 in 1 s"), ("tenant", "limit day: 500 in 86400 s")],
        )


def test_a_check_that_no_delay_makes_pass_is_given_none(limiter):
    with shop(limiter, Options(cost=2)) as channel:
        _, code, details, metadata = ask(channel, UNARY)
    assert code is DENIED
    assert error_details(code, details, metadata) == (None, [("", "limit default: 1 in 60 s")])


@pytest.mark.parametrize(("observed", "delay_s"), [(False, None), (True, 9)])
def test_a_cost_above_one_of_several_limits_has_no_delay_of_another(observed, delay_s):
    day = LimitStatus("id", "day", "user", False, 0, 9, 9, 10, 86_400, observed=False)
    burst = day._replace(name="burst", observed=observed, reason=Reason.COST_EXCEEDS_LIMIT)
    denied = Decision(False, 0, 9, 9, Reason.LIMIT_EXCEEDED, 10, 86_400, "id", limits=(day, burst))
    status = status_of(denied, DENIED, "no")
    found = error_details(DENIED, "no", {STATUS_KEY: status.SerializeToString()})
    assert found[0] == delay_s


def test_a_proxy_on_a_unix_socket_says_for_whom_it_calls(limiter, tmp_path_factory):
    address = f"unix:{tmp_path_factory.mktemp('s')}/s"
    with shop(limiter, Options(trusted_proxies=["unix"]), address) as channel:
        ask(channel, UNARY, metadata=[("x-forwarded-for", "203.0.113.9")])
    assert limiter.checks == [Check("203.0.113.9", "ip", UNARY)]


def test_without_the_service_or_a_rule_calls_pass_and_are_told_nothing(limiter):
    limiter.available = False
    with shop(limiter) as channel:
        assert [ask(channel, UNARY)[1:] for _ in range(2)] == [(grpc.StatusCode.OK, "", {})] * 2


def test_a_real_node_is_asked(real_node):
    options = Options(identify=lambda call: Identity("threads"), endpoint=lambda call: "/five")
    with (
        RateLimiterClient(real_node.grpc_address, timeout_s=30) as limiter,
        shop(limiter, options) as channel,
    ):
        codes = [ask(channel, method)[1] for method in (UNARY, LIST, SUM, TALK, UNARY, UNARY)]
    assert codes == [grpc.StatusCode.OK] * 5 + [DENIED]


def test_a_limiter_for_asyncio_is_refused():
    with pytest.raises(TypeError, match="limiter"):
        RateLimitInterceptor(AsyncFakeRateLimiter())


def test_a_coroutine_that_says_who_it_is_is_refused():
    async def identify(call):
        """Nobody would wait for it."""

    with pytest.raises(TypeError, match="identify must not be"):
        RateLimitInterceptor(FakeRateLimiter(), Options(identify=identify))


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("ipv4:192.0.2.7:40000", "192.0.2.7:40000"),
        ("ipv6:[2001:db8::1]:40000", "[2001:db8::1]:40000"),
        ("ipv6:%5B2001:db8::1%5D:40000", "[2001:db8::1]:40000"),
        ("unix:", None),
        ("unix:/run/shop.sock", None),
        ("", None),
    ],
)
def test_a_peer_is_its_address(text, address):
    assert peer_of(text) == address


def test_a_call_has_the_metadata_that_is_text():
    call = Call("/shop.Orders/Get", [("k", "a"), ("k-bin", b"b"), ("k", "c")], "192.0.2.7:1", None)
    assert call.header("k") == ["a", "c"]
    assert call.header("k-bin") == []


def test_a_call_arrives_under_its_full_name_without_a_user():
    call = Call("/shop.Orders/Get", (), None, None)
    info = info_of(call, print)
    assert (info.method, info.route, info.view) == ("POST", "/shop.Orders/Get", print)
    assert info.user() is None
    assert info.peer is None


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_unary", "stream_stream"])
def test_a_handler_keeps_its_kind_and_how_it_reads_and_writes(kind):
    given = getattr(grpc, f"{kind}_rpc_method_handler")(print, bytes, bytearray)
    assert behaviour_of(given) is print
    other = with_behaviour(given, repr)
    assert getattr(other, kind) is repr
    assert (other.request_streaming, other.response_streaming) == (
        given.request_streaming,
        given.response_streaming,
    )
    assert (other.request_deserializer, other.response_serializer) == (bytes, bytearray)
