"""``/``: the node and its cluster as they are now, and ``/events``, which keeps an open page up to date.

Whole without scripts: they only renew what the page was loaded with. Names of identifiers are shown to who holds the
admin role and asks for them; the log says who did, and no name.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from ratelimitd.observe.history import Sample
from ratelimitd.observe.live import Overview
from ratelimitd.rpc.interface import Call, RpcError
from ratelimitd.web.api.http_call import Requirement
from ratelimitd.web.live_stream import LiveStatus, LiveStream
from ratelimitd.web.pages.errors import Cause, Refused
from ratelimitd.web.pages.overview_view import headings_of, summary_of, view_of
from ratelimitd.web.pages.page_base import Frame, accepts_html

NAMES: Final = "names"
SHOWN: Final = "shown"
"""The query that asks for names: ``?names=shown``."""

FRAGMENTS: Final = ("state", "nodes", "denials", "summary")
"""The parts of the page that change, by their ids; each is the template ``overview_<id>.html``."""

Words = Callable[[Request], Awaitable[Response]]
"""``/`` for programs: what this is, in words."""

_log = logging.getLogger(__name__)


class OverviewPage:
    """The page and its stream. ``may_administer`` guards names; ``actor`` says who the log names for asking."""

    def __init__(
        self,
        frame: Frame,
        live: LiveStatus,
        words: Words,
        *,
        may_administer: Requirement,
        actor: Callable[[Call], str],
    ) -> None:
        self._frame = frame
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
            # Each in a turn of its own: with 20 nodes all of them take some milliseconds.
            await asyncio.sleep(0)
            parts[name] = self._frame.fragment(f"overview_{name}.html", **context)
        return parts

    @staticmethod
    def _context(overview: Overview, history: Sequence[Sample], *, named: bool) -> dict[str, Any]:
        view = view_of(overview, history, named=named)
        return {"view": view, "headings": headings_of(view), "summary": summary_of(history)}
