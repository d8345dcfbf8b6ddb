"""Spans at a real receiver, and while it is unavailable."""

import http.client
import logging
import socket
import threading

import pytest

from ratelimitd.observe import otel
from ratelimitd.observe.otel import OtelTracer, endpoint_of
from tests.trace_collector import attributes, collector

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture
def receiver():
    with collector() as receiver:
        yield receiver


@pytest.fixture
async def tracer(receiver):
    tracer = OtelTracer(receiver.url, node_id="n1", ratio=1.0, time_s=lambda: 0.0, period_ms=10)
    yield tracer
    await tracer.close()


async def test_span_is_sent_with_its_attributes_and_node(receiver, tracer):
    span = tracer.begin("ratelimiter.v1.RateLimiterConfig/CreateRateLimit")
    span.set_attribute("rpc.grpc.status_code", 0)
    span.set_attribute("allowed", value=True)
    span.end()
    [sent] = receiver.wait_for(1)
    assert sent.name == "ratelimiter.v1.RateLimiterConfig/CreateRateLimit"
    assert attributes(sent) == {"rpc.grpc.status_code": 0, "allowed": True}
    assert sent.end_time_unix_nano >= sent.start_time_unix_nano
    resource = attributes(receiver.requests[0].resource_spans[0].resource)
    assert (resource["service.name"], resource["service.instance.id"]) == ("ratelimitd", "n1")


async def test_span_with_a_parent_joins_its_trace(receiver, tracer):
    tracer.begin("a/b", SAMPLED).end("NOT_FOUND")
    [sent] = receiver.wait_for(1)
    assert (sent.trace_id.hex(), sent.parent_span_id.hex()) == (TRACE, PARENT)
    assert sent.kind == sent.SPAN_KIND_SERVER
    assert (sent.status.message, sent.status.code) == ("NOT_FOUND", sent.status.STATUS_CODE_ERROR)


@pytest.mark.parametrize(
    "parent",
    [
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"{SAMPLED}-more",
    ],
)
async def test_invalid_parent_begins_no_trace(tracer, parent):
    assert tracer.begin("a/b", parent) is None


async def test_span_that_is_not_a_call_has_the_client_kind(receiver, tracer):
    tracer.begin("ratelimitd.sync").end()
    [sent] = receiver.wait_for(1)
    assert sent.kind == sent.SPAN_KIND_CLIENT


@pytest.mark.parametrize("parent", [f"00-{TRACE}-{PARENT}-00", "nonsense", ""])
async def test_span_follows_a_caller_that_does_not_record(tracer, parent):
    assert tracer.begin("a/b", parent) is None


async def test_span_without_a_caller_is_sampled_at_random():
    chances = iter([0.0, 0.24, 0.25, 0.9])
    tracer = OtelTracer(
        "http://127.0.0.1:1", node_id="n1", ratio=0.25, random=lambda: next(chances)
    )
    begun = [tracer.begin("a") is not None for _ in range(4)]
    assert begun == [True, True, False, False]
    await tracer.close()


async def test_callers_do_not_control_the_number_of_spans(monkeypatch):
    monkeypatch.setattr(otel, "MAX_SPANS_PER_S", 2)
    now = [0.0]
    tracer = OtelTracer("http://127.0.0.1:1", node_id="n1", ratio=1.0, time_s=lambda: now[0])
    begun = [tracer.begin("a", SAMPLED) is not None for _ in range(4)]
    now[0] = 1.0
    begun.append(tracer.begin("a", SAMPLED) is not None)
    assert begun == [True, True, False, False, True]
    await tracer.close()


async def test_last_spans_are_sent_at_the_stop(receiver):
    tracer = OtelTracer(receiver.url, node_id="n1", ratio=1.0, period_ms=3_600_000)
    tracer.begin("a").end()
    await tracer.close()
    assert len(receiver.spans) == 1


async def test_unavailable_collector_is_logged_once_and_the_queue_is_bounded(
    monkeypatch, caplog, unused_tcp_port
):
    monkeypatch.setattr(otel, "MAX_QUEUED", 16)
    monkeypatch.setattr(otel, "MAX_BATCH", 4)
    monkeypatch.setattr(otel, "SEND_S", 0.05)
    monkeypatch.setattr(otel, "CLOSE_S", 0.1)
    caplog.set_level(logging.DEBUG)
    tracer = OtelTracer(f"http://127.0.0.1:{unused_tcp_port}", node_id="n1", ratio=1.0, period_ms=1)
    for _ in range(200):
        tracer.begin("a").end()
    await tracer.close()
    lines = [record.getMessage() for record in caplog.records if record.levelno > logging.DEBUG]
    assert lines == [
        f"traces cannot be sent to 127.0.0.1:{unused_tcp_port}; they are dropped until they can"
    ]


async def test_hanging_collector_does_not_delay_the_stop(monkeypatch):
    monkeypatch.setattr(otel, "SEND_S", 30.0)
    monkeypatch.setattr(otel, "CLOSE_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        tracer = OtelTracer(url, node_id="n1", ratio=1.0, period_ms=3_600_000)
        tracer.begin("a").end()
        await tracer.close()
        # The thread continues on its own, and ends with the connection.
        [last] = [thread for thread in threading.enumerate() if thread.name == "last spans"]
    last.join(30)
    assert not last.is_alive()


async def test_recovery_of_the_collector_is_logged(receiver, tracer, caplog):
    caplog.set_level(logging.INFO, "ratelimitd")
    receiver.status = 400
    tracer.begin("first").end()
    receiver.wait_for(1)
    receiver.status = 200
    tracer.begin("second").end()
    receiver.wait_for(2)
    await tracer.close()
    assert [record.getMessage().partition(" to ")[0] for record in caplog.records] == [
        "traces cannot be sent",
        "traces can be sent",
    ]


async def test_answers_without_end_are_not_read(receiver, tracer, caplog):
    receiver.unending = b"HTTP/1.1 200 OK\r\n\r\n", b"a" * 1024
    for sent in (1, 2):
        tracer.begin("a").end()
        receiver.wait_for(sent)
    await tracer.close()
    assert not caplog.records


async def test_an_export_ends_in_time_however_the_collector_answers(monkeypatch, receiver, caplog):
    monkeypatch.setattr(otel, "SEND_S", 0.05)
    receiver.unending = b"", b"HTTP/1.1 100 Continue\r\n\r\n"
    tracer = OtelTracer(receiver.url, node_id="n1", ratio=1.0, period_ms=10)
    tracer.begin("a").end()
    receiver.wait_for(1)
    tracer.begin("dropped while the first is being sent").end()
    await tracer.close()
    # Newer releases of Python give up such an answer themselves, sooner or later.
    stuck = {0, 1} if hasattr(http.client, "_MAXINTERIMRESPONSES") else {1}
    assert [thread.name for thread in threading.enumerate()].count("spans") in stuck
    assert [record.getMessage().partition(" to ")[0] for record in caplog.records] == [
        "traces cannot be sent"
    ]


async def test_exports_share_a_connection(receiver, tracer):
    for sent in (1, 2):
        tracer.begin("a").end()
        receiver.wait_for(sent)
    await tracer.close()
    assert receiver.connections == 1


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/tenant/x", "https://c/tenant/x"),
    ],
)
def test_path_defaults_to_that_of_otlp(url, endpoint):
    assert endpoint_of(url) == endpoint
