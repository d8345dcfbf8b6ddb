"""The decoder of one connection: header blocks to lists of fields (RFC 7541).

Does not interpret fields. The work is proportional to the octets received for any input: an octet costs at most one
look-up and one pointer to a field in the table, or its share of a string. A block that refers to one huge entry
thousands of times makes no copies of it, and decoding stops soon after the list exceeds :data:`BOMB_FACTOR` times its
limit.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from operator import length_hint
from typing import Final

from ratelimitd_wire import huffman
from ratelimitd_wire import huffman as errors
from ratelimitd_wire.huffman import (
    HeaderBombError,
    HeaderListTooLargeError,
    HpackError,
    decode_continuation,
    decode_string,
)
from ratelimitd_wire.static_table import (
    ENTRY_OVERHEAD_BYTES,
    FIRST_DYNAMIC_INDEX,
    STATIC_TABLE,
    Field,
)

Entry = tuple[Field, int]
"""A field and its size as §4.1 counts it."""

DEFAULT_MAX_BYTES: Final = 4096
"""Initial size of a dynamic table (RFC 9113 §6.5.2)."""


def field_bytes(field: Field) -> int:
    """Return the size of a field as §4.1 counts it."""
    name, value = field
    return len(name) + len(value) + ENTRY_OVERHEAD_BYTES


_STATIC_ENTRIES: Final[tuple[Entry, ...]] = (
    ((b"", b""), 0),  # index 0 does not exist and is refused
    *((field, field_bytes(field)) for field in STATIC_TABLE),
)


class HeaderTable:
    """One list of both tables, in which the position of an entry is its index.

    A new entry moves all older ones up by one, which costs 20 ns (at most 128 pointers in 4096 bytes). In return every
    look-up is one subscript, without arithmetic.

    Attributes:
        entries: never reassigned, so that callers may keep a reference.
        max_bytes: the maximum size of the dynamic table.
        used_bytes: its size, never above ``max_bytes``.
    """

    __slots__ = ("entries", "max_bytes", "used_bytes")

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.entries = list(_STATIC_ENTRIES)
        self.max_bytes = max_bytes
        self.used_bytes = 0

    def insert(self, field: Field, size: int) -> None:
        """Add an entry and evict the oldest until all fit; one larger than the table empties it (§4.4)."""
        entries = self.entries
        entries.insert(FIRST_DYNAMIC_INDEX, (field, size))
        used_bytes = self.used_bytes + size
        # The result is that of §4.4, which evicts before inserting: the newest entry is evicted last.
        while used_bytes > self.max_bytes:
            used_bytes -= entries.pop()[1]
        self.used_bytes = used_bytes

    def resize(self, max_bytes: int) -> None:
        """Set the maximum size; evict the oldest entries until the rest fits (§4.3)."""
        self.max_bytes = max_bytes
        while self.used_bytes > max_bytes:
            self.used_bytes -= self.entries.pop()[1]


DEFAULT_MAX_LIST_BYTES: Final = 16_384
"""The limit of gRPC's own servers: metadata is small."""

BOMB_FACTOR: Final = 4
"""A list over its limit ends the stream; one over this multiple of the limit ends the connection. Between the two are
honest mistakes, such as a cookie jar sent to the wrong server."""

MAX_UPDATES: Final = 2
"""Table size updates in one block: the smallest size since the last block, then the final one (§4.2)."""

# equivalent: the fields of a block are the same in parts of any length
RUN_OCTETS: Final = 64
"""Octets of a block that are read in one loop: more than a call has, and few enough to copy before each literal."""

_MOST_INDEX: Final = 0x7F + 0x7E
"""Highest index that `Decoder.follow` reads; it and the next one take two octets."""

_ONE_MORE_ENTRY: Final = bytes(
    # equivalent: as a second octet, 0x7F belongs to an index above `_MOST_INDEX`, which is never followed
    octet + (octet < 0x7F or 0x80 + FIRST_DYNAMIC_INDEX <= octet < 0xFE)
    for octet in range(256)
).replace(b"\xfe\xff", b"\x80\xff")
"""Increments dynamic indexes after an insertion; a table for ``bytes.translate``. An octet above 0x80 is an index; 0xFF
continues in the next octet. 0xFE would need a second octet: it becomes 0x80, which is not an index."""

