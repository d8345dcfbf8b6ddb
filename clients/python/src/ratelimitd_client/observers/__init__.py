"""Reports of decisions: counts to read, and what an application gives to a client or a middleware to be told of each.

Nothing here knows an identifier. The modules of this package report to a library of metrics; importing it loads none.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from ratelimitd_client.clock import Clock
from ratelimitd_client.decision import Decision, Reason
from ratelimitd_client.log_throttle import LogThrottle

_LOG: Final = logging.getLogger("ratelimitd_client")

_NO_ANSWER: Final = Reason.NO_ANSWER
_NOT_ASKED: Final = Reason.NOT_ASKED


class Observer(Protocol):
    """Is told of every decision. An exception that it raises is logged and reaches no caller."""

    def decided(self, decision: Decision, endpoint: str, /) -> None:
        """Take the decision on a check of ``endpoint``. Called before its caller gets it, so it must be quick."""
        ...


@dataclass(slots=True, eq=False, repr=False)
class Counts:
    """How many checks were decided how. Plain numbers, which may be read at any time; an :class:`Observer` itself.

    Attributes:
        allowed: allowed by a node.
        denied: denied by a node.
        leased: allowed by a lease, without a call.
        unanswered: sent, without a usable answer in time.
        not_asked: not sent, because the breaker was not closed.
        let_through: those of ``unanswered`` and ``not_asked`` that were allowed.
        held_closed: those that were denied.
    """

    allowed: int = 0
    denied: int = 0
    held_closed: int = 0
    leased: int = 0
    let_through: int = 0
    not_asked: int = 0
    unanswered: int = 0

    @property
    def asked(self) -> int:
        """Checks that were sent to a node, without the probes of the breaker."""
        return self.allowed + self.denied + self.unanswered

    def decided(self, decision: Decision, _endpoint: str, /) -> None:
        """Count a decision."""
        reason = decision.reason
        if reason is _NO_ANSWER:
            self.unanswered += 1
        elif reason is _NOT_ASKED:
            self.not_asked += 1
        elif decision.allowed:
            self.allowed += 1
            return
        else:
            self.denied += 1
            return
        if decision.allowed:
            self.let_through += 1
        else:
            self.held_closed += 1

    def __repr__(self) -> str:
        counts = ", ".join(f"{name}={getattr(self, name)}" for name in ("asked", *self.__slots__))
        return f"Counts({counts})"


Report: TypeAlias = Callable[[Decision, str], None]
"""Reports the decision on a check of an endpoint."""


def is_observer(value: object) -> bool:
    """Return whether a value has the method of an :class:`Observer`; a coroutine would never be awaited."""
    decided = getattr(value, "decided", None)
    return callable(decided) and not inspect.iscoroutinefunction(decided)


def report_to(clock: Clock, *observers: Observer) -> Report:
    """Return a function that reports to all observers and never raises: their errors are logged, at most one a second.

    Raises:
        TypeError: one of them is no observer.
    """
    if not all(map(is_observer, observers)):
        message = "observer must have a method decided that is not a coroutine function"
        raise TypeError(message)
    throttle = LogThrottle(clock)

    def report(decision: Decision, endpoint: str) -> None:
        for observer in observers:
            try:
                observer.decided(decision, endpoint)
            except Exception as error:  # noqa: BLE001 - callers need an answer, whatever an observer raises
                # The text of the error is left out, since it may contain an identifier.
                with suppress(Exception):
                    if reports := throttle.count():
                        _LOG.warning(
                            "the observer failed (%s), %d reports lost since the last warning",
                            type(error).__name__,
                            reports,
                        )

    return report
