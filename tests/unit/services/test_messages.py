import pytest

from ratelimitd.errors import InvalidInputError
from ratelimitd.services.convert_envoy import MAX_REQUEST_BYTES, Response, files, parse_request
from ratelimitd.services.envoy import SERVICE
from tests import envoy_messages
from tests.envoy_messages import request_of

TOO_WIDE = b"\x18\x81\x80\x80\x80\x10"
"""``hits_addend`` of 2^32 + 1."""


def test_a_request_is_read_as_it_was_sent():
    sent = request_of("edge", ([("ip", "192.0.2.1")], 5), hits=3)
    read = parse_request(sent.SerializeToString() + TOO_WIDE)
    assert (read.domain, read.hits_addend) == (b"edge", 2**32 + 1)
    [descriptor] = read.descriptors
    assert [(entry.key, entry.value) for entry in descriptor.entries] == [(b"ip", b"192.0.2.1")]
    assert descriptor.HasField("hits_addend")
    assert descriptor.hits_addend.value == 5


def test_text_that_is_no_text_is_read_all_the_same():
    assert parse_request(b"\x0a\x01\xff").domain == b"\xff"


@pytest.mark.parametrize("data", [b"\xff", bytes(MAX_REQUEST_BYTES + 1)])
def test_bytes_that_are_no_request_are_refused(data):
    with pytest.raises(InvalidInputError) as refused:
        parse_request(data)
    assert [violation.field for violation in refused.value.violations] == ["request"]


def test_answers_are_written_as_envoy_reads_them():
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
