import json
import sys
from contextlib import suppress

import pytest
from google.protobuf import empty_pb2, json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from ratelimitd.errors import MAX_VIOLATIONS, InvalidInputError
from ratelimitd.web.api.json_messages import (
    MAX_BODY_BYTES,
    MAX_MASK_PATHS,
    MAX_NAME,
    MAX_VALUES,
    SLICE_ITEMS,
    message_from_json,
)
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.unit.web.api.turns import Turns, at_once

REQUESTS: list[type[Message]] = [
    pb.RateLimitRequest,
    pb.BatchRateLimitRequest,
    pb.CreateRateLimitRequest,
    pb.UpdateRateLimitRequest,
    pb.DeleteRateLimitRequest,
    pb.ListRateLimitsRequest,
    pb.MetricsRequest,
    pb.ResetRequest,
    empty_pb2.Empty,
]

INT32, INT64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
BY_TYPE = {
    FieldDescriptor.TYPE_STRING: TEXT,
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_INT32: INT32,
    FieldDescriptor.TYPE_INT64: INT64,
}


def messages(message_class):
    """Any message of a class, with any values of its fields."""

    def contents(field):
        if field.message_type is None:
            item = (
                st.sampled_from(list(field.enum_type.values_by_number))
                if field.enum_type
                else BY_TYPE[field.type]
            )
        elif field.message_type.full_name == "google.protobuf.FieldMask":
            names = st.sampled_from(["limit", "window_seconds", "identifier_type"])
            item = st.builds(lambda paths: {"paths": paths}, st.lists(names, max_size=4))
        else:
            item = messages(field.message_type._concrete_class)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            value = field.message_type.fields_by_name["value"].message_type._concrete_class
            return st.dictionaries(TEXT, messages(value), max_size=3)
        return st.lists(item, max_size=3) if field.is_repeated else item

    fields = {field.name: contents(field) for field in message_class.DESCRIPTOR.fields}
    return st.fixed_dictionaries({}, optional=fields).map(lambda found: message_class(**found))


def read(text, message_class=pb.RateLimitRequest):
    body = text if isinstance(text, bytes) else json.dumps(text).encode()
    reading = message_from_json(body, message_class, at_once)
    # The reader waits only for its turn, which is granted here: a separate loop would take most of the time.
    while True:
        try:
            reading.send(None)
        except StopIteration as end:
            return end.value


def complaints(text, message_class=pb.RateLimitRequest):
    with pytest.raises(InvalidInputError) as refused:
        read(text, message_class)
    return {violation.field: violation.description for violation in refused.value.violations}


@given(st.sampled_from(REQUESTS).flatmap(messages), st.booleans())
def test_every_request_written_by_the_library_is_read_back(message, names_of_the_contract):
    text = json_format.MessageToJson(
        message, preserving_proto_field_name=names_of_the_contract, ensure_ascii=False
    )
    assert read(text.encode(), type(message)) == message


TEXTS = st.text(st.characters(), max_size=5)  # includes lone surrogates, which JSON can express
SCALARS = st.none() | st.booleans() | st.floats() | INT64 | st.integers() | TEXTS
NAMES = st.sampled_from(
    [
        name
        for message_class in REQUESTS
        for field in message_class.DESCRIPTOR.fields
        for name in (field.name, field.json_name)
    ]
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | TEXTS, inner, max_size=4),
    max_leaves=12,
)


@given(st.sampled_from(REQUESTS), VALUES | st.dictionaries(NAMES, VALUES, max_size=5))
def test_any_value_is_read_or_refused_with_an_encodable_error(message_class, value):
    try:
        read(value, message_class)
    except InvalidInputError as error:
        str(error).encode()


def test_invalid_name_is_reported_as_such():
    assert complaints(b'{"a\\ud800": 1}') == {"a\ufffd": "is not a field of RateLimitRequest"}


