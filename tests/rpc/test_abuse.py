"""Abuse of a connection to the native transport, over real sockets, never affects other connections."""

import gc
import tracemalloc

import pytest

from ratelimitd.http2.limits import ALLOWANCES, Limits
from ratelimitd.rpc.interface import StatusCode
from ratelimitd.rpc.messages import framed
from tests.http2_peer import (
    CANCEL,
    CONTINUATION,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    GOAWAY,
    GREETING,
    HEADERS,
    NO_ERROR,
    PING,
    POST,
    PROTOCOL_ERROR,
    RST_STREAM,
    SETTINGS_ACK,
    data,
    frame,
    last_data,
    priority,
    rst_stream,
    settings,
    window_update,
)
from tests.rpc.abuse import Serving, until

# Floods. Each yields frames until a limit ends the connection.


def rapid_reset(line):
    for stream_id in range(1, 10**6, 2):
        yield line.head(stream_id) + rst_stream(stream_id, CANCEL)


def made_you_reset_by_window(line):
    for stream_id in range(1, 10**6, 2):
        yield line.call_octets(stream_id, "/wait") + window_update(stream_id, 2**31 - 1)


def made_you_reset_by_nothing(line):
    for stream_id in range(1, 10**6, 2):
        yield line.call_octets(stream_id, "/wait") + window_update(stream_id, 0)


def made_you_reset_by_late_data(line):
    for stream_id in range(1, 10**6, 2):
        yield line.call_octets(stream_id, "/wait") + data(stream_id, b"more")


def lies_about_the_length(line):
    for stream_id in range(1, 10**6, 2):
        yield line.call_octets(stream_id, content_length="3")


def upper_case_names(line):
    for stream_id in range(1, 10**6, 2):
        block = line.peer.block() + b"\x00\x03Bad\x00"
        yield frame(HEADERS, END_HEADERS, stream_id, block)


def more_streams_than_there_is_room_for(line):
    for stream_id in range(1, 10**6, 2):
        yield line.head(stream_id)


def continuations(line):
    yield frame(HEADERS, 0, 1, line.peer.block())
    while True:
        yield frame(CONTINUATION, 0, 1)


def large_continuations(line):
    yield frame(HEADERS, 0, 1, line.peer.block())
    while True:
        yield frame(CONTINUATION, 0, 1, bytes(16_384))


def header_bomb(line):
    # Adds a field of 3 KB to the table, then refers to it: an octet each.
    yield frame(HEADERS, END_HEADERS, 1, line.peer.block([*POST, ("x", "a" * 3_000)]))
    yield frame(HEADERS, END_HEADERS, 3, b"\xbe" * 16_384)


def settings_frames(_line):
    while True:
        yield settings(s4=100)


def pings(_line):
    while True:
        yield frame(PING, 0, 0, bytes(8))


def ping_answers(_line):
    while True:
        yield frame(PING, 1, 0, bytes(8))


def window_updates(_line):
    while True:
        yield window_update(0, 1)


def empty_data(line):
    yield line.head(1)
    while True:
        yield data(1)


def padded_empty_data(line):
    yield line.head(1)
    while True:
        yield data(1, b"\x05\0\0\0\0\0", 0x8)


def priorities(_line):
    while True:
        yield priority(1)


def unknown_frames(_line):
    while True:
        yield frame(0xAA, 0xFF, 7, b"grease")


def goaways(_line):
    while True:
        yield frame(GOAWAY, 0, 0, bytes(8))


def frames_of_a_closed_stream(line):
    yield line.head(1) + rst_stream(1)
    while True:
        yield rst_stream(1)


def trailers_for_a_discarded_stream(line):
    yield line.head(1, "/nowhere")
    while True:
        yield frame(HEADERS, END_HEADERS | END_STREAM, 1, b"\x00\x01x\x01y")


