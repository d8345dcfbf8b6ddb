"""Calls over a real connection of HTTP/2, octet for octet, without a socket and with a clock that the test moves."""

import asyncio
import gzip
from dataclasses import replace
from functools import partial

import pytest

from ratelimitd.http2.errors import ErrorCode
from ratelimitd.http2.limits import Limits
from ratelimitd.rpc.call_head import Peer as PeerName
from ratelimitd.rpc.framing import framed
from ratelimitd.rpc.interface import Methods, RpcError, StatusCode
from ratelimitd.rpc.limits import TransportLimits
from ratelimitd.rpc.native_calls import ConnectionCalls
from ratelimitd.rpc.native_shared import SharedCalls
from ratelimitd.stats import CheckStats
from tests.http2_peer import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    POST,
    WINDOW_UPDATE,
    Peer,
    data,
    frame,
    last_data,
    rst_stream,
    settings,
    window_update,
)


def echo(message, _call):
    return message


def left(_message, call):
    return str(call.time_remaining_s()).encode()


def refuse(_message, _call):
    raise RpcError(StatusCode.ABORTED, "no", b"details")


def broken(_message, _call):
    raise KeyError("secret")  # noqa: EM101


async def wait(_message, _call):
    await asyncio.Event().wait()


async def count(message, _call):
    for number in range(int(message)):
        yield b"%d" % number


async def upper(questions, _call):
    async for question in questions:
        yield question.upper()


async def large(_message, _call):
    for _ in range(3):
        yield bytes(70_000)


UNARY = {"/s/m": echo, "/s/left": left, "/s/refuse": refuse, "/s/broken": broken, "/s/wait": wait}
METHODS = Methods(UNARY, {"/s/count": count, "/s/large": large}, {"/s/upper": upper})


class Caller(Peer):
    """A peer, and the calls of its connection."""

    def __init__(self, http2=None, methods=METHODS, **limits):
        super().__init__(limits=http2 or Limits())
        self.now_s = 100.0
        self.woken = 0
        self.shared = SharedCalls(
            methods, TransportLimits(**limits), CheckStats(), lambda: self.now_s
        )
        self.calls = ConnectionCalls(
            self.shared, self.connection, PeerName("ipv4:10.0.0.1:1"), self.wake
        )

    def wake(self):
        self.woken += 1

    def feed(self, *parts):
        events = super().feed(*parts)
        if hasattr(self, "calls"):
            assert self.calls.handle(iter(events), self.now_s)
            self.collect()
        return events

    def call(self, stream_id, path="/s/m", message=b"hi", *, body=None, **fields):
        """A whole request."""
        head = self.call_head(stream_id, path, **fields)
        return head + last_data(stream_id, framed(message) if body is None else body)

    def call_head(self, stream_id, path="/s/m", flags=END_HEADERS, **fields):
        named = {**dict(POST), ":path": path}
        named |= {name.replace("_", "-"): value for name, value in fields.items()}
        return self.head(stream_id, list(named.items()), flags)

    async def settled(self):
        """Let what runs get as far as it can, and read what it has sent."""
        for _ in range(10):
            await asyncio.sleep(0)
            self.collect()

    def outcome(self, stream_id):
        """(status, messages) of an answered call; the status is that of HTTP where there is none of gRPC."""
        body, fields = b"", {}
        for sent in self.sent:
            if sent.stream_id == stream_id and sent.type == HEADERS:
                fields |= dict(self.fields(sent.payload))
            elif sent.stream_id == stream_id and sent.type == DATA:
                body += sent.payload
        self.sent = [sent for sent in self.sent if sent.stream_id != stream_id]
        if b"grpc-status" not in fields:
            return int(fields.get(b":status", b"0")), body
        return StatusCode(int(fields[b"grpc-status"])), body

    @property
    def errors(self):
        return {
            str(cause): number for cause, number in self.shared.stats.errors_by_transport.items()
        }


@pytest.fixture
def caller():
    return Caller()


async def test_a_call_is_answered_at_once_and_nothing_is_kept(caller):
    caller.feed(caller.call(1), caller.call(3, message=b""), caller.call(5, message=bytes(9_000)))
    assert caller.outcome(1) == (StatusCode.OK, framed(b"hi"))
    assert caller.outcome(3) == (StatusCode.OK, framed(b""))
    assert caller.outcome(5) == (StatusCode.OK, framed(bytes(9_000)))
    assert caller.calls.open == {}
    assert (caller.woken, caller.errors) == (0, {})
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("cut", range(1, 7))
def test_a_message_may_come_in_any_number_of_frames(caller, cut):
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


