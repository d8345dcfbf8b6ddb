"""Shared page plumbing: session, authorization, CSRF, templates, and calls of the services.

The requirement it is given, the one that guards the services, decides who may read. Pages never access a store or a
limiter to change anything: they call the methods that gRPC callers use, with the visitor's credentials, and the
services handle roles, validation, audit trail and errors. See ADR 0017 and ADR 0028.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import parse_qsl, quote

from google.protobuf.message import Message
from google.rpc import error_details_pb2
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from ratelimitd import __version__
from ratelimitd.errors import FieldViolation
from ratelimitd.rpc.interface import RpcError, StatusCode
from ratelimitd.web.api import connect
from ratelimitd.web.api.http_call import (
    BodyTooLargeError,
    HttpCall,
    Requirement,
    body_of,
    http_call,
    settled,
)
from ratelimitd.web.pages.errors import ANSWERS, Cause, Refused
from ratelimitd.web.pages.rendering import look
from ratelimitd.web.pages.rule_form import form_errors
from ratelimitd.web.pages.sessions import Sessions
from ratelimitd.web.parts import Parts

SESSION_COOKIE: Final = "ratelimitd_session"
FORM_COOKIE: Final = "ratelimitd_forms"
"""Binds forms to a browser without a session."""

FORM_TOKEN_FIELD: Final = "form_token"  # noqa: S105 -- the name of a field

MAX_FORM_BYTES: Final = 65_536
MAX_FORM_FIELDS: Final = 50
MAX_LOGIN_URL: Final = 2_048
"""Longest login URL: clients refuse a header of 100 KB. A longer one omits the way back."""

FORM_TYPE: Final = "application/x-www-form-urlencoded"

_NONCE: Final = re.compile(r"[0-9a-f]{32}")
_LOCAL_PATH: Final = re.compile(r"/(?:[A-Za-z0-9_?&=.%+~-][A-Za-z0-9_?&=.%+~/-]*)?")
"""A path of this node with its query; matches nothing that a browser could interpret as another site."""

Fields = Mapping[str, str]
"""The fields of a form; of repeated ones, the last."""

Endpoint = Callable[[Request], Awaitable[Response]]
FormEndpoint = Callable[[Request, Fields], Awaitable[Response]]

CONFIG: Final = "/ratelimiter.v1.RateLimiterConfig"
PLANS: Final = "/ratelimiter.v1.RateLimiterPlans"
HEALTH: Final = "/ratelimiter.v1.RateLimiterHealth"

NO_ETAG: Final = "-"
"""Etag for a form that lacks one: no version has it. An empty one would match every version."""

AnswerT = TypeVar("AnswerT", bound=Message)

HTTP_STATUS: Final[Mapping[StatusCode, int]] = MappingProxyType(
    {**connect.HTTP_STATUS, StatusCode.INVALID_ARGUMENT: 422}
)
"""HTTP status of a page with an error."""


class Rejected(Exception):  # noqa: N818 -- an answer, not a failure
    """A service refused; nothing was changed. ``fields`` maps fields to their errors."""

    def __init__(self, code: StatusCode, message: str, fields: Mapping[str, str]) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.fields = fields

    @property
    def status(self) -> int:
        """HTTP status of a page with this error."""
        return HTTP_STATUS[self.code]


class Visitor(NamedTuple):
    """The visitor of a page. ``authorization`` is passed to the services; if empty, the address determines the role."""

    authorization: str
    nonce: str
    """Binds forms to the visitor."""
    logged_in: bool = False
    new: bool = False
    """The nonce was created for this answer."""
    admitted: bool = False
    """May see the page."""


class Frame:
    """Wraps the endpoints of pages, renders their templates and calls the services for them."""

    def __init__(self, parts: Parts, sessions: Sessions) -> None:
        self.parts = parts
        self.sessions = sessions
        _, self._templates = look()

    def reading(self, endpoint: Endpoint) -> Endpoint:
        """Wrap ``endpoint`` for visitors who may read; others are refused or redirected to the login."""

        async def guarded(request: Request) -> Response:
            self.admit(request)
            return await endpoint(request)

        return guarded

    def admit(self, request: Request) -> Visitor:
        """Identify the visitor.

        Raises:
            Refused: the visitor may not read.
        """
        session = self.sessions.read(request.cookies.get(SESSION_COOKIE, ""))
        if (user := self._user(request)) is not None:
            visitor = user
        elif session is not None and not session.expired:
            visitor = Visitor(session.authorization, session.nonce, logged_in=True)
        else:
            visitor = self.visitor(request)
        try:
            self.parts.may_read(http_call(request, request.url.path, visitor.authorization))
        except RpcError as error:
            request.state.visitor = None
            if error.code is StatusCode.UNAUTHENTICATED and self.sessions.possible:
                expired = session is not None
                cause = Cause.SESSION_EXPIRED if expired else Cause.LOGIN_REQUIRED
                raise Refused(cause) from None
            if error.code is StatusCode.RESOURCE_EXHAUSTED:
                headers = connect.retry_after(connect.details_of(error))
                raise Refused(Cause.TOO_MANY_LOGINS, headers=headers) from None
            raise Refused(Cause.NOT_ALLOWED, error.message) from None
        visitor = visitor._replace(admitted=True)
        request.state.visitor = visitor
        return visitor

    def posting(self, endpoint: FormEndpoint) -> Endpoint:
        """Wrap ``endpoint`` for forms of visitors who may read; it receives the fields of the form."""

        async def guarded(request: Request) -> Response:
            visitor = self.admit(request)
            return await endpoint(request, await self.form_of(request, visitor))

        return guarded

    def call(self, request: Request, method: str) -> HttpCall:
        """Return the call of a service's method on behalf of the visitor of :meth:`reading` or :meth:`posting`."""
        visitor = request.state.visitor
        assert isinstance(visitor, Visitor)  # noqa: S101 -- only admitted ones come here
        return http_call(request, method, visitor.authorization)

    async def ask(
        self, request: Request, method: str, message: Message, answer: type[AnswerT]
    ) -> AnswerT:
        """Call a method by its path; return its answer, a message of the class ``answer``.

        Raises:
            Rejected: the service refused.
        """
        handler = self.parts.methods.unary[method]
        try:
            data = await settled(handler(message.SerializeToString(), self.call(request, method)))
        except RpcError as error:
            raise _rejected(error) from None
        return answer.FromString(data)

    def page(
        self, request: Request, template: str, *, status_code: int = 200, **context: Any
    ) -> Response:
        """Render a page from a template that extends ``base.html``."""
        visitor: Visitor | None = getattr(request.state, "visitor", None)
        text = self._templates.get_template(template).render(
            path=request.url.path,
            node_id=self.parts.node_id,
            version=__version__,
            visitor=visitor,
            token_field=self._token_field(visitor) if visitor else "",
            **{"errors": {}, "problem": "", "done": "", **context},
        )
        response = HTMLResponse(text, status_code)
        if visitor and visitor.new:
            self.set_cookie(request, response, FORM_COOKIE, visitor.nonce)
        return response

    def fragment(self, template: str, **context: Any) -> str:
        """Render a part of a page, without the visitor."""
        return self._templates.get_template(template).render(**context)

    def set_cookie(self, request: Request, response: Response, name: str, value: str) -> None:
        """Set a cookie that scripts cannot read and other sites' requests do not carry; delete it if empty."""
        encrypted = "https" in {request.url.scheme, request.headers.get("x-forwarded-proto")}
        response.set_cookie(
            name,
            value,
            max_age=None if value else 0,
            httponly=True,
            samesite="strict",
            secure=encrypted,
        )

    def visitor(self, request: Request) -> Visitor:
        """Return a visitor without a session, who may use forms but has no role."""
        known = request.cookies.get(FORM_COOKIE, "")
        new = _NONCE.fullmatch(known) is None
        visitor = Visitor("", self.sessions.nonce() if new else known, new=new)
        request.state.visitor = visitor
        return visitor

    async def form_of(self, request: Request, visitor: Visitor) -> Fields:
        """Return the fields of a form that was issued to this visitor.

        Raises:
            Refused: it is not a form, is too large, or was issued to another visitor.
        """
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != FORM_TYPE:
            raise Refused(Cause.BAD_FORM)
        try:
            pairs = parse_qsl(
                (await body_of(request, MAX_FORM_BYTES)).decode(),
                keep_blank_values=True,
                errors="strict",
                max_num_fields=MAX_FORM_FIELDS,
            )
        except BodyTooLargeError:
            raise Refused(Cause.TOO_LARGE) from None
        except ValueError:
            raise Refused(Cause.BAD_FORM) from None
        fields = dict(pairs)
        given = fields.pop(FORM_TOKEN_FIELD, "").encode()
        if not hmac.compare_digest(given, self.sessions.form_token(visitor.nonce).encode()):
            raise Refused(Cause.FORM_TOKEN)
        return fields

    async def refuse(self, request: Request, error: Exception) -> Response:
        """Return the answer to a refused request; redirects GET to the login."""
        assert isinstance(error, Refused)  # noqa: S101 -- registered for this exception
        cause = error.cause
        login = cause in {Cause.LOGIN_REQUIRED, Cause.SESSION_EXPIRED}
        if login and request.method == "GET" and accepts_html(request):
            if cause is Cause.SESSION_EXPIRED:
                self.parts.refused(cause)
            return RedirectResponse(login_url(request), 303)
        self.parts.refused(cause)
        answer = ANSWERS[cause]
        response = self.message(request, answer.title, error.text, answer.status, login=login)
        response.headers.update(error.headers)
        return response

    def demand(self, request: Request, requirement: Requirement) -> None:
        """Refuse a visitor who lacks a role beyond the reading role.

        Raises:
            Refused: the visitor lacks it.
        """
        try:
            requirement(self.call(request, request.url.path))
        except RpcError as error:
            raise Refused(Cause.NOT_ALLOWED, error.message) from None

    def message(
        self, request: Request, title: str, text: str, status_code: int, *, login: bool = False
    ) -> Response:
        """Return a page with one message; ``login`` adds a link to the login."""
        return self.page(
            request,
            "message.html",
            status_code=status_code,
            title=title,
            text=text,
            login=login,
        )

    def _token_field(self, visitor: Visitor) -> Markup:
        """Return the hidden fields of every form."""
        field = Markup('<input type="hidden" name="{}" value="{}">')
        return field.format(FORM_TOKEN_FIELD, self.sessions.form_token(visitor.nonce))

    def _user(self, request: Request) -> Visitor | None:
        """Return the user that a trusted proxy names, before any session; ``None`` if it names none."""
        if not self.parts.users.sends_header(request.headers):
            return None
        if not self.parts.users.trusts(request.client.host if request.client else ""):
            self.parts.refused(Cause.USER_HEADER)
            return None
        found = self.parts.users.find(request.headers)
        if found is None:
            request.state.visitor = None
            raise Refused(Cause.UNKNOWN_USER)
        name, authorization = found
        return Visitor(authorization, self.sessions.user_nonce(name))


def _rejected(error: RpcError) -> Rejected:
    violations: list[FieldViolation] = []
    for detail in connect.details_of(error):
        request = error_details_pb2.BadRequest()
        if detail.Unpack(request):
            violations += (
                FieldViolation(one.field, one.description) for one in request.field_violations
            )
    return Rejected(error.code, error.message, form_errors(violations))


def accepts_html(request: Request) -> bool:
    """Return whether the client accepts HTML."""
    return "text/html" in request.headers.get("accept", "")


def login_url(request: Request) -> str:
    """Return the login page that redirects back here."""
    target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    url = f"/login?next={quote(target, safe='/')}"
    return url if len(url) <= MAX_LOGIN_URL else "/login"


def local_path(target: str) -> str:
    """Return ``target`` if it is a path of this node, else the front page."""
    return target if _LOCAL_PATH.fullmatch(target) else "/"
