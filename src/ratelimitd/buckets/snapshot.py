"""Preserves the buckets across restarts: an append-only log of used buckets, and a base that replaces older logs.

Owns the bucket files of the state directory and schedules their writes. See ADR 0015; the format is in
:mod:`ratelimitd.buckets.snapshot_format`.

Every ``PASS_S`` a pass visits each shard of the table once and appends the buckets used since the last visit to
``buckets-N.log``: a killed node loses at most the spends since then. A reset is appended immediately, and is on disk
before it is answered. One thread does all appends in the order of the event loop, so that no restart can replace a
reset by an older state.

After a start with older files, when the log outgrows its base, and when the log was removed, a pass also writes all
buckets to ``buckets-N+1.base``, renamed when complete, while appends already go to ``buckets-N+1.log``; then older
files are removed. A restored bucket that is used while the base is written moves to the table, and the copy may miss
both of its places, so each shard is visited once more before the base is published.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Final

from ratelimitd.buckets import snapshot_format
from ratelimitd.buckets.appender import Appender
from ratelimitd.buckets.holds import Change, GivenBack, OwnHolds
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.restore import Restored, base_path, log_path, restore, set_aside
from ratelimitd.buckets.snapshot_format import Value
from ratelimitd.buckets.table import BucketTable
from ratelimitd.clock import Clock
from ratelimitd.errors import StartupError, StoreUnavailableError
from ratelimitd.model import US_PER_S

PASS_S: Final = 8
"""Duration of a pass, and the longest wait of a spend; leaves 7 s of the documented 15 s to a slow disk."""

WAKES_PER_S: Final = 50
"""Wake-ups of a pass per second, each for a few shards, so that an idle node stays idle."""

STEP_BUCKETS: Final = 200
STEP_HOLDS: Final = 20
STEP_BYTES: Final = 256 * 1024
"""Buckets, holds (or buckets with holds), and bytes encoded per event-loop iteration: 0.3 ms of the documented 2 ms."""

WRITE_BYTES: Final = 256 * 1024
"""Bytes per write to a base; copying them takes 0.05 ms."""

MIN_LOG_BYTES: Final = 16 * 1024 * 1024
LOG_PER_BASE: Final = 3
"""A new base is due when the log is this many times the size of the base and above ``MIN_LOG_BYTES``."""

BASE_RETRY_US: Final = 60 * US_PER_S
"""Delay after a failed base, which leaves the rest of the disk to the log."""

Pace = Callable[[int, int], Awaitable[None]]
Write = Callable[[bytes], Awaitable[None]]

_log = logging.getLogger(__name__)


class SnapshotLog:
    """The bucket files of one node. Made by :meth:`open`; :meth:`run` is a background task; :meth:`drain` ends it."""

    def __init__(
        self,
        directory: Path,
        table: BucketTable,
        keys: BucketKeys,
        *,
        header: bytes,
        clock: Clock,
        restored: Restored,
    ) -> None:
        self.errors_total = 0
        self.written_bytes_total = 0
        self._last_pass_us = clock.monotonic_us()
        self._directory = directory
        self._table = table
        self._keys = keys
        self._header = header
        self._clock = clock
        self._restored = restored.buckets
        self._outdated = restored.read
        self._torn = restored.torn
        self._number = restored.next_number
        self._base_bytes = 0
        self._failing = False
        self._no_base_before_us = 0
        self._log = Appender(log_path(directory, self._number), header)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="bucket-log")
        self._since = [0] * table.shard_count
        table.adopt(self._restored)
        if table.apart is not None:
            table.apart.restore(restored.holds)

    @classmethod
    def open(
        cls,
        directory: Path,
        table: BucketTable,
        key_secret: bytes,
        clock: Clock,
        *,
        callers_time: bool = False,
    ) -> SnapshotLog:
        """Read the buckets of an earlier run in ``directory`` into ``table``, and begin a new log.

        Takes about 2 s for a million buckets. Torn and foreign files are logged.

        Raises:
            StartupError: the directory cannot be written.
        """
        keys, header = BucketKeys(key_secret), snapshot_format.header(key_secret)
        try:
            restored = restore(directory, keys, header, None if callers_time else clock.now_us())
            return cls(directory, table, keys, header=header, clock=clock, restored=restored)
        except OSError as error:
            message = f"the state directory {directory} cannot be written: {error.strerror}"
            raise StartupError(message) from error

    async def reset(self, keys: Sequence[bytes]) -> None:
        """Record that the buckets of ``keys`` are reset, on disk when this returns; ordered at the call.

        Raises:
            StoreUnavailableError: the log cannot be written.
        """
        try:
            await self._append(
                snapshot_format.encode_resets(map(self._keys.stored, keys)), durable=True
            )
        except OSError as error:
            message = "the state directory cannot be written"
            raise StoreUnavailableError(message) from error

    @property
    def age_s(self) -> float:
        """Time since the last complete pass."""
        return (self._clock.monotonic_us() - self._last_pass_us) / US_PER_S

    async def run(self) -> None:
        """Write passes until cancelled. A failure is counted and logged once; the next pass retries."""
        while True:
            started_us = self._clock.monotonic_us()
            await self.write_pass(pace=self._pace_from(started_us))
            await asyncio.sleep(
                max(0, PASS_S - (self._clock.monotonic_us() - started_us) / US_PER_S)
            )

    async def write_pass(self, *, pace: Pace | None = None) -> None:
        """Append every bucket used since the last visit; write a new base when it is due.

        Awaits ``pace(step, steps)`` before each step, or yields to the loop without one.
        """
        pace = pace or _yield
        if (holds := self._table.apart) is not None:
            # The pass visits all shards, but restored buckets only for a base.
            holds.give_back_again([one for one in holds.given_back() if one[1] is None])
        try:
            if self._base_is_due():
                await self._write_base(pace)
            else:
                for index in range(self._table.shard_count):
                    await pace(index, self._table.shard_count)
                    await self._visit(index)
                await self._write_holds()
        except OSError as error:
            self._note_failure(error)
        else:
            self._last_pass_us = self._clock.monotonic_us()
            if self._failing and not self._no_base_before_us:  # recovered, and no base is due
                _log.warning("buckets can be written again")
                self._failing = False

    async def drain(self) -> None:
        """Append the remaining changes, sync to disk, and close. The task of :meth:`run` must have ended."""
        for index in range(self._table.shard_count):
            try:
                await self._visit(index)
            except OSError as error:
                self._note_failure(error)
                break
        try:
            await self._write_holds()
            await self._append(b"", durable=True)
        except OSError as error:
            self._note_failure(error)
        await asyncio.get_running_loop().run_in_executor(self._writer, self._log.close)
        self._writer.shutdown()

    def _pace_from(self, started_us: int) -> Pace:
        async def pace(step: int, steps: int) -> None:
            # equivalent: the remainder is 0 for the same steps if the divisor is negative
            if step % -(-steps // (PASS_S * WAKES_PER_S)):
                # Yields: a base has 14 steps per wake-up, of up to 0.2 ms each.
                await asyncio.sleep(0)
                return
            due_us = started_us + PASS_S * US_PER_S * step // steps
            await asyncio.sleep(max(0, due_us - self._clock.monotonic_us()) / US_PER_S)

        return pace

    async def _visit(self, index: int) -> None:
        """Append the buckets of shard ``index`` used since the last visit."""
        tick = self._table.tick
        await _write(self._live(self._table.keys(index, self._since[index])), self._append)
        self._since[index] = tick

    async def _write_holds(self) -> None:
        """Append changed holds, and changed buckets kept apart for them, one step per event-loop iteration.

        Only to the log: such a bucket must follow the log's earlier values of it.
        """
        holds = self._table.apart
        if holds is None:
            return
        # Later changes are left to the next pass, since they may arrive as fast as they are written.
        left = holds.unwritten
        while left > 0 and (changes := holds.changes(STEP_HOLDS, STEP_BYTES)):
            left -= len(changes)
            await self._append_changes(holds, changes)
        # These may have been kept apart when their shards were visited, and be in the table now.
        buckets = holds.given_back()
        for start in range(0, len(buckets), STEP_HOLDS):
            some = buckets[start : start + STEP_HOLDS]
            values = snapshot_format.encode_values(self._back(some))
            try:
                await self._append_changes(holds, holds.changes_of(dict(some)), values)
            except OSError:
                holds.give_back_again(buckets[start:])
                raise

    async def _append_changes(
        self, holds: OwnHolds, changes: Sequence[Change], values: bytes = b""
    ) -> None:
        try:
            await self._append(values + snapshot_format.encode_holds(changes))
        except OSError:
            holds.change_again(changes)
            raise

    def _back(self, buckets: Iterable[GivenBack]) -> Iterator[tuple[bytes, Value]]:
        """Yield the current (stored key, value) of buckets returned to the table; skip those no longer there."""
        for name, key in buckets:
            value = self._table.restored_value(name) if key is None else self._table.value(key)
            if value is not None:
                yield name, value

    def _live(self, keys: list[bytes]) -> Iterator[tuple[bytes, Value]]:
        """Yield the current (stored key, value) of ``keys``; skip buckets that are gone."""
        for key in keys:
            value = self._table.value(key)
            if value is not None:
                yield self._keys.stored(key), value

    async def _append(self, data: bytes, *, durable: bool = False) -> None:
        log, loop = self._log, asyncio.get_running_loop()
        await loop.run_in_executor(self._writer, lambda: log.append(data, durable=durable))
        self.written_bytes_total += len(data)

    def _base_is_due(self) -> bool:
        if self._clock.monotonic_us() < self._no_base_before_us:
            return False
        outgrown = self._log.size > max(MIN_LOG_BYTES, LOG_PER_BASE * self._base_bytes)
        return outgrown or self._log.removed or bool(self._outdated or self._torn)

    async def _write_base(self, pace: Pace) -> None:
        """Write every bucket, visit each shard again, and replace the older files by the base."""
        self._no_base_before_us = self._clock.monotonic_us() + BASE_RETRY_US
        base = self._begin_base()
        writer, shards = _BaseWriter(base), self._table.shard_count
        restored_shards = self._restored.shard_count
        steps = 2 * shards + restored_shards
        try:
            for step in range(steps):
                await pace(step, steps)
                if step < shards:
                    await self._visit(step)
                    await _write(self._live(self._table.keys(step)), writer.add)
                elif step < shards + restored_shards:
                    await _write(iter(self._restored.items(step - shards)), writer.add)
                else:
                    if step == shards + restored_shards and self._table.apart is not None:
                        self._table.apart.change_all()
                        await self._write_holds()
                    await self._visit(step - shards - restored_shards)
            await self._write_holds()
            await writer.flush()
            await self._append(b"", durable=True)
            await asyncio.to_thread(base.publish, base_path(self._directory, self._number))
        except OSError:
            base.discard()
            raise
        # Not in a `finally`: a cancelled pass may leave a thread that still writes.
        base.close()
        # Holds and their buckets are only in the log, and no base shortens that.
        self._base_bytes = base.size + (self._log.size if self._table.apart else 0)
        await asyncio.to_thread(self._remove_outdated)
        self._no_base_before_us = 0

    def _begin_base(self) -> Appender:
        """Switch to the next log, and begin the base that replaces older files."""
        number = self._number + 1
        base = Appender(base_path(self._directory, number).with_suffix(".tmp"), self._header)
        try:
            log = Appender(log_path(self._directory, number), self._header)
        except OSError:
            base.discard()
            raise
        self._outdated += [self._log.path]
        if self._base_bytes:
            self._outdated += [base_path(self._directory, self._number)]
        self._writer.submit(self._log.close)  # after the appends before it
        self._log, self._number = log, number
        return base

    def _remove_outdated(self) -> None:
        for path in self._outdated:
            path.unlink(missing_ok=True)
        set_aside(self._torn, ".torn")
        self._outdated, self._torn = [], []

    def _note_failure(self, error: OSError) -> None:
        self.errors_total += 1
        if not self._failing:
            _log.warning("buckets cannot be written: %s", error.strerror)
        self._failing = True


async def _write(items: Iterator[tuple[bytes, Value]], write: Write) -> None:
    """Write (stored key, value) pairs, one batch per event-loop iteration."""
    while batch := _next_batch(items):
        await write(snapshot_format.encode_values(batch))


def _next_batch(items: Iterator[tuple[bytes, Value]]) -> list[tuple[bytes, Value]]:
    batch, log_bytes = [], 0
    for stored_key, value in islice(items, STEP_BUCKETS):
        batch.append((stored_key, value))
        # equivalent: the size of a step is not observable
        log_bytes += len(value) if isinstance(value, bytes) else 0
        if log_bytes >= STEP_BYTES:  # equivalent: as above
            break
    return batch


class _BaseWriter:
    """Buffers writes to a base, because a thread switch takes milliseconds under load.

    Not for the log, whose chunks must keep their order relative to resets.
    """

    def __init__(self, base: Appender) -> None:
        self._base = base
        self._buffer: list[bytes] = []
        self._size = 0

    async def add(self, data: bytes) -> None:
        """Write ``data`` now or later, and yield to the event loop."""
        self._buffer.append(data)
        self._size += len(data)
        if self._size < WRITE_BYTES:
            await asyncio.sleep(0)
        else:
            await self.flush()

    async def flush(self) -> None:
        """Write the buffer."""
        data = b"".join(self._buffer)
        self._buffer, self._size = [], 0
        await asyncio.to_thread(self._base.append, data)


async def _yield(_step: int, _steps: int) -> None:
    await asyncio.sleep(0)
