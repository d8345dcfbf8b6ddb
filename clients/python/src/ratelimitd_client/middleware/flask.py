"""Middleware for Flask. Your functions take the ``flask.Request``.

The user is ``REMOTE_USER``, which the server sets; for other logins use the option ``identify``.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from flask import Flask, Request, Response, current_app, request
from werkzeug.exceptions import default_exceptions

from ratelimitd_client import RateLimiter
from ratelimitd_client.decision import Decision
from ratelimitd_client.middleware.holds import Held
from ratelimitd_client.middleware.marks import marked_part
from ratelimitd_client.middleware.options import Options
from ratelimitd_client.middleware.policy import Policy, require_kind
from ratelimitd_client.middleware.request_info import flask_route
from ratelimitd_client.middleware.wsgi import DECISION, header_of, info_of

HELD: Final = "ratelimitd.held"
"""Key of the environ under which the hold of a request is."""


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
        if held is not None:
            request.environ[HELD] = held
        # Not on flask.g, which all requests share in a test with its own application context.
        request.environ[DECISION] = decision
        if not decision.allowed:
            answer = policy.denied(decision, header_of(request.environ, "accept"))
            response = Response(answer.body, answer.status, answer.headers)
            raise default_exceptions[answer.status](answer.text, response)

    def add_headers(response: Response) -> Response:
        """Add the headers of the limit, except those that the view has set."""
        decision: Decision | None = request.environ.get(DECISION)
        if decision is not None:
            for name, value in policy.headers(decision).items():
                response.headers.setdefault(name, value)
        if HELD in request.environ:
            # A streamed answer ends later, without the request's context.
            response.call_on_close(partial(_settle, policy, _current()))
        return response

    app.before_request(check)
    app.after_request(add_headers)
    app.teardown_request(partial(_settle_failed, policy))


def _settle(policy: Policy[Request], flask_request: Request) -> None:
    """Settle the hold of a request, unless it has none or is settled."""
    held: Held | None = flask_request.environ.pop(HELD, None)
    if held is not None:
        held.hold.settle(policy.actual(held, flask_request))


def _settle_failed(policy: Policy[Request], error: BaseException | None) -> None:
    """Settle the hold of a request that failed: no answer that settles it may have been made."""
    if error is not None:
        _settle(policy, _current())


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
