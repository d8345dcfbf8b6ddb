"""Calls over a real HTTP/2 connection, without a socket and with a manual clock."""

import asyncio
import gzip
from dataclasses import replace
from functools import partial

import pytest

from ratelimitd.rpc.interface import Methods, RpcError, StatusCode
from ratelimitd.rpc.messages import framed
from tests.http2_peer import data, last_data, rst_stream
from tests.native_caller import Caller, echo, refuse, wait


async def test_a_call_is_answered_at_once_and_nothing_is_kept(caller):
    caller.feed(caller.call(1), caller.call(3, message=b""))
    assert caller.outcome(1) == (StatusCode.OK, framed(b"hi"))
    assert caller.outcome(3) == (StatusCode.OK, framed(b""))
    assert caller.calls.open == {}
    assert (caller.woken, caller.errors) == (0, {})
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_a_deadline_begins_with_the_arrival_of_the_head(caller):
    caller.feed(caller.call(1, "/s/left", grpc_timeout="2S"))
    assert caller.outcome(1) == (StatusCode.OK, framed(b"2.0"))
    caller.feed(caller.call(3, "/s/left", grpc_timeout="3S"))
    assert caller.outcome(3) == (StatusCode.OK, framed(b"3.0"))
    caller.feed(caller.call(5, "/s/left"))
    assert caller.outcome(5) == (StatusCode.OK, framed(b"None"))


def test_the_deadline_of_a_deferred_call_begins_with_its_arrival(caller):
    events = iter(caller.connection.receive(caller.call(1, "/s/left", grpc_timeout="5S")))
    caller.now_s += 3
    assert caller.calls.handle(events, caller.now_s, caller.now_s - 3)
    caller.collect()
    assert caller.outcome(1) == (StatusCode.OK, framed(b"2.0"))


def test_the_timeout_of_a_deferred_request_begins_with_its_arrival(caller):
    events = iter(caller.connection.receive(caller.call_head(1, grpc_timeout="5S")))
    assert caller.calls.handle(events, 103.0, 100.0)
    assert caller.calls.open[1].began_s == 100.0
    assert caller.calls.open[1].call.deadline_s == 105.0


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


def test_incomplete_requests_time_out():
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
    assert caller.errors == {"slow_request": 2}
    assert (caller.shared.open_requests, caller.calls._table.plain, caller.calls.open) == (
        0,
        {},
        {},
    )


async def test_a_slow_handler_is_not_a_slow_request(caller):
    caller.feed(caller.call(1, "/s/wait"), caller.call_head(3, "/s/upper"))
    caller.calls.look(caller.now_s + 3_600)
    assert len(caller.calls.open) == 2
    caller.calls.lose_all()
    await caller.shared.all_ended()


def test_a_lost_connection_removes_its_http_requests(caller):
    caller.feed(caller.call_head(1, content_type="text/plain"))
    caller.calls.lose_all()
    assert (caller.shared.open_requests, caller.calls._table.plain) == (0, {})


async def test_a_stopping_server_ends_streams_and_leaves_calls(caller):
    caller.feed(caller.call_head(1, "/s/upper"), caller.call(3, "/s/wait"))
    await caller.settled()
    caller.calls.end_streams(RpcError(StatusCode.UNAVAILABLE, "stopping"))
    caller.collect()
    assert caller.outcome(1)[0] is StatusCode.UNAVAILABLE
    assert list(caller.calls.open) == [3]
    caller.calls.lose_all()
    await caller.shared.all_ended()


async def test_large_calls_are_queued_behind_others(caller):
    compressed = b"\x01" + framed(gzip.compress(b"hello"))[1:]
    caller.shared.queue.submit("other:1", lambda: None)
    caller.feed(
        caller.call(1, message=bytes(9_000)),
        caller.call(3, body=compressed, grpc_encoding="gzip"),
        caller.call(5),
    )
    assert {sent.stream_id for sent in caller.sent} == {5}
    await caller.settled()
    assert caller.outcome(1) == (StatusCode.OK, framed(bytes(9_000)))
    assert caller.outcome(3) == (StatusCode.OK, framed(b"hello"))
    assert caller.calls.open == {}


@pytest.mark.parametrize("path", ["/s/nope", "/s/refuse", "/s/m"])
def test_failed_calls_and_calls_in_pieces_are_expensive(caller, path):
    heads = [caller.call_head(n, path) for n in (1, 3)]
    whole = [caller.call(n, path) for n in (5, 7)]
    parts = heads if path == "/s/m" else [*heads, *whole]
    events = iter(caller.connection.receive(b"".join(parts)))
    started_s, caller.now_s = caller.now_s, caller.now_s + 0.003
    turns = 1
    while not caller.calls.handle(events, started_s):
        turns += 1
    assert turns == len(parts) + 1


