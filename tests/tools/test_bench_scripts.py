from itertools import islice, pairwise

import pytest
from hpack import Decoder

from bench.scripts import BATCH_SIZE, SCENARIOS, build
from ratelimitd_wire.frames import END_STREAM, FrameType, read_header
from ratelimiter.v1 import ratelimiter_pb2 as pb

CALLS = 400
CHECKS = ["one-key", "identifiers", "go-timeouts", "grpcio-timeouts"]


def calls(name, count=CALLS, **options):
    """Of each call: its stream, its fields as the hpack library reads them, its message."""
    script, decoder = build(SCENARIOS[name], count, **options), Decoder()
    for start, end in pairwise(script.starts):
        octets = script.octets[start:end]
        _, size, kind, stream_id = read_header(octets, 0)
        assert kind >> 8 == FrameType.HEADERS
        fields = decoder.decode(octets[9 : 9 + size])
        body = octets[9 + size :]
        if body:
            _, length, kind, data_stream_id = read_header(body, 0)
            assert (length, kind, data_stream_id) == (len(body) - 9, END_STREAM, stream_id)
            assert length == script.body_bytes
        yield stream_id, fields, body[9 + 5 :]


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_streams_of_a_script_are_numbered_as_a_client_numbers_them(name):
    assert [stream_id for stream_id, _, _ in calls(name)] == list(range(1, 2 * CALLS, 2))


@pytest.mark.parametrize("name", CHECKS)
def test_every_block_of_a_check_is_a_whole_request(name):
    for _, fields, message in calls(name):
        request = pb.RateLimitRequest.FromString(message)
        assert (request.identifier_type, request.endpoint) == ("user", "/api/orders")
        assert len(request.identifier) == 38
        assert dict(fields)[":path"] == "/ratelimiter.v1.RateLimiter/CheckRateLimit"
        assert {":method", ":scheme", ":authority", "te", "user-agent"} < dict(fields).keys()
        assert dict(fields).keys() >= {"grpc-timeout", "content-type"}
        assert len(fields) == len(dict(fields))


@pytest.mark.parametrize("name", ["go-timeouts", "grpcio-timeouts"])
def test_a_changing_timeout_changes_and_drives_the_constant_fields_out_of_the_table(name):
    blocks = list(islice(SCENARIOS[name].blocks(), CALLS))
    timeouts = [dict(fields)["grpc-timeout"] for _, fields, _ in calls(name)]
    assert all(a != b for a, b in pairwise(timeouts[:50]))
    assert sum(len(block) > 80 for block in blocks[1:]) > 3


def test_grpcio_writes_out_what_grpc_go_compresses():
    verbatim, compressed = (
        next(islice(SCENARIOS[name].blocks(), 20, None))
        for name in ("grpcio-timeouts", "go-timeouts")
    )
    assert b"\x40\x0cgrpc-timeout" in verbatim
    assert b"timeout" not in compressed
    assert len(compressed) < len(verbatim)


def test_a_constant_block_is_one_octet_for_each_field_from_the_second_on():
    first, second, third = islice(SCENARIOS["one-key"].blocks(), 3)
    assert len(first) > len(second) == len(Decoder().decode(first))
    assert second == third


def test_a_pass_over_the_identifiers_has_each_of_them_once(monkeypatch):
    monkeypatch.setattr("bench.scripts.IDENTIFIERS", CALLS)
    assert len({message for _, _, message in calls("identifiers", CALLS - 1)}) == CALLS - 1


def test_scripts_that_skip_do_not_begin_with_the_same_identifier(monkeypatch):
    monkeypatch.setattr("bench.scripts.IDENTIFIERS", CALLS)
    messages = [message for _, _, message in calls("identifiers", 10)]
    assert [message for _, _, message in calls("identifiers", 10, skip=5)][:5] == messages[5:]


@pytest.mark.parametrize(("name", "identifiers"), [("batch", BATCH_SIZE), ("batch-one-key", 1)])
def test_a_batch_asks_for_as_many_identifiers_as_its_name_says(name, identifiers):
    for _, _, message in calls(name, 3):
        requests = pb.BatchRateLimitRequest.FromString(message).requests
        assert len(requests) == BATCH_SIZE
        assert len({request.identifier for request in requests}) == identifiers


def test_a_file_is_asked_for_without_a_body():
    for _, fields, message in calls("file", 3):
        assert dict(fields)[":method"] == "GET"
        assert message == b""
