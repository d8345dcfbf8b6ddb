"""Reflection with the library's client, and with v1's path."""

import asyncio

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

SERVICES = [
    "envoy.service.ratelimit.v3.RateLimitService",
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
    "ratelimiter.v1.RateLimiter",
    "ratelimiter.v1.RateLimiterConfig",
    "ratelimiter.v1.RateLimiterHealth",
    "ratelimiter.v1.RateLimiterHolds",
    "ratelimiter.v1.RateLimiterPlans",
]


async def test_a_client_without_schemas_finds_every_service_and_its_messages(node):
    def explore():
        with grpc.insecure_channel(node.address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            pool = DescriptorPool(database)
            return {
                name: [method.input_type.full_name for method in pool.FindServiceByName(name).methods]
                for name in database.get_services()
            }  # fmt: skip

    found = await asyncio.to_thread(explore)
    assert sorted(found) == SERVICES
    assert found["ratelimiter.v1.RateLimiter"] == [
        "ratelimiter.v1.RateLimitRequest",
        "ratelimiter.v1.BatchRateLimitRequest",
    ]


async def test_both_versions_answer_alike(node):
    request = reflection_pb2.ServerReflectionRequest(
        file_containing_symbol="ratelimiter.v1.RateLimiterConfig"
    )
    stub = reflection_pb2_grpc.ServerReflectionStub(node.channel)
    v1 = node.channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
    [alpha_answer] = [answer async for answer in stub.ServerReflectionInfo(iter([request]))]
    [v1_answer] = [answer async for answer in v1(iter([request.SerializeToString()]))]
    assert reflection_pb2.ServerReflectionResponse.FromString(v1_answer) == alpha_answer
    assert len(alpha_answer.file_descriptor_response.file_descriptor_proto) == 3