def test_a_large_message_is_acknowledged_as_it_comes(caller):
    limits = Limits()
    message = bytes(limits.stream_window_bytes * 3)
    octets = framed(message)
    caller.feed(window_update(0, 1 << 30), window_update(0, 1), caller.call_head(1))
    for start in range(0, len(octets), 16_384):
        caller.feed(data(1, octets[start : start + 16_384]))
    assert sum(sent.type == WINDOW_UPDATE for sent in caller.sent) >= 4
    caller.feed(last_data(1), window_update(1, 1 << 30))
    assert caller.outcome(1) == (StatusCode.OK, octets)


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
def test_a_request_without_exactly_one_good_message_is_refused(caller, path, body, status):
    caller.feed(caller.call(1, path, body=body))
    assert caller.outcome(1) == (status, b"")
    caller.feed(caller.call_head(3, path, END_HEADERS | END_STREAM))
    assert caller.outcome(3) == (StatusCode.INTERNAL, b"")
    assert caller.calls.open == {}
    assert caller.errors == {"bad_request": 2}


def test_a_compressed_message_is_inflated(caller):
    compressed = gzip.compress(b"hello")
    body = b"\x01" + framed(compressed)[1:]
    caller.feed(caller.call(1, body=body, grpc_encoding="gzip"))
    assert caller.outcome(1) == (StatusCode.OK, framed(b"hello"))


def test_a_request_of_http_is_answered_when_it_has_ended(caller):
    caller.feed(caller.get(1), caller.call_head(3, content_type="text/plain"), data(3, b"x" * 9))
    status, body = caller.outcome(1)
    assert (status, b"gRPC" in body) == (405, True)
    assert caller.outcome(3) == (0, b"")
    caller.feed(last_data(3, b"x"))
    assert caller.outcome(3)[0] == 415
    caller.feed(caller.head(5, [(":method", "HEAD"), *POST[1:]], END_HEADERS | END_STREAM))
    assert caller.outcome(5) == (405, b"")
    caller.feed(caller.head(7, [(":method", "PUT"), *POST[1:]]), rst_stream(7))
    assert caller.calls._plain == {}


def test_a_head_that_is_too_large_is_told_so(caller):
    caller.feed(caller.call_head(1, x="0" * 20_000))
    assert caller.outcome(1)[0] is StatusCode.RESOURCE_EXHAUSTED


def test_a_deadline_begins_when_the_head_comes(caller):
    caller.feed(caller.call(1, "/s/left", grpc_timeout="2S"))
    assert caller.outcome(1) == (StatusCode.OK, framed(b"2.0"))
    caller.feed(caller.call(3, "/s/left", grpc_timeout="3S"))
    assert caller.outcome(3) == (StatusCode.OK, framed(b"3.0"))
    caller.feed(caller.call(5, "/s/left"))
    assert caller.outcome(5) == (StatusCode.OK, framed(b"None"))


@pytest.mark.parametrize("path", ["/s/m", "/s/count", "/s/upper"])
def test_a_call_that_is_late_on_arrival_is_not_begun(caller, path):
    caller.feed(caller.call(1, path, grpc_timeout="0S"))
    assert caller.outcome(1) == (StatusCode.DEADLINE_EXCEEDED, b"")
    assert caller.errors == {"deadline_exceeded": 1}


async def test_a_deadline_that_passes_ends_the_call_and_its_handler(caller):
    caller.feed(caller.call(1, "/s/wait", grpc_timeout="2S"), caller.call(3, "/s/wait"))
    await caller.settled()
    caller.calls.expire(101.9)
    assert len(caller.calls.open) == 2
    caller.calls.expire(102.0)
    caller.collect()
    assert caller.outcome(1) == (StatusCode.DEADLINE_EXCEEDED, b"")
    await caller.settled()
    assert caller.shared.unary_in_progress == 1
    caller.calls.lose_all()
    await caller.shared.all_ended()
    assert caller.errors == {"deadline_exceeded": 1, "cancelled": 1}


async def test_a_caller_that_leaves_cancels_its_handler(caller):
    caller.feed(caller.call(1, "/s/wait"))
    await caller.settled()
    caller.feed(rst_stream(1))
    await caller.shared.all_ended()
    assert caller.shared.unary_in_progress == 0
    assert (caller.sent, caller.errors) == ([], {"cancelled": 1})


