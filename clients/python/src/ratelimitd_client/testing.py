"""Fake clients and a manual clock, for tests of code that checks requests.

The fakes are clients that decide themselves. They count in fixed windows, aligned to the Unix epoch, whatever the
algorithm of your rules. Use a real node to test the edges of a window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias

from ratelimitd_client.async_client import AsyncRateLimiterClient
from ratelimitd_client.check import MAX_COST, NO_IDENTITIES, Check, require_number
from ratelimitd_client.client import RateLimiterClient
from ratelimitd_client.clock import Clock
from ratelimitd_client.decision import Decision, OnUnavailable, Reason, unchecked
from ratelimitd_client.fail_open import HOLD, SETTLE
from ratelimitd_client.observers import Observer
from ratelimitd_client.sessions import Arguments
from ratelimiter.v1 import ratelimiter_pb2 as pb


class ManualClock:
    """A clock that only :meth:`advance` moves."""

    def __init__(self, now_s: float = 1_700_006_400.0) -> None:
        self._now_s = now_s
        self._monotonic_s = 0.0

    def monotonic_s(self) -> float:
        """Return the seconds advanced since the clock was created."""
        return self._monotonic_s

    def now_s(self) -> float:
        """Return the Unix time."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Advance both clocks.

        Raises:
            ValueError: ``seconds`` is negative.
        """
        if seconds < 0:
            message = "time does not pass backwards"
            raise ValueError(message)
        self._now_s += seconds
        self._monotonic_s += seconds


class _Limit(NamedTuple):
    limit: int
    window_seconds: int


_Bucket: TypeAlias = tuple[str, str, str, int]
"""Identifier type, identifier, endpoint, number of the window."""


class _Fake(Arguments[Any, Any]):
    """A client whose session decides by limits of its own."""

    _given: Callable[[object], Any] = staticmethod(lambda answer: answer)

    def __init__(
        self,
        clock: Clock | None = None,
        *,
        on_unavailable: OnUnavailable = "allow",
        observer: Observer | None = None,
    ) -> None:
        given: object = clock
        if isinstance(given, type) or not (given is None or hasattr(given, "now_s")):
            what = "a class" if isinstance(given, type) else type(given).__name__
            message = f"clock must be a ManualClock or have its methods, not {what}"
            raise TypeError(message)
        super().__init__(
            clock=ManualClock() if clock is None else clock,
            on_unavailable=on_unavailable,
            observer=observer,
        )
        self.clock: Final[Clock] = self._clock
        self.checks: Final[list[Check]] = []
        """All checks in order, also those while the service is not available."""
        self.available = True
        """Set to ``False`` to answer checks, settles and extensions as when the service does not answer, at once."""
        self._session = _Session(self, self._given)

    def limit(
        self, endpoint: str, identifier_type: str, limit: int, window_seconds: int = 60
    ) -> None:
        """Limit an endpoint, or with ``*`` all endpoints without a limit.

        Raises:
            ValueError, TypeError: an argument is not valid; ``**`` is not.
        """
        if endpoint == "**":
            message = "endpoint must not be **: a fake has no limits over all endpoints"
            raise ValueError(message)
        Check("192.0.2.1", identifier_type, "/" if endpoint == "*" else endpoint)
        require_number("limit", limit, 1, MAX_COST)
        require_number("window_seconds", window_seconds, 1, MAX_COST)
        self._session.limits[endpoint, identifier_type] = _Limit(limit, window_seconds)

    def _opened(self) -> Any:
        self._require_open()
        return self._session


class _Held:
    """A hold, which is settled once."""

    def __init__(self, buckets: Sequence[_Bucket], cost: int) -> None:
        self.buckets = buckets
        self.cost = cost
        self.actual: int | None = None


class _Session:
    """Takes the place of a session: decides checks, and settles holds.

    Args:
        fake: the client.
        given: wraps an answer: in a coroutine for asyncio.
    """

    leases = None

    def __init__(self, fake: _Fake, given: Callable[[object], Any]) -> None:
        self.limits: dict[tuple[str, str], _Limit] = {}
        self.fail_open = self  # for its method held
        self._fake = fake
        self._given = given
        self._spent: dict[_Bucket, int] = {}
        self._holds: list[_Held] = []

    @property
    def grpc_channel(self) -> NoReturn:
        """The channel of a client's ``admin``."""
        message = "a fake has no admin: set limits with limit(), or use a node"
        raise AttributeError(message)

    def allows(self) -> bool:
        """Let every check be sent."""
        return True

    def wait_until_ready(self, _timeout_s: float) -> Any:
        """Return whether the service is available."""
        return self._given(self._fake.available)

    def ask(self, request: bytes, _timeout_s: float) -> Any:
        """Return the decision on a check."""
        return self._given(self._decide(pb.RateLimitRequest.FromString(request))[0])

    def ask_many(self, requests: Sequence[bytes], _timeout_s: float) -> Any:
        """Return the decisions on checks."""
        messages = map(pb.RateLimitRequest.FromString, requests)
        return self._given([self._decide(message)[0] for message in messages])

    def call(self, path: str, message: bytes, _timeout_s: float) -> Any:
        """Answer a settle or an extension as a node does, and a hold with what :meth:`held` returns.

        ``None`` is the answer of a node that is away, or does not know the hold.
        """
        if path == HOLD:
            return self._given(self._hold(pb.HoldRequest.FromString(message)))
        kind = pb.SettleRequest if path == SETTLE else pb.ExtendRequest
        request = kind.FromString(message)
        held = self._holds[int(request.hold)]
        if not (held.buckets and self._fake.available) or self._fake._closed:  # noqa: SLF001 - its own session
            return self._given(None)
        if isinstance(request, pb.SettleRequest):
            return self._given(self._settle(held, request.actual))
        return self._given(self._extend(held, request))

    call_or_give_back = call

    def keep(self, _task: object) -> None:
        """Do nothing: no call waits."""

    def held(self, answer: tuple[Decision, pb.HoldResponse]) -> tuple[Decision, pb.HoldResponse]:
        """Return the decision of an answer to a hold, and the hold; an empty one if it has none."""
        return answer

    def _hold(self, request: pb.HoldRequest) -> tuple[Decision, pb.HoldResponse]:
        decision, charged = self._decide(request.check)
        if decision.fail_open or not decision.allowed:
            return decision, pb.HoldResponse()
        name = str(len(self._holds))
        self._holds.append(_Held(charged, request.check.tokens_requested))
        return decision, pb.HoldResponse(hold=name, expire_time=self._end_of(request))

    def _settle(self, held: _Held, actual: int) -> bytes | None:
        if held.actual is None:
            held.actual = actual
            for bucket in held.buckets:
                self._spent[bucket] += actual - held.cost
        if actual != held.actual:
            return None
        return pb.SettleResponse(known=True, charged=actual).SerializeToString()

    def _extend(self, held: _Held, request: pb.ExtendRequest) -> bytes | None:
        if held.actual is not None:
            return None
        expire_time = self._end_of(request)
        return pb.ExtendResponse(known=True, expire_time=expire_time).SerializeToString()

    def _end_of(self, request: pb.HoldRequest | pb.ExtendRequest) -> int:
        return int(self._fake.clock.now_s()) + request.ttl_seconds

    def _decide(self, request: pb.RateLimitRequest) -> tuple[Decision, Sequence[_Bucket]]:
        """Return the decision, and the buckets that it charged."""
        fake = self._fake
        check = Check(
            request.identifier,
            request.identifier_type,
            request.endpoint,
            request.tokens_requested,
            request.timestamp,
            request.peek,
            {one.identifier_type: one.identifier for one in request.also} or NO_IDENTITIES,
        )
        fake.checks.append(check)
        now_s = fake.clock.now_s()
        if not fake.available:
            return unchecked(Reason.NO_ANSWER, "UNAVAILABLE", now_s, fake.on_unavailable), ()
        judged: dict[_Bucket, Decision] = {}
        for kind, identifier in {check.identifier_type: check.identifier, **check.also}.items():
            found = self.limits.get((check.endpoint, kind)) or self.limits.get(("*", kind))
            if found is not None:
                window = int(now_s) // found.window_seconds
                bucket = (kind, identifier, check.endpoint, window)
                judged[bucket] = self._judge(check.cost, found, bucket, now_s)
        if not judged:
            return Decision(True, MAX_COST, 0, 0, Reason.NO_RULE, decided_at_s=now_s), ()  # noqa: FBT003 - allowed
        denials = [one for one in judged.values() if not one.allowed]
        if denials:
            return max(denials, key=lambda one: one.retry_after_seconds), ()
        least = min(judged.values(), key=lambda one: one.remaining_tokens / one.limit)
        if check.peek:
            return least, ()
        for bucket in judged:
            self._spent[bucket] = self._spent.get(bucket, 0) + check.cost
        return least, tuple(judged)

    def _judge(self, cost: int, rule: _Limit, bucket: _Bucket, now_s: float) -> Decision:
        limit, window_seconds = rule
        left = limit - self._spent.get(bucket, 0)
        allowed = cost <= left
        if allowed:
            left -= cost
        window = bucket[-1]
        reset_time = (window + 1) * window_seconds
        wait_s = max(1, -int(-(reset_time - now_s) // 1))
        reason, retry_after_s = Reason.WITHIN_LIMIT, 0 if left else wait_s
        if not allowed:
            reason, retry_after_s = Reason.LIMIT_EXCEEDED, wait_s
        if cost > limit:
            reason, retry_after_s = Reason.COST_EXCEEDS_LIMIT, window_seconds
        return Decision(
            allowed,
            left,
            reset_time if left < limit else int(now_s),
            retry_after_s,
            reason,
            limit,
            window_seconds,
            rule_id="fake",
            decided_at_s=now_s,
        )


class FakeRateLimiter(_Fake, RateLimiterClient):
    """Replaces a :class:`ratelimitd_client.RateLimiterClient`, with the same errors.

    Windows do not wait, so ``max_wait_s`` changes nothing. Every hold is one of its own, which never ends by time.
    """


class AsyncFakeRateLimiter(_Fake, AsyncRateLimiterClient):
    """As :class:`FakeRateLimiter`, in place of an :class:`ratelimitd_client.AsyncRateLimiterClient`."""

    @staticmethod
    async def _given(answer: object) -> object:
        return answer
