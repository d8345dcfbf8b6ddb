import pytest
from prometheus_client import openmetrics, parser
from prometheus_client.openmetrics import parser as openmetrics_parser

from ratelimitd.observe.exposition import PIECE_POINTS, Page
from ratelimitd.observe.metrics import Definition, HistogramSample, Point

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def counter(name, count=1):
    definition = Definition(name, "counter", "Counted.", lambda _: (), "rule_id")
    return definition, [Point(number, f"rule-{number}") for number in range(count)]


GAUGE = (Definition("a_gauge", "gauge", "Height.", lambda _: ()), [Point(1.5)])
PLAIN_COUNTER = (Definition("a_total", "counter", "Number.", lambda _: ()), [Point(3)])
HISTOGRAM = (
    Definition("a_seconds", "histogram", "Time.", lambda _: ()),
    [Point(histogram=HistogramSample((0.0005, 0.002), (1, 3, 4), 0.5))],
)


def text_of(accept, *points):
    return b"".join(Page(accept, points).pieces()).decode()


def test_text_format_has_exact_names_only():
    assert text_of("", PLAIN_COUNTER, GAUGE, HISTOGRAM).splitlines() == [
        "# HELP a_total Number.",
        "# TYPE a_total counter",
        "a_total 3.0",
        "# HELP a_gauge Height.",
        "# TYPE a_gauge gauge",
        "a_gauge 1.5",
        "# HELP a_seconds Time.",
        "# TYPE a_seconds histogram",
        'a_seconds_bucket{le="0.0005"} 1.0',
        'a_seconds_bucket{le="0.002"} 3.0',
        'a_seconds_bucket{le="+Inf"} 4.0',
        "a_seconds_count 4.0",
        "a_seconds_sum 0.5",
    ]


def test_family_without_readings_is_announced():
    assert "# TYPE empty_total counter" in text_of("", counter("empty_total", 0))


@pytest.mark.parametrize(
    "number", [PIECE_POINTS - 1, PIECE_POINTS, PIECE_POINTS + 1, 3 * PIECE_POINTS]
)
def test_long_family_is_written_in_pieces_and_reads_as_one(number):
    pieces = list(Page("", [counter("many_total", number), GAUGE]).pieces())
    assert max(piece.count(b"many_total{") for piece in pieces) <= PIECE_POINTS
    families = list(parser.text_string_to_metric_families(b"".join(pieces).decode()))
    assert [(family.name, len(family.samples)) for family in families] == [
        ("many", number),
        ("a_gauge", 1),
    ]


def test_openmetrics_is_valid_and_ends_once():
    text = text_of(OPENMETRICS, PLAIN_COUNTER, counter("many_total", 250), GAUGE, HISTOGRAM)
    families = list(openmetrics_parser.text_string_to_metric_families(text))
    assert [family.name for family in families] == ["a", "many", "a_gauge", "a_seconds"]
    assert text.count("# EOF") == 1
    assert text.endswith("# EOF\n")
    assert "_created" not in text


def test_client_chooses_the_format():
    assert Page("", ()).content_type.startswith("text/plain; version=0.0.4")
    assert Page(OPENMETRICS, ()).content_type.startswith("application/openmetrics-text")
    assert openmetrics.__name__  # the library supports both


def test_readings_are_taken_when_requested():
    def points():
        yield PLAIN_COUNTER
        raise AssertionError

    pieces = Page("", points()).pieces()
    assert b"a_total 3.0" in next(pieces)
    with pytest.raises(AssertionError):
        next(pieces)
