"""``/``: the current state of the node and its cluster, and ``/events``, which keeps an open page up to date.

Complete without scripts, which only refresh the loaded content. Shows the names of identifiers to holders of the admin
role on request; the log records the requester, not the names.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from ratelimitd import __version__
from ratelimitd.observe.history import DEFAULT_SPAN, SPANS
from ratelimitd.observe.live import Live
from ratelimitd.web.pages.errors import HEADERS, Refused
from ratelimitd.web.pages.overview_view import (
    TABLE_HEADINGS,
    row,
    summary_of,
    table_of,
    view_of,
)
from ratelimitd.web.pages.page_base import Frame, accepts_html

MAX_BEHIND: Final = 3
"""Events queued for a slow page: six seconds."""

STREAM_S: Final = 600.0
"""Duration of a stream: ten minutes; then the page reconnects, and its session is checked again."""

RETRY_MS: Final = 2_000

ROWS_PER_EVENT: Final = 100
"""Samples of the history processed per event-loop iteration, in less than 1 ms."""

NAMES: Final = "names"
SHOWN: Final = "shown"
"""Query value that requests names: ``?names=shown``."""

SPAN_WORDS: Final = {"5m": "5 minutes", "15m": "15 minutes", "1h": "hour", "24h": "24 hours"}
"""The spans in words, as they follow "the last"."""


class Look(NamedTuple):
    """The display options of a page: whether to show names of denied identifiers, and the span of its charts."""

    named: bool = False
    span: str = DEFAULT_SPAN

    def address(self, path: str = "/", **changes: Any) -> str:
        """Return the address of a path with these options, some of them changed."""
        named, span = self._replace(**changes)
        given = {NAMES: SHOWN if named else "", "range": span if span != DEFAULT_SPAN else ""}
        query = urlencode({name: value for name, value in given.items() if value})
        return f"{path}?{query}" if query else path


Fragments = Callable[[Look], Awaitable[dict[str, str]]]
"""Returns the changing parts of the page as HTML, by id. Takes several event-loop iterations."""


_Events = asyncio.Queue[bytes | None]
"""The events of one open page; ``None`` ends them."""


class LiveStream:
    """The open streams of a node."""

    def __init__(self, live: Live, fragments: Fragments) -> None:
        self._live = live
        self._fragments = fragments
        self._pages: dict[_Events, Look] = {}

    async def events(self, may_go_on: Callable[[], bool], look: Look) -> AsyncIterator[bytes]:
        """Yield the events for one page, as bytes; ends when dropped, after :data:`STREAM_S`, and with the node.

        Calls ``may_go_on`` before each: the visitor's token may have ended.
        """
        events, until_s = _Events(), asyncio.get_running_loop().time() + STREAM_S
        if not self._pages:
            self._live.listen(self._stepped)
        self._pages[events] = look
        try:
            yield b"retry: %d\n\n" % RETRY_MS
            samples = self._live.history(SPANS[look.span])
            for start in range(0, len(samples), ROWS_PER_EVENT):
                piece = samples[start : start + ROWS_PER_EVENT]
                yield _event("past", [row(one) for one in piece])
                await asyncio.sleep(0)
            while (event := await _next(events, until_s)) is not None and may_go_on():
                yield event
        finally:
            self._pages.pop(events, None)
            if not self._pages:
                self._live.unlisten(self._stepped)

    async def _stepped(self) -> None:
        """Handle a step: render once per kind of page, and queue the result; end a page that is too far behind."""
        made: dict[Look, bytes] = {}
        for events, look in [*self._pages.items()]:
            if self._live.ended:
                events.put_nowait(None)
                continue
            if look not in made:
                made[look] = await self._event(look)
            if events.qsize() < MAX_BEHIND:
                events.put_nowait(made[look])
            else:
                self._pages.pop(events, None)
                events.put_nowait(None)

    async def _event(self, look: Look) -> bytes:
        newest = self._live.history(SPANS[look.span])[-1]
        return _event("now", {"row": row(newest), "parts": await self._fragments(look)})


async def _next(events: _Events, until_s: float) -> bytes | None:
    """Return the next event; ``None`` at the end, and at ``until_s``, on the event loop's clock."""
    try:
        async with asyncio.timeout_at(until_s):
            return await events.get()
    except TimeoutError:
        return None


def _event(name: str, data: object) -> bytes:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"event: {name}\ndata: {text}\n\n".encode()


FRAGMENTS: Final = ("state", "nodes", "denials", "holds", "summary")
"""The changing parts of the page, by id; each has the template ``overview_<id>.html``."""

_log = logging.getLogger(__name__)


class OverviewPage:
    """The page and its stream; ``/`` is plain text for programs."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._parts = frame.parts
        self._stream = LiveStream(frame.parts.live, self._fragments)

    def routes(self) -> list[BaseRoute]:
        """Return their routes."""
        page = self._frame.reading(self._page)

        async def front(request: Request) -> Response:
            return await page(request) if accepts_html(request) else self._in_words()

        return [Route("/", front), Route("/events", self._frame.reading(self._events))]

    def _in_words(self) -> Response:
        return PlainTextResponse(
            f"ratelimitd {__version__}: a gRPC rate limiter\n\n"
            f"gRPC      {self._parts.grpc_address()}\n"
            "/metrics  numbers for Prometheus\n"
            "/healthz  200 while the process lives\n"
            "/readyz   200 while checks should come here\n",
            headers=HEADERS,
        )

    async def _page(self, request: Request) -> Response:
        look = self._look(request)
        self._log(request, look)
        await self._parts.live.refresh()
        span = SPANS[look.span]
        return self._frame.page(
            request,
            "overview.html",
            span=span,
            spans=SPAN_WORDS,
            rows=table_of(self._parts.live.history(span), span),
            table_headings=TABLE_HEADINGS,
            **self._context(look),
        )

    async def _events(self, request: Request) -> Response:
        look = self._look(request)
        if request.method == "HEAD":  # a stream would occupy a slot
            return Response(media_type="text/event-stream")
        if self._parts.live.ended:
            headers = {"Retry-After": "10"}
            return Response("the node is draining\n", 503, headers, media_type="text/plain")
        self._log(request, look)

        def may_go_on() -> bool:
            try:
                self._frame.admit(request)
                self._look(request)
            except Refused:
                return False
            return True

        events = self._stream.events(may_go_on, look)
        return StreamingResponse(events, media_type="text/event-stream")

    def _log(self, request: Request, look: Look) -> None:
        if look.named:
            _log.info(
                "%s looks at the names of denied identifiers",
                self._parts.actor(self._frame.call(request, request.url.path)),
            )

    def _look(self, request: Request) -> Look:
        span = request.query_params.get("range", "")
        if named := request.query_params.get(NAMES) == SHOWN:
            self._frame.demand(request, self._parts.may_administer)
        return Look(named, span if span in SPANS else DEFAULT_SPAN)

    async def _fragments(self, look: Look) -> dict[str, str]:
        context = self._context(look)
        parts = {}
        for name in FRAGMENTS:
            # One per event-loop iteration: with 20 nodes all of them take some milliseconds.
            await asyncio.sleep(0)
            parts[name] = self._frame.fragment(f"overview_{name}.html", **context)
        return parts

    def _context(self, look: Look) -> dict[str, Any]:
        overview = self._parts.live.overview(named=look.named)
        recent = self._parts.live.history(SPANS[DEFAULT_SPAN])
        return {
            "look": look,
            "overview": overview,
            "view": view_of(overview, recent, self._parts.on_breaker_open),
            "summary": summary_of(self._parts.live.history(SPANS[look.span])),
        }
