from functools import partial

import pytest
from google.protobuf.empty_pb2 import Empty
from hypothesis import given
from hypothesis import strategies as st

from ratelimitd.errors import InvalidInputError
from ratelimitd.services import wire
from ratelimitd.services.wire_format import COUNT_ABOVE_BYTES, KEPT, read_varint, varint
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.rpc.wire import varint as written_by_hand

PARSERS = {
    wire.parse_check: pb.RateLimitRequest,
    wire.parse_batch: pb.BatchRateLimitRequest,
    wire.parse_rule: pb.RateLimit,
    wire.parse_hold: pb.HoldRequest,
    partial(wire.parse, pb.UpdateRateLimitRequest): pb.UpdateRateLimitRequest,
    partial(wire.parse, pb.ApplyRateLimitsRequest): pb.ApplyRateLimitsRequest,
}
NAMES = [contract.__name__ for contract in PARSERS.values()]


@pytest.mark.parametrize(("parse", "message_class"), PARSERS.items(), ids=NAMES)
def test_a_message_is_parsed_as_in_the_contract_except_for_widened_fields(parse, message_class):
    assert parse(b"").DESCRIPTOR.full_name == message_class.DESCRIPTOR.full_name
    fields = {field.name: field.number for field in parse(b"").DESCRIPTOR.fields}
    assert fields == {field.name: field.number for field in message_class.DESCRIPTOR.fields}


@pytest.mark.parametrize(("parse", "message_class"), PARSERS.items(), ids=NAMES)
def test_malformed_bytes_are_refused_with_the_name_of_the_message(parse, message_class):
    with pytest.raises(InvalidInputError) as caught:
        parse(b"\xff")
    [violation] = caught.value.violations
    assert violation == ("request", f"the bytes are not a {message_class.DESCRIPTOR.name} message")


def test_unknown_fields_of_an_empty_message_are_ignored():
    wire.parse(Empty, b"")
    wire.parse(Empty, b"\x08\x01")
    with pytest.raises(InvalidInputError):
        wire.parse(Empty, b"\xff")


@pytest.mark.parametrize("value", [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32 + 1, 2**63 - 1])
def test_a_number_too_wide_for_its_field_is_read_as_sent(value):
    data = b"\x20" + written_by_hand(value)
    assert wire.parse_check(data).tokens_requested == value


def test_a_negative_number_is_read_as_negative():
    data = pb.RateLimitRequest(tokens_requested=-5).SerializeToString()
    assert wire.parse_check(data).tokens_requested == -5


def test_text_is_read_as_any_bytes():
    assert wire.parse_check(b"\x0a\x02\xff\x00").identifier == b"\xff\x00"


def test_has_field_shows_whether_enabled_was_sent():
    for rule, sent in ((pb.RateLimit(), False), (pb.RateLimit(enabled=False), True)):
        data = pb.CreateRateLimitRequest(rate_limit=rule).SerializeToString()
        assert wire.parse(pb.CreateRateLimitRequest, data).rate_limit.HasField("enabled") is sent


FIELDS = st.one_of(
    st.builds(
        lambda content: b"\x0a" + written_by_hand(len(content)) + content, st.binary(max_size=200)
    ),
    st.builds(lambda value: b"\x10" + written_by_hand(value), st.integers(0, 2**64 - 1)),
    st.builds(lambda content: b"\x19" + content, st.binary(min_size=8, max_size=8)),
    st.builds(lambda content: b"\x25" + content, st.binary(min_size=4, max_size=4)),
    st.just(b"\x2b\x2c"),  # an empty group
    st.just(b"\xfa\x3f\x00"),  # a field number of two bytes
)


@given(st.lists(FIELDS, max_size=40))
def test_fields_are_counted_without_parsing(fields):
    wanted = sum(field[:1] == b"\x0a" for field in fields)
    assert wire.count_items(b"".join(fields), 1000) == wanted


@given(st.binary(max_size=100))
def test_counting_terminates_on_any_bytes(data):
    assert 0 <= wire.count_items(data, 1000) <= 100


