"""Logging in with the admin token or a link, and out again. Tries with a token are bounded for each address."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from ratelimitd.web.api.http_call import network_of
from ratelimitd.web.pages.errors import ANSWERS, Cause, Count
from ratelimitd.web.pages.page_base import SESSION_COOKIE, Fields, Frame, local_path
from ratelimitd.web.pages.sessions import Sessions

MAX_TRIES: Final = 10
TRIES_WINDOW_S: Final = 60
MAX_ADDRESSES: Final = 1_000
"""Addresses whose tries are remembered; the one that tried least recently is forgotten first."""


class Tries:
    """How often each address tried to log in, in windows that begin with its first try."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._by_address: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def admit(self, address: str) -> bool:
        """Count one more try, unless there were too many already."""
        now_s = self._now_s()
        started_s, count = self._by_address.pop(address, (now_s, 0))
        if now_s - started_s >= TRIES_WINDOW_S:
            started_s, count = now_s, 0
        admitted = count < MAX_TRIES
        self._by_address[address] = (started_s, count + admitted)
        while len(self._by_address) > MAX_ADDRESSES:
            self._by_address.popitem(last=False)
        return admitted


class LoginPages:
    """``/login`` and ``/logout``. ``now_s`` never steps back."""

    def __init__(
        self, frame: Frame, sessions: Sessions, count: Count, now_s: Callable[[], float]
    ) -> None:
        self._frame = frame
        self._sessions = sessions
        self._count = count
        self._tries = Tries(now_s)

    def routes(self) -> list[BaseRoute]:
        """Where they are found."""
        return [
            Route("/login", self._show),
            Route("/login", self._log_in, methods=["POST"]),
            Route("/logout", self._frame.posting(self._log_out), methods=["POST"]),
        ]

    async def _show(self, request: Request) -> Response:
        self._frame.visitor(request)
        code = request.query_params.get("code")
        # A HEAD request asks whether the page is there, and must not use the link up.
        if code is None or request.method == "HEAD":
            return self._form(request, local_path(request.query_params.get("next", "/")))
        if not self._sessions.opened_by(code, request.headers.get("host", "")):
            return self._form(request, "/", Cause.LOGIN_LINK)
        return self._enter(request, "/")

    async def _log_in(self, request: Request) -> Response:
        visitor = self._frame.visitor(request)
        fields = await self._frame.form_of(request, visitor)
        target = local_path(fields.get("next", "/"))
        if not self._tries.admit(network_of(request)):
            return self._form(request, target, Cause.TOO_MANY_LOGINS)
        if not self._sessions.opened_with(fields.get("token", "").strip()):
            return self._form(request, target, Cause.WRONG_TOKEN)
        return self._enter(request, target)

    async def _log_out(self, request: Request, _fields: Fields) -> Response:
        response = RedirectResponse("/login", 303)
        self._frame.set_cookie(request, response, SESSION_COOKIE, "")
        return response

    def _form(self, request: Request, target: str, refused: Cause | None = None) -> Response:
        if refused is not None:
            self._count(refused)
        return self._frame.page(
            request,
            "login.html",
            status_code=ANSWERS[refused].status if refused else 200,
            next=target,
            possible=self._sessions.possible,
            error=ANSWERS[refused].text if refused else "",
        )

    def _enter(self, request: Request, target: str) -> Response:
        response = RedirectResponse(target, 303)
        self._frame.set_cookie(request, response, SESSION_COOKIE, self._sessions.open())
        return response
