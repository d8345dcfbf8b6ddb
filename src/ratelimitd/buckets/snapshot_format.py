"""How a bucket lies in memory: one object, invisible to the cyclic garbage collector.

``(spent, latest_us)`` becomes one integer, a log stays ``bytes``. Both also carry the rule's window, so that an expired
bucket is told by its value alone, and the tick at which they were last used, which is the order of use.
Pure: no clock, no I/O. See ADR 0014.

    integer:  spent · window_seconds (31 bits) · tick (28 bits) · latest_us (53 bits)
    bytes:    the log of ``algorithms/sliding_window.py`` · window_seconds and tick (8 bytes)

An integer of up to 180 bits is an object of 48 bytes, so that spent may take 68 bits (a limit of 2 million a day)
before a bucket grows by 16 bytes.
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
from ratelimitd.model import US_PER_S, Rule

Value = int | bytes
State = tuple[int, int] | bytes

MAX_TICK: Final = (1 << 28) - 1
"""Ticks are seconds since the node's start: enough for eight years."""

TICK_SHIFT: Final = 53
_TICK_BITS: Final = 28
WINDOW_SHIFT: Final = TICK_SHIFT + _TICK_BITS
SPENT_SHIFT: Final = WINDOW_SHIFT + 31
LATEST_MASK: Final = (1 << TICK_SHIFT) - 1
_WINDOW_MASK: Final = (1 << 31) - 1

_CELL: Final = 8
_TAIL: Final = Struct("=q")


def pack(state: State, rule: Rule, tick: int) -> Value:
    """The value that holds ``state`` under ``rule``, last used at ``tick``."""
    if isinstance(state, bytes):
        return state + _TAIL.pack(rule.window_seconds << _TICK_BITS | tick)
    spent, latest_us = state
    return (
        spent << SPENT_SHIFT | rule.window_seconds << WINDOW_SHIFT | tick << TICK_SHIFT | latest_us
    )


def unpack(value: Value) -> State:
    """The state that ``value`` holds."""
    if isinstance(value, bytes):
        return value[:-_CELL]
    return value >> SPENT_SHIFT, value & LATEST_MASK


def tick_of(value: Value) -> int:
    """When the bucket was last used, in ticks."""
    if isinstance(value, bytes):
        return int(_TAIL.unpack_from(value, len(value) - _CELL)[0]) & MAX_TICK
    return value >> TICK_SHIFT & MAX_TICK


def latest_us(value: Value) -> int:
    """Time of the last accepted check, in µs since the Unix epoch."""
    if isinstance(value, bytes):
        runs = (len(value) - 2 * _CELL) // (2 * _CELL)
        return int(_TAIL.unpack_from(value, (runs - 1) * _CELL)[0])
    return value & LATEST_MASK


def window_seconds(value: Value) -> int:
    """The window of the bucket's rule, in seconds."""
    if isinstance(value, bytes):
        return int(_TAIL.unpack_from(value, len(value) - _CELL)[0]) >> _TICK_BITS
    return value >> WINDOW_SHIFT & _WINDOW_MASK


def is_over(value: Value, now_us: int) -> bool:
    """Whether the bucket equals a fresh one at ``now_us``.

    One window after the last accepted check a token bucket is full, a log empty and a fixed window over, whatever the
    limit: so one test serves all three, and never drops a bucket that is not full again.
    """
    if isinstance(value, bytes):
        return latest_us(value) + window_seconds(value) * US_PER_S <= now_us
    # The same, without two calls: the sweeper asks this of thousands of buckets in one turn of the event loop.
    return (value & LATEST_MASK) + (value >> WINDOW_SHIFT & _WINDOW_MASK) * US_PER_S <= now_us


def with_tick(value: Value, tick: int) -> Value:
    """The value as last used at ``tick``; at tick 0 it is older than everything that this process used."""
    if tick_of(value) == tick:
        return value
    if isinstance(value, bytes):
        return value[:-_CELL] + _TAIL.pack(window_seconds(value) << _TICK_BITS | tick)
    return value & ~(MAX_TICK << TICK_SHIFT) | tick << TICK_SHIFT


def clamp(value: Value, now_us: int) -> Value:
    """The value without times after ``now_us``: a state from the future would lock its caller out (I8)."""
    if latest_us(value) <= now_us:
        return value
    if isinstance(value, bytes):
        cells = array("q", value)
        runs = (len(cells) - 2) >> 1
        times = array("q", [min(time_us, now_us) for time_us in cells[:runs]])
        return times.tobytes() + value[runs * _CELL :]
    return value & ~LATEST_MASK | now_us


