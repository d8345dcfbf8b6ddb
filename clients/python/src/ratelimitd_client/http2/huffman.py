"""The Huffman code of RFC 7541 Appendix B, from code to string. Pure.

We send no such code, and of what nodes send only error texts hold any: so it is made to be short. A code is looked up
by its bits, written as text, with each length that codes have; the common symbols have the shortest.
"""

from __future__ import annotations

from typing import Final

from ratelimitd_client.http2.errors import ErrorCode, PeerError

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
"""The symbols by the length of their code in bits. The code is canonical: codes of one length count up in the order of
the symbols, and a longer length goes on where the shorter one ended. That of EOS is thirty ones, and never written."""

MAX_PADDING_BITS: Final = 7


def decode(code: bytes) -> bytes:
    """Return the string.

    Raises:
        PeerError: EOS is in it, or it ends with more than 7 bits of padding or with others than ones (section 5.2).
    """
    bits = "".join([f"{octet:08b}" for octet in code])
    string = bytearray()
    at, end = 0, len(bits)
    while at < end:
        for length, symbols in _SYMBOLS:
            symbol = symbols.get(bits[at : at + length])
            if symbol is not None:
                string.append(symbol)
                at += length
                break
        else:
            padding = bits[at:]
            if len(padding) > MAX_PADDING_BITS or "0" in padding:
                raise PeerError(ErrorCode.COMPRESSION_ERROR, "a string is no Huffman code")
            break
    return bytes(string)


def _make_symbols() -> list[tuple[int, dict[str, int]]]:
    """Return for each length of codes the symbols by their codes, written in zeros and ones."""
    made, code, shorter = [], 0, 0
    for length, symbols in SYMBOLS_BY_LENGTH.items():
        code <<= length - shorter
        made.append(
            (length, {f"{code + at:0{length}b}": symbol for at, symbol in enumerate(symbols)})
        )
        code += len(symbols)
        shorter = length
    return made


_SYMBOLS: Final = _make_symbols()
