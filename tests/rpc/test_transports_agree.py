"""The same calls to both transports, through grpc's own client: status, text, trailers, details and answers agree."""

import asyncio
import math
from contextlib import AsyncExitStack

import grpc
import grpc.aio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratelimitd.counters import CheckStats
from ratelimitd.node.serving import TRANSPORTS, server_of
from ratelimitd.rpc.interface import (
    MAX_MESSAGE_BYTES,
    Methods,
    RpcError,
    StatusCode,
    TransportLimits,
)

CODES = [code for code in StatusCode if code is not StatusCode.OK]
COMPRESSIONS = [grpc.Compression.NoCompression, grpc.Compression.Gzip, grpc.Compression.Deflate]
DETAILS = st.binary(max_size=60)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
KEYS = st.from_regex(r"\Ax-[a-z0-9_.-]{1,10}\Z").filter(lambda key: not key.endswith("-bin"))
VALUES = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=40)
METADATA = st.lists(
    st.one_of(
        st.tuples(KEYS, VALUES),
        st.tuples(KEYS.map(lambda key: key + "-bin"), st.binary(max_size=30)),
    ),
    max_size=6,
)


def refuse(data, _call):
    code, rest = data[0], data[1:]
    message, _, details = rest.partition(b"\xff")
    raise RpcError(StatusCode(code), message.decode(), details)


def metadata(data, call):
    return repr([call.metadata(key) for key in data.decode().split()]).encode()


def times(_data, call):
    left_s = call.time_remaining_s()
    # The order of magnitude: grpcio rounds up to about 1 %, and the next step depends on timing.
    return b"none" if left_s is None else b"%d" % round(math.log10(left_s))


async def later(data, call):
    await asyncio.sleep(0)
    return refuse(data[1:], call) if data[:1] == b"!" else data


async def repeat_step(_data, _call):
    await asyncio.Event().wait()


async def pieces(data, _call):
    for size in data:
        if not size:
            raise RpcError(StatusCode.ABORTED, "zero", b"details")
        yield bytes(size)


async def reversed_each(questions, _call):
    async for question in questions:
        yield question[::-1]


def large(data, _call):
    return bytes(int(data))


METHODS = Methods(
    unary={
        "/s/echo": lambda data, _call: data,
        "/s/refuse": refuse,
        "/s/metadata": metadata,
        "/s/times": times,
        "/s/later": later,
        "/s/repeat_step": repeat_step,
        "/s/large": large,
    },
    server_stream={"/s/pieces": pieces},
    bidi_stream={"/s/reversed": reversed_each},
)


class Both:
    """Both servers, and a channel to each."""

    def __init__(self, channels):
        self.channels = channels

    async def agree(self, ask):
        """Call both, check that the results are equal, and return them."""
        first, second = [await outcome(ask(channel)) for channel in self.channels]
        assert first == second
        return first

    async def unary(self, path, data, **options):
        def ask(channel):
            return channel.unary_unary(path)(data, **{"timeout": 30, **options})

        return await self.agree(ask)


async def outcome(call):
    """Return all that a caller can observe of the end of its call."""
    answers = []
    try:
        if isinstance(call, grpc.aio.UnaryUnaryCall):
            answers.append(await call)
        else:
            answers = [answer async for answer in call]
    except grpc.aio.AioRpcError:
        pass
    trailers = sorted((key, value) for key, value in await call.trailing_metadata() or ())
    return await call.code(), await call.details(), trailers, answers


@pytest.fixture
async def both():
    options = [("grpc.max_receive_message_length", 2 * MAX_MESSAGE_BYTES)]
    async with AsyncExitStack() as stack:
        channels = []
        for make in map(server_of, TRANSPORTS):
            server = make(
                METHODS, listen="127.0.0.1:0", stats=CheckStats(), limits=TransportLimits()
            )
            address = await server.start()
            stack.push_async_callback(server.stop, 0)
            channel = grpc.aio.insecure_channel(address, options=options)
            channels.append(await stack.enter_async_context(channel))
        yield Both(channels)


