"""Protobuf's wire format by hand, for messages that no library writes."""


def varint(value: int) -> bytes:
    """Return the varint of a number from −2^63 to 2^64−1; negative ones take ten bytes, as in protobuf."""
    value %= 2**64
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def field(number: int, content: bytes) -> bytes:
    """A length-delimited field."""
    return varint(number << 3 | 2) + varint(len(content)) + content
