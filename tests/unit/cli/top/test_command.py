"""`top` against a node with canned answers: once, repeatedly, during an outage, and until a key is pressed."""

import contextlib
import itertools
import json
import os
import pty
import re
import signal
import sys
import termios
from types import SimpleNamespace

import grpc
import pytest
from google.rpc import status_pb2

from ratelimitd.cli.top import command
from ratelimitd.cli.top.command import HISTORY
from ratelimitd.cli.top.reading import ALLOWED, RULE_BLOCKED
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.fake_node import status

AWAY = status(grpc.StatusCode.UNAVAILABLE, "not now")
GONE = status_pb2.Status(code=grpc.StatusCode.UNAVAILABLE.value[0], message="gone")
"""As gRPC reports it: without the explanation that a node adds."""


def _chunks(descriptor):
    """Yield the output sent to a terminal."""
    with contextlib.suppress(BlockingIOError):
        while True:
            yield os.read(descriptor, 4096)


@pytest.fixture(autouse=True)
def busy(node):
    """Make the node count ten more checks per reading."""
    rule = node.add_rule("/login", "ip")
    totals = itertools.count(10, 10)

    def look(request, _context):
        if isinstance(request, pb.MetricsRequest):
            node.metrics_answer = pb.MetricsResponse(
                metrics=[
                    pb.Metric(name=ALLOWED, value=next(totals)),
                    pb.Metric(name=RULE_BLOCKED, value=4, labels={"rule_id": rule.id}),
                ]
            )

    node.on_call = look
    return node


@pytest.fixture
def pauses(monkeypatch):
    """Skip waiting: calls ``before`` ahead of each pause, and ends like Ctrl-C after ``left`` pauses."""
    told = {"left": 3, "before": lambda _number: None}
    clock = itertools.count()

    def sleep(_seconds):
        told["left"] -= 1
        if told["left"] < 0:
            raise KeyboardInterrupt
        told["before"](told["left"])

    timing = SimpleNamespace(sleep=sleep, monotonic=lambda: float(next(clock)))
    monkeypatch.setattr(command, "time", timing)
    return told


def test_one_reading_is_printed_once(ask, pauses):
    ended = ask("top", "--once")
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.count("HEALTHY") == 1
    assert "10/s" in ended.out
    assert re.search(r"/login ip +0 +0 +4", ended.out)
    assert "\x1b" not in ended.out


def test_json_is_a_line_per_reading_and_ctrl_c_is_a_regular_end(ask, pauses):
    ended = ask("top", "--json")
    readings = [json.loads(line) for line in ended.out.splitlines()]
    assert [reading["allowed_per_s"] for reading in readings] == [10.0, 10.0, 10.0]
    assert readings[0]["busiest"][0]["name"] == "/login ip"
    assert ended.status == 0


def test_pipe_gets_readings_one_below_the_other(ask, pauses):
    ended = ask("top")
    assert ended.out.count("HEALTHY") == 3
    assert "checks/s  ███" in ended.out
    assert "\x1b" not in ended.out


def test_unreachable_node_at_the_start_is_status_2(run, unused_tcp_port):
    ended = run("top", "--once", "--target", f"127.0.0.1:{unused_tcp_port}")
    assert ended.status == 2
    assert "cannot reach a node" in ended.err


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_node_that_becomes_unreachable_fails_a_single_reading(ask, node, pauses, options):
    pauses["before"] = lambda _left: setattr(node, "error", GONE)
    ended = ask("top", "--once", *options)
    assert (ended.status, ended.out) == (2, "")
    assert "cannot reach a node" in ended.err


def test_node_that_becomes_unreachable_is_shown_and_retried(ask, node, pauses):
    def switch(left):
        node.error = AWAY if left == 1 else None

    pauses["before"] = switch
    for options in ([], ["--json"]):
        pauses["left"] = 3
        ended = ask("top", *options)
        assert ended.status == 0
        assert ended.out.count("not now") == 1
    lines = [json.loads(line) for line in ended.out.splitlines()]
    assert "not now" in lines[1]["error"]
    assert lines[2]["allowed_per_s"] == pytest.approx(10 / 1)


def test_counters_of_another_node_are_no_rates(ask, node, pauses):
    def switch(left):
        if left == 1:
            node.health_answer.node_id = "n2"

    pauses["before"] = switch
    lines = [json.loads(line) for line in ask("top", "--json").out.splitlines()]
    assert lines[1] == {"error": "another node answers now: n2"}
    assert [lines[0]["allowed_per_s"], lines[2]["allowed_per_s"]] == [10.0, 10.0]
    assert lines[2]["node_id"] == "n2"


def test_rules_are_read_again_only_after_a_change(ask, node, pauses):
    def change(left):
        if left == 0:
            node.health_answer.rules_revision = 9

    pauses["before"] = change
    ask("top", "--rules", "0")
    assert node.methods().count("ListRateLimits") == 2


@pytest.mark.parametrize("number", [None, signal.SIGTERM, signal.SIGHUP])
def test_view_uses_the_whole_terminal_until_q_or_a_signal_ends_it(ask, monkeypatch, number):
    ours, theirs = pty.openpty()
    modes = termios.tcgetattr(theirs)
    frames = itertools.count()
    real = command._frames

    def watched(*arguments, **options):
        for frame in real(*arguments, **options):
            if next(frames) == 1:
                signal.raise_signal(number) if number else os.write(ours, b"q")
            yield frame

    monkeypatch.setattr(command, "_frames", watched)
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(theirs, "r+b", buffering=0) as terminal:
        text = open(terminal.fileno(), "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        monkeypatch.setattr(sys, "stdin", text)
        monkeypatch.setattr(sys, "stdout", text)
        assert ask("top", "--interval", "0.1").status == (128 + number if number else 0)
        text.flush()
        text.close()
        assert termios.tcgetattr(theirs) == modes
        os.set_blocking(ours, False)
        shown = b"".join(_chunks(ours)).decode(errors="replace")
    os.close(ours)
    assert "\x1b[?1049h" in shown
    assert shown.index("the first reading takes 0.1 s") < shown.index("HEALTHY")
    assert shown.index("\x1b[?1049l") > shown.index("HEALTHY")


def test_history_is_bounded(ask, pauses, monkeypatch):
    seen = []
    real = command._frames

    def watched(*arguments, **options):
        for frame in real(*arguments, **options):
            seen.append(len(frame.checks_per_s))
            yield frame

    monkeypatch.setattr(command, "_frames", watched)
    monkeypatch.setattr(command, "HISTORY", 2)
    ask("top")
    assert seen == [1, 2, 2]
    assert HISTORY > 200
