"""The effect of spends on a bucket, for each algorithm: the arithmetic of the ledger. Pure.

An algorithm judges one check and charges it. The ledger also has to charge what another node has long allowed, so here
a bucket may be overdrawn, and what is owed is kept until it is paid off. A spend is charged at the time at which it was
decided, wherever it is charged and however late it comes, so that nodes whose clocks differ charge the same window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from ratelimitd.algorithms import Decide, fixed_window, sliding_window, token_bucket
from ratelimitd.model import Algorithm, Limit, Outcome

Run: TypeAlias = tuple[int, int]
"""(time in µs, tokens that were allowed then)."""

BucketState: TypeAlias = tuple[int, ...] | bytes | None
"""An algorithm's state of a bucket; ``None`` is a full one."""


class Refund(NamedTuple):
    """A charge that is to be given back, because another limit denied the check.

    Attributes:
        generation: of the bucket, when it was charged.
        revision: of the bucket then.
        at_us: when it was charged, or earlier.
        tokens: how many.
        spent: tokens that the bucket lacked right after the charge, at least. Only a token bucket uses it.
        refunded: ``SharedState.refunded`` of the bucket then.
    """

    generation: int
    revision: int
    at_us: int
    tokens: int
    spent: int
    refunded: int


class Account(Protocol):
    """The ledger's view of an algorithm. A state of ``None`` is a full bucket."""

    def judge(self, state: Any, rule: Limit, now_us: int, cost: int) -> Outcome:
        """Decide one check as the algorithm does, on a bucket that may be overdrawn."""

    def judge_of(self, state: Any, rule: Limit) -> Decide:
        """Return the fastest function that decides as :meth:`judge` does for this state and its successors."""

    def used(self, state: Any, rule: Limit, now_us: int) -> int:
        """Return the missing tokens at ``now_us``, rounded up; above the capacity if the bucket is overdrawn."""

    def charged(self, state: Any, rule: Limit, runs: Sequence[Run]) -> Any:
        """Return the state after ``runs``, in ascending order, also beyond the capacity."""

    def capped(self, state: Any, rule: Limit) -> Any:
        """Return the state under a new limit: at most one whole capacity is owed."""

    def standing(self, state: Any) -> tuple[int, int]:
        """Return (time of the latest spend, spent tokens), which never decreases in the life of a bucket."""

    def freed(self, rule: Limit, from_us: int, until_us: int) -> int:
        """Return about how many tokens are freed between two times, at most."""

    def spent(self, state: Any, rule: Limit) -> int:
        """Return the whole tokens that were missing at the latest spend."""

    def refunded(self, state: Any, rule: Limit, refund: Refund, already: int) -> tuple[Any, int]:
        """Give a charge back, as far as the bucket then never allows more than if it had not been charged.

        ``already``: tokens that were given back since the charge. Returns the state, with the same latest time, and
        the tokens given back, rounded up.
        """


def _standing(state: tuple[int, ...] | None) -> tuple[int, int]:
    """Return (latest, how much) of a state that is (how much, latest_us)."""
    return (-1, 0) if state is None else (state[1], state[0])


