"""Records the checks of a node into a trace, outside the check path, with bounded memory and disk space.

The check path computes a checksum of the identifier, which decides whether the check is recorded, and if so appends it
to a queue. A job replaces identifiers by digests, and a thread writes full blocks. Checks beyond the bounds are lost,
and counted.

A file is written as ``*.part``, locked by its writer, and renamed when complete, after ``FILE_S`` seconds or a part of
the bound. Processes that record into one directory write one trace; when it is full, the oldest files are removed. See
ADR 0063.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar
from zlib import crc32

from ratelimitd.backtest.trace import (
    HEADER_BYTES,
    IDENTITY_BYTES,
    TRACE_BYTES,
    WRITER_BYTES,
    Block,
    End,
    Kind,
    encode_block,
    encode_end,
    header,
)
from ratelimitd.buckets.appender import Appender
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.state_dir import is_held, why
from ratelimitd.clock import Clock
from ratelimitd.counters import CheckStats
from ratelimitd.errors import StartupError
from ratelimitd.model import US_PER_S, Check
from ratelimitd.rules.assignments import Assignments

STEP_S: Final = 0.05
"""Pause between two steps of the job."""

CHECKS_PER_ITERATION: Final = 1_000
"""Checks encoded per event-loop iteration: about 1 ms."""

MAX_KINDS: Final = 512
"""Kinds in a block; each has an endpoint, which may be 1 KB."""

MAX_QUEUED: Final = 50_000
"""Checks queued between two steps, at most 20 MB; further ones are lost."""

BLOCK_CHECKS: Final = 4_096
"""Checks in a block: 100 KB; encoding it blocks the interpreter for 0.5 ms."""

FILES: Final = 16
"""Files of one process in a full trace, at least: removing the oldest one loses little."""

FILE_S: Final = 300
"""Longest period of a file; until its end, its checks are not in the trace, and a killed node loses them."""

RETRY_US: Final = 60 * US_PER_S
"""Pause after a disk error; checks are lost meanwhile."""

TRACE_FILE: Final = "trace-id"
WHOLE: Final = ".trace"
PART: Final = ".part"

FILE_NAME: Final = re.compile(r"([0-9]{16})-[0-9a-f]{16}(\.trace|\.part)")
"""The start of the file, in µs since the Unix epoch, and its writer."""

_ALL_HASHES: Final = 1 << 32

_IDENTITY_PERSON: Final = b"rl-trace-id"

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


class _Columns(NamedTuple):
    """The columns of a block that is being filled."""

    times: list[int]
    identities: list[bytes]
    costs: list[int]
    numbers: list[int]
    allowed: list[bool]
    further: list[bytes]


class TraceRecorder:
    """Records the checks of one process; a :class:`ratelimitd.limiter.interfaces.Recorder`.

    :meth:`run` is a background task; :meth:`drain` ends the last file. Records a ``share`` of the identities, in all
    ``workers`` processes that record into the directory at most ``max_bytes``.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keys: BucketKeys,
        assignments: Assignments,
        clock: Clock,
        stats: CheckStats,
        share: float,
        max_bytes: int,
        workers: int = 1,
    ) -> None:
        self._directory = directory
        self._trace = _trace_of(directory)
        self._writer = secrets.token_bytes(WRITER_BYTES)
        self._keys = keys
        self._assignments = assignments
        self._clock = clock
        self._stats = stats
        # All processes of a trace select the same identities; different traces select independently.
        self.seed: Final = crc32(self._trace)
        self.below: Final = round(share * _ALL_HASHES)
        self._share = share
        self._max_bytes = max_bytes
        self._workers = workers
        self._file_bytes = max_bytes // (FILES * workers)
        self._queued: deque[tuple[bytes, Check, int, bool]] = deque()
        self._hashers: dict[str, Callable[[], Any]] = {}
        self._begin_block()
        self._file: Appender | None = None
        self._file_checks = self._file_lost = 0
        """Checks in the file, and lost checks that its blocks report."""
        self._until_us = 0
        """When to end the current file, or the one that the queued checks will begin; 0 without either."""
        self._no_file_before_us = 0
        self._holds = 0
        self._failing = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recorder")

    def record(self, identifier: bytes, check: Check, at_us: int, *, allowed: bool) -> None:
        """Queue a check; see :class:`ratelimitd.limiter.interfaces.Recorder`."""
        if len(self._queued) < MAX_QUEUED:
            self._queued.append((identifier, check, at_us, allowed))
        else:
            self._lose(1)

    async def run(self) -> None:
        """Record until cancelled."""
        while True:
            await asyncio.sleep(STEP_S)
            await self.step()

    async def step(self) -> None:
        """Process the queued checks; write the block when it is full, and end the file when it is due."""
        queued = self._queued
        # One by one, so that a cancelled step leaves the others to the next.
        for number in range(1, len(queued) + 1):
            self._add(*queued.popleft())
            if len(self._block.times) >= BLOCK_CHECKS or len(self._numbers) >= MAX_KINDS:
                await self._write_block()
            elif not number % CHECKS_PER_ITERATION:
                await asyncio.sleep(0)
        if not (self._file or self._block.times):
            return
        now_us = self._clock.monotonic_us()
        self._until_us = self._until_us or now_us + FILE_S * US_PER_S
        if now_us >= self._until_us:
            await self._end_file()

    async def drain(self) -> None:
        """Write the remaining checks, and end the file. The task of :meth:`run` must have ended."""
        # A write continues after its cancellation.
        await self._in_thread(lambda: None)
        await self.step()
        await self._end_file()
        self._thread.shutdown()

    def _add(self, identifier: bytes, check: Check, at_us: int, allowed: bool) -> None:  # noqa: FBT001 -- as noted
        block, kind = self._block, check.identifier_type
        if check.also or self._assignments.has_type(kind):
            number = self._number(self._kind_of(identifier, check, at_us))
            block.further.extend([self._digest(*identity) for identity in check.also])
        else:
            key = kind, check.endpoint, check.peek, check.max_wait_ms
            found = self._plain.get(key)
            if found is None:
                found = self._plain[key] = self._number(Kind((str(kind),), *key[1:]))
            number = found
        block.times.append(at_us)
        block.identities.append(self._digest(kind, identifier))
        block.costs.append(check.cost)
        block.numbers.append(number)
        block.allowed.append(allowed)

    def _number(self, kind: Kind) -> int:
        return self._numbers.setdefault(kind, len(self._numbers))

    def _kind_of(self, identifier: bytes, check: Check, at_us: int) -> Kind:
        identities = ((check.identifier_type, identifier), *check.also)
        found = [self._assignments.plan_of(*identity, at_us) for identity in identities]
        plans = tuple(["" if one is None else one[0] for one in found])
        return Kind(
            tuple([str(one) for one, _ in identities]),
            check.endpoint,
            check.peek,
            check.max_wait_ms,
            plans if any(plans) else (),
        )

    def _digest(self, identifier_type: str, identifier: bytes) -> bytes:
        new = self._hashers.get(identifier_type)
        if new is None:
            # Not before rules are loaded: until then the secret may change.
            key = self._keys.trace_key(self._trace)
            hashed = blake2b(digest_size=IDENTITY_BYTES, key=key, person=_IDENTITY_PERSON)
            hashed.update(f"{identifier_type}\0".encode())
            # A copy takes half the time of a new hash, which first processes the key.
            new = self._hashers[identifier_type] = hashed.copy
        digest = new()
        digest.update(identifier)
        return digest.digest()

    def _begin_block(self) -> None:
        self._numbers: dict[Kind, int] = {}
        self._plain: dict[tuple[str, str, bool, int], int] = {}
        """Numbers of kinds with one identity and no plan, for a faster look-up."""
        self._block = _Columns([], [], [], [], [], [])
        self._lost = 0

    def _lose(self, checks: int) -> None:
        self._lost += checks
        self._stats.recorded["lost"] += checks

    async def _in_thread(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """Call in the single writer thread, after earlier calls."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    async def _write_block(self) -> None:
        """Write the block; if that fails, count its checks as lost."""
        block = Block([*self._numbers], *self._block, self._lost)
        self._begin_block()
        try:
            written = await self._in_thread(self._write, block)
        except OSError as error:
            self._fail(error)
            written = 0
        if self._file is not None and written:
            if self._file.size + written > self._file_bytes:
                await self._end_file()
        else:
            self._lost += block.lost
            self._lose(len(block.times))

    def _write(self, block: Block) -> int:
        """Write a block, in the writer thread; return its bytes, 0 during the pause after a disk error."""
        if self._clock.monotonic_us() < self._no_file_before_us:
            return 0
        if self._file is None:
            self._make_room()
            name = f"{self._clock.now_us():016d}-{self._writer.hex()}{PART}"
            self._file = Appender(self._directory / name, header(self._trace, self._writer))
            with suppress(OSError):  # not every file system has locks
                self._file.lock()
            self._file_checks = self._file_lost = 0
            self._holds = self._stats.holds["made"]
        octets = encode_block(block)
        self._file.append(octets)
        self._file_checks += len(block.times)
        self._file_lost += block.lost
        return len(octets)

    async def _end_file(self) -> None:
        """Write the remaining checks and the end, and rename the file."""
        if self._block.times:
            await self._write_block()
        file, self._file, self._until_us = self._file, None, 0
        if file is None:
            return
        end = encode_end(
            End(self._file_checks, self._stats.holds["made"] - self._holds, self._share)
        )
        try:
            await self._in_thread(self._publish, file, end)
        except OSError as error:
            self._file = file
            self._fail(error)
        else:
            self._failing = False

    def _publish(self, file: Appender, end: bytes) -> None:
        """End a file, in the writer thread, and count its checks, even if the caller is cancelled meanwhile."""
        file.append(end)
        file.publish(file.path.with_suffix(WHOLE))
        file.close()
        self._stats.recorded["written"] += self._file_checks

    def _fail(self, error: OSError) -> None:
        """Discard the file, and count its checks as lost."""
        if not self._failing:
            _log.warning("checks cannot be recorded in %s: %s", self._directory, error.strerror)
        self._failing = True
        self._no_file_before_us = self._clock.monotonic_us() + RETRY_US
        self._until_us = 0
        if self._file is not None:
            with suppress(OSError):
                self._file.discard()
            self._file = None
            self._lost += self._file_lost
            self._lose(self._file_checks)

    def _make_room(self) -> None:
        """Remove the oldest files until the next ones of all workers fit; unfinished files count as full.

        Removed first are unfinished files of killed processes, which cannot be read, and files of a clock that was
        ahead, because their names would make them the newest.
        """
        now_us, recent_us = self._clock.now_us(), 2 * FILE_S * US_PER_S
        total, unfinished, removable = 0, self._file_bytes, []
        for path in self._directory.iterdir():
            named = FILE_NAME.fullmatch(path.name)
            if named is None:
                continue
            age_us = now_us - int(named[1])
            is_ahead = age_us < -recent_us
            with suppress(FileNotFoundError, PermissionError):  # just removed, or another user's
                size = path.stat().st_size
                if named[2] == PART and _is_written(path, size, is_recent=abs(age_us) < recent_us):
                    unfinished += max(self._file_bytes, size)
                else:
                    total += size
                    removable.append((named[2] == WHOLE and not is_ahead, path, size))
        # Workers begin files at the same time, before they see each other's.
        total += max(unfinished, self._workers * self._file_bytes)
        for _, path, size in sorted(removable):
            if total <= self._max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size


def _is_written(path: Path, size: int, *, is_recent: bool) -> bool:
    """Return whether the process that writes a file still runs."""
    if size <= HEADER_BYTES and is_recent:
        return True  # its writer locks it after the header
    with path.open("rb") as file:
        try:
            return is_held(file.fileno())
        except OSError:  # without locks, its age tells
            return is_recent


def _trace_of(directory: Path) -> bytes:
    """Return the trace id in a directory; the first process that records there creates both.

    Raises:
        StartupError: the directory cannot be created or read, or its trace id is invalid.
    """
    path = directory / TRACE_FILE
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _make_trace(path)
        trace = path.read_bytes()
    except OSError as error:
        message = f"RECORD_DIR: {directory} cannot be used: {why(error)}"
        raise StartupError(message) from error
    if len(trace) != TRACE_BYTES:
        message = f"RECORD_DIR: {path} was not written by a node; remove it to begin another trace"
        raise StartupError(message)
    return trace


def _make_trace(path: Path) -> None:
    draft = path.with_suffix(f".{secrets.token_hex(8)}")
    draft.touch(mode=0o600)
    try:
        draft.write_bytes(secrets.token_bytes(TRACE_BYTES))
        with suppress(FileExistsError):  # another process was first
            os.link(draft, path)
    finally:
        draft.unlink()
