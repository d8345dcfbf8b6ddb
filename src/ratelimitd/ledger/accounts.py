"""The effect of spends on a bucket, for each algorithm: the arithmetic of the ledger. Pure.

An algorithm judges one check and charges it. The ledger must also charge checks that another node has already allowed,
so here a bucket may be overdrawn, and keeps its debt until it is paid off. A spend is charged at the time of its
decision, however late it arrives, so that nodes with different clocks charge the same window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from ratelimitd.algorithms import Decide, fixed_window, sliding_window, token_bucket
from ratelimitd.model import (
    INT32_MAX,
    LIMIT_EXCEEDED,
    MAX_TIME_US,
    Algorithm,
    Limit,
    Outcome,
)

LEAST_CALENDAR_S: Final = 1 << 30
"""A fixed window of at least this length is that of a calendar, or of decades: no later window pays its overdraft."""

Run: TypeAlias = tuple[int, int]
"""(time in µs, tokens allowed at that time)."""

BucketState: TypeAlias = tuple[int, ...] | bytes | None
"""An algorithm's state of a bucket; ``None`` is a full one."""


class Refund(NamedTuple):
    """A charge to be given back, because another limit denied the check.

    Attributes:
        generation: of the bucket at the charge.
        revision: of the bucket at the charge.
        at_us: time of the charge, or earlier.
        tokens: of the charge.
        spent: lower bound of the tokens missing right after the charge. Only a token bucket uses it.
        refunded: ``SharedState.refunded`` of the bucket at the charge.
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
        """Return the state after ``runs``, in ascending order, even beyond the capacity."""

    def capped(self, state: Any, rule: Limit) -> Any:
        """Return the state under a new limit, with a debt of at most one capacity."""

    def standing(self, state: Any) -> tuple[int, int]:
        """Return (time of the latest spend, amount spent); no spend decreases it."""

    def freed(self, rule: Limit, from_us: int, until_us: int) -> int:
        """Return an estimate of the most tokens freed between two times."""

    def spent(self, state: Any, rule: Limit) -> int:
        """Return the whole tokens missing at the latest spend."""

    def refunded(self, state: Any, rule: Limit, refund: Refund, already: int) -> tuple[Any, int]:
        """Give back a charge, limited so that the bucket never allows more than if it had not been charged.

        ``already``: tokens given back since the charge. Returns the state, with the same latest time, and the tokens
        given back, rounded up.
        """


def _standing(state: tuple[int, ...] | None) -> tuple[int, int]:
    """Return (latest_us, amount) of a state (amount, latest_us, …)."""
    return (-1, 0) if state is None else (state[1], state[0])


def _refilled_tokens(rule: Limit, from_us: int, until_us: int) -> int:
    """Return the tokens refilled between two times at an even rate, rounded up."""
    return -(-max(0, until_us - from_us) * rule.limit // rule.window_us)


class TokenBucketAccount:
    """States of :mod:`ratelimitd.algorithms.token_bucket`: (spent, latest_us), with ``window_us`` units per token."""

    standing = staticmethod(_standing)
    freed = staticmethod(_refilled_tokens)

    @staticmethod
    def judge(state: Any, rule: Limit, now_us: int, cost: int) -> Outcome:
        """Decide one check on a bucket that may be overdrawn; the algorithm itself caps the debt at one capacity."""
        capacity = rule.capacity_units
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
        if state is None or state[0] <= rule.capacity_units:
            return token_bucket.decide
        return TokenBucketAccount.judge

    @staticmethod
    def used(state: Any, rule: Limit, now_us: int) -> int:
        """Return the tokens not refilled yet."""
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
        return None if state is None else (min(state[0], rule.capacity_units), state[1])

    @staticmethod
    def spent(state: Any, rule: Limit) -> int:
        """Return the tokens spent, rounded down."""
        return 0 if state is None else int(state[0] // rule.window_us)

    @staticmethod
    def refunded(state: Any, rule: Limit, refund: Refund, already: int) -> tuple[Any, int]:
        """Give back the part of the charge that cannot have been refilled since.

        Without the charge the bucket might have been full in the meantime, and refill up to then would have been lost.
        The part that is certainly still missing because of the charge is the amount missing right after it, less the
        refill since, less refunds of other charges since (ADR 0051).
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
    """States of :mod:`ratelimitd.algorithms.fixed_window`: (count, latest_us), and the previous count unless it is 0.

    The overdraft of a window counts in the next one, so that the excess does not grow from window to window.
    """

    standing = staticmethod(_standing)

    @staticmethod
    def judge(state: Any, rule: Limit, now_us: int, cost: int) -> Outcome:
        """Decide one check as the algorithm does, after the overdraft of earlier windows."""
        opened = _opened(state, rule, now_us)
        outcome = fixed_window.decide(opened, rule, now_us, cost)
        if not outcome[0]:
            if opened[0] > rule.limit and rule.window_seconds < LEAST_CALENDAR_S:
                outcome = _paid_off(outcome, opened[0], rule, cost)
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
        """Return the tokens of the window of ``now_us``, or of a later window with spends."""
        return 0 if state is None else _opened(state, rule, now_us)[0]

    @staticmethod
    def charged(state: Any, rule: Limit, runs: Sequence[Run]) -> Any:
        """Apply each run in its window; a late run also counts its overdraft of the previous window in the latest."""
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
        """Give back a charge of the same window."""
        window = refund.at_us // rule.window_us
        if state is None or refund.at_us > state[1] or state[1] // rule.window_us > window:
            return state, 0
        tokens = min(refund.tokens, state[0])
        return (state[0] - tokens, *state[1:]), tokens


def _opened(state: tuple[int, ...] | None, rule: Limit, at_us: int) -> tuple[int, int, int]:
    """Return (count, latest_us, previous count) in the window of ``at_us``, or in that of the state if it is later."""
    if state is None:
        return 0, at_us, 0
    count, latest_us = state[0], state[1]
    windows = at_us // rule.window_us - latest_us // rule.window_us
    if windows <= 0:
        return count, latest_us, state[2] if len(state) > 2 else 0  # noqa: PLR2004
    before = max(0, count - (windows - 1) * rule.limit)
    return max(0, before - rule.limit), at_us, before


def _paid_off(outcome: Outcome, count: int, rule: Limit, cost: int) -> Outcome:
    """Return the denial of an overdrawn window with the times at which later windows have paid the debt off."""
    allowed, remaining, reset_time, retry_after, reason, state = outcome
    windows_to_full = (count - 1) // rule.limit
    reset_time = min(reset_time + windows_to_full * rule.window_seconds, MAX_TIME_US)
    if reason is LIMIT_EXCEEDED:
        windows_to_pass = (count + cost - 1) // rule.limit - 1
        retry_after = min(retry_after + windows_to_pass * rule.window_seconds, INT32_MAX)
    return (allowed, remaining, reset_time, retry_after, reason, state)


def _closed(count: int, latest_us: int, before: int) -> tuple[int, ...]:
    return (count, latest_us, before) if before else (count, latest_us)


class SlidingWindowAccount:
    """States of :mod:`ratelimitd.algorithms.sliding_window`: logs."""

    judge = staticmethod(sliding_window.decide)
    freed = staticmethod(_refilled_tokens)
    """Assumes that entries are spread evenly."""

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
        """Return the state unchanged: an excess over a lowered limit expires with its window."""
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
        """Remove the latest tokens up to the time of the charge, which expire no later than the charge would."""
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
