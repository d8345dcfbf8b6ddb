"""The log of a node: one line per event on stderr, JSON or for a terminal, with node and rules revision.

Never logs the text of an exception, only its type and where it was raised: the text may quote an identifier or a token.
Never logs a line per check or per bad call; repeated events are logged at increasing intervals, from 1 s on, with the
number of omitted records.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import starmap
from typing import Final, NamedTuple, TextIO

import structlog
from structlog.typing import EventDict, Processor

from ratelimitd.buckets.keys import taken_apart
from ratelimitd.model import EVERYBODY, IdentifierType, types_within

REPEAT_PAUSE_S: Final = 1.0
LONGEST_REPEAT_PAUSE_S: Final = 60.0
"""Shortest and longest pause between two lines of the same event; each line doubles it. A fault of a day takes about
1,400 lines, not 86,400."""

REMEMBERED_EVENTS: Final = 1_024
"""Maximum number of remembered events; a library's texts may vary without bound."""

QUIET: Final = {
    "uvicorn.error": logging.ERROR,  # its warnings are one line per malformed HTTP request
    "uvicorn.access": logging.ERROR,
    "sqlalchemy": logging.WARNING,  # statements and their values
    "aiosqlite": logging.WARNING,
    "alembic": logging.WARNING,
    "grpc": logging.CRITICAL,  # its errors quote metadata, and so tokens
    "asyncio": logging.WARNING,
    "urllib3": logging.ERROR,  # the path of OTEL_ENDPOINT, also in warnings
}
"""Libraries and the minimum level at which their records are logged."""

_NO_EXCEPTION: Final[tuple[None, None, None]] = (None, None, None)


class LogContext:
    """Context added to every line; ``rules_revision`` is set with each new rule book."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.rules_revision = 0

    def __call__(self, _logger: object, _method: str, event: EventDict) -> EventDict:
        """Add the context to an event."""
        event["node_id"] = self.node_id
        event["rules_revision"] = self.rules_revision
        return event


class _Written(NamedTuple):
    """Time of the last line of an event, the pause after it, and the number of records omitted since."""

    at_s: float
    pause_s: float
    left_out: int


class OncePerPause(logging.Filter):
    """Passes an event at most once per growing pause; the next line reports the number of omitted records.

    An event that did not occur for :data:`REPEAT_PAUSE_S` after its last pause starts again with that pause.

    Two records are the same event if logger, level and formatted text are equal. Records omitted at the end of an event
    are reported by the next line of any other event. ``time_s`` is monotonic seconds.
    """

    def __init__(self, time_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._time_s = time_s
        # Threads log concurrently: a handler calls its filters before it takes its own lock. Reentrant: a destructor
        # may log meanwhile.
        self._lock = threading.RLock()
        self._seen: OrderedDict[tuple[str, int, str], _Written] = OrderedDict()
        """Keyed by event, ordered by last line."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is written."""
        key = (record.name, record.levelno, _text(record))
        with self._lock:
            return self._is_written(key, record)

    def _is_written(self, key: tuple[str, int, str], record: logging.LogRecord) -> bool:
        now_s = self._time_s()
        last = self._seen.get(key)
        if last is not None and now_s - last.at_s < last.pause_s:
            self._seen[key] = last._replace(left_out=last.left_out + 1)
            return False
        self._seen.pop(key, None)
        pause_s = REPEAT_PAUSE_S
        if last is not None and not _has_ended(last, now_s):
            pause_s = min(LONGEST_REPEAT_PAUSE_S, 2 * last.pause_s)
        record.left_out = last.left_out if last else 0
        record.left_out_of_others = self._forget_ended(now_s)
        self._seen[key] = _Written(now_s, pause_s, 0)
        return True

    def _forget_ended(self, now_s: float) -> int:
        """Drop the oldest events while they have ended or are too many; return the number of their omitted records."""
        left_out = 0
        while self._seen:
            key, oldest = next(iter(self._seen.items()))
            if not _has_ended(oldest, now_s) and len(self._seen) < REMEMBERED_EVENTS:
                break
            self._seen.pop(key, None)
            left_out += oldest.left_out
        return left_out


