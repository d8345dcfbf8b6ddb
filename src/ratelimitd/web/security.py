"""What every answer and every request of the HTTP side is held to, whatever its route: headers, and same-origin writes.

See ADR 0028.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ratelimitd.web.pages.errors import ANSWERS, Cause, Count, plain

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)

HEADERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Content-Security-Policy": POLICY,
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
        # Not no-referrer: a browser would then say Origin: null with our own forms.
        "Referrer-Policy": "same-origin",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }
)

SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})

_OWN_SITE: Final = frozenset({"same-origin", "none"})
"""``none``: the person's own doing, such as sending a form once more."""


class Guard:
    """Adds the headers to each answer, and refuses what another site's page sends with a visitor's browser."""

    def __init__(self, app: ASGIApp, count: Count) -> None:
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        app = self._app
        if scope["method"] not in SAFE_METHODS and is_cross_site(Headers(scope=scope)):
            self._count(Cause.CROSS_SITE)
            app = plain(ANSWERS[Cause.CROSS_SITE])
        await app(scope, receive, send_guarded)


def is_cross_site(headers: Headers) -> bool:
    """Whether a browser says that the request comes from a page of another origin; other programs say nothing."""
    if headers.get("sec-fetch-site", "none") not in _OWN_SITE:
        return True
    origin = headers.get("origin")
    # The scheme is not compared: a proxy that terminates TLS speaks HTTP to this node.
    return (
        origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower()
    )
