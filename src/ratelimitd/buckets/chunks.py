"""The form of the bucket files: a header, then chunks with a checksum each. Never opens a file, never picks one.

    header   magic · 16 bytes that tell under which secret the keys were made
    chunk    kind (1 byte) · length (4) · CRC-32 of all the rest (4) · payload        all integers little-endian

    S   states in one integer each:   stored key (16) · value (26)
    L   logs:                         stored key (16) · length (4) · value
    R   resets:                       stored key (16)

The order of the chunks is the order of events. Whatever follows the first chunk that does not check is ignored: the
end of a file whose writer was killed. That end may be zeros, which some file systems leave after a power failure: the
checksum covers kind and length too, so that zeros are no chunk.

What checks was written by a node under this key secret, as it stands: the header says whose, the checksum that nothing
changed by accident. Neither is a signature; who can write the state directory can write buckets. See ADR 0015.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from struct import Struct
from typing import BinaryIO, Final, NamedTuple
from zlib import crc32

from ratelimitd.buckets.codec import Value, is_log
from ratelimitd.buckets.keys import STORED_KEY_BYTES

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
