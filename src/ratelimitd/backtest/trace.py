"""The format of a trace: recorded checks, without identifiers. Pure.

A trace is the files of one directory; a file contains the checks that one process, a *writer*, recorded in a period. A
file is a header, then blocks with a checksum each; all integers are little-endian:

    header   magic with the version · trace (16 bytes) · writer (8)
    block    kind (1 byte) · length (4) · CRC-32 of kind, length and payload (4) · payload
    C   checks:   their number (4) · further identities (4) · checks lost before them (8) · length of the kinds (4) ·
                  kinds, JSON · then columns, a value for each check: time (8, µs since the Unix epoch) · identity (8) ·
                  cost (4) · number of the kind (2) · whether it was allowed (1); then further identities (8 each)
    E   end:      checks in the file (8) · holds made meanwhile, which are not in the trace (8) · recorded share of
                  identities (8, a double)

A *kind* is the common part of checks: identifier types, endpoint, peek, longest wait, and plans of the identities. An
identity is a keyed digest of type and identifier, with a key for each trace, so that identities can be linked within a
trace and not across traces. Only a file with its end is complete. A checksum detects accidents, not forgery.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import islice, repeat
from struct import Struct, error, iter_unpack, pack, unpack_from
from typing import Any, BinaryIO, Final, NamedTuple, NoReturn, TypeAlias
from zlib import crc32

from ratelimitd.errors import TraceInvalidError
from ratelimitd.model import MAX_TIME_US, MAX_WAIT_MS, TYPE_NAME
from ratelimitd.rules.validation import CONTROL_CHARACTER, MAX_ENDPOINT_CHARS, NAME

MAGIC: Final = b"ratelimitd trace 1\n"
_MAGIC_OF_ANY: Final = re.compile(rb"ratelimitd trace ([0-9]{1,9})\n")

TRACE_BYTES: Final = 16
WRITER_BYTES: Final = 8
IDENTITY_BYTES: Final = 8
"""64 bits: two of a million identities share one with a probability of 3e-8."""
HEADER_BYTES: Final = len(MAGIC) + TRACE_BYTES + WRITER_BYTES

MAX_BLOCK_CHECKS: Final = 65_536
MAX_TYPES: Final = 8
MAX_PAYLOAD_BYTES: Final = 1 << 26
"""Greater lengths are invalid; full blocks of the longest kinds are smaller."""

CHECKS: Final = b"C"
END: Final = b"E"

_TITLE: Final = Struct("<cI")
_CHECKSUM: Final = Struct("<I")
_HEAD: Final = Struct("<IIQI")
_END: Final = Struct("<QQd")
_CHECK_BYTES: Final = 8 + IDENTITY_BYTES + 4 + 2 + 1


class Kind(NamedTuple):
    """The common part of checks. ``plans`` is empty, or has one for each of ``types``, an empty string for none."""

    types: tuple[str, ...]
    endpoint: str
    peek: bool = False
    max_wait_ms: int = 0
    plans: tuple[str, ...] = ()


Recorded: TypeAlias = tuple[int, bytes, int, int, int, tuple[bytes, ...]]
"""One check: (time in µs since the Unix epoch, identity, cost, number of its kind, 1 if allowed else 0, further
identities). A bare tuple, because ``zip`` makes it."""


class Block(NamedTuple):
    """Checks in the order of their decisions, as columns: the fields of :data:`Recorded`.

    ``further`` has an identity for each type but the first of each check's kind. ``lost`` is the number of checks
    before these that were not recorded.
    """

    kinds: Sequence[Kind]
    times: Sequence[int]
    identities: Sequence[bytes]
    costs: Sequence[int]
    numbers: Sequence[int]
    allowed: Sequence[int]
    further: Sequence[bytes] = ()
    lost: int = 0


class End(NamedTuple):
    """The end of a file: its number of checks, the holds made meanwhile, and the share of recorded identities."""

    checks: int
    holds: int = 0
    share: float = 1.0


def header(trace: bytes, writer: bytes) -> bytes:
    """Return the first bytes of a file."""
    return MAGIC + trace + writer


def encode_block(block: Block) -> bytes:
    """Return an encoded block of at most ``MAX_BLOCK_CHECKS`` checks and as many kinds."""
    count = len(block.times)
    kinds = json.dumps(block.kinds, separators=(",", ":")).encode()
    return _encode(
        CHECKS,
        _HEAD.pack(count, len(block.further), block.lost, len(kinds)),
        kinds,
        pack(f"<{count}q", *block.times),
        b"".join(block.identities),
        pack(f"<{count}i", *block.costs),
        pack(f"<{count}H", *block.numbers),
        bytes(block.allowed),
        *block.further,
    )


def encode_end(end: End) -> bytes:
    """Return the block that ends a file."""
    return _encode(END, _END.pack(*end))


class TraceReader:
    """Reads one file, which errors call ``name``.

    Raises, also from :meth:`blocks`:
        TraceInvalidError: it is not a trace, of another version, truncated, altered or malformed; the message names the
            byte.
        OSError: it cannot be read.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self._offset = 0
        self.end: End | None = None
        """``None`` until all blocks have been read."""
        head = self._file.read(HEADER_BYTES)
        found = _MAGIC_OF_ANY.match(head)
        if found is None:
            self._refuse("is not a trace" if head else "is empty")
        if found[0] != MAGIC:
            version = found[1].decode()
            self._refuse(f"has format version {version}; this release reads version 1")
        if len(head) < HEADER_BYTES:
            self._refuse_cut()
        self.trace = head[len(MAGIC) : -WRITER_BYTES]
        self.writer = head[-WRITER_BYTES:]

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks of checks; the file is complete if this returns without an error."""
        checks, self._offset = 0, HEADER_BYTES
        self._file.seek(HEADER_BYTES)
        while True:
            kind, payload, size = self._next()
            if kind == END:
                break
            block = self._decoded(payload)
            yield block
            checks += len(block.times)
            self._offset += size
        end = End(*_END.unpack(payload)) if len(payload) == _END.size else None
        if end is None or end.checks != checks or not 0 <= end.share <= 1:
            self._refuse_malformed()
        self.end = end
        self._offset += size
        if self._file.read(1):
            self._refuse(f"has data after its end, at byte {self._offset}")

    def _next(self) -> tuple[bytes, bytes, int]:
        """Return the kind and payload of the next block, and its size."""
        head = self._file.read(_TITLE.size + _CHECKSUM.size)
        if len(head) < _TITLE.size + _CHECKSUM.size:
            self._refuse_cut()
        kind, length = _TITLE.unpack_from(head)
        if kind not in {CHECKS, END} or length > MAX_PAYLOAD_BYTES:
            self._refuse_altered()
        payload = self._file.read(length)
        if len(payload) < length:
            self._refuse_cut()
        if head[_TITLE.size :] != _checksum(head[: _TITLE.size], payload):
            self._refuse_altered()
        return kind, payload, len(head) + length

    def _decoded(self, payload: bytes) -> Block:
        try:
            return _decode(payload)
        except (ValueError, TypeError, RecursionError, error):
            self._refuse_malformed()

    def _refuse_cut(self) -> NoReturn:
        self._refuse(
            f"is truncated: the block at byte {self._offset} is incomplete, or the end is missing"
        )

    def _refuse_altered(self) -> NoReturn:
        self._refuse(f"was altered: the block at byte {self._offset} differs from its checksum")

    def _refuse_malformed(self) -> NoReturn:
        self._refuse(f"is malformed: the block at byte {self._offset} was not written by a node")

    def _refuse(self, what: str) -> NoReturn:
        message = f"{self._name} {what}"
        raise TraceInvalidError(message)


def checks_of(block: Block, numbers: Sequence[int]) -> Iterator[Recorded]:
    """Return the checks of a block; ``numbers`` maps its kinds to the reader's numbers."""
    more = [len(kind.types) - 1 for kind in block.kinds]
    further: Iterator[tuple[bytes, ...]] = repeat(())
    if block.further:
        left = iter(block.further)
        further = (tuple(islice(left, more[number])) for number in block.numbers)
    # Iterates in C: 0.1 µs a check.
    return zip(  # noqa: B905 -- the last one may be endless
        block.times,
        block.identities,
        block.costs,
        map(numbers.__getitem__, block.numbers),
        block.allowed,
        further,
    )


