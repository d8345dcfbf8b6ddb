"""What a peer may do to its own connection on the native transport, over real sockets, and never to that of others."""

import gc
import tracemalloc
import zlib

import pytest

from ratelimitd.http2.limits import ALLOWANCES, Limits
from ratelimitd.rpc.framing import framed
from ratelimitd.rpc.interface import StatusCode
from ratelimitd.rpc.limits import MAX_MESSAGE_BYTES
from ratelimitd.rpc.native_connection import NativeConnection
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
    PREFACE,
    PROTOCOL_ERROR,
    REFUSED_STREAM,
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

LINES = ["tcp", "unix", "tls"]


@pytest.fixture(params=LINES)
async def serving(request, tmp_path):
    async with Serving(tmp_path, request.param) as found:
        yield found


@pytest.fixture
async def plain(tmp_path):
    async with Serving(tmp_path) as found:
        yield found


# Floods. Each yields frames for ever; a limit has to end it.


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
    # A field of 3 KB into the table, then references to it: an octet each.
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
"""Frames, or pairs of them, of which any flood has one too many."""


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


@pytest.mark.parametrize("flood", [rapid_reset, made_you_reset_by_window, header_bomb, pings])
async def test_floods_on_one_connection_after_the_other_leave_nothing_behind(plain, flood):
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


# Slow peers, under a clock that the test moves


@pytest.mark.parametrize(
    ("octets", "cause"),
    [
        (b"", "slow_preface"),
        (b"GE", "slow_preface"),
        (PREFACE[:10], "slow_preface"),
        (PREFACE, "slow_preface"),
        (GREETING, "settings_timeout"),
        (GREETING + SETTINGS_ACK + frame(HEADERS, 0, 1, b"\x83"), "slow_headers"),
        (GREETING + SETTINGS_ACK + b"\0\x40\0\1\4\0\0\0\1\x83", "slow_frame"),
        (GREETING + SETTINGS_ACK + b"\0", "slow_frame"),
    ],
)
async def test_a_peer_that_owes_the_rest_is_ended_after_twenty_seconds(plain, octets, cause):
    line = await plain.line(octets)
    await until(lambda: plain.places and plain.server._connections)
    await until(lambda: not octets or next(iter(plain.server._connections))._received)
    plain.passes(19)
    assert plain.errors == {}
    plain.passes(3)
    assert plain.errors == {cause: 1}
    assert cause.encode() in await line.octets()


async def test_a_slow_frame_that_grows_an_octet_a_second_is_slow_all_the_same(plain):
    line = await plain.line(GREETING + SETTINGS_ACK + b"\0\x40\0\1\4\0\0\0\1")
    await until(lambda: plain.server._connections)
    [connection] = plain.server._connections
    for _ in range(22):
        before = connection._received
        line.send(b"\x83")
        await until(lambda: connection._received > before)  # noqa: B023 -- waited for at once
        plain.passes(1)
    assert plain.errors == {"slow_frame": 1}


async def test_the_rest_of_a_request_has_a_minute(plain):
    line = await plain.line()
    line.send(line.head(1), data(1, framed(b"ab")[:-1]))
    line.send(line.head(3, content_type="text/plain"))
    await until(lambda: plain.server.shared.open_requests == 2)
    plain.passes(59)
    assert plain.errors == {}
    line.send(frame(PING, 1, 0, bytes(8)))
    plain.passes(2)
    outcome = await line.outcome(1)
    assert int(outcome[b"grpc-status"]) == StatusCode.DEADLINE_EXCEEDED
    assert plain.errors["slow_request"] == 2
    assert plain.server.shared.open_requests == 0


async def test_windows_that_stay_shut_hold_a_bounded_answer_for_a_bounded_time(plain):
    quiet = await plain.line()
    line = await plain.line(GREETING + settings(s4=0) + SETTINGS_ACK)
    size = 10_000
    ids = range(1, 400, 2)
    for stream_id in ids:
        line.send(line.call_octets(stream_id, "/batch", bytes(size)))
    most = Limits().max_buffered_bytes
    await until(lambda: plain.server.shared.unread_bytes > most)
    for _ in range(50):
        assert await quiet.status() == StatusCode.OK
    assert plain.server.shared.unread_bytes <= most + 2 * 20 * Limits().bytes_per_slice
    plain.passes(22)
    assert plain.errors["stalled_window"] == 1
    line.writer.transport.abort()
    await until(lambda: plain.server.shared.unread_bytes == 0)


