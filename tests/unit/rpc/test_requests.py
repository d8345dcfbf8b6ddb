"""Requests in pieces over a real HTTP/2 connection: accepted, bounded, refused, cancelled."""

import asyncio

import pytest

from ratelimitd.http2.limits import Limits
from ratelimitd.rpc.interface import StatusCode
from ratelimitd.rpc.messages import framed
from ratelimitd_wire.codes import ErrorCode
from tests.http2_peer import (
    DATA,
    END_HEADERS,
    END_STREAM,
    PING,
    POST,
    WINDOW_UPDATE,
    data,
    frame,
    last_data,
    rst_stream,
    settings,
    window_update,
)
from tests.native_caller import Caller


@pytest.mark.parametrize("cut", range(1, 7))
def test_a_message_may_arrive_in_any_number_of_frames(caller, cut):
    body = framed(b"hi")
    caller.feed(caller.call_head(1), data(1, body[:cut]))
    assert caller.calls.open
    caller.feed(last_data(1, body[cut:]))
    assert caller.outcome(1) == (StatusCode.OK, framed(b"hi"))
    assert caller.calls.open == {}


def test_a_request_may_end_with_trailers(caller):
    caller.feed(caller.call_head(1), data(1, framed(b"hi")))
    caller.feed(caller.head(1, [("a", "b")], END_HEADERS | END_STREAM))
    assert caller.outcome(1) == (StatusCode.OK, framed(b"hi"))


async def test_a_large_message_is_acknowledged_as_it_arrives(caller):
    limits = Limits()
    message = bytes(limits.stream_window_bytes * 3)
    octets = framed(message)
    caller.feed(window_update(0, 1 << 30), window_update(0, 1), caller.call_head(1))
    for start in range(0, len(octets), 16_384):
        caller.feed(data(1, octets[start : start + 16_384]))
    assert sum(sent.type == WINDOW_UPDATE for sent in caller.sent) >= 4
    caller.feed(last_data(1), window_update(1, 1 << 30))
    await caller.settled()
    assert caller.outcome(1) == (StatusCode.OK, octets)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", StatusCode.INTERNAL),
        (b"\x00\x00", StatusCode.INTERNAL),
        (framed(b"hi")[:-1], StatusCode.INTERNAL),
        (framed(b"a") + framed(b"b"), StatusCode.INTERNAL),
        (b"\x01" + framed(b"hi")[1:], StatusCode.INTERNAL),
        (b"\x00" + (4 * 1024 * 1024 + 1).to_bytes(4, "big"), StatusCode.RESOURCE_EXHAUSTED),
    ],
    ids=["none", "half a prefix", "half", "two", "compressed", "too large"],
)
@pytest.mark.parametrize("path", ["/s/m", "/s/count"])
async def test_a_request_without_exactly_one_valid_message_is_refused(caller, path, body, status):
    caller.feed(caller.call(1, path, body=body))
    await caller.settled()
    assert caller.outcome(1) == (status, b"")
    caller.feed(caller.call_head(3, path, END_HEADERS | END_STREAM))
    assert caller.outcome(3) == (StatusCode.INTERNAL, b"")
    assert caller.calls.open == {}
    assert caller.errors == {"bad_request": 2}


def test_an_http_request_is_answered_at_its_end(caller):
    caller.feed(caller.get(1), caller.call_head(3, content_type="text/plain"), data(3, b"x" * 9))
    status, body = caller.outcome(1)
    assert (status, b"gRPC" in body) == (405, True)
    assert caller.outcome(3) == (0, b"")
    caller.feed(last_data(3, b"x"))
    assert caller.outcome(3)[0] == 415
    caller.feed(caller.head(5, [(":method", "HEAD"), *POST[1:]], END_HEADERS | END_STREAM))
    assert caller.outcome(5) == (405, b"")
    caller.feed(caller.head(7, [(":method", "PUT"), *POST[1:]]), rst_stream(7))
    assert caller.calls._table.plain == {}


