"""The interceptor for grpc.aio, in a real server with handlers of every kind, called over a real channel."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from ratelimitd_client import AsyncRateLimiterClient, Check
from ratelimitd_client.middleware import Identity, Options
from ratelimitd_client.middleware.grpc_aio import RateLimitInterceptor
from ratelimitd_client.testing import AsyncFakeRateLimiter, FakeRateLimiter
from tests.client.middleware.grpc_shop import (
    ASYNCHRONOUS,
    BLOCKING,
    EXEMPT,
    LIST,
    SERVICE,
    SUM,
    TALK,
    UNARY,
    WRITING,
    RequestIdAsync,
    ask,
    error_details,
    service_of,
)

DENIED = grpc.StatusCode.RESOURCE_EXHAUSTED


@asynccontextmanager
async def shop(limiter, functions=ASYNCHRONOUS, options=None, before=()):
    """Asks a server with the interceptor, behind others, from a thread beside its loop."""
    server = grpc.aio.server(interceptors=[*before, RateLimitInterceptor(limiter, options)])
    server.add_generic_rpc_handlers([service_of(functions)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:

            def asked(*arguments, **metadata):
                return asyncio.to_thread(ask, channel, *arguments, **metadata)

            yield asked
    finally:
        await server.stop(None)


@pytest.fixture
def limiter():
    limiter = AsyncFakeRateLimiter()
    limiter.limit("*", "ip", limit=1, window_seconds=60)
    return limiter


@pytest.mark.parametrize("functions", [ASYNCHRONOUS, WRITING, BLOCKING])
async def test_calls_of_every_kind_are_let_through_until_the_limit(limiter, functions):
    expected = {UNARY: [b"x"], LIST: [b"x", b"x"], SUM: [b"xx"], TALK: [b"x", b"x"]}
    async with shop(limiter, functions) as asked:
        for method, answers in expected.items():
            given, code, _, metadata = await asked(method)
            assert (given, code) == (answers, grpc.StatusCode.OK)
            assert metadata["ratelimit"] == '"default";r=0;t=60'
            given, code, details, metadata = await asked(method)
            assert (given, code) == ([], DENIED)
            assert details == "Too many requests. Try again in 60 s."
            assert metadata["retry-after"] == "60"
            assert error_details(code, details, metadata) == (
                60,
                [("", "limit default: 1 in 60 s")],
            )
    assert limiter.checks == [
        Check("127.0.0.1", "ip", method) for method in expected for _ in range(2)
    ]


async def test_a_mark_on_a_handler_is_heeded_and_what_is_no_method_is_not_checked(limiter):
    async with shop(limiter) as asked:
        assert (await asked(EXEMPT))[0] == [b"x"]
        assert (await asked(f"/{SERVICE}/Nothing"))[1] is grpc.StatusCode.UNIMPLEMENTED
    assert limiter.checks == []


async def test_a_proxy_is_trusted_by_its_address_and_says_for_whom_it_calls(limiter):
    options = Options(trusted_proxies=["127.0.0.0/8"], api_key_header="x-api-key")
    async with shop(limiter, options=options) as asked:
        await asked(UNARY, metadata=[("x-forwarded-for", "203.0.113.9")])
        await asked(UNARY, metadata=[("x-api-key", "k")])
    assert limiter.checks == [Check("203.0.113.9", "ip", UNARY), Check("k", "api_key", UNARY)]


async def test_a_handler_may_set_metadata_of_its_own(limiter):
    async with shop(limiter) as asked:
        assert (await asked(UNARY, b"own"))[3] == {"own": "yes"}


async def test_metadata_of_interceptors_before_it_stays(limiter):
    async with shop(limiter, before=[RequestIdAsync()]) as asked:
        metadata = (await asked(UNARY))[3]
    assert (metadata["x-request-id"], metadata["ratelimit"]) == ("7", '"default";r=0;t=60')


async def test_without_the_service_calls_pass_and_are_told_nothing(limiter):
    limiter.available = False
    async with shop(limiter) as asked:
        assert (await asked(UNARY))[1:] == (grpc.StatusCode.OK, "", {})


@pytest.mark.parametrize("functions", [ASYNCHRONOUS, BLOCKING])
async def test_a_call_that_cannot_be_checked_is_unavailable_where_that_is_chosen(
    limiter, functions
):
    limiter.available = False
    async with shop(limiter, functions, Options(on_unavailable="deny")) as asked:
        given, code, _, metadata = await asked(UNARY)
    assert (given, code) == ([], grpc.StatusCode.UNAVAILABLE)
    assert metadata["retry-after"] == "1"


async def test_a_function_says_who_else_a_call_is_counted_for(limiter):
    async def identities(call):
        return {"tenant": "".join(call.header("x-tenant"))}

    for functions in (ASYNCHRONOUS, BLOCKING):
        async with shop(limiter, functions, Options(identities=identities)) as asked:
            await asked(UNARY, metadata=[("x-tenant", "acme")])
            await asked(LIST)
    assert [check.also for check in limiter.checks] == [{"tenant": "acme"}, {}] * 2


async def test_a_real_node_is_asked(real_node):
    options = Options(identify=lambda call: Identity("asyncio"), endpoint=lambda call: "/five")
    async with (
        AsyncRateLimiterClient(real_node.grpc_address, timeout_s=30) as limiter,
        shop(limiter, options=options) as asked,
    ):
        codes = [(await asked(method))[1] for method in (UNARY, LIST, SUM, TALK, UNARY, UNARY)]
    assert codes == [grpc.StatusCode.OK] * 5 + [DENIED]


def test_a_limiter_that_blocks_is_refused():
    with pytest.raises(TypeError, match="limiter"):
        RateLimitInterceptor(FakeRateLimiter())
