"""Spends that the store has not acknowledged yet, and the batches that carry them. Reads no clock."""

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
"""Never modified; saves a list for most buckets, which have no earlier runs."""


class Spends:
    """Spends of one bucket under one rule, as runs: spends that the algorithm does not distinguish are one run.

    A fixed window has one run for each window, a log one for each time, and a token bucket at most two. The effect of
    spends on a token bucket depends only on their sum, and on the amount missing after them if the bucket was full
    before, which falls with each refill and rises with each spend. If all were charged at the last time, a full bucket
    would lose the refill before: a single node at 1.5 times its limit would lose a tenth of a limit in each sync
    interval that begins with a full bucket.

    Attributes:
        tokens: sum of all spends.
        latest_us: time of the last spend; undefined without any.
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
        """Drop all spends, and continue under ``rule``."""
        if rule is not self._rule:
            self._adopt(rule)
        self._earlier = _NONE
        self._earlier_tokens = 0
        self._until_us = 0  # until then a spend belongs to the last run
        # If the bucket was full before; in units, window_us to a token, of which a µs refills _rate.
        self._missing = 0  # equivalent: the first spend sets it
        self.tokens = 0
        self.latest_us = 0

    def _adopt(self, rule: Limit) -> None:
        self._rule = rule
        self._window_us = rule.window_us
        self._rate = rule.limit if rule.algorithm is Algorithm.TOKEN_BUCKET else 0

    def __len__(self) -> int:
        """Return the number of earlier runs, plus one for the last if there are spends."""
        return len(self._earlier) + (self.tokens > 0)

    def add(self, at_us: int, tokens: int) -> None:
        """Add a spend at the time of its charge; a late one counts as made at the latest time."""
        if at_us >= self._until_us:
            self._begin_run(at_us)
        elif at_us > self.latest_us:
            missing = self._missing - (at_us - self.latest_us) * self._rate
            self._missing = missing if missing > 0 else 0  # noqa: FURB136 -- max() takes 100 ns longer
            self.latest_us = at_us
        self._missing += tokens * self._window_us
        self.tokens += tokens

    def runs(self) -> Sequence[Run]:
        """Return the runs to charge, in ascending order."""
        if not self.tokens:
            return ()
        if not self._rate:
            return (*self._earlier, (self.latest_us, self.tokens - self._earlier_tokens))
        refilled = self.tokens * self._window_us - self._missing
        return _two_runs(self.latest_us, self.tokens, refilled, self._window_us, self._rate)

    def resume(self, at_us: int, tokens: int, refilled: int) -> None:
        """Add the first spends; if the bucket was full, ``refilled`` units were refilled before the last one."""
        self.add(at_us, tokens)
        self._missing -= refilled

    def remove_latest(self, tokens: int) -> int:
        """Remove the latest spends, up to ``tokens``; return the number removed."""
        taken = max(0, min(tokens, self.tokens))
        self.tokens -= taken
        # At least the last token left has just been spent.
        self._missing = max(self._missing - taken * self._window_us, self._window_us)
        while self._earlier and self.tokens <= self._earlier_tokens:
            at_us, there = self._earlier.pop()
            self._earlier_tokens -= there
            self._end_with(at_us)
        if not self.tokens:
            self._until_us = 0  # equivalent: 1, as no spend is as early as that
        return taken

    def remove_oldest(self, tokens: int) -> int:
        """Remove the oldest spends, up to ``tokens``; return the number removed."""
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
        # The algorithm does not distinguish the spends of a run: all of a token bucket, those of one time in a log.
        if self._rate:
            self._until_us = _EVER_US
        elif self._rule.algorithm is Algorithm.FIXED_WINDOW:
            self._until_us = at_us - at_us % self._window_us + self._window_us
        else:
            self._until_us = at_us + 1

    def _merge_neighbours(self) -> None:
        """Merge every two runs at the later time, as in a log that is too long; this never admits more."""
        runs = self._earlier
        self._earlier = [
            (at_us, before + tokens)
            for (_, before), (at_us, tokens) in zip(runs[::2], runs[1::2], strict=True)
        ]


def _two_runs(  # noqa: PLR0917 -- called for every bucket of a batch
    latest_us: int, tokens: int, refilled: int, window_us: int, rate: int
) -> Sequence[Run]:
    """Return the spends of a token bucket as runs; if it was full before, ``refilled`` units were refilled between."""
    if refilled <= 0:
        return ((latest_us, tokens),)
    # As many tokens earlier, and as much earlier, as refill a full bucket by this amount before the rest.
    earlier = -(-refilled // window_us)
    return ((latest_us - refilled // rate, earlier), (latest_us, tokens - earlier))


MAX_UPDATES: Final = 100
"""Updates of one batch, as specified."""


LEAST_INTERVAL_US: Final = 10_000
"""Interval between two batches of a sender: an attacked bucket costs the store at most 100 calls a second per node."""


class ColdSpend(NamedTuple):
    """The spend of one or several checks on a bucket without a view.

    Attributes:
        rule: the limit under which it was charged.
        base: the packed state before it.
        at_us: time of the latest check, in µs.
        cost: tokens.
        refilled: units that a token bucket was refilled between the checks, if it was full at the first.
        checks: number of checks.
    """

    rule: Limit
    base: Any
    at_us: int
    cost: int
    refilled: int = 0
    checks: int = 1

    def runs(self) -> Sequence[Run]:
        """Return the runs to charge, in ascending order."""
        rule = self.rule
        return _two_runs(self.at_us, self.cost, self.refilled, rule.window_us, rule.limit)


_NO_COLD: Final[Mapping[bytes, Any]] = MappingProxyType({})


class Batch(NamedTuple):
    """The updates of one sender for up to ``MAX_UPDATES`` buckets; ``sender`` names a node and its incarnation.

    ``cold`` are spends on buckets without a view.
    """

    sender: str
    number: int
    frozen_at_us: int
    updates: Mapping[bytes, Update]
    cold: Mapping[bytes, ColdSpend] = _NO_COLD


class Reply(NamedTuple):
    """The store's answer to a batch; ``cold`` are the packed states of buckets without a view."""

    number: int
    settled: Mapping[bytes, Settled]
    cold: Mapping[bytes, Any] = _NO_COLD


