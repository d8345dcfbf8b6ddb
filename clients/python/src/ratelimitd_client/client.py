# Generated from async_client.py by `make proto` (tools/generated_code.py). Do not edit.
"""What an application calls to check requests.

The connections are in :mod:`ratelimitd_client.sessions`, where the asyncio and the blocking client differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, Self

from ratelimitd_client.check import (
    MS_PER_S,
    NO_IDENTITIES,
    Check,
    hold_of,
    request_of,
    requests_of,
    valid_timeout_s,
)
from ratelimitd_client.decision import Decision
from ratelimitd_client.fail_open import HOLD, CallError
from ratelimitd_client.hold import DEFAULT_TTL_S, Hold
from ratelimitd_client.node_client import NodeClient
from ratelimitd_client.sessions import Sessions
from ratelimiter.v1 import ratelimiter_pb2 as pb


class RateLimiter(Protocol):
    """Decides whether requests may proceed: :class:`RateLimiterClient` and its fake for tests."""

    def __enter__(self) -> Self:
        """Return the limiter."""
        ...

    def __exit__(self, *_: object) -> None:
        """Close the limiter."""
        ...

    def close(self) -> None:
        """As :meth:`RateLimiterClient.close`."""
        ...

    def wait_until_ready(self, timeout_s: float = 5.0) -> bool:
        """As :meth:`RateLimiterClient.wait_until_ready`."""
        ...

    def check(
        self,
        identifier: str,
        identifier_type: str,
        endpoint: str,
        *,
        cost: int = 1,
        timestamp: int = 0,
        peek: bool = False,
        also: Mapping[str, str] = NO_IDENTITIES,
        max_wait_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> Decision:
        """As :meth:`RateLimiterClient.check`."""
        ...

    def check_many(
        self, checks: Iterable[Check], *, timeout_s: float | None = None
    ) -> list[Decision]:
        """As :meth:`RateLimiterClient.check_many`."""
        ...

    def hold(
        self,
        identifier: str,
        identifier_type: str,
        endpoint: str,
        *,
        cost: int = 1,
        also: Mapping[str, str] = NO_IDENTITIES,
        ttl_s: int = DEFAULT_TTL_S,
        hold_id: str = "",
        timeout_s: float | None = None,
    ) -> Hold:
        """As :meth:`RateLimiterClient.hold`."""
        ...


class RateLimiterClient(Sessions):
    """Decides on every check within its deadline, also when the service does not answer.

    It then fails open, or closed with ``on_unavailable="deny"``.

    Create one for the whole process, and close it or use ``with``. It connects with its first call, so it may be
    created when a module is imported, and before a server forks its workers.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections, in asyncio after the calls in flight. In a blocking client they fail open."""
        self._closed = True
        session = self._current()
        if session is not None:
            session.close()

    def wait_until_ready(self, timeout_s: float = 5.0) -> bool:
        """Connect; return whether that succeeded in time. Otherwise the first check connects, within its deadline.

        Raises:
            ValueError, TypeError: ``timeout_s`` is not valid.
        """
        deadline_s = valid_timeout_s(timeout_s)
        return self._opened().wait_until_ready(deadline_s) and not self._closed

    @property
    def admin(self) -> NodeClient:
        """The calls for rules, health and metrics over gRPC. They raise errors; their deadline is 1 s."""
        return NodeClient(channel=self._opened().grpc_channel, token=self._token)

    def check(
        self,
        identifier: str,
        identifier_type: str,
        endpoint: str,
        *,
        cost: int = 1,
        timestamp: int = 0,
        peek: bool = False,
        also: Mapping[str, str] = NO_IDENTITIES,
        max_wait_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> Decision:
        """Return whether a request may proceed, and spend ``cost`` tokens if so. The arguments are those of ``Check``.

        A check that passes within ``max_wait_s`` seconds, at most 60, is allowed, and this returns when it may proceed.
        The wait begins with the answer, and is no part of ``timeout_s``; a check that the node does not answer never
        waits. Where a limit is a window, the node lets nobody wait.

        Raises:
            ValueError, TypeError: an argument is not valid; nothing was sent.
            RuntimeError: the client is closed.
        """
        session = self._opened()
        deadline_s = self._timeout_s if timeout_s is None else valid_timeout_s(timeout_s)
        request = request_of(
            identifier,
            identifier_type,
            endpoint,
            cost=cost,
            timestamp=timestamp,
            peek=peek,
            also=also,
            max_wait_s=max_wait_s,
        )
        decision = (
            session.ask(request, deadline_s)
            if session.allows()
            else session.unasked([request], deadline_s)[0]
        )
        self._report(decision, endpoint)
        if max_wait_s and decision.wait_ms > 0 and decision.allowed and not peek:
            self._sleep(min(decision.wait_ms / MS_PER_S, max_wait_s))
        return decision

    def check_many(
        self, checks: Iterable[Check], *, timeout_s: float | None = None
    ) -> list[Decision]:
        """Send up to 1,000 checks in one call and return their decisions in the same order.

        Raises:
            ValueError, TypeError: there are more checks, or an argument is not valid; nothing was sent.
            RuntimeError: the client is closed.
        """
        asked = list(checks)
        requests = requests_of(asked)
        deadline_s = self._timeout_s if timeout_s is None else valid_timeout_s(timeout_s)
        session = self._opened()
        if not requests:
            return []
        if session.allows():
            decisions = session.ask_many(requests, deadline_s)
        else:
            decisions = session.unasked(requests, deadline_s)
        report = self._report
        for check, decision in zip(asked, decisions, strict=True):
            report(decision, check.endpoint)
        return decisions

    def hold(
        self,
        identifier: str,
        identifier_type: str,
        endpoint: str,
        *,
        cost: int = 1,
        also: Mapping[str, str] = NO_IDENTITIES,
        ttl_s: int = DEFAULT_TTL_S,
        hold_id: str = "",
        timeout_s: float | None = None,
    ) -> Hold:
        """Return whether a request may proceed, and hold ``cost`` tokens, and slots, until it is settled.

        ``ttl_s`` seconds later, 1 to 3,600, the hold ends unless it is extended. ``hold_id`` makes a repetition of the
        call safe: the same id is the same hold. Without it, a hold that is answered up to a second after the deadline
        is given back, also if the call is cancelled or interrupted; in a blocking client unless that is closed first.
        The other arguments are those of :class:`Check`.

        Raises:
            ValueError, TypeError: an argument is not valid; nothing was sent.
            RuntimeError: the client is closed.
        """
        request = request_of(identifier, identifier_type, endpoint, cost=cost, also=also)
        message = hold_of(request, ttl_s, hold_id)
        deadline_s = self._timeout_s if timeout_s is None else valid_timeout_s(timeout_s)
        session = self._opened()
        held = pb.HoldResponse()
        # With an id the hold stays for a repetition.
        call = session.call if hold_id else session.call_or_give_back
        if session.allows():
            try:
                answer = call(HOLD, message, deadline_s)
            except CallError as error:
                decision = session.fail_open.not_held(error)
            else:
                decision, held = session.fail_open.held(answer)
        else:
            # The probe is a check that charges nothing.
            probe = request_of(identifier, identifier_type, endpoint, peek=True)
            [decision] = session.unasked([probe], deadline_s)
        self._report(decision, endpoint)
        return Hold(
            decision, cost=cost, hold=held.hold, expire_time=held.expire_time, session=session
        )
