"""Reads the bucket files of an earlier run. No content of theirs prevents a start.

Removes superseded files, so that many short runs leave few files; never writes. See ADR 0015; the format is in
:mod:`ratelimitd.buckets.snapshot_format`.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from ratelimitd.buckets import snapshot_format
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.snapshot_format import Value, clamp, is_over, latest_us, with_tick
from ratelimitd.buckets.table import LATE_US, RestoredBuckets
from ratelimitd.model import MAX_WAIT_MS, US_PER_MS

KEPT_ASIDE: Final = 3
"""Number of earlier torn or foreign files kept: a crash after each start must not fill the disk."""

_log = logging.getLogger(__name__)


class Restored(NamedTuple):
    """The buckets of an earlier run, and their files.

    Once the next base exists, ``read`` files are removed and ``torn`` ones set aside.
    """

    buckets: RestoredBuckets
    holds: dict[tuple[bytes, bytes], bytes]
    """The argument of :meth:`ratelimitd.buckets.holds.OwnHolds.restore`."""
    read: list[Path]
    torn: list[Path]
    next_number: int


def base_path(directory: Path, number: int) -> Path:
    """Return the path of base ``number``."""
    return directory / f"buckets-{number:08d}.base"


def log_path(directory: Path, number: int) -> Path:
    """Return the path of log ``number``."""
    return directory / f"buckets-{number:08d}.log"


def restore(directory: Path, keys: BucketKeys, header: bytes, now_us: int | None) -> Restored:
    """Read the buckets that a node left in ``directory``: the newest base, and the logs from its number on.

    Buckets expired at ``now_us`` are dropped, and times too far after it are set to it (I8); ``None``, for callers'
    time, keeps everything. A file of another format or secret is renamed to ``*.foreign``. Damaged files are logged.

    Raises:
        OSError: a file cannot be renamed or removed, or the directory cannot be read.
    """
    numbered = sorted(
        (int(match[1]), match[2], path)
        for path in directory.iterdir()
        if (match := re.fullmatch(r"buckets-(\d{8})\.(base|log)", path.name))
    )
    newest = max((number for number, kind, _ in numbered if kind == "base"), default=0)
    buckets = RestoredBuckets(keys)
    next_number = max((number for number, _, _ in numbered), default=0) + 1
    restored, foreign = Restored(buckets, {}, [], [], next_number), []
    for number, _, path in numbered:  # a base sorts before the log of its number
        if number < newest:
            path.unlink()
        elif _is_foreign(path, header, restored):
            foreign.append(path)
    for path in directory.glob("buckets-*.tmp"):
        path.unlink()
    set_aside(foreign, ".foreign")
    if now_us is not None:
        buckets.map(
            lambda value: None if is_over(value, now_us - LATE_US) else in_time(value, now_us)
        )
    return restored


def in_time(value: Value, now_us: int) -> Value:
    """Return a value without times too far in the future, which would lock the caller out (I8)."""
    # A check that was allowed ahead of its time, and still waits, may be that far ahead of the clock.
    if latest_us(value) <= now_us + MAX_WAIT_MS * US_PER_MS:
        return value
    return clamp(value, now_us)


def set_aside(paths: list[Path], suffix: str) -> None:
    """Rename ``paths``, files of one directory, to end in ``suffix``, so that no start reads them again.

    Keeps the newest :data:`KEPT_ASIDE` of those set aside earlier. Files set aside together are all kept, so that a
    base and its logs under a wrong secret can be renamed back.
    """
    if paths:
        aside = sorted(paths[0].parent.glob(f"buckets-*{suffix}"))  # by number, which is by age
        for path in aside[:-KEPT_ASIDE]:
            path.unlink()
    for path in paths:
        path.rename(path.with_name(path.name + suffix))


def _is_foreign(path: Path, header: bytes, restored: Restored) -> bool:
    """Read a file into ``restored``, and return whether it has another format or secret."""
    try:
        with path.open("rb") as file:
            read_bytes = _read(file, header, restored)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        reason = error.strerror
        _log.warning("%s cannot be read (%s); its buckets start full", path.name, reason)
        return False
    if read_bytes is None:
        _log.warning(
            "%s is not a bucket file of this node's key secret; renamed to *.foreign", path.name
        )
        return True
    if read_bytes < size:
        _log.warning("%s is torn: its last %d bytes were ignored", path.name, size - read_bytes)
        restored.torn.append(path)
    elif path.suffix == ".log" and size <= len(header):
        path.unlink()
    else:
        restored.read.append(path)
    return False


def _read(file: BinaryIO, header: bytes, restored: Restored) -> int | None:
    """Apply the chunks of ``file``; return its number of valid bytes, ``None`` if it begins with another header."""
    begin = file.read(len(header))
    if begin != header:  # a killed writer may leave a partial header
        return len(begin) if header.startswith(begin) else None
    read_bytes = len(header)
    for chunk in snapshot_format.read_chunks(file):
        _apply(chunk, restored)
        read_bytes += snapshot_format.chunk_bytes(chunk)
    return read_bytes


def _apply(chunk: snapshot_format.Chunk, restored: Restored) -> None:
    buckets, holds = restored.buckets, restored.holds
    if chunk.kind == snapshot_format.RESETS:
        for stored_key in snapshot_format.decode_resets(chunk):
            buckets.discard(stored_key)
            holds.pop((snapshot_format.APART, stored_key), None)
    elif chunk.kind in {snapshot_format.STATES, snapshot_format.LOGS}:
        put = buckets.put
        for stored_key, value in snapshot_format.decode_values(chunk):
            put(stored_key, with_tick(value, 0))
            if holds:
                # The bucket was returned to the table.
                holds.pop((snapshot_format.APART, stored_key), None)
    elif chunk.kind in {snapshot_format.HOLDS, snapshot_format.APART}:
        for name, value in snapshot_format.decode_named(chunk):
            holds.pop((chunk.kind, name), None)
            if value:  # else the hold was dropped
                holds[chunk.kind, name] = value
            if chunk.kind == snapshot_format.APART:
                buckets.discard(name)
