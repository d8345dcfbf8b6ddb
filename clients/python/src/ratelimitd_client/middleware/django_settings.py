"""``settings.RATELIMITD``: who is asked, and how requests are counted and answered.

A mistake in it keeps the server from starting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final, NamedTuple

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest
from django.utils.module_loading import import_string

from ratelimitd_client import (
    AsyncRateLimiter,
    AsyncRateLimiterClient,
    RateLimiter,
    RateLimiterClient,
)
from ratelimitd_client.middleware.limiter_kind import require_kind
from ratelimitd_client.middleware.options import Options

NAME: Final = "RATELIMITD"

OF_CLIENT: Final = frozenset({"target", "tls", "token", "timeout_s"})
"""What is for the client; see :class:`ratelimitd_client.RateLimiterClient`. It is made of them, unless one is given."""

MAY_BE_PATHS: Final = frozenset({"limiter", "identify", "endpoint", "cost"})
"""What may be named by its path (``"shop.limits.identify"``), since settings cannot import models."""


OPTIONS: Final = frozenset(field.name for field in fields(Options))


class Chosen(NamedTuple):
    """What the settings say."""

    limiter: RateLimiter | AsyncRateLimiter | None
    """What is asked, if it is given."""
    client: Mapping[str, Any]
    """Else what it is made of."""
    options: Options[HttpRequest]

    def blocking_limiter(self) -> RateLimiter:
        """What is asked by code that blocks.

        Raises:
            TypeError, ValueError: there is none.
        """
        limiter: Any = RateLimiterClient(**self.client) if self.limiter is None else self.limiter
        require_kind(limiter, self.options, asynchronous=False)
        blocking: RateLimiter = limiter
        return blocking

    def async_limiter(self) -> AsyncRateLimiter:
        """What is asked by coroutines.

        Raises:
            TypeError, ValueError: there is none.
        """
        limiter: Any = (
            AsyncRateLimiterClient(**self.client) if self.limiter is None else self.limiter
        )
        require_kind(limiter, asynchronous=True)
        asynchronous: AsyncRateLimiter = limiter
        return asynchronous


def chosen() -> Chosen:
    """What the settings say.

    Raises:
        ImproperlyConfigured: they are not valid.
    """
    given: object = getattr(settings, NAME, None)
    if not isinstance(given, Mapping):
        message = f"settings.{NAME} must be a dictionary such as {{'target': '127.0.0.1:9090'}}"
        raise ImproperlyConfigured(message)
    found = {name: _imported(name, value) for name, value in given.items()}
    client = {name: found.pop(name) for name in OF_CLIENT & found.keys()}
    limiter = found.pop("limiter", None)
    # Settings without a target must not ask the client's default one.
    if client if limiter is not None else "target" not in client:
        message = f"settings.{NAME} must have either 'limiter', or 'target' with what belongs to it"
        raise ImproperlyConfigured(message)
    if unknown := sorted(map(str, found.keys() - OPTIONS)):
        message = f"settings.{NAME} has what is no option: {', '.join(unknown)}"
        raise ImproperlyConfigured(message)
    return Chosen(limiter, client, Options(**found))


def _imported(name: str, value: object) -> Any:
    if name not in MAY_BE_PATHS or not isinstance(value, str):
        return value
    try:
        return import_string(value)
    except ImportError as error:
        message = f"settings.{NAME}: {name}: {error}"
        raise ImproperlyConfigured(message) from error