def test_error_quotes_the_start_of_a_long_name():
    assert complaints(b'{"' + b"k" * 1_000 + b'": 1}') == {
        "k" * MAX_NAME + "…": "is not a field of RateLimitRequest"
    }
    name = "k" * MAX_NAME
    assert complaints(f'{{"{name}": 1}}'.encode()) == {name: "is not a field of RateLimitRequest"}


@pytest.mark.parametrize("message_class", REQUESTS, ids=lambda found: found.__name__)
def test_every_field_of_every_request_has_a_reader(message_class):
    for field in message_class.DESCRIPTOR.fields:
        found = complaints({field.name: [{"x": 1}]}, message_class)
        assert [place.partition("[")[0].partition(".")[0] for place in found] == [field.name]


@given(
    st.binary(max_size=40)
    | st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass"))
)
def test_any_bytes_are_read_or_refused(body):
    with suppress(InvalidInputError):
        read(body)


@pytest.mark.parametrize("nested", [b"[", b'{"rate_limit":'])
def test_a_deeply_nested_body_is_refused(nested):
    description = "is nested too deeply"
    if sys.version_info >= (3, 14):  # which reads the whole of it
        description = f"is not JSON at line 1, column {len(nested) * 10_000 + 1}"
    assert complaints(nested * 10_000) == {"body": description}


@pytest.mark.parametrize(
    ("body", "description"),
    [
        (b"", "is not JSON at line 1, column 1"),
        (b"{", "is not JSON at line 1, column 2"),
        (b'{"identifier":\n}', "is not JSON at line 2, column 1"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'{"identifier":"\xff"}', "must be valid UTF-8"),
        (b'{"peek":NaN}', "must be JSON, which has no NaN and no Infinity"),
        (b'{"peek":-Infinity}', "must be JSON, which has no NaN and no Infinity"),
        (b'{"peek":true,"peek":false}', "must give every field once"),
        (b" " * (MAX_BODY_BYTES + 1), f"must be at most {MAX_BODY_BYTES} bytes"),
        (b"[" + b"1," * MAX_VALUES, f"must hold at most {MAX_VALUES} values"),
        (b"[" + b"[]" * MAX_VALUES, f"must hold at most {MAX_VALUES} values"),
        (b"[" + b"{}" * MAX_VALUES, f"must hold at most {MAX_VALUES} values"),
    ],
)
def test_body_that_is_not_a_json_object_is_refused(body, description):
    assert complaints(body) == {"body": description}


def test_every_invalid_field_is_named_without_its_value():
    wrong = {
        "identifier": 5,
        "endpoint": ["secret"],
        "tokensRequested": "secret",
        "timestamp": 2**63,
        "peek": "true",
        "burst": "secret",
    }
    found = complaints(wrong)
    assert found == {
        "identifier": "must be a string",
        "endpoint": "must be a string",
        "tokens_requested": "must be an integer",
        "timestamp": "must be an integer of 64 bits",
        "peek": "must be true or false",
        "burst": "is not a field of RateLimitRequest",
    }
    assert "secret" not in str(found)


def test_place_of_an_invalid_field_is_reported():
    batch = {"requests": [{}, {"identifier": 1}, "u", None, {"tokens_requested": 2**31}]}
    assert complaints(batch, pb.BatchRateLimitRequest) == {
        "requests[1].identifier": "must be a string",
        "requests[2]": "must be a JSON object",
        "requests[3]": "must be a JSON object",
        "requests[4].tokens_requested": "must be an integer of 32 bits",
    }
    assert complaints({"requests": {}}, pb.BatchRateLimitRequest) == {
        "requests": "must be a JSON array"
    }
    assert complaints({"names": ["a", 1, "\ud800"]}, pb.MetricsRequest) == {
        "names[1]": "must be a string",
        "names[2]": "must not hold one half of a surrogate pair",
    }
    rule = {"rate_limit": {"limit": True, "id": {}}, "update_mask": 7}
    assert complaints(rule, pb.UpdateRateLimitRequest) == {
        "rate_limit.limit": "must be an integer",
        "rate_limit.id": "must be a string",
        "update_mask": "must be a string",
    }


