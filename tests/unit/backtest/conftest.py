"""A limiter whose checks are recorded, with a manual clock."""

import pytest

from ratelimitd.backtest.recorder import TraceRecorder
from ratelimitd.backtest.replay import Trace
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.table import BucketTable
from ratelimitd.counters import CheckStats
from ratelimitd.limiter.limiter import Limiter
from ratelimitd.model import Check
from ratelimitd.rules.assignments import Assignments
from ratelimitd.rules.book import RuleBook
from ratelimitd.testing import ManualClock

CHECK = Check(b"alice@example.org", "user", "/orders")


class Recording:
    """One process that records into a directory, with its collaborators."""

    def __init__(
        self, directory, *rules, share=1.0, max_bytes=1 << 24, workers=1, secret=b"k" * 32
    ):
        self.directory = directory
        self.clock, self.stats, self.assignments = ManualClock(), CheckStats(), Assignments()
        self.keys = BucketKeys(secret)
        self.recorder = TraceRecorder(
            directory,
            keys=self.keys,
            assignments=self.assignments,
            clock=self.clock,
            stats=self.stats,
            share=share,
            max_bytes=max_bytes,
            workers=workers,
        )
        self.limiter = Limiter(
            buckets=BucketTable(100_000, callers_time=True),
            clock=self.clock,
            stats=self.stats,
            timestamps="caller",
            keys=self.keys,
            assignments=self.assignments,
            recorder=self.recorder,
        )
        if rules:
            self.put(*rules)

    def put(self, *rules):
        self.limiter.replace_book(RuleBook.of(rules, 1))

    def ask(self, times=1):
        for _ in range(times):
            self.limiter.check(CHECK)

    async def trace(self):
        """Return the trace recorded so far."""
        await self.recorder.drain()
        return Trace(self.directory)

    def kill(self):
        """End the process while it writes a file."""
        self.recorder._file.close()

    @property
    def size(self):
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.directory.iterdir())

    @property
    def files(self):
        """Names of the files with checks."""
        return sorted(one.name for one in self.directory.iterdir() if one.name != "trace-id")


@pytest.fixture
def record(tmp_path):
    return lambda *rules, **options: Recording(tmp_path / "trace", *rules, **options)
