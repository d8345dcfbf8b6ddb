"""The table that indexes point into: the static entries, and behind them those that a connection adds.

Never reads or writes a block. See RFC 7541 §2.3 and §4.
"""

from __future__ import annotations

from typing import Final

from ratelimitd.http2.hpack.static_table import (
    ENTRY_OVERHEAD_BYTES,
    FIRST_DYNAMIC_INDEX,
    STATIC_TABLE,
    Field,
)

Entry = tuple[Field, int]
"""A field and its size as §4.1 counts it."""

DEFAULT_MAX_BYTES: Final = 4096
"""What both ends assume of a dynamic table until a setting says otherwise (RFC 9113 §6.5.2)."""


def field_bytes(field: Field) -> int:
    """Return the size of a field as §4.1 counts it."""
    name, value = field
    return len(name) + len(value) + ENTRY_OVERHEAD_BYTES


_STATIC_ENTRIES: Final[tuple[Entry, ...]] = (
    ((b"", b""), 0),  # there is no index 0; whoever reads an index refuses it
    *((field, field_bytes(field)) for field in STATIC_TABLE),
)


class HeaderTable:
    """One list of both tables, in which the position of an entry is its index.

    A new entry moves all older ones up by one. To insert it at the first dynamic index costs the move of some pointers
    (at most 128 of them in 4096 bytes, 20 ns); in return every look-up is one subscript, without arithmetic.

    Attributes:
        entries: never assigned anew, so that callers may keep a reference.
        max_bytes: the maximum size of the dynamic table.
        used_bytes: its size, never above ``max_bytes``.
    """

    __slots__ = ("entries", "max_bytes", "used_bytes")

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.entries = list(_STATIC_ENTRIES)
        self.max_bytes = max_bytes
        self.used_bytes = 0

    def insert(self, field: Field, size: int) -> None:
        """Add the newest entry and evict the oldest until all fit; one that can never fit empties the table (§4.4)."""
        entries = self.entries
        entries.insert(FIRST_DYNAMIC_INDEX, (field, size))
        used_bytes = self.used_bytes + size
        # Evicting after inserting gives what §4.4 describes the other way round: the newest entry goes last.
        while used_bytes > self.max_bytes:
            used_bytes -= entries.pop()[1]
        self.used_bytes = used_bytes

    def resize(self, max_bytes: int) -> None:
        """Set the maximum size; evict the oldest entries until the rest fits (§4.3)."""
        self.max_bytes = max_bytes
        while self.used_bytes > max_bytes:
            self.used_bytes -= self.entries.pop()[1]
