"""Carries the buckets over a restart: an append-only log of what was used, and a base that makes it short again.

Owns the bucket files of the state directory and the rhythm in which they are written. Never decides anything about a
check. See ADR 0015; the form of the files is ``chunks.py``, reading them is ``restore.py``.

How it works. Every ``PASS_S`` each shard of the table is looked at once, and its buckets that were used since the last
look are appended to ``buckets-N.log``: a node that is killed forgets at most the spends since then. A reset is appended
at once, and is on disk before it is answered. All appends go through one thread in the order in which the event loop
gave them, so that the order of the file is the order of events, and no restart can put an older state over a reset.

After every start, when the log has outgrown its base, and when somebody removed the log, a pass also writes all buckets
to ``buckets-N+1.base``, aside and renamed when it is complete, while appends already go to ``buckets-N+1.log``. Only
then are the files of before removed. A bucket of before the restart that is used while the base is being written may be
in neither of its places when that is copied; so each shard is looked at once more before the base counts.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final

from ratelimitd.buckets import restored as cold
from ratelimitd.buckets import snapshot_format
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.restore import Restored, base_path, log_path, restore, set_aside
from ratelimitd.buckets.snapshot_format import Value
from ratelimitd.buckets.table import BucketTable
from ratelimitd.clock import Clock
from ratelimitd.errors import StartupError, StoreUnavailableError
from ratelimitd.model import US_PER_S

# One file that only ever grows, and never keeps half of what was to be appended.
#
# Blocking; meant for a thread. Never knows what the bytes mean.


class Appender:
    """A new file with ``header``, readable by its owner alone.

    Raises:
        OSError: from every method that writes, when the file cannot be written.
    """

    def __init__(self, path: Path, header: bytes) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self.size = 0
        self._name_is_durable = False
        try:
            self.append(header)
        except OSError:
            self.discard()
            raise

    @property
    def removed(self) -> bool:
        """Whether the file has lost its name: somebody removed it, perhaps with its directory."""
        return not os.fstat(self._fd).st_nlink

    def append(self, data: bytes, *, durable: bool = False) -> None:
        """Append ``data``, whole or not at all; with ``durable`` it is on disk before this returns.

        A file that was removed meanwhile takes nothing more: what is written there, nobody will find.
        """
        if self.removed:
            raise OSError(errno.ENOENT, "the file was removed while it was in use")
        try:
            written = 0
            while written < len(data):
                # At a place, not at the end: half a chunk that could not be cut off must not come before the next one.
                written += os.pwrite(self._fd, memoryview(data)[written:], self.size + written)
            if durable:
                os.fdatasync(self._fd)
                self._sync_name()
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._fd, self.size)
            raise
        self.size += len(data)

    def publish(self, name: Path) -> None:
        """Put everything on disk and give the file its name, at once for every reader."""
        os.fsync(self._fd)
        self.path.rename(name)
        self.path = name
        self._name_is_durable = False
        self._sync_name()

    def close(self) -> None:
        """Close the file; what was not appended durably is on disk when the system gets to it."""
        os.close(self._fd)

    def discard(self) -> None:
        """Close the file and remove it."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _sync_name(self) -> None:
        """Put the file's entry in its directory on disk: a synced file without a name would be lost with the power."""
        if self._name_is_durable:
            return
        directory_fd = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory_fd)
        finally:
            os.close(directory_fd)
        self._name_is_durable = True


PASS_S: Final = 8
"""Time for one look at every shard: a spend waits that long at most, and the promised 15 s leave a slow disk 7 s."""

WAKES_PER_S: Final = 50
"""A pass wakes that often at most, for a few shards at a time: an idle node should be idle."""

TURN_BUCKETS: Final = 200
TURN_BYTES: Final = 256 * 1024
"""What is encoded between two yields to the event loop: about 0.3 ms of work (2 ms is the promise)."""

WRITE_BYTES: Final = 256 * 1024
"""What is written to a base at once: a copy of 0.05 ms."""

