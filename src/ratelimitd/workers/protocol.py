"""What a parent and its worker say to each other, as bytes on the socket between them.

The parent first sends the worker's settings. The worker says that it is prepared, waits for the word to listen, and
says that it is ready; or why it failed. It answers the parent's questions in turn. What a worker says is one line of
JSON each. Never does I/O but for the settings, which a worker waits for before it does anything else.
"""

from __future__ import annotations

import json
import pickle
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

from ratelimitd.observe.metrics import Definition, HistogramSample, Point
from ratelimitd.settings.table import Settings

LISTEN: Final = b"listen\n"
"""The word to listen for calls, which a worker waits for."""

READINESS: Final = b"readiness\n"
REPORT: Final = b"report\n"
"""The questions."""

POINTS_PER_LINE: Final = 100
"""About 0.05 ms of a worker's time (measured); between two lines it answers checks."""

MAX_LINE_BYTES: Final = 1 << 20
"""Far above what a line of that many points takes."""

Reading = float | HistogramSample

Report = Mapping[str, Mapping[str, Reading]]
"""Name of a metric → value of its label, empty without one → reading."""

_LENGTH: Final = struct.Struct("!I")


def settings_message(settings: Settings) -> bytes:
    """What the parent sends first: the very values it runs with, so that no worker reads other ones later."""
    body = pickle.dumps(settings)
    return _LENGTH.pack(len(body)) + body


def receive_settings(sock: socket.socket) -> Settings:
    """The settings, from a blocking socket; nothing that follows them is read.

    Raises:
        EOFError: the parent is gone.
    """
    [length] = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    settings = pickle.loads(_exactly(sock, length))  # noqa: S301 -- from the parent, over a socket of its own making
    assert isinstance(settings, Settings)  # noqa: S101 -- both ends are of one release
    return settings


def message(kind: str, *values: object) -> bytes:
    """One line: what it is, and its values."""
    return json.dumps([kind, *values], separators=(",", ":")).encode() + b"\n"


def parsed(line: bytes) -> tuple[str, list[Any]]:
    """Kind and values of a line; an empty kind for one that was torn."""
    try:
        kind, *values = json.loads(line)
    except ValueError:
        return "", []
    return kind, values


def report_messages(points: Iterable[tuple[Definition, Iterable[Point]]]) -> Iterator[bytes]:
    """The answer to :data:`REPORT`: lines of kind ``points``, then one of kind ``reported``.

    Pause between two: each is read when it is asked for.
    """
    for definition, readings in points:
        rest = iter(readings)
        while batch := list(islice(rest, POINTS_PER_LINE)):
            yield message("points", definition.name, [_written(point) for point in batch])
    yield message("reported")


def readings_of(values: Iterable[Any]) -> Iterator[tuple[str, Reading]]:
    """Labels and readings of one line of kind ``points``."""
    for label, value in values:
        if isinstance(value, list):
            bounds, counts, total = value
            yield label, HistogramSample(tuple(bounds), tuple(counts), total)
        else:
            yield label, value


def _written(point: Point) -> tuple[str, object]:
    found = point.histogram
    if found is None:
        return point.label, point.value
    return point.label, (found.upper_bounds, found.cumulative_counts, found.sum)


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return bytes(data)