items = st.builds(
    lambda name, more: pb.RateLimitRequest(identifier=name).SerializeToString() + more,
    st.text(max_size=150),
    st.sampled_from([b"", b"\x20\x01", b"\x78\x01"]),
)
near_items = st.one_of(
    items.map(lambda item: b"\x0a" + written_by_hand(len(item)) + item),
    items.map(
        lambda item: b"\x0a" + written_by_hand(len(item) | 128)[:1] + b"\x80\x00" + item[:127]
    ),
    FIELDS,
    st.binary(max_size=4),
)


@given(st.lists(items, max_size=8))
def test_a_batch_is_split_into_its_items(messages):
    data = b"".join(b"\x0a" + written_by_hand(len(item)) + item for item in messages)
    assert wire.split_batch(data, 8) == messages


@given(st.lists(near_items, max_size=4).map(b"".join))
def test_split_items_equal_those_of_a_parser(data):
    split = wire.split_batch(data, 100)
    try:
        parsed = wire.parse_batch(data).requests
    except InvalidInputError:
        return  # an item is malformed, which its parser detects later
    if split is not None:
        assert list(map(wire.parse_check, split)) == list(parsed)


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a",
        b"\x0a\x01",
        b"\x0a\x00\x0a",
        b"\x0a\x81",
        b"\x0a\x81\x00",
        b"\x10\x00",
        b"\x0a\x00\x10\x00",
        b"\x8a\x00\x00",
        b"\x0a\x80\x01" + bytes(127),
        b"\x0a" + b"\x80" * 10 + b"\x01",
    ],
)
def test_a_batch_with_anything_but_items_is_not_split(data):
    split = wire.split_batch(data, 100)
    # An empty item is not a canonical check, so it goes to the parser, too.
    assert split is None or b"" in split


@pytest.mark.parametrize("length_bytes", range(1, 12))
def test_an_overlong_length_is_read_as_by_parsers_or_not_at_all(
    length_bytes,
):
    length = b"\x02" if length_bytes == 1 else b"\x82" + b"\x80" * (length_bytes - 2) + b"\x00"
    split = wire.split_batch(b"\x0a" + length + b"\x0a\x00", 1)
    assert split == ([b"\x0a\x00"] if length_bytes <= 2 else None)
    assert split is None or len(wire.parse_batch(b"\x0a" + length + b"\x0a\x00").requests) == 1


def test_a_batch_above_the_bound_is_not_split():
    assert wire.split_batch(b"\x0a\x01x" * 7, 7) == [b"x"] * 7
    assert wire.split_batch(b"\x0a\x01x" * 8, 7) is None


def test_counting_stops_one_above_the_bound():
    assert wire.count_items(b"\x0a\x00" * 50, 7) == 8


@pytest.mark.parametrize("data", [b"\x0a", b"\x0a\x80", b"\x80" * 50, b"\x0a\x05ab", b"\x19\x00"])
def test_counting_a_truncated_message_ends_with_its_bytes(data):
    assert wire.count_items(data, 1000) <= 1


def test_a_message_of_too_many_other_fields_is_refused():
    most = b"\x10\x00" * wire.MAX_TOP_LEVEL_FIELDS
    assert wire.count_items(most, 1000) == 0
    with pytest.raises(InvalidInputError, match="more than 2000 fields"):
        wire.count_items(most + b"\x10\x00", 1000)


@pytest.mark.parametrize("parse", PARSERS, ids=NAMES)
@pytest.mark.parametrize("octets", [b"\x3a\x00", b"\xba\x00\x00", b"\x3a\x80\x00", b"\x58\x00"])
def test_a_long_message_of_too_many_fields_is_not_parsed(parse, octets):
    with pytest.raises(InvalidInputError, match="too many fields"):
        parse(octets * 20_000)