FLOODS = {
    rapid_reset: "rapid_reset",
    made_you_reset_by_window: "provoked_reset",
    made_you_reset_by_nothing: "provoked_reset",
    made_you_reset_by_late_data: "provoked_reset",
    lies_about_the_length: "provoked_reset",
    upper_case_names: "provoked_reset",
    more_streams_than_there_is_room_for: "too_many_streams",
    continuations: "header_block",
    large_continuations: "header_block",
    header_bomb: "header_bomb",
    settings_frames: "settings_flood",
    pings: "ping_flood",
    ping_answers: "ping_flood",
    window_updates: "window_update_flood",
    empty_data: "empty_data_flood",
    padded_empty_data: "empty_data_flood",
    priorities: "priority_flood",
    unknown_frames: "unknown_frame_flood",
    goaways: "unknown_frame_flood",
    frames_of_a_closed_stream: "stale_frame_flood",
    trailers_for_a_discarded_stream: "stale_frame_flood",
}

MOST = max(allowance.burst for allowance in ALLOWANCES.values()) + Limits().max_streams + 10
"""Frames, or pairs of them, that exceed the limit of every flood."""


def some(flood, line, number=MOST):
    return b"".join(part for part, _ in zip(flood(line), range(number), strict=False))


@pytest.mark.parametrize("flood", FLOODS)
async def test_a_flood_ends_its_connection_and_is_counted_by_its_cause(plain, flood):
    quiet, attacker = await plain.line(), await plain.line()
    assert await quiet.status() == StatusCode.OK
    attacker.send(some(flood, attacker))
    assert await quiet.status() == StatusCode.OK
    *_, last = await attacker.rest()
    assert (last.type, last.code) == (GOAWAY, ENHANCE_YOUR_CALM)
    assert plain.errors[FLOODS[flood]] >= 1
    assert await quiet.status() == StatusCode.OK
    attacker.writer.transport.abort()
    await until(lambda: plain.places == 1)
    assert plain.server.shared.open_requests == 0


async def test_a_flood_ends_its_connection_on_every_kind_of_line(serving):
    quiet, attacker = await serving.line(), await serving.line()
    attacker.send(some(rapid_reset, attacker))
    assert await quiet.status() == StatusCode.OK
    *_, last = await attacker.rest()
    assert (last.type, last.code) == (GOAWAY, ENHANCE_YOUR_CALM)
    assert serving.errors["rapid_reset"] == 1
    assert await quiet.status() == StatusCode.OK


@pytest.mark.deep
@pytest.mark.parametrize("flood", [rapid_reset, made_you_reset_by_window, header_bomb, pings])
async def test_repeated_floods_leak_no_memory(plain, flood):
    async def attack(times):
        for _ in range(times):
            attacker = await plain.line()
            attacker.send(some(flood, attacker))
            await attacker.rest()
            plain.drop(attacker)
        await until(lambda: plain.places == 0)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = await attack(3)
        after = await attack(8)
    finally:
        tracemalloc.stop()
    assert after - before < 100_000, "eight floods bring 160 KB and more"
    assert plain.server.shared.open_requests == 0


# Peers of other protocols


@pytest.mark.parametrize(
    ("said", "answer", "cause"),
    [
        (("tcp", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"), b"HTTP/1.1 400 ", "http1"),
        (("tcp", b"\x16\x03\x01\x02\x00\x01\x00"), b"\x15\x03\x01\x00\x02\x02", "tls"),
        (("tcp", b"SSH-2.0-OpenSSH\r\n"), b"\0\0", "preface"),
        (("tls", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"), b"HTTP/1.1 400 ", "plaintext"),
        (("tls", GREETING), b"\0\0\x1c\7", "plaintext"),
    ],
)
async def test_another_protocol_gets_a_clear_answer_then_a_close(tmp_path, said, answer, cause):
    line, octets = said
    async with Serving(tmp_path, line) as serving:
        stranger = await serving.line(octets, tls=False)
        assert (await stranger.octets()).startswith(answer)
        assert serving.errors == {cause: 1}
        stranger.writer.transport.abort()
        await until(lambda: serving.places == 0)


# Unusual but bounded input


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"grpc_timeout": "9" * 400 + "H"}, StatusCode.INTERNAL),
        ({"grpc_timeout": "99999999H"}, StatusCode.OK),
        ({"x_garbage_bin": "!!! not base64 \x01 \x7f"}, StatusCode.INTERNAL),
        ({"cookie": "a=b; " * 2_000 + "c"}, StatusCode.OK),
        ({"x_big": "y" * 17_000}, StatusCode.RESOURCE_EXHAUSTED),
        ({"grpc_encoding": "snappy"}, StatusCode.UNIMPLEMENTED),
        ({"content_length": "9"}, None),
    ],
)
async def test_odd_fields_lead_to_a_status(plain, fields, status):
    line = await plain.line()
    if status is None:
        line.send(line.call_octets(1, **fields))
        while (sent := await line.frame()).type != RST_STREAM:
            pass
        assert sent.code == PROTOCOL_ERROR
        assert plain.errors == {"malformed": 1}
    else:
        assert await line.status(**fields) == status
    quiet = await plain.line()
    assert await quiet.status() == StatusCode.OK


