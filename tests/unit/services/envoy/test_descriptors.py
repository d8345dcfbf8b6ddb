import pytest

from ratelimitd.errors import CheckInvalidError, InvalidInputError
from ratelimitd.model import INT32_MAX, Check, IdentifierType
from ratelimitd.services.convert_envoy import (
    MAX_DESCRIPTORS,
    MAX_ENTRIES,
    MAX_REQUEST_BYTES,
    Response,
    checks_of,
    files,
    parse_request,
)
from ratelimitd.services.envoy import SERVICE
from tests import envoy_messages
from tests.envoy_messages import request_of

IP, USER, API_KEY = IdentifierType.IP, IdentifierType.USER, IdentifierType.API_KEY
IDENTIFIERS = {b"remote_address": IP, b"user_id": USER}
PATH = ("path", "/login")


def checks(*arguments, **options):
    request = parse_request(request_of(*arguments, **options).SerializeToString())
    return checks_of(request, IDENTIFIERS)


@pytest.mark.parametrize(
    ("entries", "check"),
    [
        ([("remote_address", "192.0.2.1")], Check(b"192.0.2.1", IP, "edge")),
        ([("remote_address", "::ffff:192.0.2.1")], Check(b"192.0.2.1", IP, "edge")),
        ([PATH, ("user_id", "ada")], Check(b"ada", USER, "edge/path=/login")),
        (
            [("user_id", "ada"), PATH, ("verb", "")],
            Check(b"ada", USER, "edge/path=/login/verb="),
        ),
        (
            [("user_id", "ada"), ("remote_address", "192.0.2.1")],
            Check(b"ada", USER, "edge", also=((IP, b"192.0.2.1"),)),
        ),
        (
            [("remote_address", "192.0.2.1"), ("user_id", "ada"), ("remote_address", "192.0.2.9")],
            Check(b"192.0.2.1", IP, "edge/remote_address=192.0.2.9", also=((USER, b"ada"),)),
        ),
        ([("generic_key", "slow")], Check(b"slow", API_KEY, "edge/generic_key=slow")),
        ([PATH, ("plan", "free")], Check(b"free", API_KEY, "edge/path=/login/plan=free")),
    ],
)
def test_a_descriptor_is_a_check(entries, check):
    assert checks("edge", entries) == [check]


@pytest.mark.parametrize(
    ("of_request", "of_descriptor", "cost", "peek"),
    [
        (0, None, 1, False),
        (3, None, 3, False),
        (3, 5, 5, False),
        (INT32_MAX, None, INT32_MAX, False),
        (3, 0, 1, True),
    ],
)
def test_hits_are_the_cost_and_those_of_a_descriptor_take_precedence(
    of_request, of_descriptor, cost, peek
):
    [check] = checks("edge", ([("user_id", "ada")], of_descriptor), hits=of_request)
    assert (check.cost, check.peek) == (cost, peek)


def test_descriptors_stay_in_order():
    asked = checks("edge", [("user_id", "ada")], [("user_id", "bob")])
    assert [check.identifier for check in asked] == [b"ada", b"bob"]


ADA = [("user_id", "ada")]


WRONG = {
    "no domain": (request_of("", ADA), "domain"),
    "a domain for rules only": (request_of("*", ADA), "domain"),
    "a long domain": (request_of("d" * 256, ADA), "domain"),
    "a domain that is no text": (request_of("\n", ADA), "domain"),
    "a long domain beside other entries": (request_of("d" * 256, [PATH, *ADA]), "domain"),
    "no descriptors": (request_of("edge"), "descriptors"),
    "many descriptors": (request_of("edge", *[ADA] * (MAX_DESCRIPTORS + 1)), "descriptors"),
    "no entries": (request_of("edge", ADA, []), "descriptors[1].entries"),
    "many entries": (request_of("edge", ADA * (MAX_ENTRIES + 1)), "descriptors[0].entries"),
    "no key": (request_of("edge", [("", "x"), *ADA]), "descriptors[0].entries[0].key"),
    "nobody": (request_of("edge", [PATH, ("user_id", "")]), "descriptors[0].entries[1].value"),
    "no value": (request_of("edge", [("generic_key", "")]), "descriptors[0].entries[0].value"),
    "a long user": (
        request_of("edge", [("user_id", "x" * 257)]),
        "descriptors[0].entries[0].value",
    ),
    "no address": (
        request_of("edge", [("remote_address", "here")]),
        "descriptors[0].entries[0].value",
    ),
    "a long path": (request_of("edge", [("path", "x" * 256), *ADA]), "descriptors[0].entries"),
    "many hits": (request_of("edge", ADA, hits=2**31), "hits_addend"),
    "many hits of one": (request_of("edge", (ADA, 2**31)), "descriptors[0].hits_addend"),
}


