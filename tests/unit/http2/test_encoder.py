from ratelimitd.http2.headers import static_block
from ratelimitd.http2.hpack_decoder import Decoder
from ratelimitd_wire.static_table import STATIC_TABLE
from tests import rfc7541_examples as rfc

OWN = (b"custom-key", b"custom-value")


def test_the_examples_of_appendix_c_are_read_as_they_were():
    decoder = Decoder()
    for example in (*rfc.REQUESTS_HUFFMAN, *rfc.RESPONSES_HUFFMAN):
        assert decoder.decode(static_block(example.fields)) == example.fields
    assert decoder.generation == 0


def test_a_string_is_huffman_coded_only_where_that_is_shorter():
    assert static_block([(b":status", b"307")]) == b"\x08\x03307"
    assert static_block([(b":status", b"302")]) == b"\x08\x82\x64\x02"


def test_no_fields_are_an_empty_block():
    assert static_block([]) == b""


def test_a_static_field_is_one_octet():
    assert static_block(STATIC_TABLE) == bytes(range(0x81, 0x81 + 61))


def test_a_name_comes_from_the_static_table_and_no_field_is_indexed():
    assert static_block([(b":path", b"/x")])[:1] == b"\x04"
    assert static_block([OWN])[:1] == b"\x00"
    assert static_block([OWN]) == static_block([OWN])
