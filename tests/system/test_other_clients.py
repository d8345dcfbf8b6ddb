"""grpc-go and ``buf curl`` against the installed command on each transport: one table of what they must hear."""

from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2 as details
from grpc_health.v1 import health_pb2

from ratelimitd.node.serving import TRANSPORTS
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.system.other_clients import BufCurl, GrpcGo, Question, grpc_go
from tests.system.process import NEVER_ENDING_S, Files
from tests.system.programs import Certificates

pytestmark = pytest.mark.system

LIMIT = 3
CHECK = "ratelimiter.v1.RateLimiter.CheckRateLimit"
BATCH = "ratelimiter.v1.RateLimiter.CheckRateLimitBatch"
LIST = "ratelimiter.v1.RateLimiterConfig.ListRateLimits"
DELETE = "ratelimiter.v1.RateLimiterConfig.DeleteRateLimit"
HEALTH = "grpc.health.v1.Health.Check"
WATCH = "grpc.health.v1.Health.Watch"
TOKEN = "token-of-the-tests"
ADMIN = {"authorization": f"Bearer {TOKEN}"}
UNKNOWN_ID = "00000000-0000-4000-8000-000000000000"

IDLE_MS = 35_000
"""Three pings of grpc-go, which come every 10 s: with the third a server that minds them sends the client away."""


class Expected(NamedTuple):
    """What a client hears; ``text`` of ``None`` is any."""

    question: Question
    code: str = "ok"
    text: str | None = ""
    details: tuple[Message, ...] = ()
    answers: tuple[Message, ...] = ()


class Asking(NamedTuple):
    """The clients of one node."""

    go: GrpcGo
    buf: BufCurl


def check(identifier, **fields):
    """The JSON of a check."""
    return {"identifier": identifier, "identifierType": "user", "endpoint": "/a", **fields}


def decision(remaining, **fields):
    """An answer, without the id of the rule, which no test can foresee."""
    told = {"allowed": True, "reason": pb.WITHIN_LIMIT, **fields}
    rule = {"limit": LIMIT, "window_seconds": NEVER_ENDING_S, "limit_name": "default"}
    return pb.RateLimitResponse(
        remaining_tokens=remaining, reset_time=NEVER_ENDING_S, **rule, **told
    )


def info(reason):
    return details.ErrorInfo(reason=reason, domain="ratelimitd")


def table(who):
    """What client ``who`` asks, with identifiers and so buckets of its own, and what it must hear."""
    malformed_item = pb.RateLimitResponse(
        reason=pb.INVALID_REQUEST, error="requests[1].identifier: must be 1 to 256 bytes"
    )
    return {
        "a check": Expected(Question(CHECK, check(f"{who}-1")), answers=(decision(2),)),
        "a check without the package": Expected(
            Question(CHECK, check(f"{who}-2"), bare=True), answers=(decision(2),)
        ),
        "a batch": Expected(
            Question(BATCH, {"requests": [check(f"{who}-3"), check(""), check(f"{who}-3")]}),
            answers=(
                pb.BatchRateLimitResponse(responses=[decision(2), malformed_item, decision(1)]),
            ),
        ),
        "a malformed check": Expected(
            Question(CHECK, check("", endpoint=""), bare=True),
            "invalidargument",
            "identifier: must be 1 to 256 bytes; endpoint: must be 1 to 255 characters",
            (
                info("INVALID_FIELD"),
                details.BadRequest(
                    field_violations=[
                        {"field": "identifier", "description": "must be 1 to 256 bytes"},
                        {"field": "endpoint", "description": "must be 1 to 255 characters"},
                    ]
                ),
            ),
        ),
        "a rule that is not there": Expected(
            Question(DELETE, {"id": UNKNOWN_ID}, metadata=ADMIN),
            "notfound",
            f"no rule has the id '{UNKNOWN_ID}'",
            (
                info("RULE_NOT_FOUND"),
                details.ResourceInfo(
                    resource_type="ratelimiter.v1.RateLimit",
                    resource_name=UNKNOWN_ID,
                    description=f"no rule has the id '{UNKNOWN_ID}'",
                ),
            ),
        ),
        "an admin call with the token": Expected(
            Question(LIST, {"endpoint": "/b"}, metadata=ADMIN),
            answers=(pb.ListRateLimitsResponse(),),
        ),
        "an admin call from this host": Expected(
            Question(LIST), "unauthenticated", None, (info("CREDENTIALS_REQUIRED"),)
        ),
        "health": Expected(
            Question(HEALTH, {"service": "ratelimiter.v1.RateLimiter"}),
            answers=(health_pb2.HealthCheckResponse(status="SERVING"),),
        ),
    }


