"""Keeps a node's rule book current: the first load, what changed since, and what to do while the database is away.

Never decides a check and never writes a rule. See ADR 0013.
"""

from __future__ import annotations

import asyncio
import random as random_source
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, TypeVar

from ratelimitd.errors import StoreUnavailableError
from ratelimitd.retry import Backoff
from ratelimitd.rules.book import BookEditor, RuleBook
from ratelimitd.rules.last_good import LastGoodBook
from ratelimitd.rules.store import BookChanges, RuleStore

POLL_S: Final = 2.0
"""How often the store is asked for its revision; ± ``POLL_JITTER`` of it, so that nodes do not ask in step."""

POLL_JITTER: Final = 0.2

RETRY_FIRST_S: Final = 0.25
RETRY_LONGEST_S: Final = 5.0
"""The pause after a failure doubles from the first to the longest, and is cut by up to half at random."""

RULES_PER_TURN: Final = 256
"""Rules put into a book in one turn of the event loop: about 0.5 ms."""

MAX_REPORTED_ROWS: Final = 10
"""Bad rows named in one reload; the rest is a number."""

_Item = TypeVar("_Item")


class RuleFeed:
    """Follows a :class:`~ratelimitd.rules.store.RuleStore` and hands every new book, whole, to ``on_book``.

    ``report`` takes one line for an operator: when something starts to fail or recovers, never at each attempt. A
    row that is no valid rule is skipped; what the book holds of that rule stays.

    ``open_store`` is awaited before each reading of the store and brings it into service, if it is not yet; it raises
    ``StoreUnavailableError`` while it cannot. ``whole_load`` is entered around each load of a whole book. ``sleep`` and
    ``random`` (0 to 1) are there for tests.
    """

    def __init__(
        self,
        store: RuleStore,
        *,
        on_book: Callable[[RuleBook], None],
        last_good: LastGoodBook | None = None,
        report: Callable[[str], None] = lambda _line: None,
        open_store: Callable[[], Awaitable[None]] | None = None,
        whole_load: Callable[[], AbstractContextManager[None]] = nullcontext,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        random: Callable[[], float] = random_source.random,
    ) -> None:
        self._store = store
        self._on_book = on_book
        self._last_good = last_good
        self._report = report
        self._open_store = open_store
        self._whole_load = whole_load
        self._sleep = sleep
        self._random = random
        self._retry = Backoff(RETRY_FIRST_S, RETRY_LONGEST_S, random)
        self._book: RuleBook | None = None
        self._from_store = False
        self._failures = 0
        self._reloading = asyncio.Lock()
        self.skipped_total = 0
        """Bad rows met, counted at each reload that met them."""
        self._left_out: set[str] = set()

    @property
    def book(self) -> RuleBook | None:
        """The newest book; ``None`` until there is a first one."""
        return self._book

    @property
    def left_out(self) -> int:
        """Rows that are no valid rule now, those without a usable id counted as one until the whole book is loaded."""
        return len(self._left_out)

    @property
    def connected(self) -> bool:
        """Whether the book is the store's own, not that of an earlier run, and the store answered when last asked."""
        return self._from_store and not self._failures

    async def start(self) -> None:
        """Load a first book, from the store or else the last good one.

        Returns without a book when there is neither; :meth:`run` goes on trying. Raises what ``open_store`` raises,
        unless that is ``StoreUnavailableError``.
        """
        await self.notify()
        if self._book is None and self._last_good is not None:
            with self._whole_load():
                await self._take_last_good(self._last_good)

    async def run(self) -> None:
        """Poll the store until cancelled. An exception counts as a failed attempt and ends the run; run it again."""
        while True:
            await self._sleep(self._pause_s())
            try:
                await self.notify()
            except Exception:
                self._failures += 1
                raise

    async def notify(self) -> None:
        """Take over what changed now, instead of at the next poll; returns when it is in force.

        Call it after a local write. Does not raise when the store is away: the poll catches up later.
        """
        try:
            await self._reload()
        except StoreUnavailableError as error:
            if not self._failures:
                self._report(f"rules cannot be read: {error}")
            self._failures += 1
        else:
            if self._failures:
                self._report("rules can be read again")
            self._failures = 0
            self._retry.reset()

    async def close(self) -> None:
        """Let the last good book reach the disk; idempotent. The task of :meth:`run` must have ended."""
        if self._last_good is not None:
            await self._last_good.close()

    def _pause_s(self) -> float:
        if self._failures:
            return self._retry.next_s()
        return POLL_S * (1 + POLL_JITTER * (2 * self._random() - 1))

    async def _reload(self) -> None:
        async with self._reloading:
            if self._open_store is not None:
                await self._open_store()
            known = self._book.revision if self._book is not None and self._from_store else None
            if known is not None:
                current = await self._store.revision()
                if current == known:
                    return
                if current < known:
                    known = None  # another database: what changed since cannot be told
            with self._whole_load() if known is None else nullcontext():
                changes = await self._store.changes_since(known)
                self._note_skipped(changes)
                await self._take(changes)

    async def _take(self, changes: BookChanges) -> None:
        """Build the next book in turns with the rest of the loop, then swap it in at once."""
        old = self._book
        keeps_old = old is not None and not changes.full
        editor = BookEditor(old if old is not None and keeps_old else RuleBook.empty())
        if keeps_old:
            # Two rules may have swapped their endpoints: leave every old place before taking a new one.
            await _in_turns(changes.removed_ids, editor.remove)
            await _in_turns(changes.changed, lambda rule: editor.remove(rule.id))
        await _in_turns(changes.changed, editor.put)
        self._from_store = True
        self._publish(editor.finish(changes.revision))
        if old is not None and not keeps_old:
            parts = list(old.parts())
            del old
            while parts:
                del parts[-32:]
                await asyncio.sleep(0)

    def _publish(self, book: RuleBook) -> None:
        self._book = book
        self._on_book(book)
        if self._last_good is not None and self._from_store:
            self._last_good.offer(book)

    def _note_skipped(self, changes: BookChanges) -> None:
        self.skipped_total += len(changes.skipped)
        if changes.full:
            self._left_out.clear()
        elif self._left_out:
            self._left_out.difference_update(changes.removed_ids)
            self._left_out.difference_update(rule.id for rule in changes.changed)
        self._left_out.update(row.rule_id for row in changes.skipped)
        for row in changes.skipped[:MAX_REPORTED_ROWS]:
            self._report(f"rule {row.rule_id or 'without id'} is not served: {row.reason}")
        if (unnamed := len(changes.skipped) - MAX_REPORTED_ROWS) > 0:
            self._report(f"{unnamed} more rules are not served")

    async def _take_last_good(self, last_good: LastGoodBook) -> None:
        book, reason = await last_good.load()
        if reason:
            self._report(reason)
        if book is not None:
            self._report(f"serving the last good rule book, revision {book.revision}")
            self._publish(book)


async def _in_turns(items: Sequence[_Item], step: Callable[[_Item], None]) -> None:
    """Do a step for each item, and give the event loop a turn after every ``RULES_PER_TURN``."""
    for start in range(0, len(items), RULES_PER_TURN):
        for item in items[start : start + RULES_PER_TURN]:
            step(item)
        await asyncio.sleep(0)