def test_a_stream_that_the_peer_broke_is_counted_by_its_cause(caller):
    caller.feed(caller.call_head(1, content_length="5"), last_data(1, b"x"))
    assert caller.errors == {"malformed": 1}
    assert caller.calls.open == {}


async def test_waiting_calls_are_bounded(caller):
    caller = Caller(max_concurrent_rpcs=1)
    caller.feed(caller.call(1, "/s/wait"), caller.call(3))
    assert caller.outcome(3)[0] is StatusCode.RESOURCE_EXHAUSTED
    assert caller.errors == {"too_many_calls": 1}
    caller.calls.end_all(RpcError(StatusCode.UNAVAILABLE, "stopping"))
    caller.collect()
    assert caller.outcome(1)[0] is StatusCode.UNAVAILABLE
    await caller.shared.all_ended()
    caller.feed(caller.call(5))
    assert caller.outcome(5)[0] is StatusCode.OK


def test_unfinished_requests_are_bounded_on_a_connection_and_over_all():
    for bound in ("max_request_bytes_per_connection", "max_request_bytes"):
        caller = Caller(**{bound: 1_000})
        caller.feed(caller.call_head(1), data(1, framed(bytes(700))[:-1]))
        caller.feed(caller.call_head(3), data(3, framed(bytes(700))[:-1]))
        assert caller.outcome(3)[0] is StatusCode.RESOURCE_EXHAUSTED
        caller.feed(last_data(1, b"\x00"))
        assert caller.outcome(1)[0] is StatusCode.OK
        assert caller.shared.request_bytes == caller.calls._request_bytes == 0


def test_requests_that_still_arrive_are_bounded_whatever_they_ask_for():
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


def test_requests_whose_rest_does_not_come_in_time_are_ended():
    caller = Caller(request_timeout_ms=1_000)
    caller.feed(caller.call_head(1), caller.call_head(3, content_type="text/plain"))
    caller.now_s += 0.9
    caller.calls.look(caller.now_s)
    assert caller.outcome(1) == caller.outcome(3) == (0, b"")
    caller.now_s += 0.1
    caller.calls.look(caller.now_s)
    caller.collect()
    assert caller.outcome(1)[0] is StatusCode.DEADLINE_EXCEEDED
    assert caller.outcome(3)[0] == 415
    assert caller.errors["slow_request"] == 2
    assert (caller.shared.open_requests, caller.calls._plain, caller.calls.open) == (0, {}, {})


async def test_a_handler_that_takes_its_time_is_no_slow_request(caller):
    caller.feed(caller.call(1, "/s/wait"), caller.call_head(3, "/s/upper"))
    caller.calls.look(caller.now_s + 3_600)
    assert len(caller.calls.open) == 2
    caller.calls.lose_all()
    await caller.shared.all_ended()


async def test_one_turn_of_the_loop_answers_one_question_however_many_streams_ask(caller):
    for stream_id in (1, 3, 5):
        caller.feed(caller.call_head(stream_id, "/s/upper"), data(stream_id, framed(b"a") * 20))
    most = 0
    for _ in range(400):
        caller.sent.clear()
        await asyncio.sleep(0)
        caller.collect()
        most = max(most, sum(sent.type == DATA for sent in caller.sent))
    assert most == 1
    assert not any(open_call.questions._parts for open_call in caller.calls.open.values())
    caller.calls.lose_all()
    await caller.shared.all_ended()


async def test_after_a_broken_question_nothing_is_kept_although_the_handler_is_stuck(caller):
    caller.feed(settings(s4=0), caller.call_head(1, "/s/upper"))
    caller.feed(data(1, framed(b"a") + b"\0\xff\xff\xff\xff"))
    await caller.settled()
    for _ in range(50):
        caller.feed(data(1, bytes(16_000)))
    [open_call] = caller.calls.open.values()
    assert open_call.waiting_bytes < 100
    caller.calls.lose_all()
    await caller.shared.all_ended()


async def test_an_unfinished_question_counts_against_the_bound_on_unfinished_requests():
    caller = Caller(max_request_bytes=1_000)
    caller.feed(caller.call_head(1, "/s/upper"), data(1, framed(bytes(2_000))[:-1]))
    assert caller.outcome(1)[0] is StatusCode.RESOURCE_EXHAUSTED
    assert caller.shared.request_bytes == 0
    await caller.shared.all_ended()


def test_an_answer_over_the_bound_is_an_error():
    caller = Caller(max_message_bytes=5)
    caller.feed(caller.call(1, "/s/left", b"", grpc_timeout="1000S"))
    assert caller.outcome(1)[0] is StatusCode.RESOURCE_EXHAUSTED


