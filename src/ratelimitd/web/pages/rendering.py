"""Templates and static files: read once at the start of the node, so that no page waits for the disk.

All template output is escaped. See ADR 0028.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any, Final, NamedTuple

from jinja2 import (
    BytecodeCache,
    Environment,
    FileSystemBytecodeCache,
    FileSystemLoader,
    StrictUndefined,
)
from jinja2.bccache import Bucket
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

HERE: Final = Path(__file__).parent.parent
MEDIA_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

LASTING: Final = "public, max-age=31536000, immutable"
"""Cache-Control for addresses with a content hash: changed content has another address."""


class StaticFile(NamedTuple):
    """One file with its headers. ``version`` is a hash of its content."""

    content: bytes
    media_type: str
    version: str


class StaticFiles:
    """The files under ``/static/``."""

    def __init__(self, directory: Path = HERE / "static") -> None:
        self._files = {path.name: _read(path) for path in sorted(directory.iterdir())}

    def url(self, name: str) -> str:
        """Return the address of a file, with the hash of its content."""
        return f"/static/{name}?v={self._files[name].version}"

    def route(self) -> Route:
        """Return the route; ``name`` is the last part of the path."""
        return Route("/static/{name}", self._answer)

    async def _answer(self, request: Request) -> Response:
        found = self._files.get(request.path_params["name"])
        if found is None:
            return Response(status_code=404)
        # A module imported by another has no hash in its address, so browsers revalidate it.
        named = request.query_params.get("v") == found.version
        etag = f'"{found.version}"'
        headers = {"Cache-Control": LASTING if named else "no-cache", "ETag": etag}
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(found.content, headers=headers, media_type=found.media_type)


class CompiledTemplates(FileSystemBytecodeCache):
    """Compiled templates beside the bytecode of this module; compiling them takes a fifth of a node's start.

    They are of this module, which has the options, of one version of Jinja2 and of Python. As with bytecode, none is
    written if Python is told so or the directory is not writable.
    """

    def __init__(self, module: Path = Path(__file__)) -> None:
        of = sha256(version("jinja2").encode() + module.read_bytes()).hexdigest()[:16]
        super().__init__(
            str(Path(cache_from_source(str(module))).parent),
            f"{sys.implementation.cache_tag}-{of}-%s.template",
        )

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Write one compiled template."""
        if not sys.dont_write_bytecode:
            with suppress(OSError):
                super().dump_bytecode(bucket)


@cache
def look() -> tuple[StaticFiles, Environment]:
    """Return the files and templates of the package; loaded once per process, for all its nodes."""
    static = StaticFiles()
    return static, environment(static, HERE / "templates", CompiledTemplates())


def environment(
    static: StaticFiles, directory: Path, compiled: BytecodeCache | None = None
) -> Environment:
    """Compile the templates."""
    found = Environment(
        loader=FileSystemLoader(directory),
        autoescape=True,
        undefined=StrictUndefined,
        auto_reload=False,
        trim_blocks=True,
        lstrip_blocks=True,
        bytecode_cache=compiled,
    )
    found.globals["static_url"] = static.url
    for shown in (number, duration, instant, short, faded):
        found.filters[shown.__name__] = shown
    for name in found.list_templates():
        found.get_template(name)
    return found


def number(value: float) -> str:
    """Format a number with a thin space between thousands."""
    return f"{value:,}".replace(",", "\u202f")


def duration(seconds: int) -> str:
    """Format a duration in the largest units that represent it exactly, such as ``1 h 30 min``."""
    parts = []
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, seconds = divmod(seconds, size)
        if count:
            parts.append(f"{number(count)} {unit}")
    return " ".join(parts) or "0 s"


def instant(at: datetime | int) -> str:
    """Format a point in time in UTC; a number is in Unix seconds."""
    moment: Any = datetime.fromtimestamp(at, UTC) if isinstance(at, int) else at
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


TABLE_ROWS: Final = 12
"""Rows of a table that replaces a chart."""


def course(now: float, highest: float) -> str:
    """Describe a rate over a period in words."""
    return f"now {short(now)} a second, at most {short(highest)}"


def time_of_day(at_s: int) -> str:
    """Format the time of day of a moment in Unix seconds, in UTC."""
    return f"{datetime.fromtimestamp(at_s, UTC):%H:%M:%S}"


def _read(path: Path) -> StaticFile:
    content = path.read_bytes()
    return StaticFile(content, MEDIA_TYPES[path.suffix], sha256(content).hexdigest()[:16])


NONE: Final = "–"

NEXT_TO_NOTHING: Final = 0.005
NEXT_TO_ALL: Final = 0.999
FOUR_DIGITS: Final = 1_000
MS_PER_S: Final = 1_000

_GAP: Final = "\u202f"
"""A thin space that does not break lines."""


def short(value: float) -> str:
    """Format with decimals only for small values: ``0``, ``0.04``, ``3.5``, ``420``, ``12 345``."""
    if value < 0:
        return "−" + short(-value)
    if 0 < value < NEXT_TO_NOTHING:
        return f"<{_GAP}0.01"
    for below, digits in ((0.095, 2), (9.95, 1)):
        if value != round(value) and value < below:
            return f"{value:.{digits}f}"
    return number(round(value))


def faded(value: float) -> str:
    """Format a count that fades over time, below 1 without decimals."""
    return f"<{_GAP}1" if value < 1 else short(value)


def milliseconds(value_ms: float | None) -> str:
    """Format a latency: ``35 µs``, ``1.5 ms`` or ``4.5 s``."""
    if value_ms is None:
        return NONE
    if value_ms < 1:
        return f"{round(value_ms * 1_000)}{_GAP}µs"
    if round(value_ms) >= MS_PER_S:
        return f"{short(value_ms / 1_000)}{_GAP}s"
    return f"{short(value_ms)}{_GAP}ms"


def seconds(value_s: float) -> str:
    """Format a duration from milliseconds to minutes."""
    if 0 < abs(value_s) < 1:
        sign = "−" if value_s < 0 else ""
        return sign + milliseconds(abs(value_s) * 1_000)
    return f"{short(value_s)}{_GAP}s"


def percent(ratio: float | None) -> str:
    """Format a fraction as a percentage; values just below 1 are not rounded to 100 %."""
    if ratio is None:
        return NONE
    if NEXT_TO_ALL <= ratio < 1:
        return f"99.9{_GAP}%"
    return f"{short(ratio * 100)}{_GAP}%"


def size(octets: int) -> str:
    """Format a memory size in the unit that leaves one to three digits before the point."""
    value = float(octets)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < FOUR_DIGITS:
            return f"{short(value)}{_GAP}{unit}"
        value /= 1_024
    return f"{short(value)}{_GAP}TiB"
