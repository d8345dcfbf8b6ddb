"""What a node has allowed and the store has not acknowledged yet. Never reads a clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from ratelimitd.algorithms.sliding_window import MAX_RUNS
from ratelimitd.ledger.accounts import Run
from ratelimitd.ledger.shared_state import (
    Settled,
    Update,
)
from ratelimitd.model import Algorithm, Limit

_EVER_US: Final = 2**62  # equivalent: any number above every time

_NONE: Final[list[Run]] = []
"""Never written to: most buckets have no earlier runs, and a list less each."""


class Spends:
    """Spends of one bucket under one rule, as runs: those that the algorithm does not tell apart are one.

    So a fixed window has one run for each window, a log one for each time. A token bucket has two at most, whatever was
    spent in between: what spends make of a bucket depends on how many there were, and on what would be missing after
    them if the bucket had been full at first, which sinks with each refill and rises with each spend. Charged all at
    once, at the last time, a bucket that was full would be refilled for nothing before: a node alone at 1.5 times its
    limit would lose a tenth of a limit in each interval of the sync that begins with a full bucket.

    Attributes:
        tokens: how many in all.
        latest_us: when the last was made; means nothing when there is none.
    """

    __slots__ = (
        "_earlier",
        "_earlier_tokens",
        "_missing",
        "_rate",
        "_rule",
        "_until_us",
        "_window_us",
        "latest_us",
        "tokens",
    )

    def __init__(self, rule: Limit) -> None:
        self._adopt(rule)
        self.begin(rule)

    def begin(self, rule: Limit) -> None:
        """Forget what there is, and go on under ``rule``."""
        if rule is not self._rule:
            self._adopt(rule)
        self._earlier = _NONE
        self._earlier_tokens = 0
        self._until_us = 0  # until then a spend belongs to the last run
        # From a bucket that was full at first; a token is window_us units, a µs refills rate of them.
        self._missing = 0  # equivalent: the first spend sets it
        self.tokens = 0
        self.latest_us = 0

    def _adopt(self, rule: Limit) -> None:
        self._rule = rule
        self._window_us = rule.window_us
        self._rate = rule.limit if rule.algorithm is Algorithm.TOKEN_BUCKET else 0

    def __len__(self) -> int:
        """Number of runs."""
        return len(self._earlier) + (self.tokens > 0)

    def add(self, at_us: int, tokens: int) -> None:
        """Add a spend, at the time it was charged at; one that comes late is taken for one of the latest time."""
        if at_us >= self._until_us:
            self._begin_run(at_us)
        elif at_us > self.latest_us:
            missing = self._missing - (at_us - self.latest_us) * self._rate
            self._missing = missing if missing > 0 else 0  # noqa: FURB136 -- max() takes 100 ns longer
            self.latest_us = at_us
        self._missing += tokens * self._window_us
        self.tokens += tokens

    def runs(self) -> Sequence[Run]:
        """What to charge for them, in ascending order."""
        if not self.tokens:
            return ()
        if not self._rate:
            return (*self._earlier, (self.latest_us, self.tokens - self._earlier_tokens))
        refilled = self.tokens * self._window_us - self._missing
        return _two_runs(self.latest_us, self.tokens, refilled, self._window_us, self._rate)

    def resume(self, at_us: int, tokens: int, refilled: int) -> None:
        """Add spends of which a full bucket had refilled so much before the last of them; there must be none yet."""
        self.add(at_us, tokens)
        self._missing -= refilled

    def remove_latest(self, tokens: int) -> int:
        """Take back the latest spends, up to so many tokens; return how many that were."""
        taken = max(0, min(tokens, self.tokens))
        self.tokens -= taken
        # Whatever is left, its last token has just been spent.
        self._missing = max(self._missing - taken * self._window_us, self._window_us)
        while self._earlier and self.tokens <= self._earlier_tokens:
            at_us, there = self._earlier.pop()
            self._earlier_tokens -= there
            self._end_with(at_us)
        if not self.tokens:
            self._until_us = 0  # equivalent: 1, as no spend is as early as that
        return taken

    def remove_oldest(self, tokens: int) -> int:
        """Take back the oldest spends, up to so many tokens; return how many that were."""
        taken = left = max(0, min(tokens, self.tokens))
        self.tokens -= taken
        self._missing = min(self._missing, self.tokens * self._window_us)
        gone = 0
        for gone, (at_us, there) in enumerate(self._earlier):
            if there > left:
                self._earlier[gone] = at_us, there - left
                self._earlier_tokens -= left
                break
            left -= there
            self._earlier_tokens -= there
        else:
            gone = len(self._earlier)
        del self._earlier[:gone]
        if not self.tokens:
            self._until_us = 0  # equivalent: 1, as no spend is as early as that
        return taken

    def _begin_run(self, at_us: int) -> None:
        if self.tokens:
            if self._earlier is _NONE:
                self._earlier = []
            self._earlier.append((self.latest_us, self.tokens - self._earlier_tokens))
            self._earlier_tokens = self.tokens
            if len(self._earlier) >= MAX_RUNS:
                self._merge_neighbours()
        else:
            self._missing = 0
        self._end_with(at_us)

    def _end_with(self, at_us: int) -> None:
        self.latest_us = at_us
        # Spends that the algorithm does not tell apart: of a token bucket all, of a log those of one time.
        if self._rate:
            self._until_us = _EVER_US
        elif self._rule.algorithm is Algorithm.FIXED_WINDOW:
            self._until_us = at_us - at_us % self._window_us + self._window_us
        else:
            self._until_us = at_us + 1

    def _merge_neighbours(self) -> None:
        """Every two runs become one at the later time, as in a log that is too long: it never admits more."""
        runs = self._earlier
        self._earlier = [
            (at_us, before + tokens)
            for (_, before), (at_us, tokens) in zip(runs[::2], runs[1::2], strict=True)
        ]


def _two_runs(  # noqa: PLR0917 -- called for every bucket of a batch
    latest_us: int, tokens: int, refilled: int, window_us: int, rate: int
) -> Sequence[Run]:
    """Spends of a token bucket of which so many units were refilled in between if it had been full at first."""
    if refilled <= 0:
        return ((latest_us, tokens),)
    # So many earlier, and so much earlier, that a full bucket is refilled by just that before the rest.
    earlier = -(-refilled // window_us)
    return ((latest_us - refilled // rate, earlier), (latest_us, tokens - earlier))


MAX_UPDATES: Final = 100
"""Of one batch, as the specification has it."""


LEAST_INTERVAL_US: Final = 10_000
"""Between two batches of a sender: an attacked bucket costs the store 100 calls a second for each node, no more."""


class ColdSpend(NamedTuple):
    """The spend of a bucket without a view, of one check or several.

    Attributes:
        rule: the limit that it was charged under.
        base: the packed state before it.
        at_us: the time of its latest check, in µs.
        cost: its tokens.
        refilled: the units of a token bucket that its checks have found refilled, if it was full at the first.
        checks: how many there were.
    """

    rule: Limit
    base: Any
    at_us: int
    cost: int
    refilled: int = 0
    checks: int = 1

    def runs(self) -> Sequence[Run]:
        """What to charge for it, in ascending order."""
        rule = self.rule
        return _two_runs(self.at_us, self.cost, self.refilled, rule.window_us, rule.limit)


_NO_COLD: Final[Mapping[bytes, Any]] = MappingProxyType({})


class Batch(NamedTuple):
    """What one sender says of up to ``MAX_UPDATES`` buckets; ``sender`` is a node and its incarnation.

    ``cold`` are spends of buckets without a view.
    """

    sender: str
    number: int
    frozen_at_us: int
    updates: Mapping[bytes, Update]
    cold: Mapping[bytes, ColdSpend] = _NO_COLD


class Reply(NamedTuple):
    """What the store answers to a batch; ``cold`` are the packed states of buckets without a view."""

    number: int
    settled: Mapping[bytes, Settled]
    cold: Mapping[bytes, Any] = _NO_COLD


class Sender:
    """The batches of one node to one part of the store.

    Attributes:
        outstanding: the batch that is not acknowledged yet, if there is one.
    """

    __slots__ = ("_frozen_at_us", "_name", "_number", "outstanding")

    def __init__(self, name: str) -> None:
        self._name = name
        self._number = 0
        self._frozen_at_us: int | None = None
        self.outstanding: Batch | None = None

    def wait_us(self, now_us: int) -> int | None:
        """How long the next batch has to wait for its turn; ``None`` while one is outstanding."""
        if self.outstanding is not None:
            return None
        if self._frozen_at_us is None:
            return 0
        # A clock that was set back must not silence the node.
        return min(LEAST_INTERVAL_US, max(0, self._frozen_at_us + LEAST_INTERVAL_US - now_us))

    def freeze(
        self,
        updates: Iterable[tuple[bytes, Update]],
        now_us: int,
        cold: Mapping[bytes, ColdSpend] = _NO_COLD,
    ) -> Batch:
        """Make the next batch. There must be none outstanding, nor more updates than one may have."""
        self._number += 1
        self._frozen_at_us = now_us
        self.outstanding = Batch(self._name, self._number, now_us, dict(updates), cold)
        return self.outstanding

    def acknowledged(self, reply: Reply) -> Batch | None:
        """The batch that a reply acknowledges; ``None`` for one that came before."""
        batch = self.outstanding
        if batch is None or reply.number != batch.number:
            return None
        self.outstanding = None
        return batch
