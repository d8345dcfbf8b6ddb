"""Replays a trace with other rules: the limiter of a node, at the times of the trace, on fresh buckets.

Makes no decisions itself: each check goes to :class:`ratelimitd.limiter.limiter.Limiter`, as bulk checks do. See ADR
0063.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from heapq import merge
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias, cast
from weakref import finalize

from ratelimitd.backtest.recorder import FILE_NAME, PART, WHOLE
from ratelimitd.backtest.trace import End, Kind, Recorded, TraceReader, checks_of
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.table import BucketTable
from ratelimitd.clock import SystemClock
from ratelimitd.counters import CheckStats
from ratelimitd.errors import TraceInvalidError
from ratelimitd.limiter.limiter import Limiter
from ratelimitd.limiter.scopes import Scope
from ratelimitd.model import Check, Decision, Limit, Outcome, Rule
from ratelimitd.rules.assignments import Assignments
from ratelimitd.rules.book import RuleBook

MAX_BUCKETS: Final = 1_000_000
"""A node's default. Beyond it the least recently used buckets are evicted, and counted."""

MAX_OPEN: Final = 200
"""Files that stay open from verification to replay: the oldest, which a recording node may remove meanwhile. The
default limit of a process is 1,024, on macOS 256."""

_SECRET: Final = bytes(32)
"""No secret is needed: callers cannot reach the buckets of a replay."""


class Trace:
    """The complete files of a trace, each verified first, so that no part of a broken trace is replayed.

    ``paths`` are files, or directories, which nodes may still record to; unfinished files are skipped and counted.
    Their order does not matter, and a file with several names is used once. ``first_us`` and ``last_us`` are in µs
    since the Unix epoch.

    Raises:
        TraceInvalidError: a file is incomplete or invalid, the files are of different traces, or there is none.
        OSError: a file cannot be read.
    """

    def __init__(self, *paths: Path) -> None:
        self.checks = self.lost = self.holds = 0
        self.counts: Counter[Kind] = Counter()
        """Checks of each kind, in the order of their numbers."""
        self.share = 1.0
        """The smallest recorded share of identities of all files."""
        self.first_us, self.last_us = 1 << 62, 0
        self._writers: dict[bytes, list[tuple[int, Path, BinaryIO]]] = {}
        """Writer → (start in µs since the Unix epoch, path, the open or closed file) of its files."""
        self._closing = ExitStack()
        finalize(self, self._closing.close)
        self._identities: set[bytes] = set()
        self._trace = b""
        self._inodes: set[tuple[int, int]] = set()
        """Device and inode of the files."""
        unfinished: set[Path] = set()
        for path in paths:
            if path.is_dir():
                unfinished.update(path.resolve().glob(f"*{PART}"))
                for file in sorted(path.glob(f"*{WHOLE}")):
                    with suppress(FileNotFoundError):  # a recording node has removed it
                        self._verify(file)
            else:
                self._verify(path)
        self.unfinished = len(unfinished)
        for begun in self._writers.values():
            begun.sort(key=itemgetter(0, 1))
        if not self.checks:
            message = f"{paths[0]} has no complete trace file; a node completes one every 5 minutes and when it stops"
            raise TraceInvalidError(message)
        self.kinds = [*self.counts]
        self._numbers = {kind: number for number, kind in enumerate(self.kinds)}

    @property
    def identities(self) -> int:
        """Number of first identities."""
        return len(self._identities)

    @property
    def planned(self) -> frozenset[str]:
        """Identifier types of identities with plans."""
        return frozenset(
            kind
            for one in self.kinds
            for kind, plan in zip(one.types, one.plans, strict=False)
            if plan
        )

    def __iter__(self) -> Iterator[Recorded]:
        """Yield the checks in their order; those of several processes are merged by time."""
        streams = [
            chain.from_iterable(self._checks(path, file) for _, path, file in files)
            for files in self._writers.values()
        ]
        return streams[0] if len(streams) == 1 else merge(*streams, key=itemgetter(0))

    def _verify(self, path: Path) -> None:
        file = self._closing.enter_context(path.open("rb"))
        found = os.fstat(file.fileno())
        inode = found.st_dev, found.st_ino  # the same for all names of a file
        if inode in self._inodes:
            file.close()
            return
        self._inodes.add(inode)
        reader = TraceReader(file, str(path))
        if self._trace not in {b"", reader.trace}:
            message = f"{path} belongs to another trace than the files before it"
            raise TraceInvalidError(message)
        self._trace = reader.trace
        # By the node's clock, since the times of checks may be callers'. A renamed file has only the latter.
        named = FILE_NAME.fullmatch(path.name)
        begun_us = int(named[1]) if named else 0
        for block in reader.blocks():
            begun_us = begun_us or block.times[0]
            self.first_us = min(self.first_us, *block.times)
            self.last_us = max(self.last_us, *block.times)
            self.checks += len(block.times)
            self.lost += block.lost
            self._identities.update(block.identities)
            counts = Counter(block.numbers)
            for number, kind in enumerate(block.kinds):
                self.counts[kind] += counts[number]
        self._writers.setdefault(reader.writer, []).append((begun_us, path, file))
        end: End = reader.end  # type: ignore[assignment]  # all blocks have been read
        self.holds += end.holds
        self.share = min(self.share, end.share)
        if len(self._inodes) > MAX_OPEN:
            file.close()

    def _checks(self, path: Path, file: BinaryIO) -> Iterator[Recorded]:
        numbers = self._numbers
        with path.open("rb") if file.closed else nullcontext(file) as found:
            found.seek(0)
            for block in TraceReader(found, str(path)).blocks():
                yield from checks_of(block, [numbers[kind] for kind in block.kinds])


