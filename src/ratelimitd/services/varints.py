"""Varints of protobuf (encoding guide, "Base 128 Varints"), for what is written and read without a message object.

Pure; never knows what a number means.
"""

from __future__ import annotations

from typing import Final

_MORE: Final = 0x80
"""The bit of a varint's byte that says another one follows."""

ONE_BYTE: Final = _MORE
"""Numbers below are one byte."""

_MAX_BYTES: Final = 10

_KEPT_BITS: Final = 14
_KEPT: Final = 1 << _KEPT_BITS


def varint(number: int) -> bytes:
    """The shortest encoding of a number that is not negative."""
    if number < _KEPT:
        return KEPT[number]
    return _CONTINUED[number & _KEPT - 1] + varint(number >> _KEPT_BITS)


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """The varint at ``position`` and the position behind it; a truncated or overlong one ends the data."""
    value = shift = 0
    for byte in data[position : position + _MAX_BYTES]:
        position += 1
        value |= (byte & ~_MORE) << shift
        if byte < _MORE:
            return value, position
        shift += 7
    return value, len(data)


def _short(number: int) -> bytes:
    """The encoding of a number of at most 14 bits."""
    low, high = number & _MORE - 1, number >> 7
    return bytes((low | _MORE, high)) if high else bytes((low,))


KEPT: Final = tuple(map(_short, range(_KEPT)))
"""The encodings of small numbers: looked up in 30 ns, made in 300. With the next, about 1.4 MB."""

_CONTINUED: Final = tuple(
    bytes((number & _MORE - 1 | _MORE, number >> 7 | _MORE)) for number in range(_KEPT)
)
"""The same where more follows."""
