"""How a node's rule store comes into service: schema, seed and bucket key, tried until it works.

Never serves rules itself; the feed asks for the next attempt, and says what does not work. See ADR 0013 and ADR 0024.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from ratelimitd.errors import RuleInvalidError, StartupError, StoreUnavailableError
from ratelimitd.rules.assignments import Assignments
from ratelimitd.rules.book import RuleBook
from ratelimitd.rules.feed import RuleFeed
from ratelimitd.rules.last_good import BucketKey, LastGoodBook, require_same_key
from ratelimitd.rules.rules_file import MAX_FILE_BYTES, parse_rules
from ratelimitd.rules.sql import migrations
from ratelimitd.rules.sql.sqlite import BUSY_TIMEOUT_S
from ratelimitd.rules.store import RuleStore
from ratelimitd.settings import urls
from ratelimitd.settings.table import Settings

ACTOR: Final = "RULES_FILE"
"""Who the audit trail names."""


async def seed_new_book(store: RuleStore, path: Path, types: Collection[str] | None = None) -> int:
    """Write the rules of ``path`` if the store never had one, whole; else log that it is not loaded.

    Returns how many were written. ``types`` are the identifier types that rules may have, or be made of.

    Raises:
        StartupError: the file cannot be read, or a rule in it is wrong; the line names file, rule and field.
        StoreUnavailableError: the store cannot be read or written.
    """
    if await store.revision():  # what decides is asked again in the transaction
        _log.info(
            "RULES_FILE is not loaded: the rule book has rules, or had some; to load it, run"
            " `ratelimitd rules apply -f %s`",
            path,
        )
        return 0
    try:
        drafts = parse_rules(await asyncio.to_thread(_read, path), types)
    except RuleInvalidError as error:
        message = f"RULES_FILE {path}: {error}"
        raise StartupError(message) from error
    return await store.create_all(drafts, ACTOR)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        message = f"RULES_FILE {path} cannot be read: {error.strerror}"
        raise StartupError(message) from error


_log = logging.getLogger(__name__)


class StoreOpening:
    """Opens the store of one node.

    ``may_create`` says at each attempt whether a missing file is made. ``rules_file`` fills a new book, and must be
    readable at the first attempt.
    ``bucket_key`` is settled with the store; ``None`` when the settings give the key. ``shared_key`` is the KEY_SECRET
    of a node that shares its buckets, empty = not set; ``None`` for a node that does not share them.
    """

    def __init__(
        self,
        store: RuleStore,
        database_url: str,
        *,
        may_create: Callable[[], bool],
        rules_file: Path | None,
        types: Collection[str] | None = None,
        bucket_key: BucketKey | None,
        shared_key: bytes | None = None,
    ) -> None:
        self._store = store
        self._database_url = database_url
        self._may_create = may_create
        self._rules_file = rules_file
        self._types = types
        self._bucket_key = bucket_key
        self._shared_key = shared_key
        self._was_tried = False
        self._is_open = False

    async def open(self) -> None:
        """Bring the store into service, unless it is; call it again after a failure.

        Raises:
            StoreUnavailableError: not now; a later attempt may succeed.
            StartupError: somebody has to mend the configuration. By the first attempt only: a node that serves goes on.
        """
        if self._is_open:
            return
        was_tried, self._was_tried = self._was_tried, True
        if not was_tried and self._rules_file is not None:
            # Whatever the database has: a file that is named and missing is a mistake.
            await asyncio.to_thread(_read, self._rules_file)
        try:
            await self._prepare()
        except StartupError as error:
            if not was_tried:
                raise
            raise StoreUnavailableError(str(error)) from error
        self._is_open = True

    async def _prepare(self) -> None:
        if isinstance(urls.parse_database_url(self._database_url), urls.SqliteFile):
            await migrations.upgrade(
                self._database_url, create=self._may_create(), busy_timeout_s=BUSY_TIMEOUT_S
            )
        else:
            # Other nodes may be of an older release, and their operator decides when that is no longer so.
            await migrations.require_current(self._database_url)
        if self._rules_file is not None:
            written = await seed_new_book(self._store, self._rules_file, self._types)
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
    """The feed of a node, which opens the store before it first reads it."""
    opening = StoreOpening(
        store,
        settings.database_url,
        # A database that is missing while the last good book is in force is lost, and an empty one would allow all.
        may_create=lambda: feed.book is None,
        rules_file=settings.rules_file,
        types=settings.known_types,
        bucket_key=bucket_key,
        shared_key=settings.key_secret if settings.redis_url else None,
    )
    feed = RuleFeed(
        store,
        on_book=on_book,
        assignments=assignments,
        last_good=LastGoodBook(state_dir),
        open_store=opening.open,
        whole_load=whole_load,
    )
    return feed