def is_log(value: bytes) -> bool:
    """Whether ``value`` has the form of a packed log, told by its length and its ends: about 1 µs, however long it is.

    Enough that no check of it can fail. That times and sums ascend in between is not looked at: what comes from a file
    has passed a checksum (``chunks.py``), and is as the node that wrote it had it in use.
    """
    runs = (len(value) - 2 * _CELL) // (2 * _CELL)
    if not 1 <= runs <= MAX_RUNS or len(value) % (2 * _CELL):
        return False
    cells = memoryview(value).cast("q")
    return (
        0 <= cells[0] <= cells[runs - 1] <= LATEST_MASK
        and 0 <= cells[runs] < cells[-2] <= MAX_SUM
        and 0 < cells[-1] >> _TICK_BITS <= _WINDOW_MASK
    )


# The form of the bucket files: a header, then chunks with a checksum each. Never opens a file, never picks one.
#
#     header   magic · 16 bytes that tell under which secret the keys were made
#     chunk    kind (1 byte) · length (4) · CRC-32 of all the rest (4) · payload        all integers little-endian
#
#     S   states in one integer each:   stored key (16) · value (26)
#     L   logs:                         stored key (16) · length (4) · value
#     R   resets:                       stored key (16)
#
# The order of the chunks is the order of events. Whatever follows the first chunk that does not check is ignored: the
# end of a file whose writer was killed. That end may be zeros, which some file systems leave after a power failure: the
# checksum covers kind and length too, so that zeros are no chunk.
#
# What checks was written by a node under this key secret, as it stands: the header says whose, the checksum that
# nothing changed by accident. Neither is a signature; who can write the state directory can write buckets. See ADR
# 0015.

STATES: Final = b"S"
LOGS: Final = b"L"
RESETS: Final = b"R"

MAGIC: Final = b"ratelimitd buckets 1\n"
MAX_PAYLOAD_BYTES: Final = 1 << 24
"""A length beyond this is no length but noise: a node writes at most 512 KiB at a time (``snapshot.TURN_BYTES``)."""

_VALUE_BYTES: Final = 26  # the packed integer takes 194 bits at most
_TITLE: Final = Struct("<cI")
_CHECKSUM: Final = Struct("<I")
_STATE: Final = Struct(f"<{STORED_KEY_BYTES}s{_VALUE_BYTES}s")
_LOG_HEAD: Final = Struct(f"<{STORED_KEY_BYTES}sI")


class Chunk(NamedTuple):
    """One chunk: its kind and its payload, whose checksum was right."""

    kind: bytes
    payload: bytes


def header(secret: bytes) -> bytes:
    """The first bytes of a file whose keys were made under ``secret``."""
    return MAGIC + blake2b(b"", digest_size=16, key=secret, person=b"rl-file").digest()


def encode_values(values: Iterable[tuple[bytes, Value]]) -> bytes:
    """Chunks that say what the buckets of these stored keys hold."""
    states, logs = [], []
    for stored_key, value in values:
        if isinstance(value, bytes):
            logs.append(_LOG_HEAD.pack(stored_key, len(value)) + value)
        else:
            states.append(stored_key + value.to_bytes(_VALUE_BYTES, "little"))
    return (_encode(STATES, states) if states else b"") + (_encode(LOGS, logs) if logs else b"")


def encode_resets(stored_keys: Iterable[bytes]) -> bytes:
    """A chunk that says that the buckets of these stored keys start afresh."""
    return _encode(RESETS, stored_keys)


def read_chunks(file: BinaryIO) -> Iterator[Chunk]:
    """The chunks of ``file`` from where it stands up to the first one that does not check, one in memory at a time.

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
    """How many bytes of a file the chunk takes."""
    return _TITLE.size + _CHECKSUM.size + len(chunk.payload)


def decode_values(chunk: Chunk) -> Iterator[tuple[bytes, Value]]:
    """The (stored key, value) pairs of a chunk of states or logs; a log that is none is passed over."""
    payload = chunk.payload
    if chunk.kind == STATES:
        from_bytes = int.from_bytes
        whole = len(payload) - len(payload) % _STATE.size
        for stored_key, value in _STATE.iter_unpack(memoryview(payload)[:whole]):
            yield stored_key, from_bytes(value, "little")
        return
    start = 0
    while start + _LOG_HEAD.size <= len(payload):
        stored_key, length = _LOG_HEAD.unpack_from(payload, start)
        start += _LOG_HEAD.size
        value = payload[start : start + length]
        if is_log(value):
            yield stored_key, value
        start += length


def decode_resets(chunk: Chunk) -> Iterator[bytes]:
    """The stored keys of a chunk of resets."""
    payload = chunk.payload
    for start in range(0, len(payload) - STORED_KEY_BYTES + 1, STORED_KEY_BYTES):
        yield payload[start : start + STORED_KEY_BYTES]


def _encode(kind: bytes, records: Iterable[bytes]) -> bytes:
    payload = b"".join(records)
    title = _TITLE.pack(kind, len(payload))
    return title + _checksum(title, payload) + payload


def _checksum(title: bytes, payload: bytes) -> bytes:
    return _CHECKSUM.pack(crc32(payload, crc32(title)))