async def test_a_stream_of_answers_ends_well(caller):
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


async def test_questions_are_answered_as_they_come(caller):
    caller.feed(caller.call_head(1, "/s/upper"))
    for text in (b"a", b"b"):
        caller.feed(data(1, framed(text)))
        await caller.settled()
    caller.feed(last_data(1))
    await caller.settled()
    assert caller.outcome(1) == (StatusCode.OK, framed(b"A") + framed(b"B"))


async def test_what_is_wrong_with_a_question_is_told_behind_the_answers(caller):
    caller.feed(caller.call_head(1, "/s/upper"), last_data(1, framed(b"a") + b"\x00"))
    too_large = b"\x00\xff\xff\xff\xff"
    caller.feed(caller.call_head(3, "/s/upper"), data(3, framed(b"a") + too_large))
    await caller.settled()
    assert caller.outcome(1) == (StatusCode.INTERNAL, framed(b"A"))
    assert caller.outcome(3) == (StatusCode.RESOURCE_EXHAUSTED, framed(b"A"))


async def test_streams_are_bounded(caller):
    caller = Caller(max_streams=1)
    caller.feed(caller.call_head(1, "/s/upper"), caller.call_head(3, "/s/upper"))
    assert caller.outcome(3)[0] is StatusCode.RESOURCE_EXHAUSTED
    assert caller.errors == {"too_many_streams": 1}
    caller.feed(last_data(1))
    await caller.settled()
    assert caller.shared.streams_in_progress == 0


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
    caller.calls.blocked = True
    caller.feed(caller.call(1, "/s/count", b"2"))
    await caller.settled()
    assert sum(sent.type == DATA for sent in caller.sent) == 1
    caller.calls.unblock()
    await caller.settled()
    assert caller.outcome(1) == (StatusCode.OK, framed(b"0") + framed(b"1"))


def test_a_window_of_a_stream_that_nobody_waits_for_is_no_news(caller):
    caller.feed(settings(s4=10), caller.call(1, "/s/m", bytes(20)))
    assert caller.calls.open == {}
    caller.feed(window_update(1, 100), frame(PING, 0, 0, bytes(8)))
    assert caller.outcome(1) == (StatusCode.OK, framed(bytes(20)))


async def test_a_window_that_opens_for_a_call_which_fails_in_the_same_read_is_no_news():
    caller = Caller(max_request_bytes=20)
    caller.feed(settings(s4=5), caller.call_head(1, "/s/upper"), data(1, framed(b"question")))
    await caller.settled()
    caller.feed(data(1, framed(bytes(100))[:60]), window_update(1, 100))
    assert caller.outcome(1) == (StatusCode.RESOURCE_EXHAUSTED, framed(b"QUESTION"))
    await caller.shared.all_ended()


def test_of_a_lost_connection_no_request_of_http_is_left_over(caller):
    caller.feed(caller.call_head(1, content_type="text/plain"))
    caller.calls.lose_all()
    assert (caller.shared.open_requests, caller.calls._plain) == (0, {})


async def test_a_stopping_server_ends_streams_and_leaves_calls(caller):
    caller.feed(caller.call_head(1, "/s/upper"), caller.call(3, "/s/wait"))
    await caller.settled()
    caller.calls.end_streams(RpcError(StatusCode.UNAVAILABLE, "stopping"))
    caller.collect()
    assert caller.outcome(1)[0] is StatusCode.UNAVAILABLE
    assert list(caller.calls.open) == [3]
    caller.calls.lose_all()
    await caller.shared.all_ended()


def test_dear_calls_leave_others_their_turn(caller):
    caller = Caller()
    compressed = b"\x01" + framed(gzip.compress(bytes(100)))[1:]
    parts = [caller.call(n, body=compressed, grpc_encoding="gzip") for n in (1, 3)]
    events = iter(caller.connection.receive(b"".join(parts)))
    started_s, caller.now_s = caller.now_s, caller.now_s + 0.003
    assert not caller.calls.handle(events, started_s)
    assert caller.collect()[-1].stream_id == 1
    assert caller.calls.handle(events, caller.now_s)
    assert caller.collect()[-1].stream_id == 3


