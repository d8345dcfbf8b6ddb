"""The Huffman code of RFC 7541 Appendix B, integers and string literals of HPACK. Pure.

The decoder is a state machine with one step per octet. A state is an inner node of the code tree: the bits read that do
not complete a symbol. Its row has one transition per octet: the symbols which that octet completes, the row of the next
state, and whether a string may end there. Rows refer to each other, so a step is one subscript and one unpacking. All
65,536 transitions would take 40 ms to build and 6 MB to keep, and text needs a tenth of them. A row is therefore filled
on first use: 0.2 ms for each of 257 states.
"""

from __future__ import annotations

from typing import Final

# Errors of header blocks. Texts are constants: they contain no input of a peer.


class HpackError(Exception):
    """The block violates RFC 7541, and the dynamic table is out of sync: COMPRESSION_ERROR ends the connection.

    The decoder must not be used afterwards.
    """


class HeaderBombError(HpackError):
    """The list is so far over the limit that it is treated as an attack: the connection ends."""


class HeaderListTooLargeError(Exception):
    """The list is over the limit. The whole block was read and the table is in sync; the connection may continue."""


TRUNCATED = "the block ends within a field"
INTEGER_TOO_LONG = "an integer has too many octets"
INDEX_INVALID = "an index is 0 or beyond the end of the table"
HUFFMAN_INVALID = "a Huffman code is EOS, or the padding is too long or not all ones"
UPDATE_MISPLACED = "a table size update follows a field, or two other updates"
UPDATE_TOO_LARGE = "a table size update is above the agreed maximum"
LIST_TOO_LARGE = "the header list is too large"


EOS: Final = 256
"""The end-of-string symbol, which must never be encoded (§5.2)."""

SYMBOLS_BY_LENGTH: Final[dict[int, bytes]] = {
    5: b"012aceiost",
    6: b" %-./3456789=A_bdfghlmnpru",
    7: b":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz",
    8: b"&*,;XZ",
    10: b'!"()?',
    11: b"'+|",
    12: b"#>",
    13: b"\x00$@[]~",
    14: b"^}",
    15: b"<`{",
    19: b"\\\xc3\xd0",
    20: b"\x80\x82\x83\xa2\xb8\xc2\xe0\xe2",
    21: b"\x99\xa1\xa7\xac\xb0\xb1\xb3\xd1\xd8\xd9\xe3\xe5\xe6",
    22: b"\x81\x84\x85\x86\x88\x92\x9a\x9c\xa0\xa3\xa4\xa9\xaa\xad\xb2\xb5\xb9\xba\xbb\xbd\xbe\xc4\xc6\xe4\xe8\xe9",
    23: b"\x01\x87\x89\x8a\x8b\x8c\x8d\x8f\x93\x95\x96\x97\x98\x9b\x9d\x9e\xa5\xa6\xa8\xae\xaf\xb4\xb6\xb7\xbc\xbf"
    b"\xc5\xe7\xef",
    24: b"\t\x8e\x90\x91\x94\x9f\xab\xce\xd7\xe1\xec\xed",
    25: b"\xc7\xcf\xea\xeb",
    26: b"\xc0\xc1\xc8\xc9\xca\xcd\xd2\xd5\xda\xdb\xee\xf0\xf2\xf3\xff",
    27: b"\xcb\xcc\xd3\xd4\xd6\xdd\xde\xdf\xf1\xf4\xf5\xf6\xf7\xf8\xfa\xfb\xfc\xfd\xfe",
    28: b"\x02\x03\x04\x05\x06\x07\x08\x0b\x0c\x0e\x0f\x10\x11\x12\x13\x14\x15\x17\x18\x19\x1a\x1b\x1c\x1d\x1e\x1f"
    b"\x7f\xdc\xf9",
    30: b"\n\r\x16",
}
"""The symbols by the length of their code in bits. They define the whole code, which is canonical: codes of one length
count up in the order of the symbols, and the next length continues where the shorter one ended. EOS is the last, thirty
ones."""

Row = list[tuple[bytes, "Row", bool]]


def decode(code: bytes) -> bytes:
    """Return the string.

    Raises:
        HpackError: the code contains EOS, or its padding has more than 7 bits or bits other than ones (§5.2).
    """
    while True:
        row, complete = _START, True
        symbols: list[bytes] = []
        add = symbols.append
        try:
            for octet in code:
                some, row, complete = row[octet]
                add(some)
        except IndexError:
            _fill(row)
            continue
        if not complete:
            raise HpackError(HUFFMAN_INVALID)
        return b"".join(symbols)


