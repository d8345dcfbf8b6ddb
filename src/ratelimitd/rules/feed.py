"""Keeps a node's rules and assignments current: first load, later changes, and the last good copy as a fallback.

Applies no rule to checks and writes none. See ADR 0013 and ADR 0050.
"""

from __future__ import annotations

import asyncio
import logging
import random as random_source
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from ratelimitd.errors import StoreUnavailableError
from ratelimitd.retry import Backoff
from ratelimitd.rules.assignments import Assignments
from ratelimitd.rules.book import RULES_PER_STEP, BookEditor, RuleBook
from ratelimitd.rules.last_good import IS_EMPTY, LastGoodBook
from ratelimitd.rules.store import BookChanges, RuleStore, SkippedRow, in_steps

POLL_S: Final = 2.0
POLL_JITTER: Final = 0.2
"""Poll interval ± this fraction, so that nodes do not poll in step; edits become visible within 2.4 s (I13)."""

RETRY_FIRST_S: Final = 0.25
RETRY_LONGEST_S: Final = 5.0
"""Delay after a failure: doubles from the first to the longest, reduced by up to half at random."""

MAX_REPORTED_ROWS: Final = 10
"""Invalid rows named in the log per reload; further rows are only counted."""

ASSIGNMENTS_PER_STEP: Final = 1_000
"""Assignments applied per event-loop iteration: about 1 ms. A batch takes effect as a whole."""

_FREED_PER_STEP: Final = 32
"""Shards of an old book freed per event-loop iteration."""

_log = logging.getLogger(__name__)


