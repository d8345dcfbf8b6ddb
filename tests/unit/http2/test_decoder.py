import hpack
import pytest

from ratelimitd.http2.hpack_decoder import BOMB_FACTOR, RUN_OCTETS, Decoder
from ratelimitd_wire import huffman as errors
from ratelimitd_wire.huffman import HeaderBombError, HeaderListTooLargeError, HpackError
from ratelimitd_wire.static_table import FIRST_DYNAMIC_INDEX, STATIC_TABLE
from tests import rfc7541_examples as rfc

POST = b"\x83"
AUTHORITY_X = b"\x41\x01x"  # literal with incremental indexing, an entry of 43
NEWEST = b"\xbe"  # index 62


def dynamic(decoder):
    return tuple(field for field, _ in decoder._table.entries[FIRST_DYNAMIC_INDEX:])


def literal(name, value, first=b"\x40"):
    return first + bytes((len(name),)) + name + bytes((len(value),)) + value


def refused(decoder, block, why):
    with pytest.raises(HpackError, match=why) as caught:
        decoder.decode(block)
    return type(caught.value)


# Appendix C


@pytest.mark.parametrize("example", rfc.SINGLE, ids=lambda example: example.section)
def test_the_single_fields_of_appendix_c_are_decoded(example):
    decoder = Decoder()
    assert decoder.decode(example.block) == example.fields
    assert dynamic(decoder) == example.table
    assert decoder._table.used_bytes == example.table_bytes


@pytest.mark.parametrize(
    ("examples", "table_bytes"),
    [
        (rfc.REQUESTS_PLAIN, 4096),
        (rfc.REQUESTS_HUFFMAN, 4096),
        (rfc.RESPONSES_PLAIN, rfc.RESPONSE_TABLE_BYTES),
        (rfc.RESPONSES_HUFFMAN, rfc.RESPONSE_TABLE_BYTES),
    ],
    ids=["C.3", "C.4", "C.5", "C.6"],
)
def test_the_sequences_of_appendix_c_are_decoded(examples, table_bytes):
    decoder = Decoder(table_bytes)
    for example in examples:
        assert decoder.decode(example.block) == example.fields
        assert dynamic(decoder) == example.table
        assert decoder._table.used_bytes == example.table_bytes


# Indexed fields (§6.1)


def test_an_empty_block_has_no_fields():
    assert Decoder().decode(b"") == ()


def test_every_static_entry_has_its_index():
    assert Decoder().decode(bytes(range(0x81, 0x81 + 61))) == STATIC_TABLE


def test_index_zero_is_refused():
    assert refused(Decoder(), b"\x80", errors.INDEX_INVALID) is HpackError
    refused(Decoder(), POST + b"\x80" + POST, errors.INDEX_INVALID)


def test_an_index_beyond_the_table_is_refused():
    decoder = Decoder()
    refused(decoder, NEWEST, errors.INDEX_INVALID)
    decoder = Decoder()
    decoder.decode(AUTHORITY_X)
    assert decoder.decode(NEWEST) == ((b":authority", b"x"),)
    refused(decoder, b"\xbf", errors.INDEX_INVALID)


def with_entries(count, max_table_bytes=4096):
    """Return a decoder with the entries ("", "0"), ("", "1"), …; the last has index 62."""
    decoder = Decoder(max_table_bytes)
    if max_table_bytes > 4096:
        decoder.decode(b"\x3f\xe1\xff\x03")  # an update to 65,536
    for number in range(count):
        decoder.decode(literal(b"", b"%d" % number))
    return decoder


@pytest.mark.parametrize(
    ("octets", "index"),
    [(b"\xfe", 126), (b"\xff\x00", 127), (b"\xff\x01", 128), (b"\xff\x36", 181)],
)
def test_an_index_of_two_octets_begins_at_127(octets, index):
    decoder = with_entries(120)
    expected = decoder._table.entries[index][0]
    assert expected == (b"", b"%d" % (119 - (index - 62)))
    assert decoder.decode(octets) == (expected,)
    assert decoder.decode(POST + octets + POST) == (
        (b":method", b"POST"),
        expected,
        (b":method", b"POST"),
    )


