"""How a middleware treats a request: who is charged what, the check, and the answer to the caller.

No request fails because of the limiter: what goes wrong lets it through with a warning, unless the options say
otherwise. A framework's module turns its requests into :class:`RequestInfo` and :class:`Answer` into its responses.
"""

from __future__ import annotations

import inspect
import json
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, Generic, NamedTuple, TypeAlias

from ratelimitd_client import AsyncRateLimiter, RateLimiter
from ratelimitd_client.check import MAX_COST, NO_IDENTITIES
from ratelimitd_client.clock import Clock, SystemClock
from ratelimitd_client.decision import Decision, OnUnavailable, Reason
from ratelimitd_client.fail_open import last_resort
from ratelimitd_client.log_throttle import LogThrottle
from ratelimitd_client.middleware.holds import Held
from ratelimitd_client.middleware.identity import Identity, identifiers_by_type
from ratelimitd_client.middleware.marks import mark_of
from ratelimitd_client.middleware.options import Options, R
from ratelimitd_client.middleware.request_info import RequestInfo, is_valid_endpoint, with_method
from ratelimitd_client.observers import report_to

DENIED_STATUS: Final = int(HTTPStatus.TOO_MANY_REQUESTS)
UNAVAILABLE_STATUS: Final = int(HTTPStatus.SERVICE_UNAVAILABLE)

UNCHECKED: Final = "let through unchecked: "
NO_IDENTITY: Final = (
    f"{UNCHECKED}neither user nor key nor address (see the options anonymous and trusted_proxies)"
)
FUNCTION_FAILED: Final = (
    f"{UNCHECKED}a function of the options, or reading the framework's user, failed"
)
IDENTITIES_FAILED: Final = "counted for its first identity only: the function identities failed"
LIMITER_FAILED: Final = f"{UNCHECKED}the limiter raised an error"
LIMITER_FAILED_CLOSED: Final = "denied: the limiter raised an error"
REFUSED: Final = "denied: the node refuses the check: "
SETTLE_FAILED: Final = "charged the held tokens: the function settle failed"
TEXT_FAILED: Final = "denied with the default text: the function denied_text failed"

_LOG: Final = logging.getLogger("ratelimitd_client.middleware")


class Charge(NamedTuple):
    """What a request is counted under and what it spends.

    ``identifier_type`` is the one that its view prefers; ``identities`` returns who else the request is counted for.
    ``holds``: the cost is held while the request lasts, and settled with what ``settle`` returns.
    """

    endpoint: str
    cost: int
    identifier_type: str | None
    identities: Callable[[Any], object] | None = None
    holds: bool = False
    settle: Callable[[Any], object] | None = None
    on_unavailable: OnUnavailable | None = None


class _Asked(NamedTuple):
    """What the limiter is asked for a request: the charge, and the identities that it is for."""

    charge: Charge
    who: tuple[str, str, str]
    also: Mapping[str, str]


Admission: TypeAlias = tuple[Decision | None, Held | None]
"""The decision on a request, ``None`` if it is let through unchecked; and its hold, if it has one."""

NOT_CHECKED: Final[Admission] = (None, None)


class Answer(NamedTuple):
    """A whole HTTP answer. ``headers`` has no Content-Length; ``text`` is the message in either form of the body."""

    status: int
    headers: dict[str, str]
    body: bytes
    text: str


