"""Middleware for WSGI, for applications of whatever framework. Your functions are given the environ.

WSGI knows no routes, so that the option ``endpoint`` must name what a request is counted under.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from types import TracebackType
from typing import Final
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from ratelimitd_client import RateLimiter
from ratelimitd_client.decision import Decision
from ratelimitd_client.middleware.answer import Answer
from ratelimitd_client.middleware.arrival import RequestInfo
from ratelimitd_client.middleware.guard import Guard
from ratelimitd_client.middleware.limiter_kind import require_kind
from ratelimitd_client.middleware.options import Options

DECISION: Final = "ratelimitd.decision"
"""The key of the environ under which the application finds the ``Decision`` on a request that was checked."""

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]


class RateLimitMiddleware:
    """Checks each request before the application is called.

    Args:
        app: the application.
        limiter: a client that blocks, or a fake. It may be made before a server forks its workers.
        options: how requests are counted and answered, with a function for ``endpoint``. A user is whom the server has
            authenticated (``REMOTE_USER``).

    Raises:
        ValueError, TypeError: an argument is not valid.
    """

    def __init__(
        self, app: WSGIApplication, limiter: RateLimiter, options: Options[WSGIEnvironment]
    ) -> None:
        if options.endpoint is None:
            message = "endpoint must be a function: WSGI knows no routes"
            raise ValueError(message)
        require_kind(limiter, options, asynchronous=False)
        self._app = app
        self._limiter = limiter
        self._guard = Guard(options)

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer a request, or have it answered."""
        decision = self._guard.decide(self._limiter, environ, arrival_of(environ))
        if decision is None:
            return self._app(environ, start_response)
        environ[DECISION] = decision
        if not decision.allowed:
            answer = self._guard.denied(decision, header_of(environ, "accept"))
            return _answered(answer, environ, start_response)
        return self._app(environ, self._telling(decision, start_response))

    def _telling(self, decision: Decision, start_response: StartResponse) -> StartResponse:
        """A ``start_response`` that adds what the caller is told of its limit."""
        added = list(self._guard.headers(decision).items())

        def start(
            status: str,
            headers: list[tuple[str, str]],
            exc_info: _ExcInfo | None = None,
            /,
        ) -> Callable[[bytes], object]:
            # What the application says itself stays as it is.
            own = {name.lower() for name, _ in headers}
            more = [header for header in added if header[0].lower() not in own]
            return start_response(status, [*headers, *more], exc_info)

        return start


def arrival_of(
    environ: WSGIEnvironment, *, route: str | None = None, view: object = None
) -> RequestInfo:
    """A request as far as an environ tells of it; the route and the view are the framework's."""

    def user() -> str | None:
        name: str | None = environ.get("REMOTE_USER")
        return name

    return RequestInfo(
        method=environ.get("REQUEST_METHOD", "GET"),
        route=route,
        view=view,
        user=user,
        peer=environ.get("REMOTE_ADDR"),
        header=lambda name: header_of(environ, name),
    )


def header_of(environ: WSGIEnvironment, name: str) -> Sequence[str]:
    """The values of a header; where it came in several lines, the server has joined them to one."""
    value: str | None = environ.get("HTTP_" + name.upper().replace("-", "_"))
    return () if value is None else (value,)


def _answered(
    answer: Answer, environ: WSGIEnvironment, start_response: StartResponse
) -> Iterable[bytes]:
    headers = [*answer.headers.items(), ("Content-Length", str(len(answer.body)))]
    start_response(f"{answer.status} {HTTPStatus(answer.status).phrase}", headers)
    return [] if environ.get("REQUEST_METHOD") == "HEAD" else [answer.body]