def encode(string: bytes) -> bytes:
    """Return the code, padded with ones to a whole octet."""
    bits = "".join([_CODES[symbol] for symbol in string])
    bits += "1" * (-len(bits) % 8)
    return int(bits or "0", 2).to_bytes(len(bits) // 8, "big")


def _make_codes() -> dict[int, str]:
    """Return the code of each symbol, as a text of zeros and ones."""
    codes, code, length = {}, 0, 0
    for longer, symbols in SYMBOLS_BY_LENGTH.items():
        code <<= longer - length
        length = longer
        for symbol in symbols:
            codes[symbol] = f"{code:0{length}b}"
            code += 1
    codes[EOS] = f"{code:0{length}b}"
    return codes


def _fill(row: Row) -> None:
    """Build the transitions of a state on its first use. Threads see them all or none, and may fill a row twice."""
    start = next(state for state, its_row in _ROWS.items() if its_row is row)
    transitions: Row = []
    for octet in range(256):
        symbols, state = bytearray(), start
        for bit in f"{octet:08b}":
            # EOS has no transitions and no string may end in it, so the loop of `decode` need not check for it.
            if state != _CODES[EOS]:
                state += bit
            if state in _SYMBOLS:
                symbols.append(_SYMBOLS[state])
                state = ""
        # Padding is the first bits of EOS, fewer than 8.
        transitions.append((bytes(symbols), _ROWS[state], len(state) < 8 and "0" not in state))
    row[:] = transitions


_CODES: Final = _make_codes()
_SYMBOLS: Final = {code: symbol for symbol, code in _CODES.items() if symbol != EOS}
_ROWS: Final[dict[str, Row]] = {
    state: []
    for code in _CODES.values()
    for state in (*(code[:length] for length in range(len(code))), _CODES[EOS])
}
"""The rows by the bits of their state; the start state has none."""
_START: Final = _ROWS[""]


# Integers with a prefix (RFC 7541 §5.1), and strings (§5.2).

MAX_CONTINUATION_OCTETS: Final = 5
"""35 bits hold every valid value (a SETTINGS value has 32). Further octets are superfluous zeros; §5.1 requires an
error for an integer over the limit."""


def decode_continuation(block: bytes, at: int, prefix_max: int) -> tuple[int, int]:
    """Read the rest of an integer whose prefix is all ones.

    Args:
        block: the whole header block.
        at: the position of the first octet after the prefix.
        prefix_max: the value of the full prefix, 2^N - 1.

    Returns:
        The integer and the position after it.

    Raises:
        HpackError: the block is truncated, or the integer has more than `MAX_CONTINUATION_OCTETS`.
    """
    value = prefix_max
    octets = block[at : at + MAX_CONTINUATION_OCTETS]
    for count, octet in enumerate(octets):
        value += (octet & 0x7F) << (7 * count)
        if octet < 0x80:
            return value, at + count + 1
    raise HpackError(INTEGER_TOO_LONG if len(octets) == MAX_CONTINUATION_OCTETS else TRUNCATED)


def decode_string(block: bytes, at: int) -> tuple[bytes, int]:
    """Read a string literal (RFC 7541 §5.2); return it and the position after it.

    Raises:
        HpackError: the block is truncated, or the length or the code is malformed.
    """
    octet = block[at] if at < len(block) else 0x7F  # a full prefix without continuation: truncated
    at += 1
    length = octet & 0x7F
    if length == 0x7F:
        length, at = decode_continuation(block, at, length)
    end = at + length
    if end > len(block):
        raise HpackError(TRUNCATED)
    string = block[at:end]
    return (decode(string) if octet & 0x80 else string), end


def encode_integer(value: int, prefix_bits: int, pattern: int) -> bytes:
    """Encode a number of at least 0; ``pattern`` has the bits before the prefix in the first octet."""
    prefix_max = (1 << prefix_bits) - 1
    if value < prefix_max:
        return bytes((pattern | value,))
    octets = bytearray((pattern | prefix_max,))
    value -= prefix_max
    while value >= 0x80:
        octets.append(value & 0x7F | 0x80)
        value >>= 7
    octets.append(value)
    return bytes(octets)
