"""A service of all four kinds of methods, for the tests of both interceptors, as a blocking and as an asyncio one."""

from types import SimpleNamespace

import grpc
from google.rpc.error_details_pb2 import QuotaFailure, RetryInfo
from grpc_status import rpc_status

from ratelimitd_client.middleware import limited

SERVICE = "shop.Orders"
UNARY, LIST, SUM, TALK, EXEMPT = (
    f"/{SERVICE}/{name}" for name in ("Unary", "List", "Sum", "Talk", "Exempt")
)


def unary(request, context):
    context.set_trailing_metadata((("own", "yes"),)) if request == b"own" else None
    return request


def listed(request, context):
    yield from (request, request)


def summed(requests, context):
    return b"".join(requests)


def talked(requests, context):
    yield from requests


@limited(exempt=True)
def exempt(request, context):
    return request


async def unary_async(request, context):
    return unary(request, context)


async def listed_async(request, context):
    for answer in (request, request):
        yield answer


async def written_async(request, context):
    for answer in (request, request):
        await context.write(answer)


async def summed_async(requests, context):
    return b"".join([request async for request in requests])


async def talked_async(requests, context):
    async for request in requests:
        yield request


@limited(exempt=True)
async def exempt_async(request, context):
    return request


BLOCKING = (unary, listed, summed, talked, exempt)
ASYNCHRONOUS = (unary_async, listed_async, summed_async, talked_async, exempt_async)
WRITING = (unary_async, written_async, summed_async, talked_async, exempt_async)


class RequestId(grpc.ServerInterceptor):
    """Says which request it was, as an interceptor before the tested one."""

    def intercept_service(self, continuation, handler_call_details):
        handler = continuation(handler_call_details)

        def answer(request, context):
            context.set_trailing_metadata((("x-request-id", "7"), ("ratelimit", "older")))
            return handler.unary_unary(request, context)

        return grpc.unary_unary_rpc_method_handler(answer)


class RequestIdAsync(grpc.aio.ServerInterceptor):
    """The same for asyncio."""

    async def intercept_service(self, continuation, handler_call_details):
        handler = await continuation(handler_call_details)

        async def answer(request, context):
            context.set_trailing_metadata((("x-request-id", "7"), ("ratelimit", "older")))
            return await handler.unary_unary(request, context)

        return grpc.unary_unary_rpc_method_handler(answer)


def service_of(functions):
    """What a server is given."""
    unary, listed, summed, talked, exempt = functions
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary),
        "List": grpc.unary_stream_rpc_method_handler(listed),
        "Sum": grpc.stream_unary_rpc_method_handler(summed),
        "Talk": grpc.stream_stream_rpc_method_handler(talked),
        "Exempt": grpc.unary_unary_rpc_method_handler(exempt),
    }
    return grpc.method_handlers_generic_handler(SERVICE, handlers)


def ask(channel, method, request=b"x", metadata=()):
    """The answers of a call as a list, its status, its details, and its trailing metadata."""
    requests = iter([request, request])
    kind = {LIST: "unary_stream", SUM: "stream_unary", TALK: "stream_stream"}.get(method)
    answers, timeout_s = [], 30
    if kind is None or kind == "stream_unary":
        call = channel.unary_unary(method) if kind is None else channel.stream_unary(method)
        given = request if kind is None else requests
        try:
            answer, ended = call.with_call(given, timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            ended = error
        else:
            answers = [answer]
    else:
        given = request if kind == "unary_stream" else requests
        ended = getattr(channel, kind)(method)(given, timeout=timeout_s, metadata=metadata)
        try:
            answers = list(ended)
        except grpc.RpcError:
            answers = []
    return answers, ended.code(), ended.details(), dict(ended.trailing_metadata())


def error_details(code, details, metadata):
    """The retry delay in s and the violations of an ended call, as a library of gRPC reads them; ``None`` without."""
    pairs = tuple(metadata.items())
    ended = SimpleNamespace(
        code=lambda: code, details=lambda: details, trailing_metadata=lambda: pairs
    )
    status = rpc_status.from_call(ended)
    retry, failure = RetryInfo(), QuotaFailure()
    for detail in () if status is None else status.details:
        assert detail.Unpack(retry) or detail.Unpack(failure)
    delay_s = retry.retry_delay.seconds if retry.HasField("retry_delay") else None
    return delay_s, [(one.subject, one.description) for one in failure.violations]
