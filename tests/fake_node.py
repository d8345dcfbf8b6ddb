"""A node of canned answers behind a real gRPC channel, for the tests of those who ask one: the client and the CLI.

It keeps rules in a dict and judges nothing; what a real node does, the tests in tests/rpc show.
"""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import grpc
from google.protobuf import any_pb2, empty_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2_grpc
from grpc_status import rpc_status

from ratelimiter.v1 import ratelimiter_pb2 as pb
from ratelimiter.v1 import ratelimiter_pb2_grpc as stubs


class Seen(NamedTuple):
    """One call that arrived."""

    method: str
    request: Any
    metadata: dict[str, str]


class FakeNode(
    stubs.RateLimiterServicer,
    stubs.RateLimiterConfigServicer,
    stubs.RateLimiterHealthServicer,
    stubs.RateLimiterPlansServicer,
    stubs.RateLimiterHoldsServicer,
):
    """Set its attributes to choose what it answers."""

    def __init__(self) -> None:
        self.address = ""
        self.seen: list[Seen] = []
        self.limit = 2
        """Checks that are allowed, over all identifiers."""
        self.answer: pb.RateLimitResponse | None = None
        """Answers every check, when set."""
        self.on_call: Callable[[Any, grpc.ServicerContext], None] | None = None
        """Called with each request once it is in ``seen``; may abort the call."""
        self.error: status_pb2.Status | None = None
        """Ends every call, when set."""
        self.errors_after = 0
        """Calls that are answered before ``error`` holds."""
        self.answering = threading.Event()
        """While it is clear, calls wait."""
        self.answering.set()
        self.rules: dict[str, pb.RateLimit] = {}
        self.assigned: dict[tuple[str, str], pb.Assignment] = {}
        """The assignments, by identifier type and identifier."""
        self.held: dict[str, int] = {}
        """Tokens by hold."""
        self.page_size = 1000
        self.max_changes = 1000
        self.revision: int | None = None
        """The revision of whole sets; else the number of calls."""
        self.health_answer = pb.HealthResponse(status=pb.HEALTHY, node_id="node-1")
        self.metrics_answer = pb.MetricsResponse()
        self.explanation = pb.Explanation()
        self.unmatched: list[pb.UnmatchedEndpoint] = []
        self.used: set[str] = set()
        """Ids of the rules that have judged a check."""
        self.readiness = health.HealthServicer()
        """The standard health service, which says SERVING until it is told otherwise."""

    def add_rule(self, endpoint: str, identifier_type: str = "user", **fields: Any) -> pb.RateLimit:
        """Store a rule behind the service's back."""
        rule = pb.RateLimit(
            id=fields.pop("id", str(uuid.uuid4())),
            endpoint=endpoint,
            identifier_type=identifier_type,
            limit=fields.pop("limit", 10),
            window_seconds=fields.pop("window_seconds", 60),
            algorithm=fields.pop("algorithm", "token_bucket"),
            enabled=fields.pop("enabled", True),
            etag=uuid.uuid4().hex,
            limits=fields.pop("limits", ()),
            plans=fields.pop("plans", {}),
        )
        self.rules[rule.id] = rule
        return rule

    def methods(self) -> list[str]:
        """The calls that arrived, by method."""
        return [call.method for call in self.seen]

    def _saw(self, request: Any, context: grpc.ServicerContext) -> None:
        metadata = {key: str(value) for key, value in context.invocation_metadata()}
        method = re.sub(r"(Request)?$", "", type(request).__name__)
        self.seen.append(Seen(method, request, metadata))
        if self.on_call is not None:
            self.on_call(request, context)
        self.answering.wait()
        if self.error is not None and len(self.seen) > self.errors_after:
            context.abort_with_status(rpc_status.to_status(self.error))

    def _abort(self, context: grpc.ServicerContext, code: grpc.StatusCode, message: str) -> None:
        context.abort_with_status(rpc_status.to_status(status(code, message)))

    def _answer(self, request: pb.RateLimitRequest) -> pb.RateLimitResponse:
        if self.answer is not None:
            return self.answer
        if not request.peek:
            self.limit -= 1
        return pb.RateLimitResponse(
            allowed=self.limit >= 0,
            remaining_tokens=max(0, self.limit),
            reason=pb.WITHIN_LIMIT if self.limit >= 0 else pb.LIMIT_EXCEEDED,
        )

    def CheckRateLimit(self, request, context):  # noqa: N802
        self._saw(request, context)
        return self._answer(request)

    def CheckRateLimitBatch(self, request, context):  # noqa: N802
        self._saw(request, context)
        return pb.BatchRateLimitResponse(responses=map(self._answer, request.requests))

    def CreateRateLimit(self, request, context):  # noqa: N802
        self._saw(request, context)
        rule = request.rate_limit
        self.health_answer.rules_revision += 1
        fields = {name: getattr(rule, name) for name in ("limit", "window_seconds", "algorithm")}
        return self.add_rule(
            rule.endpoint,
            rule.identifier_type,
            id=rule.id or str(uuid.uuid4()),
            enabled=rule.enabled,
            limits=rule.limits,
            plans=rule.plans,
            **fields,
        )

    def _stored(self, rule_id: str, etag: str, context: grpc.ServicerContext) -> pb.RateLimit:
        if rule_id not in self.rules:
            self._abort(context, grpc.StatusCode.NOT_FOUND, f"no rule has the id {rule_id}")
        if etag and self.rules[rule_id].etag != etag:
            self._abort(context, grpc.StatusCode.ABORTED, "the rule has another etag by now")
        return self.rules[rule_id]

    def UpdateRateLimit(self, request, context):  # noqa: N802
        self._saw(request, context)
        rule = self._stored(request.rate_limit.id, request.rate_limit.etag, context)
        for path in request.update_mask.paths:
            rule.ClearField(path)
            rule.MergeFrom(pb.RateLimit(**{path: getattr(request.rate_limit, path)}))
        rule.etag = uuid.uuid4().hex
        self.health_answer.rules_revision += 1
        return rule

    def DeleteRateLimit(self, request, context):  # noqa: N802
        self._saw(request, context)
        self._stored(request.id, request.etag, context)
        del self.rules[request.id]
        self.health_answer.rules_revision += 1
        return empty_pb2.Empty()

    def ListRateLimits(self, request, context):  # noqa: N802
        self._saw(request, context)
        rules = sorted(
            (
                rule
                for rule in self.rules.values()
                if request.endpoint in ("", rule.endpoint)
                and request.identifier_type in ("", rule.identifier_type)
                and not (request.unused and rule.id in self.used)
            ),
            key=lambda rule: (rule.endpoint, rule.identifier_type),
        )
        start = int(request.page_token or 0)
        stop = start + self.page_size
        more = str(stop) if stop < len(rules) else ""
        return pb.ListRateLimitsResponse(rate_limits=rules[start:stop], next_page_token=more)

    def GetRateLimit(self, request, context):  # noqa: N802
        self._saw(request, context)
        place = (request.endpoint, request.identifier_type)
        for rule in self.rules.values():
            if request.id == rule.id or place == (rule.endpoint, rule.identifier_type):
                return rule
        self._abort(context, grpc.StatusCode.NOT_FOUND, "there is no such rule")
        raise AssertionError

    def ApplyRateLimits(self, request, context):  # noqa: N802
        self._saw(request, context)
        by_pair = {(rule.endpoint, rule.identifier_type): rule.id for rule in self.rules.values()}
        changes, kept = [], set()
        for wanted in request.rate_limits:
            found = wanted.id or by_pair.get((wanted.endpoint, wanted.identifier_type), "")
            before = self.rules.get(found)
            kept.add(found)
            after = pb.RateLimit()
            after.CopyFrom(wanted)
            after.id = found or str(uuid.uuid4())
            after.etag = before.etag if before else ""
            if before != after:
                changes.append(pb.RateLimitChange(before=before, after=after))
        unwanted = [rule for rule in self.rules.values() if rule.id not in kept]
        changes += [pb.RateLimitChange(before=rule) for rule in unwanted if request.prune]
        for change in () if request.dry_run else changes:
            if change.HasField("after"):
                self.rules.setdefault(change.after.id, pb.RateLimit()).CopyFrom(change.after)
            else:
                del self.rules[change.before.id]
        kinds = [(one.HasField("before"), one.HasField("after")) for one in changes]
        return pb.ApplyRateLimitsResponse(
            revision=len(self.seen) if self.revision is None else self.revision,
            created=kinds.count((False, True)),
            updated=kinds.count((True, True)),
            deleted=kinds.count((True, False)),
            changes=changes[: self.max_changes],
        )

    def Hold(self, request, context):  # noqa: N802
        self._saw(request, context)
        answer = self._answer(request.check)
        if not answer.allowed:
            return pb.HoldResponse(answer=answer)
        hold = f"hold-{len(self.held)}"
        self.held[hold] = request.check.tokens_requested
        expire_time = int(time.time()) + request.ttl_seconds
        return pb.HoldResponse(answer=answer, hold=hold, expire_time=expire_time)

    def Settle(self, request, context):  # noqa: N802
        self._saw(request, context)
        if self.held.pop(request.hold, None) is None:
            return pb.SettleResponse()
        limits = [pb.LimitStatus(identifier_type="user", name="minute", allowed=True, limit=5)]
        return pb.SettleResponse(known=True, charged=request.actual, limits=limits)

    def Extend(self, request, context):  # noqa: N802
        self._saw(request, context)
        expire_time = int(time.time()) + request.ttl_seconds
        known = request.hold in self.held
        return pb.ExtendResponse(known=known, expire_time=expire_time if known else 0)

    def ListHolds(self, request, context):  # noqa: N802
        self._saw(request, context)
        return pb.ListHoldsResponse(
            limits=[
                pb.HoldsOfLimit(
                    name="minute",
                    endpoint="/a",
                    identifier_type="user",
                    holds=len(self.held),
                    tokens=sum(self.held.values()),
                )
            ]
            if self.held
            else []
        )

    def AssignPlan(self, request, context):  # noqa: N802
        self._saw(request, context)
        return self._assign(request.assignment)

    def BatchAssignPlans(self, request, context):  # noqa: N802
        self._saw(request, context)
        assigned = [self._assign(one) for one in request.assignments]
        return pb.BatchAssignPlansResponse(assignments=assigned)

    def _assign(self, assignment: pb.Assignment) -> pb.Assignment:
        assignment.etag = uuid.uuid4().hex
        self.assigned[_key(assignment.identity)] = assignment
        return assignment

    def UnassignPlan(self, request, context):  # noqa: N802
        self._saw(request, context)
        self._assignment(request.identity, context)
        del self.assigned[_key(request.identity)]
        return empty_pb2.Empty()

    def GetAssignment(self, request, context):  # noqa: N802
        self._saw(request, context)
        return self._assignment(request.identity, context)

    def _assignment(self, identity: pb.Identity, context: grpc.ServicerContext) -> pb.Assignment:
        if _key(identity) not in self.assigned:
            self._abort(context, grpc.StatusCode.NOT_FOUND, "the identity is assigned to no plan")
        return self.assigned[_key(identity)]

    def ListAssignments(self, request, context):  # noqa: N802
        self._saw(request, context)
        found = [
            assignment
            for key, assignment in sorted(self.assigned.items())
            if request.plan in ("", assignment.plan)
            and request.identifier_type in ("", key[0])
            and key[1].startswith(request.identifier_prefix)
        ]
        start = int(request.page_token or 0)
        stop = start + self.page_size
        more = str(stop) if stop < len(found) else ""
        return pb.ListAssignmentsResponse(assignments=found[start:stop], next_page_token=more)

    def GetHealthStatus(self, request, context):  # noqa: N802
        self._saw(request, context)
        return self.health_answer

    def GetMetrics(self, request, context):  # noqa: N802
        self._saw(request, context)
        return self.metrics_answer

    def ExplainRateLimit(self, request, context):  # noqa: N802
        self._saw(request, context)
        return self.explanation

    def ListUnmatched(self, request, context):  # noqa: N802
        self._saw(request, context)
        return pb.ListUnmatchedResponse(endpoints=self.unmatched)

    def ResetRateLimit(self, request, context):  # noqa: N802
        self._saw(request, context)
        return empty_pb2.Empty()


