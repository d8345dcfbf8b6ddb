"""`bench` against a node with canned answers: the checks sent and the output."""

import json
import signal
import threading

import grpc
import pytest

from tests.fake_node import status


@pytest.fixture(autouse=True)
def generous(node):
    node.limit = 1_000_000


def test_results_are_shown_with_charts(ask):
    ended = ask("bench", "--duration", "0.1", "--concurrency", "2")
    assert (ended.status, ended.err) == (0, "")
    assert " allowed, 0 denied, 0 fail open\n" in ended.out
    assert "\n  p99.9  " in ended.out
    assert "█" * 40 in ended.out


def test_json_has_all_figures(ask):
    seen = json.loads(ask("bench", "--duration", "0.1", "--json").out)
    assert seen["checks"] == seen["allowed"] == sum(bar["checks"] for bar in seen["histogram"])
    assert set(seen["latency_ms"]) == {"mean", "min", "p50", "p90", "p95", "p99", "p99.9", "max"}
    assert (seen["loop"], seen["latency_from"], seen["distribution"]) == (
        "closed",
        "sent",
        "in-turn",
    )
    assert seen["checks_per_s"] == pytest.approx(seen["checks"] / seen["seconds"])


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ([], ["bench-0", "bench-1", "bench-2"]),
        (["--identifier-type", "ip"], ["198.18.0.0", "198.18.0.1", "198.18.0.2"]),
    ],
)
def test_identifiers_are_sent_in_rotation_with_the_credentials(ask, node, options, names):
    ask(
        *("bench", "--duration", "0.2", "--concurrency", "1", "--keys", "3", "--token", "t"),
        *("--endpoint", "/x", "--peek", *options),
    )
    asked = [call.request.identifier for call in node.seen]
    # The first check only connects.
    assert asked[:5] == [names[0], *names, names[0]]
    assert node.seen[-1].metadata["authorization"] == "Bearer t"
    assert (node.seen[-1].request.endpoint, node.seen[-1].request.peek) == ("/x", True)


def test_unanswered_checks_are_status_1(ask, node):
    node.errors_after = 3
    node.error = status(grpc.StatusCode.RESOURCE_EXHAUSTED, "enough")
    ended = ask("bench", "--duration", "0.1")
    assert ended.status == 1
    assert "not answered: RESOURCE_EXHAUSTED" in ended.out
    node.seen.clear()
    node.errors_after = 1
    ended = ask("bench", "--duration", "0.1")
    assert ended.out.startswith("0 checks in ")
    assert "p50" not in ended.out


def test_unreachable_node_is_status_2(run, unused_tcp_port):
    ended = run("bench", "--target", f"127.0.0.1:{unused_tcp_port}")
    assert ended.status == 2
    assert "cannot reach a node" in ended.err


def test_ctrl_c_ends_early_with_partial_results(ask, node):
    def interrupt(_request, _context):
        if len(node.seen) == 20:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    node.on_call = interrupt
    ended = ask("bench", "--duration", "3600")
    assert ended.status == 0
    assert " checks in " in ended.out


def test_same_seed_sends_the_same_keys(ask, node):
    asked = []
    for _ in range(2):
        node.seen.clear()
        ask(
            *("bench", "--duration", "0.2", "--rate", "100", "--concurrency", "1"),
            *("--keys", "50", "--distribution", "zipf", "--seed", "3"),
        )
        asked.append([call.request.identifier for call in node.seen])
    assert len(asked[0]) == 21
    assert asked[0] == asked[1]


def test_hot_key_is_the_first(ask, node):
    ask("bench", "--duration", "0.1", "--distribution", "hot", "--hot-share", "1")
    assert {call.request.identifier for call in node.seen} == {"bench-0"}


def test_picture_is_written_to_a_file(ask, tmp_path):
    file = tmp_path / "load.svg"
    ended = ask("bench", "--duration", "0.1", "--rate", "50", "--picture", file)
    assert ended.status == 0
    assert "50 a second, constant, latencies from when each was due" in ended.out
    assert file.read_text(encoding="utf-8").startswith("<svg ")


def test_unwritable_picture_is_refused_before_anything_is_sent(ask, node, tmp_path):
    ended = ask("bench", "--picture", tmp_path / "none" / "load.svg")
    assert (ended.status, node.seen) == (2, [])
    assert "--picture: cannot write" in ended.err


def test_picture_that_becomes_unwritable_is_an_error(ask, tmp_path):
    ended = ask("bench", "--duration", "0.1", "--picture", tmp_path)
    assert ended.status == 1
    assert " checks in " in ended.out
    assert "--picture: cannot write" in ended.err


def test_arrival_without_a_rate_is_refused(run):
    ended = run("bench", "--arrival", "poisson")
    assert ended.status == 2
    assert "--arrival needs --rate" in ended.err