def test_an_oversized_head_gets_an_error_status(caller):
    caller.feed(caller.call_head(1, x="0" * 20_000))
    assert caller.outcome(1)[0] is StatusCode.RESOURCE_EXHAUSTED


async def test_a_caller_that_leaves_cancels_its_handler(caller):
    caller.feed(caller.call(1, "/s/wait"))
    await caller.settled()
    caller.feed(rst_stream(1))
    await caller.shared.all_ended()
    assert caller.shared.unary_in_progress == 0
    assert (caller.sent, caller.errors) == ([], {"cancelled": 1})


def test_a_stream_reset_after_an_error_of_the_peer_is_counted_by_cause(caller):
    caller.feed(caller.call_head(1, content_length="5"), last_data(1, b"x"))
    assert caller.errors == {"malformed": 1}
    assert caller.calls.open == {}


def test_unfinished_requests_are_bounded_on_a_connection_and_over_all():
    for bound in ("max_request_bytes_per_connection", "max_request_bytes"):
        caller = Caller(**{bound: 1_000})
        caller.feed(caller.call_head(1), data(1, framed(bytes(700))[:-1]))
        caller.feed(caller.call_head(3), data(3, framed(bytes(700))[:-1]))
        assert caller.outcome(3)[0] is StatusCode.RESOURCE_EXHAUSTED
        caller.feed(last_data(1, b"\x00"))
        assert caller.outcome(1)[0] is StatusCode.OK
        assert caller.shared.request_bytes == caller.calls._table.request_bytes == 0


def test_requests_still_arriving_are_bounded_for_every_method():
    caller = Caller(max_open_requests=2)
    caller.feed(caller.call_head(1), caller.call_head(3, content_type="text/plain"))
    caller.feed(caller.call_head(5), caller.call_head(7, content_type="text/plain"))
    assert caller.outcome(5)[0] is caller.outcome(7)[0] is StatusCode.RESOURCE_EXHAUSTED
    assert caller.errors == {"too_many_calls": 2}
    caller.feed(caller.call(9))
    assert caller.outcome(9)[0] is StatusCode.OK, "one that comes in one piece takes no room"
    caller.feed(rst_stream(3), caller.call_head(11))
    caller.calls.lose_all()
    assert caller.shared.open_requests == 0


async def test_an_iteration_answers_one_message_over_all_streams(caller):
    for stream_id in (1, 3, 5):
        caller.feed(caller.call_head(stream_id, "/s/upper"), data(stream_id, framed(b"a") * 20))
    most = 0
    for _ in range(400):
        caller.sent.clear()
        await asyncio.sleep(0)
        caller.collect()
        most = max(most, sum(sent.type == DATA for sent in caller.sent))
    assert most == 1
    assert not any(open_call.messages._parts for open_call in caller.calls.open.values())
    caller.calls.lose_all()
    await caller.shared.all_ended()


async def test_nothing_is_held_after_a_broken_message_while_the_handler_waits(caller):
    caller.feed(settings(s4=0), caller.call_head(1, "/s/upper"))
    caller.feed(data(1, framed(b"a") + b"\0\xff\xff\xff\xff"))
    await caller.settled()
    for _ in range(50):
        caller.feed(data(1, bytes(16_000)))
    [open_call] = caller.calls.open.values()
    assert open_call.waiting_bytes < 100
    caller.calls.lose_all()
    await caller.shared.all_ended()


async def test_an_unfinished_message_of_a_stream_counts_against_the_byte_bound():
    caller = Caller(max_request_bytes=1_000)
    caller.feed(caller.call_head(1, "/s/upper"), data(1, framed(bytes(2_000))[:-1]))
    assert caller.outcome(1)[0] is StatusCode.RESOURCE_EXHAUSTED
    assert caller.shared.request_bytes == 0
    await caller.shared.all_ended()