@pytest.mark.parametrize("path", ["/s/nope", "/s/refuse", "/s/m"])
def test_calls_that_fail_or_come_in_pieces_are_dear_ones(caller, path):
    heads = [caller.call_head(n, path) for n in (1, 3)]
    whole = [caller.call(n, path) for n in (5, 7)]
    parts = heads if path == "/s/m" else [*heads, *whole]
    events = iter(caller.connection.receive(b"".join(parts)))
    started_s, caller.now_s = caller.now_s, caller.now_s + 0.003
    turns = 1
    while not caller.calls.handle(events, started_s):
        turns += 1
    assert turns == len(parts) + 1


def test_data_for_a_call_that_is_over_is_ignored(caller):
    caller.feed(caller.call_head(1, "/s/nope"))
    assert caller.outcome(1)[0] is StatusCode.UNIMPLEMENTED
    assert caller.feed(last_data(1, framed(b"late"))) == []
    assert caller.resets in ([], [(1, ErrorCode.NO_ERROR)])


class Bulk:
    """Two methods with a shortcut that answers in capitals what begins with a letter, and the calls it was asked for.

    The methods' own handlers answer with a number, or fail where there is none.
    """

    def __init__(self):
        self.asked, self.own = [], []
        unary = {"/b/one": self.number, "/b/two": self.number, "/s/m": echo}
        self.methods = Methods(
            unary, bulk={"/b/one": partial(self.answer, 1), "/b/two": partial(self.answer, 2)}
        )

    def answer(self, method, messages):
        self.asked.append((method, list(messages)))
        return [message.upper() if message[:1].isalpha() else None for message in messages]

    def number(self, message, call):
        self.own.append(message)
        return b"%d" % int(message)


@pytest.fixture
def bulk():
    return Bulk()


@pytest.fixture
def bulk_caller(bulk):
    return Caller(methods=bulk.methods)


def told(caller, *stream_ids):
    return [caller.outcome(stream_id) for stream_id in stream_ids]


def test_calls_that_come_together_are_answered_together(bulk, bulk_caller):
    calls = [bulk_caller.call(n, "/b/one", b"m%d" % n) for n in (1, 3, 5)]
    bulk_caller.feed(*calls)
    assert bulk.asked == [(1, [b"m1", b"m3", b"m5"])]
    assert told(bulk_caller, 1, 3, 5) == [(StatusCode.OK, framed(b"M%d" % n)) for n in (1, 3, 5)]
    assert (bulk_caller.sent, bulk_caller.errors, bulk_caller.calls.open) == ([], {}, {})


def test_what_the_shortcut_does_not_answer_the_methods_own_handler_does(bulk, bulk_caller):
    calls = [(1, b"a"), (3, b"33"), (5, b"b"), (7, b"?"), (9, b"")]
    bulk_caller.feed(*(bulk_caller.call(n, "/b/one", message) for n, message in calls))
    assert bulk.asked == [(1, [b"a", b"33", b"b", b"?", b""])]
    assert bulk.own == [b"33", b"?", b""]
    assert told(bulk_caller, 1, 3, 5) == [
        (StatusCode.OK, framed(answer)) for answer in (b"A", b"33", b"B")
    ]
    assert told(bulk_caller, 7, 9) == [(StatusCode.INTERNAL, b"")] * 2
    assert bulk_caller.sent == []


def test_an_empty_answer_of_the_shortcut_is_an_answer():
    caller = Caller(
        methods=Methods({"/b/one": refuse}, bulk={"/b/one": lambda messages: [b""] * len(messages)})
    )
    caller.feed(caller.call(1, "/b/one"))
    assert caller.outcome(1) == (StatusCode.OK, framed(b""))


def test_each_method_has_its_own_run_and_others_do_not_end_one(bulk, bulk_caller):
    paths = ["/b/one", "/s/m", "/b/one", "/b/two", "/b/two", "/b/one"]
    ids = range(1, 13, 2)
    bulk_caller.feed(*(bulk_caller.call(n, path, b"m") for n, path in zip(ids, paths, strict=True)))
    assert bulk.asked == [(1, [b"m"] * 2), (2, [b"m"] * 2), (1, [b"m"])]
    capital, small = (StatusCode.OK, framed(b"M")), (StatusCode.OK, framed(b"m"))
    assert told(bulk_caller, *ids) == [capital, small, capital, capital, capital, capital]
    assert bulk_caller.sent == []


@pytest.mark.parametrize("size", [1_024, 4_000])
def test_a_long_message_is_for_the_methods_own_handler(bulk, bulk_caller, size):
    bulk_caller.feed(bulk_caller.call(1, "/b/one", b"7".zfill(size)))
    assert bulk.asked == []
    assert bulk_caller.outcome(1) == (StatusCode.OK, framed(b"7"))