class Policy(Generic[R]):
    """Decides on requests and answers denied ones, as the options say.

    Args:
        options: how requests are counted and answered.
        clock: times the pauses between warnings; the system's when ``None``.

    Raises:
        TypeError: ``options`` is not ``Options``.
    """

    def __init__(self, options: Options[R] | None = None, *, clock: Clock | None = None) -> None:
        given: object = options
        if not (given is None or isinstance(given, Options)):
            message = f"options must be Options(…), not {type(given).__name__}"
            raise TypeError(message)
        self._options: Options[R] = Options() if options is None else options
        self._addresses = self._options.client_addresses()
        self._exempt = frozenset(self._options.exempt)
        self._forwarded_header = self._options.forwarded_header.lower()
        self._api_key_header = (self._options.api_key_header or "").lower()
        clock = SystemClock() if clock is None else clock
        self._throttle = LogThrottle(clock)
        observer = self._options.observer
        self._report = None if observer is None else report_to(clock, observer)

    def decide(self, limiter: RateLimiter, request: R, info: RequestInfo) -> Decision | None:
        """Return the decision on a request, which holds nothing; ``None`` lets it through unchecked.

        Raises:
            Exception: raised by a user's function, if ``on_error`` is ``"raise"``.
        """
        return self.admit(limiter, request, info, may_hold=False)[0]

    def admit(
        self, limiter: RateLimiter, request: R, info: RequestInfo, *, may_hold: bool = True
    ) -> Admission:
        """As :meth:`decide`, and the hold of a request whose view holds, if it may."""
        asked = self._asked(request, info)
        if asked is None:
            return NOT_CHECKED
        charge, who, also = asked
        try:
            if not (charge.holds and may_hold):
                decision = limiter.check(*who, cost=charge.cost, also=also)
                return self._decided(charge, decision), None
            hold = limiter.hold(*who, cost=charge.cost, also=also)
        except Exception as error:  # noqa: BLE001 - the limiter must not cause an outage
            return self._limiter_failed(limiter, charge, error)
        return self._decided(charge, hold.decision), Held(hold, charge.cost, charge.settle)

    def _asked(self, request: R, info: RequestInfo) -> _Asked | None:
        try:
            charge = self.charge(request, info)
            if charge is None:
                return None
            given: object = None
            if self._options.identify is not None:
                given = self._options.identify(request)
            identity = self.identity(given, info, charge.identifier_type)
            also = (
                NO_IDENTITIES
                if charge.identities is None
                else self._also(charge.identities, request)
            )
        except Exception as error:  # noqa: BLE001 - whatever a user's function raises
            self._function_failed(error)
            return None
        return self._complete(charge, identity, also)

    async def decide_async(
        self, limiter: AsyncRateLimiter, request: R, info: RequestInfo
    ) -> Decision | None:
        """As :meth:`decide`, for asyncio: ``identify`` may be a coroutine function."""
        return (await self.admit_async(limiter, request, info, may_hold=False))[0]

    async def admit_async(
        self, limiter: AsyncRateLimiter, request: R, info: RequestInfo, *, may_hold: bool = True
    ) -> Admission:
        """As :meth:`admit`, for asyncio."""
        asked = await self._asked_async(request, info)
        if asked is None:
            return NOT_CHECKED
        charge, who, also = asked
        try:
            if not (charge.holds and may_hold):
                decision = await limiter.check(*who, cost=charge.cost, also=also)
                return self._decided(charge, decision), None
            hold = await limiter.hold(*who, cost=charge.cost, also=also)
        except Exception as error:  # noqa: BLE001 - as above
            return self._limiter_failed(limiter, charge, error)
        return self._decided(charge, hold.decision), Held(hold, charge.cost, charge.settle)

    async def _asked_async(self, request: R, info: RequestInfo) -> _Asked | None:
        try:
            charge = self.charge(request, info)
            if charge is None:
                return None
            identify = self._options.identify
            given = None if identify is None else await _awaited(identify(request))
            if info.load_user is not None and not _is_sufficient(given, charge.identifier_type):
                user = await info.load_user()
                info = info._replace(user=lambda: user)
            identity = self.identity(given, info, charge.identifier_type)
            also = NO_IDENTITIES
            if charge.identities is not None:
                also = await self._also_async(charge.identities, request)
        except Exception as error:  # noqa: BLE001 - whatever a user's function raises
            self._function_failed(error)
            return None
        return self._complete(charge, identity, also)

    def _complete(
        self, charge: Charge, identity: Identity | None, also: Mapping[str, str]
    ) -> _Asked | None:
        if also:
            identity, also = _with_first(identity, also)
        if identity is None:
            self.warn(NO_IDENTITY)
            return None
        who = identity.identifier, identity.identifier_type, charge.endpoint
        return _Asked(charge, who, also)

    def _decided(self, charge: Charge, decision: Decision) -> Decision:
        """Return the limiter's decision, or if no node made it what the options say, and report it."""
        if charge.on_unavailable is not None:
            decision = decision.if_unavailable(charge.on_unavailable)
        if self._report is not None:
            self._report(decision, charge.endpoint)
        return decision

    def _limiter_failed(
        self, limiter: RateLimiter | AsyncRateLimiter, charge: Charge, error: Exception
    ) -> Admission:
        # A limiter of the application's own may have no such attribute.
        how: OnUnavailable = getattr(limiter, "on_unavailable", "allow")
        decision = self._decided(charge, last_resort(error, 1, how)[0])
        if decision.allowed:
            self.warn(LIMITER_FAILED, error)
            return NOT_CHECKED
        self.warn(LIMITER_FAILED_CLOSED, error)
        return decision, None

    def actual(self, held: Held, request: R) -> int:
        """Return what a request has cost that was held; what it held if its function does not say."""
        if held.settle is None:
            return held.cost
        try:
            actual = held.settle(request)
            return held.cost if actual is None else _cost_of("settle", actual)
        except Exception as error:  # noqa: BLE001 - whatever a user's function raises
            self.warn(SETTLE_FAILED, error)
            return held.cost

    def charge(self, request: R, info: RequestInfo) -> Charge | None:
        """Return the charge of a request; ``None`` if it is not checked.

        Raises:
            TypeError, ValueError: a function for the cost returned something else.
            Exception: raised by a user's function.
        """
        options = self._options
        mark = mark_of(info.view, info.method)
        if mark.exempt:
            return None
        endpoint = mark.endpoint
        if endpoint is None and options.endpoint is not None:
            endpoint = options.endpoint(request)
        if (info.route if endpoint is None else endpoint) in self._exempt:
            return None
        if endpoint is None and info.route is not None:
            endpoint = info.route
            if options.with_method:
                endpoint = with_method(info.method, endpoint)
        if endpoint is None or not is_valid_endpoint(endpoint):
            endpoint = options.unmatched
            if endpoint is None or endpoint in self._exempt:
                return None
        holds = mark.hold is not None
        asked = mark.hold if holds else mark.cost
        cost = options.cost if asked is None else asked
        if callable(cost):
            cost = _cost_of("cost", cost(request))
        identities = options.identities if mark.identities is None else mark.identities
        if not cost:
            return None
        on_unavailable = mark.on_unavailable or options.on_unavailable
        return Charge(
            endpoint, cost, mark.identifier_type, identities, holds, mark.settle, on_unavailable
        )

    def identity(self, given: object, info: RequestInfo, preferred: str | None) -> Identity | None:
        """Return who a request is counted for: the first identity of the preferred type, else the first.

        Args:
            given: what ``identify`` returned; ``None`` without it.
            info: the request.
            preferred: the type of identifier that the view prefers.

        Raises:
            TypeError: ``given`` is neither an identity nor ``None``.
            Exception: raised by reading the framework's user.
        """
        if not (given is None or isinstance(given, Identity)):
            message = f"identify must return an Identity or None, not {type(given).__name__}"
            raise TypeError(message)
        if given is not None and _is_sufficient(given, preferred):
            return given
        first = None
        for identity in self._identities(given, info):
            if preferred is None or identity.identifier_type == preferred:
                return identity
            first = first or identity
        return first or self._options.anonymous

    def headers(self, decision: Decision) -> dict[str, str]:
        """Return the headers to add to the answer; empty if no rule decided."""
        options = self._options
        if options.headers:
            return decision.headers(
                x_ratelimit=options.x_ratelimit,
                policy=options.policy,
                revision=options.headers_revision,
            )
        retry_after_s = decision.retry_after_seconds
        return {} if decision.allowed or not retry_after_s else {"Retry-After": str(retry_after_s)}

    def add_headers(
        self, decision: Decision | None, setdefault: Callable[[str, str], object]
    ) -> None:
        """Add the headers for a decision to an answer, except those that it has."""
        if decision is not None:
            for name, value in self.headers(decision).items():
                setdefault(name, value)

    def denied(self, decision: Decision, accept: Sequence[str] = ()) -> Answer:
        """Return the answer to a denied request: 429, or 503 if no limit denied it.

        It is JSON if ``accept``, the request's Accept header, names it, else plain text.

        Raises:
            Exception: raised by ``denied_text``, if ``on_error`` is ``"raise"``.
        """
        if decision.reason is Reason.INVALID_REQUEST:
            self.warn(f"{REFUSED}{decision.error}")
        try:
            text = self._denied_text(decision)
        except Exception as error:
            if self._options.on_error == "raise":
                raise
            self.warn(TEXT_FAILED, error)
            text = _default_text(decision)
        if any("json" in value.lower() for value in accept):
            kind, body = "application/json", json.dumps({"detail": text})
        else:
            kind, body = "text/plain; charset=utf-8", f"{text}\n"
        headers = {"Content-Type": kind, **self.headers(decision)}
        status = UNAVAILABLE_STATUS if decision.fail_closed else DENIED_STATUS
        return Answer(status, headers, body.encode(errors="replace"), text)

    def warn(self, what: str, error: Exception | None = None) -> None:
        """Log what happened to a request, at most once a second, with the type and the place of the error.

        The error's text is left out, since it may contain an identifier.
        """
        requests = self._throttle.count()
        if requests:
            cause = "" if error is None else f" ({_type_and_place(error)})"
            _LOG.warning("%s%s; %d such requests since the last warning", what, cause, requests)

    def _identities(self, given: Identity | None, info: RequestInfo) -> Iterator[Identity]:
        if given is not None and not given.is_empty:
            yield given
        if user := info.user():
            yield Identity(user, "user")
        if self._api_key_header:
            keys = info.header(self._api_key_header)
            # With two keys it is unknown which one was verified; servers and proxies may have joined their lines.
            if len(keys) == 1 and keys[0].strip() and "," not in keys[0]:
                yield Identity(keys[0], "api_key")
        if address := self._addresses.of(info.peer, info.header(self._forwarded_header)):
            yield Identity(address, "ip")

    def _denied_text(self, decision: Decision) -> str:
        text = self._options.denied_text
        if text is None or (decision.fail_closed and isinstance(text, str)):
            return _default_text(decision)
        returned: object = text if isinstance(text, str) else text(decision)
        if not isinstance(returned, str):
            message = f"denied_text must return text, not {type(returned).__name__}"
            raise TypeError(message)
        return returned

    def _also(self, identities: Callable[[R], object], request: R) -> Mapping[str, str]:
        """Return who else a request is counted for; nobody if the function fails.

        Raises:
            Exception: raised by the function, if ``on_error`` is ``"raise"``.
        """
        try:
            return identifiers_by_type(identities(request))
        except Exception as error:  # noqa: BLE001 - whatever a user's function raises
            self._function_failed(error, IDENTITIES_FAILED)
            return NO_IDENTITIES

    async def _also_async(self, identities: Callable[[R], object], request: R) -> Mapping[str, str]:
        """As :meth:`_also`, for asyncio: the function may be a coroutine function."""
        try:
            return identifiers_by_type(await _awaited(identities(request)))
        except Exception as error:  # noqa: BLE001 - whatever a user's function raises
            self._function_failed(error, IDENTITIES_FAILED)
            return NO_IDENTITIES

    def _function_failed(self, error: Exception, what: str = FUNCTION_FAILED) -> None:
        if self._options.on_error == "raise":
            raise error
        self.warn(what, error)