MIN_LOG_BYTES: Final = 16 * 1024 * 1024
LOG_PER_BASE: Final = 3
"""The log is made short again when it is this many times its base, and not below ``MIN_LOG_BYTES``."""

BASE_RETRY_US: Final = 60 * US_PER_S
"""Pause after a base that could not be written: what room the disk has left is for the log meanwhile."""

Pace = Callable[[int, int], Awaitable[None]]
Write = Callable[[bytes], Awaitable[None]]


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
        report: Callable[[str], None],
    ) -> None:
        self.reports = restored.reports
        """What was wrong with the files that were found, one line each."""
        self.errors_total = 0
        self.written_bytes_total = 0
        self.last_pass_us = clock.monotonic_us()
        """When the last complete pass ended, on the monotonic clock."""
        self._directory = directory
        self._table = table
        self._keys = keys
        self._header = header
        self._clock = clock
        self._cold = restored.buckets
        self._outdated = restored.files
        self._torn = restored.torn
        self._number = restored.next_number
        self._base_bytes = 0
        self._report = report
        self._failing = False
        self._no_base_before_us = 0
        self._log = Appender(log_path(directory, self._number), header)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="bucket-log")
        self._since = [0] * table.shard_count
        table.adopt(self._cold)

    @classmethod
    def open(
        cls,
        directory: Path,
        table: BucketTable,
        key_secret: bytes,
        clock: Clock,
        *,
        callers_time: bool = False,
        report: Callable[[str], None] = lambda _line: None,
    ) -> SnapshotLog:
        """Read what an earlier node left in ``directory``, give it to ``table``, and begin a new log.

        Takes about 2 s for a million buckets. A file that is torn or foreign is reported in ``reports``, not an error.
        ``report`` takes a line when writing starts to fail and when it recovers, never at each attempt.

        Raises:
            StartupError: the directory cannot be written.
        """
        keys, header = BucketKeys(key_secret), snapshot_format.header(key_secret)
        try:
            restored = restore(directory, keys, header, None if callers_time else clock.now_us())
            return cls(
                directory, table, keys, header=header, clock=clock, restored=restored, report=report
            )
        except OSError as error:
            message = f"the state directory {directory} cannot be written: {error.strerror}"
            raise StartupError(message) from error

    async def reset(self, keys: Sequence[bytes]) -> None:
        """Write that the buckets of ``keys`` start afresh; they are on disk when this returns.

        Takes its place in the order of events before the first suspension.

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

    async def run(self) -> None:
        """Write passes for ever. What cannot be written is counted, reported once, and tried again by the next pass."""
        while True:
            started_us = self._clock.monotonic_us()
            await self.write_pass(pace=self._pace_from(started_us))
            await asyncio.sleep(
                max(0, PASS_S - (self._clock.monotonic_us() - started_us) / US_PER_S)
            )

    async def write_pass(self, *, pace: Pace | None = None) -> None:
        """Append every bucket used since the last look; with a new base when it is time for one.

        ``pace(step, steps)`` is awaited before each of the steps; without it the pass only yields.
        """
        pace = pace or _yield
        try:
            if self._base_is_due():
                await self._write_base(pace)
            else:
                for index in range(self._table.shard_count):
                    await pace(index, self._table.shard_count)
                    await self._look(index)
        except OSError as error:
            self._note_failure(error)
        else:
            self.last_pass_us = self._clock.monotonic_us()
            if (
                self._failing and not self._no_base_before_us
            ):  # while a base is owed, nothing has recovered
                self._report("buckets can be written again")
                self._failing = False

    async def drain(self) -> None:
        """Append what is not yet written, put it on disk, and close. The task of :meth:`run` must have ended."""
        for index in range(self._table.shard_count):
            try:
                await self._look(index)
            except OSError as error:
                self._note_failure(error)
                break
        try:
            await self._append(b"", durable=True)
        except OSError as error:
            self._note_failure(error)
        await asyncio.get_running_loop().run_in_executor(self._writer, self._log.close)
        self._writer.shutdown()

    def _pace_from(self, started_us: int) -> Pace:
        async def pace(step: int, steps: int) -> None:
            if step % -(-steps // (PASS_S * WAKES_PER_S)):
                await asyncio.sleep(
                    0
                )  # no wait, but a turn: a base has 14 steps to a wake, each up to 0.2 ms
                return
            due_us = started_us + PASS_S * US_PER_S * step // steps
            await asyncio.sleep(max(0, due_us - self._clock.monotonic_us()) / US_PER_S)

        return pace

    async def _look(self, index: int) -> None:
        """Append the buckets of shard ``index`` that were used since the last look at it."""
        tick = self._table.tick
        await _write(self._live(self._table.keys(index, self._since[index])), self._append)
        self._since[index] = tick

    def _live(self, keys: list[bytes]) -> Iterator[tuple[bytes, Value]]:
        """What the buckets of ``keys`` hold when their turn comes; one that was reset meanwhile is left out."""
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
        """Write every bucket where it is, look at each shard once more, and let the base replace the older files."""
        self._no_base_before_us = self._clock.monotonic_us() + BASE_RETRY_US
        base = self._begin_base()
        writes, shards = _Writes(base), self._table.shard_count
        steps = 2 * shards + cold.SHARDS
        try:
            for step in range(steps):
                await pace(step, steps)
                if step < shards:
                    await self._look(step)
                    await _write(self._live(self._table.keys(step)), writes.add)
                elif step < shards + cold.SHARDS:
                    await _write(iter(self._cold.items(step - shards)), writes.add)
                else:
                    await self._look(step - shards - cold.SHARDS)
            await writes.flush()
            await self._append(b"", durable=True)
            await asyncio.to_thread(base.publish, base_path(self._directory, self._number))
        except OSError:
            base.discard()
            raise
        # Not in a `finally`: when the node stops in between, a thread may still be writing.
        base.close()
        self._base_bytes = base.size
        await asyncio.to_thread(self._remove_outdated)
        self._no_base_before_us = 0

    def _begin_base(self) -> Appender:
        """Turn to the next log, and begin the base that makes the files of before superfluous."""
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
        self._writer.submit(self._log.close)  # after what was appended to it
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
            self._report(f"buckets cannot be written: {error.strerror}")
        self._failing = True


async def _write(items: Iterator[tuple[bytes, Value]], write: Write) -> None:
    """Write the (stored key, value) pairs, so many at a time that the event loop gets its turn in between."""
    while turn := _next_turn(items):
        await write(snapshot_format.encode_values(turn))


def _next_turn(items: Iterator[tuple[bytes, Value]]) -> list[tuple[bytes, Value]]:
    turn, log_bytes = [], 0
    for stored_key, value in islice(items, TURN_BUCKETS):
        turn.append((stored_key, value))
        log_bytes += len(value) if isinstance(value, bytes) else 0
        if log_bytes >= TURN_BYTES:
            break
    return turn


class _Writes:
    """Writes to a base, gathered until they are worth a switch of threads: under load one takes milliseconds.

    Only for a base, whose chunks have no order: what goes to the log keeps its place among the resets.
    """

    def __init__(self, base: Appender) -> None:
        self._base = base
        self._gathered: list[bytes] = []
        self._size = 0

    async def add(self, data: bytes) -> None:
        """Write ``data`` now or later, and give the event loop its turn."""
        self._gathered.append(data)
        self._size += len(data)
        if self._size < WRITE_BYTES:
            await asyncio.sleep(0)
        else:
            await self.flush()

    async def flush(self) -> None:
        """Write what was gathered."""
        data = b"".join(self._gathered)
        self._gathered, self._size = [], 0
        await asyncio.to_thread(self._base.append, data)


async def _yield(_step: int, _steps: int) -> None:
    await asyncio.sleep(0)
