"""``/try``: a manual check with its whole answer in words, and the reset of one identifier.

Identifiers appear in forms only, never in addresses, which remain in histories and logs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from google.protobuf.empty_pb2 import Empty
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ratelimitd.model import INT32_MAX, MAX_WAIT_MS, IdentifierType, Match, Reason
from ratelimitd.web.api.json_api import CHECK_METHOD
from ratelimitd.web.pages.page_base import HEALTH, Fields, Frame, Rejected
from ratelimitd.web.pages.rendering import duration
from ratelimitd.web.pages.rule_changes import window_text
from ratelimitd.web.pages.rule_form import whole_number
from ratelimiter.v1 import ratelimiter_pb2

WORDS: Final[Mapping[int, str]] = {
    Reason.WITHIN_LIMIT: "There was enough left of the limit.",
    Reason.LIMIT_EXCEEDED: "Not enough is left of the limit. Nothing was charged.",
    Reason.COST_EXCEEDS_LIMIT: (
        "The cost is higher than the whole limit, or its burst, so waiting does not help. Nothing was charged."
    ),
    Reason.NO_RULE: "No rule applies, so every check is allowed.",
    Reason.UNLIMITED: "An identity is assigned to the plan unlimited. Nothing was charged.",
    Reason.BLOCKED: "An identity is assigned to the plan blocked. Nothing was charged.",
    Reason.FAIL_OPEN_BREAKER: "Not checked: the shared state is away, and its circuit breaker open.",
    Reason.FAIL_OPEN_ERROR: "Allowed without a check: something failed. The log says what.",
}

MATCH_WORDS: Final[Mapping[int, str]] = {
    Match.DISABLED: "disabled",
    Match.OVERRIDDEN: "the endpoint has a rule of its own",
    Match.NOT_NAMED: "the check names no identity of this type",
    Match.PASSED_OVER: "passed over, because of a plan",
}
SAID: Final[Mapping[tuple[bool, bool], str]] = {
    (False, True): "allows",
    (False, False): "denies",
    (True, True): "only observes: allows",
    (True, False): "only observes: would deny",
}
"""The result of a limit in words, by whether it only observes, and whether it allows."""

COST_PROBLEM: Final = f"must be a whole number from 0 to {INT32_MAX}; 0 means 1"
WAIT_PROBLEM: Final = f"must be a whole number from 0 to {MAX_WAIT_MS}"

PICK: Final = "pick"
"""Field of another page's form: the type and identifier to fill in."""

ALSO: Final = "also-"
"""Prefix of the field name for a further identity; the type follows."""


class CheckForm(NamedTuple):
    """A check as typed; ``also`` holds further identifiers by type."""

    identifier: str = ""
    identifier_type: str = IdentifierType.USER
    endpoint: str = ""
    cost: str = "1"
    max_wait_ms: str = "0"
    peek: bool = False
    also: Mapping[str, str] = MappingProxyType({})

    @classmethod
    def of_fields(cls, fields: Fields, types: Sequence[str]) -> CheckForm:
        """Return the check in the fields of a form; an unticked box is not among them."""
        return cls(
            fields.get("identifier", ""),
            fields.get("identifier_type", ""),
            fields.get("endpoint", ""),
            fields.get("cost", "1").strip(),
            fields.get("max_wait_ms", "").strip() or "0",
            "peek" in fields,
            {kind: fields[ALSO + kind] for kind in types if fields.get(ALSO + kind)},
        )

    @property
    def subject(self) -> dict[str, Any]:
        """Return the fields that the messages of a check and of a reset share."""
        also = [
            ratelimiter_pb2.Identity(identifier_type=kind, identifier=identifier)
            for kind, identifier in self.also.items()
        ]
        return {
            "identifier": self.identifier,
            "identifier_type": self.identifier_type,
            "endpoint": self.endpoint,
            "also": also,
        }

    def errors(self, refused: Mapping[str, str]) -> dict[str, str]:
        """Return the errors of the form's fields among those that a service refused."""
        found: dict[str, str] = {}
        types = list(self.also)
        for field, text in refused.items():
            place = _IN_ALSO.match(field)
            name = field if place is None else ALSO + types[int(place[1])]
            found[name] = text
        return found


_IN_ALSO: Final = re.compile(r"also\[(\d+)\]")