def _has_ended(written: _Written, now_s: float) -> bool:
    """Return whether an event has not occurred for so long that it starts again."""
    return now_s - written.at_s >= written.pause_s + REPEAT_PAUSE_S


def _text(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # noqa: BLE001 - a text and values that do not fit: the handler's business, not the caller's
        return str(record.msg)


def configure(
    *, level: str, log_format: str, context: LogContext, stream: TextIO | None = None
) -> None:
    """Send every log record of the process to ``stream`` (stderr), in one format.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
        log_format: ``json``, ``console``, or ``auto`` for console on a terminal and JSON elsewhere.
        context: what stands on every line.
        stream: where to; stderr when ``None``.
    """
    stream = stream or sys.stderr
    console = log_format == "console" or (log_format == "auto" and stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.addFilter(OncePerPause())
    handler.setFormatter(_formatter(context, console=console, colors=console and stream.isatty()))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
    logging.raiseExceptions = False  # a closed stderr must not end in a traceback on it
    for name, least in QUIET.items():
        logging.getLogger(name).setLevel(max(least, logging.getLevelName(level.upper())))


def _formatter(context: LogContext, *, console: bool, colors: bool) -> logging.Formatter:
    common: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        _left_out,
        context,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _place,
    ]
    renderer: Processor = (
        structlog.dev.ConsoleRenderer(colors=colors)
        if console
        else structlog.processors.JSONRenderer()
    )
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=common,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
    )


def _left_out(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Remove counts of omitted records that are 0."""
    for name in ("left_out", "left_out_of_others"):
        if not event.get(name):
            event.pop(name, None)
    return event


def _place(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Replace an exception by its type and the code locations of its traceback."""
    kind, _, trace = event.pop("exc_info", None) or _NO_EXCEPTION
    if kind is not None:
        frames = traceback.extract_tb(trace)
        event["exception"] = kind.__name__
        event["at"] = " > ".join(
            f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames
        )
    return event


SHOWN_CHARACTERS: Final = 4
"""Longest unmasked start of an identifier, which is also at most a quarter of it."""

HIDDEN: Final = "…"


def masked(identifier: bytes, identifier_type: str) -> str:
    """Mask an identifier: keep half of an IPv4 address, two groups of an IPv6 address, else the first characters."""
    return "+".join(starmap(_masked, _parts(identifier, identifier_type))) or EVERYBODY


def shown(identifier: bytes, identifier_type: str) -> str:
    """Return an identifier in readable form; those of a combination are joined by ``+``."""
    return "+".join(text for text, _ in _parts(identifier, identifier_type)) or EVERYBODY


def _parts(identifier: bytes, identifier_type: str) -> Iterator[tuple[str, str]]:
    types = types_within(identifier_type)
    identifiers = taken_apart(identifier, len(types))
    for one, kind in zip(identifiers, types, strict=True):
        yield one.decode(errors="replace"), kind


def _masked(text: str, identifier_type: str) -> str:
    if identifier_type == IdentifierType.IP:
        separator = ":" if ":" in text else "."
        return separator.join((*text.split(separator)[:2], HIDDEN))
    return text[: min(SHOWN_CHARACTERS, len(text) // 4)] + HIDDEN


_log = logging.getLogger(__name__)


class RulesLog:
    """Logs changes of the rules; :meth:`write`, called about once a second, logs the latest state."""

    def __init__(self) -> None:
        self._state: tuple[int, int] | None = None
        self._written: tuple[int, int] | None = None

    def take(self, revision: int, rules: int) -> None:
        """Record a new rule book."""
        self._state = revision, rules

    def write(self) -> None:
        """Log the state if it differs from the last one logged."""
        if self._state is None or self._state == self._written:
            return
        self._written = self._state
        if rules := self._state[1]:
            _log.info("rules in force: %d", rules)
        else:
            _log.warning("no rules: every check is allowed")
