"""What somebody is told who does not speak gRPC."""

import hpack
import pytest

from ratelimitd.rpc.routing import http_fallback


@pytest.mark.parametrize(
    ("method", "is_grpc", "status"),
    [(b"GET", False, "405"), (b"GET", True, "405"), (b"", True, "405"), (b"POST", False, "415")],
)
def test_a_request_that_is_not_of_grpc_gets_an_answer_with_a_body(method, is_grpc, status):
    block, body = http_fallback(method, is_grpc=is_grpc)
    fields = dict(hpack.Decoder().decode(block))
    assert fields[":status"] == status
    assert fields["content-length"] == str(len(body))
    assert b"gRPC" in body
    assert ("allow" in fields) == (status == "405")


def test_an_answer_to_head_is_headers_alone():
    block, body = http_fallback(b"HEAD", is_grpc=False)
    assert (block, body) == (http_fallback(b"GET", is_grpc=False).head_block, b"")


def test_a_request_of_grpc_is_none_of_its_business():
    assert http_fallback(b"POST", is_grpc=True) is None