def _decode(payload: bytes) -> Block:
    """Decode a block of checks.

    Raises:
        ValueError, TypeError, RecursionError, struct.error: it was not written by :func:`encode_block`.
    """
    count, further, lost, size = _HEAD.unpack_from(payload)
    if not 0 < count <= MAX_BLOCK_CHECKS:
        raise ValueError
    at = _HEAD.size + size
    if len(payload) != at + count * _CHECK_BYTES + further * IDENTITY_BYTES:
        raise ValueError
    kinds = [_kind(*kind) for kind in json.loads(payload[_HEAD.size : at])]
    times = unpack_from(f"<{count}q", payload, at)
    identities = _identities(payload, at + 8 * count, count)
    at += (8 + IDENTITY_BYTES) * count
    costs = unpack_from(f"<{count}i", payload, at)
    numbers = unpack_from(f"<{count}H", payload, at + 4 * count)
    allowed = payload[at + 6 * count : at + 7 * count]
    more = [len(kind.types) - 1 for kind in kinds]
    if (
        min(times) < 0
        or max(times) > MAX_TIME_US
        or min(costs) < 1
        or max(numbers) >= len(kinds)
        or max(allowed) > 1
        or further != (sum([more[number] for number in numbers]) if any(more) else 0)
    ):
        raise ValueError
    others = _identities(payload, at + 7 * count, further)
    return Block(kinds, times, identities, costs, numbers, allowed, others, lost)


def _identities(payload: bytes, start: int, count: int) -> list[bytes]:
    columns = memoryview(payload)[start : start + count * IDENTITY_BYTES]
    return [identity for (identity,) in iter_unpack(f"{IDENTITY_BYTES}s", columns)]


def _kind(  # noqa: PLR0917 -- the fields of a kind
    types: Any, endpoint: Any, peek: Any, max_wait_ms: Any, plans: Any
) -> Kind:
    is_kind = (
        isinstance(types, list)
        and 0 < len(types) <= MAX_TYPES
        and len(set(types)) == len(types)
        and all(TYPE_NAME.fullmatch(one) for one in types)
        and isinstance(endpoint, str)
        and 0 < len(endpoint) <= MAX_ENDPOINT_CHARS
        and not CONTROL_CHARACTER.search(endpoint)
        and endpoint.encode()  # a ValueError of a lone surrogate
        and isinstance(peek, bool)
        and type(max_wait_ms) is int  # a bool is none
        and 0 <= max_wait_ms <= MAX_WAIT_MS
        and isinstance(plans, list)
        and len(plans) in {0, len(types)}
        and all(one == "" or NAME.fullmatch(one) for one in plans)
    )
    if not is_kind:
        raise ValueError
    return Kind(tuple(types), endpoint, peek, max_wait_ms, tuple(plans))


def _encode(kind: bytes, *parts: bytes) -> bytes:
    payload = b"".join(parts)
    title = _TITLE.pack(kind, len(payload))
    return title + _checksum(title, payload) + payload


def _checksum(title: bytes, payload: bytes) -> bytes:
    return _CHECKSUM.pack(crc32(payload, crc32(title)))