def test_an_index_of_two_octets_beyond_the_table_is_refused():
    refused(with_entries(120), b"\xff\x37", errors.INDEX_INVALID)


@pytest.mark.parametrize(("octets", "index"), [(b"\xff\x80\x01", 255), (b"\xff\x81\x01", 256)])
def test_an_index_of_three_octets_begins_at_255(octets, index):
    decoder = with_entries(300, 65_536)
    expected = decoder._table.entries[index][0]
    assert expected == (b"", b"%d" % (299 - (index - 62)))
    assert decoder.decode(POST + octets + POST)[1] == expected


def test_an_index_with_superfluous_zeros_is_the_same_index():
    assert with_entries(120).decode(b"\xff\x80\x00" + POST) == ((b"", b"54"), (b":method", b"POST"))


@pytest.mark.parametrize("octets", [b"\xff", b"\xff\x80", b"\xff\xff", POST + b"\xff\x80\x80"])
def test_a_truncated_index_is_refused(octets):
    refused(Decoder(), octets, errors.TRUNCATED)


@pytest.mark.parametrize("before", range(RUN_OCTETS - 3, RUN_OCTETS + 1))
@pytest.mark.parametrize(
    ("octets", "expected"),
    [
        (b"\xff\x00", (b"", b"54")),
        (b"\xff\x80\x00", (b"", b"54")),
        (b"\x01\x01v", (b":authority", b"v")),
    ],
    ids=["index of two octets", "index of three octets", "literal"],
)
def test_a_field_may_span_the_end_of_a_run(before, octets, expected):
    decoder = with_entries(120)
    found = decoder.decode(POST * before + octets + POST)
    assert found == (*[(b":method", b"POST")] * before, expected, (b":method", b"POST"))
    refused(decoder, POST * before + octets[:-1], errors.TRUNCATED)


def test_an_index_with_too_many_octets_is_refused():
    refused(Decoder(), b"\xff" + b"\x80" * 5 + b"\x00", errors.INTEGER_TOO_LONG)


def test_a_field_from_a_table_is_the_same_object_every_time():
    decoder = Decoder()
    (inserted,) = decoder.decode(AUTHORITY_X)
    first, second = decoder.decode(POST + NEWEST), decoder.decode(POST + NEWEST)
    assert first[0] is second[0] is STATIC_TABLE[2]
    assert first[1] is second[1] is inserted


# Literals (§6.2)


@pytest.mark.parametrize("first", [b"\x00", b"\x10"], ids=["not indexed", "never indexed"])
def test_a_literal_without_indexing_does_not_change_the_table(first):
    decoder = Decoder()
    assert decoder.decode(literal(b"k", b"v", first)) == ((b"k", b"v"),)
    assert dynamic(decoder) == ()
    assert decoder.generation == 0


@pytest.mark.parametrize("head", [b"\x08", b"\x18", b"\x48"])
def test_a_literal_may_have_a_short_name_index(head):
    assert Decoder().decode(head + b"\x03418") == ((b":status", b"418"),)


def test_a_literal_may_have_a_long_name_index():
    assert Decoder().decode(b"\x0f\x00\x01v") == ((b"accept-charset", b"v"),)
    assert Decoder().decode(b"\x1f\x2e\x01v") == ((b"www-authenticate", b"v"),)
    assert with_entries(9).decode(b"\x7f\x03\x01v") == ((b"", b"v"),)


def test_a_name_index_beyond_the_table_is_refused():
    refused(Decoder(), b"\x7e\x01v", errors.INDEX_INVALID)
    refused(Decoder(), b"\x0f\x2f\x01v", errors.INDEX_INVALID)


