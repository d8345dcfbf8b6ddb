"""A rendered reading: on a wide terminal, on a narrow one, and as JSON."""

import io
import json
import math
import re

import pytest
from rich.console import Console

from ratelimitd.cli.top.reading import Frame, Latency, Reading, RuleReading
from ratelimitd.cli.top.view import as_json, drawn

READING = Reading(
    node_id="n1",
    status="HEALTHY",
    breaker_state="closed",
    shared_state_connected=True,
    rules_revision=7,
    allowed_per_s=1234.56,
    blocked_per_s=2.5,
    fail_open_per_s=0.0,
    latency=Latency(0.01234, 0.025, 2.0, math.inf),
    hit_ratio=0.98765,
    buckets=1_000_000,
    memory_bytes=64 * 1024 * 1024,
    connections=None,
    rules=3,
    cluster_nodes=None,
    sync_lag_s=None,
    excess_ratio=None,
    excess_bound_ratio=None,
    busiest=(RuleReading("r1", 3.0, 2.5, 12_345), RuleReading("r2", 0.0, 0.0, 0)),
)


def shown(reading=READING, *, width=100, color=False, **changes):
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=color, highlight=False, markup=False)
    frame = Frame(reading, {"r1": "/login ip"}, (1, 2))._replace(**changes)
    console.print(drawn(frame, width))
    return stream.getvalue()


def test_all_figures_are_shown():
    out = shown()
    for text in (
        "n1  HEALTHY  rules revision 7", "1,235/s", "2.5/s", "0/s", "closed", "0.0123 ms mean", "≤ 0.025 ms", "≤ 2 ms",
        "above all bounds", "0.988", "1,000,000", "64.0 MiB", "/login ip", "12,345", "r2",
    ):  # fmt: skip
        assert text in out, text
    assert "over-admission" not in out


@pytest.mark.parametrize("width", [20, 40, 79, 80, 200])
def test_no_line_is_wider_than_the_terminal(width):
    lines = shown(names={"r1": "/" + "x" * 250}, width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert sum("allowed" in line for line in lines) == 1


@pytest.mark.parametrize("width", [40, 60, 80])
def test_narrow_terminal_cuts_the_names_of_rules_rather_than_their_numbers(width):
    busy = RuleReading("r1", 98_765.4, 43_210.4, 98_765_432)
    out = shown(READING._replace(busiest=(busy,)), names={"r1": "/" + "x" * 250}, width=width)
    assert re.search(r"/x+… +43,210 +98,765 +98,765,432\n", out)


def test_wide_terminal_shows_the_measurements_side_by_side():
    assert len(shown(width=80).splitlines()) < len(shown(width=79).splitlines())


def test_clustered_node_shows_its_accuracy():
    out = shown(
        READING._replace(
            cluster_nodes=3, sync_lag_s=0.0125, excess_ratio=0.01, excess_bound_ratio=0.51
        )
    )
    assert "1.0% (promised 51.0%)" in out
    assert "12.5 ms" in out


@pytest.mark.parametrize(("connected", "text"), [(True, "connected"), (False, "not connected")])
def test_clustered_node_shows_whether_it_reaches_the_shared_state(connected, text):
    out = shown(READING._replace(cluster_nodes=3, shared_state_connected=connected))
    assert re.search(rf"shared state +{text}\b", out)
    assert "shared state" not in shown(READING._replace(shared_state_connected=connected))


@pytest.mark.parametrize(
    ("lag_s", "text"),
    [(0.9994, "999 ms"), (0.9996, "1.0 s"), (4.53, "4.5 s"), (5_000, "5,000.0 s")],
)
def test_long_times_are_in_seconds(lag_s, text):
    out = shown(READING._replace(cluster_nodes=3, sync_lag_s=lag_s))
    assert re.search(rf"sync lag +{re.escape(text)}", out)


def test_unknown_values_are_dashes():
    out = shown(
        READING._replace(
            node_id="", breaker_state="", latency=None, hit_ratio=None, memory_bytes=None,
            buckets=None, busiest=(), cluster_nodes=2,
        )
    )  # fmt: skip
    assert out.startswith("–  HEALTHY")
    assert "latency" in out
    assert "– (promised –)" in out
    assert "RULE" not in out


def test_unreachable_node_keeps_its_last_reading_with_the_reason():
    out = shown(lost="cannot reach a node\x1b[2J")
    assert "cannot reach a node�[2J; trying again" in out
    assert "n1  AWAY" in out
    assert "1,235/s" in out


def test_text_of_a_node_cannot_control_the_terminal():
    out = shown(
        READING._replace(node_id="\x1b]0;n", breaker_state="\x1b[7m"),
        names={"r1": "\x1b[2J[bold]x"},
        color=True,
    )
    assert "\x1b]0" not in out
    assert "\x1b[2J" not in out
    assert "\x1b[7m" not in out
    assert "�[2J[bold]x" in out


def test_json_has_numbers_and_null_for_unknown_values():
    seen = json.loads(json.dumps(as_json(READING, {"r1": "/login ip"}), allow_nan=False))
    assert seen["allowed_per_s"] == 1234.56
    assert seen["latency"] == {"mean_ms": 0.01234, "p50_ms": 0.025, "p95_ms": 2.0, "p99_ms": None}
    assert seen["connections"] is None
    assert seen["busiest"][0]["name"] == "/login ip"
    assert seen["busiest"][1]["name"] == ""
    assert as_json(READING._replace(latency=None), {})["latency"] is None


def test_node_without_checks_has_no_sparkline():
    assert "checks/s" not in shown(checks_per_s=(0, 0))
