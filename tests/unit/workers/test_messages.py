import dataclasses
import socket
import threading

import pytest

from ratelimitd.observe.metrics import Definition, HistogramSample, Point
from ratelimitd.settings.table import Settings
from ratelimitd.workers import protocol

SETTINGS = Settings.load({}, {"NODE_ID": "n/0", "ADMIN_TOKEN": "secret", "HTTP_HOSTS": "a,b"})


def definition(name):
    return Definition(name, "gauge", "", lambda _: ())


def told(points):
    """Return the lines of a report, parsed."""
    return [protocol.parsed(line) for line in protocol.report_messages(points)]


def test_a_worker_reads_its_parents_settings_and_nothing_after_them():
    here, there = socket.socketpair()
    with here, there:
        # More than one send to the socket takes.
        settings = dataclasses.replace(SETTINGS, http_hosts=("h" * 1_000_000,))
        sending = threading.Thread(
            target=here.sendall, args=(protocol.settings_message(settings) + b"next",)
        )
        sending.start()
        received = protocol.receive_settings(there)
        sending.join()
        assert received == settings
        assert received.admin_token == "secret"
        assert there.recv(10) == b"next"


@pytest.mark.parametrize("size", [0, 3, 100])
def test_incomplete_settings_mean_that_the_parent_is_gone(size):
    here, there = socket.socketpair()
    with there:
        with here:
            here.sendall(protocol.settings_message(SETTINGS)[:size])
        with pytest.raises(EOFError):
            protocol.receive_settings(there)


def test_a_message_is_one_line_with_any_content():
    line = protocol.message("failed", "two\nlines")
    assert line.count(b"\n") == 1
    assert protocol.parsed(line) == ("failed", ["two\nlines"])


@pytest.mark.parametrize("line", [b"\n", b'["ready', b"[]\n"])
def test_a_torn_line_has_an_empty_kind(line):
    assert protocol.parsed(line) == ("", [])


def test_a_report_is_decoded_unchanged():
    histogram = HistogramSample((0.5, 1.0), (1, 2, 3), 0.25)
    points = [
        (definition("a"), [Point(7)]),
        (definition("b"), [Point(2.5, "x"), Point(0.0, "y")]),
        (definition("c"), [Point(histogram=histogram)]),
        (definition("d"), []),
    ]
    *lines, end = told(points)
    assert end == ("reported", [])
    report = {name: dict(protocol.readings_of(values)) for _, (name, values) in lines}
    assert report == {"a": {"": 7}, "b": {"x": 2.5, "y": 0.0}, "c": {"": histogram}}


def test_a_long_metric_takes_several_lines_read_lazily():
    read = []

    def points():
        for number in range(2 * protocol.POINTS_PER_LINE + 1):
            read.append(number)
            yield Point(number, str(number))

    lines = protocol.report_messages([(definition("many"), points())])
    next(lines)
    assert len(read) == protocol.POINTS_PER_LINE
    assert [protocol.parsed(line)[0] for line in lines] == ["points", "points", "reported"]
    assert len(read) == 2 * protocol.POINTS_PER_LINE + 1