@pytest.mark.parametrize("what", WRONG)
def test_violations_are_named(what):
    request, field = WRONG[what]
    with pytest.raises(CheckInvalidError) as refused:
        checks_of(parse_request(request.SerializeToString()), IDENTIFIERS)
    assert [violation.field for violation in refused.value.violations] == [field]


def test_the_maximum_number_of_descriptors_is_accepted():
    entries = [*[("k", "v")] * (MAX_ENTRIES - 1), *ADA]
    assert len(checks("edge", *[entries] * MAX_DESCRIPTORS)) == MAX_DESCRIPTORS


def test_refunds_together_with_checks_are_refused():
    request = request_of("edge", ADA, [("hold", "text")])
    request.descriptors[1].is_negative_hits = True
    with pytest.raises(
        CheckInvalidError, match=r"descriptors\[1\]\.is_negative_hits: a request that gives back"
    ):
        checks_of(parse_request(request.SerializeToString()), IDENTIFIERS)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (request_of("edge", ADA, hits=2**31), "hits_addend: must be 0 to 2147483647; 0 means 1"),
        # 0 hits of a descriptor ask without spending.
        (request_of("edge", (ADA, 2**31)), "descriptors[0].hits_addend: must be 0 to 2147483647"),
    ],
)
def test_the_bounds_of_hits_are_reported(request_, text):
    with pytest.raises(CheckInvalidError) as refused:
        checks_of(parse_request(request_.SerializeToString()), IDENTIFIERS)
    assert str(refused.value) == text


def test_violations_repeat_no_values():
    with pytest.raises(CheckInvalidError) as refused:
        checks("edge", [("remote_address", "somewhere"), ("path", "secret" * 50)])
    assert "secret" not in str(refused.value)
    assert "somewhere" not in str(refused.value)


TOO_WIDE = b"\x18\x81\x80\x80\x80\x10"
"""``hits_addend`` of 2^32 + 1."""


def test_a_request_is_parsed_as_sent():
    sent = request_of("edge", ([("ip", "192.0.2.1")], 5), hits=3)
    read = parse_request(sent.SerializeToString() + TOO_WIDE)
    assert (read.domain, read.hits_addend) == (b"edge", 2**32 + 1)
    [descriptor] = read.descriptors
    assert [(entry.key, entry.value) for entry in descriptor.entries] == [(b"ip", b"192.0.2.1")]
    assert descriptor.HasField("hits_addend")
    assert descriptor.hits_addend.value == 5


def test_invalid_utf8_is_parsed():
    assert parse_request(b"\x0a\x01\xff").domain == b"\xff"


@pytest.mark.parametrize("data", [b"\xff", bytes(MAX_REQUEST_BYTES + 1)])
def test_malformed_bytes_of_a_request_are_refused(data):
    with pytest.raises(InvalidInputError) as refused:
        parse_request(data)
    assert [violation.field for violation in refused.value.violations] == ["request"]


def test_answers_are_encoded_as_envoy_parses_them():
    answer = Response(overall_code=Response.OVER_LIMIT)
    answer.response_headers_to_add.add(key=b"Retry-After", value=b"5")
    read = envoy_messages.Response.FromString(answer.SerializeToString())
    assert read.overall_code == read.OVER_LIMIT
    assert read.response_headers_to_add[0].key == "Retry-After"


def test_the_files_describe_the_service_and_nothing_is_missing():
    found = [*files()]
    known = set()
    for file in found:
        assert known.issuperset(file.dependency)
        known.add(file.name)
    assert f"{found[-1].package}.{found[-1].service[0].name}" == SERVICE
