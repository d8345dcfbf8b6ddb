"""The metrics as text for Prometheus, in pieces small enough that formatting never delays checks noticeably.

The library formats; nothing here reads counters. With 1,000 rules a page is 160 KB and takes 6 to 10 ms to format
(measured, CPython 3.11): too long for one step beside checks that should take less than 1 ms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ratelimitd.observe.metrics import Definition, Point, split_labels

PIECE_POINTS: Final = 100
"""Readings formatted per step: about 0.5 ms."""

_END: Final = b"# EOF\n"
"""End marker of OpenMetrics, which the library appends to each piece."""


class Page:
    """One scrape: ``content_type`` for the client's ``Accept`` header, and the text in pieces."""

    def __init__(self, accept: str, points: Iterable[tuple[Definition, Iterable[Point]]]) -> None:
        self._encode, self.content_type = choose_encoder(accept)
        self._points = points

    def pieces(self) -> Iterator[bytes]:
        """Yield the text. Pause between two pieces: each is read and formatted when requested."""
        end = b""
        for definition, points in self._points:
            for number, batch in enumerate(_batches(points)):
                text = self._encode(_OneFamily(_family(definition, batch)))
                if text.endswith(_END):
                    text, end = text.removesuffix(_END), _END
                yield _without_header(text) if number else text
        yield end


class _OneFamily(Collector):
    """A registry of one family: the only part of a registry that the encoder uses."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        """Return the family."""
        return (self._family,)


def _batches(points: Iterable[Point]) -> Iterator[list[Point]]:
    """Yield ``points`` in lists of at most :data:`PIECE_POINTS`; one empty list if there are none."""
    rest = iter(points)
    yield list(islice(rest, PIECE_POINTS))
    while batch := list(islice(rest, PIECE_POINTS)):
        yield batch


def _family(definition: Definition, points: Iterable[Point]) -> Metric:
    name, text = definition.name, definition.help
    if definition.kind == "histogram":
        histograms = HistogramMetricFamily(name, text)
        for histogram in (point.histogram for point in points if point.histogram):
            bounds = [*map(floatToGoString, histogram.upper_bounds), "+Inf"]
            counts = map(float, histogram.cumulative_counts)
            histograms.add_metric((), list(zip(bounds, counts, strict=True)), histogram.sum)
        return histograms
    kind = CounterMetricFamily if definition.kind == "counter" else GaugeMetricFamily
    family = kind(name, text, labels=definition.label.split(",") if definition.label else [])
    for point in points:
        family.add_metric(split_labels(definition, point)[1], point.value)
    return family


def _without_header(text: bytes) -> bytes:
    """Return a piece without the ``# HELP`` and ``# TYPE`` lines, which the first piece of its family has."""
    return b"".join(line for line in text.splitlines(keepends=True) if not line.startswith(b"#"))