class Bulk:
    """Two methods with bulk handlers, which answer messages that begin with a letter in capitals; records the calls.

    The unary handlers answer messages that are numbers, and fail on others.
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


def test_calls_that_arrive_together_are_answered_by_one_bulk_call(bulk, bulk_caller):
    calls = [bulk_caller.call(n, "/b/one", b"m%d" % n) for n in (1, 3, 5)]
    bulk_caller.feed(*calls)
    assert bulk.asked == [(1, [b"m1", b"m3", b"m5"])]
    assert told(bulk_caller, 1, 3, 5) == [(StatusCode.OK, framed(b"M%d" % n)) for n in (1, 3, 5)]
    assert (bulk_caller.sent, bulk_caller.errors, bulk_caller.calls.open) == ([], {}, {})


def test_the_unary_handler_answers_what_the_bulk_handler_leaves(bulk, bulk_caller):
    calls = [(1, b"a"), (3, b"33"), (5, b"b"), (7, b"?"), (9, b"")]
    bulk_caller.feed(*(bulk_caller.call(n, "/b/one", message) for n, message in calls))
    assert bulk.asked == [(1, [b"a", b"33", b"b", b"?", b""])]
    assert bulk.own == [b"33", b"?", b""]
    assert told(bulk_caller, 1, 3, 5) == [
        (StatusCode.OK, framed(answer)) for answer in (b"A", b"33", b"B")
    ]
    assert told(bulk_caller, 7, 9) == [(StatusCode.INTERNAL, b"")] * 2
    assert bulk_caller.sent == []


def test_an_empty_answer_of_the_bulk_handler_is_valid():
    caller = Caller(
        methods=Methods({"/b/one": refuse}, bulk={"/b/one": lambda messages: [b""] * len(messages)})
    )
    caller.feed(caller.call(1, "/b/one"))
    assert caller.outcome(1) == (StatusCode.OK, framed(b""))


def test_methods_with_a_bulk_handler_have_separate_runs_that_other_calls_do_not_end(
    bulk, bulk_caller
):
    paths = ["/b/one", "/s/m", "/b/one", "/b/two", "/b/two", "/b/one"]
    ids = range(1, 13, 2)
    bulk_caller.feed(*(bulk_caller.call(n, path, b"m") for n, path in zip(ids, paths, strict=True)))
    assert bulk.asked == [(1, [b"m"] * 2), (2, [b"m"] * 2), (1, [b"m"])]
    capital, small = (StatusCode.OK, framed(b"M")), (StatusCode.OK, framed(b"m"))
    assert told(bulk_caller, *ids) == [capital, small, capital, capital, capital, capital]
    assert bulk_caller.sent == []


@pytest.mark.parametrize("size", [1_024, 4_000])
async def test_a_long_message_goes_to_the_unary_handler(bulk, bulk_caller, size):
    bulk_caller.feed(bulk_caller.call(1, "/b/one", b"7".zfill(size)))
    await bulk_caller.settled()
    assert bulk.asked == []
    assert bulk_caller.outcome(1) == (StatusCode.OK, framed(b"7"))


async def test_a_compressed_message_goes_to_the_unary_handler(bulk, bulk_caller):
    body = b"\x01" + framed(gzip.compress(b"7"))[1:]
    bulk_caller.feed(bulk_caller.call(1, "/b/one", body=body, grpc_encoding="gzip"))
    await bulk_caller.settled()
    assert bulk.asked == []
    assert bulk_caller.outcome(1) == (StatusCode.OK, framed(b"7"))


def test_a_call_in_pieces_goes_to_the_unary_handler(bulk, bulk_caller):
    body = framed(b"7")
    bulk_caller.feed(bulk_caller.call_head(1, "/b/one"), data(1, body[:3]), last_data(1, body[3:]))
    assert bulk.asked == []
    assert bulk_caller.outcome(1) == (StatusCode.OK, framed(b"7"))


@pytest.mark.parametrize("timeouts", [["0S"], ["1S", "0n"], ["0n", "0S"]])
def test_a_call_late_on_arrival_does_not_reach_the_bulk_handler(bulk, bulk_caller, timeouts):
    for stream_id, timeout in zip((1, 3), timeouts, strict=False):
        bulk_caller.feed(bulk_caller.call(stream_id, "/b/one", b"a", grpc_timeout=timeout))
        late = timeout.startswith("0")
        expected = StatusCode.DEADLINE_EXCEEDED if late else StatusCode.OK
        assert bulk_caller.outcome(stream_id)[0] is expected
    assert bulk.asked == [(1, [b"a"])] * timeouts.count("1S")
    assert bulk.own == []


def test_calls_that_have_waited_long_do_not_reach_the_bulk_handler(bulk, bulk_caller):
    """The bulk handler does not check deadlines, which may have passed."""
    timeouts = {1: "1S", 3: "4S"}
    parts = [bulk_caller.call(n, "/b/one", b"3", grpc_timeout=s) for n, s in timeouts.items()]
    bulk_caller.now_s += 2
    events = iter(bulk_caller.connection.receive(b"".join(parts)))
    assert bulk_caller.calls.handle(events, bulk_caller.now_s, bulk_caller.now_s - 2)
    bulk_caller.collect()
    assert bulk_caller.outcome(1) == (StatusCode.DEADLINE_EXCEEDED, b"")
    assert bulk_caller.outcome(3) == (StatusCode.OK, framed(b"3"))
    assert (bulk.asked, bulk.own) == ([], [b"3"])


def test_an_exception_in_the_bulk_handler_fails_no_call():
    def raising(_messages):
        raise KeyError

    caller = Caller(methods=Methods({"/b/one": echo, "/s/m": echo}, bulk={"/b/one": raising}))
    caller.feed(*(caller.call(n, "/b/one", b"m%d" % n) for n in (1, 3)), caller.call(5))
    assert told(caller, 1, 3) == [(StatusCode.OK, framed(b"m%d" % n)) for n in (1, 3)]
    assert caller.outcome(5) == (StatusCode.OK, framed(b"hi"))
    assert caller.errors == {"unexpected": 1}


async def test_the_bulk_handler_answers_while_too_many_calls_wait(bulk):
    methods = replace(bulk.methods, unary={**bulk.methods.unary, "/s/wait": wait})
    caller = Caller(methods=methods, max_concurrent_rpcs=1)
    caller.feed(caller.call(1, "/s/wait"), caller.call(3, "/b/one", b"a"))
    assert (caller.outcome(3)[0], caller.errors) == (StatusCode.OK, {})
    caller.calls.lose_all()
    await caller.shared.all_ended()


def test_a_call_that_was_reset_in_the_same_read_is_not_answered(bulk, bulk_caller):
    parts = [bulk_caller.call(n, "/b/one", message) for n, message in ((1, b"a"), (3, b"3"))]
    bulk_caller.feed(*parts, rst_stream(1), rst_stream(3), bulk_caller.call(5, "/b/one", b"b"))
    assert [sent.stream_id for sent in bulk_caller.sent] == [5, 5, 5]
    assert bulk_caller.calls.open == {}


def cut_short(caller, *parts):
    """Feed more calls than fit into the time budget; return the events left over."""
    events = iter(caller.connection.receive(b"".join(parts)))
    started_s, caller.now_s = caller.now_s, caller.now_s + 0.003
    assert not caller.calls.handle(events, started_s)
    return events


def test_calls_left_by_the_bulk_handler_do_not_delay_others(bulk_caller):
    """Each of them may be expensive, and they may fill a slice."""
    caller = bulk_caller
    parts = [caller.call(n, "/b/one", message) for n, message in ((1, b"?"), (3, b"a"), (5, b"?"))]
    events = cut_short(caller, *parts)
    assert [sent.stream_id for sent in caller.collect()] == [3, 3, 3, 1]
    assert caller.calls.handle(events, caller.now_s)
    assert [sent.stream_id for sent in caller.collect()] == [5]


def test_calls_collected_before_the_budget_ran_out_are_answered(bulk, bulk_caller):
    caller = bulk_caller
    asked = ((1, "/b/one", b"a"), (3, "/nope", b""), (5, "/b/one", b"b"))
    events = cut_short(caller, *(caller.call(*one) for one in asked))
    assert bulk.asked == [(1, [b"a"])]
    assert caller.calls.handle(events, caller.now_s)
    assert bulk.asked == [(1, [b"a"]), (1, [b"b"])]


def test_a_lost_connection_drops_its_deferred_calls(bulk, bulk_caller):
    caller = bulk_caller
    events = cut_short(caller, *(caller.call(n, "/b/one", b"?") for n in (1, 3)))
    caller.calls.lose_all()
    assert caller.calls.handle(events, caller.now_s)
    assert bulk.own == [b"?"]


async def test_end_all_sends_the_status_to_each_call(caller):
    caller.feed(caller.call(1, "/s/wait"), caller.call_head(3, "/s/upper"), caller.call_head(5))
    caller.calls.end_all(RpcError(StatusCode.UNAVAILABLE, "stopping"))
    caller.collect()
    assert [caller.outcome(n)[0] for n in (1, 3, 5)] == [StatusCode.UNAVAILABLE] * 3
    await caller.shared.all_ended()
