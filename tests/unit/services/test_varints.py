import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimitd.services.wire_format import KEPT, read_varint, varint
from tests.rpc.wire import varint as written_by_hand

EDGES = [0, 1, 127, 128, 2**14 - 1, 2**14, 2**21, 2**28 - 1, 2**28, 2**31 - 1, 2**42, 2**64 - 1]

numbers = st.one_of(st.sampled_from(EDGES), st.integers(0, 2**64 - 1))


@given(numbers)
def test_a_number_is_written_as_short_as_can_be(number):
    assert varint(number) == written_by_hand(number)


def test_the_kept_encodings_are_those_of_their_places():
    assert list(KEPT) == [*map(written_by_hand, range(len(KEPT)))]


@given(numbers, st.binary(max_size=5), st.binary(max_size=12))
def test_what_was_written_is_read_wherever_it_stands(number, before, behind):
    encoded = varint(number)
    place = len(before)
    assert read_varint(before + encoded + behind, place) == (number, place + len(encoded))


@pytest.mark.parametrize("data", [b"\x85\x00", b"\x85\x80\x00", b"\x85" + b"\x80" * 8 + b"\x00"])
def test_a_varint_that_is_longer_than_it_has_to_be_is_read(data):
    assert read_varint(data + b"more", 0) == (5, len(data))


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 9])
def test_a_varint_that_is_cut_off_ends_the_data(data):
    assert read_varint(data, 0)[1] == len(data)


def test_a_varint_of_more_than_ten_octets_ends_the_data():
    assert read_varint(b"\x80" * 10 + b"\x01rest", 0)[1] == 15