class RecordedPlans(Assignments):
    """The recorded plans of the identities of the check that is being replayed."""

    __slots__ = ("_planned", "current")

    def __init__(self, planned: frozenset[str]) -> None:
        super().__init__()
        self._planned = planned
        self.current: dict[str, str] = {}

    def has_type(self, identifier_type: str) -> bool:
        """Return whether any identity of this type has a plan in the trace."""
        return identifier_type in self._planned

    def plan_of(
        self, identifier_type: str, identifier: bytes, now_us: int
    ) -> tuple[str, int] | None:
        """Return the plan that an identity of this type has in the current check, without its end."""
        del identifier, now_us
        plan = self.current.get(identifier_type, "")
        return (plan, 0) if plan else None


Judged: TypeAlias = Outcome | Decision
"""The result of a check. Allowed, retry delay and reason have the same index in both types."""


class Replayer:
    """Judges the checks of a trace, in their order, by the given rules."""

    def __init__(self, trace: Trace, rules: Sequence[Rule]) -> None:
        self.table = BucketTable(MAX_BUCKETS, callers_time=True)
        self._plans = RecordedPlans(trace.planned)
        self._limiter = Limiter(
            buckets=self.table,
            clock=SystemClock(),
            stats=CheckStats(),
            timestamps="server",
            keys=BucketKeys(_SECRET),
            on_error=_raise,
            assignments=self._plans,
        )
        self._limiter.replace_book(RuleBook.of(rules, 1))
        self._kinds = trace.kinds
        self.scopes = [self._scope(kind) for kind in trace.kinds]
        """The scope of each kind, by its number; ``None`` if no limit judges it."""
        # Plain scopes, which bulk checks charge directly: one bucket, of the first identity, without waiting.
        self._plain = [
            scope
            if scope is not None
            and not (scope.several or scope.windows or kind.peek or kind.max_wait_ms)
            else None
            for kind, scope in zip(trace.kinds, self.scopes, strict=True)
        ]

    def judge(self, check: Recorded) -> Judged:
        """Judge a check by the rules, and charge it."""
        at_us, identity, cost, number, _, further = check
        scope = self._plain[number]
        if scope is not None:
            # A node's own buckets always return an outcome.
            return cast("Judged", self._limiter.charge(identity, scope, at_us, cost))
        kind = self._kinds[number]
        self._plans.current = dict(zip(kind.types, kind.plans, strict=False))
        also = tuple(zip(kind.types[1:], further, strict=True))
        asked = Check(
            identity, kind.types[0], kind.endpoint, cost, 0, kind.peek, also, kind.max_wait_ms
        )
        return cast("Judged", self._limiter.check(asked, at_us))

    def limit_of(self, check: Recorded, judged: Judged) -> tuple[Rule | None, Limit | None, str]:
        """Return the rule and the limit that decided a check, and its plan."""
        scope = self._plain[check[3]]
        if scope is not None:
            return scope.rule, scope.rule_limit, scope.plan
        decision = cast("Decision", judged)
        return decision.rule, decision.limit, decision.plan

    def _scope(self, kind: Kind) -> Scope | None:
        self._plans.current = dict(zip(kind.types, kind.plans, strict=False))
        also = tuple([(one, b"") for one in kind.types[1:]])
        asked = Check(b"", kind.types[0], kind.endpoint, also=also)
        resolved = self._limiter.scopes.resolve_check(asked, 0)
        return resolved if isinstance(resolved, Scope) else None


def _raise(error: Exception) -> None:
    """End the replay with an error that a node would answer fail-open."""
    raise error
