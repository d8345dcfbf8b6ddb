"""The picture of a load, parsed from the file."""

import re
from xml.etree import ElementTree as ET

import pytest

from ratelimitd.cli.bench.report import picture
from tests.unit.cli.bench.test_report import load, result

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*arguments):
    return ET.fromstring(picture(*arguments))  # noqa: S314 -- ours


def texts(root):
    return [text.text for text in root.iter(f"{SVG}text")]


def test_picture_has_a_title_a_description_and_a_dark_form():
    root = drawn(result([1_000] * 50), load())
    assert root.find(f"{SVG}title").text == "5 checks a second over 10.0 s"
    assert "p99.9 1.000 ms" in root.find(f"{SVG}desc").text
    assert "prefers-color-scheme: dark" in root.find(f"{SVG}style").text


def test_both_axes_are_labelled_over_the_range_of_answers():
    labels = texts(drawn(result([150] * 900 + [70_000] * 100), load()))
    assert [label for label in labels if label.startswith("p")] == [
        "p0",
        "p90",
        "p99",
        "p99.9",
        "p99.99",
    ]
    assert [label for label in labels if label.endswith(" ms")] == [
        "0.1 ms", "1 ms", "10 ms", "100 ms",
    ]  # fmt: skip
    assert {"0 s", "2 s", "10 s"} <= set(labels)


def test_percentile_curve_rises_from_the_lowest_latency_to_the_highest():
    root = drawn(result([1_000] * 90 + [10_000] * 10), load())
    [curve, *_] = [path.get("d") for path in root.iter(f"{SVG}path") if path.get("class") == "line"]
    heights = [float(y) for y in re.findall(r"V([\d.]+)", curve)]
    assert heights == sorted(heights, reverse=True)
    p90 = 80 + (760 - 110) / 3
    assert f"H{p90:.1f}" in curve


def test_planned_rate_is_a_line_and_failures_are_marked():
    made = result([1_000] * 50)
    made.timeline.failed(3.0)
    kinds = [part.get("class") for part in drawn(made, load(rate=8.0)).iter()]
    assert kinds.count("planned") == 1
    assert kinds.count("errors") == 1
    assert "not answered" in texts(drawn(made, load(rate=8.0)))
    assert "planned" not in [part.get("class") for part in drawn(made, load()).iter()]


@pytest.mark.parametrize("latencies_us", [[], [0], [1], [1_000_000]])
def test_very_few_answers_are_drawn(latencies_us):
    assert drawn(result(latencies_us), load()).tag == f"{SVG}svg"


def test_load_without_duration_has_no_chart_over_time():
    made = result()
    made.seconds = 0.0
    assert "answers a second" not in texts(drawn(made, load()))
