"""Every method of a node on every surface, called with one credential; and whether each call got past its guard."""

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import grpc
import httpx
from google.protobuf import json_format
from google.protobuf.message import Message

from ratelimitd.services.auth import Role
from ratelimitd.services.methods import ROLES
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.rpc.over_http import Protocol, framed

TIMEOUT_S: Final = 30.0

RULE: Final = pb.RateLimit(
    endpoint="/made", identifier_type="user", limit=1, window_seconds=60, algorithm="token_bucket"
)
BUCKET: Final[dict[str, Any]] = {"identifier": "u", "identifier_type": "user", "endpoint": "/a"}
ASSIGNMENT: Final = pb.Assignment(
    identity=pb.Identity(identifier_type="user", identifier="u"), plan="pro"
)
UNKNOWN_ID: Final = "00000000-0000-4000-8000-000000000000"

REQUESTS: Final[Mapping[str, Message]] = {
    "CheckRateLimit": pb.RateLimitRequest(**BUCKET),
    "CheckRateLimitBatch": pb.BatchRateLimitRequest(requests=[pb.RateLimitRequest(**BUCKET)]),
    "CreateRateLimit": pb.CreateRateLimitRequest(rate_limit=RULE),
    "UpdateRateLimit": pb.UpdateRateLimitRequest(rate_limit=RULE),
    "DeleteRateLimit": pb.DeleteRateLimitRequest(id=UNKNOWN_ID),
    "ListRateLimits": pb.ListRateLimitsRequest(),
    "GetRateLimit": pb.GetRateLimitRequest(id=UNKNOWN_ID),
    "ApplyRateLimits": pb.ApplyRateLimitsRequest(rate_limits=[RULE]),
    "GetHealthStatus": pb.MetricsRequest(),  # as empty as Empty
    "GetMetrics": pb.MetricsRequest(),
    "ResetRateLimit": pb.ResetRequest(**BUCKET),
    "ListUnmatched": pb.ListUnmatchedRequest(),
    "ExplainRateLimit": pb.RateLimitRequest(**BUCKET),
    "AssignPlan": pb.AssignPlanRequest(assignment=ASSIGNMENT),
    "UnassignPlan": pb.UnassignPlanRequest(identity=ASSIGNMENT.identity),
    "GetAssignment": pb.GetAssignmentRequest(identity=ASSIGNMENT.identity),
    "ListAssignments": pb.ListAssignmentsRequest(),
    "Hold": pb.HoldRequest(check=pb.RateLimitRequest(**BUCKET)),
    "Settle": pb.SettleRequest(hold="none"),
    "Extend": pb.ExtendRequest(hold="none"),
    "ListHolds": pb.ListHoldsRequest(),
    "BatchAssignPlans": pb.BatchAssignPlansRequest(assignments=[ASSIGNMENT]),
}
"""What each method of the contract is asked: what would have an effect, if it were let through."""

PAGES: Final = (
    "/",
    "/events",
    "/rules",
    "/rules/new",
    f"/rules/{UNKNOWN_ID}",
    f"/rules/{UNKNOWN_ID}/switch",
    f"/rules/{UNKNOWN_ID}/delete",
    "/try",
    "/audit",
    "/plans",
    "/?names=shown",
)
FORMS: Final = (
    "/rules/new",
    f"/rules/{UNKNOWN_ID}",
    f"/rules/{UNKNOWN_ID}/delete",
    "/try",
    "/plans/assign",
    "/plans/unassign",
    "/logout",
)

REFUSED: Final = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
"""What a call that did not get past its guard ends with: 16 and 7."""


class Attempt(NamedTuple):
    """One call; ``passed`` says that its guard let it through, whatever came of it then."""

    surface: str
    path: str
    role: Role
    passed: bool


def attempts(
    grpc_address: str, http_address: str, headers: Mapping[str, str] | None = None
) -> Iterator[Attempt]:
    """Call every method on every surface with these headers; ``http_address`` may be ``off``."""
    headers = dict(headers or {})
    yield from _over_grpc(grpc_address, headers)
    if http_address != "off":
        with httpx.Client(base_url=f"http://{http_address}", timeout=TIMEOUT_S) as client:
            yield from _over_http(client, headers)
            yield from _as_pages(client, headers)


def _paths() -> Iterator[tuple[str, Role, bytes | Message]]:
    """Every guarded method, under both its paths."""
    for path, role in ROLES.items():
        request = REQUESTS.get(path.rpartition("/")[2])
        if role is Role.OPEN:
            continue
        yield path, role, request or b""
        bare = path.replace("/ratelimiter.v1.", "/")
        if bare != path:
            yield bare, role, request or b""


def _over_grpc(address: str, headers: Mapping[str, str]) -> Iterator[Attempt]:
    metadata = tuple((name.lower(), value) for name, value in headers.items())
    with grpc.insecure_channel(address) as channel:
        for path, role, request in _paths():
            method: Any = channel.unary_unary(path)
            octets = request if isinstance(request, bytes) else request.SerializeToString()
            call = method.future(octets, metadata=metadata, timeout=TIMEOUT_S, wait_for_ready=True)
            assert call.code() is not grpc.StatusCode.UNAVAILABLE, call.details()
            yield Attempt("grpc", path, role, call.code() not in REFUSED)


def _over_http(client: httpx.Client, headers: Mapping[str, str]) -> Iterator[Attempt]:
    for path, role, request in _paths():
        if isinstance(request, bytes):
            continue  # Envoy's service is not on this port
        for protocol in Protocol:
            answer = client.post(
                path,
                content=_body(request, protocol),
                headers={"content-type": protocol, **headers},
            )
            status = int(answer.headers.get("grpc-status", 0)) or _grpc_status_in(answer, protocol)
            passed = answer.status_code not in {401, 403} and status not in {7, 16}
            yield Attempt(protocol, path, role, passed)
    answer = client.post("/v1/check", json=BUCKET, headers=headers)
    yield Attempt("/v1/check", "/v1/check", Role.CHECK, answer.status_code != 401)
    answer = client.get("/v1/auth", headers=headers)
    yield Attempt("/v1/auth", "/v1/auth", Role.CHECK, answer.status_code != 401)


def _as_pages(client: httpx.Client, headers: Mapping[str, str]) -> Iterator[Attempt]:
    """Pages as a browser asks for them: who may not read is sent to log in, or told."""
    for path in PAGES:
        accept = {"accept": "text/html"}
        with client.stream("GET", path, headers={**accept, **headers}) as answer:
            passed = answer.status_code not in {303, 401, 403}
            if not passed and answer.status_code == 303:
                assert answer.headers["location"].startswith("/login")
        yield Attempt("page", path, Role.READ, passed)
    for path in FORMS:
        answer = client.post(path, data={"endpoint": "/made"}, headers=headers)
        # With a token in a header, and no form of a session, the form is what is refused.
        assert answer.status_code in {401, 403}
        yield Attempt("form", path, Role.ADMIN, "form" in answer.text.partition("<h1>")[2][:20])


def _body(request: Message, protocol: Protocol) -> bytes:
    if protocol is Protocol.JSON:
        return json_format.MessageToJson(request).encode()
    octets = request.SerializeToString()
    return framed(0, octets) if protocol is Protocol.GRPC_WEB else octets


def _grpc_status_in(answer: httpx.Response, protocol: Protocol) -> int:
    """The status in the trailers of gRPC-Web, which are part of the body; 0 elsewhere."""
    if protocol is not Protocol.GRPC_WEB:
        return 0
    return int(answer.content.rpartition(b"grpc-status: ")[2].partition(b"\r\n")[0] or 0)