async def test_a_window_that_opens_by_an_octet_at_a_time_does_not_outwit_the_bound_over_all(
    tmp_path,
):
    async with Serving(tmp_path, max_unread_bytes=1_000_000) as serving:
        quiet = await serving.line()
        drips = [await serving.line(GREETING + settings(s4=0) + SETTINGS_ACK) for _ in range(8)]
        for line in drips:
            for stream_id in (1, 3):
                line.send(line.call_octets(stream_id, "/batch", bytes(5_000)))
                line.send(window_update(stream_id, 1))
        await until(lambda: "unread_answers" in serving.errors)
        for _ in range(20):
            assert await quiet.status() == StatusCode.OK
        assert serving.server.shared.unread_bytes <= 1_000_000
        assert serving.places > 1


@pytest.mark.parametrize("path", ["/batch", "/endless", "/ask"])
async def test_a_peer_that_does_not_read_makes_us_hold_no_more_than_a_buffer(serving, path):
    quiet = await serving.line()
    attacker = await serving.line(
        GREETING + SETTINGS_ACK + settings(s4=2**31 - 1) + window_update(0, 2**31 - 65_536),
        limit=1_000,
    )
    attacker.writer.transport.pause_reading()
    message = bytes(2_000)
    bound = 262_144 + 2 * 20 * Limits().bytes_per_slice
    if path == "/batch":
        calls = (attacker.call_octets(n, path, message) for n in range(1, 2_000, 2))
        attacker.send(*calls)
    elif path == "/ask":
        attacker.send(attacker.head(1, path))
        attacker.send(*(data(1, framed(message) * 8) for _ in range(16)))
    else:
        attacker.send(attacker.call_octets(1, path, message))
    for _ in range(200):
        assert await quiet.status() == StatusCode.OK
        assert serving.server.shared.unread_bytes <= bound
    if path != "/ask":  # a window of questions has no more answers than the kernel takes
        await until(lambda: any(each._writing_paused for each in serving.server._connections))
        serving.passes(22)
        assert serving.errors["stalled_window"] == 1


async def test_a_peer_that_is_silent_for_good_is_asked_then_ended(plain):
    line = await plain.line()
    await until(lambda: plain.server._connections)
    [connection] = plain.server._connections
    await until(lambda: connection._received)
    plain.passes(62)
    plain.passes(22)
    assert plain.errors == {"keepalive_timeout": 1}
    kinds = [sent.type for sent in await line.rest()]
    assert kinds[-2:] == [PING, GOAWAY]
    plain.passes(3)
    await until(lambda: plain.places == 0)


# Too much of everything


@pytest.mark.parametrize("line", LINES)
async def test_connections_over_the_bound_are_closed_and_the_others_answered(tmp_path, line):
    async with Serving(tmp_path, line, max_connections=3) as serving:
        quiet = await serving.line()
        assert await quiet.status() == StatusCode.OK
        silent = [await serving.line(b"", tls=False) for _ in range(6)]
        await until(lambda: serving.errors.get("too_many_connections") == 4)
        assert serving.places == 3
        assert await quiet.status() == StatusCode.OK
        for each in silent:
            each.writer.transport.abort()
        await until(lambda: serving.places == 1)
        assert await (await serving.line()).status() == StatusCode.OK


async def test_a_tls_handshake_that_never_ends_does(tmp_path):
    async with Serving(tmp_path, "tls") as serving:
        quiet = await serving.line()
        assert await quiet.status() == StatusCode.OK
        for octets in (b"", b"\x16", b"\x16\x03\x01\x02\x00\x01"):
            await serving.line(octets, tls=False)
        await until(lambda: serving.places == 4)
        serving.passes(9)
        assert serving.places == 4
        serving.passes(2)
        await until(lambda: serving.places == 1)
        assert serving.errors == {"slow_handshake": 3}
        assert await quiet.status() == StatusCode.OK


async def test_streams_over_the_bound_are_refused_and_safe_to_retry(plain):
    line = await plain.line()
    line.send(*(line.head(2 * number + 1) for number in range(Limits().max_streams + 1)))
    refused = 2 * Limits().max_streams + 1
    while (sent := await line.frame()).type != RST_STREAM:
        pass
    assert (sent.stream_id, sent.code) == (refused, REFUSED_STREAM)


async def test_requests_that_never_end_on_many_connections_are_bounded_over_all(tmp_path):
    async with Serving(tmp_path, max_open_requests=1_000) as serving:
        quiet = await serving.line()
        lines = [await serving.line() for _ in range(8)]
        for line in lines:
            line.send(*(line.head(n, x="y" * 100) for n in range(1, 2 * 250, 2)))
        await until(lambda: serving.errors.get("too_many_calls") == 1_000)
        assert serving.server.shared.open_requests == 1_000
        assert await quiet.status() == StatusCode.OK
        for line in lines:
            line.writer.transport.abort()
        await until(lambda: serving.places == 1)
        assert serving.server.shared.open_requests == 0


async def test_a_message_over_the_bound_is_refused_by_its_prefix(serving):
    line = await serving.line()
    line.send(line.head(1), data(1, b"\0" + (MAX_MESSAGE_BYTES + 1).to_bytes(4, "big")))
    outcome = await line.outcome(1)
    assert int(outcome[b"grpc-status"]) == StatusCode.RESOURCE_EXHAUSTED
    assert serving.server.shared.request_bytes == 0


