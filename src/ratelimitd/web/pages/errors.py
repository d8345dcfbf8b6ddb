"""Refusals of page requests: the closed set of causes, and the answer to each."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from starlette.responses import PlainTextResponse

HEADERS: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class Cause(enum.StrEnum):
    """The causes, by the value of their label in metrics."""

    CROSS_SITE = "cross_site"
    """Sent by a browser for a page of another site."""
    FORM_TOKEN = "form_token"  # noqa: S105 -- a cause, no secret
    """The form was not issued to this visitor."""
    LOGIN_REQUIRED = "login_required"
    """No session."""
    SESSION_EXPIRED = "session_expired"
    WRONG_TOKEN = "wrong_token"  # noqa: S105 -- as above
    """The entered token is unknown or may not log in."""
    LOGIN_LINK = "login_link"
    """A login link that is used, expired, for another Host, or not of this node."""
    TOO_MANY_LOGINS = "too_many_logins"
    NOT_ALLOWED = "not_allowed"
    """The visitor lacks the role that the page requires."""
    TOO_LARGE = "too_large"
    BAD_FORM = "bad_form"
    """The body is not a form."""
    UNKNOWN_HOST = "unknown_host"
    USER_HEADER = "user_header"
    """USER_HEADER from a peer that is not a trusted proxy: ignored."""
    UNKNOWN_USER = "unknown_user"
    """A trusted proxy sent a user who is not in TOKENS_FILE."""


class Answer(NamedTuple):
    """The answer to a refusal: HTTP status, headline, and what to do."""

    status: int
    title: str
    text: str


ANSWERS: Final[Mapping[Cause, Answer]] = MappingProxyType(
    {
        Cause.CROSS_SITE: Answer(
            403,
            "This request came from another site",
            "Nothing was changed. Forms are accepted only from pages of this node: open it here and send it again.",
        ),
        Cause.FORM_TOKEN: Answer(
            403,
            "This form is not valid any more",
            "Nothing was changed. The form was not made for this session: open it again and send it from there.",
        ),
        Cause.LOGIN_REQUIRED: Answer(
            401, "Log in first", "Nothing was changed. This page needs a token."
        ),
        Cause.SESSION_EXPIRED: Answer(
            401, "Your session has ended", "Nothing was changed. Log in again and repeat it."
        ),
        Cause.WRONG_TOKEN: Answer(401, "Not logged in", "This token may not log in on this node."),
        Cause.LOGIN_LINK: Answer(
            401,
            "Not logged in",
            "This login link was used before, is older than 30 seconds, or is for another address."
            " Enter a token.",
        ),
        Cause.TOO_MANY_LOGINS: Answer(
            429, "Too many attempts", "Wait a minute before you try to log in again."
        ),
        Cause.NOT_ALLOWED: Answer(403, "Not allowed", ""),
        Cause.TOO_LARGE: Answer(
            413,
            "This form is too large",
            "Nothing was changed. No form of these pages is that large.",
        ),
        Cause.BAD_FORM: Answer(
            400, "This is not a form", "Nothing was changed. Send it from the page itself."
        ),
        Cause.UNKNOWN_HOST: Answer(
            421,
            "unknown Host",
            "HTTP_HOSTS lists the names under which the pages of this node are shown.",
        ),
        Cause.USER_HEADER: Answer(
            401, "Log in first", "Only proxies of TRUSTED_PROXIES name users."
        ),
        Cause.UNKNOWN_USER: Answer(
            403,
            "You have no role here",
            "The user whom the proxy names has no entry in TOKENS_FILE, or its entry has a token or has expired.",
        ),
    }
)


class Refused(Exception):  # noqa: N818 -- an answer, not a failure
    """Ends a request with the answer for this cause; ``text`` replaces the text of the table."""

    def __init__(
        self, cause: Cause, text: str = "", headers: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        super().__init__(cause)
        self.cause = cause
        self.text = text or ANSWERS[cause].text
        self.headers = headers


Count = Callable[[Cause], None]
"""Counts one refused request."""


def plain(answer: Answer) -> PlainTextResponse:
    """Return the answer as plain text, for requests outside of pages."""
    return PlainTextResponse(
        f"{answer.title}\n{answer.text}\n", status_code=answer.status, headers=HEADERS
    )