def test_a_literal_may_take_its_name_from_the_entry_that_it_evicts():
    decoder = Decoder(66)
    decoder.decode(literal(b"name", b"a" * 30))
    assert decoder.decode(b"\x7e\x1e" + b"b" * 30) == ((b"name", b"b" * 30),)
    assert dynamic(decoder) == ((b"name", b"b" * 30),)


def test_an_entry_larger_than_the_table_is_a_field_and_empties_the_table():
    decoder = Decoder(66)
    decoder.decode(literal(b"k", b"v"))
    assert decoder.decode(literal(b"name", b"a" * 31)) == ((b"name", b"a" * 31),)
    assert dynamic(decoder) == ()


def test_runs_of_indexed_fields_continue_after_a_literal():
    block = POST + AUTHORITY_X + NEWEST + literal(b"k", b"v", b"\x00") + POST + NEWEST
    assert Decoder().decode(block) == (
        (b":method", b"POST"),
        (b":authority", b"x"),
        (b":authority", b"x"),
        (b"k", b"v"),
        (b":method", b"POST"),
        (b":authority", b"x"),
    )


def test_names_and_values_may_be_huffman_coded():
    assert Decoder().decode(b"\x00\x81\x07\x82\x64\x02") == ((b"0", b"302"),)


@pytest.mark.parametrize(
    ("octets", "length"),
    [(b"\x00", 0), (b"\x7e", 126), (b"\x7f\x00", 127), (b"\x7f\x01", 128), (b"\x7f\x89\x26", 5000)],
)
def test_a_string_of_any_length_is_read(octets, length):
    block = b"\x01" + octets + b"x" * length + POST
    assert Decoder().decode(block) == ((b":authority", b"x" * length), (b":method", b"POST"))


@pytest.mark.parametrize(
    "block",
    [
        b"\x01",
        b"\x41",
        b"\x01\x01",
        b"\x01\x7f",
        b"\x01\x7f\x80",
        b"\x01\x7f\x00" + b"x" * 126,
        b"\x00",
        b"\x00\x02k",
        b"\x00\x01k",
        b"\x00\x01k\x02v",
        b"\x0f",
        b"\x7f",
        b"\x3f",
        b"\x01\xff\xff\xff\xff\x7f",
    ],
    ids=bytes.hex,
)
def test_a_block_that_ends_within_a_field_is_refused(block):
    refused(Decoder(), block, errors.TRUNCATED)


def test_a_bad_huffman_code_is_refused():
    refused(Decoder(), b"\x01\x81\x00", errors.HUFFMAN_INVALID)
    refused(Decoder(), b"\x00\x84\xff\xff\xff\xff\x00", errors.HUFFMAN_INVALID)


# Table size updates (§4.2, §6.3)


def test_an_update_shrinks_the_table_and_a_second_one_grows_it_again():
    decoder = with_entries(3)
    assert decoder.decode(b"\x20\x3f\xe1\x1f" + AUTHORITY_X) == ((b":authority", b"x"),)
    assert dynamic(decoder) == ((b":authority", b"x"),)
    assert decoder._table.max_bytes == 4096


def test_a_block_may_be_an_update_alone():
    decoder = with_entries(2)
    assert decoder.decode(b"\x3f\x02") == ()
    assert dynamic(decoder) == ((b"", b"1"),)


def test_an_update_after_a_field_is_refused():
    refused(Decoder(), POST + b"\x20", errors.UPDATE_MISPLACED)
    refused(Decoder(), AUTHORITY_X + b"\x3f\xe1\x1f", errors.UPDATE_MISPLACED)


def test_a_third_update_in_a_block_is_refused():
    assert Decoder().decode(b"\x20\x21") == ()
    refused(Decoder(), b"\x20\x21\x22", errors.UPDATE_MISPLACED)


