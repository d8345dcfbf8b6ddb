"""The road of a request through every middleware: what is asked, the check, what the caller is told.

No request is lost here: what goes wrong lets it through, with a warning, unless the user chose to see the error.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Final, Generic

from ratelimitd_client import AsyncRateLimiter, RateLimiter
from ratelimitd_client.clock import Clock, SystemClock
from ratelimitd_client.decision import Decision
from ratelimitd_client.middleware.answer import Answer, Answers, usual_text
from ratelimitd_client.middleware.arrival import RequestInfo
from ratelimitd_client.middleware.complaints import Complaints
from ratelimitd_client.middleware.identity import Identity
from ratelimitd_client.middleware.options import Options, R
from ratelimitd_client.middleware.questions import Place, Questions

UNCHECKED: Final = "let through unchecked: "
NO_IDENTITY: Final = (
    f"{UNCHECKED}neither user nor key nor address (see the options anonymous and trusted_proxies)"
)
BROKEN_FUNCTION: Final = (
    f"{UNCHECKED}a function of the options, or the user that the framework knows, failed"
)
BROKEN_LIMITER: Final = f"{UNCHECKED}the limiter raised an error"
BROKEN_TEXT: Final = "denied with the usual text: the function denied_text failed"


class Guard(Generic[R]):
    """What a middleware asks of each request, and says of it.

    Args:
        options: how requests are counted and answered.
        clock: for the pauses between warnings; the machine's when ``None``.

    Raises:
        TypeError: the options are something else.
    """

    __slots__ = ("_answers", "_complaints", "_options", "_questions")

    def __init__(self, options: Options[R] | None = None, *, clock: Clock | None = None) -> None:
        given: object = options
        if not (given is None or isinstance(given, Options)):
            message = f"options must be Options(…), not {type(given).__name__}"
            raise TypeError(message)
        self._options: Options[R] = Options() if options is None else options
        self._questions = Questions(self._options)
        self._answers = Answers(self._options)
        self._complaints = Complaints(SystemClock() if clock is None else clock)

    def decide(self, limiter: RateLimiter, request: R, arrival: RequestInfo) -> Decision | None:
        """The decision on a request; ``None`` lets it through unchecked.

        Raises:
            Exception: what a user's function raised, when the options say so.
        """
        try:
            place = self._questions.place(request, arrival)
            if place is None:
                return None
            given: object = None
            if self._options.identify is not None:
                given = self._options.identify(request)
            identity = self._identity(given, arrival, place)
        except Exception as error:  # noqa: BLE001 - whatever a user's function raises
            self._failed(error)
            return None
        if identity is None:
            return None
        try:
            return limiter.check(
                identity.identifier, identity.identifier_type, place.endpoint, cost=place.cost
            )
        except Exception as error:  # noqa: BLE001 - a limiter must not become the outage of those who ask it
            self._complaints.complain(BROKEN_LIMITER, error)
            return None

    async def decide_async(
        self, limiter: AsyncRateLimiter, request: R, arrival: RequestInfo
    ) -> Decision | None:
        """As :meth:`decide`, for asyncio: ``identify`` may be a coroutine function."""
        try:
            place = self._questions.place(request, arrival)
            if place is None:
                return None
            given: object = None
            if self._options.identify is not None:
                given = self._options.identify(request)
                # Asked last: of what is no coroutine it takes longer than all else here.
                if not isinstance(given, Identity) and inspect.isawaitable(given):
                    given = await given
            if arrival.load_user is not None and not self._questions.is_answered(
                given, place.identifier_type
            ):
                user = await arrival.load_user()
                arrival = arrival._replace(user=lambda: user)
            identity = self._identity(given, arrival, place)
        except Exception as error:  # noqa: BLE001 - whatever a user's function raises
            self._failed(error)
            return None
        if identity is None:
            return None
        try:
            return await limiter.check(
                identity.identifier, identity.identifier_type, place.endpoint, cost=place.cost
            )
        except Exception as error:  # noqa: BLE001 - a limiter must not become the outage of those who ask it
            self._complaints.complain(BROKEN_LIMITER, error)
            return None

    def headers(self, decision: Decision) -> dict[str, str]:
        """What the answer to an allowed request is to have; empty where no rule decided."""
        return self._answers.headers(decision)

    def denied(self, decision: Decision, accept: Sequence[str] = ()) -> Answer:
        """The answer to a denied request; ``accept`` are the values of its Accept header.

        Raises:
            Exception: what the user's function for the text raised, when the options say so.
        """
        try:
            return self._answers.denied(decision, accept)
        except Exception as error:
            if self._options.on_error == "raise":
                raise
            self._complaints.complain(BROKEN_TEXT, error)
            return self._answers.denied(decision, accept, text=usual_text(decision))

    def _identity(self, given: object, arrival: RequestInfo, place: Place) -> Identity | None:
        identity = self._questions.identity(given, arrival, place.identifier_type)
        if identity is None:
            self._complaints.complain(NO_IDENTITY)
        return identity

    def _failed(self, error: Exception) -> None:
        if self._options.on_error == "raise":
            raise error
        self._complaints.complain(BROKEN_FUNCTION, error)
