import hpack
import pytest

from ratelimitd.http2.errors import Cause, ConnectionFailureError
from ratelimitd.http2.headers import Flaw, HeadReader, static_block
from ratelimitd.http2.hpack_decoder import Decoder
from ratelimitd_wire.codes import ErrorCode
from ratelimitd_wire.static_table import STATIC_TABLE
from tests import rfc7541_examples as rfc

PSEUDO = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/a.B/C"),
    (b":authority", b"localhost"),
]
REST = [(b"content-type", b"application/grpc"), (b"te", b"trailers"), (b"user-agent", b"test/1")]


class Blocks:
    """Encodes blocks for one reader."""

    def __init__(self, max_list_bytes=16_384):
        self.encoder = hpack.Encoder()
        self.reader = HeadReader(max_list_bytes)

    def read(self, *fields):
        return self.reader.read(self.encoder.encode(fields))

    def trailers(self, *fields):
        return self.reader.trailers(self.encoder.encode(fields))


def flaw_of(*fields):
    return Blocks().read(*fields).flaw


def with_pseudo(**values):
    """The pseudo-header fields of a request, some replaced, or omitted by None."""
    fields = {**{name[1:].decode(): value for name, value in PSEUDO}, **values}
    return [(f":{name}".encode(), value) for name, value in fields.items() if value is not None]


def test_a_head_has_its_fields_in_order():
    head = Blocks().read(*PSEUDO, *REST)
    assert head.fields == (*PSEUDO, *REST)
    assert (head.flaw, head.content_length, head.model, head.varying, head.owner_data) == (
        None,
        None,
        None,
        (),
        None,
    )


def test_pseudo_header_fields_may_come_in_any_order():
    assert flaw_of(*reversed(PSEUDO), *REST) is None


@pytest.mark.parametrize("name", [b":method", b":scheme", b":path"])
def test_a_request_without_a_required_pseudo_header_field_is_malformed(name):
    assert flaw_of(*(field for field in PSEUDO if field[0] != name)) is Flaw.MALFORMED


@pytest.mark.parametrize("name", ["method", "scheme", "path"])
def test_required_pseudo_header_fields_must_not_be_empty(name):
    assert flaw_of(*with_pseudo(**{name: b""})) is Flaw.MALFORMED


def test_the_authority_may_be_omitted():
    assert flaw_of(*PSEUDO[:3], *REST) is None


@pytest.mark.parametrize("field", PSEUDO)
def test_a_repeated_pseudo_header_field_is_malformed(field):
    assert flaw_of(*PSEUDO, field, *REST) is Flaw.MALFORMED


def test_a_pseudo_header_field_repeated_with_another_value_is_malformed():
    assert flaw_of(*PSEUDO, (b":path", b"/other"), *REST) is Flaw.MALFORMED


@pytest.mark.parametrize("name", [b":status", b":protocol", b":unknown", b":", b":Path"])
def test_pseudo_header_fields_are_a_closed_set(name):
    assert flaw_of(*PSEUDO, (name, b"200")) is Flaw.MALFORMED


def test_a_pseudo_header_field_behind_a_regular_one_is_malformed():
    assert flaw_of(*PSEUDO[:3], *REST, PSEUDO[3]) is Flaw.MALFORMED


@pytest.mark.parametrize("value", [b"/\n", b"/\0", b"/\r", b" /", b"/ ", b"\t/"])
def test_pseudo_header_values_have_the_octets_of_values(value):
    assert flaw_of(*with_pseudo(path=value)) is Flaw.MALFORMED


def test_connect_has_an_authority_and_nothing_else():
    assert flaw_of((b":method", b"CONNECT"), (b":authority", b"x:1")) is None
    assert flaw_of((b":method", b"CONNECT")) is Flaw.MALFORMED
    assert flaw_of(*with_pseudo(method=b"CONNECT")) is Flaw.MALFORMED


