"""Messages between a parent and its worker, as bytes on the socket between them.

The parent first sends the worker's settings. The worker reports that it is prepared, waits for :data:`LISTEN`, and
reports that it is ready, or why it failed. It answers the parent's requests in order, and reports when TOKENS_FILE
closes checks; the parent then sends :data:`GUARD` to all workers. A worker that stops reports that its calls have
ended, and waits for :data:`CLOSE`. Each message of a worker is one line of JSON. The only I/O here is a worker's
blocking read of its settings.
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
"""Command to listen for calls; a worker waits for it."""

GUARD: Final = b"guard\n"
"""Command to close checks to callers without a credential: TOKENS_FILE has closed those of a worker."""

CLOSE: Final = b"close\n"
"""Command to end HTTP, write buckets and close stores; a worker that stops waits for it."""

READINESS: Final = b"readiness\n"
REPORT: Final = b"report\n"
"""Requests of the parent."""

POINTS_PER_LINE: Final = 100
"""About 0.05 ms of a worker's time (measured); between two lines it answers checks."""

MAX_LINE_BYTES: Final = 1 << 20
"""Far more than a line of that many points takes."""

Reading = float | HistogramSample

Report = Mapping[str, Mapping[str, Reading]]
"""Name of a metric → value of its label, empty without one → reading."""

_LENGTH: Final = struct.Struct("!I")


def settings_message(settings: Settings) -> bytes:
    """Encode the parent's own settings, so that a restarted worker gets the same ones."""
    body = pickle.dumps(settings)
    return _LENGTH.pack(len(body)) + body


def receive_settings(sock: socket.socket) -> Settings:
    """Read the settings from a blocking socket, and nothing after them.

    Raises:
        EOFError: the parent is gone.
    """
    [length] = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    settings = pickle.loads(_exactly(sock, length))  # noqa: S301 -- from the parent, over a socket of its own making
    assert isinstance(settings, Settings)  # noqa: S101 -- both ends are of one release
    return settings


def message(kind: str, *values: object) -> bytes:
    """Encode one line: its kind and its values."""
    return json.dumps([kind, *values], separators=(",", ":")).encode() + b"\n"


def parsed(line: bytes) -> tuple[str, list[Any]]:
    """Decode a line to kind and values; a torn one has an empty kind."""
    try:
        kind, *values = json.loads(line)
    except ValueError:
        return "", []
    return kind, values


def report_messages(points: Iterable[tuple[Definition, Iterable[Point]]]) -> Iterator[bytes]:
    """Yield the answer to :data:`REPORT`: lines of kind ``points``, then one of kind ``reported``.

    Points are read as lines are requested, so a caller may pause between two.
    """
    for definition, readings in points:
        rest = iter(readings)
        while batch := list(islice(rest, POINTS_PER_LINE)):
            yield message("points", definition.name, [_written(point) for point in batch])
    yield message("reported")


def readings_of(values: Iterable[Any]) -> Iterator[tuple[str, Reading]]:
    """Yield the labels and readings of one line of kind ``points``."""
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