def _key(identity: pb.Identity) -> tuple[str, str]:
    return identity.identifier_type, identity.identifier


def status(code: grpc.StatusCode, message: str, *violations: tuple[str, str]) -> status_pb2.Status:
    """A status as a node sends it: with ErrorInfo, and BadRequest when fields are violated."""
    info = any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(reason=code.name, domain="ratelimitd"))
    details = [info]
    if violations:
        bad = any_pb2.Any()
        bad.Pack(
            error_details_pb2.BadRequest(
                field_violations=[
                    error_details_pb2.BadRequest.FieldViolation(field=field, description=text)
                    for field, text in violations
                ]
            )
        )
        details.append(bad)
    return status_pb2.Status(code=code.value[0], message=message, details=details)


@contextmanager
def fake_node(
    credentials: grpc.ServerCredentials | None = None, *, port: int = 0
) -> Iterator[FakeNode]:
    """A node on ``port`` of this machine, by default a free one, until the end of the block."""
    node = FakeNode()
    pool = ThreadPoolExecutor(max_workers=2)
    server = grpc.server(pool, options=[("grpc.so_reuseport", 0)])
    stubs.add_RateLimiterServicer_to_server(node, server)
    stubs.add_RateLimiterConfigServicer_to_server(node, server)
    stubs.add_RateLimiterPlansServicer_to_server(node, server)
    stubs.add_RateLimiterHoldsServicer_to_server(node, server)
    stubs.add_RateLimiterHealthServicer_to_server(node, server)
    health_pb2_grpc.add_HealthServicer_to_server(node.readiness, server)
    if credentials is None:
        port = server.add_insecure_port(f"127.0.0.1:{port}")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    node.address = f"{'127.0.0.1' if credentials is None else 'localhost'}:{port}"
    server.start()
    try:
        yield node
    finally:
        node.answering.set()
        stopped: threading.Event = server.stop(grace=None)
        stopped.wait()
        pool.shutdown()
