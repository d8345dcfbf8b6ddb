"""Both forms of a method's path, by both kinds of client."""

import asyncio

import grpc

from ratelimitd.services.methods import ROLES
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.rpc.node import check

OURS = [path for path in ROLES if path.startswith("/ratelimiter.v1.")]


async def test_a_method_answers_alike_with_the_package_and_without(node):
    for path in OURS:
        with_package = await node.outcome(path, b"")
        assert with_package[0] in {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}, path
        without = await node.outcome(path.replace("ratelimiter.v1.", ""), b"")
        assert without == with_package, path


async def test_a_blocking_client_gets_the_same_answer_as_an_asyncio_one(node):
    await node.rule()
    peek = check(peek=True)

    def ask() -> pb.RateLimitResponse:
        with grpc.insecure_channel(node.address) as channel:
            method = channel.unary_unary(
                "/RateLimiter/CheckRateLimit",
                pb.RateLimitRequest.SerializeToString,
                pb.RateLimitResponse.FromString,
            )
            return method(peek, timeout=10)

    assert await asyncio.to_thread(ask) == await node.checks.CheckRateLimit(peek)


async def test_an_unknown_method_is_unimplemented_and_counted(node):
    for path in ("/RateLimiter/Nope", "/ratelimiter.v2.RateLimiter/CheckRateLimit"):
        assert (await node.outcome(path, b""))[0] is grpc.StatusCode.UNIMPLEMENTED
    assert node.stats.errors_by_transport == {"unknown_method": 2}
