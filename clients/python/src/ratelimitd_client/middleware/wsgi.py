"""Middleware for WSGI. Your functions take the environ.

WSGI has no routes, so the option ``endpoint`` is required.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from types import TracebackType
from typing import Final
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from ratelimitd_client import RateLimiter
from ratelimitd_client.decision import Decision
from ratelimitd_client.middleware.options import Options
from ratelimitd_client.middleware.policy import Answer, Policy, require_kind
from ratelimitd_client.middleware.request_info import RequestInfo

DECISION: Final = "ratelimitd.decision"
"""Key of the environ under which the application finds the ``Decision`` on a request that was checked."""

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]


class RateLimitMiddleware:
    """Checks each request before the application is called.

    Args:
        app: the application.
        limiter: a blocking client, or a fake. It may be created before a server forks its workers.
        options: how requests are counted and answered, with a function for ``endpoint``. The user is ``REMOTE_USER``.

    Raises:
        ValueError, TypeError: an argument is not valid.
    """

    def __init__(
        self, app: WSGIApplication, limiter: RateLimiter, options: Options[WSGIEnvironment]
    ) -> None:
        self._policy = Policy(options)
        if getattr(options, "endpoint", None) is None:  # callers without types may give None
            message = "endpoint must be a function: WSGI has no routes"
            raise ValueError(message)
        require_kind(limiter, options, asynchronous=False)
        self._app = app
        self._limiter = limiter

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer a denied request, and pass on the others."""
        decision = self._policy.decide(self._limiter, environ, info_of(environ))
        if decision is None:
            return self._app(environ, start_response)
        environ[DECISION] = decision
        if not decision.allowed:
            answer = self._policy.denied(decision, header_of(environ, "accept"))
            return _answered(answer, environ, start_response)
        return self._app(environ, self._adding_headers(decision, start_response))

    def _adding_headers(self, decision: Decision, start_response: StartResponse) -> StartResponse:
        """Return a ``start_response`` that adds the headers of the limit, except those that the application sets."""
        added = list(self._policy.headers(decision).items())

        def start(
            status: str,
            headers: list[tuple[str, str]],
            exc_info: _ExcInfo | None = None,
            /,
        ) -> Callable[[bytes], object]:
            own = {name.lower() for name, _ in headers}
            more = [header for header in added if header[0].lower() not in own]
            return start_response(status, [*headers, *more], exc_info)

        return start


def info_of(
    environ: WSGIEnvironment, *, route: str | None = None, view: object = None
) -> RequestInfo:
    """Return the request of an environ, with the route and the view that a framework has found."""
    return RequestInfo(
        method=environ.get("REQUEST_METHOD", "GET"),
        route=route,
        view=view,
        user=lambda: environ.get("REMOTE_USER"),
        peer=environ.get("REMOTE_ADDR"),
        header=lambda name: header_of(environ, name),
    )


def header_of(environ: WSGIEnvironment, name: str) -> Sequence[str]:
    """Return the values of a header: at most one, since servers join lines."""
    value: str | None = environ.get("HTTP_" + name.upper().replace("-", "_"))
    return () if value is None else (value,)


def _answered(
    answer: Answer, environ: WSGIEnvironment, start_response: StartResponse
) -> Iterable[bytes]:
    headers = [*answer.headers.items(), ("Content-Length", str(len(answer.body)))]
    start_response(f"{answer.status} {HTTPStatus(answer.status).phrase}", headers)
    return [] if environ.get("REQUEST_METHOD") == "HEAD" else [answer.body]