class TryPage:
    """The endpoints of the page."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._parts = frame.parts

    def routes(self) -> list[BaseRoute]:
        """Return their routes."""
        return [
            Route("/try", self._frame.reading(self.show)),
            Route("/try", self._frame.posting(self.act), methods=["POST"]),
        ]

    async def show(self, request: Request) -> Response:
        """Show both forms; parameters of the address fill in the endpoint and the type."""
        given = request.query_params
        form = CheckForm(
            endpoint=given.get("endpoint", ""),
            identifier_type=given.get("identifier_type", IdentifierType.USER),
        )
        return self._page(request, form)

    async def act(self, request: Request, fields: Fields) -> Response:
        """Handle a check, a reset, the confirmation of a reset, or an identity that another page fills in."""
        if PICK in fields:
            kind, _, identifier = fields[PICK].partition(" ")
            return self._page(request, CheckForm(identifier, kind))
        form = CheckForm.of_fields(fields, self._parts.types)
        action = fields.get("action", "check")
        try:
            if action == "reset":
                reset = ratelimiter_pb2.ResetRequest(**form.subject)
                await self._frame.ask(request, f"{HEALTH}/ResetRateLimit", reset, Empty)
                return self._page(request, form, was_reset=True)
            if action == "ask":
                # Peek first, so that errors in the form show before the check is confirmed.
                message = ratelimiter_pb2.RateLimitRequest(**form.subject, peek=True)
                await self._ask(request, message)
                return self._frame.page(request, "reset.html", form=form)
            return await self._check(request, form, explains=action == "explain")
        except Rejected as error:
            return self._page(
                request,
                form,
                status_code=error.status,
                about="check" if action in {"check", "explain"} else "reset",
                errors=form.errors(error.fields),
                problem="" if error.fields else error.message,
            )

    async def _check(self, request: Request, form: CheckForm, *, explains: bool) -> Response:
        cost, wait_ms = whole_number(form.cost), whole_number(form.max_wait_ms)
        errors = {}
        if not isinstance(cost, int) or not 0 <= cost <= INT32_MAX:
            errors["tokens_requested"] = COST_PROBLEM
        if not isinstance(wait_ms, int) or not 0 <= wait_ms <= MAX_WAIT_MS:
            errors["max_wait_ms"] = WAIT_PROBLEM
        if errors:
            return self._page(request, form, status_code=422, about="check", errors=errors)
        message = ratelimiter_pb2.RateLimitRequest(
            **form.subject, tokens_requested=cost, max_wait_ms=wait_ms
        )
        if explains:
            found = await self._explain(request, message)
            return self._page(
                request,
                form,
                spends_nothing=True,
                answer=_Answer(found.answer, int(self._parts.now_s())),
                rules=[_ExplainedRule(rule) for rule in found.rules],
                plans=found.plans,
                nearest=found.nearest,
            )
        message.peek = form.peek
        answer = await self._ask(request, message)
        nearest: Sequence[ratelimiter_pb2.NearRule] = ()
        if answer.reason == ratelimiter_pb2.NO_RULE:
            nearest = (await self._explain(request, message)).nearest
        return self._page(
            request, form, answer=_Answer(answer, int(self._parts.now_s())), nearest=nearest
        )

    async def _ask(
        self, request: Request, message: ratelimiter_pb2.RateLimitRequest
    ) -> ratelimiter_pb2.RateLimitResponse:
        answer = ratelimiter_pb2.RateLimitResponse
        return await self._frame.ask(request, CHECK_METHOD, message, answer)

    async def _explain(
        self, request: Request, message: ratelimiter_pb2.RateLimitRequest
    ) -> ratelimiter_pb2.Explanation:
        answer = ratelimiter_pb2.Explanation
        return await self._frame.ask(request, f"{HEALTH}/ExplainRateLimit", message, answer)

    def _window(
        self, of: ratelimiter_pb2.LimitStatus | ratelimiter_pb2.RateLimitResponse, name: str
    ) -> str:
        """Return the window of a limit in an answer, which has only the nominal length of a calendar's."""
        book = self._parts.book()
        rule = book.get(of.rule_id) if book else None
        limits = rule.limits_of(of.plan) if rule else ()
        limit = next((one for one in limits if one.name == name), None)
        return window_text(limit) if limit and limit.calendar else duration(of.window_seconds)

    def _page(
        self, request: Request, form: CheckForm, *, status_code: int = 200, **context: Any
    ) -> Response:
        given = {
            "answer": None,
            "window": self._window,
            "spends_nothing": form.peek,
            "rules": None,
            "plans": (),
            "nearest": (),
            "was_reset": False,
            "about": "",
            **context,
        }
        return self._frame.page(
            request,
            "try.html",
            status_code=status_code,
            form=form,
            types=self._parts.types,
            **given,
        )


class _ExplainedRule:
    """An evaluated rule, for the template."""

    def __init__(self, message: ratelimiter_pb2.RuleExplanation) -> None:
        self.message = message
        self.words = MATCH_WORDS.get(message.match, "")
        self.limits = _said(message.limits)


def _said(
    limits: Iterable[ratelimiter_pb2.LimitStatus],
) -> list[tuple[ratelimiter_pb2.LimitStatus, str]]:
    """Return each limit with its result in words."""
    return [
        (
            limit,
            "is passed over"
            if limit.reason == ratelimiter_pb2.UNLIMITED
            else SAID[limit.enforcement == ratelimiter_pb2.OBSERVE, limit.allowed],
        )
        for limit in limits
    ]


class _Answer:
    """An answer, for the template."""

    def __init__(self, answer: ratelimiter_pb2.RateLimitResponse, now_s: int) -> None:
        self.message = answer
        self.reason = ratelimiter_pb2.Reason.Name(answer.reason)
        self.words = WORDS.get(answer.reason, "")
        # With ON_BREAKER_OPEN=deny, FAIL_OPEN_BREAKER is the reason of a denial.
        self.fail_open = answer.allowed and self.reason.startswith("FAIL_OPEN")
        self.limits = _said(answer.limits)
        self.reset_in_s = max(0, answer.reset_time - now_s) if answer.reset_time else 0
