"""Integers with a prefix (RFC 7541 §5.1): the rest of those that overflow it, and their encoding. Pure."""

from typing import Final

from ratelimitd.http2.hpack.errors import INTEGER_TOO_LONG, TRUNCATED, HpackError

MAX_CONTINUATION_OCTETS: Final = 5
"""35 bits hold every value with a meaning (a SETTINGS value has 32). More octets are zeros sent to waste our time; §5.1
has us treat an integer over our limit as an error."""


def decode_continuation(block: bytes, at: int, prefix_max: int) -> tuple[int, int]:
    """Read what follows a prefix of all ones.

    Args:
        block: the whole header block.
        at: the position of the first octet behind the prefix.
        prefix_max: the value of the full prefix, 2^N - 1.

    Returns:
        The integer and the position behind it.

    Raises:
        HpackError: the block ends, or the integer has more than `MAX_CONTINUATION_OCTETS`.
    """
    value = prefix_max
    octets = block[at : at + MAX_CONTINUATION_OCTETS]
    for count, octet in enumerate(octets):
        value += (octet & 0x7F) << (7 * count)
        if octet < 0x80:
            return value, at + count + 1
    raise HpackError(INTEGER_TOO_LONG if len(octets) == MAX_CONTINUATION_OCTETS else TRUNCATED)


def encode_integer(value: int, prefix_bits: int, pattern: int) -> bytes:
    """Encode a number of at least 0; ``pattern`` holds the bits in front of the prefix in its first octet."""
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
