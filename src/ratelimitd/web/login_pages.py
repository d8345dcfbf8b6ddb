"""Logging in with the admin token or a link, and out again. Tries with a token are bounded for each address."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from ratelimitd.web.frame import SESSION_COOKIE, Fields, Frame, local_path
from ratelimitd.web.http_call import network_of
from ratelimitd.web.refusals import ANSWERS, Cause, Count
from ratelimitd.web.sessions import Sessions

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


def login_routes(
    frame: Frame, sessions: Sessions, count: Count, now_s: Callable[[], float]
) -> list[BaseRoute]:
    """``/login`` and ``/logout``. ``now_s`` never steps back."""
    tries = Tries(now_s)

    def form(request: Request, target: str, refused: Cause | None = None) -> Response:
        return frame.page(
            request,
            "login.html",
            status_code=ANSWERS[refused].status if refused else 200,
            next=target,
            possible=sessions.possible,
            error=ANSWERS[refused].text if refused else "",
        )

    def entered(request: Request, target: str) -> Response:
        response = RedirectResponse(target, 303)
        frame.set_cookie(request, response, SESSION_COOKIE, sessions.open())
        return response

    async def show(request: Request) -> Response:
        frame.stranger(request)
        # A HEAD request looks whether the page is there, and must not use the link up.
        code = request.query_params.get("code") if request.method == "GET" else None
        if code is not None:
            if sessions.opened_by(code, request.headers.get("host", "")):
                return entered(request, "/")
            count(Cause.LOGIN_LINK)
            return form(request, "/", Cause.LOGIN_LINK)
        return form(request, local_path(request.query_params.get("next", "/")))

    async def log_in(request: Request) -> Response:
        visitor = frame.stranger(request)
        fields = await frame.form_of(request, visitor)
        target = local_path(fields.get("next", "/"))
        cause = None
        if not tries.admit(network_of(request)):
            cause = Cause.TOO_MANY_LOGINS
        elif not sessions.opened_with(fields.get("token", "").strip()):
            cause = Cause.WRONG_TOKEN
        if cause is not None:
            count(cause)
            return form(request, target, cause)
        return entered(request, target)

    async def log_out(request: Request, _fields: Fields) -> Response:
        response = RedirectResponse("/login", 303)
        frame.set_cookie(request, response, SESSION_COOKIE, "")
        return response

    return [
        Route("/login", show),
        Route("/login", log_in, methods=["POST"]),
        Route("/logout", frame.posting(log_out), methods=["POST"]),
    ]
