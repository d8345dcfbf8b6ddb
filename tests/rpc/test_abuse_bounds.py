"""Bounds on memory, waiting and delay that a peer of the native transport can cause, over real sockets."""

import tracemalloc

import pytest

from ratelimitd.http2.limits import Limits
from ratelimitd.rpc.interface import MAX_MESSAGE_BYTES, StatusCode
from ratelimitd.rpc.messages import framed
from ratelimitd.rpc.server import NativeConnection
from tests.http2_peer import (
    GREETING,
    HEADERS,
    PING,
    PREFACE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS_ACK,
    data,
    frame,
    last_data,
    settings,
    window_update,
)
from tests.rpc.abuse import LINES, Serving, bomb, until

# Slow peers, with a manual clock


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
async def test_incomplete_input_ends_the_connection_after_20_s(plain, octets, cause):
    line = await plain.line(octets)
    await until(lambda: plain.places and plain.server._connections)
    await until(lambda: not octets or next(iter(plain.server._connections))._received)
    plain.passes(19)
    assert plain.errors == {}
    plain.passes(3)
    assert plain.errors == {cause: 1}
    assert cause.encode() in await line.octets()


async def test_a_frame_that_grows_by_an_octet_per_second_times_out(plain):
    line = await plain.line(GREETING + SETTINGS_ACK + b"\0\x40\0\1\4\0\0\0\1")
    await until(lambda: plain.server._connections)
    [connection] = plain.server._connections
    for _ in range(22):
        before = connection._received
        line.send(b"\x83")
        await until(lambda: connection._received > before)  # noqa: B023 -- waited for at once
        plain.passes(1)
    assert plain.errors == {"slow_frame": 1}


async def test_an_unfinished_request_times_out_after_a_minute(plain):
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


async def test_closed_windows_hold_bounded_answers_for_a_bounded_time(plain):
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


async def test_single_octet_window_updates_do_not_evade_the_global_bound(
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
async def test_a_peer_that_does_not_read_fills_at_most_one_buffer(serving, path):
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
    if path != "/ask":  # the kernel buffers all answers to one window of requests
        await until(lambda: any(each._writing_paused for each in serving.server._connections))
        serving.passes(22)
        assert serving.errors["stalled_window"] == 1


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


async def test_an_unfinished_tls_handshake_times_out(tmp_path):
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


async def test_unfinished_requests_are_bounded_over_all_connections(tmp_path):
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


# Fairness: the work for one connection per event-loop iteration is bounded


async def test_a_busy_peer_shares_the_event_loop_with_others(plain, monkeypatch):
    turns, take_turn = [], NativeConnection._handle_slice

    def turn(connection, *arguments):
        before = plain.answered
        take_turn(connection, *arguments)
        turns.append((connection, plain.answered - before))

    monkeypatch.setattr(NativeConnection, "_handle_slice", turn)
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


async def test_a_window_of_stream_messages_does_not_delay_calls(plain):
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
    waiting = sum(len(call.messages._parts) for call in busy.calls.open.values())
    assert waiting > 0, "the calls were answered before the questions were through"


async def test_broken_peers_do_not_block_new_connections(plain):
    for _ in range(100):
        line = await plain.line(b"\0" * 100)
        line.writer.transport.abort()
    assert await (await plain.line()).status() == StatusCode.OK
    assert plain.errors["preface"] == 100