@contextmanager
def clients_of(transport, directory, *, encrypted):
    """The clients of a node with one rule."""
    directory.mkdir()
    files, certificates = Files(directory), Certificates(directory)
    with files.serving("--transport", transport) as node:
        node.create_rule("/a", LIMIT)
    arguments = certificates.arguments if encrypted else ()
    ca = certificates.ca if encrypted else None
    with (
        files.serving("--transport", transport, "--admin-token", TOKEN, *arguments) as node,
        grpc_go(node.grpc_address, directory, ca) as go,
    ):
        yield Asking(go, BufCurl(node.grpc_address, directory, ca))


@pytest.fixture(scope="module", params=["plaintext", "tls"])
def security(request):
    return request.param


@pytest.fixture(scope="module", params=TRANSPORTS)
def asking(request, security, tmp_path_factory):
    directory = tmp_path_factory.mktemp("node") / "files"
    with clients_of(request.param, directory, encrypted=security == "tls") as found:
        yield found


@pytest.mark.parametrize("client", Asking._fields)
@pytest.mark.parametrize("name", table(""))
def test_a_client_hears_what_the_table_says(asking, client, name):
    expected = table(f"{client}-{name}")[name]
    ended = getattr(asking, client).ask(expected.question)
    assert ended.code == expected.code
    assert expected.text in {None, ended.text}
    assert tuple(ended.details) == expected.details
    assert tuple(map(without_ids, ended.answers)) == expected.answers


def without_ids(answer):
    for decided in (answer, *getattr(answer, "responses", ())):
        if isinstance(decided, pb.RateLimitResponse):
            decided.ClearField("rule_id")
    return answer


def test_a_compressed_check_is_a_check(asking):
    ended = asking.go.ask(Question(CHECK, check("g" * 256)), gzip=True)
    assert [*map(without_ids, ended.answers)] == [decision(2)]


def test_a_method_that_is_not_there_is_unimplemented(asking):
    ended = asking.go.ask(Question(CHECK), path="/ratelimiter.v1.RateLimiter/Nope")
    assert ended[:3] == ("unimplemented", "Method not found!", [])


def test_a_watch_ends_with_the_deadline_or_the_cancellation_of_its_client(asking):
    serving = [health_pb2.HealthCheckResponse(status="SERVING")]
    left = asking.go.ask(Question(WATCH), cancel_after=1)
    assert (left.code, left.answers) == ("canceled", serving)
    late = asking.go.ask(Question(WATCH), timeout_ms=1_000)
    assert (late.code, late.answers) == ("deadlineexceeded", serving)


def test_buf_finds_every_service_by_reflection(asking):
    status, out, _ = asking.buf.run("--list-services", "")
    assert status == 0
    assert out.split() == [
        "envoy.service.ratelimit.v3.RateLimitService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
        "ratelimiter.v1.RateLimiter",
        "ratelimiter.v1.RateLimiterConfig",
        "ratelimiter.v1.RateLimiterHealth",
        "ratelimiter.v1.RateLimiterHolds",
        "ratelimiter.v1.RateLimiterPlans",
    ]


@pytest.mark.timeout(120)
def test_a_connection_that_pings_every_10_s_without_calls_is_kept(tmp_path):
    with ExitStack() as stack:
        waiting = [
            stack.enter_context(clients_of(name, tmp_path / name, encrypted=False)).go
            for name in TRANSPORTS
        ]
        for go in waiting:
            assert go.ask(Question(HEALTH)).code == "ok"
            go.begin(Question(HEALTH), idle_ms=IDLE_MS)
        for go in waiting:
            assert go.ended().code == "ok"
            assert go.connections == 1
