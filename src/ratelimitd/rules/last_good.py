"""Copies of the rule database's content in the state directory, for a start while the database is unavailable.

Two files: the last good rule book with the assignments, and the key that hashes bucket names. Each is written to a
temporary file and renamed, so that readers see the old or the new file, whole. Both are readable by their owner only:
an assigned identity may be an API key. An unusable file is logged and never fails the start. See ADR 0013.

The book is lines of JSON: a header, one array per rule in the columns of ``RuleRow``, one per assignment in the fields
of ``Assigned``, and a checksum of all preceding lines. For assignments changed during the write, the file holds either
state.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from ratelimitd.errors import StartupError
from ratelimitd.model import Rule
from ratelimitd.rules.assignments import Assigned, Assignments, assigned_of
from ratelimitd.rules.book import BookEditor, RuleBook
from ratelimitd.rules.store import SECRET_BYTES, RuleStore, steps
from ratelimitd.rules.validation import RuleRow, rule_from_row

BOOK_FILE: Final = "rules.last-good"
KEY_FILE: Final = "bucket-key"
FORMAT: Final = "ratelimitd rule book 1"
FORMAT_WITH_ASSIGNMENTS: Final = "ratelimitd rule book 2"
"""Not format 1: a release without assignments must reject such a file."""

_APPLY: Final = (
    "`ratelimitd rules apply` of a whole file; to begin with an empty one,"
    f" remove {BOOK_FILE} from STATE_DIR and restart"
)
REMEDY: Final = f"restore it, or run `ratelimitd db upgrade` and {_APPLY}"
"""What to do about a missing rule database."""

IS_EMPTY: Final = f"the rule database is empty: restore it, or run {_APPLY}"
"""The error of a database without any edit beside a book that had some."""

WRITE_DELAY_S: Final = 5.0
"""Delay of writing a new book, during which a newer one replaces it: an import is written once."""

ASSIGNMENTS_PER_S: Final = 20_000
"""The delay grows by 1 s per this many assignments: a million take 3 s to write, at most once in 55 s."""

BYTES_PER_STEP: Final = 16_384
"""Bytes encoded or decoded per event-loop iteration: about 100 rules of one limit, 1 ms."""

_MAX_HEADER_BYTES: Final = 1_024

KEY_NAME: Final = "key"
"""Name of the secret used when KEY_SECRET is empty."""

FINGERPRINT_NAME: Final = "key fingerprint"
"""Name of the secret that shows whether nodes have the same key."""

_FINGERPRINT_OF: Final = b"ratelimitd: which key names the buckets"

_log = logging.getLogger(__name__)


class LastGood(NamedTuple):
    """The state that a node serves without a database."""

    book: RuleBook
    assignments: Assignments


class LastGoodBook:
    """Keeps the newest book in ``state_dir``, which must exist and be private to this node. Tests set ``sleep``."""

    def __init__(
        self, state_dir: Path, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._path = state_dir / BOOK_FILE
        self._sleep = sleep
        self._offered: LastGood | None = None
        self._writer: asyncio.Task[None] | None = None
        self._delay: asyncio.Future[None] | None = None
        self._closing = False

    def was_edited(self) -> bool:
        """Return whether there is a book of a database that was ever edited; reads its header only."""
        try:
            with self._path.open("rb") as file:
                header = _object(file.readline(_MAX_HEADER_BYTES))
            return header.get("revision", 0) != 0
        except FileNotFoundError:
            return False
        except OSError:
            return True

    async def load(self) -> LastGood | None:
        """Return the content of the file; ``None`` without a usable one.

        Logs an unusable file and renames it to ``*.bad``.
        """
        try:
            with await asyncio.to_thread(self._path.open, "rb") as file:
                return await _read(file)
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("the last good rule book cannot be read: %s", error.strerror)
        except _UnusableFileError as error:
            self._set_aside()
            _log.warning("the last good rule book was set aside: %s", error)
        return None

    def offer(self, book: RuleBook, assignments: Assignments) -> None:
        """Write these after a delay, see ``WRITE_DELAY_S``; a newer offer replaces them. Never raises."""
        self._offered = LastGood(book, assignments)
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_offered(), name="last good rule book")

    async def close(self) -> None:
        """Write the offered book at once; idempotent."""
        self._closing = True
        if self._delay is not None:
            self._delay.cancel()
        if self._writer is not None:
            await self._writer

    async def _write_offered(self) -> None:
        while self._offered is not None:
            if not self._closing:
                # Cancel only the delay; a write that has begun completes.
                delay_s = WRITE_DELAY_S + len(self._offered.assignments) / ASSIGNMENTS_PER_S
                self._delay = asyncio.ensure_future(self._sleep(delay_s))
                await asyncio.wait([self._delay])
            offered, self._offered = self._offered, None
            try:
                await self._write(*offered)
            except OSError as error:
                _log.warning("the last good rule book cannot be written: %s", error.strerror)
                self._offer_again(offered)

    def _offer_again(self, failed: LastGood) -> None:
        # Rules may not change for months.
        if self._offered is None and not self._closing:
            self._offered = failed

    async def _write(self, book: RuleBook, assignments: Assignments) -> None:
        aside = self._path.with_name(f"{BOOK_FILE}.tmp")
        digest = blake2b()
        kind = FORMAT_WITH_ASSIGNMENTS if assignments else FORMAT
        header = {"format": kind, "revision": book.revision, "rules": len(book)}
        with await asyncio.to_thread(_new_private_file, aside) as file:
            rules = (_line(RuleRow.of(rule)) for rule in book.rules())
            lines = chain([_line(header)], rules, _lines_of(assignments))
            for step in steps(lines, BYTES_PER_STEP, len):
                data = b"".join(step)
                digest.update(data)
                await asyncio.to_thread(file.write, data)
            await asyncio.to_thread(file.write, _line({"blake2b": digest.hexdigest()}))
            await asyncio.to_thread(_sync, file)
        await asyncio.to_thread(os.replace, aside, self._path)

    def _set_aside(self) -> None:
        try:
            self._path.rename(self._path.with_name(f"{BOOK_FILE}.bad"))
        except OSError as error:
            _log.warning("the unusable rule book cannot be renamed: %s", error.strerror)


class BucketKey:
    """The key of one node: the store's if readable in time, else the copy in ``state_dir``, else a new one.

    The key is never logged.
    """

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / KEY_FILE
        self._copy = self._load()
        self._key = self._copy or secrets.token_bytes(SECRET_BYTES)
        self._in_use = False

    async def settle(self, store: RuleStore) -> None:
        """Adopt the store's key, or store this node's key if it has none; a key in use does not change.

        Raises:
            StoreUnavailableError: the store cannot be read.
        """
        stored = await store.secret(KEY_NAME, self._key)
        if stored == self._key:
            return
        if self._in_use:
            _log.warning(
                "the rule database has another bucket key than this node uses; the next start takes the database's,"
                " and buckets start full"
            )
            return
        if self._copy is not None:
            _log.warning(
                "the rule database has another bucket key than the state directory; it is used, and buckets start full"
            )
        self._key = stored

    def use(self) -> bytes:
        """Return the key, fixed from now on, and copy it to the state directory."""
        self._in_use = True
        if self._key != self._copy:
            self._save()
        return self._key

    def _load(self) -> bytes | None:
        try:
            with self._path.open("rb") as file:
                key = file.read(SECRET_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("the copy of the bucket key cannot be read: %s", error.strerror)
            return None
        if len(key) == SECRET_BYTES:
            return key
        _log.warning("the copy of the bucket key is not a key and is replaced")
        return None

    def _save(self) -> None:
        try:
            write_private(self._path, self._key)
        except OSError as error:
            _log.warning(
                "the bucket key cannot be copied to the state directory: %s", error.strerror
            )


async def require_same_key(store: RuleStore, key_secret: bytes) -> None:
    """Verify that this node's key matches that of the first caller. Nodes that share buckets must call it.

    ``key_secret`` is the setting; empty = the store's key. The store holds a keyed hash of a fixed text: a reader of
    the database can test guesses of a weak key, but learns nothing about a random one. See ADR 0024.

    Raises:
        StartupError: the keys differ: this node would count in separate buckets.
        StoreUnavailableError: the store cannot be read.
    """
    key = key_secret or await store.secret(KEY_NAME)
    fingerprint = hmac.digest(key, _FINGERPRINT_OF, "sha256")
    if not hmac.compare_digest(await store.secret(FINGERPRINT_NAME, fingerprint), fingerprint):
        message = (
            "KEY_SECRET differs from that of the other nodes on this rule database: it must be the same on all of"
            " them, or set on none"
        )
        raise StartupError(message)


class _UnusableFileError(Exception):
    """The file is not a valid book; the message says why."""


async def _read(file: BinaryIO) -> LastGood:
    """Return the content of the file, decoded in steps; verifies the checksum before anything is used."""
    first = await asyncio.to_thread(file.readline, _MAX_HEADER_BYTES)
    header = _object(first)
    revision = header.get("revision")
    if header.get("format") not in (FORMAT, FORMAT_WITH_ASSIGNMENTS) or not isinstance(
        revision, int
    ):
        message = "it has another format"
        raise _UnusableFileError(message)
    digest = blake2b(first)
    editor = BookEditor(RuleBook.empty())
    assignments = Assignments()
    while lines := await asyncio.to_thread(file.readlines, BYTES_PER_STEP):
        for line in lines:
            if line.startswith(b"{"):
                if _object(line).get("blake2b") != digest.hexdigest():
                    message = "its checksum is wrong"
                    raise _UnusableFileError(message)
                return LastGood(editor.finish(revision), assignments)
            digest.update(line)
            _take(line, editor, assignments)
    message = "its end is missing"
    raise _UnusableFileError(message)


def _object(line: bytes) -> dict[str, object]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {}


def _take(line: bytes, editor: BookEditor, assignments: Assignments) -> None:
    """Add the rule or assignment of a line."""
    try:
        values = json.loads(line)
        if len(values) == len(Assigned._fields):
            identifier_type, identifier, *plan = values
            values = [identifier_type, identifier.encode(), *plan]
            if assigned := assigned_of(values):
                assignments.put(*assigned)
                return
        rule = rule_from_row(RuleRow(*values))
    except (ValueError, TypeError, AttributeError, RecursionError):
        rule = None
    if not isinstance(rule, Rule):
        message = "a line of it is not a valid rule"
        raise _UnusableFileError(message)
    editor.put(rule)


def _lines_of(assignments: Assignments) -> Iterator[bytes]:
    for identifier_type, identifier, plan, expire_time in assignments.items():
        yield _line((identifier_type, identifier.decode(), plan, expire_time))


def _line(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, atomically."""
    aside = path.with_name(f"{path.name}.tmp")
    with _new_private_file(aside) as file:
        file.write(data)
        _sync(file)
    aside.replace(path)


def _new_private_file(path: Path) -> BinaryIO:
    """Create a file that only its owner can read, in place of an existing one."""
    with suppress(FileNotFoundError):
        path.unlink()  # left by a killed process, perhaps with another mode
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    return os.fdopen(descriptor, "wb")


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
