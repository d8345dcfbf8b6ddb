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
from django.conf import settings as project
from django.conf.urls.i18n import is_language_prefix_patterns_used
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.urls import LocalePrefixPattern
from django.utils.decorators import sync_and_async_middleware
from django.utils.functional import SimpleLazyObject, empty

from ratelimitd_client.decision import Decision
from ratelimitd_client.middleware import route_templates
from ratelimitd_client.middleware.arrival import RequestInfo
from ratelimitd_client.middleware.django_settings import NAME, chosen
from ratelimitd_client.middleware.guard import Guard
from ratelimitd_client.middleware.identity import Identity
from ratelimitd_client.middleware.options import Options
from ratelimitd_client.middleware.views import marked_part
from ratelimitd_client.middleware.wsgi import arrival_of, header_of

DECISION: Final = "ratelimitd_decision"
"""The attribute under which a view finds the ``Decision`` on a request that was checked."""

NOT_FOUND: Final = 404

LANGUAGE: Final = "<language>/"
"""What stands in a route for the language, where all languages have a prefix."""

AUTHENTICATION: Final = "django.contrib.auth.middleware"
"""Where the users of Django's own come from, which can be awaited."""


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
        arrival = _arrival(request, view, lambda: None)
        arrival = arrival._replace(load_user=lambda: _load_user_of(request))
        decision = await self._guard.decide_async(self._limiter, request, arrival)
        return _denial(self._guard, request, decision)


def _arrival(request: HttpRequest, view: object, user: Callable[[], str | None]) -> RequestInfo:
    match = request.resolver_match
    route = None if match is None else route_templates.of_django(_route_of(request, match.route))
    return arrival_of(
        request.META, route=route, view=marked_part(view, request.method or "")
    )._replace(user=user)


def _route_of(request: HttpRequest, route: str) -> str:
    """A route without the language that ``i18n_patterns`` put before it: the choice of one must be no limit more."""
    urlconf = getattr(request, "urlconf", None) or project.ROOT_URLCONF
    is_used, prefixes_all = is_language_prefix_patterns_used(urlconf)
    if not is_used:
        return route
    prefix = LocalePrefixPattern(prefix_default_language=prefixes_all).language_prefix
    if not prefix or not route.startswith(prefix):
        return route
    return f"{LANGUAGE if prefixes_all else ''}{route.removeprefix(prefix)}"


def _id_of(user: Any) -> str | None:
    """What identifies a user of Django's; ``None`` without a user, or one that is not logged in."""
    key = getattr(user, "pk", None) if getattr(user, "is_authenticated", False) else None
    return None if key is None else str(key)


async def _load_user_of(request: HttpRequest) -> str | None:
    """Return the user's id; most backends load the user on first access, which blocks."""
    user: Any = getattr(request, "user", None)
    if not isinstance(user, SimpleLazyObject) or not _is_waiting(user):
        return _id_of(user)
    if vars(user)["_setupfunc"].__module__ == AUTHENTICATION:
        return _id_of(await request.auser())
    return await sync_to_async(_id_of)(user)


def _is_waiting(user: SimpleLazyObject[Any]) -> bool:
    """Return whether the user was not loaded yet."""
    return vars(user).get("_wrapped") is empty


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
