"""What spends do to a bucket, for each algorithm: the arithmetic of the ledger. Pure.

An algorithm judges one check and charges it. The ledger also has to charge what another node has long allowed, so here
a bucket may be overdrawn, and what is owed is kept until it is paid off. A spend is charged at the time at which it was
decided, wherever it is charged and however late it comes, so that nodes whose clocks differ charge the same window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeAlias

from ratelimitd.algorithms import Decide, fixed_window, sliding_window, token_bucket
from ratelimitd.model import Algorithm, Outcome, Rule

Run: TypeAlias = tuple[int, int]
"""(time in µs, tokens): so many were allowed then."""

BucketState: TypeAlias = tuple[int, int] | bytes | None
"""What an algorithm keeps of a bucket; ``None`` is a full one."""


class Account(Protocol):
    """What the ledger needs to know of an algorithm. States are its own: ``None`` is a full bucket."""

    def judge(self, state: Any, rule: Rule, now_us: int, cost: int) -> Outcome:
        """Judge one check as the algorithm does, of a bucket that may be overdrawn."""

    def judge_of(self, state: Any, rule: Rule) -> Decide:
        """The quickest that judges as :meth:`judge` does, of this state and all that checks make of it."""

    def used(self, state: Any, rule: Rule, now_us: int) -> int:
        """The tokens that are missing at ``now_us``, rounded up; more than the limit where the bucket is overdrawn."""

    def charged(self, state: Any, rule: Rule, runs: Sequence[Run]) -> Any:
        """The state after ``runs``, in ascending order, whatever it allows."""

    def capped(self, state: Any, rule: Rule) -> Any:
        """The state under a limit that may have been lowered: no more is owed than one whole capacity."""

    def standing(self, state: Any) -> tuple[int, int]:
        """(time of the latest spend, how much is spent): never sinks in the life of a bucket."""

    def freed(self, rule: Rule, from_us: int, until_us: int) -> int:
        """About how many tokens come free between two times, at most."""


class TokenBucketAccount:
    """Of :mod:`ratelimitd.algorithms.token_bucket`: (spent, latest_us), one token being ``window_us`` units."""

    @staticmethod
    def judge(state: Any, rule: Rule, now_us: int, cost: int) -> Outcome:
        """Judge one check; what is owed is refilled first, for the algorithm remembers one capacity at most."""
        capacity = rule.limit * rule.window_us
        if state is None or state[0] <= capacity:
            return token_bucket.decide(state, rule, now_us, cost)
        refilled = _refilled(state, rule, now_us)
        if refilled[0] > capacity:
            return token_bucket.denied(state, rule, now_us, cost, refilled)
        outcome = token_bucket.decide(refilled, rule, now_us, cost)
        return outcome if outcome[0] else (*outcome[:5], state)

    @staticmethod
    def judge_of(state: Any, rule: Rule) -> Decide:
        """The algorithm itself, unless the bucket is overdrawn."""
        if state is None or state[0] <= rule.limit * rule.window_us:
            return token_bucket.decide
        return TokenBucketAccount.judge

    @staticmethod
    def used(state: Any, rule: Rule, now_us: int) -> int:
        """Tokens that have not been refilled."""
        return 0 if state is None else -(-_refilled(state, rule, now_us)[0] // rule.window_us)

    @staticmethod
    def charged(state: Any, rule: Rule, runs: Sequence[Run]) -> Any:
        """Each at its time, after what has been refilled until then."""
        for at_us, tokens in runs:
            spent, latest_us = (0, at_us) if state is None else _refilled(state, rule, at_us)
            state = spent + tokens * rule.window_us, latest_us
        return state

    @staticmethod
    def capped(state: Any, rule: Rule) -> Any:
        """Spent is a capacity at most."""
        return None if state is None else (min(state[0], rule.limit * rule.window_us), state[1])

    @staticmethod
    def standing(state: Any) -> tuple[int, int]:
        """Latest, then spent."""
        return _standing(state)

    @staticmethod
    def freed(rule: Rule, from_us: int, until_us: int) -> int:
        """What is refilled."""
        return _refilled_tokens(rule, from_us, until_us)


def _standing(state: tuple[int, int] | None) -> tuple[int, int]:
    """Of a state that is (how much, latest_us)."""
    return (-1, 0) if state is None else (state[1], state[0])


def _refilled_tokens(rule: Rule, from_us: int, until_us: int) -> int:
    return -(-max(0, until_us - from_us) * rule.limit // rule.window_us)


def _refilled(state: tuple[int, int], rule: Rule, now_us: int) -> tuple[int, int]:
    spent, latest_us = state
    if now_us <= latest_us:
        return state
    return max(0, spent - (now_us - latest_us) * rule.limit), now_us


class FixedWindowAccount:
    """Of :mod:`ratelimitd.algorithms.fixed_window`: (count, latest_us)."""

    judge = staticmethod(fixed_window.decide)

    @staticmethod
    def judge_of(_state: Any, _rule: Rule) -> Decide:
        """The algorithm itself."""
        return fixed_window.decide

    @staticmethod
    def used(state: Any, rule: Rule, now_us: int) -> int:
        """Tokens of the window that holds ``now_us``, or of a later one that has been spent in."""
        return state[0] if state is not None and now_us < _end_us(state[1], rule) else 0

    @staticmethod
    def charged(state: Any, rule: Rule, runs: Sequence[Run]) -> Any:
        """Each in its own window; what belongs to one that is over changes nothing."""
        for at_us, tokens in runs:
            if state is None or at_us >= _end_us(state[1], rule):
                state = (tokens, at_us)
            elif _end_us(at_us, rule) == _end_us(state[1], rule):
                state = (state[0] + tokens, max(state[1], at_us))
        return state

    @staticmethod
    def capped(state: Any, rule: Rule) -> Any:
        """The count is the limit at most."""
        return None if state is None else (min(state[0], rule.limit), state[1])

    @staticmethod
    def standing(state: Any) -> tuple[int, int]:
        """Latest, then count."""
        return _standing(state)

    @staticmethod
    def freed(rule: Rule, from_us: int, until_us: int) -> int:
        """All of it, in the next window."""
        return rule.limit if until_us >= _end_us(from_us, rule) else 0


def _end_us(at_us: int, rule: Rule) -> int:
    return at_us - at_us % rule.window_us + rule.window_us


class SlidingWindowAccount:
    """Of :mod:`ratelimitd.algorithms.sliding_window`: a log."""

    judge = staticmethod(sliding_window.decide)

    @staticmethod
    def judge_of(_state: Any, _rule: Rule) -> Decide:
        """The algorithm itself."""
        return sliding_window.decide

    @staticmethod
    def used(state: Any, rule: Rule, now_us: int) -> int:
        """Tokens of the window that ends at ``now_us``."""
        return 0 if state is None else sliding_window.used(state, rule, now_us)

    @staticmethod
    def charged(state: Any, rule: Rule, runs: Sequence[Run]) -> Any:
        """Each at its own time, between what is there."""
        return sliding_window.entered(state, rule, runs)

    @staticmethod
    def capped(state: Any, _rule: Rule) -> Any:
        """As it is: what is over a lower limit leaves with its window."""
        return state

    @staticmethod
    def standing(state: Any) -> tuple[int, int]:
        """Time of the last entry, then tokens."""
        return (-1, 0) if state is None else sliding_window.latest(state)

    @staticmethod
    def freed(rule: Rule, from_us: int, until_us: int) -> int:
        """What leaves, if what is there is spread evenly."""
        return _refilled_tokens(rule, from_us, until_us)


ACCOUNTS: Final[Mapping[Algorithm, Account]] = MappingProxyType(
    {
        Algorithm.TOKEN_BUCKET: TokenBucketAccount(),
        Algorithm.FIXED_WINDOW: FixedWindowAccount(),
        Algorithm.SLIDING_WINDOW: SlidingWindowAccount(),
    }
)
