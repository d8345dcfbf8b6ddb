"""A check that waits for the shared state, and how it is answered when that has answered."""

from __future__ import annotations

from asyncio import Future

from ratelimitd.errors import RateLimitdError
from ratelimitd.ledger.shared_state import Ask
from ratelimitd.ledger.view import View
from ratelimitd.model import ALLOWED, DENIED, INT32_MAX, LIMIT_EXCEEDED, WITHIN_LIMIT, Outcome, Rule

BEYOND_ANY_LIMIT = INT32_MAX + 1
"""A cost that no bucket has: the denial tells what is left, and when all of it is back."""


class Question:
    """One check that waits.

    Attributes:
        ask: what a batch asks for it; there is none before it is known that the store has to decide.
        answer: to the check: an outcome, or the error that stands for it.
        charged: whether the node's own view was charged when the store did not answer in time.
    """

    __slots__ = ("answer", "ask", "charged", "cost", "now_us", "peek", "rule")

    def __init__(
        self,
        rule: Rule,
        now_us: int,
        cost: int,
        *,
        peek: bool,
        answer: Future[Outcome | RateLimitdError],
    ) -> None:
        self.rule = rule
        self.now_us = now_us
        self.cost = cost
        self.peek = peek
        self.answer = answer
        self.ask: Ask
        self.charged = False

    def tell(self, outcome: Outcome | RateLimitdError) -> None:
        """Answer, unless nobody waits any more."""
        if not self.answer.done():
            self.answer.set_result(outcome)

    def fail(self, error: Exception) -> None:
        """Let the caller meet an error that nobody expected."""
        if not self.answer.done():
            self.answer.set_exception(error)


def granted(view: View, now_us: int, later: int = 0) -> Outcome:
    """What a check is told that the store has allowed and charged; ``view`` has heard of it.

    ``later`` tokens were granted behind it in the same batch: it is told what was left before those.
    """
    left = view.peek(now_us, BEYOND_ANY_LIMIT)
    remaining = left[1] + later
    retry_after = 0 if remaining else view.peek(now_us, 1)[3]
    return ALLOWED, remaining, left[2], retry_after, WITHIN_LIMIT, left[5]


def refused(view: View, now_us: int, cost: int) -> Outcome:
    """What a check is told that the store has not allowed."""
    outcome = view.peek(now_us, cost)
    if not outcome[0]:
        return outcome
    # There was not enough when the store was asked, and by now there is: it may try again as soon as it can be told.
    left = view.peek(now_us, BEYOND_ANY_LIMIT)
    return DENIED, left[1], left[2], 1, LIMIT_EXCEEDED, left[5]
