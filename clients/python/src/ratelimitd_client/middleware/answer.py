"""What a caller is told of its limit: the answer to a denied request, and headers for those that are allowed.

Pure. A framework turns it into its own kind of response.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from ratelimitd_client.decision import Decision
from ratelimitd_client.middleware.options import Options

DENIED_STATUS: Final = int(HTTPStatus.TOO_MANY_REQUESTS)


class Answer(NamedTuple):
    """A whole HTTP answer."""

    status: int
    headers: dict[str, str]
    """Without Content-Length."""
    body: bytes
    text: str
    """What it says, whatever form the body has."""


class Answers:
    """Tells callers of decisions, as the options say."""

    __slots__ = ("_options",)

    def __init__(self, options: Options[Any]) -> None:
        self._options = options

    def headers(self, decision: Decision) -> dict[str, str]:
        """What the answer to the request is to have; empty where no rule decided."""
        options = self._options
        if options.headers:
            return decision.headers(
                x_ratelimit=options.x_ratelimit,
                policy=options.policy,
                revision=options.headers_revision,
            )
        retry_after_s = decision.retry_after_seconds
        return {} if decision.allowed or not retry_after_s else {"Retry-After": str(retry_after_s)}

    def denied(
        self, decision: Decision, accept: Sequence[str] = (), *, text: str | None = None
    ) -> Answer:
        """The answer to a denied request: JSON for those that ask for it, else plain text.

        Args:
            decision: the denial.
            accept: the values of the request's Accept header.
            text: what is said in place of what the options say.

        Raises:
            TypeError: a user's function for the text returned something else.
            Exception: whatever it raises.
        """
        if text is None:
            text = self._text(decision)
        if any("json" in value.lower() for value in accept):
            kind, body = "application/json", json.dumps({"detail": text})
        else:
            kind, body = "text/plain; charset=utf-8", f"{text}\n"
        headers = {"Content-Type": kind, **self.headers(decision)}
        return Answer(DENIED_STATUS, headers, body.encode(errors="replace"), text)

    def _text(self, decision: Decision) -> str:
        text = self._options.denied_text
        if text is None:
            return usual_text(decision)
        said: object = text if isinstance(text, str) else text(decision)
        if not isinstance(said, str):
            message = f"denied_text must return text, not {type(said).__name__}"
            raise TypeError(message)
        return said


def usual_text(decision: Decision) -> str:
    """What a denied request is told, unless the options say something else."""
    wait_s = decision.retry_after_seconds
    return f"Too many requests. Try again in {wait_s} s." if wait_s else "Too many requests."
