"""What a caller is told: the answer to a denied request, and the headers of one that is allowed."""

import json

import pytest

from ratelimitd_client import Decision, Reason
from ratelimitd_client.middleware import Options
from ratelimitd_client.middleware.answer import Answers

NOW_S = 1_700_006_400.0
DENIED = Decision(
    False, 0, int(NOW_S) + 60, 12, Reason.LIMIT_EXCEEDED, 5, 60, "r1", decided_at_s=NOW_S
)
ALLOWED = Decision(
    True, 4, int(NOW_S) + 60, 0, Reason.WITHIN_LIMIT, 5, 60, "r1", decided_at_s=NOW_S
)
UNLIMITED = Decision(True, 1, 0, 0, Reason.NO_RULE)
REFUSED = Decision(False, 0, 0, 0, Reason.INVALID_REQUEST)


def test_a_denial_is_a_429_with_a_text_and_the_headers_of_the_limit():
    assert Answers(Options()).denied(DENIED) == (
        429,
        {
            "Content-Type": "text/plain; charset=utf-8",
            "Retry-After": "12",
            "RateLimit-Policy": '"default";q=5;w=60',
            "RateLimit": '"default";r=0;t=12',
        },
        b"Too many requests. Try again in 12 s.\n",
        "Too many requests. Try again in 12 s.",
    )


@pytest.mark.parametrize(
    "accept", [["application/json"], ["text/html", "Application/Problem+JSON;q=0.5"]]
)
def test_it_is_json_for_those_that_ask_for_it(accept):
    _, headers, body, text = Answers(Options()).denied(DENIED, accept)
    assert headers["Content-Type"] == "application/json"
    assert json.loads(body) == {"detail": text}
    assert text == "Too many requests. Try again in 12 s."


def test_where_waiting_does_not_help_nothing_is_said_of_it():
    _, headers, body, _ = Answers(Options()).denied(REFUSED, ["*/*"])
    assert set(headers) == {"Content-Type"}
    assert body == b"Too many requests.\n"


@pytest.mark.parametrize(
    "text", ["Nie wieder, nächstes Mal.", lambda decision: f"{decision.limit} are enough."]
)
def test_the_text_can_be_ones_own(text):
    body = Answers(Options(denied_text=text)).denied(DENIED).body.decode()
    assert body == ("5 are enough.\n" if callable(text) else f"{text}\n")


def test_a_function_for_the_text_that_returns_none_is_at_fault():
    with pytest.raises(TypeError, match="denied_text must return text, not NoneType"):
        Answers(Options(denied_text=lambda _: None)).denied(DENIED)


def test_an_allowed_request_is_told_of_the_limit_as_well():
    answers = Answers(Options(policy="users", x_ratelimit=True))
    assert answers.headers(ALLOWED) == {
        "RateLimit-Policy": '"users";q=5;w=60',
        "RateLimit": '"users";r=4;t=60',
        "X-RateLimit-Limit": "5",
        "X-RateLimit-Remaining": "4",
        "X-RateLimit-Reset": str(int(NOW_S) + 60),
    }
    assert answers.headers(UNLIMITED) == {}


def test_headers_follow_the_revision_of_the_options():
    assert Answers(Options(headers_revision="draft-7")).headers(ALLOWED) == {
        "RateLimit-Policy": "5;w=60",
        "RateLimit": "limit=5, remaining=4, reset=60",
    }
    with pytest.raises(ValueError, match="is one of draft-11, draft-7, draft-6"):
        Options(headers_revision="draft-12")


def test_without_the_headers_of_the_limit_a_denial_still_says_when_to_come_back():
    answers = Answers(Options(headers=False))
    assert answers.headers(ALLOWED) == {}
    assert answers.headers(DENIED) == {"Retry-After": "12"}
    assert answers.headers(REFUSED) == {}