def test_field_is_accepted_under_one_of_its_names():
    assert complaints({"tokens_requested": 1, "tokensRequested": 100}) == {
        "tokens_requested": "must be given under one of its names"
    }


def test_null_stands_for_the_default():
    assert read({"identifier": None, "peek": None}) == pb.RateLimitRequest()
    rule = read({"rate_limit": {"enabled": None}}, pb.CreateRateLimitRequest).rate_limit
    assert not rule.HasField("enabled")


@pytest.mark.parametrize("number", [12, 12.0, "12", "12.0", "1.2e1"], ids=ascii)
def test_integer_may_have_any_json_form(number):
    assert read({"tokens_requested": number}).tokens_requested == 12


@pytest.mark.parametrize(
    "number",
    ["", " 12", "1_2", "+12", "012", "0x12", "12 ", "1" * 41, 1.5, "1.5", 1e400, True, [12]],
    ids=ascii,
)
def test_value_that_is_not_an_integer_is_refused(number):
    body = json.dumps({"tokens_requested": number}).replace("Infinity", "1e400").encode()
    assert complaints(body) == {"tokens_requested": "must be an integer"}


def test_number_of_a_million_digits_is_refused_without_parsing():
    assert complaints(b'{"tokens_requested":' + b"9" * 1_000_000 + b"}") == {
        "tokens_requested": "must be an integer"
    }
    assert complaints(b'{"tokens_requested":' + b"9" * 100 + b"}") == {
        "tokens_requested": "must be an integer of 32 bits"
    }


def test_mask_accepts_both_kinds_of_names():
    text = {"updateMask": "limit,windowSeconds,identifier_type"}
    mask = read(text, pb.UpdateRateLimitRequest).update_mask
    assert mask.paths == ["limit", "window_seconds", "identifier_type"]
    assert not read({"update_mask": ""}, pb.UpdateRateLimitRequest).update_mask.paths


def test_mask_is_bounded():
    paths = ["limit"] * MAX_MASK_PATHS
    assert (
        len(read({"update_mask": ",".join(paths)}, pb.UpdateRateLimitRequest).update_mask.paths)
        == 100
    )
    assert complaints({"update_mask": ",".join([*paths, "limit"])}, pb.UpdateRateLimitRequest) == {
        "update_mask": f"must name at most {MAX_MASK_PATHS} fields"
    }


async def test_long_list_is_read_in_steps_and_a_short_one_at_once():
    turns = Turns()
    body = json.dumps({"requests": [{"identifier": "u"}] * (5 * SLICE_ITEMS)}).encode()
    message = await message_from_json(body, pb.BatchRateLimitRequest, turns)
    assert len(message.requests) == 5 * SLICE_ITEMS
    assert turns.taken == 6, "the text, and five slices"
    short = json.dumps({"requests": [{}] * SLICE_ITEMS}).encode()
    await message_from_json(short, pb.BatchRateLimitRequest, turns)
    assert turns.taken == 6
    dense = json.dumps({"requests": [{}] * 3 * SLICE_ITEMS}).encode()
    await message_from_json(dense, pb.BatchRateLimitRequest, turns)
    assert turns.taken == 8, "what is few bytes and many items"


def test_reading_stops_at_the_maximum_number_of_violations():
    wrong = complaints({"requests": [{"x": 1}] * 10 * SLICE_ITEMS}, pb.BatchRateLimitRequest)
    assert len(wrong) == MAX_VIOLATIONS


def test_enum_is_given_by_name_or_number():
    def limit(enforcement):
        return {"rate_limit": {"limits": [{"enforcement": enforcement}]}}

    for content in ("OBSERVE", 1):
        message = read(limit(content), pb.CreateRateLimitRequest)
        assert message.rate_limit.limits[0].enforcement == pb.OBSERVE
    for content, why in (
        ("observe", "must be one of ENFORCE, OBSERVE"),
        (True, "must be an integer"),
        (1.5, "must be an integer"),
    ):
        found = complaints(limit(content), pb.CreateRateLimitRequest)
        assert found == {"rate_limit.limits[0].enforcement": why}