def bomb(size):
    packer = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    packed = b"".join(packer.compress(bytes(1_000_000)) for _ in range(size // 1_000_000))
    packed += packer.flush()
    return b"\x01" + len(packed).to_bytes(4, "big") + packed


@pytest.mark.parametrize("path", ["/echo", "/ask"])
async def test_a_gzip_bomb_is_inflated_no_further_than_the_bound(plain, path):
    line, packed = await plain.line(), bomb(100_000_000)
    parts = [packed[at : at + 16_000] for at in range(0, len(packed), 16_000)]
    tracemalloc.start()
    try:
        line.send(line.head(1, path, grpc_encoding="gzip"), *(data(1, part) for part in parts))
        line.send(last_data(1))
        outcome = await line.outcome(1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert int(outcome[b"grpc-status"]) == StatusCode.RESOURCE_EXHAUSTED
    assert peak < 4 * MAX_MESSAGE_BYTES


# Peers that speak something else


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


# Fairness: what one turn of the loop does for one connection is bounded, so others have theirs


async def test_a_peer_that_calls_without_pause_takes_turns_with_the_others(plain, monkeypatch):
    turns, take_turn = [], NativeConnection._turn

    def turn(connection, octets):
        before = plain.answered
        take_turn(connection, octets)
        turns.append((connection, plain.answered - before))

    monkeypatch.setattr(NativeConnection, "_turn", turn)
    quiet, busy = await plain.line(), await plain.line()
    assert await quiet.status() == StatusCode.OK
    [first] = [connection for connection, answered in turns if answered]
    total = 10_000
    busy.send(*(busy.call_octets(2 * number + 1) for number in range(total)))
    answered_quietly = 0
    while plain.answered < total // 2:
        assert await quiet.status() == StatusCode.OK
        answered_quietly += 1
    assert answered_quietly > 5
    in_a_row = longest = 0
    for connection, answered in turns:
        assert answered <= Limits().frames_per_slice // 2
        in_a_row = 0 if connection is first else in_a_row + 1
        longest = max(longest, in_a_row)
    assert longest <= 10, (
        "a call and its answer take a few turns of the loop, of which each is one slice"
    )


async def test_questions_that_are_all_there_do_not_keep_calls_waiting(plain):
    quiet, attacker = await plain.line(), await plain.line()
    packed = bomb(4_000_000)
    attacker.send(settings(s4=2**31 - 1) + window_update(0, 2**31 - 65_536))
    for stream_id in range(1, 40, 2):
        attacker.send(attacker.head(stream_id, "/ask", grpc_encoding="gzip"))
        attacker.send(data(stream_id, packed), data(stream_id, packed))
    await until(lambda: plain.server.shared.streams_in_progress == 20)
    answered = plain.answered
    for _ in range(5):
        assert await quiet.status() == StatusCode.OK
    assert plain.answered == answered + 5
    [busy] = [each for each in plain.server._connections if each.calls.open]
    waiting = sum(len(call.questions._parts) for call in busy.calls.open.values())
    assert waiting > 0, "the calls were answered before the questions were through"


async def test_broken_peers_do_not_keep_a_new_connection_from_being_accepted(plain):
    for _ in range(100):
        line = await plain.line(b"\0" * 100)
        line.writer.transport.abort()
    assert await (await plain.line()).status() == StatusCode.OK
    assert plain.errors["preface"] == 100


# Odds and ends that a hostile engineer tries


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"grpc_timeout": "9" * 400 + "H"}, StatusCode.INTERNAL),
        ({"grpc_timeout": "99999999H"}, StatusCode.OK),
        ({"x_garbage_bin": "!!! not base64 \x01 \x7f"}, StatusCode.OK),
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


async def test_thousands_of_cookies_are_a_list_that_is_too_large(plain):
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


async def test_data_of_one_octet_each_is_a_call_like_any_other(plain):
    line = await plain.line()
    octets = framed(b"x" * 2_000)
    line.send(line.head(1), *(data(1, octets[at : at + 1]) for at in range(len(octets))))
    line.send(last_data(1))
    assert (await line.outcome(1))[b"grpc-status"] == b"0"


async def test_settings_that_change_in_the_middle_of_answers_lose_none_of_them(plain):
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


async def test_a_goaway_of_the_peer_changes_nothing_about_its_calls(plain):
    line = await plain.line()
    line.send(frame(GOAWAY, 0, 0, bytes(4) + NO_ERROR.to_bytes(4, "big") + b"x" * 5_000))
    assert await line.status() == StatusCode.OK


async def test_header_blocks_that_never_end_on_many_connections_are_bounded_in_time(plain):
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
