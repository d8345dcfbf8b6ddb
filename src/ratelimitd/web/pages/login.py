"""Login with a token or a link, and logout."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from ratelimitd.rpc.interface import RpcError
from ratelimitd.web.api.connect import details_of, retry_after
from ratelimitd.web.api.http_call import http_call
from ratelimitd.web.pages.errors import ANSWERS, Cause
from ratelimitd.web.pages.page_base import SESSION_COOKIE, Fields, Frame, local_path


class LoginPages:
    """``/login`` and ``/logout``."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._sessions = frame.sessions
        self._parts = frame.parts

    def routes(self) -> list[BaseRoute]:
        """Return their routes."""
        return [
            Route("/login", self._show),
            Route("/login", self._log_in, methods=["POST"]),
            Route("/logout", self._frame.posting(self._log_out), methods=["POST"]),
        ]

    async def _show(self, request: Request) -> Response:
        self._frame.visitor(request)
        code = request.query_params.get("code")
        # A HEAD request only probes the page and must not consume the link.
        if code is None or request.method == "HEAD":
            return self._form(request, local_path(request.query_params.get("next", "/")))
        if not self._sessions.opened_by(code, request.headers.get("host", "")):
            return self._form(request, "/", Cause.LOGIN_LINK)
        return self._enter(request, "/")

    async def _log_in(self, request: Request) -> Response:
        visitor = self._frame.visitor(request)
        fields = await self._frame.form_of(request, visitor)
        target = local_path(fields.get("next", "/"))
        token = fields.get("token", "").strip()
        try:
            name = self._parts.login(http_call(request, "/login", f"Bearer {token}"))
        except RpcError as error:
            response = self._form(request, target, Cause.TOO_MANY_LOGINS)
            response.headers.update(retry_after(details_of(error)))
            return response
        if name is None:
            return self._form(request, target, Cause.WRONG_TOKEN)
        return self._enter(request, target, name)

    async def _log_out(self, request: Request, _fields: Fields) -> Response:
        response = RedirectResponse("/login", 303)
        self._frame.set_cookie(request, response, SESSION_COOKIE, "")
        return response

    def _form(self, request: Request, target: str, refused: Cause | None = None) -> Response:
        if refused is not None:
            self._parts.refused(refused)
        return self._frame.page(
            request,
            "login.html",
            status_code=ANSWERS[refused].status if refused else 200,
            next=target,
            possible=self._sessions.possible,
            error=ANSWERS[refused].text if refused else "",
        )

    def _enter(self, request: Request, target: str, name: str = "") -> Response:
        response = RedirectResponse(target, 303)
        self._frame.set_cookie(request, response, SESSION_COOKIE, self._sessions.open(name))
        return response
