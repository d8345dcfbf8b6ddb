"""The JSON API of a real node: bad input, other sites, roles, the document's examples, and a third-party client."""

import argparse
import json
import logging
import re
import shlex
from datetime import datetime
from pathlib import Path

import grpc
import httpx
import pytest
from connectrpc.client import ConnectClient
from connectrpc.code import Code
from connectrpc.compat import google_protobuf_codecs
from connectrpc.errors import ConnectError
from connectrpc.method import IdempotencyLevel, MethodInfo, StreamType
from connectrpc.protocol import ProtocolType
from openapi_schema_validator import OAS31Validator
from openapi_spec_validator import validate
from prometheus_client.openmetrics import parser as openmetrics

from ratelimitd.services.envoy import METHOD as ENVOY_METHOD
from ratelimitd.testing import ManualClock, running_node
from ratelimitd_wire.ratelimit_headers import REVISIONS
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.envoy_messages import Response, request_of
from tests.rpc.over_http import MESSAGE, Protocol, called, framed

ROOT = Path(__file__).resolve().parents[2]
CHECK = "/ratelimiter.v1.RateLimiter/CheckRateLimit"
BATCH = "/ratelimiter.v1.RateLimiter/CheckRateLimitBatch"
EXPLAIN = "/ratelimiter.v1.RateLimiterHealth/ExplainRateLimit"
UPDATE = "/ratelimiter.v1.RateLimiterConfig/UpdateRateLimit"
CREATE = "/ratelimiter.v1.RateLimiterConfig/CreateRateLimit"
LIST = "/ratelimiter.v1.RateLimiterConfig/ListRateLimits"
RULE = {
    "id": "00000000-0000-4000-8000-000000000001", "endpoint": "/a", "identifier_type": "user",
    "limit": 2, "window_seconds": 60, "algorithm": "fixed_window",
}  # fmt: skip
A_CHECK = {"identifier": "ada", "identifier_type": "user", "endpoint": "/a"}
ADMIN = {"authorization": "Bearer admin-secret"}


@pytest.fixture
async def node():
    async with running_node(clock=ManualClock(), log_level="error") as node:
        yield node


@pytest.fixture
async def client(node):
    async with httpx.AsyncClient(base_url=f"http://{node.http_address}") as client:
        yield client


@pytest.fixture
async def limited(client):
    """A node with a rule of two a minute."""
    answer = await client.post(CREATE, json={"rate_limit": RULE})
    assert answer.status_code == 200
    return client


