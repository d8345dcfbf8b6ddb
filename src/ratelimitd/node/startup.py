"""Opens a node's rule store: schema, seed and bucket key, retried until it works.

The feed requests each attempt, and reports failures. See ADR 0013 and ADR 0024.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import stat
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from ratelimitd.errors import RuleInvalidError, StartupError, StoreUnavailableError
from ratelimitd.node.tokens_file import without_waiting
from ratelimitd.rules.assignments import Assignments
from ratelimitd.rules.book import RuleBook
from ratelimitd.rules.feed import RuleFeed
from ratelimitd.rules.last_good import (
    IS_EMPTY,
    REMEDY,
    BucketKey,
    LastGoodBook,
    require_same_key,
)
from ratelimitd.rules.rules_file import MAX_FILE_BYTES, parse_rules
from ratelimitd.rules.sql import migrations
from ratelimitd.rules.sql.sqlite import BUSY_TIMEOUT_S, identity_of
from ratelimitd.rules.store import RuleDraft, RuleStore
from ratelimitd.settings import urls
from ratelimitd.settings.table import Settings

ACTOR: Final = "RULES_FILE"
"""Actor in the audit trail."""


async def seed_new_book(
    store: RuleStore,
    path: Path,
    types: Collection[str] | None = None,
    drafts: Sequence[RuleDraft] | None = None,
) -> int:
    """Write all rules of ``path`` if the store never had a rule, else log that the file is ignored.

    Returns how many were written. ``types`` are the identifier types that rules may use, ``drafts`` the rules of
    ``path`` if it was read before.

    Raises:
        StartupError: the file cannot be read, or a rule in it is wrong; the line names file, rule and field.
        StoreUnavailableError: the store cannot be read or written.
    """
    if not await store.revision():  # else the file may be missing
        drafts = await _drafts_in(path, types) if drafts is None else drafts
        # The transaction checks again that the book is new.
        written = await store.create_all(drafts, ACTOR)
        if written or not drafts:
            return written
    _log.info(
        "RULES_FILE only seeds a new rule book, and this one is not new: use `ratelimitd rules apply` to apply a file"
    )
    return 0


async def _drafts_in(path: Path, types: Collection[str] | None) -> Sequence[RuleDraft]:
    try:
        return parse_rules(await asyncio.to_thread(read_rules_file, path), types)
    except OSError as error:
        message = f"RULES_FILE {path} cannot be read: {error.strerror}"
        raise StartupError(message) from error
    except RuleInvalidError as error:
        message = f"RULES_FILE {path}: {error}"
        raise StartupError(message) from error


def read_rules_file(path: Path) -> bytes:
    """Return the content of the file, cut one byte beyond ``MAX_FILE_BYTES``.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    with open(path, "rb", opener=without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return file.read(MAX_FILE_BYTES + 1)


_log = logging.getLogger(__name__)


class StoreOpening:
    """Opens the store of one node.

    ``may_be_new`` returns at each attempt whether the store may be a new one; else a missing or empty one is refused.
    ``rules_file`` seeds a new book. ``bucket_key`` is settled with the store; ``None`` when the settings give the key.
    ``shared_key`` is the KEY_SECRET of a node that shares its buckets, empty = not set; ``None`` for a node that does
    not share them.
    """

    def __init__(
        self,
        store: RuleStore,
        database_url: str,
        *,
        may_be_new: Callable[[], bool],
        rules_file: Path | None,
        types: Collection[str] | None = None,
        bucket_key: BucketKey | None,
        shared_key: bytes | None = None,
    ) -> None:
        self._store = store
        self._database_url = database_url
        self._database = urls.parse_database_url(database_url)
        self._may_be_new = may_be_new
        self._rules_file = rules_file
        self._types = types
        self._bucket_key = bucket_key
        self._shared_key = shared_key
        self._was_tried = False
        self._is_open = False
        self._file: tuple[int, int] | None = None

    async def open(self) -> bool:
        """Open the store, unless it is open; call it again before each read.

        Returns whether it was opened: the first time, or because its SQLite file was replaced.

        Raises:
            StoreUnavailableError: a later attempt may succeed.
            StartupError: the configuration is wrong. Only the first attempt raises it: a serving node continues.
        """
        if self._is_open and self._file == self._identity():
            return False
        was_tried, self._was_tried = self._was_tried, True
        try:
            await self._prepare()
        except StartupError as error:
            if not was_tried:
                raise
            raise StoreUnavailableError(str(error)) from error
        self._is_open = True
        self._file = self._identity()
        return True

    def _identity(self) -> tuple[int, int] | None:
        """Return the identity of the SQLite file; ``None`` for a server."""
        if isinstance(self._database, urls.SqliteFile):
            return identity_of(self._database.path)
        return None

    async def _prepare(self) -> None:
        database = self._database
        may_be_new = self._may_be_new()
        drafts = None
        if isinstance(database, urls.SqliteFile):
            if not await asyncio.to_thread(identity_of, database.path):
                if not may_be_new:
                    message = f"the rule database {database.path} is missing: {REMEDY}"
                    raise StoreUnavailableError(message)
                if self._rules_file is not None:
                    # Before the database is created: a wrong file must not leave an empty one.
                    drafts = await _drafts_in(self._rules_file, self._types)
            await migrations.upgrade(
                self._database_url, create=may_be_new, busy_timeout_s=BUSY_TIMEOUT_S
            )
        else:
            # Other nodes may run an older release; the operator decides when to migrate.
            await migrations.require_current(self._database_url)
        if not may_be_new and not await self._store.revision():
            raise StoreUnavailableError(IS_EMPTY)
        if self._rules_file is not None:
            written = await seed_new_book(self._store, self._rules_file, self._types, drafts)
            if written:
                _log.info("seeded the new rule book with %d rules", written)
        if self._bucket_key is not None:
            await self._bucket_key.settle(self._store)
        if self._shared_key is not None:
            await require_same_key(self._store, self._shared_key)


def feed_of(
    store: RuleStore,
    settings: Settings,
    bucket_key: BucketKey | None,
    state_dir: Path,
    *,
    on_book: Callable[[RuleBook], None],
    assignments: Assignments,
    whole_load: Callable[[], AbstractContextManager[None]],
) -> RuleFeed:
    """Return the feed of a node; it opens the store before its first read."""
    last_good = LastGoodBook(state_dir)
    opening = StoreOpening(
        store,
        settings.database_url,
        # Else it was lost: an empty one would allow all checks, and RULES_FILE lacks later edits and assignments.
        may_be_new=lambda: not feed.expects_edits(),
        rules_file=settings.rules_file,
        types=settings.known_types,
        bucket_key=bucket_key,
        shared_key=settings.key_secret if settings.redis_url else None,
    )
    feed = RuleFeed(
        store,
        on_book=on_book,
        assignments=assignments,
        last_good=last_good,
        open_store=opening.open,
        whole_load=whole_load,
    )
    return feed
