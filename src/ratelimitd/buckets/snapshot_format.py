"""The two encodings of a bucket: in memory, and in the bucket files. Pure. See ADR 0014 and ADR 0015.

In memory a bucket is one object that the cyclic garbage collector skips. Besides the state it contains the seconds
until it is full, for expiry, and the tick of the last use, for LRU order:

    integer:  spent · full_after_s (31 bits) · tick (28 bits) · latest_us (53 bits)
    bytes:    the log of ``algorithms/sliding_window.py`` · full_after_s and tick (8 bytes)

An integer of up to 180 bits takes 48 bytes, so spent may take 68 bits (a limit of 2 million a day) before a bucket
grows by 16 bytes.

A file is a header, then chunks with a checksum each; all integers are little-endian:

    header   magic · 16 bytes that identify the key secret
    chunk    kind (1 byte) · length (4) · CRC-32 of all the rest (4) · payload
    S   states in one integer each:   stored key (16) · value (26)
    L   logs:                         stored key (16) · length (4) · value
    R   resets:                       stored key (16)
    H   holds:                        number (16) · length (4) · JSON, empty if the hold was dropped
    B   buckets kept apart for them:  stored key (16) · length (4) · JSON

The chunks are in the order of events. A killed writer may leave an invalid chunk; it and everything after it are
ignored. The checksum covers kind and length, so that zeros, which some file systems leave after a power failure, are
not a valid chunk. It detects accidents, not forgery: a writer of the state directory can forge buckets.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from struct import Struct
from typing import BinaryIO, Final, NamedTuple
from zlib import crc32

from ratelimitd.algorithms.sliding_window import MAX_RUNS, MAX_SUM
from ratelimitd.buckets.keys import STORED_KEY_BYTES
from ratelimitd.model import US_PER_S, Limit

Value = int | bytes
State = tuple[int, ...] | bytes

MAX_TICK: Final = (1 << 28) - 1
"""Ticks are seconds since the start: eight years."""

TICK_SHIFT: Final = 53
_TICK_BITS: Final = 28
FULL_AFTER_SHIFT: Final = TICK_SHIFT + _TICK_BITS
SPENT_SHIFT: Final = FULL_AFTER_SHIFT + 31
LATEST_MASK: Final = (1 << TICK_SHIFT) - 1
_FULL_AFTER_MASK: Final = (1 << 31) - 1

_CELL: Final = 8
_TAIL: Final = Struct("=q")


def pack(state: State | memoryview, rule: Limit, tick: int) -> Value:
    """Return the value of ``state`` under ``rule``, last used at ``tick``."""
    if isinstance(state, bytes):
        return state + _TAIL.pack(rule.full_after_s << _TICK_BITS | tick)
    if isinstance(state, memoryview):
        value: bytes = state.obj  # type: ignore[assignment]  # of :func:`viewed`
        return with_tick(value, tick)
    spent, latest_us = state
    return (
        spent << SPENT_SHIFT
        | rule.full_after_s << FULL_AFTER_SHIFT
        | tick << TICK_SHIFT
        | latest_us
    )


def unpack(value: Value) -> State:
    """Return the state of ``value``."""
    if isinstance(value, bytes):
        return value[:-_CELL]
    return value >> SPENT_SHIFT, value & LATEST_MASK


def viewed(value: Value) -> State | memoryview:
    """Return the state of ``value`` to decide on; a log as a view, which :func:`pack` accepts after a denial."""
    if isinstance(value, bytes):
        return memoryview(value)[:-_CELL]
    return value >> SPENT_SHIFT, value & LATEST_MASK


def tick_of(value: Value) -> int:
    """Return the tick of the last use."""
    if isinstance(value, bytes):
        return int(_TAIL.unpack_from(value, len(value) - _CELL)[0]) & MAX_TICK
    return value >> TICK_SHIFT & MAX_TICK


def latest_us(value: Value) -> int:
    """Return the time of the last accepted check, in µs since the Unix epoch."""
    if isinstance(value, bytes):
        runs = (len(value) - 2 * _CELL) // (2 * _CELL)
        return int(_TAIL.unpack_from(value, (runs - 1) * _CELL)[0])
    return value & LATEST_MASK


def full_after_s(value: Value) -> int:
    """Return the seconds after the last accepted check until the bucket is full."""
    if isinstance(value, bytes):
        return int(_TAIL.unpack_from(value, len(value) - _CELL)[0]) >> _TICK_BITS
    return value >> FULL_AFTER_SHIFT & _FULL_AFTER_MASK


def is_over(value: Value, now_us: int) -> bool:
    """Return whether the bucket equals a fresh one at ``now_us``.

    One window after the last accepted check a log is empty, a fixed window is over, and a token bucket without a burst
    is full, whatever the limit. A token bucket with a burst takes the time in which its limit then refilled the burst.
    """
    if isinstance(value, bytes):
        return latest_us(value) + full_after_s(value) * US_PER_S <= now_us
    # The same, inlined: a sweep calls it for thousands of buckets per event-loop iteration.
    return (value & LATEST_MASK) + (
        value >> FULL_AFTER_SHIFT & _FULL_AFTER_MASK
    ) * US_PER_S <= now_us


def with_tick(value: Value, tick: int) -> Value:
    """Return the value as last used at ``tick``; tick 0 is older than any use by this process."""
    if tick_of(value) == tick:
        return value
    if isinstance(value, bytes):
        return value[:-_CELL] + _TAIL.pack(full_after_s(value) << _TICK_BITS | tick)
    return value & ~(MAX_TICK << TICK_SHIFT) | tick << TICK_SHIFT


def clamp(value: Value, now_us: int) -> Value:
    """Return the value with all times capped at ``now_us``: later ones would lock the caller out (I8)."""
    if latest_us(value) <= now_us:
        return value
    if isinstance(value, bytes):
        cells = array("q", value)
        runs = (len(cells) - 2) >> 1
        times = array("q", [min(time_us, now_us) for time_us in cells[:runs]])
        return times.tobytes() + value[runs * _CELL :]
    return value & ~LATEST_MASK | now_us


def is_log(value: bytes) -> bool:
    """Return whether ``value`` has the form of a packed log, by its length and ends; takes about 1 µs.

    This ensures that no check on it raises. The order in between is not verified, because the chunk's checksum was.
    """
    runs = (len(value) - 2 * _CELL) // (2 * _CELL)
    if not 1 <= runs <= MAX_RUNS or len(value) % (2 * _CELL):
        return False
    cells = memoryview(value).cast("q")
    return (
        0 <= cells[0] <= cells[runs - 1] <= LATEST_MASK
        and 0 <= cells[runs] <= cells[-2] <= MAX_SUM
        and 0 < cells[-1] >> _TICK_BITS <= _FULL_AFTER_MASK
    )


STATES: Final = b"S"
LOGS: Final = b"L"
RESETS: Final = b"R"
HOLDS: Final = b"H"
APART: Final = b"B"

MAGIC: Final = b"ratelimitd buckets 1\n"
MAX_PAYLOAD_BYTES: Final = 1 << 24
"""Greater lengths are invalid: a node writes at most 512 KiB at a time (``snapshot.STEP_BYTES``)."""

_VALUE_BYTES: Final = 26  # the packed integer takes 194 bits at most
_TITLE: Final = Struct("<cI")
_CHECKSUM: Final = Struct("<I")
_STATE: Final = Struct(f"<{STORED_KEY_BYTES}s{_VALUE_BYTES}s")
_LOG_HEAD: Final = Struct(f"<{STORED_KEY_BYTES}sI")


class Chunk(NamedTuple):
    """A chunk with a valid checksum: its kind and its payload."""

    kind: bytes
    payload: bytes


def header(secret: bytes) -> bytes:
    """Return the first bytes of a file whose keys are made with ``secret``."""
    return MAGIC + blake2b(b"", digest_size=16, key=secret, person=b"rl-file").digest()


def encode_values(values: Iterable[tuple[bytes, Value]]) -> bytes:
    """Return the chunks of these (stored key, value) pairs."""
    states, logs = [], []
    for stored_key, value in values:
        if isinstance(value, bytes):
            logs.append(_LOG_HEAD.pack(stored_key, len(value)) + value)
        else:
            states.append(stored_key + value.to_bytes(_VALUE_BYTES, "little"))
    return (_encode(STATES, states) if states else b"") + (_encode(LOGS, logs) if logs else b"")


def encode_resets(stored_keys: Iterable[bytes]) -> bytes:
    """Return the chunk that resets the buckets of these stored keys."""
    return _encode(RESETS, stored_keys)


def encode_holds(changes: Iterable[tuple[bytes, bytes, bytes]]) -> bytes:
    """Return the chunks of holds and of buckets kept apart: (kind, number or stored key, value) each."""
    records: dict[bytes, list[bytes]] = {APART: [], HOLDS: []}
    for kind, name, value in changes:
        records[kind].append(_LOG_HEAD.pack(name, len(value)) + value)
    return b"".join(_encode(kind, values) for kind, values in records.items() if values)


def read_chunks(file: BinaryIO) -> Iterator[Chunk]:
    """Yield the chunks of ``file`` from its position up to the first invalid one.

    Raises:
        OSError: the file cannot be read.
    """
    while len(head := file.read(_TITLE.size + _CHECKSUM.size)) == _TITLE.size + _CHECKSUM.size:
        kind, length = _TITLE.unpack_from(head)
        if length > MAX_PAYLOAD_BYTES:
            return
        payload = file.read(length)
        if len(payload) < length or head[_TITLE.size :] != _checksum(head[: _TITLE.size], payload):
            return
        yield Chunk(kind, payload)


def chunk_bytes(chunk: Chunk) -> int:
    """Return the size of the chunk in a file."""
    return _TITLE.size + _CHECKSUM.size + len(chunk.payload)


def decode_values(chunk: Chunk) -> Iterator[tuple[bytes, Value]]:
    """Yield the (stored key, value) pairs of a chunk of states or logs; skip malformed logs."""
    payload = chunk.payload
    if chunk.kind == STATES:
        from_bytes = int.from_bytes
        whole = len(payload) - len(payload) % _STATE.size
        for stored_key, value in _STATE.iter_unpack(memoryview(payload)[:whole]):
            yield stored_key, from_bytes(value, "little")
        return
    for stored_key, value in decode_named(chunk):
        if is_log(value):
            yield stored_key, value


def decode_named(chunk: Chunk) -> Iterator[tuple[bytes, bytes]]:
    """Yield the (number or stored key, value) pairs of a chunk."""
    payload, start = chunk.payload, 0
    while start + _LOG_HEAD.size <= len(payload):
        name, length = _LOG_HEAD.unpack_from(payload, start)
        start += _LOG_HEAD.size
        yield name, payload[start : start + length]
        start += length


def decode_resets(chunk: Chunk) -> Iterator[bytes]:
    """Yield the stored keys of a chunk of resets."""
    payload = chunk.payload
    for start in range(0, len(payload) - STORED_KEY_BYTES + 1, STORED_KEY_BYTES):
        yield payload[start : start + STORED_KEY_BYTES]


def _encode(kind: bytes, records: Iterable[bytes]) -> bytes:
    payload = b"".join(records)
    title = _TITLE.pack(kind, len(payload))
    return title + _checksum(title, payload) + payload


def _checksum(title: bytes, payload: bytes) -> bytes:
    return _CHECKSUM.pack(crc32(payload, crc32(title)))
