"""Middleware for Flask. Your functions are given the ``flask.Request``.

A user is whom the server has authenticated (``REMOTE_USER``); for other logins use the option
``identify``.
"""

from __future__ import annotations

from flask import Flask, Request, Response, current_app, request
from werkzeug.exceptions import TooManyRequests

from ratelimitd_client import RateLimiter
from ratelimitd_client.decision import Decision
from ratelimitd_client.middleware import route_templates
from ratelimitd_client.middleware.guard import Guard
from ratelimitd_client.middleware.limiter_kind import require_kind
from ratelimitd_client.middleware.options import Options
from ratelimitd_client.middleware.views import marked_part
from ratelimitd_client.middleware.wsgi import DECISION, arrival_of, header_of


def setup(app: Flask, limiter: RateLimiter, options: Options[Request] | None = None) -> None:
    """Check each request of an application before its view runs.

    A denial is raised as 429, so that your ``app.errorhandler(429)`` may write the answer; the headers are added to it.
    Flask's own static files are not checked.

    Args:
        app: the application.
        limiter: a client that blocks, or a fake. It may be made before a server forks its workers.
        options: how requests are counted and answered; functions in it are given the ``flask.Request``.

    Raises:
        TypeError: ``limiter`` is none that blocks, or ``identify`` is a coroutine function.
    """
    require_kind(limiter, options, asynchronous=False)
    limits = _Limits(limiter, Guard(options))
    app.before_request(limits.ask)
    app.after_request(limits.tell)


class _Limits:
    """What is done before a view, and with its answer."""

    def __init__(self, limiter: RateLimiter, guard: Guard[Request]) -> None:
        self._limiter = limiter
        self._guard = guard

    def ask(self) -> None:
        """Let the request through, or deny it.

        Raises:
            TooManyRequests: it is denied.
        """
        if _is_static_file():
            return
        rule, endpoint = request.url_rule, request.endpoint
        arrival = arrival_of(
            request.environ,
            route=None if rule is None else route_templates.of_flask(rule.rule),
            view=None if endpoint is None else marked_part(current_app.view_functions[endpoint]),
        )
        flask_request: Request = request._get_current_object()  # type: ignore[attr-defined]  # noqa: SLF001 - documented
        decision = self._guard.decide(self._limiter, flask_request, arrival)
        if decision is None:
            return
        # Not on flask.g: in a test with an application context of its own, all requests share that.
        request.environ[DECISION] = decision
        if not decision.allowed:
            answer = self._guard.denied(decision, header_of(request.environ, "accept"))
            response = Response(answer.body, answer.status, answer.headers)
            raise TooManyRequests(answer.text, response)

    def tell(self, response: Response) -> Response:
        """The answer with what it tells of the limit; headers that the view has set itself stay as they are."""
        decision: Decision | None = request.environ.get(DECISION)
        if decision is not None:
            for name, value in self._guard.headers(decision).items():
                response.headers.setdefault(name, value)
        return response


def _is_static_file() -> bool:
    """Whether the request is for one of Flask's own routes for static files."""
    blueprint, _, name = (request.endpoint or "").rpartition(".")
    if name != "static":
        return False
    owner = current_app.blueprints.get(blueprint) if blueprint else current_app
    return owner is not None and owner.has_static_folder
