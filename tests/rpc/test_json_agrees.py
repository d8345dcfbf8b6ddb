"""Generated calls to two equal nodes, over gRPC to one and HTTP to the other, have equal ends and states."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import grpc.aio
import httpx
import pytest
from google.protobuf import empty_pb2
from google.protobuf.field_mask_pb2 import FieldMask
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratelimitd.rpc.interface import StatusCode
from ratelimitd.testing import ManualClock, running_node
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.rpc.over_http import Ended, Protocol, called, details_of, request_body

IDENTIFIERS = st.sampled_from(["alice", "bob", "caf\u00e9", "1.2.3.4", "::1", "u" * 257, ""])
TYPES = st.sampled_from(["user", "user", "ip", "api_key", "User", ""])
ENDPOINTS = st.sampled_from(["/a", "/a", "/b", "*", "", "e" * 256])
RULE_IDS = st.sampled_from(
    [f"00000000-0000-4000-8000-{number:012}" for number in range(3)] + ["no-uuid"]
)
NUMBERS = st.sampled_from([0, 1, 2, 5, 10, 60, -1, 2**31 - 1])
TIMES = st.sampled_from([0, 0, 0, 1_700_006_400, -1, 2**63 - 1])
FIELDS = ["limit", "window_seconds", "enabled", "endpoint", "identifier_type", "algorithm"]
MASKS = st.lists(st.sampled_from([*FIELDS, "id"]), max_size=3)

TARGETS = {"identifier": IDENTIFIERS, "identifier_type": TYPES, "endpoint": ENDPOINTS}
CHECKS = st.builds(
    pb.RateLimitRequest, **TARGETS, tokens_requested=NUMBERS, timestamp=TIMES, peek=st.booleans()
)


def rule_of(**fields: Any):
    return pb.RateLimit(**fields)


def mask_of(*paths):
    return FieldMask(paths=paths) if paths else None


SOUND_RULE = {
    "id": RULE_IDS,
    "endpoint": st.sampled_from(["/a", "/b", "*"]),
    "identifier_type": st.sampled_from(["user", "ip"]),
    "limit": st.sampled_from([1, 5, 10]),
    "window_seconds": st.sampled_from([1, 60]),
    "algorithm": st.sampled_from(["token_bucket", "sliding_window", "fixed_window"]),
}
ODD_RULE = {
    "id": RULE_IDS,
    "endpoint": ENDPOINTS,
    "identifier_type": TYPES,
    "limit": NUMBERS,
    "window_seconds": NUMBERS,
    "algorithm": st.sampled_from(["token_bucket", "leaky", ""]),
}
MORE = {"enabled": st.booleans(), "etag": st.sampled_from(["", "stale"])}
RULES = st.one_of(
    [st.fixed_dictionaries(fields, optional=MORE) for fields in (SOUND_RULE, ODD_RULE)]
).map(lambda fields: rule_of(**fields))

PLANS = st.sampled_from(["", "pro", "free", "Pro", "p" * 33])
IDENTITIES = st.builds(pb.Identity, identifier=IDENTIFIERS, identifier_type=TYPES)
ASSIGNMENTS = st.builds(
    pb.Assignment,
    identity=IDENTITIES,
    plan=PLANS,
    expire_time=st.sampled_from([0, 0, -1, 1, 4_000_000_000, 2**63 - 1]),
    note=st.sampled_from(["", "caf\u00e9", "n" * 256, "\n"]),
    etag=st.sampled_from(["", "", "stale"]),
)

HELD = "held last"
REQUESTS = {
    "RateLimiter/CheckRateLimit": CHECKS,
    "RateLimiter/CheckRateLimitBatch": st.builds(
        pb.BatchRateLimitRequest, requests=st.lists(CHECKS, max_size=5)
    ),
    "RateLimiterConfig/CreateRateLimit": st.builds(pb.CreateRateLimitRequest, rate_limit=RULES),
    "RateLimiterConfig/UpdateRateLimit": st.builds(
        lambda rule, paths: pb.UpdateRateLimitRequest(rate_limit=rule, update_mask=mask_of(*paths)),
        RULES,
        MASKS,
    ),
    "RateLimiterConfig/DeleteRateLimit": st.builds(
        pb.DeleteRateLimitRequest, id=RULE_IDS, etag=st.sampled_from(["", "", "stale"])
    ),
    "RateLimiterConfig/ListRateLimits": st.builds(
        pb.ListRateLimitsRequest,
        endpoint=ENDPOINTS,
        identifier_type=TYPES,
        page_size=NUMBERS,
        page_token=st.sampled_from(["", "", "none"]),
        unused=st.booleans(),
    ),
    "RateLimiterConfig/GetRateLimit": st.builds(
        pb.GetRateLimitRequest,
        id=st.one_of(st.just(""), RULE_IDS),
        endpoint=ENDPOINTS,
        identifier_type=TYPES,
    ),
    "RateLimiterConfig/ApplyRateLimits": st.builds(
        pb.ApplyRateLimitsRequest,
        rate_limits=st.lists(RULES, max_size=4),
        prune=st.booleans(),
        dry_run=st.booleans(),
        revision=st.sampled_from([0, 0, 1, 2, -1, 2**63 - 1]),
    ),
    "RateLimiterHealth/GetHealthStatus": st.just(empty_pb2.Empty()),
    "RateLimiterHealth/GetMetrics": st.builds(
        pb.MetricsRequest,
        names=st.lists(
            st.sampled_from(
                ["rate_limiter_requests_allowed_total", "rate_limiter.fail_open", "no"]
            ),
            min_size=1,
            max_size=2,
        ),
    ),
    "RateLimiterHealth/ResetRateLimit": st.builds(pb.ResetRequest, **TARGETS),
    "RateLimiterHolds/Hold": st.builds(
        pb.HoldRequest,
        check=st.builds(pb.RateLimitRequest, **TARGETS, tokens_requested=NUMBERS),
        hold_id=st.sampled_from(["h1", "h2", "x" * 65]),
        ttl_seconds=NUMBERS,
        lease=st.booleans(),
    ),
    "RateLimiterHolds/Settle": st.builds(
        pb.SettleRequest, hold=st.sampled_from(["", "no", HELD]), actual=NUMBERS
    ),
    "RateLimiterHolds/Extend": st.builds(
        pb.ExtendRequest, hold=st.sampled_from(["", "no", HELD]), ttl_seconds=NUMBERS
    ),
    "RateLimiterHolds/ListHolds": st.just(pb.ListHoldsRequest()),
    "RateLimiterPlans/AssignPlan": st.builds(pb.AssignPlanRequest, assignment=ASSIGNMENTS),
    "RateLimiterPlans/BatchAssignPlans": st.builds(
        pb.BatchAssignPlansRequest, assignments=st.lists(ASSIGNMENTS, max_size=3)
    ),
    "RateLimiterPlans/GetAssignment": st.builds(pb.GetAssignmentRequest, identity=IDENTITIES),
    "RateLimiterPlans/ListAssignments": st.builds(
        pb.ListAssignmentsRequest,
        plan=PLANS,
        identifier_type=TYPES,
        identifier_prefix=st.sampled_from(["", "a", "caf\u00e9"]),
        page_size=NUMBERS,
        page_token=st.sampled_from(["", "", "none"]),
    ),
    "RateLimiterPlans/UnassignPlan": st.builds(
        pb.UnassignPlanRequest, identity=IDENTITIES, etag=st.sampled_from(["", "", "stale"])
    ),
}
CALLS = st.sampled_from(sorted(REQUESTS)).flatmap(
    lambda path: st.tuples(
        st.just(path),
        REQUESTS[path],
        st.sampled_from(Protocol),
        st.booleans(),  # camel case
        st.sampled_from(["/", "/ratelimiter.v1."]),
    )
)


def answer_class(path):
    service, _, method = path.removeprefix("/").removeprefix("ratelimiter.v1.").partition("/")
    found = pb.DESCRIPTOR.services_by_name[service].methods_by_name[method].output_type
    return found._concrete_class


class Pair:
    """The two nodes, with an event loop of their own."""

    def __init__(self, runner):
        self._runner = runner
        self._open = AsyncExitStack()
        self.ends = set()
        self._held = {"spoken": "", "posted": ""}

    async def start(self):
        options = {"node_id": "node-1", "log_level": "error"}
        spoken = await self._open.enter_async_context(running_node(clock=ManualClock(), **options))
        posted = await self._open.enter_async_context(running_node(clock=ManualClock(), **options))
        self.channel = await self._open.enter_async_context(
            grpc.aio.insecure_channel(spoken.grpc_address)
        )
        self.client = await self._open.enter_async_context(
            httpx.AsyncClient(base_url=f"http://{posted.http_address}")
        )

    async def stop(self):
        await self._open.aclose()

    def check(self, calls):
        self._runner.run(self._check(calls))

    async def _check(self, calls):
        for path, message, protocol, camel, prefix in calls:
            spoken = await self._spoken(prefix + path, self._settling("spoken", message))
            body = request_body(self._settling("posted", message), protocol, camel=camel)
            found = answer_class(path)
            posted = await called(self.client, prefix + path, body, protocol, answer_class=found)
            if isinstance(posted.answer, pb.HoldResponse):
                self._held = {"spoken": spoken.answer.hold, "posted": posted.answer.hold}
            assert same(posted) == same(spoken), (path, message, protocol)
            self.ends.add((path, spoken.code))

    def _settling(self, side, message):
        """Return a message with this node's last hold in place of its name."""
        if getattr(message, "hold", "") != HELD:
            return message
        return type(message)(
            **{field.name: value for field, value in message.ListFields()}
            | {"hold": self._held[side]}
        )

    async def _spoken(self, path, message):
        method = self.channel.unary_unary(path)
        try:
            answer = await method(message.SerializeToString(), timeout=30)
        except grpc.aio.AioRpcError as error:
            packed = dict(error.trailing_metadata()).get("grpc-status-details-bin", b"")
            details = details_of(packed)
            return Ended(StatusCode(error.code().value[0]), error.details(), details=details)
        return Ended(StatusCode.OK, answer=answer_class(path).FromString(answer))