def require_kind(
    limiter: RateLimiter | AsyncRateLimiter,
    options: Options[Any] | None = None,
    *,
    asynchronous: bool,
) -> None:
    """Validate that a limiter is for asyncio, or that it blocks and no function of the options is a coroutine function.

    Raises:
        TypeError: one of them is of the other kind, or ``limiter`` is not a limiter.
    """
    given: object = limiter
    check = getattr(given, "check", None)
    is_class = isinstance(given, type)
    if is_class or not callable(check) or inspect.iscoroutinefunction(check) is not asynchronous:
        wanted = "an AsyncRateLimiterClient" if asynchronous else "a RateLimiterClient"
        what = "a class" if is_class else type(given).__name__
        message = f"limiter must be {wanted} or have its methods, not {what}"
        raise TypeError(message)
    # Blocking code would not await it, and each request would pass unchecked.
    for name in ("identify", "identities"):
        if not asynchronous and inspect.iscoroutinefunction(getattr(options, name, None)):
            message = f"{name} must not be a coroutine function, since the framework blocks"
            raise TypeError(message)


def _is_sufficient(given: object, preferred: str | None) -> bool:
    """Return whether what ``identify`` returned alone determines the identity."""
    if not isinstance(given, Identity) or given.is_empty:
        return False
    return preferred is None or given.identifier_type == preferred


async def _awaited(given: object) -> object:
    # Identity first: isawaitable takes longer than everything else here.
    if not isinstance(given, Identity) and inspect.isawaitable(given):
        return await given
    return given


def _with_first(
    identity: Identity | None, also: Mapping[str, str]
) -> tuple[Identity, Mapping[str, str]]:
    """Return the identity of a check, taken from the others if there is none, and the others of other types."""
    if identity is None:
        kind, identifier = next(iter(also.items()))
        identity = Identity(identifier, kind)
    first = identity.identifier_type
    return identity, {kind: text for kind, text in also.items() if kind != first}


def _cost_of(name: str, returned: object) -> int:
    if not isinstance(returned, int) or isinstance(returned, bool):
        message = f"{name} must be a whole number, not {type(returned).__name__}"
        raise TypeError(message)
    if returned < 0:
        message = f"{name} must be at least 0"
        raise ValueError(message)
    return min(returned, MAX_COST)


def _default_text(decision: Decision) -> str:
    wait_s = decision.retry_after_seconds
    what = "Temporarily unavailable." if decision.fail_closed else "Too many requests."
    return f"{what} Try again in {wait_s} s." if wait_s else what


def _type_and_place(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f", {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"
