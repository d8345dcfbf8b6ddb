"""Reads the bucket files of before a restart. Whatever they hold, a node starts.

Also clears away what no longer counts, so that many short lives leave little behind; never writes. See ADR 0015; the
form of the files is ``chunks.py``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from ratelimitd.buckets import snapshot_format
from ratelimitd.buckets.keys import BucketKeys
from ratelimitd.buckets.restored import ColdBuckets
from ratelimitd.buckets.snapshot_format import Value, clamp, is_over, with_tick
from ratelimitd.buckets.table import LATE_US

KEPT_ASIDE: Final = 3
"""Torn or foreign files of earlier times that are kept: a crash after each start must not fill the disk."""


class Files(NamedTuple):
    """The bucket files of a directory that count: the newest base, if there is one, and the logs from it on."""

    base: Path | None
    logs: list[Path]
    superseded: list[Path]
    next_number: int


class Restored(NamedTuple):
    """What was read. ``torn`` files are to be set aside, ``files`` removed, once the next base is there.

    ``foreign`` ones were set aside already.
    """

    buckets: ColdBuckets
    files: list[Path]
    torn: list[Path]
    foreign: list[Path]
    next_number: int
    reports: list[str]


def base_path(directory: Path, number: int) -> Path:
    """Where base ``number`` is kept."""
    return directory / f"buckets-{number:08d}.base"


def log_path(directory: Path, number: int) -> Path:
    """Where log ``number`` is kept."""
    return directory / f"buckets-{number:08d}.log"


def restore(directory: Path, keys: BucketKeys, header: bytes, now_us: int | None) -> Restored:
    """Read the buckets that a node left in ``directory``.

    Buckets that are over at ``now_us`` are left out, and times after it are set to it (I8); ``None``, for buckets whose
    time is the callers' own, keeps everything. A file of another kind, or of another secret, is renamed ``*.foreign``;
    one that is superseded or holds nothing is removed.

    Raises:
        OSError: a file cannot be renamed or removed, or the directory cannot be read.
    """
    found = find(directory)
    cold = ColdBuckets(keys)
    restored = Restored(cold, [], [], [], found.next_number, [])
    for path in found.superseded:
        path.unlink()
    for path in ([found.base] if found.base else []) + found.logs:
        _read_file(path, header, restored)
    set_aside(restored.foreign, ".foreign")
    if now_us is not None:
        cold.map(lambda value: None if is_over(value, now_us - LATE_US) else clamp(value, now_us))
    return restored


def set_aside(paths: list[Path], suffix: str) -> None:
    """Rename ``paths``, files of one directory, to end in ``suffix``, so that no start reads them again.

    Of those set aside before, the newest :data:`KEPT_ASIDE` are kept. Those of one time stay together: what became
    foreign under a wrong secret is a base and its logs, and can be renamed back.
    """
    if paths:
        aside = sorted(paths[0].parent.glob(f"buckets-*{suffix}"))  # by number, that is by age
        for path in aside[:-KEPT_ASIDE]:
            path.unlink()
    for path in paths:
        path.rename(path.with_name(path.name + suffix))


def find(directory: Path) -> Files:
    """The bucket files of ``directory``."""
    numbered = sorted(
        (int(match[1]), match[2], path)
        for path in directory.iterdir()
        if (match := re.fullmatch(r"buckets-(\d{8})\.(base|log)", path.name))
    )
    first = max((number for number, kind, _ in numbered if kind == "base"), default=0)
    base = next(
        (path for number, kind, path in numbered if (number, kind) == (first, "base")), None
    )
    logs = [path for number, kind, path in numbered if kind == "log" and number >= first]
    superseded = [path for _, _, path in numbered if path != base and path not in logs]
    superseded += directory.glob("buckets-*.tmp")
    return Files(base, logs, superseded, max((number for number, _, _ in numbered), default=0) + 1)


def _read_file(path: Path, header: bytes, restored: Restored) -> None:
    try:
        with path.open("rb") as file:
            read_bytes = _read_buckets(file, header, restored.buckets)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        restored.reports.append(
            f"{path.name} cannot be read ({error.strerror}); its buckets start afresh"
        )
        return
    if read_bytes is None:
        restored.foreign.append(path)
        restored.reports.append(
            f"{path.name} is not a bucket file of this node's key secret; renamed to *.foreign"
        )
    elif read_bytes < size:
        restored.reports.append(
            f"{path.name} is torn: its last {size - read_bytes} bytes were ignored"
        )
        restored.torn.append(path)
    elif path.suffix == ".log" and size <= len(header):
        path.unlink()
    else:
        restored.files.append(path)


def _read_buckets(file: BinaryIO, header: bytes, buckets: ColdBuckets) -> int | None:
    """How many bytes of ``file`` made sense; ``None`` if it does not begin as one of ours."""
    begin = file.read(len(header))
    if begin != header:  # its writer may have been killed before it had written that much
        return len(begin) if header.startswith(begin) else None
    read_bytes = len(header)
    for chunk in snapshot_format.read_chunks(file):
        _apply(chunk, buckets)
        read_bytes += snapshot_format.chunk_bytes(chunk)
    return read_bytes


def _apply(chunk: snapshot_format.Chunk, buckets: ColdBuckets) -> None:
    if chunk.kind == snapshot_format.RESETS:
        for stored_key in snapshot_format.decode_resets(chunk):
            buckets.discard(stored_key)
    elif chunk.kind in {snapshot_format.STATES, snapshot_format.LOGS}:
        put = buckets.put
        value: Value
        for stored_key, value in snapshot_format.decode_values(chunk):
            put(stored_key, with_tick(value, 0))