async def test_unread_messages_of_a_stream_count_against_the_byte_bound():
    caller = Caller(max_request_bytes=5_000)
    caller.feed(settings(s4=0), caller.call_head(1, "/s/upper"), data(1, framed(b"a")))
    await caller.settled()  # the handler waits for the window
    for _ in range(2):  # most of each message is in a frame that is acknowledged at once
        caller.feed(data(1, framed(bytes(2_000))[:-1]), data(1, b"\x00"))
    assert caller.shared.request_bytes == 4_000
    caller.feed(window_update(1, 100_000))
    await caller.settled()
    assert caller.shared.request_bytes == 0
    caller.feed(settings(s4=0), caller.call_head(3, "/s/upper"), data(3, framed(b"a")))
    await caller.settled()
    for _ in range(3):
        caller.feed(data(3, framed(bytes(2_000))[:-1]), data(3, b"\x00"))
    caller.feed(window_update(3, 100))  # after the answer that waited
    assert caller.outcome(3) == (StatusCode.RESOURCE_EXHAUSTED, framed(b"A"))
    assert caller.shared.request_bytes == 0
    caller.calls.lose_all()
    await caller.shared.all_ended()


async def test_messages_of_a_stream_are_answered_as_they_arrive(caller):
    caller.feed(caller.call_head(1, "/s/upper"))
    for text in (b"a", b"b"):
        caller.feed(data(1, framed(text)))
        await caller.settled()
    caller.feed(last_data(1))
    await caller.settled()
    assert caller.outcome(1) == (StatusCode.OK, framed(b"A") + framed(b"B"))


async def test_the_error_of_a_message_follows_the_answers_before_it(caller):
    caller.feed(caller.call_head(1, "/s/upper"), last_data(1, framed(b"a") + b"\x00"))
    too_large = b"\x00\xff\xff\xff\xff"
    caller.feed(caller.call_head(3, "/s/upper"), data(3, framed(b"a") + too_large))
    await caller.settled()
    assert caller.outcome(1) == (StatusCode.INTERNAL, framed(b"A"))
    assert caller.outcome(3) == (StatusCode.RESOURCE_EXHAUSTED, framed(b"A"))


def test_a_window_update_of_an_answered_stream_is_ignored(caller):
    caller.feed(settings(s4=10), caller.call(1, "/s/m", bytes(20)))
    assert caller.calls.open == {}
    caller.feed(window_update(1, 100), frame(PING, 0, 0, bytes(8)))
    assert caller.outcome(1) == (StatusCode.OK, framed(bytes(20)))


async def test_a_window_update_of_a_call_that_fails_in_the_same_read_is_ignored():
    caller = Caller(max_request_bytes=20)
    caller.feed(settings(s4=5), caller.call_head(1, "/s/upper"), data(1, framed(b"question")))
    await caller.settled()
    caller.feed(data(1, framed(bytes(100))[:60]), window_update(1, 100))
    assert caller.outcome(1) == (StatusCode.RESOURCE_EXHAUSTED, framed(b"QUESTION"))
    await caller.shared.all_ended()


def test_data_for_an_ended_call_is_ignored(caller):
    caller.feed(caller.call_head(1, "/s/nope"))
    assert caller.outcome(1)[0] is StatusCode.UNIMPLEMENTED
    assert caller.feed(last_data(1, framed(b"late"))) == []
    assert caller.resets in ([], [(1, ErrorCode.NO_ERROR)])


async def test_a_stream_of_answers_begins_when_its_request_has_ended(caller):
    caller.feed(caller.call_head(1, "/s/count"), data(1, framed(b"2")))
    await caller.settled()
    assert caller.outcome(1) == (0, b"")
    caller.feed(last_data(1))
    await caller.settled()
    assert caller.outcome(1) == (StatusCode.OK, framed(b"0") + framed(b"1"))


async def test_an_opened_window_resumes_the_stream(caller):
    caller.feed(settings(s4=5), caller.call_head(1, "/s/upper"), data(1, framed(b"ab") * 2))
    await caller.settled()
    assert caller.outcome(1) == (200, framed(b"AB")[:5])
    caller.feed(window_update(1, 100), last_data(1))
    await caller.settled()
    assert caller.outcome(1) == (StatusCode.OK, b"AB" + framed(b"AB"))