def test_an_update_above_our_setting_is_refused():
    assert Decoder().decode(b"\x3f\xe1\x1f") == ()
    refused(Decoder(), b"\x3f\xe2\x1f", errors.UPDATE_TOO_LARGE)
    refused(Decoder(100), b"\x3f\x46", errors.UPDATE_TOO_LARGE)
    refused(Decoder(), b"\x3f" + b"\xff" * 4 + b"\x7f", errors.UPDATE_TOO_LARGE)


def test_a_decoder_that_allows_more_than_the_default_starts_with_the_default():
    assert Decoder(65_536)._table.max_bytes == 4096
    assert Decoder(100)._table.max_bytes == 100


# The generation


def test_the_generation_is_unchanged_while_the_table_is_only_read():
    decoder = Decoder()
    decoder.decode(AUTHORITY_X)
    before = decoder.generation
    decoder.decode(POST + NEWEST + literal(b"k", b"v", b"\x00") + literal(b"k", b"v", b"\x10"))
    assert decoder.generation == before


@pytest.mark.parametrize(
    "block", [AUTHORITY_X, b"\x20", b"\x3f\xe1\x1f", POST + AUTHORITY_X + POST]
)
def test_the_generation_changes_with_the_table(block):
    decoder = Decoder()
    before = decoder.generation
    decoder.decode(block)
    assert decoder.generation != before


def test_the_generation_changes_also_when_the_list_is_too_large():
    decoder = Decoder(max_list_bytes=80)
    with pytest.raises(HeaderListTooLargeError):
        decoder.decode(AUTHORITY_X + NEWEST)
    assert decoder.generation == 1


# The size of the list


def test_a_list_may_be_as_large_as_the_limit():
    assert len(Decoder(max_list_bytes=86).decode(AUTHORITY_X + NEWEST)) == 2


@pytest.mark.parametrize("second", [NEWEST, b"\x01\x01x", b"\x41\x01x"])
def test_a_list_one_byte_over_the_limit_is_refused_and_the_table_stays_in_sync(second):
    decoder = Decoder(max_list_bytes=85)
    with pytest.raises(HeaderListTooLargeError, match=errors.LIST_TOO_LARGE):
        decoder.decode(AUTHORITY_X + second + literal(b"k", b"v"))
    assert not issubclass(HeaderListTooLargeError, HpackError)
    assert decoder.decode(NEWEST) == ((b"k", b"v"),)


def test_empty_fields_count_as_well():
    decoder = Decoder(max_list_bytes=64)
    decoder.decode(literal(b"", b""))
    assert len(decoder.decode(NEWEST * 2)) == 2
    with pytest.raises(HeaderListTooLargeError):
        decoder.decode(NEWEST * 3)


def test_a_list_over_four_times_the_limit_is_a_bomb():
    limit = 43 * 10
    decoder = Decoder(max_list_bytes=limit)
    decoder.decode(AUTHORITY_X)
    with pytest.raises(HeaderListTooLargeError):
        decoder.decode(NEWEST * 10 * BOMB_FACTOR)
    assert (
        refused(decoder, NEWEST * (10 * BOMB_FACTOR + 1), errors.LIST_TOO_LARGE) is HeaderBombError
    )


def test_decoding_of_a_bomb_stops_early():
    decoder = Decoder()
    huge = b"\x40\x01k\x7f\xd0\x1e" + b"x" * 4047  # an entry of 4080 bytes
    assert len(decoder.decode(huge)) == 1
    # After the octets that make it a bomb, the block is malformed.
    block = NEWEST * 17 + literal(b"a", b"b", b"\x00") + b"\x80"
    assert refused(decoder, block, errors.LIST_TOO_LARGE) is HeaderBombError


def test_a_list_below_the_bomb_limit_is_decoded_whole():
    just_none = AUTHORITY_X * BOMB_FACTOR
    with pytest.raises(HeaderListTooLargeError):
        Decoder(4096, 43).decode(just_none)
    assert refused(Decoder(4096, 43), just_none + POST, errors.LIST_TOO_LARGE) is HeaderBombError


