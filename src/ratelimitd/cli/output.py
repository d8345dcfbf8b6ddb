"""Prints messages as JSON or CSV for programs, and as aligned text for people.

Does not determine content; never writes to stderr.
"""

from __future__ import annotations

import csv
import json
import os
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeVar

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from ratelimitd.errors import printable

M = TypeVar("M", bound=Message)

MIN_ELASTIC_WIDTH: Final = 12
"""Minimum width of the widest column of a table, which shrinks on a narrow terminal."""

GAP: Final = "  "

_STYLES: Final = {"good": "32", "bad": "31", "warn": "33", "head": "1"}
"""Select Graphic Rendition parameters of ECMA-48: green, red, yellow, bold."""


class Output:
    """The output of a command on stdout; ``as_json``: JSON instead of text."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self._tty = sys.stdout.isatty()
        environ = os.environ
        self._colour = self._tty and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"

    def line(self, text: str = "") -> None:
        """Print one line."""
        print(text)

    def flush(self) -> None:
        """Flush, also if a program reads the output."""
        sys.stdout.flush()

    def styled(self, text: str, style: str) -> str:
        """Return ``text`` in one of these styles if the terminal supports it."""
        return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if self._colour else text

    def json(self, value: object) -> None:
        """Print one JSON value."""
        self.line(json.dumps(value, indent=2, ensure_ascii=False))

    def message(self, message: Message) -> None:
        """Print one message as proto3 JSON."""
        self.json(as_dict(message))

    def answer(self, value: Message | Mapping[str, Any], text: str) -> None:
        """Print an answer: as JSON, or as text."""
        if self.as_json:
            self.json(as_dict(value) if isinstance(value, Message) else value)
        else:
            self.line(text)

    def json_list(self, values: Iterable[object]) -> None:
        """Print a list of JSON values as they arrive; close it if ``values`` raises."""
        lead = "["
        try:
            for value in values:
                text = json.dumps(value, indent=2, ensure_ascii=False).replace("\n", "\n  ")
                sys.stdout.write(f"{lead}\n  {text}")
                lead = ","
        finally:
            self.line("[]" if lead == "[" else "\n]")

    def listed(
        self,
        messages: Iterable[M],
        head: Sequence[str],
        row_of: Callable[[M], Sequence[object]],
        none: str,
    ) -> None:
        """Print messages: as a JSON list, or as a table, or ``none`` if there are none."""
        if self.as_json:
            self.json_list(map(as_dict, messages))
        elif rows := [row_of(message) for message in messages]:
            self.table(head, rows)
        else:
            self.line(none)

    def table(self, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print aligned columns, numbers right-aligned; cuts the widest column to fit a terminal."""
        width = shutil.get_terminal_size().columns if self._tty else None
        lines = table_lines(head, rows, width)
        self.line(self.styled(lines[0], "head"))
        for line in lines[1:]:
            self.line(line)

    def csv(self, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print rows as CSV (RFC 4180) as they arrive."""
        # Not with a line feed alone: Python 3.11 then leaves a carriage return in a field unquoted.
        writer = csv.writer(sys.stdout)
        writer.writerow(head)
        writer.writerows(rows)

    def pairs(self, rows: Iterable[tuple[str, str]]) -> None:
        """Print names and values, indented, with aligned values."""
        rows = list(rows)
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            self.line(f"{GAP}{name:<{width}}{GAP}{value}")


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number and its noun, in the plural unless the number is 1."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


_UNITS: Final = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def duration(seconds: int, units: int = 2) -> str:
    """Format seconds in their largest units: ``1 h 30 min``."""
    parts = []
    for unit, size_s in _UNITS:
        if amount := seconds // size_s:
            parts.append(f"{amount} {unit}")
            seconds -= amount * size_s
    return " ".join(parts[:units]) or "0 s"


_BARS: Final = "▁▂▃▄▅▆▇█"


def sparkline(values: Iterable[float], width: int) -> str:
    """Return the last values as bars scaled to the highest; at most ``width`` characters."""
    shown = [*values][-width:]
    highest = max(shown, default=0) or 1
    return "".join(_BARS[min(len(_BARS) - 1, int(value / highest * len(_BARS)))] for value in shown)


def window(seconds: int) -> str:
    """Format the length of a window, exact to the second."""
    return duration(seconds, len(_UNITS))


def enum_name(enum: Any, number: int) -> str:
    """Return the name of an enum value, or the number of one of a later release."""
    name: str = enum.Name(number) if number in enum.values() else str(number)
    return name


def as_dict(message: Message) -> dict[str, Any]:
    """Return the proto3 JSON of a message as a dict, with the contract's field names.

    Includes fields at their default: a script that reads ``allowed`` must get ``false``, not nothing.
    """
    fields = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    # MessageToDict puts default fields last; the contract's order is easier to read and compare.
    return {
        field.name: fields[field.name]
        for field in message.DESCRIPTOR.fields
        if field.name in fields
    }


def table_lines(
    head: Sequence[str], rows: Iterable[Sequence[object]], width: int | None
) -> list[str]:
    """Return the lines of a table, the head first, for so many columns of a terminal; ``None`` = as wide as the cells.

    A character takes none, one, or, as in Chinese, two of them.
    """
    from rich.cells import cell_len  # noqa: PLC0415 -- 3 ms; most commands print no table

    values = [list(row) for row in rows]
    cells = [list(head), *([printable(str(value)) for value in row] for row in values)]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    if width is not None:
        over = sum(widths) + len(GAP) * (len(widths) - 1) - width
        widest = widths.index(max(widths))
        widths[widest] -= max(0, min(over, widths[widest] - MIN_ELASTIC_WIDTH))
    numeric = [
        bool(values) and all(isinstance(row[column], int | float) for row in values)
        for column in range(len(head))
    ]
    return [
        GAP.join(
            _fitted(cell, size, right=right)
            for cell, size, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in cells
    ]


def _fitted(cell: str, width: int, *, right: bool) -> str:
    from rich.cells import cell_len, set_cell_size  # noqa: PLC0415 -- see table_lines

    missing = width - cell_len(cell)
    if missing < 0:
        return set_cell_size(cell, width - 1) + "…"
    return " " * missing + cell if right else cell + " " * missing


LONG: Final = 100
"""Minimum number of steps with a progress bar; fewer end too quickly."""


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each of ``total`` steps; removes the bar at the end of the block."""
    if total < LONG or not sys.stderr.isatty():
        yield lambda: None
        return
    # Takes 50 ms to import, while the user waits anyway.
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import Progress  # noqa: PLC0415

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show activity of unknown duration until the end of the block."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console  # noqa: PLC0415

    with Console(stderr=True).status(what):
        yield


QUIT_KEYS: Final = b"qQ\x03\x04"
"""Includes Ctrl-C and Ctrl-D for terminals that do not handle them."""

MAX_READ: Final = 1_024


class Keyboard(NamedTuple):
    """A terminal, by its file descriptor, that delivers keys as they are pressed."""

    descriptor: int

    def quit_pressed(self) -> bool:
        """Wait for input; return whether it includes the quit key."""
        return bool(set(os.read(self.descriptor, MAX_READ) or QUIT_KEYS) & set(QUIT_KEYS))

    def quits_within(self, seconds: float) -> bool:
        """Return whether the quit key is pressed within this time."""
        end_s = time.monotonic() + seconds
        while True:
            left_s = max(0.0, end_s - time.monotonic())
            typed, _, _ = select.select([self.descriptor], [], [], left_s)
            if not typed:
                return False
            if self.quit_pressed():
                return True


@contextmanager
def single_keys() -> Iterator[Keyboard | None]:
    """Deliver each key when it is pressed, without Enter or echo, until the end of the block.

    Yields ``None`` without a keyboard.
    """
    if not sys.stdin.isatty():
        yield None
        return
    # Not available on Windows.
    import termios  # noqa: PLC0415
    import tty  # noqa: PLC0415

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield Keyboard(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@contextmanager
def on_signal(
    number: signal.Signals, handler: Callable[..., object] | signal.Handlers
) -> Iterator[None]:
    """Set the handler of a signal for the block; does nothing outside the main thread.

    An ignored signal stays ignored, as SIGHUP under ``nohup``.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(number) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
