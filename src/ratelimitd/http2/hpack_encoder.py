"""The encoder of one connection: lists of fields to header blocks (RFC 7541).

Off the check path, whose blocks are made in advance of fields that no table changes, so it is made to be read: a field
that is not in the static table is searched for in the dynamic one from end to end, at most 128 entries of 4096 bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from ratelimitd.http2.hpack_decoder import DEFAULT_MAX_BYTES, HeaderTable, field_bytes
from ratelimitd_wire import huffman
from ratelimitd_wire.huffman import encode_integer
from ratelimitd_wire.static_table import FIRST_DYNAMIC_INDEX, STATIC_TABLE, Field

_STATIC_INDEX: Final = {field: index for index, field in enumerate(STATIC_TABLE, 1)}
_STATIC_NAME_INDEX: Final = {
    name: index for index, (name, _) in reversed(list(enumerate(STATIC_TABLE, 1)))
}
"""The first index that has the name."""


class Encoder:
    """Encodes the header blocks for one peer, which must get them in this order.

    ``max_table_bytes`` is the most that this side will ever keep, whatever the peer would allow.
    """

    __slots__ = ("_cap_bytes", "_smallest_bytes", "_table", "_wanted_bytes")

    def __init__(self, max_table_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._cap_bytes = max_table_bytes
        self._table = HeaderTable()
        self._wanted_bytes = self._smallest_bytes = DEFAULT_MAX_BYTES
        self.set_max_table_bytes(DEFAULT_MAX_BYTES)

    def set_max_table_bytes(self, max_table_bytes: int) -> None:
        """Follow the peer's SETTINGS_HEADER_TABLE_SIZE; the next block begins by saying so, if it changes anything."""
        self._wanted_bytes = min(max_table_bytes, self._cap_bytes)
        self._smallest_bytes = min(self._smallest_bytes, self._wanted_bytes)

    def encode(self, fields: Iterable[Field], *, sensitive: Collection[bytes] = ()) -> bytes:
        """Return the block.

        ``sensitive`` are the names of fields which no one on the way may put into a table (§7.1.3).
        """
        parts = self._updates()
        for field in fields:
            parts += self._field(field, never_index=field[0] in sensitive)
        return b"".join(parts)

    def _updates(self) -> list[bytes]:
        """Say how the maximum size has changed: the smallest since the last block, then the present one (§4.2)."""
        updates = []
        for max_bytes in (self._smallest_bytes, self._wanted_bytes):
            if max_bytes != self._table.max_bytes:
                self._table.resize(max_bytes)
                updates.append(encode_integer(max_bytes, 5, 0x20))
        self._smallest_bytes = self._wanted_bytes
        return updates

    def _field(self, field: Field, *, never_index: bool) -> list[bytes]:
        if never_index:
            return self._literal(field, 4, 0x10)
        index = _STATIC_INDEX.get(field) or self._dynamic_index(field)
        if index:
            return [encode_integer(index, 7, 0x80)]
        size = field_bytes(field)
        if size > self._table.max_bytes:
            return self._literal(field, 4, 0x00)  # indexing it would empty the table
        parts = self._literal(field, 6, 0x40)
        self._table.insert(field, size)
        return parts

    def _literal(self, field: Field, prefix_bits: int, pattern: int) -> list[bytes]:
        name, value = field
        index = _STATIC_NAME_INDEX.get(name) or self._dynamic_name_index(name)
        head = encode_integer(index, prefix_bits, pattern)
        return [head, _string(value)] if index else [head, _string(name), _string(value)]

    def _dynamic_index(self, field: Field) -> int:
        """Return the index of the field in the dynamic table, or 0."""
        for index, entry in enumerate(self._table.entries[FIRST_DYNAMIC_INDEX:]):
            if entry[0] == field:
                return index + FIRST_DYNAMIC_INDEX
        return 0

    def _dynamic_name_index(self, name: bytes) -> int:
        """Return the index of a field with this name in the dynamic table, or 0."""
        for index, entry in enumerate(self._table.entries[FIRST_DYNAMIC_INDEX:]):
            if entry[0][0] == name:
                return index + FIRST_DYNAMIC_INDEX
        return 0


def _string(string: bytes) -> bytes:
    """Encode a string literal, by the Huffman code where that is shorter (§5.2)."""
    code = huffman.encode(string)
    if len(code) < len(string):
        return encode_integer(len(code), 7, 0x80) + code
    return encode_integer(len(string), 7, 0x00) + string
