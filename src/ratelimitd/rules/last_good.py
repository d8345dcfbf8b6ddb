"""The last good rule book on disk: what a node starts from while the database is away.

Never fatal: a file that is torn, foreign or unwritable is reported and set aside, and the node goes on without it.
See ADR 0013.

The file is lines of JSON: a header, one array per rule in the columns of ``RuleRow``, and a checksum of all before
it. It is written aside and renamed, so that a reader finds the old one or the new one, whole.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from ratelimitd.model import Rule
from ratelimitd.rules.book import BookEditor, RuleBook
from ratelimitd.rules.validation import RuleRow, rule_from_row

FILE_NAME: Final = "rules.last-good"
FORMAT: Final = "ratelimitd rule book 1"

WRITE_DELAY_S: Final = 5.0
"""How long a new book waits for a newer one before it is written: an import of many rules is written once."""

RULES_PER_TURN: Final = 128
"""Rules written in one turn of the event loop: about 0.5 ms."""

BYTES_PER_TURN: Final = 16_384
"""What is read and decoded in one turn: about 100 rules, 1 ms."""

_MAX_HEADER_BYTES: Final = 1_024


class Loaded(NamedTuple):
    """The book that was found, or ``None`` and why; no file is no book without a reason."""

    book: RuleBook | None
    reason: str


class LastGoodBook:
    """Keeps the newest book in ``state_dir``, which must exist and belong to this node alone.

    ``report`` takes one line for an operator; ``sleep`` is there for tests.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        report: Callable[[str], None] = lambda _line: None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._path = state_dir / FILE_NAME
        self._report = report
        self._sleep = sleep
        self._offered: RuleBook | None = None
        self._writer: asyncio.Task[None] | None = None
        self._pause: asyncio.Future[None] | None = None
        self._closing = False

    async def load(self) -> Loaded:
        """Read the book. A file that cannot be used is renamed to ``*.bad``, so that it can be looked at."""
        try:
            with await asyncio.to_thread(self._path.open, "rb") as file:
                return Loaded(await _read(file), "")
        except FileNotFoundError:
            return Loaded(None, "")
        except OSError as error:
            return Loaded(None, f"the last good rule book cannot be read: {error.strerror}")
        except _UnusableFileError as error:
            self._set_aside()
            return Loaded(None, f"the last good rule book was set aside: {error}")

    def offer(self, book: RuleBook) -> None:
        """Write this book within ``WRITE_DELAY_S``, unless a newer one is offered meanwhile. Never raises."""
        self._offered = book
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_offered(), name="last good rule book")

    async def close(self) -> None:
        """Write at once what still waits; idempotent."""
        self._closing = True
        if self._pause is not None:
            self._pause.cancel()
        if self._writer is not None:
            await self._writer

    async def _write_offered(self) -> None:
        while self._offered is not None:
            if not self._closing:
                # Only the pause can be cut short: to stop in the middle of a write would gain nothing.
                self._pause = asyncio.ensure_future(self._sleep(WRITE_DELAY_S))
                await asyncio.wait([self._pause])
            book, self._offered = self._offered, None
            try:
                await self._write(book)
            except OSError as error:
                self._report(f"the last good rule book cannot be written: {error.strerror}")

    async def _write(self, book: RuleBook) -> None:
        aside = self._path.with_name(f"{FILE_NAME}.tmp")
        digest = blake2b()
        header = {"format": FORMAT, "revision": book.revision, "rules": len(book)}
        with await asyncio.to_thread(aside.open, "wb") as file:
            lines = [_line(header)]
            rules = book.rules()
            while lines:
                data = b"".join(lines)
                digest.update(data)
                await asyncio.to_thread(file.write, data)
                lines = [_line(RuleRow.of(rule)) for rule in islice(rules, RULES_PER_TURN)]
            await asyncio.to_thread(file.write, _line({"blake2b": digest.hexdigest()}))
            await asyncio.to_thread(_sync, file)
        await asyncio.to_thread(os.replace, aside, self._path)

    def _set_aside(self) -> None:
        try:
            self._path.rename(self._path.with_name(f"{FILE_NAME}.bad"))
        except OSError as error:
            self._report(f"the unusable rule book cannot be renamed: {error.strerror}")


class _UnusableFileError(Exception):
    """The file is not a whole book of ours; the message says in which way."""


async def _read(file: BinaryIO) -> RuleBook:
    """The book in the file. Takes turns with the rest of the loop; nothing of it is used before its checksum."""
    first = await asyncio.to_thread(file.readline, _MAX_HEADER_BYTES)
    header = _object(first)
    revision = header.get("revision")
    if header.get("format") != FORMAT or not isinstance(revision, int):
        message = "it is not one of ours"
        raise _UnusableFileError(message)
    digest = blake2b(first)
    editor = BookEditor(RuleBook.empty())
    while lines := await asyncio.to_thread(file.readlines, BYTES_PER_TURN):
        for line in lines:
            if line.startswith(b"{"):
                if _object(line).get("blake2b") != digest.hexdigest():
                    message = "its checksum is wrong"
                    raise _UnusableFileError(message)
                return editor.finish(revision)
            digest.update(line)
            editor.put(_rule(line))
    message = "its end is missing"
    raise _UnusableFileError(message)


def _object(line: bytes) -> dict[str, object]:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {}


def _rule(line: bytes) -> Rule:
    try:
        rule = rule_from_row(RuleRow._make(json.loads(line)))
    except (ValueError, TypeError):
        rule = None
    if not isinstance(rule, Rule):
        message = "a line of it is no rule"
        raise _UnusableFileError(message)
    return rule


def _line(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