def test_a_compressed_message_is_for_the_methods_own_handler(bulk, bulk_caller):
    body = b"\x01" + framed(gzip.compress(b"7"))[1:]
    bulk_caller.feed(bulk_caller.call(1, "/b/one", body=body, grpc_encoding="gzip"))
    assert bulk.asked == []
    assert bulk_caller.outcome(1) == (StatusCode.OK, framed(b"7"))


def test_a_call_in_pieces_is_for_the_methods_own_handler(bulk, bulk_caller):
    body = framed(b"7")
    bulk_caller.feed(bulk_caller.call_head(1, "/b/one"), data(1, body[:3]), last_data(1, body[3:]))
    assert bulk.asked == []
    assert bulk_caller.outcome(1) == (StatusCode.OK, framed(b"7"))


@pytest.mark.parametrize("timeouts", [["0S"], ["1S", "0n"], ["0n", "0S"]])
def test_a_call_that_is_late_on_arrival_is_not_for_the_shortcut(bulk, bulk_caller, timeouts):
    for stream_id, timeout in zip((1, 3), timeouts, strict=False):
        bulk_caller.feed(bulk_caller.call(stream_id, "/b/one", b"a", grpc_timeout=timeout))
        late = timeout.startswith("0")
        expected = StatusCode.DEADLINE_EXCEEDED if late else StatusCode.OK
        assert bulk_caller.outcome(stream_id)[0] is expected
    assert bulk.asked == [(1, [b"a"])] * timeouts.count("1S")
    assert bulk.own == []


async def test_where_too_many_calls_wait_the_shortcut_is_not_taken_either(bulk):
    methods = replace(bulk.methods, unary={**bulk.methods.unary, "/s/wait": wait})
    caller = Caller(methods=methods, max_concurrent_rpcs=1)
    caller.feed(caller.call(1, "/s/wait"), caller.call(3, "/b/one", b"a"))
    assert bulk.asked == bulk.own == []
    assert caller.outcome(3)[0] is StatusCode.RESOURCE_EXHAUSTED
    caller.calls.lose_all()
    await caller.shared.all_ended()


def test_a_call_that_was_reset_in_the_same_read_is_not_answered(bulk, bulk_caller):
    parts = [bulk_caller.call(n, "/b/one", message) for n, message in ((1, b"a"), (3, b"3"))]
    bulk_caller.feed(*parts, rst_stream(1), rst_stream(3), bulk_caller.call(5, "/b/one", b"b"))
    assert [sent.stream_id for sent in bulk_caller.sent] == [5, 5, 5]
    assert bulk_caller.calls.open == {}


def test_calls_that_the_shortcut_leaves_do_not_hold_others_up(bulk, bulk_caller):
    """Each of them may be dear, and there may be a slice full of them."""
    caller = bulk_caller
    parts = [caller.call(n, "/b/one", message) for n, message in ((1, b"?"), (3, b"a"), (5, b"?"))]
    events = iter(caller.connection.receive(b"".join(parts)))
    started_s, caller.now_s = caller.now_s, caller.now_s + 0.003
    assert not caller.calls.handle(events, started_s)
    assert [sent.stream_id for sent in caller.collect()] == [3, 3, 3, 1]
    assert caller.calls.handle(events, caller.now_s)
    assert [sent.stream_id for sent in caller.collect()] == [5]


def test_a_turn_that_is_over_answers_the_calls_that_came_together_until_then(bulk, bulk_caller):
    caller = bulk_caller
    parts = [
        caller.call(1, "/b/one", b"a"),
        caller.call(3, "/nope"),
        caller.call(5, "/b/one", b"b"),
    ]
    events = iter(caller.connection.receive(b"".join(parts)))
    started_s, caller.now_s = caller.now_s, caller.now_s + 0.003
    assert not caller.calls.handle(events, started_s)
    assert bulk.asked == [(1, [b"a"])]
    assert caller.calls.handle(events, caller.now_s)
    assert bulk.asked == [(1, [b"a"]), (1, [b"b"])]


def test_of_a_lost_connection_no_call_is_left_over(bulk, bulk_caller):
    caller = bulk_caller
    events = iter(
        caller.connection.receive(b"".join(caller.call(n, "/b/one", b"?") for n in (1, 3)))
    )
    started_s, caller.now_s = caller.now_s, caller.now_s + 0.003
    assert not caller.calls.handle(events, started_s)
    caller.calls.lose_all()
    assert caller.calls.handle(events, caller.now_s)
    assert bulk.own == [b"?"]