def _refilled_tokens(rule: Limit, from_us: int, until_us: int) -> int:
    """Return what is refilled evenly between two times."""
    return -(-max(0, until_us - from_us) * rule.limit // rule.window_us)


class TokenBucketAccount:
    """Of :mod:`ratelimitd.algorithms.token_bucket`: (spent, latest_us), one token being ``window_us`` units."""

    standing = staticmethod(_standing)
    freed = staticmethod(_refilled_tokens)

    @staticmethod
    def judge(state: Any, rule: Limit, now_us: int, cost: int) -> Outcome:
        """Decide one check after the overdraft has refilled: the algorithm itself stores at most one capacity."""
        capacity = rule.capacity * rule.window_us
        if state is None or state[0] <= capacity:
            return token_bucket.decide(state, rule, now_us, cost)
        refilled = _refilled(state, rule, now_us)
        # equivalent: at capacity the algorithm denies with the same numbers
        if refilled[0] > capacity:
            return token_bucket.denied(state, rule, now_us, cost, refilled)
        outcome = token_bucket.decide(refilled, rule, now_us, cost)
        return outcome if outcome[0] else (*outcome[:5], state)

    @staticmethod
    def judge_of(state: Any, rule: Limit) -> Decide:
        """Return the algorithm itself, unless the bucket is overdrawn."""
        if state is None or state[0] <= rule.capacity * rule.window_us:
            return token_bucket.decide
        return TokenBucketAccount.judge

    @staticmethod
    def used(state: Any, rule: Limit, now_us: int) -> int:
        """Return the tokens that have not been refilled."""
        return 0 if state is None else -(-_refilled(state, rule, now_us)[0] // rule.window_us)

    @staticmethod
    def charged(state: Any, rule: Limit, runs: Sequence[Run]) -> Any:
        """Apply each run at its time, after the refill until then."""
        for at_us, tokens in runs:
            spent, latest_us = (0, at_us) if state is None else _refilled(state, rule, at_us)
            state = spent + tokens * rule.window_us, latest_us
        return state

    @staticmethod
    def capped(state: Any, rule: Limit) -> Any:
        """Cap the spent tokens at one capacity."""
        return None if state is None else (min(state[0], rule.capacity * rule.window_us), state[1])

    @staticmethod
    def spent(state: Any, rule: Limit) -> int:
        """Return the tokens spent, rounded down."""
        return 0 if state is None else int(state[0] // rule.window_us)

    @staticmethod
    def refunded(state: Any, rule: Limit, refund: Refund, already: int) -> tuple[Any, int]:
        """Give back what cannot have been refilled since the charge.

        Without the charge the bucket may have been full in the meantime, and what was refilled until then is not
        missing any more. Of what it lacked right after the charge, this much at least is missing with it and not
        without it: all but the refill since then, and but what was given back of other charges (ADR 0051).
        """
        if state is None or refund.at_us > state[1] or refund.spent <= already:
            return state, 0
        lacking = (refund.spent - already) * rule.window_us, refund.at_us
        left, latest_us = _refilled(lacking, rule, state[1])
        units = min(left, refund.tokens * rule.window_us, state[0])
        return (state[0] - units, latest_us), -(-units // rule.window_us)


def _refilled(state: tuple[int, int], rule: Limit, now_us: int) -> tuple[int, int]:
    spent, latest_us = state
    if now_us <= latest_us:
        return state
    return max(0, spent - (now_us - latest_us) * rule.limit), now_us


class FixedWindowAccount:
    """Of :mod:`ratelimitd.algorithms.fixed_window`: (count, latest_us), and the count of the window before unless 0.

    What a window was overdrawn by counts in the next one, so that the excess does not grow from window to window.
    """

    standing = staticmethod(_standing)

    @staticmethod
    def judge(state: Any, rule: Limit, now_us: int, cost: int) -> Outcome:
        """Decide one check as the algorithm does, after what earlier windows were overdrawn by."""
        opened = _opened(state, rule, now_us)
        outcome = fixed_window.decide(opened, rule, now_us, cost)
        if not outcome[0]:
            return (*outcome[:5], state)
        count, latest_us = outcome[5]  # type: ignore[misc]  # of a fixed window it is such a pair
        return (*outcome[:5], _closed(count, latest_us, opened[2]))

    @staticmethod
    def judge_of(state: Any, rule: Limit) -> Decide:
        """Return the algorithm itself, unless the window is overdrawn."""
        if state is None or state[0] <= rule.limit:
            return fixed_window.decide
        return FixedWindowAccount.judge

    @staticmethod
    def used(state: Any, rule: Limit, now_us: int) -> int:
        """Return the tokens of the window of ``now_us``, or of a later one with spends."""
        return 0 if state is None else _opened(state, rule, now_us)[0]

    @staticmethod
    def charged(state: Any, rule: Limit, runs: Sequence[Run]) -> Any:
        """Apply each run in its window; of earlier ones, what overdraws the window before the latest."""
        limit, window_us = rule.limit, rule.window_us
        for at_us, tokens in runs:
            count, latest_us, before = _opened(state, rule, at_us)
            if at_us // window_us == latest_us // window_us:
                state = _closed(count + tokens, max(latest_us, at_us), before)
            else:
                excess = min(tokens, max(0, before + tokens - limit))
                state = _closed(count + excess, latest_us, before + tokens)
        return state

    @staticmethod
    def capped(state: Any, rule: Limit) -> Any:
        """Cap the counts at the limit."""
        return state and (
            min(state[0], rule.limit),
            state[1],
            *(min(n, rule.limit) for n in state[2:]),
        )

    @staticmethod
    def freed(rule: Limit, from_us: int, until_us: int) -> int:
        """Return all tokens if the window changes."""
        return rule.limit if until_us // rule.window_us > from_us // rule.window_us else 0

    @staticmethod
    def spent(state: Any, _rule: Limit) -> int:
        """Return the count."""
        return 0 if state is None else int(state[0])

    @staticmethod
    def refunded(state: Any, rule: Limit, refund: Refund, _already: int) -> tuple[Any, int]:
        """Give back what was charged in the same window."""
        window = refund.at_us // rule.window_us
        if state is None or refund.at_us > state[1] or state[1] // rule.window_us > window:
            return state, 0
        tokens = min(refund.tokens, state[0])
        return (state[0] - tokens, *state[1:]), tokens


def _opened(state: tuple[int, ...] | None, rule: Limit, at_us: int) -> tuple[int, int, int]:
    """Return (count, latest_us, count of the window before) in the window of ``at_us``, or in the state's if later."""
    if state is None:
        return 0, at_us, 0
    count, latest_us = state[0], state[1]
    windows = at_us // rule.window_us - latest_us // rule.window_us
    if windows <= 0:
        return count, latest_us, state[2] if len(state) > 2 else 0  # noqa: PLR2004
    before = max(0, count - (windows - 1) * rule.limit)
    return max(0, before - rule.limit), at_us, before


def _closed(count: int, latest_us: int, before: int) -> tuple[int, ...]:
    return (count, latest_us, before) if before else (count, latest_us)


class SlidingWindowAccount:
    """Of :mod:`ratelimitd.algorithms.sliding_window`: a log."""

    judge = staticmethod(sliding_window.decide)
    freed = staticmethod(_refilled_tokens)
    """As if the entries were spread evenly."""

    @staticmethod
    def judge_of(_state: Any, _rule: Limit) -> Decide:
        """Return the algorithm itself."""
        return sliding_window.decide

    @staticmethod
    def used(state: Any, rule: Limit, now_us: int) -> int:
        """Return the tokens of the window that ends at ``now_us``."""
        return 0 if state is None else sliding_window.used(state, rule, now_us)

    @staticmethod
    def charged(state: Any, rule: Limit, runs: Sequence[Run]) -> Any:
        """Insert each run at its time."""
        return sliding_window.entered(state, rule, runs)

    @staticmethod
    def capped(state: Any, _rule: Limit) -> Any:
        """Return the state unchanged: the excess over a lower limit leaves with its window."""
        return state

    @staticmethod
    def standing(state: Any) -> tuple[int, int]:
        """Return (time of the last entry, tokens)."""
        return (-1, 0) if state is None else sliding_window.latest(state)

    @staticmethod
    def spent(state: Any, _rule: Limit) -> int:
        """Return the tokens of the log."""
        return 0 if state is None else sliding_window.latest(state)[1]

    @staticmethod
    def refunded(state: Any, _rule: Limit, refund: Refund, _already: int) -> tuple[Any, int]:
        """Take the latest tokens up to the time of the charge out: those that are there leave no sooner than it."""
        if state is None or refund.at_us > sliding_window.latest(state)[0]:
            return state, 0
        return sliding_window.removed(state, refund.at_us, refund.tokens)


ACCOUNTS: Final[Mapping[Algorithm, Account]] = MappingProxyType(
    {
        Algorithm.TOKEN_BUCKET: TokenBucketAccount(),
        Algorithm.FIXED_WINDOW: FixedWindowAccount(),
        Algorithm.SLIDING_WINDOW: SlidingWindowAccount(),
    }
)
