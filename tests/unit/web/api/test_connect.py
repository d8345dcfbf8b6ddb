import base64
import gzip
import json

import pytest
from google.rpc import error_details_pb2
from starlette.datastructures import Headers

from ratelimitd.errors import FieldViolation, InvalidInputError, StoreUnavailableError
from ratelimitd.rpc.interface import RpcError, StatusCode
from ratelimitd.services.errors import rich_error, rpc_error
from ratelimitd.web.api.connect import HTTP_STATUS, ConnectJson, ConnectProto, Types
from ratelimitd.web.api.http_call import BodyTooLargeError, EncodingUnsupportedError
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.unit.web.api.turns import at_once

TYPES = Types(pb.RateLimitRequest, pb.RateLimitResponse)


def failure(error):
    response = ConnectJson().failure(error)
    return response, json.loads(response.body)


def timeout_s(**headers):
    return ConnectJson().timeout_s(
        Headers({name.replace("_", "-"): value for name, value in headers.items()})
    )


def test_every_code_has_a_status_and_its_name():
    assert set(HTTP_STATUS) == set(StatusCode) - {StatusCode.OK}
    for code, status in HTTP_STATUS.items():
        response, content = failure(RpcError(code, "text"))
        assert response.status_code == status
        expected = "canceled" if code is StatusCode.CANCELLED else code.name.lower()
        assert content == {"code": expected, "message": "text"}


def test_details_are_given_in_binary_and_readable_form():
    error = rpc_error(InvalidInputError(FieldViolation("limit", "must be positive")))
    response, content = failure(error)
    assert (response.status_code, response.media_type) == (400, "application/json")
    info, fields = content["details"]
    assert info["type"] == "google.rpc.ErrorInfo"
    assert info["debug"] == {"reason": "INVALID_FIELD", "domain": "ratelimitd"}
    assert fields["type"] == "google.rpc.BadRequest"
    violation = {"field": "limit", "description": "must be positive"}
    assert fields["debug"] == {"field_violations": [violation]}
    assert "=" not in fields["value"]
    packed = base64.b64decode(fields["value"] + "==")
    assert error_details_pb2.BadRequest.FromString(packed).field_violations[0].field == "limit"


def test_retry_info_becomes_retry_after():
    response, _ = failure(rpc_error(StoreUnavailableError("away")))
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")


def test_unauthenticated_answer_names_the_scheme():
    response, _ = failure(rich_error(StatusCode.UNAUTHENTICATED, "CREDENTIALS_REQUIRED", "no"))
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
    assert "retry-after" not in response.headers


def test_oversized_body_has_its_own_status():
    response, content = failure(BodyTooLargeError(StatusCode.RESOURCE_EXHAUSTED, "long"))
    assert (response.status_code, content["code"]) == (413, "resource_exhausted")


def test_unknown_encoding_has_its_own_status_and_names_the_supported_one():
    response, content = failure(EncodingUnsupportedError(StatusCode.UNIMPLEMENTED, "br"))
    assert (response.status_code, content["code"]) == (415, "unimplemented")
    assert response.headers["accept-encoding"] == "gzip"


def test_timeout_is_in_milliseconds():
    assert timeout_s() is None
    assert timeout_s(connect_timeout_ms="1500", connect_protocol_version="1") == 1.5
    assert timeout_s(connect_timeout_ms="0") == 0


@pytest.mark.parametrize("text", ["", "-1", "1.5", "1_0", "\xb2", "12345678901"])
def test_malformed_timeout_is_refused(text):
    with pytest.raises(RpcError, match="Connect-Timeout-Ms") as refused:
        timeout_s(connect_timeout_ms=text)
    assert refused.value.code is StatusCode.INVALID_ARGUMENT


def test_other_protocol_version_is_refused():
    with pytest.raises(RpcError, match="Connect-Protocol-Version must be 1") as refused:
        timeout_s(connect_protocol_version="2")
    assert refused.value.code is StatusCode.INVALID_ARGUMENT


PLAIN, GZIP = Headers({}), Headers({"content-encoding": "gzip"})


async def test_bodies_may_be_compressed():
    for protocol, body in ((ConnectJson(), b'{"peek":true}'), (ConnectProto(), b"\x30\x01")):
        message = await protocol.message_of(gzip.compress(body), GZIP, TYPES, at_once)
        assert pb.RateLimitRequest.FromString(message).peek


async def test_inflation_stops_at_the_bound():
    bomb = gzip.compress(bytes(ConnectJson.max_body_bytes + 1))
    with pytest.raises(BodyTooLargeError):
        await ConnectJson().message_of(bomb, GZIP, TYPES, at_once)


async def test_binary_messages_pass_unchanged():
    assert await ConnectProto().message_of(b"\xff", PLAIN, TYPES, at_once) == b"\xff"
    response = await ConnectProto().answer(b"\x08\x01", TYPES, at_once)
    assert (response.media_type, response.body) == ("application/proto", b"\x08\x01")
