import pytest

from ratelimitd.http2.headers import Encoder
from ratelimitd.http2.hpack_decoder import Decoder
from ratelimitd_wire.static_table import FIRST_DYNAMIC_INDEX, STATIC_TABLE
from tests import rfc7541_examples as rfc

OWN = (b"custom-key", b"custom-value")


def dynamic(encoder):
    return tuple(field for field, _ in encoder._table.entries[FIRST_DYNAMIC_INDEX:])


def test_the_requests_of_appendix_c_are_encoded_as_there():
    encoder = Encoder()
    for example in rfc.REQUESTS_HUFFMAN:
        assert encoder.encode(example.fields) == example.block
        assert dynamic(encoder) == example.table


def test_the_responses_of_appendix_c_evict_as_there():
    encoder, decoder = Encoder(rfc.RESPONSE_TABLE_BYTES), Decoder(rfc.RESPONSE_TABLE_BYTES)
    for example in rfc.RESPONSES_HUFFMAN:
        assert decoder.decode(encoder.encode(example.fields)) == example.fields
        assert dynamic(encoder) == example.table
        assert encoder._table.used_bytes == example.table_bytes


def test_a_string_is_huffman_coded_only_where_that_is_shorter():
    assert Encoder().encode([(b":status", b"307")]) == b"\x48\x03307"
    assert Encoder().encode([(b":status", b"302")]) == b"\x48\x82\x64\x02"


def test_no_fields_are_an_empty_block():
    assert Encoder().encode([]) == b""


def test_a_static_field_is_one_octet_and_stays_out_of_the_table():
    encoder = Encoder()
    assert encoder.encode(STATIC_TABLE) == bytes(range(0x81, 0x81 + 61))
    assert dynamic(encoder) == ()


def test_a_repeated_field_is_an_index():
    encoder = Encoder()
    first = encoder.encode([OWN])
    assert first[:1] == b"\x40"
    assert encoder.encode([OWN]) == b"\xbe"
    encoder.encode([(b"x", b"y")])
    assert encoder.encode([OWN]) == b"\xbf"


def test_a_name_comes_from_the_static_table_first_and_then_from_the_dynamic_one():
    encoder = Encoder()
    assert encoder.encode([(b":path", b"/x")])[:1] == b"\x44"
    encoder.encode([OWN])
    assert encoder.encode([(b"custom-key", b"!")]) == b"\x7e\x01!"


def test_a_sensitive_field_is_never_indexed_not_even_when_a_table_has_it():
    encoder = Encoder()
    encoder.encode([OWN])
    block = encoder.encode(
        [(b"authorization", b"!"), OWN, (b"k", b"!")], sensitive={b"authorization", b"k"}
    )
    assert block == b"\x1f\x08\x01!" + b"\xbe" + b"\x10\x01k\x01!"
    assert encoder.encode([OWN], sensitive=[b"custom-key"])[:2] == b"\x1f\x2f"
    assert dynamic(encoder) == (OWN,)


def test_a_field_that_would_empty_the_table_is_not_indexed():
    encoder, decoder = Encoder(100), Decoder(100)
    decoder.decode(encoder.encode([OWN]))
    long = (b"custom-key", b"v" * 59)
    block = encoder.encode([long])
    assert block[:2] == b"\x0f\x2f"
    assert decoder.decode(block) == (long,)
    assert dynamic(encoder) == (OWN,)


@pytest.mark.parametrize(
    ("settings", "updates"),
    [
        ((4096,), b""),
        ((65_536,), b""),
        ((100,), b"\x3f\x45"),
        ((0,), b"\x20"),
        ((100, 0, 50), b"\x20\x3f\x13"),
        ((0, 4096), b"\x20\x3f\xe1\x1f"),
        ((100, 4096), b"\x3f\x45\x3f\xe1\x1f"),
    ],
)
def test_a_changed_setting_of_the_peer_is_followed_in_the_next_block_only(settings, updates):
    encoder = Encoder()
    encoder.encode([OWN])
    for max_table_bytes in settings:
        encoder.set_max_table_bytes(max_table_bytes)
    assert encoder.encode([(b":method", b"POST")]) == updates + b"\x83"
    assert encoder.encode([(b":method", b"POST")]) == b"\x83"
    assert encoder._table.max_bytes == min(settings[-1], 4096)


def test_our_own_smaller_table_is_announced_in_the_first_block():
    encoder = Encoder(0)
    encoder.set_max_table_bytes(4096)
    assert encoder.encode([(b":method", b"POST")]) == b"\x20\x83"
    assert encoder.encode([OWN]) == encoder.encode([OWN])
    assert dynamic(encoder) == ()


def test_a_larger_table_is_used_when_the_peer_allows_it():
    encoder = Encoder(8192)
    assert encoder.encode([]) == b""
    encoder.set_max_table_bytes(65_536)
    assert encoder.encode([]) == b"\x3f\xe1\x3f"
    assert encoder._table.max_bytes == 8192


def test_both_ends_stay_in_step_when_entries_fall_out_of_the_table():
    encoder, decoder = Encoder(), Decoder()
    for number in range(300):
        fields = (OWN, (b"grpc-message", b"number %d" % number), (b":status", b"200"))
        assert decoder.decode(encoder.encode(fields)) == fields
        assert dynamic(encoder) == tuple(
            field for field, _ in decoder._table.entries[FIRST_DYNAMIC_INDEX:]
        )
