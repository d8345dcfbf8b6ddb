import pytest

from ratelimitd_wire.huffman import (
    INTEGER_TOO_LONG,
    MAX_CONTINUATION_OCTETS,
    TRUNCATED,
    HpackError,
    decode_continuation,
    encode_integer,
)


def test_ten_in_five_bits_is_one_octet_as_in_c_1_1():
    assert encode_integer(10, 5, 0) == bytes([0b01010])


def test_1337_in_five_bits_is_three_octets_as_in_c_1_2():
    octets = bytes([0b11111, 0b10011010, 0b00001010])
    assert encode_integer(1337, 5, 0) == octets
    assert decode_continuation(octets, 1, 31) == (1337, 3)


def test_42_in_eight_bits_is_one_octet_as_in_c_1_3():
    assert encode_integer(42, 8, 0) == bytes([42])


def test_the_pattern_precedes_the_prefix():
    assert encode_integer(2, 7, 0x80) == b"\x82"
    assert encode_integer(31, 5, 0x20) == b"\x3f\x00"


@pytest.mark.parametrize("bits", range(1, 9))
def test_a_number_at_the_edge_of_its_prefix_round_trips(bits):
    full = (1 << bits) - 1
    assert encode_integer(full - 1, bits, 0) == bytes([full - 1])
    for value in (full, full + 127, full + 128, full + (1 << 35) - 1):
        octets = encode_integer(value, bits, 0)
        assert octets[0] == full
        assert decode_continuation(octets + b"rest", 1, full) == (value, len(octets))


def test_superfluous_zeros_of_an_integer_are_accepted_up_to_the_limit():
    padding = b"\x80" * (MAX_CONTINUATION_OCTETS - 1)
    assert decode_continuation(padding + b"\x01", 0, 127) == (127 + (1 << 28), 5)
    assert decode_continuation(padding + b"\x00", 0, 127) == (127, 5)


def test_an_integer_above_the_octet_limit_is_refused():
    with pytest.raises(HpackError, match=INTEGER_TOO_LONG):
        decode_continuation(b"\x80" * MAX_CONTINUATION_OCTETS + b"\x00", 0, 127)


@pytest.mark.parametrize("octets", [b"", b"\x80", b"\xff\xff\xff\xff"])
def test_a_truncated_integer_is_refused(octets):
    with pytest.raises(HpackError, match=TRUNCATED):
        decode_continuation(octets, 0, 127)
