"""Encoded answers: messages, streams, statuses; and their pace."""

import pytest

from ratelimitd.rpc.interface import RpcError, StatusCode
from ratelimitd.rpc.messages import framed
from tests.http2_peer import DATA, END_STREAM, POST, data, window_update
from tests.native_caller import Caller


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/s/refuse", StatusCode.ABORTED),
        ("/s/broken", StatusCode.INTERNAL),
        ("/s/nope", StatusCode.UNIMPLEMENTED),
    ],
)
def test_a_call_that_fails_is_trailers_only(caller, path, status):
    caller.feed(caller.call(1, path))
    [answer] = caller.sent
    assert answer.flags & END_STREAM
    assert caller.outcome(1) == (status, b"")


def test_an_answer_over_the_bound_is_an_error():
    caller = Caller(max_message_bytes=5)
    caller.feed(caller.call(1, "/s/left", b"", grpc_timeout="1000S"))
    assert caller.outcome(1)[0] is StatusCode.RESOURCE_EXHAUSTED


async def test_an_answer_of_a_stream_over_the_bound_ends_it():
    caller = Caller(max_message_bytes=5)
    caller.feed(caller.call(1, "/s/large", b""))
    await caller.settled()
    assert caller.outcome(1) == (StatusCode.RESOURCE_EXHAUSTED, b"")


async def test_a_stream_of_answers_ends_with_status_ok(caller):
    caller.feed(caller.call(1, "/s/count", b"2"), caller.call(3, "/s/count", b"0"))
    await caller.settled()
    assert caller.outcome(1) == (StatusCode.OK, framed(b"0") + framed(b"1"))
    assert caller.outcome(3) == (StatusCode.OK, b"")
    assert caller.calls.open == {}


async def test_a_stream_that_fails_after_an_answer_ends_with_trailers(caller):
    caller.feed(caller.call(1, "/s/count", b"not a number"))
    caller.feed(caller.call_head(3, "/s/upper"), data(3, framed(b"a") + b"\x01\x00\x00\x00\x00"))
    await caller.settled()
    assert caller.outcome(1) == (StatusCode.INTERNAL, b"")
    assert caller.outcome(3) == (StatusCode.INTERNAL, framed(b"A"))


async def test_a_stream_waits_for_the_peers_window(caller):
    caller.feed(window_update(0, 1 << 20), caller.call(1, "/s/large"))
    await caller.settled()
    sent = sum(len(sent.payload) for sent in caller.sent if sent.type == DATA)
    assert sent == 65_535
    assert caller.connection.buffered_bytes == 70_005 - 65_535
    caller.feed(window_update(1, 1 << 20))
    await caller.settled()
    assert caller.outcome(1) == (StatusCode.OK, framed(bytes(70_000)) * 3)


async def test_a_stream_waits_while_the_peer_does_not_read(caller):
    caller.calls.answers.blocked = True
    caller.feed(caller.call(1, "/s/count", b"2"))
    await caller.settled()
    assert sum(sent.type == DATA for sent in caller.sent) == 1
    caller.calls.answers.unblock()
    await caller.settled()
    assert caller.outcome(1) == (StatusCode.OK, framed(b"0") + framed(b"1"))


async def test_a_waiting_call_is_open_until_it_is_answered(caller):
    caller.feed(caller.call(1, "/s/wait"))
    [open_call] = caller.calls.open.values()
    answers = caller.calls.answers
    assert answers.is_open(1, open_call)
    answers.answer(1, b"done")
    assert not answers.is_open(1, open_call)
    assert caller.woken == 1
    caller.collect()
    assert caller.outcome(1) == (StatusCode.OK, framed(b"done"))
    open_call.cancel()
    await caller.shared.all_ended()


async def test_a_failed_call_cancels_its_handler(caller):
    caller.feed(caller.call(1, "/s/wait"))
    caller.calls.answers.fail(1, RpcError(StatusCode.DEADLINE_EXCEEDED, "late"))
    await caller.settled()
    assert caller.outcome(1) == (StatusCode.DEADLINE_EXCEEDED, b"")
    assert caller.errors == {"deadline_exceeded": 1}
    await caller.shared.all_ended()


def test_other_requests_are_answered_in_plain_http_with_a_body_except_for_head(caller):
    caller.feed(
        caller.head(1, [(":method", "HEAD"), *POST[1:]]),
        caller.call_head(3, content_type="text/plain"),
    )
    answers = caller.calls.answers
    assert [answers.answer_plainly(stream_id) for stream_id in (1, 1, 3, 5)] == [
        True,
        False,
        True,
        False,
    ]
    caller.collect()
    assert caller.outcome(1) == (405, b"")
    status, body = caller.outcome(3)
    assert (status, b"gRPC" in body) == (415, True)
    assert caller.errors == {"bad_request": 2}


def test_an_acknowledgement_of_no_octets_sends_nothing(caller):
    caller.calls.answers.acknowledge(1, 0)
    assert caller.woken == 0


def test_a_lost_connection_is_not_woken(caller):
    caller.feed(caller.call_head(1), data(1, b"\0\0"))
    woken = caller.woken
    caller.calls.answers.acknowledge(1, 1)
    assert caller.woken == woken + 1
    caller.calls.lose_all()
    caller.calls.answers.acknowledge(1, 1)
    assert caller.woken == woken + 1


def test_a_refused_request_is_counted_as_bad_request(caller):
    caller.feed(caller.call_head(1))
    caller.calls.answers.refuse(1, RpcError(StatusCode.INTERNAL, "not a message"))
    caller.collect()
    assert caller.outcome(1) == (StatusCode.INTERNAL, b"")
    assert (caller.errors, caller.calls.open) == ({"bad_request": 1}, {})
