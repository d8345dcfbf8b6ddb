"""Answers that last: streams of events are allowed to outlive their connection's time, and are bounded in number.

Knows nothing of what they say.
"""

from __future__ import annotations

from typing import Final

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_STREAMS: Final = 32
"""Streams at a time: pages that show live numbers. What is asked for beyond that is answered 503."""

EVENT_STREAM: Final = "text/event-stream"

LASTING: Final = "ratelimitd.lasting"
"""Is in the scope of a request whose answer is a stream of events."""


class _TooManyError(Exception):
    """Ends the answer that was about to begin."""


class EventStreams:
    """Counts the answers of an application that are streams of events."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start" and _is_stream(message):
                if self._open >= MAX_STREAMS:
                    raise _TooManyError
                self._open += 1
                scope[LASTING] = True
            await send(message)

        try:
            await self._app(scope, receive, send_counted)
        except _TooManyError:
            refusal = PlainTextResponse(
                "too many live views are open\n", 503, headers={"Retry-After": "30"}
            )
            await refusal(scope, receive, send)
        finally:
            if LASTING in scope:
                self._open -= 1


def _is_stream(message: Message) -> bool:
    content_type = Headers(raw=message.get("headers", [])).get("content-type", "")
    return content_type.partition(";")[0].strip().lower() == EVENT_STREAM