async def test_a_denial_can_be_forwarded(limited):
    answers = [await limited.post("/v1/check", json=A_CHECK) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    policy = f'"{RULE["id"]}"'
    assert {answer.headers["ratelimit-policy"] for answer in answers} == {f"{policy};q=2;w=60"}
    left = [answer.headers["ratelimit"] for answer in answers]
    assert left == [f"{policy};r={tokens};t=60" for tokens in (1, 0, 0)]
    assert [answer.headers.get("retry-after") for answer in answers] == [None, None, "60"]
    assert answers[2].json()["reason"] == "LIMIT_EXCEEDED"


@pytest.mark.parametrize("revision", REVISIONS)
async def test_the_node_and_envoy_send_the_configured_revision(revision):
    endpoint = "edge/path=/a"
    rule = {**RULE, "endpoint": endpoint, "identifier_type": "ip"}
    request = request_of("edge", [("remote_address", "192.0.2.1"), ("path", "/a")])
    peek = {"identifier": "192.0.2.1", "identifier_type": "ip", "endpoint": endpoint, "peek": True}
    async with (
        running_node(clock=ManualClock(), ratelimit_headers=revision) as node,
        httpx.AsyncClient(base_url=f"http://{node.http_address}") as client,
        grpc.aio.insecure_channel(node.grpc_address) as channel,
    ):
        assert (await client.post(CREATE, json={"rate_limit": rule})).status_code == 200
        of_node = (await client.post("/v1/check", json=peek)).headers
        answer = await channel.unary_unary(ENVOY_METHOD)(request.SerializeToString())
    of_envoy = {
        field.key: field.value
        for field in Response.FromString(answer).response_headers_to_add
        if field.key.startswith("RateLimit")
    }
    newest = f'"{RULE["id"]}";q=2;w=60'
    assert of_envoy["RateLimit-Policy"] == (newest if revision == "draft-11" else "2;w=60")
    assert {name: of_node.get(name) for name in of_envoy} == of_envoy
    assert ("RateLimit-Remaining" in of_envoy) == (revision == "draft-6")


async def test_the_method_answers_200_even_for_a_denial(limited):
    answers = [await limited.post(CHECK, json=A_CHECK) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert [answer.json()["allowed"] for answer in answers] == [True, True, False]


BAD_BODIES = {
    "no JSON": b"{",
    "no object": b"[]",
    "no UTF-8": b'{"identifier":"\xff"}',
    "half a pair": b'{"identifier":"\\ud800"}',
    "an unknown field": b'{"identifier":"ada","burst":5}',
    "a wrong type": b'{"identifier":["ada"]}',
    "a number that is too wide": b'{"tokens_requested":4294967297}',
    "a number of many digits": b'{"tokens_requested":' + b"9" * 5_000 + b"}",
    "one field twice": b'{"peek":true,"peek":true}',
    "one field under both names": b'{"tokens_requested":1,"tokensRequested":1}',
    "a deep nest": b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
    "an Any": b'{"@type":"type.googleapis.com/google.protobuf.Any","value":{}}',
    "many values": b'{"a":[' + b"1," * 100_000 + b"1]}",
    "an empty field": b'{"identifier":"","identifier_type":"user","endpoint":"/a"}',
    "nothing": b"",
}


async def state(client):
    peek = await client.post(CHECK, json={**A_CHECK, "peek": True})
    return peek.content, (await client.post(LIST, json={})).content


async def test_plans_are_a_json_object(client):
    day = {"name": "day", "limit": 9, "window_seconds": 60, "algorithm": "fixed_window"}
    rule = {**RULE, "plans": {"pro": {"limits": [day]}}}
    created = (await client.post(CREATE, json={"rate_limit": rule})).json()
    assert created["plans"]["pro"]["limits"][0]["limit"] == 9
    assert (await client.post(LIST, json={})).json()["rate_limits"] == [created]
    for plans, field in (
        ([], "rate_limit.plans"),
        ({"pro": 7}, "rate_limit.plans[pro]"),
        ({"pro": {"limits": [{"limit": "x"}]}}, "rate_limit.plans[pro].limits[0].limit"),
        ({"unlimited": {"limits": [day]}}, "rate_limit.plans[unlimited]"),
        ({"\ud800": {}}, "rate_limit.plans[\N{REPLACEMENT CHARACTER}]"),
    ):
        body = json.dumps({"rate_limit": {**rule, "plans": plans}})
        answer = await client.post(
            CREATE, content=body, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400
        assert answer.json()["message"].startswith(f"{field}: ")


@pytest.mark.parametrize("path", [CHECK, "/v1/check", CREATE, LIST])
async def test_bad_input_is_a_client_error_that_changes_nothing(node, limited, path, caplog):
    before = await state(limited)
    caplog.set_level(logging.INFO)
    for name, body in BAD_BODIES.items():
        answer = await limited.post(
            path, content=body, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400, name
        content = answer.json()
        assert content["code"] == "invalid_argument"
        assert content["details"][1]["debug"]["field_violations"], name
        assert "Traceback" not in answer.text
    answer = await limited.post(
        path, content=bytes(5_000_000), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 413
    assert await state(limited) == before
    assert node.stats.fail_open_error_total == 0
    # Bad input is not logged; the fixture's change may still be.
    logged = {
        record.getMessage() for record in caplog.records if record.name.startswith("ratelimitd")
    }
    assert not {line for line in logged if not line.startswith("rules in force")}


async def test_a_header_with_invalid_utf8_has_no_effect(limited):
    answer = await limited.post(CHECK, json=A_CHECK, headers={"x-note": b"\xff\xfe"})
    assert answer.status_code == 200


SIMPLE_TYPES = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]


@pytest.mark.parametrize("origin", [{}, {"origin": "http://evil.example"}])
@pytest.mark.parametrize("content_type", SIMPLE_TYPES)
async def test_simple_cross_site_requests_create_no_rule(client, content_type, origin):
    body = json.dumps({"rate_limit": RULE}).encode()
    answer = await client.post(
        CREATE, content=body, headers={"content-type": content_type, **origin}
    )
    assert answer.status_code == (403 if origin else 415)
    assert (await client.post(LIST, json={})).json()["rate_limits"] == []


@pytest.mark.parametrize("path", [CHECK, CREATE, "/v1/check", "/openapi.json"])
async def test_cross_site_preflight_requests_get_no_permission(client, path):
    asking = {
        "origin": "http://evil.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type",
        "access-control-request-private-network": "true",
    }
    answer = await client.options(path, headers=asking)
    assert answer.status_code == 405
    assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_requests_of_another_site_are_refused(client):
    for headers in (
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
    ):
        answer = await client.post(CREATE, json={"rate_limit": RULE}, headers=headers)
        assert answer.status_code == 403
    assert (await client.post(LIST, json={})).json()["rate_limits"] == []


@pytest.mark.parametrize("path", [CHECK, CREATE, "/v1/check", "/RateLimiter/CheckRateLimit"])
async def test_a_rebound_host_name_is_refused(client, path):
    answer = await client.post(path, json={}, headers={"host": "evil.example"})
    assert answer.status_code == 421


async def test_roles_are_those_of_grpc():
    options = {"admin_token": "admin-secret", "check_token": "check-secret", "log_level": "error"}
    async with (
        running_node(clock=ManualClock(), **options) as node,
        httpx.AsyncClient(base_url=f"http://{node.http_address}") as client,
    ):
        checking = {"authorization": "Bearer check-secret"}
        wrong = {"authorization": "Bearer wrong"}
        for path, headers, status in [
            (CHECK, {}, 401),
            ("/v1/check", wrong, 401),
            (LIST, wrong, 401),
            (LIST, checking, 403),
            (LIST, ADMIN, 200),
            # A session of the page is not valid here.
            (LIST, {"cookie": "session=admin-secret"}, 401),
        ]:
            body = A_CHECK if path != LIST else {}
            answer = await client.post(path, json=body, headers=headers)
            assert answer.status_code == status, (path, headers)
            if status == 401:
                assert answer.headers["www-authenticate"] == "Bearer"
        assert (await client.post("/v1/check", json=A_CHECK, headers=checking)).status_code == 200


async def test_callers_behind_a_proxy_are_not_local(client):
    answer = await client.post(LIST, json={}, headers={"x-forwarded-for": "192.0.2.7"})
    assert (answer.status_code, answer.json()["code"]) == (403, "permission_denied")


async def test_grpc_web_by_hand(limited):
    message = pb.RateLimitRequest(**A_CHECK)
    body = framed(MESSAGE, message.SerializeToString())
    answer = await limited.post(
        CHECK, content=body, headers={"content-type": "application/grpc-web"}
    )
    size = int.from_bytes(answer.content[1:5], "big")
    assert answer.content[:1] == b"\x00"
    assert pb.RateLimitResponse.FromString(answer.content[5 : 5 + size]).allowed
    assert answer.content[5 + size :] == b"\x80\x00\x00\x00\x10grpc-status: 0\r\n"
    broken = framed(MESSAGE, b"\xff")
    end = await called(limited, CHECK, broken, Protocol.GRPC_WEB, answer_class=pb.RateLimitResponse)
    assert end.code.name == "INVALID_ARGUMENT"


def method_of(path, request, answer):
    service, _, name = path[1:].partition("/")
    return MethodInfo(
        name=name,
        service_name=service,
        input=request,
        output=answer,
        idempotency_level=IdempotencyLevel.UNKNOWN,
        stream_type=StreamType.UNARY,
    )


@pytest.mark.parametrize("protocol", [ProtocolType.CONNECT, ProtocolType.GRPC_WEB])
@pytest.mark.parametrize("codec", google_protobuf_codecs(), ids=["proto", "json"])
async def test_the_client_of_connect_is_served(node, limited, protocol, codec):
    if protocol is ProtocolType.GRPC_WEB and codec.name() == "json":
        codec = google_protobuf_codecs()[0]  # gRPC-Web is binary here
    options = {"protocol": protocol, "codec": codec, "timeout_ms": 30_000}
    client = ConnectClient(f"http://{node.http_address}", **options)
    check = method_of(CHECK, pb.RateLimitRequest, pb.RateLimitResponse)
    answer = await client.execute_unary(request=pb.RateLimitRequest(**A_CHECK), method=check)
    assert (answer.allowed, answer.remaining_tokens) == (True, 1)
    create = method_of(CREATE, pb.CreateRateLimitRequest, pb.RateLimit)
    with pytest.raises(ConnectError) as refused:
        await client.execute_unary(request=pb.CreateRateLimitRequest(), method=create)
    assert refused.value.code is Code.INVALID_ARGUMENT
    assert [detail.type_name for detail in refused.value.details] == [
        "google.rpc.ErrorInfo",
        "google.rpc.BadRequest",
    ]


def resolved(document, schema):
    """Return a schema that resolves its references."""
    return {**schema, "components": document["components"]}


async def test_the_document_is_valid_and_its_examples_work_in_their_order(client):
    document = (await client.get("/openapi.json")).json()
    validate(document)
    operations = {path: item["post"] for path, item in document["paths"].items()}
    assert set(operations) == {
        "/v1/check",
        *(
            f"/{service.full_name}/{method.name}"
            for service in pb.DESCRIPTOR.services_by_name.values()
            for method in service.methods
        ),
    }
    held = ""
    holds = "/ratelimiter.v1.RateLimiterHolds/"
    first, then = CREATE, holds + "Hold"
    last = {
        "/ratelimiter.v1.RateLimiterConfig/DeleteRateLimit",
        "/ratelimiter.v1.RateLimiterPlans/UnassignPlan",
        holds + "Settle",
    }
    order = {first: -2, then: -1} | dict.fromkeys(last, 1)
    for path in sorted(operations, key=lambda path: order.get(path, 0)):
        asked = operations[path]["requestBody"]["content"]["application/json"]
        OAS31Validator(resolved(document, asked["schema"])).validate(asked["example"])
        example = asked["example"]
        if "hold" in example:
            example = {**example, "hold": held}
        answer = await client.post(path, json=example)
        held = answer.json().get("hold", held)
        assert answer.status_code == 200, (path, answer.text)
        told = operations[path]["responses"]["200"]["content"]["application/json"]["schema"]
        OAS31Validator(resolved(document, told)).validate(answer.json())


async def test_errors_are_as_documented(client):
    document = (await client.get("/openapi.json")).json()
    operation = document["paths"][CREATE]["post"]["responses"]
    schema = resolved(document, document["components"]["schemas"]["Error"])
    for body, status in (
        ({"limit": 1}, 400),
        ({"rate_limit": RULE}, 200),
        ({"rate_limit": RULE}, 409),
    ):
        answer = await client.post(CREATE, json=body)
        assert answer.status_code == status
        assert str(status) in operation
        if status != 200:
            OAS31Validator(schema).validate(answer.json())


async def test_the_metrics_of_a_node_are_openmetrics_without_exemplars(limited):
    await limited.post(CHECK, json=A_CHECK)
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    answer = await limited.get("/metrics", headers=accept)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    families = {
        family.name: family for family in openmetrics.text_string_to_metric_families(answer.text)
    }
    allowed = families["rate_limiter_requests_allowed"].samples
    assert [(sample.name, sample.value) for sample in allowed] == [
        ("rate_limiter_requests_allowed_total", 1.0)
    ]
    samples = [sample for family in families.values() for sample in family.samples]
    assert not [sample for sample in samples if sample.exemplar]
    assert not re.search(r"_created\b", answer.text)


async def test_the_command_lines_of_the_page_work(node, client):
    page = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    section = page.split("\n## JSON\n", 1)[1].split("\n## ", 1)[0]
    lines = re.findall(r"^curl .*$", section.replace("\\\n", ""), re.MULTILINE)
    answers = [await asked(client, line) for line in lines]
    assert len(answers) == 5
    assert [answer.status_code for answer in answers] == [200] * 5
    assert answers[1].json()["remaining_tokens"] == 1
    assert [rule["endpoint"] for rule in answers[2].json()["rate_limits"]] == ["/orders/{id}"]
    assert answers[3].headers["ratelimit"].endswith(";r=0;t=60")


async def asked(client, line):
    """Make the request of a curl command line to this node."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("-s", "-i", action="store_true")
    parser.add_argument("-H", action="append", default=[])
    parser.add_argument("-d")
    given = parser.parse_args(shlex.split(line)[1:])
    path = given.url.removeprefix("http://127.0.0.1:8080")
    headers = dict(header.split(": ", 1) for header in given.H)
    return await client.request(
        "POST" if given.d else "GET", path, content=given.d, headers=headers
    )


DAY = {"name": "day", "limit": 9, "window_seconds": 86_400, "algorithm": "fixed_window"}
MADE = {name: RULE[name] for name in ("limit", "window_seconds", "algorithm")}
IP = {"identifier_type": "ip", "identifier": "::1"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"also": [IP, IP]}, "also[1].identifier_type"),
        ({"also": [IP] * 8}, "also"),
        ({"endpoint": "**"}, "endpoint"),
    ],
)
async def test_a_check_with_bad_identities_is_refused_and_named_and_charges_nothing(
    limited, fields, named
):
    for path in (CHECK, EXPLAIN):
        answer = await limited.post(path, json={**A_CHECK, **fields})
        assert (answer.status_code, fields_in(answer)) == (400, [named])
    batch = await limited.post(BATCH, json={"requests": [{**A_CHECK, **fields}]})
    [item] = batch.json()["responses"]
    assert item["error"].startswith(f"requests[0].{named}: ")
    assert (await limited.post(CHECK, json=A_CHECK)).json()["remaining_tokens"] == 1


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"limits": [MADE, *[DAY] * 8]}, "limits"),
        ({"limits": [MADE, DAY, DAY]}, "limits[2].name"),
        ({"limits": [{**MADE, "limit": 3}]}, "limit"),
        ({"identifier_type": "tenant+user"}, "identifier_type"),
    ],
)
async def test_a_rule_with_bad_limits_is_refused_and_named_and_nothing_is_stored(
    limited, fields, named
):
    before = (await limited.post(LIST, json={})).json()
    for path in (CREATE, UPDATE):
        answer = await limited.post(path, json={"rate_limit": {**RULE, **fields}})
        assert (answer.status_code, fields_in(answer)) == (400, [f"rate_limit.{named}"])
    assert (await limited.post(LIST, json={})).json() == before


async def test_an_unknown_enforcement_is_refused(limited):
    limits = [MADE, {**DAY, "enforcement": "IGNORE"}]
    answer = await limited.post(CREATE, json={"rate_limit": {**RULE, "limits": limits}})
    assert answer.status_code == 400
    assert "enforcement" in answer.text


def fields_in(answer):
    violations = answer.json()["details"][1]["debug"]["field_violations"]
    return [violation["field"] for violation in violations]


async def test_a_check_may_count_for_several_identities_on_a_node_that_declares_their_types():
    rules = [
        {**RULE, "id": "", "identifier_type": "user+tenant", "limit": 9},
        {**RULE, "id": "", "identifier_type": "tenant", "limit": 3},
        {**RULE, "id": "", "identifier_type": "all", "endpoint": "**", "limit": 5},
    ]
    asked = {**A_CHECK, "also": [{"identifierType": "tenant", "identifier": "acme"}]}
    async with (
        running_node(clock=ManualClock(), identifier_types="tenant") as node,
        httpx.AsyncClient(base_url=f"http://{node.http_address}") as client,
    ):
        made = [(await client.post(CREATE, json={"rate_limit": rule})).json() for rule in rules]
        assert [rule["identifier_type"] for rule in made] == ["tenant+user", "tenant", "all"]
        answers = [(await client.post(CHECK, json=asked)).json() for _ in range(4)]
        assert [answer["allowed"] for answer in answers] == [True, True, True, False]
        assert [one["identifier_type"] for one in answers[-1]["limits"]] == [
            "tenant", "tenant+user", "all",
        ]  # fmt: skip
        for also in (
            [{"identifier_type": "org", "identifier": "x"}],
            [{"identifier_type": "tenant", "identifier": "x"}] * 2,
            [{"identifier_type": "tenant", "identifier": "x", "plan": "y"}],
            ["tenant"],
            {},
        ):
            answer = await client.post(CHECK, json={**asked, "also": also})
            assert answer.status_code == 400
            (field,) = fields_in(answer)
            assert field.startswith("also")


async def test_a_check_may_wait_for_a_bucket_with_a_burst():
    limit = {"limit": 10, "window_seconds": 1, "algorithm": "token_bucket", "burst": 1}
    rule = {"endpoint": A_CHECK["endpoint"], "identifier_type": "user", "limits": [limit]}
    async with (
        running_node(clock=ManualClock()) as node,
        httpx.AsyncClient(base_url=f"http://{node.http_address}") as client,
    ):
        made = (await client.post(CREATE, json={"rate_limit": rule})).json()
        assert [one["burst"] for one in made["limits"]] == [1]
        asked = {**A_CHECK, "identifier_type": "user", "max_wait_ms": 150}
        answers = [(await client.post(CHECK, json=asked)).json() for _ in range(3)]
        assert [(one["allowed"], one["wait_ms"]) for one in answers] == [
            (True, 0), (True, 100), (False, 0),
        ]  # fmt: skip
        for wait_ms in (-1, 60_001, "soon"):
            answer = await client.post(CHECK, json={**asked, "max_wait_ms": wait_ms})
            assert answer.status_code == 400
            assert "max_wait_ms" in answer.text
        answer = await client.post(
            CREATE, json={"rate_limit": {**rule, "limits": [{**limit, "burst": -1}]}}
        )
        assert fields_in(answer) == ["rate_limit.limits[0].burst"]


async def test_a_calendar_limit_is_created_read_validated_and_enforced(client):
    month = {
        "limit": 2,
        "period": "MONTH",
        "time_zone": "Europe/Berlin",
        "algorithm": "fixed_window",
    }
    names = {"id": "", "endpoint": "/a", "identifier_type": "user"}
    made = (await client.post(CREATE, json={"rate_limit": {**names, "limits": [month]}})).json()
    assert made["limits"] == [
        {
            **month,
            "name": "default",
            "window_seconds": 2_592_000,
            "anchor_day": 1,
            "enforcement": "ENFORCE",
            "burst": 0,
        }
    ]
    answers = [(await client.post(CHECK, json=A_CHECK)).json() for _ in range(3)]
    assert [answer["allowed"] for answer in answers] == [True, True, False]
    ends = int(datetime.fromisoformat("2023-12-01T00:00+01:00").timestamp())
    assert {answer["reset_time"] for answer in answers} == {str(ends)}
    assert answers[-1]["window_seconds"] == 2_592_000
    for field, value in {
        "period": "YEAR",
        "time_zone": "Berlin",
        "anchor_day": 32,
        "window_seconds": 86_400,
        "algorithm": "token_bucket",
    }.items():
        wrong = {**names, "endpoint": "/b", "limits": [{**month, field: value}]}
        answer = await client.post(CREATE, json={"rate_limit": wrong})
        assert answer.status_code == 400
        (violation,) = answer.json()["details"][1]["debug"]["field_violations"]
        named = "period" if field == "algorithm" else field
        assert violation["field"].endswith(f"limits[0].{named}"), violation