@pytest.mark.parametrize("parse", PARSERS, ids=NAMES)
@pytest.mark.parametrize("end", [b"\x0a", b"\x0a\x80", b"\x80" * 50, b"\x0a\x05ab", b"\x1b"])
def test_a_truncated_long_message_is_refused(parse, end):
    with pytest.raises(InvalidInputError, match="are no"):
        parse(b"\xa2\x1f\x80\x80\x01" + bytes(16_384) + end)


def test_the_largest_batch_and_rule_are_parsed():
    identities = [pb.Identity(identifier_type=f"t{n}", identifier="i" * 30) for n in range(7)]
    check = pb.RateLimitRequest(
        identifier="u", identifier_type="user", endpoint="/a", tokens_requested=1, timestamp=1,
        peek=True, also=identities, max_wait_ms=1,
    )  # fmt: skip
    batch = pb.BatchRateLimitRequest(requests=[check] * 1_000)
    assert len(wire.parse_batch(batch.SerializeToString()).requests) == 1_000
    limits = [
        pb.Limit(
            name="n" * 32, limit=1, window_seconds=1, algorithm="fixed_window", period=pb.MONTH,
            time_zone="America/Argentina/Buenos_Aires", anchor_day=31, enforcement=pb.OBSERVE,
        )
    ] * 8  # fmt: skip
    rule = pb.RateLimit(limits=limits)
    for number in range(32):
        rule.plans[f"p{number}"].limits.extend(limits)
    create = pb.CreateRateLimitRequest(rate_limit=rule).SerializeToString()
    assert len(create) > COUNT_ABOVE_BYTES
    assert len(wire.parse(pb.CreateRateLimitRequest, create).rate_limit.plans) == 32


def test_a_batch_that_ends_within_a_length_is_not_split():
    assert wire.split_batch(b"\x0a\x80", 10) is None
    assert wire.split_batch(b"\x0a\x00\x0a\xff", 10) is None


rule_bytes = st.binary(max_size=300)
others = st.lists(st.sampled_from([b"\x10\x01", b"\x20\x07", b"\x7a\x02\x0a\x00", b"\x55abcd"]))


@given(st.lists(rule_bytes, max_size=5), others, st.randoms())
def test_the_rules_of_a_set_are_found_at_any_place(rules, other_fields, random):
    parts = [b"\x0a" + written_by_hand(len(rule)) + rule for rule in rules] + other_fields
    order = list(range(len(parts)))
    random.shuffle(order)
    left = bytearray()
    found = [*wire.rules_within(b"".join(parts[place] for place in order), left)]
    assert found == [rules[place] for place in order if place < len(rules)]
    assert left == b"".join(parts[place] for place in order if place >= len(rules))


EDGES = [0, 1, 127, 128, 2**14 - 1, 2**14, 2**21, 2**28 - 1, 2**28, 2**31 - 1, 2**42, 2**64 - 1]

numbers = st.one_of(st.sampled_from(EDGES), st.integers(0, 2**64 - 1))


@given(numbers)
def test_a_varint_is_encoded_in_its_shortest_form(number):
    assert varint(number) == written_by_hand(number)


def test_cached_encodings_match_their_numbers():
    assert list(KEPT) == [*map(written_by_hand, range(len(KEPT)))]


@given(numbers, st.binary(max_size=5), st.binary(max_size=12))
def test_an_encoded_varint_is_read_at_any_position(number, before, behind):
    encoded = varint(number)
    place = len(before)
    assert read_varint(before + encoded + behind, place) == (number, place + len(encoded))


@pytest.mark.parametrize("data", [b"\x85\x00", b"\x85\x80\x00", b"\x85" + b"\x80" * 8 + b"\x00"])
def test_an_overlong_varint_is_read(data):
    assert read_varint(data + b"more", 0) == (5, len(data))


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 9])
def test_a_truncated_varint_ends_the_data(data):
    assert read_varint(data, 0)[1] == len(data)


def test_a_varint_of_more_than_ten_octets_ends_the_data():
    assert read_varint(b"\x80" * 10 + b"\x01rest", 0)[1] == 15
