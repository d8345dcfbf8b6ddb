"""Middleware for Flask. Your functions take the ``flask.Request``.

The user is ``REMOTE_USER``, which the server sets; for other logins use the option ``identify``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from flask import Flask, Request, Response, current_app, request
from werkzeug.exceptions import default_exceptions

from ratelimitd_client import RateLimiter
from ratelimitd_client.middleware.marks import marked_part
from ratelimitd_client.middleware.options import Options
from ratelimitd_client.middleware.policy import Policy, require_kind
from ratelimitd_client.middleware.request_info import flask_route
from ratelimitd_client.middleware.wsgi import DECISION, header_of, info_of

SETTLES: Final = "ratelimitd.settles"
"""Key in the environ of the functions that settle the request's holds."""


def setup(app: Flask, limiter: RateLimiter, options: Options[Request] | None = None) -> None:
    """Check each request of an application before its view runs, except for Flask's own static files.

    A denial is raised as 429 or 503, so your ``app.errorhandler(429)`` may write the answer. The headers are added.

    Args:
        app: the application.
        limiter: a blocking client, or a fake. It may be created before a server forks its workers.
        options: how requests are counted and answered.

    Raises:
        TypeError: ``limiter`` does not block, or a function of the options is a coroutine function.
    """
    require_kind(limiter, options, asynchronous=False)
    policy = Policy(options)

    def check() -> None:
        """Raise TooManyRequests or ServiceUnavailable for a denied request."""
        if _is_static_file():
            return
        rule, endpoint = request.url_rule, request.endpoint
        info = info_of(
            request.environ,
            route=None if rule is None else flask_route(rule.rule),
            view=None if endpoint is None else marked_part(current_app.view_functions[endpoint]),
        )
        decision, held = policy.admit(limiter, _current(), info)
        if decision is None:
            return
        # Not on flask.g, which all requests share in a test with its own application context.
        request.environ[DECISION] = decision
        if not decision.allowed:
            answer = policy.denied(decision, header_of(request.environ, "accept"))
            response = Response(answer.body, answer.status, answer.headers)
            raise default_exceptions[answer.status](answer.text, response)
        if held is not None:
            current = _current()
            request.environ.setdefault(SETTLES, []).append(
                lambda: held.hold.settle(policy.actual(held, current))
            )

    def add_headers(response: Response) -> Response:
        policy.add_headers(request.environ.get(DECISION), response.headers.setdefault)
        return response

    app.before_request(check)
    app.after_request(add_headers)
    # Around the application: a response may be replaced, and one of a file calls nothing when it is closed.
    app.wsgi_app = _settling(app.wsgi_app)  # type: ignore[assignment]


class _Answer:
    """The body of an answer, which settles the holds of its request when the server closes it."""

    def __init__(self, body: Iterable[bytes], settles: list[Callable[[], None]]) -> None:
        self._body = body
        self._settles = settles

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._body)

    def close(self) -> None:
        """Close the body, which may still count, and settle, also if that fails."""
        try:
            close = getattr(self._body, "close", None)
            if close is not None:
                close()
        finally:
            _settle_once(self._settles)


def _settling(app: WSGIApplication) -> WSGIApplication:
    """Return the application, settling the hold of each request when its answer has ended, or without one."""

    def settling(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        # A list, which copies of the environ share.
        settles: list[Callable[[], None]] = []
        environ[SETTLES] = settles
        try:
            body = app(environ, start_response)
        except BaseException:
            _settle_once(settles)
            raise
        return _Answer(body, settles) if settles else body

    return settling


def _settle_once(settles: list[Callable[[], None]]) -> None:
    while settles:
        settles.pop()()


def _current() -> Request:
    """Return the request itself, of which ``flask.request`` is a proxy."""
    current: Request = request._get_current_object()  # type: ignore[attr-defined]  # noqa: SLF001 - documented
    return current


def _is_static_file() -> bool:
    """Return whether the request is for one of Flask's own routes for static files."""
    blueprint, _, name = (request.endpoint or "").rpartition(".")
    if name != "static":
        return False
    owner = current_app.blueprints.get(blueprint) if blueprint else current_app
    return owner is not None and owner.has_static_folder
