"""Middleware for Django, sync and async, configured by ``settings.RATELIMITD``. Your functions are given the request.

It asks when the view is known, and so after all other middleware has seen the request: then the user is known, too.
A request that no route matches is counted when its 404 comes back.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final

from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.utils.decorators import sync_and_async_middleware

from ratelimitd_client.decision import Decision
from ratelimitd_client.middleware import route_templates
from ratelimitd_client.middleware.arrival import Arrival
from ratelimitd_client.middleware.django_settings import NAME, chosen
from ratelimitd_client.middleware.guard import Guard
from ratelimitd_client.middleware.identity import Identity
from ratelimitd_client.middleware.options import Options
from ratelimitd_client.middleware.views import marked_part
from ratelimitd_client.middleware.wsgi import arrival_of, header_of

DECISION: Final = "ratelimitd_decision"
"""The attribute under which a view finds the ``Decision`` on a request that was checked."""

NOT_FOUND: Final = 404


@sync_and_async_middleware
def rate_limits(get_response: Callable[[HttpRequest], Any]) -> _Blocking | _Asynchronous:
    """Check each request before its view runs; stands first in ``MIDDLEWARE``.

    What ``settings.RATELIMITD`` holds is said in docs/middleware.md of the repository.

    Raises:
        ImproperlyConfigured: ``settings.RATELIMITD`` is not valid; the server does not start.
    """
    kind = _Asynchronous if iscoroutinefunction(get_response) else _Blocking
    try:
        return kind(get_response)
    except (TypeError, ValueError) as error:
        message = f"settings.{NAME}: {error}"
        raise ImproperlyConfigured(message) from error


class _Blocking:
    """In front of views that block."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        settings = chosen()
        self._get_response = get_response
        self._limiter = settings.blocking_limiter()
        self._guard = Guard(settings.options)

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        """Answer a request."""
        response = self._get_response(request)
        if _is_unmatched(request, response):
            response = self._ask(request, None) or response
        return _told(self._guard, request, response)

    def process_view(
        self, request: HttpRequest, view: object, _args: object, _kwargs: object
    ) -> HttpResponse | None:
        """Called by Django when it knows the view: the answer to a denied request, or ``None``."""
        return self._ask(request, view)

    def _ask(self, request: HttpRequest, view: object) -> HttpResponse | None:
        def user() -> str | None:
            return _id_of(getattr(request, "user", None))

        arrival = _arrival(request, view, user)
        decision = self._guard.decide(self._limiter, request, arrival)
        return _denial(self._guard, request, decision)


class _Asynchronous:
    """In front of coroutines."""

    def __init__(self, get_response: Callable[[HttpRequest], Awaitable[HttpResponseBase]]) -> None:
        settings = chosen()
        self._get_response = get_response
        self._limiter = settings.async_limiter()
        self._guard = Guard(_without_blocking(settings.options))
        markcoroutinefunction(self)

    async def __call__(self, request: HttpRequest) -> HttpResponseBase:
        """Answer a request."""
        response = await self._get_response(request)
        if _is_unmatched(request, response):
            response = await self._ask(request, None) or response
        return _told(self._guard, request, response)

    async def process_view(
        self, request: HttpRequest, view: object, _args: object, _kwargs: object
    ) -> HttpResponse | None:
        """As that of the other kind. Django would call one that blocks in a thread."""
        return await self._ask(request, view)

    async def _ask(self, request: HttpRequest, view: object) -> HttpResponse | None:
        arrival = _arrival(request, view, await _user_of(request))
        decision = await self._guard.decide_async(self._limiter, request, arrival)
        return _denial(self._guard, request, decision)


def _arrival(request: HttpRequest, view: object, user: Callable[[], str | None]) -> Arrival:
    match = request.resolver_match
    route = None if match is None else route_templates.of_django(match.route)
    return arrival_of(request.META, route=route, view=marked_part(view))._replace(user=user)


def _id_of(user: Any) -> str | None:
    """What identifies a user of Django's; ``None`` for nobody, and for one that is not logged in."""
    key = getattr(user, "pk", None) if getattr(user, "is_authenticated", False) else None
    return None if key is None else str(key)


async def _user_of(request: HttpRequest) -> Callable[[], str | None]:
    """What tells the id of the user. An error in finding the user is raised where the guard expects it."""
    find = getattr(request, "auser", None)
    try:
        # Without Django's authentication there may be a user all the same, whom another middleware found.
        user = _id_of(getattr(request, "user", None) if find is None else await find())
    except Exception as error:  # noqa: BLE001 - of a database, or of a backend that is not Django's
        found_error = error

        def fail() -> str | None:
            raise found_error

        return fail
    return lambda: user


def _without_blocking(options: Options[HttpRequest]) -> Options[HttpRequest]:
    """The options with an ``identify`` that may be awaited: one that blocks is called where Django calls such views."""
    identify = options.identify
    if identify is None or iscoroutinefunction(identify):
        return options

    async def in_a_thread(request: HttpRequest) -> Identity | None:
        given: Any = await sync_to_async(identify)(request)
        identity: Identity | None = await given if inspect.isawaitable(given) else given
        return identity

    return replace(options, identify=in_a_thread)


def _is_unmatched(request: HttpRequest, response: HttpResponseBase) -> bool:
    """Whether no route was found. What other middleware answered itself, such as a static file, has another status."""
    return request.resolver_match is None and response.status_code == NOT_FOUND


def _denial(
    guard: Guard[HttpRequest], request: HttpRequest, decision: Decision | None
) -> HttpResponse | None:
    """The answer to a denied request; ``None`` lets it through."""
    if decision is None:
        return None
    setattr(request, DECISION, decision)
    if decision.allowed:
        return None
    answer = guard.denied(decision, header_of(request.META, "accept"))
    return HttpResponse(answer.body, status=answer.status, headers=answer.headers)


def _told(
    guard: Guard[HttpRequest], request: HttpRequest, response: HttpResponseBase
) -> HttpResponseBase:
    """The answer with what it tells of the limit; headers that the view has set itself stay as they are."""
    decision: Decision | None = getattr(request, DECISION, None)
    if decision is not None:
        for name, value in guard.headers(decision).items():
            response.setdefault(name, value)
    return response
