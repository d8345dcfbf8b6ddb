import asyncio
import json
import time
from http import HTTPStatus

import httpx
import pytest
from starlette.applications import Starlette

from ratelimitd.counters import CheckStats
from ratelimitd.fair_queue import FairQueue
from ratelimitd.rpc.interface import Methods, RpcError, StatusCode
from ratelimitd.services.errors import ErrorEdge
from ratelimitd.web.api.connect import GRPC_WEB_PROTO, JSON, PROTO
from ratelimitd.web.api.json_api import CHECK_METHOD, HttpCheck, JsonApi
from ratelimitd_wire.ratelimit_headers import NEWEST_REVISION
from ratelimiter.v1 import ratelimiter_pb2 as pb

LIST = "/ratelimiter.v1.RateLimiterConfig/ListRateLimits"
BARE_CHECK = "/RateLimiter/CheckRateLimit"


class Node:
    """A method table that records callers and requests, behind the routes."""

    def __init__(self):
        self.calls = []
        self.stats = CheckStats()
        self.edge = ErrorEdge(self.stats)
        self.refused = None
        self.answer = pb.RateLimitResponse(allowed=True).SerializeToString()
        paths = [
            path
            for name, service in pb.DESCRIPTOR.services_by_name.items()
            for method in service.methods
            for path in (f"/ratelimiter.v1.{name}/{method.name}", f"/{name}/{method.name}")
        ]
        self.paths = paths
        api = JsonApi(
            Methods(unary=dict.fromkeys(paths, self.handle)),
            admit=self.admit,
            translate=self.edge.translate,
            http_check=HttpCheck(lambda: 0.0, NEWEST_REVISION),
            queue=FairQueue(time.monotonic),
        )
        self.app = Starlette(routes=api.routes())

    def admit(self, call):
        if self.refused:
            raise self.refused

    def handle(self, data, call):
        self.calls.append((call.method, data))
        return self.answer

    async def ask(self, method, path, body=b"", **headers):
        transport = httpx.ASGITransport(app=self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            headers = {name.replace("_", "-"): value for name, value in headers.items()}
            return await client.request(method, path, content=body, headers=headers)

    async def post(self, path, body=b"{}", content_type=JSON, **headers):
        return await self.ask("POST", path, body, content_type=content_type, **headers)


@pytest.fixture
def node():
    return Node()


async def test_every_method_is_served_under_both_paths(node):
    for path in node.paths:
        node.answer = b""
        assert (await node.post(path)).status_code == 200
    assert node.calls == [(path, b"") for path in node.paths]
    assert CHECK_METHOD in node.paths


@pytest.mark.parametrize(
    ("content_type", "body", "answer_type"),
    [
        (JSON, b'{"identifier":"u"}', JSON),
        ("Application/JSON; charset=utf-8", b'{"identifier":"u"}', JSON),
        (PROTO, b"\n\x01u", PROTO),
        (GRPC_WEB_PROTO, b"\x00\x00\x00\x00\x03\n\x01u", GRPC_WEB_PROTO),
        ("application/grpc-web", b"\x00\x00\x00\x00\x03\n\x01u", GRPC_WEB_PROTO),
    ],
)
async def test_content_type_selects_the_protocol(node, content_type, body, answer_type):
    answer = await node.post(BARE_CHECK, body, content_type)
    assert (answer.status_code, answer.headers["content-type"]) == (200, answer_type)
    assert node.calls == [(BARE_CHECK, b"\n\x01u")]


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "json",
        "application/grpc",
        "application/grpc-web-text",
        "text/plain; application/json",
        "text/plain, application/json",
    ],
)
@pytest.mark.parametrize("path", [CHECK_METHOD, "/v1/check"])
async def test_other_content_types_are_refused(node, path, content_type):
    answer = await node.post(path, b'{"identifier":"u"}', content_type)
    assert answer.status_code == 415
    assert "application/json" in answer.headers["accept-post"]
    assert answer.json()["code"] == "invalid_argument"
    assert "Content-Type" in answer.json()["message"]
    assert not node.calls


async def test_request_without_a_content_type_is_refused(node):
    answer = await node.ask("POST", LIST)
    assert answer.status_code == 415
    assert not node.calls


@pytest.mark.parametrize("path", [CHECK_METHOD, "/v1/check"])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_calls_require_post_and_preflights_are_not_answered(node, path, method):
    answer = await node.ask(method, path, b"{}", content_type=JSON, origin="http://evil.example")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_caller_without_the_role_is_refused_before_its_body_is_read(node):
    node.refused = RpcError(StatusCode.UNAUTHENTICATED, "no")
    answer = await node.post(LIST, b"no json")
    assert (answer.status_code, answer.json()["code"]) == (401, "unauthenticated")
    assert not node.calls


@pytest.mark.parametrize("path", [CHECK_METHOD, BARE_CHECK, "/v1/check"])
async def test_invalid_input_is_reported_without_calling_the_handler(node, path):
    answer = await node.post(path, b'{"identifier":1,"colour":"red"}')
    assert answer.status_code == 400
    content = answer.json()
    assert content["code"] == "invalid_argument"
    fields = content["details"][1]["debug"]["field_violations"]
    assert [violation["field"] for violation in fields] == ["identifier", "colour"]
    assert not node.calls


async def test_body_of_five_megabytes_is_refused(node):
    for content_type in (JSON, PROTO):
        answer = await node.post(CHECK_METHOD, bytes(5_000_000), content_type)
        assert answer.status_code == 413
    assert not node.calls


async def test_defect_is_reported_in_the_log_only(node, caplog):
    node.answer = b"\xff"  # not a message
    answer = await node.post(CHECK_METHOD)
    assert answer.status_code == HTTPStatus.INTERNAL_SERVER_ERROR
    assert answer.json()["message"] == "unexpected error"
    assert node.stats.unexpected_total == 1
    assert "unexpected error in" in caplog.text


async def test_expired_deadline_charges_nothing(node):
    answer = await node.post(CHECK_METHOD, connect_timeout_ms="0")
    assert (answer.status_code, answer.json()["code"]) == (504, "deadline_exceeded")
    answer = await node.post(
        CHECK_METHOD, b"\x00\x00\x00\x00\x00", GRPC_WEB_PROTO, grpc_timeout="0S"
    )
    assert b"grpc-status: 4" in answer.content
    assert not node.calls


async def test_http_check_answers_429_where_the_method_answers_200(node):
    node.answer = pb.RateLimitResponse(retry_after_seconds=5).SerializeToString()
    assert (await node.post(CHECK_METHOD)).status_code == 200
    answer = await node.post("/v1/check")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "5")
    assert node.calls[1][0] == CHECK_METHOD


async def test_openapi_document_is_served(node):
    answer = await node.ask("GET", "/openapi.json")
    assert (answer.status_code, answer.headers["content-type"]) == (200, JSON)
    assert json.loads(answer.content)


async def test_disconnected_client_is_not_answered(node):
    async def receive():
        return {"type": "http.disconnect"}

    sent = []

    async def send(message):
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {
        "type": "http", "method": "POST", "path": CHECK_METHOD, "headers": headers, "client": ("127.0.0.1", 1),
    }  # fmt: skip
    await asyncio.wait_for(node.app(scope, receive, send), 10)
    assert sent[0]["status"] == 499
    assert not node.calls