def test_a_bomb_of_references_stops_early_and_makes_no_copies():
    decoder = Decoder()
    decoder.decode(b"\x40\x01k\x7f\xd0\x1e" + b"x" * 4047)
    fields = []
    decoder._read(NEWEST * 16_000, fields)
    assert len(fields) == RUN_OCTETS
    assert len({id(field) for field in fields}) == 1


def test_error_texts_contain_no_input_of_the_peer():
    with pytest.raises(HpackError) as caught:
        Decoder().decode(literal(b"authorization", b"secret") + b"\x80")
    assert "secret" not in str(caught.value)
    assert caught.value.__suppress_context__


# Blocks that differ from the previous one only in the last value


TIMEOUT = literal(b"grpc-timeout", b"5S")
CONSTANT = ((b":path", b"/a.B/C"), (b"te", b"trailers"), (b"user-agent", b"test/1"))


def another(decoder, block):
    """Read a block as :class:`ratelimitd.http2.headers.HeadReader` does; return (fields, whether it was followed)."""
    field = decoder.follow(block)
    if field is not None:
        return field, True
    fields = decoder.decode(block)
    if fields:
        decoder.expect_another(block, fields)
    return fields[-1] if fields else None, False


def after(*blocks, decoder=None):
    """A decoder that has read these blocks, prepared to follow the last."""
    decoder = decoder or Decoder()
    for block in blocks:
        another(decoder, block)
    return decoder


def state(decoder):
    return dynamic(decoder), decoder._table.used_bytes, decoder.generation


@pytest.mark.parametrize("huffman", [True, False])
@pytest.mark.parametrize("constant", [CONSTANT, CONSTANT[:1], (), CONSTANT * 9])
def test_most_blocks_with_a_new_timeout_are_followed_and_all_decoded_correctly(constant, huffman):
    encoder, quick, plain, followed = hpack.Encoder(), Decoder(), Decoder(), 0
    for number in range(2_000):
        timeout = (b"grpc-timeout", b"%du" % (4_900_000 + number))
        block = encoder.encode([*constant, timeout], huffman=huffman)
        field, was_followed = another(quick, block)
        followed += was_followed
        assert plain.decode(block) == (*constant, timeout)
        assert field == timeout
        assert state(quick) == state(plain)
    assert followed > 1_800


@pytest.mark.parametrize(
    "lead", [b"\x83", b"\x83\xbe", b"\xbe\xbf\x83", b"\xfe", b"\xff\x00", b"\xfd\xff\x30", b""]
)
@pytest.mark.parametrize("kind", [b"\x40\x0cgrpc-timeout", b"\x41", b"\x7e"])
def test_expected_indexes_grow_by_one_per_block(lead, kind):
    decoder, plain = with_entries(126), with_entries(126)
    first = lead + kind + b"\x02aa"
    assert (plain.decode(first)[-1], False) == another(decoder, first)
    moved = {b"\xbe": b"\xbf", b"\xbf": b"\xc0", b"\xfe": b"\xff\x00", b"\xfd": b"\xfe"}
    if b"\xff" not in lead:
        lead = b"".join(moved.get(bytes((octet,)), bytes((octet,))) for octet in lead)
    else:
        lead = {b"\xff\x00": b"\xff\x01", b"\xfd\xff\x30": b"\xfe\xff\x31"}[lead]
    second = lead + kind + b"\x82\x64\x02"
    assert (plain.decode(second)[-1], True) == another(decoder, second)
    assert plain.decode(second)[-1][1] == b"302"


def test_a_block_with_an_evicted_field_is_not_followed():
    decoder = after(literal(b"old", b"o"), b"\xbe" + TIMEOUT, decoder=Decoder(max_table_bytes=127))
    assert dynamic(decoder) == ((b"grpc-timeout", b"5S"), (b"old", b"o"))
    assert decoder.follow(b"\xbf" + TIMEOUT) == (b"grpc-timeout", b"5S")
    assert len(dynamic(decoder)) == 2
    assert decoder.follow(b"\xc0" + TIMEOUT) is None
    refused(decoder, b"\xc0" + TIMEOUT, errors.INDEX_INVALID)