def generated(examples):
    """Return hypothesis's settings for the servers of one test."""
    return settings(
        max_examples=examples,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@generated(60)
@given(data=st.binary(max_size=300), compression=st.sampled_from(COMPRESSIONS))
async def test_answers_agree_for_every_compression_of_the_request(both, data, compression):
    for path in ("/s/echo", "/s/later"):
        if not data.startswith(b"!"):
            assert (await both.unary(path, data, compression=compression))[3] == [data]


@generated(80)
@given(code=st.sampled_from(CODES), message=TEXTS, details=DETAILS)
async def test_statuses_messages_and_details_agree(both, code, message, details):
    data = bytes([code]) + message.encode() + b"\xff" + details
    for path, asked in (("/s/refuse", data), ("/s/later", b"!" + data)):
        status, text, _, _ = await both.unary(path, asked)
        assert (status.value[0], text) == (code, message)


@generated(60)
@given(fields=METADATA)
async def test_metadata_agree(both, fields):
    keys = " ".join([*(key for key, _ in fields), "authorization", "x-not-there", "x-bin"])
    await both.unary("/s/metadata", keys.encode(), metadata=fields)


@generated(30)
@given(sizes=st.binary(max_size=8))
async def test_streams_of_answers_agree(both, sizes):
    await both.agree(lambda channel: channel.unary_stream("/s/pieces")(sizes, timeout=30))


@generated(30)
@given(questions=st.lists(st.binary(max_size=300), max_size=6), compression=st.sampled_from(COMPRESSIONS))  # fmt: skip
async def test_conversations_agree(both, questions, compression):
    status, _, _, answers = await both.agree(
        lambda channel: channel.stream_stream("/s/reversed")(
            iter(questions), timeout=30, compression=compression
        )
    )
    assert status is grpc.StatusCode.OK
    assert answers == [question[::-1] for question in questions]


@pytest.mark.parametrize("path", ["/s/nope", "/", "/s", "/s/echo/", "/S/echo"])
async def test_unknown_methods_agree(both, path):
    assert (await both.unary(path, b""))[0] is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("timeout_s", [None, 100, 1_000, 100_000])
async def test_deadlines_agree(both, timeout_s):
    assert (await both.unary("/s/times", b"", timeout=timeout_s))[0] is grpc.StatusCode.OK


async def test_a_deadline_that_passes_agrees(both):
    status, *_ = await both.unary("/s/repeat_step", b"", timeout=0.2)
    assert status is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_cancellations_agree(both):
    def ask(channel):
        call = channel.unary_unary("/s/repeat_step")(b"", timeout=30)
        asyncio.get_running_loop().call_later(0.05, call.cancel)
        return call

    found = []
    for channel in both.channels:
        call = ask(channel)
        with pytest.raises(asyncio.CancelledError):
            await call
        found.append((await call.code(), await call.details()))
    assert found[0] == found[1]


@pytest.mark.parametrize("excess", [-1, 0, 1])
async def test_the_bound_on_messages_agrees(both, excess):
    status, *_ = await both.unary("/s/echo", bytes(MAX_MESSAGE_BYTES + excess))
    assert (status is grpc.StatusCode.OK) == (excess <= 0)


@pytest.mark.parametrize("compression", COMPRESSIONS[1:])
async def test_the_bound_on_inflated_messages_agrees_except_for_the_text(both, compression):
    # grpcio inflates a little beyond the bound, and can sometimes name the size; we stop at the bound.
    await both.unary("/s/echo", bytes(MAX_MESSAGE_BYTES), compression=compression)
    for channel in both.channels:
        data = bytes(MAX_MESSAGE_BYTES + 1)
        call = channel.unary_unary("/s/echo")(data, timeout=30, compression=compression)
        status, text, trailers, _ = await outcome(call)
        assert (status, trailers) == (grpc.StatusCode.RESOURCE_EXHAUSTED, [])
        assert "message larger than max" in text


@pytest.mark.parametrize("excess", [0, 1])
async def test_the_bound_on_answers_agrees(both, excess):
    status, *_ = await both.unary("/s/large", b"%d" % (MAX_MESSAGE_BYTES + excess))
    assert (status is grpc.StatusCode.OK) == (excess == 0)
