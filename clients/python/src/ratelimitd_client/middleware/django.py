"""Middleware for Django, sync and async, configured by ``settings.RATELIMITD``. Your functions take the request.

It checks in ``process_view``, after other middleware has seen the request, so the user is known. A request without a
route is counted when its 404 comes back. An error in the settings keeps the server from starting.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import fields, replace
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
from django.utils.module_loading import import_string

from ratelimitd_client import (
    AsyncRateLimiter,
    AsyncRateLimiterClient,
    RateLimiter,
    RateLimiterClient,
)
from ratelimitd_client.decision import Decision
from ratelimitd_client.middleware.marks import marked_part
from ratelimitd_client.middleware.options import Options
from ratelimitd_client.middleware.policy import Policy, require_kind
from ratelimitd_client.middleware.request_info import RequestInfo, django_route
from ratelimitd_client.middleware.wsgi import header_of, info_of

DECISION: Final = "ratelimitd_decision"
"""Attribute of the request in which a view finds the ``Decision``, if it was checked."""

NOT_FOUND: Final = 404

LANGUAGE: Final = "<language>/"
"""Replaces the language in a route, where all languages have a prefix."""

AUTHENTICATION: Final = "django.contrib.auth.middleware"
"""Module of Django's own users, which can be awaited."""

NAME: Final = "RATELIMITD"

OF_CLIENT: Final = frozenset({"target", "tls", "token", "timeout_s"})
"""Settings that are arguments of the client, unless ``limiter`` is given."""

MAY_BE_PATHS: Final = frozenset(
    {"limiter", "identify", "identities", "endpoint", "cost", "observer"}
)
"""Settings that may be dotted paths (``"shop.limits.identify"``), since settings cannot import models."""

OPTIONS: Final = frozenset(field.name for field in fields(Options))


@sync_and_async_middleware
def rate_limits(get_response: Callable[[HttpRequest], Any]) -> _Middleware | _AsyncMiddleware:
    """Check each request before its view runs. Place it first in ``MIDDLEWARE``.

    The settings are described in docs/middleware.md of the repository.

    Raises:
        ImproperlyConfigured: ``settings.RATELIMITD`` is not valid.
    """
    kind = _AsyncMiddleware if iscoroutinefunction(get_response) else _Middleware
    try:
        return kind(get_response)
    except (TypeError, ValueError) as error:
        message = f"settings.{NAME}: {error}"
        raise ImproperlyConfigured(message) from error


class _Middleware:
    """For views that block."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        limiter, options = configured(asynchronous=False)
        self._get_response = get_response
        self._limiter: RateLimiter = limiter
        self._policy = Policy(options)

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        """Answer a request."""
        response = self._get_response(request)
        if _is_unmatched(request, response):
            response = self._check(request, None) or response
        self._policy.add_headers(getattr(request, DECISION, None), response.setdefault)
        return response

    def process_view(
        self, request: HttpRequest, view: object, _args: object, _kwargs: object
    ) -> HttpResponse | None:
        """Return the answer to a denied request, or ``None``; called by Django when the view is known."""
        return self._check(request, view)

    def _check(self, request: HttpRequest, view: object) -> HttpResponse | None:
        info = _info_of(request, view, lambda: _id_of(getattr(request, "user", None)))
        decision = self._policy.decide(self._limiter, request, info)
        return _denial(self._policy, request, decision)


class _AsyncMiddleware:
    """For coroutines."""

    def __init__(self, get_response: Callable[[HttpRequest], Awaitable[HttpResponseBase]]) -> None:
        limiter, options = configured(asynchronous=True)
        self._get_response = get_response
        self._limiter: AsyncRateLimiter = limiter
        self._policy = Policy(_without_blocking(options))
        markcoroutinefunction(self)

    async def __call__(self, request: HttpRequest) -> HttpResponseBase:
        """Answer a request."""
        response = await self._get_response(request)
        if _is_unmatched(request, response):
            response = await self._check(request, None) or response
        self._policy.add_headers(getattr(request, DECISION, None), response.setdefault)
        return response

    async def process_view(
        self, request: HttpRequest, view: object, _args: object, _kwargs: object
    ) -> HttpResponse | None:
        """As :meth:`_Middleware.process_view`. Django would run a blocking one in a thread."""
        return await self._check(request, view)

    async def _check(self, request: HttpRequest, view: object) -> HttpResponse | None:
        info = _info_of(request, view, lambda: None)
        info = info._replace(load_user=lambda: _load_user_of(request))
        decision = await self._policy.decide_async(self._limiter, request, info)
        return _denial(self._policy, request, decision)


def _info_of(request: HttpRequest, view: object, user: Callable[[], str | None]) -> RequestInfo:
    match = request.resolver_match
    route = None if match is None else django_route(_route_of(request, match.route))
    part = marked_part(view, request.method or "")
    return info_of(request.META, route=route, view=part)._replace(user=user)


def _route_of(request: HttpRequest, route: str) -> str:
    """Return a route without the language prefix of ``i18n_patterns``: each language would have its own limit."""
    urlconf = getattr(request, "urlconf", None) or project.ROOT_URLCONF
    is_used, prefixes_all = is_language_prefix_patterns_used(urlconf)
    if not is_used:
        return route
    prefix = LocalePrefixPattern(prefix_default_language=prefixes_all).language_prefix
    if not prefix or not route.startswith(prefix):
        return route
    return f"{LANGUAGE if prefixes_all else ''}{route.removeprefix(prefix)}"


def _id_of(user: Any) -> str | None:
    """Return the primary key of a user as text; ``None`` if no user is logged in."""
    key = getattr(user, "pk", None) if getattr(user, "is_authenticated", False) else None
    return None if key is None else str(key)


async def _load_user_of(request: HttpRequest) -> str | None:
    """Return the user's id; most backends load the user on first access, which blocks."""
    user: Any = getattr(request, "user", None)
    is_loaded = not isinstance(user, SimpleLazyObject) or vars(user).get("_wrapped") is not empty
    if is_loaded:
        return _id_of(user)
    if vars(user)["_setupfunc"].__module__ == AUTHENTICATION:
        return _id_of(await request.auser())
    return await sync_to_async(_id_of)(user)