class RuleFeed:
    """Follows a :class:`~ratelimitd.rules.store.RuleStore` and passes every new book, whole, to ``on_book``.

    ``assignments`` mirrors those of the store, changed in place.

    Logs the first failure and the recovery, not each attempt. Skips an invalid row; the book keeps its previous rule,
    at a start that of the last good book. An empty store in place of one with edits was lost: the feed keeps its book,
    as while a store is unavailable.

    Awaits ``open_store`` before each read to prepare the store; it returns whether the store is another one than
    before, and raises ``StoreUnavailableError`` while it cannot. Enters ``whole_load`` around each load of a whole
    book. Tests set ``sleep`` and ``random`` (0 to 1).
    """

    def __init__(
        self,
        store: RuleStore,
        *,
        on_book: Callable[[RuleBook], None],
        assignments: Assignments | None = None,
        last_good: LastGoodBook | None = None,
        open_store: Callable[[], Awaitable[bool]] | None = None,
        whole_load: Callable[[], AbstractContextManager[None]] = nullcontext,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        random: Callable[[], float] = random_source.random,
    ) -> None:
        self.skipped_total = 0
        """Invalid rows, counted at each reload that reads them."""
        self.assignments: Final = Assignments() if assignments is None else assignments
        """The plans of identities, changed in place; complete once there is a book."""
        self._store = store
        self._on_book = on_book
        self._last_good = last_good
        self._was_edited = last_good is not None and last_good.was_edited()
        self._open_store = open_store
        self._whole_load = whole_load
        self._sleep = sleep
        self._random = random
        self._retry = Backoff(RETRY_FIRST_S, RETRY_LONGEST_S, random)
        self._book: RuleBook | None = None
        self._from_store = False
        self._failures = 0
        self._reloading = asyncio.Lock()
        self._left_out: set[str] = set()

    @property
    def book(self) -> RuleBook | None:
        """The newest book; ``None`` until the first load."""
        return self._book

    @property
    def left_out(self) -> int:
        """Current number of invalid rows; all rows without a usable id count as one until the next whole load."""
        return len(self._left_out)

    @property
    def connected(self) -> bool:
        """Whether the book came from the store, not from disk, and the last read succeeded."""
        return self._from_store and not self._failures

    def expects_edits(self) -> bool:
        """Return whether the store was ever edited, by the book in use, else by the last good one of the start."""
        return self._was_edited if self._book is None else self._book.revision > 0

    def require_edits(self) -> None:
        """Refuse a store that was never edited if it should have been: it was lost, and is read whole next time.

        Raises:
            StoreUnavailableError: it should have been; the message says what to do.
        """
        if self.expects_edits():
            # What it holds next is another book, even at the same revision.
            self._from_store = False
            raise StoreUnavailableError(IS_EMPTY)

    async def start(self) -> None:
        """Load the first book from the store, else the last good one from disk.

        Returns without a book if neither exists; :meth:`run` retries. Raises what ``open_store`` raises, except
        ``StoreUnavailableError``.
        """
        await self.notify()
        if self._book is None and self._last_good is not None:
            with self._whole_load():
                found = await self._last_good.load()
                if found is not None:
                    book, assignments = found
                    _log.warning("serving the last good rule book, revision %d", book.revision)
                    await _all_steps(self.assignments.replace(assignments))
                    self._publish(book)

    async def run(self) -> None:
        """Poll the store until cancelled. An exception counts as a failed attempt and ends the run; call it again."""
        while True:
            await self._sleep(self._delay_s())
            try:
                await self.notify()
            except Exception:
                self._failures += 1
                raise

    async def notify(self) -> None:
        """Apply pending changes now instead of at the next poll; return when they are in force.

        Call it after a local write. Does not raise when the store is unavailable: the poll catches up.
        """
        try:
            await self._reload()
        except StoreUnavailableError as error:
            if not self._failures:
                _log.warning("rules cannot be read: %s", error)
            self._failures += 1
        else:
            if self._failures:
                _log.warning("rules can be read again")
            self._failures = 0
            self._retry.reset()

    async def close(self) -> None:
        """Write the last good book to disk; idempotent. The task of :meth:`run` must have ended."""
        if self._last_good is not None:
            await self._last_good.close()

    def _delay_s(self) -> float:
        if self._failures:
            return self._retry.next_s()
        return POLL_S * (1 + POLL_JITTER * (2 * self._random() - 1))

    async def _reload(self) -> None:
        async with self._reloading:
            if self._open_store is not None and await self._open_store():
                self._from_store = False
            known = self._book.revision if self._book is not None and self._from_store else None
            is_whole = known is None
            if known is not None:
                current = await self._store.revision()
                if current == known:
                    return
                is_whole = current < known  # another database: the changes since are unknown
            with self._whole_load() if is_whole else nullcontext():
                changes = await self._store.changes_since(known)
                if not changes.revision:
                    self.require_edits()
                self._count_skipped(changes)
                await self._apply(changes)

    async def _apply(self, changes: BookChanges) -> None:
        """Build the next book in steps, then swap it in at once."""
        old = self._book
        editor = BookEditor(RuleBook.empty() if old is None or changes.full else old)
        if changes.full and changes.skipped:
            # First: a valid rule may have taken the endpoint of one of them, and replaces it.
            await self._keep_last_valid(editor, changes.skipped)
        await _all_steps(editor.apply(changes.changed, changes.removed_ids))
        # Before the book, whose revision promises that they are in force.
        await _all_steps(self._assign(changes))
        self._from_store = True
        self._publish(editor.finish(changes.revision))
        if old is not None and changes.full:
            # Freeing 100,000 rules at once would stall the loop for some 10 ms.
            parts = old.parts()
            del old
            while parts:
                del parts[-_FREED_PER_STEP:]
                await asyncio.sleep(0)

    async def _keep_last_valid(self, editor: BookEditor, skipped: Sequence[SkippedRow]) -> None:
        """Put the rules that the book in use, else the last good one, has in place of invalid rows."""
        book = self._book
        if book is None and self._last_good is not None and (found := await self._last_good.load()):
            book = found.book
        if book is not None:
            kept = filter(None, (book.get(row.rule_id) for row in skipped))
            await _all_steps(in_steps(editor.put, kept, RULES_PER_STEP))

    def _assign(self, changes: BookChanges) -> Iterator[None]:
        if changes.full:
            yield from self.assignments.replace(changes.assignments or Assignments())
            return
        remove, put = self.assignments.remove, self.assignments.put
        yield from in_steps(lambda one: remove(*one), changes.unassigned, ASSIGNMENTS_PER_STEP)
        yield from in_steps(lambda one: put(*one), changes.assigned, ASSIGNMENTS_PER_STEP)

    def _publish(self, book: RuleBook) -> None:
        self._book = book
        self._on_book(book)
        if self._last_good is not None and self._from_store:
            self._last_good.offer(book, self.assignments)

    def _count_skipped(self, changes: BookChanges) -> None:
        self.skipped_total += len(changes.skipped) + changes.skipped_assignments
        if changes.skipped_assignments:
            _log.warning("%d invalid assignments have no effect", changes.skipped_assignments)
        if changes.full:
            self._left_out.clear()
        elif self._left_out:
            self._left_out.difference_update(changes.removed_ids)
            self._left_out.difference_update(rule.id for rule in changes.changed)
        self._left_out.update(row.rule_id for row in changes.skipped)
        for row in changes.skipped[:MAX_REPORTED_ROWS]:
            _log.warning("rule %s is not served: %s", row.rule_id or "without id", row.reason)
        if (unnamed := len(changes.skipped) - MAX_REPORTED_ROWS) > 0:
            _log.warning("%d more rules are not served", unnamed)


async def _all_steps(steps: Iterator[None]) -> None:
    """Run the steps, one per event-loop iteration."""
    for _ in steps:
        await asyncio.sleep(0)
