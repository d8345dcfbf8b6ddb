"""What a command prints: messages as JSON for programs, aligned text for people.

Decides nothing about content; never writes to stderr.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TextIO

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from ratelimitd.errors import printable

MIN_ELASTIC_WIDTH: Final = 12
"""The widest column of a table gives way to a narrow terminal, down to this many characters."""

GAP: Final = "  "

_STYLES: Final = {"good": "32", "bad": "31", "warn": "33", "head": "1"}
"""Select Graphic Rendition parameters of ECMA-48: green, red, yellow, bold."""


class Output:
    """Where a command prints, and in which form.

    Args:
        as_json: JSON instead of text.
        stream: ``sys.stdout`` unless told otherwise.
        environ: read for NO_COLOR and TERM.
    """

    def __init__(
        self,
        *,
        as_json: bool = False,
        stream: TextIO | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.as_json = as_json
        self._stream = stream or sys.stdout
        environ = os.environ if environ is None else environ
        self._tty = self._stream.isatty()
        self._colour = self._tty and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"

    def line(self, text: str = "") -> None:
        """Print one line."""
        print(text, file=self._stream)

    def flush(self) -> None:
        """Let what was printed be seen now, also where it is read by a program."""
        self._stream.flush()

    def styled(self, text: str, style: str) -> str:
        """``text`` in a style of the table above, where the terminal can and may show it."""
        return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if self._colour else text

    def json(self, value: object) -> None:
        """Print one JSON value."""
        self.line(json.dumps(value, indent=2, ensure_ascii=False))

    def message(self, message: Message) -> None:
        """Print one message as proto3 JSON."""
        self.json(as_dict(message))

    def json_list(self, values: Iterable[object]) -> None:
        """Print a list of JSON values, each when it arrives; close it if ``values`` raises."""
        lead = "["
        try:
            for value in values:
                text = json.dumps(value, indent=2, ensure_ascii=False).replace("\n", "\n  ")
                self._stream.write(f"{lead}\n  {text}")
                lead = ","
        finally:
            self.line("[]" if lead == "[" else "\n]")

    def table(self, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print aligned columns, numbers to the right; a terminal's width is kept by cutting the widest column."""
        width = shutil.get_terminal_size().columns if self._tty else None
        lines = table_lines(head, rows, width)
        self.line(self.styled(lines[0], "head"))
        for line in lines[1:]:
            self.line(line)

    def pairs(self, rows: Iterable[tuple[str, str]]) -> None:
        """Print names and values, indented, the values under each other."""
        rows = list(rows)
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            self.line(f"{GAP}{name:<{width}}{GAP}{value}")


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number and its noun, in the plural unless it is 1."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


_UNITS: Final = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def duration(seconds: int, units: int = 2) -> str:
    """Seconds in their largest units: ``1 h 30 min``."""
    parts = []
    for unit, size_s in _UNITS:
        if amount := seconds // size_s:
            parts.append(f"{amount} {unit}")
            seconds -= amount * size_s
    return " ".join(parts[:units]) or "0 s"


_BARS: Final = "▁▂▃▄▅▆▇█"


def sparkline(values: Iterable[float], width: int) -> str:
    """The last values as bars, the highest of them full; at most ``width`` characters."""
    shown = [*values][-width:]
    highest = max(shown, default=0) or 1
    return "".join(_BARS[min(len(_BARS) - 1, int(value / highest * len(_BARS)))] for value in shown)


def window(seconds: int) -> str:
    """The length of a window, to the second."""
    return duration(seconds, len(_UNITS))


def enum_name(enum: Any, number: int) -> str:
    """The name of an enum's value; a value of a later release is shown by its number."""
    name: str = enum.Name(number) if number in enum.values() else str(number)
    return name


def as_dict(message: Message) -> dict[str, Any]:
    """The proto3 JSON of a message as a dict, with the contract's field names.

    Fields at their default are there too: a script that asks for ``allowed`` must find ``false``, not nothing.
    """
    fields = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    # MessageToDict puts the fields at their default last; the contract's order is easier to read and to compare.
    return {
        field.name: fields[field.name]
        for field in message.DESCRIPTOR.fields
        if field.name in fields
    }


def table_lines(
    head: Sequence[str], rows: Iterable[Sequence[object]], width: int | None
) -> list[str]:
    """The lines of a table, the first its head; ``width`` ``None`` = as wide as the cells."""
    values = [list(row) for row in rows]
    cells = [list(head), *([printable(str(value)) for value in row] for row in values)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
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
    if len(cell) > width:
        return cell[: width - 1] + "…"
    return cell.rjust(width) if right else cell.ljust(width)


LONG: Final = 100
"""Work of fewer steps is over before anybody reads a bar."""


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Yield what to call after each of ``total`` steps; the bar is gone at the end of the block."""
    if total < LONG or not sys.stderr.isatty():
        yield lambda: None
        return
    # 50 ms to import, where there is something to wait for anyway.
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import Progress  # noqa: PLC0415

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show that something goes on until the end of the block, of unknown length."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console  # noqa: PLC0415

    with Console(stderr=True).status(what):
        yield


QUIT_KEYS: Final = b"qQ\x03\x04"
"""Also what Ctrl-C and Ctrl-D are where the terminal does not act on them."""

MAX_READ: Final = 1_024


class Keyboard(NamedTuple):
    """A terminal, by its file descriptor, whose keys come as they are pressed."""

    descriptor: int

    def quit_pressed(self) -> bool:
        """Whether the quit key is among what was typed; waits until something is."""
        return bool(set(os.read(self.descriptor, MAX_READ) or QUIT_KEYS) & set(QUIT_KEYS))

    def quits_within(self, seconds: float) -> bool:
        """Whether the quit key is pressed before that time is over."""
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
    """Let each key be read when it is pressed, without Enter and without an echo, until the end of the block.

    ``None`` where there is no keyboard.
    """
    if not sys.stdin.isatty():
        yield None
        return
    # Not everywhere: there is no such terminal on Windows.
    import termios  # noqa: PLC0415
    import tty  # noqa: PLC0415

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield Keyboard(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