def _without_blocking(options: Options[HttpRequest]) -> Options[HttpRequest]:
    """Return the options with functions for identities that can be awaited: blocking ones run in Django's thread."""
    return replace(
        options,
        identify=_awaitable(options.identify),
        identities=_awaitable(options.identities),
    )


def _awaitable(function: Callable[[HttpRequest], object] | None) -> Any:
    if function is None or iscoroutinefunction(function):
        return function

    async def in_a_thread(request: HttpRequest) -> object:
        given = await sync_to_async(function)(request)
        return await given if inspect.isawaitable(given) else given

    return in_a_thread


def _is_unmatched(request: HttpRequest, response: HttpResponseBase) -> bool:
    """Return whether no route was found. Answers of other middleware, such as static files, have another status."""
    return request.resolver_match is None and response.status_code == NOT_FOUND


def _denial(
    policy: Policy[HttpRequest], request: HttpRequest, decision: Decision | None
) -> HttpResponse | None:
    """Return the answer to a denied request, or ``None``."""
    if decision is None:
        return None
    setattr(request, DECISION, decision)
    if decision.allowed:
        return None
    answer = policy.denied(decision, header_of(request.META, "accept"))
    return HttpResponse(answer.body, status=answer.status, headers=answer.headers)


def configured(*, asynchronous: bool) -> tuple[Any, Options[HttpRequest]]:
    """Return the limiter and the options of ``settings.RATELIMITD``.

    Raises:
        ImproperlyConfigured, TypeError, ValueError: the settings are not valid.
    """
    given: object = getattr(project, NAME, None)
    if not isinstance(given, Mapping):
        message = f"settings.{NAME} must be a dictionary such as {{'target': '127.0.0.1:9090'}}"
        raise ImproperlyConfigured(message)
    named = {name: _imported(name, value) for name, value in given.items()}
    client = {name: named.pop(name) for name in OF_CLIENT & named.keys()}
    limiter = named.pop("limiter", None)
    # Without a target the client would use its default one.
    if client if limiter is not None else "target" not in client:
        message = f"settings.{NAME} must have either 'limiter', or 'target' and other arguments of a client"
        raise ImproperlyConfigured(message)
    if unknown := sorted(map(str, named.keys() - OPTIONS)):
        message = f"settings.{NAME} has unknown names: {', '.join(unknown)}"
        raise ImproperlyConfigured(message)
    options: Options[HttpRequest] = Options(**named)
    if limiter is None:
        limiter = (AsyncRateLimiterClient if asynchronous else RateLimiterClient)(**client)
    require_kind(limiter, options, asynchronous=asynchronous)
    return limiter, options


def _imported(name: str, value: object) -> Any:
    if name not in MAY_BE_PATHS or not isinstance(value, str):
        return value
    try:
        return import_string(value)
    except ImportError as error:
        message = f"settings.{NAME}: {name}: {error}"
        raise ImproperlyConfigured(message) from error