def same(end):
    """Return an end without the parts that always differ: durations, and the seals of page tokens."""
    if isinstance(end.answer, pb.HealthResponse):
        end.answer.ClearField("average_latency_ms")
    pages = pb.ListRateLimitsResponse | pb.ListAssignmentsResponse
    if isinstance(end.answer, pages) and end.answer.next_page_token:
        end.answer.next_page_token = "sealed"
    if isinstance(end.answer, pb.HoldResponse) and end.answer.hold:
        end.answer.hold = "sealed"
    return end


@pytest.fixture(scope="module")
def pair():
    with asyncio.Runner() as runner:
        pair = Pair(runner)
        runner.run(pair.start())
        yield pair
        runner.run(pair.stop())


A_RULE = pb.RateLimit(
    id="00000000-0000-4000-8000-000000000009", endpoint="/z", identifier_type="user",
    limit=2, window_seconds=60, algorithm="fixed_window",
)  # fmt: skip
A_CHECK = pb.RateLimitRequest(identifier="ada", identifier_type="user", endpoint="/z")
ADA = pb.Identity(identifier_type="user", identifier="ada")
AN_ASSIGNMENT = pb.Assignment(identity=ADA, plan="pro", expire_time=4_000_000_000, note="caf\u00e9")
STORY = [
    ("RateLimiterConfig/CreateRateLimit", pb.CreateRateLimitRequest(rate_limit=A_RULE)),
    ("RateLimiterHolds/Hold", pb.HoldRequest(check=A_CHECK)),
    ("RateLimiterHolds/ListHolds", pb.ListHoldsRequest()),
    ("RateLimiterHolds/Extend", pb.ExtendRequest(hold=HELD)),
    ("RateLimiterHolds/Settle", pb.SettleRequest(hold=HELD, actual=0)),
    *[("RateLimiter/CheckRateLimit", A_CHECK)] * 3,
    ("RateLimiter/CheckRateLimitBatch", pb.BatchRateLimitRequest(requests=[A_CHECK])),
    ("RateLimiterHealth/GetHealthStatus", empty_pb2.Empty()),
    (
        "RateLimiterHealth/GetMetrics",
        pb.MetricsRequest(names=["rate_limiter_requests_blocked_total"]),
    ),
    (
        "RateLimiterHealth/ResetRateLimit",
        pb.ResetRequest(identifier="ada", identifier_type="user", endpoint="/z"),
    ),
    ("RateLimiter/CheckRateLimit", A_CHECK),
    (
        "RateLimiterConfig/UpdateRateLimit",
        pb.UpdateRateLimitRequest(
            rate_limit=pb.RateLimit(id=A_RULE.id, limit=1), update_mask=mask_of("limit")
        ),
    ),
    ("RateLimiterConfig/ListRateLimits", pb.ListRateLimitsRequest(page_size=1)),
    ("RateLimiterConfig/GetRateLimit", pb.GetRateLimitRequest(id=A_RULE.id)),
    ("RateLimiterConfig/ApplyRateLimits", pb.ApplyRateLimitsRequest(rate_limits=[A_RULE])),
    ("RateLimiterConfig/DeleteRateLimit", pb.DeleteRateLimitRequest(id=A_RULE.id)),
    ("RateLimiterConfig/DeleteRateLimit", pb.DeleteRateLimitRequest(id=A_RULE.id)),
    ("RateLimiterPlans/AssignPlan", pb.AssignPlanRequest(assignment=AN_ASSIGNMENT)),
    ("RateLimiterPlans/GetAssignment", pb.GetAssignmentRequest(identity=ADA)),
    (
        "RateLimiterPlans/BatchAssignPlans",
        pb.BatchAssignPlansRequest(
            assignments=[
                AN_ASSIGNMENT,
                pb.Assignment(
                    identity=pb.Identity(identifier_type="user", identifier="bob"), plan="pro"
                ),
            ]
        ),
    ),
    ("RateLimiterPlans/ListAssignments", pb.ListAssignmentsRequest(plan="pro", page_size=1)),
    ("RateLimiterPlans/UnassignPlan", pb.UnassignPlanRequest(identity=ADA)),
]


@pytest.mark.deep
@pytest.mark.parametrize("protocol", Protocol)
@pytest.mark.parametrize("prefix", ["/", "/ratelimiter.v1."])
def test_the_life_of_a_rule_is_the_same_in_every_protocol(pair, protocol, prefix):
    pair.ends.clear()
    pair.check([(path, message, protocol, False, prefix) for path, message in STORY])
    ends = {(path, StatusCode.OK) for path in REQUESTS}
    assert pair.ends == ends | {("RateLimiterConfig/DeleteRateLimit", StatusCode.NOT_FOUND)}


@pytest.mark.deep
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(CALLS, min_size=4, max_size=12))
def test_every_call_ends_alike_in_every_protocol(pair, calls):
    pair.check(calls)
