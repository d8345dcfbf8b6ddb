"""The printed results of a load, and warnings about its figures."""

import io
from contextlib import redirect_stdout

import pytest

from ratelimitd.cli.bench.load import Load, Result
from ratelimitd.cli.bench.report import as_json, description, print_report, warnings
from ratelimitd.cli.bench.workload import Arrival, Arrivals, Distribution, Keys, Timeline
from ratelimitd.cli.output import Output


def load(*, rate=None, arrival=Arrival.CONSTANT, **keys):
    return Load(
        check_of=lambda _: None,
        keys=Keys(**{"count": 1_000, **keys}),
        seconds=10.0,
        concurrency=50,
        arrivals=None if rate is None else Arrivals(rate=rate, arrival=arrival),
        timeout_s=5.0,
    )


def result(latencies_us=(), delays_us=(), **fields):
    made = Result(Timeline(10.0), seconds=10.0, **fields)
    for number, latency_us in enumerate(latencies_us):
        made.latencies.add(latency_us)
        made.timeline.answered(10 * (number + 0.5) / len(latencies_us), latency_us)
    for delay_us in delays_us:
        made.delays.add(delay_us)
    return made


def printed(*arguments):
    stream = io.StringIO()
    with redirect_stdout(stream):
        print_report(*arguments, Output())
    return stream.getvalue()


def test_rate_over_time_is_a_line_of_columns():
    even = printed(result([1_000] * 1_000), load())
    assert even.splitlines()[-1].split() == ["a", "second", "█" * 50, "up", "to", "100"]
    grown = result([1_000] * 10)
    for _ in range(90):
        grown.timeline.answered(9.95, 1_000)
    assert "▁" in printed(grown, load()).splitlines()[-1]


def test_no_answers_have_no_chart():
    text = printed(result(errors={"UNAVAILABLE": 3}), load())
    assert text.startswith("0 checks in 10.00 s: 0 a second\n")
    assert text.endswith("3 not answered: UNAVAILABLE\n")


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        (
            load(),
            "50 at a time, each sent when the one before it was answered; 1,000 keys, in-turn",
        ),
        (
            load(rate=1_500.0, arrival=Arrival.POISSON, distribution=Distribution.UNIFORM),
            "1,500 a second, poisson, latencies from when each was due; 1,000 keys, uniform",
        ),
        (
            load(rate=0.5, distribution=Distribution.ZIPF, exponent=1.2),
            "0.5 a second, constant, latencies from when each was due; 1,000 keys, zipf 1.2",
        ),
        (
            load(rate=1e6, distribution=Distribution.HOT, hot_share=0.25),
            "1,000,000 a second, constant, latencies from when each was due; 1,000 keys, hot 25%",
        ),
    ],
)
def test_load_is_described_in_words(chosen, told):
    assert description(chosen) == told


def test_timely_checks_need_no_warning():
    assert warnings(result(delays_us=[100] * 99 + [5_000])) == []


@pytest.mark.parametrize(
    ("waited", "why"), [(0, "the generator did not keep up"), (2, "all --concurrency checks")]
)
def test_late_checks_are_warned_of_with_the_reason(waited, why):
    [warning] = warnings(result(delays_us=[5_000] * 100, waited=waited))
    assert "1 check in 100 was sent 5.0 ms late" in warning
    assert why in warning


def test_unsent_checks_are_warned_of():
    made = result([1_000], unsent=1_234)
    assert warnings(made) == [
        "about 1,234 checks were due and never sent: latencies would be longer with them"
    ]
    assert "warning: about 1,234 checks" in printed(made, load(rate=1.0))


def test_json_has_load_and_results():
    made = result([1_000, 3_000], [200, 400], waited=1, allowed=2)
    seen = as_json(made, load(rate=0.2, distribution=Distribution.ZIPF))
    assert (seen["loop"], seen["rate_per_s"], seen["arrival"]) == ("open", 0.2, "constant")
    assert (seen["distribution"], seen["exponent"], seen["hot_share"]) == ("zipf", 1.0, None)
    assert (seen["latency_from"], seen["latency_ms"]["max"]) == ("due", 3.0)
    assert (seen["sent_late_ms"]["max"], seen["waited"], seen["unsent"]) == (0.4, 1, 0)
    assert sum(slot["checks"] for slot in seen["over_time"]) == seen["checks"] == 2
    assert seen["warnings"] == []


def test_json_of_a_closed_loop_has_no_rate():
    seen = as_json(result([1_000]), load(distribution=Distribution.HOT))
    assert (seen["loop"], seen["rate_per_s"], seen["arrival"]) == ("closed", None, None)
    assert (seen["latency_from"], seen["sent_late_ms"], seen["hot_share"]) == ("sent", None, 0.5)
