"""Huffman codes: agreed on with the hpack library, and refused where RFC 7541 has them refused."""

import pytest
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hypothesis import given
from hypothesis import strategies as st

from ratelimitd_client.http2 import huffman
from ratelimitd_client.http2.errors import ErrorCode, PeerError

ENCODER = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH)


@given(st.binary())
def test_what_another_library_wrote_is_read(string):
    assert huffman.decode(ENCODER.encode(string)) == string


def test_every_symbol_is_read_alone_and_among_others():
    for symbol in range(256):
        string = bytes((symbol, 0x61, symbol))
        assert huffman.decode(ENCODER.encode(string)) == string


@pytest.mark.parametrize(
    "code",
    [b"\xff\xff\xff\xff", b"\xff", b"\x1f\xff", b"\x00"],
    ids=["EOS", "8 bits of padding", "an octet of padding", "padding of zeros"],
)
def test_what_no_string_may_end_with_is_refused(code):
    with pytest.raises(PeerError) as refused:
        huffman.decode(code)
    assert refused.value.code is ErrorCode.COMPRESSION_ERROR