@pytest.mark.parametrize(
    "name", [b"Content-Type", b"a b", b"a\0", b"", b"\x7f", b"\xe4", b"a:b", b"a\n"]
)
def test_a_name_is_a_token_without_upper_case(name):
    assert flaw_of(*PSEUDO, (name, b"value")) is Flaw.MALFORMED


@pytest.mark.parametrize("name", [b"x", b"grpc-timeout", b"a_b.c~d'!#$%&*+^`|", b"0"])
def test_any_token_is_a_name(name):
    assert flaw_of(*PSEUDO, (name, b"value")) is None


@pytest.mark.parametrize("value", [b"a\0b", b"a\rb", b"a\nb", b" a", b"a ", b"\ta", b"a\t", b"a\n"])
def test_a_value_has_no_line_ends_and_no_surrounding_blanks(value):
    assert flaw_of(*PSEUDO, (b"x", value)) is Flaw.MALFORMED


@pytest.mark.parametrize("value", [b"", b"a", b"a b\tc", b"\xff\x80", b"\x01\x7f"])
def test_a_value_may_have_any_other_octet(value):
    assert flaw_of(*PSEUDO, (b"x", value)) is None


@pytest.mark.parametrize(
    "name", [b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"]
)
def test_connection_specific_fields_of_http_1_are_malformed(name):
    assert flaw_of(*PSEUDO, (name, b"x")) is Flaw.MALFORMED


def test_te_must_be_trailers_or_absent():
    assert flaw_of(*PSEUDO, (b"te", b"trailers")) is None
    for value in (b"trailers, deflate", b"gzip", b"", b"Trailers"):
        assert flaw_of(*PSEUDO, (b"te", value)) is Flaw.MALFORMED


def test_host_must_equal_the_authority():
    assert flaw_of(*PSEUDO, (b"host", b"localhost")) is None
    assert flaw_of(*PSEUDO[:3], (b"host", b"anything")) is None
    assert flaw_of(*PSEUDO, (b"host", b"elsewhere")) is Flaw.MALFORMED


@pytest.mark.parametrize("value", [b"0", b"4", b"00004", b"9" * 18])
def test_a_content_length_is_read(value):
    assert Blocks().read(*PSEUDO, (b"content-length", value)).content_length == int(value)


@pytest.mark.parametrize("value", [b"", b"-1", b"+1", b"1.0", b"4, 4", b"0x4", b"9" * 19, b"\xb2"])
def test_a_content_length_is_digits(value):
    assert flaw_of(*PSEUDO, (b"content-length", value)) is Flaw.MALFORMED


def test_a_content_length_may_be_repeated_but_not_contradicted():
    twice = Blocks().read(*PSEUDO, (b"content-length", b"4"), (b"content-length", b"4"))
    assert twice.content_length == 4
    assert flaw_of(*PSEUDO, (b"content-length", b"4"), (b"content-length", b"5")) is Flaw.MALFORMED


def test_an_empty_block_is_malformed():
    assert flaw_of() is Flaw.MALFORMED


# Cached heads


def test_equal_blocks_share_a_head_while_the_table_is_unchanged():
    blocks = Blocks()
    blocks.read(*PSEUDO, *REST)
    second = blocks.encoder.encode([*PSEUDO, *REST])
    head = blocks.reader.read(second)
    assert blocks.reader.kept == {second: head}


def test_a_block_that_changes_the_table_is_not_cached_and_clears_the_cache():
    blocks = Blocks()
    blocks.read(*PSEUDO, *REST)
    blocks.read(*PSEUDO, *REST)
    assert len(blocks.reader.kept) == 1
    blocks.read(*PSEUDO, *REST, (b"x", b"new"))
    assert not blocks.reader.kept


def test_a_block_after_a_head_that_differs_in_two_fields_is_decoded_whole():
    blocks = Blocks()
    for number in range(6):
        agent = b"test/1" if number < 2 else b"test/2"
        fields = (*PSEUDO, *REST[:2], (b"user-agent", agent), (b"x-id", b"%d" % number))
        assert blocks.read(*fields).fields == fields


def test_trailers_that_change_the_table_clear_the_cache():
    blocks = Blocks()
    blocks.read(*PSEUDO, *REST)
    blocks.read(*PSEUDO, *REST)
    blocks.trailers((b"x", b"new"))
    assert not blocks.reader.kept


def test_a_head_with_a_flaw_is_not_cached():
    blocks = Blocks()
    for _ in range(2):
        blocks.read(*PSEUDO[:1])
    assert not blocks.reader.kept


def test_a_block_that_resizes_the_table_and_adds_to_it_is_not_cached():
    reader = HeadReader(16_384)
    resized, added = b"\x3f\xe1\x1f", b"\x40\x01x\x01v"  # to 4,096 octets, RFC 7541 §6.3 and §6.2.1
    assert reader.read(resized + b"\x83\x86\x84" + added).flaw is None
    assert not reader.kept


def test_a_long_block_is_not_cached():
    reader = HeadReader(16_384)
    plain = b"\x83\x86\x84"
    for size, kept in ((2_048, 1), (2_049, 0)):
        # A literal without indexing: its name, x, and a value that fills the block.
        literal = b"\x00\x01x\x7f"
        length = size - len(plain) - len(literal) - 2
        block = (
            plain + literal + bytes((length - 127 & 127 | 128, length - 127 >> 7)) + b"v" * length
        )
        reader.kept.clear()
        assert reader.read(block).flaw is None
        assert (len(block), len(reader.kept)) == (size, kept)


def test_the_cache_is_bounded():
    reader = HeadReader(16_384)
    for number in range(1_000):
        reader.read(b"\x83\x86\x84\x00\x01x\x04%04d" % number)
        assert 1 <= len(reader.kept) <= 64


def cost_of(kept):
    """Return the size as in RFC 7541 §4.1: 32 octets for each field besides its own."""
    return sum(len(block) + 32 * len(head.fields) for block, head in kept.items())


def test_many_small_fields_or_long_blocks_allow_fewer_heads():
    for rest in (b"\x00\x01x\x00" * 300, b"\x00\x01x\x7f\xc9\x0e" + b"v" * 1_992):
        reader, costs = HeadReader(16_384), []
        for number in range(100):
            head = reader.read(b"\x83\x86\x84\x00\x01y\x04%04d" % number + rest)
            assert head.flaw is None
            costs.append(cost_of(reader.kept))
        assert 16_384 < max(costs) <= 32_768
        assert min(costs) > 0


def test_the_whole_cache_is_free_after_it_was_cleared():
    reader, full = HeadReader(16_384), [b"\x83\x86\x84\x00\x01x\x04%04d" % n for n in range(64)]
    long = b"\x83\x86\x84" + b"\x00\x01x\x00" * 300
    for number in range(4):
        reader.read(long + b"\x00\x01y\x01%d" % number)
        reader.trailers(b"\x00\x01x\x00")
    for block in full:
        reader.read(block)
    assert list(reader.kept) == full


# Models


def test_a_head_that_differs_only_in_a_timeout_has_the_previous_one_as_model():
    blocks = Blocks()
    model = blocks.read(*PSEUDO, *REST, (b"grpc-timeout", b"1S"))
    head = blocks.read(*PSEUDO, *REST, (b"grpc-timeout", b"999m"))
    assert model.model is None
    assert head.model is model
    assert head.varying == ((b"grpc-timeout", b"999m"),)
    assert head.fields == (*PSEUDO, *REST, (b"grpc-timeout", b"999m"))


def test_later_heads_keep_the_same_model():
    blocks = Blocks()
    model = blocks.read(*PSEUDO, *REST, (b"grpc-timeout", b"1S"))
    for number in range(3):
        head = blocks.read(*PSEUDO, *REST, (b"grpc-timeout", b"%dm" % number))
        assert head.model is model


def test_several_fields_may_vary():
    blocks = Blocks()
    model = blocks.read(*PSEUDO, (b"a", b"1"), *REST, (b"b", b"1"))
    head = blocks.read(*PSEUDO, (b"a", b"2"), *REST, (b"b", b"2"))
    assert head.model is model
    assert head.varying == ((b"a", b"2"), (b"b", b"2"))


def test_an_equal_field_in_another_object_does_not_vary():
    reader = HeadReader(16_384)
    model = reader.read(b"\x83\x86\x84\x00\x01x\x01a")
    head = reader.read(b"\x83\x86\x84\x10\x01x\x01a")
    assert head.model is model
    assert head.varying == ()


def test_a_head_of_another_method_has_no_model():
    blocks = Blocks()
    blocks.read(*PSEUDO, *REST)
    assert blocks.read((b":method", b"GET"), *PSEUDO[1:], *REST).model is None


def test_the_field_that_varied_last_is_validated_each_time():
    blocks = Blocks()
    model = blocks.read(*PSEUDO, *REST, (b"grpc-timeout", b"1S"))
    for value, flaw in ((b"2S", None), (b"3S\n", Flaw.MALFORMED), (b"4S", None), (b"1S", None)):
        head = blocks.read(*PSEUDO, *REST, (b"grpc-timeout", value))
        assert head.flaw is flaw
        if flaw is None:
            assert head.model is model
            assert head.varying == (((b"grpc-timeout", value),) if value != b"1S" else ())


def test_followed_heads_equal_decoded_ones():
    blocks = Blocks()
    model = blocks.read(*PSEUDO, *REST, (b"grpc-timeout", b"1S"))
    assert not blocks.reader.kept
    for number in range(300):
        value = b"%du" % number if number % 50 else b"3 \t"
        head = blocks.read(*PSEUDO, *REST, (b"grpc-timeout", value))
        assert head.fields == (*PSEUDO, *REST, (b"grpc-timeout", value))
        assert (head.flaw, head.model) == ((None, model) if number % 50 else (Flaw.MALFORMED, None))
        assert head.content_length is None


def test_followed_blocks_clear_the_cache():
    blocks = Blocks()
    for value in (b"1S", b"2S"):
        blocks.read(*PSEUDO, *REST, (b"grpc-timeout", value))
    again = blocks.encoder.encode([*PSEUDO, *REST, (b"grpc-timeout", b"2S")])
    assert blocks.reader.read(again).varying == ((b"grpc-timeout", b"2S"),)
    assert again in blocks.reader.kept
    for value in (b"3S", b"4S", b"5S"):
        blocks.read(*PSEUDO, *REST, (b"grpc-timeout", value))
        assert not blocks.reader.kept


def test_different_fields_may_vary_one_after_the_other():
    blocks = Blocks()
    first = blocks.read(*PSEUDO, *REST, (b"x-a", b"1"), (b"x-b", b"1"))
    for a, b, varying in [
        (b"2", b"1", ((b"x-a", b"2"),)),
        (b"1", b"2", ((b"x-b", b"2"),)),
        (b"2", b"2", ((b"x-a", b"2"), (b"x-b", b"2"))),
        (b"3", b"1", ((b"x-a", b"3"),)),
        (b"1", b"1", ()),
    ]:
        head = blocks.read(*PSEUDO, *REST, (b"x-a", a), (b"x-b", b))
        assert (head.model, head.varying) == (first, varying)


def test_a_shorter_model_does_not_inherit_the_varying_place():
    blocks = Blocks()
    for value in (b"1S", b"2S"):
        blocks.read(*PSEUDO, *REST, (b"grpc-timeout", value))
    shorter = blocks.read(*PSEUDO)
    assert blocks.read(*PSEUDO).model is shorter


def test_a_head_has_the_content_length_of_its_model():
    blocks = Blocks()
    blocks.read(*PSEUDO, (b"content-length", b"4"), (b"a", b"1"))
    assert blocks.read(*PSEUDO, (b"content-length", b"4"), (b"a", b"2")).content_length == 4


@pytest.mark.parametrize(
    ("fields", "flaw"),
    [
        ([*with_pseudo(path=b"/other"), (b"a", b"1"), *REST], None),
        ([*with_pseudo(path=b""), (b"a", b"1"), *REST], Flaw.MALFORMED),
        ([*PSEUDO, (b"b", b"1"), *REST], None),
        ([*PSEUDO, (b"A", b"1"), *REST], Flaw.MALFORMED),
        ([*PSEUDO, (b"a", b"\n"), *REST], Flaw.MALFORMED),
        ([*PSEUDO, (b"a", b"1"), REST[0], (b"te", b"gzip"), REST[2]], Flaw.MALFORMED),
        ([*PSEUDO, (b"a", b"1")], None),
        ([*PSEUDO, (b"a", b"1"), *REST, (b"b", b"1")], None),
    ],
)
def test_all_other_heads_are_validated_by_all_rules(fields, flaw):
    blocks = Blocks()
    blocks.read(*PSEUDO, (b"a", b"1"), *REST)
    head = blocks.read(*fields)
    assert head.flaw is flaw
    assert head.model is None


# Oversized and malformed blocks


def test_a_list_over_the_limit_is_a_flaw_and_the_reader_continues():
    blocks = Blocks(max_list_bytes=300)
    assert blocks.read(*PSEUDO, (b"x", b"v" * 200)).flaw is Flaw.TOO_LARGE
    assert blocks.read(*PSEUDO).flaw is None


def test_a_list_far_over_the_limit_ends_the_connection():
    with pytest.raises(ConnectionFailureError) as caught:
        Blocks(max_list_bytes=300).read(*PSEUDO, (b"x", b"v" * 2_000))
    assert caught.value.code is ErrorCode.ENHANCE_YOUR_CALM
    assert caught.value.cause is Cause.HEADER_BOMB


@pytest.mark.parametrize(
    "block", [b"\x80", b"\xc6", b"\x00\x85\xf2\xb2\x4a\x84\xff\x84\x49\x50\x9f\xff"]
)
def test_a_malformed_block_ends_the_connection(block):
    for read in (HeadReader(100).read, HeadReader(100).trailers):
        with pytest.raises(ConnectionFailureError) as caught:
            read(block)
        assert caught.value.code is ErrorCode.COMPRESSION_ERROR


# Trailers


def test_trailers_are_regular_fields():
    blocks = Blocks()
    assert blocks.trailers((b"x", b"1"), (b"y-bin", b"2")) == ((b"x", b"1"), (b"y-bin", b"2"))
    assert blocks.trailers() == ()


@pytest.mark.parametrize("field", [(b":path", b"/"), (b"X", b"1"), (b"x", b"\n")])
def test_other_trailers_are_invalid(field):
    assert Blocks().trailers((b"x", b"1"), field) is None


def test_trailers_have_the_limit_of_heads():
    assert Blocks(max_list_bytes=300).trailers((b"x", b"v" * 300)) is None


OWN = (b"custom-key", b"custom-value")


def test_the_examples_of_appendix_c_are_encoded_reversibly():
    decoder = Decoder()
    for example in (*rfc.REQUESTS_HUFFMAN, *rfc.RESPONSES_HUFFMAN):
        assert decoder.decode(static_block(example.fields)) == example.fields
    assert decoder.generation == 0


def test_a_string_is_huffman_coded_only_if_that_is_shorter():
    assert static_block([(b":status", b"307")]) == b"\x08\x03307"
    assert static_block([(b":status", b"302")]) == b"\x08\x82\x64\x02"


def test_no_fields_are_an_empty_block():
    assert static_block([]) == b""


def test_a_static_field_is_one_octet():
    assert static_block(STATIC_TABLE) == bytes(range(0x81, 0x81 + 61))


def test_names_come_from_the_static_table_and_no_field_is_indexed():
    assert static_block([(b":path", b"/x")])[:1] == b"\x04"
    assert static_block([OWN])[:1] == b"\x00"
