"""What a node has allowed and the store has not acknowledged yet. Never reads a clock."""

from __future__ import annotations

from collections.abc import Sequence

from ratelimitd.ledger.accounts import ACCOUNTS, Run
from ratelimitd.model import Algorithm, Rule


class Spends:
    """Spends of one bucket under one rule, in the order in which they were made.

    Attributes:
        tokens: how many in all.
        oldest_us: when the first was made; means nothing when there is none.
    """

    __slots__ = ("_runs", "oldest_us", "tokens")

    def __init__(self) -> None:
        self._runs: list[Run] = []
        self.tokens = 0
        self.oldest_us = 0

    def add(self, at_us: int, tokens: int) -> None:
        """Add a spend, at the time it was charged at."""
        if not self._runs:
            self.oldest_us = at_us
        self._runs.append((at_us, tokens))
        self.tokens += tokens

    def runs(self, rule: Rule) -> Sequence[Run]:
        """What to charge for them; keeps them in no longer form."""
        self._runs = list(ACCOUNTS[rule.algorithm].merged(sorted(self._runs), rule))
        return tuple(self._runs)

    def runs_for_view(self, rule: Rule) -> Sequence[Run]:
        """The same for the node's own view: a token bucket's count from the first of them, and refill since then.

        Charged at the last one, a bucket that was full would be refilled first, for nothing: 14 % wrong denials after
        ten seconds without the store.
        """
        runs = self.runs(rule)
        if runs and rule.algorithm is Algorithm.TOKEN_BUCKET:
            return ((self.oldest_us, self.tokens),)
        return runs

    def remove(self, tokens: int) -> int:
        """Take back the latest spends, up to so many tokens; return how many that were."""
        left = taken = max(0, min(tokens, self.tokens))
        while left:
            at_us, there = self._runs.pop()
            if there > left:
                self._runs.append((at_us, there - left))
            left -= min(there, left)
        self.tokens -= taken
        return taken
