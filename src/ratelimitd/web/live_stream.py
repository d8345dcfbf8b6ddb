"""The live numbers of the overview, as server-sent events: one computation a step, however many pages are open.

A page is sent the past first, in pieces, then one event with each step, which is the sign of life as well. A page that
reads slowly is dropped and reconnects; all end with the node. See ADR 0029.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, Protocol

from ratelimitd.observe.history import Sample
from ratelimitd.observe.live import Listener, Overview
from ratelimitd.web.pages.overview_view import row

MAX_BEHIND: Final = 3
"""Events that a page may not have taken yet: six seconds."""

STREAM_S: Final = 600.0
"""A stream ends after ten minutes; the page reconnects, and its session is checked again."""

RETRY_MS: Final = 2_000

ROWS_PER_EVENT: Final = 100
"""Samples of the past that are put together in one turn of the event loop, in less than 1 ms."""

Fragments = Callable[[Overview, Sequence[Sample], bool], Awaitable[dict[str, str]]]
"""The parts of the page that change, as HTML, by their ids; for who sees names, or for who does not. Made in several
turns of the event loop."""


class LiveStatus(Protocol):
    """What is shown: :class:`ratelimitd.observe.live.Live`."""

    @property
    def history(self) -> Sequence[Sample]:
        """The last quarter of an hour."""

    @property
    def ended(self) -> bool:
        """The node is on its way out: there are no more steps."""

    def listen(self, listener: Listener) -> None:
        """Call ``listener`` after each step, and once at the end."""

    def unlisten(self, listener: Listener) -> None:
        """Call it no more."""

    async def refresh(self) -> None:
        """Find out how the other nodes are, unless that was done just now."""

    def overview(self, *, named: bool = False) -> Overview:
        """How things are."""


class LiveStream:
    """The open streams of a node."""

    def __init__(self, live: LiveStatus, fragments: Fragments) -> None:
        self._live = live
        self._fragments = fragments
        self._readers: set[_Reader] = set()

    async def events(self, *, named: bool) -> AsyncIterator[bytes]:
        """The events for one page, as octets; ends when it is dropped, after :data:`STREAM_S`, and with the node."""
        reader = _Reader(named, asyncio.get_running_loop().time() + STREAM_S)
        if not self._readers:
            self._live.listen(self._stepped)
        self._readers.add(reader)
        try:
            yield b"retry: %d\n\n" % RETRY_MS
            samples = self._live.history
            for start in range(0, len(samples), ROWS_PER_EVENT):
                piece = samples[start : start + ROWS_PER_EVENT]
                yield _event("past", [row(one) for one in piece])
                await asyncio.sleep(0)
            while (event := await reader.next()) is not None:
                yield event
        finally:
            self._readers.discard(reader)
            if not self._readers:
                self._live.unlisten(self._stepped)

    async def _stepped(self) -> None:
        """One step is done: compute once for each kind of reader, and hand on."""
        if self._live.ended:
            for reader in self._readers:
                reader.end()
            return
        made: dict[bool, bytes] = {}
        for reader in [*self._readers]:
            if reader.named not in made:
                made[reader.named] = await self._event(named=reader.named)
            if not reader.take(made[reader.named]):
                self._readers.discard(reader)
                reader.end()

    async def _event(self, *, named: bool) -> bytes:
        overview, history = self._live.overview(named=named), self._live.history
        parts = await self._fragments(overview, history, named)
        return _event("now", {"row": row(overview.total), "parts": parts})


class _Reader:
    """One open page. ``until_s``: when its stream ends at the latest, on the event loop's time."""

    def __init__(self, named: bool, until_s: float) -> None:  # noqa: FBT001 -- one of two kinds
        self.named = named
        self._until_s = until_s
        self._events: asyncio.Queue[bytes | None] = asyncio.Queue()

    def take(self, event: bytes) -> bool:
        """Keep an event until the page has taken it; false: it is too far behind."""
        if self._events.qsize() >= MAX_BEHIND:
            return False
        self._events.put_nowait(event)
        return True

    def end(self) -> None:
        """No more events."""
        self._events.put_nowait(None)

    async def next(self) -> bytes | None:
        """The next event; ``None`` at the end."""
        try:
            async with asyncio.timeout_at(self._until_s):
                return await self._events.get()
        except TimeoutError:
            return None


def _event(name: str, data: object) -> bytes:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"event: {name}\ndata: {text}\n\n".encode()