_MAX_SHORT_BYTES: Final = 0x7E
_MAX_SHORT_VALUE_BYTES: Final = _MAX_SHORT_BYTES * 8 // 5
"""Longest decoded string whose length takes one octet; the shortest code has 5 bits."""

_NEVER: Final = sys.maxsize
"""An index that no table reaches."""


class Decoder:
    """Decodes the header blocks of one peer, in order of arrival.

    A field from a table is the same object every time, so comparing two lists compares pointers: 10 ns a field.

    Attributes:
        generation: changes with the dynamic table. While it is the same, equal blocks have equal fields, so a caller
            may cache results by block.
    """

    __slots__ = (
        "_behind_run",
        "_bomb_bytes",
        "_deepest",
        "_lead",
        "_max_list_bytes",
        "_max_table_bytes",
        "_name",
        "_name_bytes",
        "_run",
        "_table",
        "generation",
    )

    def __init__(
        self,
        max_table_bytes: int = DEFAULT_MAX_BYTES,
        max_list_bytes: int = DEFAULT_MAX_LIST_BYTES,
    ) -> None:
        self.generation = 0
        # A peer that is allowed more than the initial size must announce its use (§6.3).
        self._table = HeaderTable(min(max_table_bytes, DEFAULT_MAX_BYTES))
        self._max_table_bytes = max_table_bytes
        self._max_list_bytes = max_list_bytes
        self._bomb_bytes = max_list_bytes * BOMB_FACTOR
        # State of `follow`: the indexes that a block begins with, the octets between them and the last value, all
        # octets in front of it; the highest index; the name of the last field.
        self._run = self._behind_run = self._lead = b""
        self._deepest = _NEVER
        self._name = b""
        self._name_bytes = 0

    def decode(self, block: bytes) -> tuple[Field, ...]:
        """Return the fields of a whole block, not validated.

        Raises:
            HpackError: the block is malformed; the connection must end.
            HeaderBombError: an HpackError: the list exceeds `BOMB_FACTOR` times the limit.
            HeaderListTooLargeError: the list exceeds the limit; the table is in sync, the connection may continue.
        """
        self._deepest = _NEVER
        fields: list[Field] = []
        try:
            list_bytes = self._read(block, fields)
        except IndexError:
            raise HpackError(errors.INDEX_INVALID) from None
        if list_bytes > self._max_list_bytes:
            if list_bytes > self._bomb_bytes:
                raise HeaderBombError(errors.LIST_TOO_LARGE)
            raise HeaderListTooLargeError(errors.LIST_TOO_LARGE)
        return tuple(fields)

    def expect_another(self, block: bytes, fields: Sequence[Field]) -> None:
        """Prepare :meth:`follow` for blocks that differ from the one just decoded to ``fields`` only in the last value.

        Has no effect unless the block is a run of indexes and then a literal with indexing.
        """
        at = deepest = 0
        for _ in fields[1:]:
            index, at = block[at] - 0x80, at + 1
            if index == 0x7F:
                index, at = index + block[at], at + 1
            if not 0 < index < _MOST_INDEX:  # equivalent: a run with _MOST_INDEX is never followed
                return
            deepest = max(deepest, index + 1)
        name, kind, behind = fields[-1][0], block[at], at + 1
        if kind == 0x40 and block[behind] == len(name) <= _MAX_SHORT_BYTES:
            behind += 1 + len(name)
        elif not 0x40 < kind < 0x7F:
            return
        list_bytes = sum(map(field_bytes, fields)) + _MAX_SHORT_VALUE_BYTES
        if list_bytes <= self._max_list_bytes:
            self._expect(block[:at], block[at:behind], max(deepest, kind & 0x3F))
            self._name, self._name_bytes = name, field_bytes((name, b""))

    def follow(self, block: bytes) -> Field | None:
        """Read a block that differs from the one before it only in the last value; return the last field.

        Returns None for other blocks, or if :meth:`expect_another` prepared none. Then nothing was read, and the caller
        must call :meth:`decode`, which takes three times as long.
        """
        lead, table, deepest = self._lead, self._table, self._deepest
        if deepest >= len(table.entries) or not block.startswith(lead):
            return None
        string = block[len(lead) :]
        size = len(string) - 1
        if not 0 <= size <= _MAX_SHORT_BYTES:  # equivalent: decode reads what is not read here
            return None
        value = string[1:]
        if string[0] == 0x80 | size:
            try:
                value = huffman.decode(value)
            except HpackError:
                return None
        elif string[0] != size:
            return None
        field = (self._name, value)
        table.insert(field, self._name_bytes + len(value))
        self.generation += 1
        self._expect(self._run, self._behind_run, deepest + 1)
        return field

    def _expect(self, run: bytes, behind_run: bytes, deepest: int) -> None:
        """Store the expected beginning of the next block, after an insertion moved the entries of ``run``."""
        run = run.translate(_ONE_MORE_ENTRY)
        if deepest >= 0x7F:
            run = run.replace(b"\x80", b"\xff\x00")
            if deepest > _MOST_INDEX:
                deepest = _NEVER
        self._run = run
        self._behind_run = behind_run
        self._lead = run + behind_run
        self._deepest = deepest

    def _read(self, block: bytes, fields: list[Field]) -> int:
        """Append the fields of a block, up to the one that makes it a bomb; return the size of the list.

        Raises IndexError for an index beyond the table, and HpackError as `decode`.
        """
        entries = self._table.entries
        add = fields.append
        list_bytes = updates = at = 0
        end = len(block)
        while at < end and list_bytes <= self._bomb_bytes:
            # Most of a block is a run of indexes of one octet, or of two when the table is full. A loop over an
            # iterator takes 2/3 of the time of one over positions. Any other octet ends the run.
            run = block[at : at + RUN_OCTETS]
            octets = iter(run)
            octet = more = 0
            for octet in octets:
                if octet < 0xFF:
                    if octet <= 0x80:
                        break
                    index = octet - 0x80
                else:
                    more = next(octets, -1)
                    if not 0 <= more < 0x80:
                        break
                    index = 0x7F + more
                field, field_bytes = entries[index]
                add(field)
                list_bytes += field_bytes
            else:
                at += len(run)
                continue

            at += len(run) - length_hint(octets)
            if 0x20 <= octet < 0x40:
                updates += 1
                at = self._update(block, at, octet, may_come=updates <= MAX_UPDATES and not fields)
                continue
            if octet < 0x80:
                field, field_bytes, at = self._literal(block, at, octet)
            elif octet == 0x80:
                raise IndexError
            else:  # the integer begins behind 0xFF; the loop may have read its first octet
                index, at = decode_continuation(block, at if more < 0 else at - 1, 0x7F)
                field, field_bytes = entries[index]
            add(field)
            list_bytes += field_bytes
        return list_bytes

    def _literal(self, block: bytes, at: int, octet: int) -> tuple[Field, int, int]:
        """Read a literal whose first octet is given (§6.2); return the field, its size and the position behind it.

        "Never indexed" (§6.2.3) matters only to intermediaries, and is ignored.
        """
        indexing = octet >= 0x40
        prefix_max = 0x3F if indexing else 0x0F
        index = octet & prefix_max
        if index == prefix_max:
            index, at = decode_continuation(block, at, prefix_max)
        if index:
            name = self._table.entries[index][0][0]
        else:
            name, at = decode_string(block, at)
        value, at = decode_string(block, at)
        field = (name, value)
        field_bytes = len(name) + len(value) + ENTRY_OVERHEAD_BYTES
        if indexing:
            self._table.insert(field, field_bytes)
            self.generation += 1
        return field, field_bytes, at

    def _update(self, block: bytes, at: int, octet: int, *, may_come: bool) -> int:
        """Apply a dynamic table size update (§6.3); return the position behind it."""
        if not may_come:
            raise HpackError(errors.UPDATE_MISPLACED)
        max_bytes = octet & 0x1F
        if max_bytes == 0x1F:
            max_bytes, at = decode_continuation(block, at, max_bytes)
        if max_bytes > self._max_table_bytes:
            raise HpackError(errors.UPDATE_TOO_LARGE)
        self._table.resize(max_bytes)
        self.generation += 1
        return at
