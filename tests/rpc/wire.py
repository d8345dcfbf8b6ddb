"""Protobuf's wire format by hand, for messages that no library would write."""


def varint(value: int) -> bytes:
    """The varint of a number from −2^63 to 2^64−1, negative ones in ten bytes as protobuf has it."""
    value %= 2**64
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def field(number: int, content: bytes) -> bytes:
    """A length-delimited field."""
    return varint(number << 3 | 2) + varint(len(content)) + content
