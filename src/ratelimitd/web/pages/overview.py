"""``/``: the node and its cluster as they are now, and ``/events``, which keeps an open page up to date.

Whole without scripts: they only renew what the page was loaded with. Names of identifiers are shown to who holds the
admin role and asks for them; the log says who did, and no name.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final, Protocol

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from ratelimitd.observe.history import Sample
from ratelimitd.observe.live import Listener, Overview
from ratelimitd.rpc.interface import Call, RpcError
from ratelimitd.web.api.http_call import Requirement
from ratelimitd.web.pages.errors import Cause, Refused
from ratelimitd.web.pages.overview_view import headings_of, row, summary_of, view_of
from ratelimitd.web.pages.page_base import Frame, accepts_html

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


NAMES: Final = "names"
SHOWN: Final = "shown"
"""The query that asks for names: ``?names=shown``."""

FRAGMENTS: Final = ("state", "nodes", "denials", "holds", "summary")
"""The parts of the page that change, by their ids; each is the template ``overview_<id>.html``."""

Words = Callable[[Request], Awaitable[Response]]
"""``/`` for programs: what this is, in words."""

_log = logging.getLogger(__name__)


class OverviewPage:
    """The page and its stream.

    ``may_administer`` guards names; ``actor`` says who the log names for asking; ``on_breaker_open`` is the setting,
    empty where there is no choice.
    """

    def __init__(
        self,
        frame: Frame,
        live: LiveStatus,
        words: Words,
        *,
        may_administer: Requirement,
        actor: Callable[[Call], str],
        on_breaker_open: str = "",
    ) -> None:
        self._frame = frame
        self._on_breaker_open = on_breaker_open
        self._live = live
        self._words = words
        self._may_administer = may_administer
        self._actor = actor
        self._stream = LiveStream(live, self._fragments)

    def routes(self) -> list[BaseRoute]:
        """Where they are found."""
        page = self._frame.reading(self._page)

        async def front(request: Request) -> Response:
            return await (page if accepts_html(request) else self._words)(request)

        return [Route("/", front), Route("/events", self._frame.reading(self._events))]

    async def _page(self, request: Request) -> Response:
        named = self._asks_for_names(request)
        if named:
            _log.info(
                "%s looks at the names of denied identifiers", self._actor(self._call(request))
            )
        await self._live.refresh()
        overview, history = self._live.overview(named=named), self._live.history
        return self._frame.page(
            request, "overview.html", **self._context(overview, history, named=named)
        )

    async def _events(self, request: Request) -> Response:
        named = self._asks_for_names(request)
        if self._live.ended:
            headers = {"Retry-After": "10"}
            return Response("the node is draining\n", 503, headers, media_type="text/plain")
        return StreamingResponse(self._stream.events(named=named), media_type="text/event-stream")

    def _asks_for_names(self, request: Request) -> bool:
        if request.query_params.get(NAMES) != SHOWN:
            return False
        try:
            self._may_administer(self._call(request))
        except RpcError as error:
            raise Refused(Cause.NOT_ALLOWED, error.message) from None
        return True

    def _call(self, request: Request) -> Call:
        return self._frame.call(request, request.url.path)

    async def _fragments(
        self,
        overview: Overview,
        history: Sequence[Sample],
        named: bool,  # noqa: FBT001 -- as the stream calls it
    ) -> dict[str, str]:
        context = self._context(overview, history, named=named)
        parts = {}
        for name in FRAGMENTS:
            # Each in an event-loop iteration: with 20 nodes all of them take some milliseconds.
            await asyncio.sleep(0)
            parts[name] = self._frame.fragment(f"overview_{name}.html", **context)
        return parts

    def _context(
        self, overview: Overview, history: Sequence[Sample], *, named: bool
    ) -> dict[str, Any]:
        view = view_of(overview, history, named=named, on_breaker_open=self._on_breaker_open)
        return {"view": view, "headings": headings_of(view), "summary": summary_of(history)}