async def test_a_path_of_8_kib_is_an_unknown_method(plain):
    line = await plain.line()
    assert await line.status("/" + "a" * 8_191) == StatusCode.UNIMPLEMENTED


async def test_thousands_of_cookies_exceed_the_header_list_limit(plain):
    line = await plain.line()
    fields = [*POST, *[("cookie", "a")] * 1_000]
    block = line.peer.encoder.encode(fields)
    parts = [block[at : at + 16_000] for at in range(0, len(block), 16_000)]
    line.send(frame(HEADERS, END_HEADERS if len(parts) == 1 else 0, 1, parts[0]))
    for part in parts[1:]:
        line.send(frame(CONTINUATION, END_HEADERS if part is parts[-1] else 0, 1, part))
    line.send(last_data(1, framed(b"")))
    outcome = await line.outcome(1)
    assert int(outcome[b"grpc-status"]) == StatusCode.RESOURCE_EXHAUSTED


async def test_data_frames_of_one_octet_make_a_valid_call(plain):
    line = await plain.line()
    octets = framed(b"x" * 2_000)
    line.send(line.head(1), *(data(1, octets[at : at + 1]) for at in range(len(octets))))
    line.send(last_data(1))
    assert (await line.outcome(1))[b"grpc-status"] == b"0"


async def test_settings_changes_during_answers_lose_no_answer(plain):
    line = await plain.line(GREETING + settings(s4=10) + SETTINGS_ACK)
    ids = range(1, 60, 2)
    for number, stream_id in enumerate(ids):
        line.send(line.call_octets(stream_id, "/batch", bytes(50)))
        line.send(settings(s4=(0, 3, 900, 17)[number % 4], s1=(0, 4_096)[number % 2]))
    line.send(settings(s4=2**31 - 1))
    bodies = dict.fromkeys(ids, 0)
    ended = set()
    while len(ended) < len(ids):
        sent = await line.frame()
        if sent.type == 0:
            bodies[sent.stream_id] += len(sent.payload)
        if sent.type in {0, HEADERS} and sent.flags & END_STREAM:
            ended.add(sent.stream_id)
    assert set(bodies.values()) == {5 + 20 * 50}


async def test_calls_continue_after_a_goaway_of_the_peer(plain):
    line = await plain.line()
    line.send(frame(GOAWAY, 0, 0, bytes(4) + NO_ERROR.to_bytes(4, "big") + b"x" * 5_000))
    assert await line.status() == StatusCode.OK


async def test_unfinished_header_blocks_on_many_connections_time_out(plain):
    quiet = await plain.line()
    lines = [await plain.line() for _ in range(20)]
    for _ in range(3):
        for number, line in enumerate(lines):
            kind = CONTINUATION if line.peer.sent else HEADERS
            line.peer.sent.append(number)
            line.send(frame(kind, 0, 1, b"\x83"))
        assert await quiet.status() == StatusCode.OK
    await until(
        lambda: sum(each._http2.owes is not None for each in plain.server._connections) == 20
    )
    plain.passes(22)
    assert plain.errors == {"slow_headers": 20}
    assert await quiet.status() == StatusCode.OK