def test_a_block_with_an_evicted_name_is_not_followed():
    decoder = after(POST + b"\x40\x01k\x02vv", POST + b"\x7e\x02vv", decoder=Decoder(40))
    block = POST + b"\x7e\x7e" + b"x" * 126  # more than the table holds
    assert decoder.follow(block) == (b"k", b"x" * 126)
    assert dynamic(decoder) == ()
    assert decoder.follow(block) is None
    refused(decoder, block, errors.INDEX_INVALID)


def test_indexes_of_more_than_two_octets_are_not_followed():
    decoder = Decoder(65_536)
    decoder.decode(b"\x3f\xe1\xff\x03")
    for number in range(250):
        decoder.decode(literal(b"", b"%d" % number))
    after(b"\xff\x7d" + TIMEOUT, decoder=decoder)  # 252
    assert decoder.follow(b"\xff\x7e" + TIMEOUT) == (b"grpc-timeout", b"5S")
    assert decoder.follow(b"\xff\x7f" + TIMEOUT) is None
    for lead in (b"\xff\x7e", b"\xff\x7f", b"\xff\x80\x01"):
        assert after(lead + TIMEOUT, decoder=decoder).follow(lead + TIMEOUT) is None


@pytest.mark.parametrize(
    "block",
    [
        b"",
        b"\x83",
        POST + TIMEOUT[:-3],
        POST + TIMEOUT[:-2],
        POST + TIMEOUT[:-1],
        POST + TIMEOUT + POST,
        POST + literal(b"grpc-timeout", b"")[:-1] + b"\x81\x00",  # bad padding
        POST + literal(b"grpc-timeous", b"5S"),
        POST + TIMEOUT[:-3] + b"\x7f\x00" + b"x" * 127,
        b"\x84" + TIMEOUT,
        b"\x20" + POST + TIMEOUT,
    ],
    ids=bytes.hex,
)
def test_a_block_that_is_not_followed_is_left_unread(block):
    decoder = after(POST + TIMEOUT)
    before = state(decoder)
    assert decoder.follow(block) is None
    assert state(decoder) == before
    assert decoder.follow(POST + TIMEOUT) == (b"grpc-timeout", b"5S")


@pytest.mark.parametrize(
    "block",
    [
        POST,
        TIMEOUT + POST,
        POST + literal(b"k", b"v", b"\x00"),
        POST + literal(b"k", b"v", b"\x10"),
        POST + b"\x40\x81\x07\x01v",  # a name in Huffman code
        literal(b"k", b"v") + literal(b"k", b"v"),
        b"\x20" + POST + TIMEOUT,
        POST + b"\x7f\x00\x01v",
        POST + b"\x7f\x02\x01v",  # the second octet of the index may be taken for a length
        POST + literal(b"k", b"v") + b"\x00\x01k\x01v",
    ],
    ids=bytes.hex,
)
def test_only_a_run_of_indexes_and_a_literal_with_indexing_is_followed(block):
    decoder = with_entries(5)
    after(block, decoder=decoder)
    assert decoder.follow(block) is None


def test_no_block_is_followed_after_another_kind_of_block():
    decoder = after(POST + TIMEOUT)
    decoder.decode(POST)
    assert decoder.follow(POST + TIMEOUT) is None
    after(POST + TIMEOUT, decoder=decoder)


def test_a_list_that_may_exceed_the_limit_is_not_followed():
    fields_bytes = 43 + 46  # POST, and the timeout
    for most, followed in ((fields_bytes + 201, True), (fields_bytes + 200, False)):
        decoder = after(POST + TIMEOUT, decoder=Decoder(max_list_bytes=most))
        assert (decoder.follow(POST + TIMEOUT) is not None) is followed