class Sender:
    """The batches of one node to one part of the store.

    Attributes:
        outstanding: the batch that is not acknowledged yet, if any.
    """

    __slots__ = ("_frozen_at_us", "_name", "_number", "outstanding")

    def __init__(self, name: str) -> None:
        self._name = name
        self._number = 0
        self._frozen_at_us: int | None = None
        self.outstanding: Batch | None = None

    def wait_us(self, now_us: int) -> int | None:
        """Return the µs until the next batch may be sent; ``None`` while one is outstanding."""
        if self.outstanding is not None:
            return None
        if self._frozen_at_us is None:
            return 0
        # A clock that was set back must not stop the node from sending.
        return min(LEAST_INTERVAL_US, max(0, self._frozen_at_us + LEAST_INTERVAL_US - now_us))

    def freeze(
        self,
        updates: Iterable[tuple[bytes, Update]],
        now_us: int,
        cold: Mapping[bytes, ColdSpend] = _NO_COLD,
    ) -> Batch:
        """Make the next batch. None may be outstanding, and the updates must fit into one batch."""
        self._number += 1
        self._frozen_at_us = now_us
        self.outstanding = Batch(self._name, self._number, now_us, dict(updates), cold)
        return self.outstanding

    def acknowledged(self, reply: Reply) -> Batch | None:
        """Return the batch that a reply acknowledges; ``None`` if the reply is not to the outstanding one."""
        batch = self.outstanding
        if batch is None or reply.number != batch.number:
            return None
        self.outstanding = None
        return batch
