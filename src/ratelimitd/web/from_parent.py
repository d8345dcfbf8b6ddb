"""The worker's side of what its parent passes on: who the caller is comes in a header, since all share one peer.

Only for a socket that nobody but the parent can open. See ADR 0025.
"""

from __future__ import annotations

from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

PEER_HEADER: Final = b"x-ratelimitd-peer"
"""Host and port, with a space between. The parent takes it out of what comes from outside."""


class FromParent:
    """An application whose requests are those of the parent's callers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        given = dict(scope["headers"]).get(PEER_HEADER, b"")
        host, _, port = given.decode("ascii", "replace").rpartition(" ")
        headers = [(name, value) for name, value in scope["headers"] if name != PEER_HEADER]
        client = (host, int(port)) if host and port.isdigit() else None
        await self._app({**scope, "client": client, "headers": headers}, receive, send)
