# Source of node_client.py: run `make proto` after a change.
"""The calls of a node: messages in and out, and errors raised as gRPC has them.

To check requests before they are served, use :class:`ratelimitd_client.AsyncRateLimiterClient`, which also answers when
no node does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Final, TypeVar

import grpc.aio
from google.protobuf.empty_pb2 import Empty
from google.protobuf.field_mask_pb2 import FieldMask

from ratelimitd_client.check import NO_IDENTITIES, identities_of, valid_timeout_s
from ratelimitd_client.transport.grpc_channel import AsyncNodeChannel
from ratelimiter.v1 import ratelimiter_pb2 as pb

MAX_PAGE_SIZE: Final = 1000
"""Most rules or assignments a node returns in one page."""

Q = TypeVar("Q")
A = TypeVar("A")


class AsyncNodeClient(AsyncNodeChannel):
    """One method for each call of a node. Every method raises ``grpc.aio.AioRpcError``."""

    async def check(
        self,
        identifier: str,
        identifier_type: str,
        endpoint: str,
        *,
        cost: int = 1,
        timestamp: int = 0,
        peek: bool = False,
        also: Mapping[str, str] = NO_IDENTITIES,
        max_wait_ms: int = 0,
        timeout_s: float | None = None,
    ) -> pb.RateLimitResponse:
        """Return whether a request may proceed, and spend ``cost`` tokens if so (none with ``peek``).

        ``also`` are further identifiers that the request counts for, by their type.
        ``timestamp`` is the caller's Unix time in s, ms, µs or ns; with 0 the node's time counts.
        With ``max_wait_ms`` an answer may say ``wait_ms``: the caller waits so long before it proceeds.
        """
        request = pb.RateLimitRequest(
            identifier=identifier,
            identifier_type=identifier_type,
            endpoint=endpoint,
            tokens_requested=cost,
            timestamp=timestamp,
            peek=peek,
            also=identities_of(also),
            max_wait_ms=max_wait_ms,
        )
        return await self._call(self._checks.CheckRateLimit, request, timeout_s)

    async def check_batch(
        self, requests: Iterable[pb.RateLimitRequest], *, timeout_s: float | None = None
    ) -> Sequence[pb.RateLimitResponse]:
        """Send up to 1,000 checks in one call; answer i is that of request i."""
        request = pb.BatchRateLimitRequest(requests=requests)
        answer = await self._call(self._checks.CheckRateLimitBatch, request, timeout_s)
        return answer.responses

    async def hold(
        self, request: pb.HoldRequest, *, timeout_s: float | None = None
    ) -> pb.HoldResponse:
        """Charge a check, and hold what it charges."""
        return await self._call(self._holds.Hold, request, timeout_s)

    async def settle(
        self, hold: str, actual: int, *, timeout_s: float | None = None
    ) -> pb.SettleResponse:
        """Charge ``actual`` tokens in place of those held; 0 gives all back."""
        request = pb.SettleRequest(hold=hold, actual=actual)
        return await self._call(self._holds.Settle, request, timeout_s)

    async def extend(
        self, hold: str, ttl_s: int = 0, *, timeout_s: float | None = None
    ) -> pb.ExtendResponse:
        """Let a hold end ``ttl_s`` seconds from now, never sooner; 0 means 60."""
        request = pb.ExtendRequest(hold=hold, ttl_seconds=ttl_s)
        return await self._call(self._holds.Extend, request, timeout_s)

    async def holds(self, *, timeout_s: float | None = None) -> Sequence[pb.HoldsOfLimit]:
        """Return by limit how many holds in flight the node has made."""
        answer = await self._call(self._holds.ListHolds, pb.ListHoldsRequest(), timeout_s)
        return answer.limits

    async def create_rule(
        self, rule: pb.RateLimit, *, timeout_s: float | None = None
    ) -> pb.RateLimit:
        """Store a new rule; return it with its id and etag."""
        request = pb.CreateRateLimitRequest(rate_limit=rule)
        return await self._call(self._rules.CreateRateLimit, request, timeout_s)

    async def update_rule(
        self,
        rule: pb.RateLimit,
        fields: Sequence[str] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> pb.RateLimit:
        """Change the rule ``rule.id``: exactly ``fields``, or the whole rule without them.

        If ``rule`` has an ``etag`` that is not the stored rule's, the node answers ABORTED.
        """
        mask = None if fields is None else FieldMask(paths=fields)
        request = pb.UpdateRateLimitRequest(rate_limit=rule, update_mask=mask)
        return await self._call(self._rules.UpdateRateLimit, request, timeout_s)

    async def delete_rule(
        self, rule_id: str, *, etag: str = "", timeout_s: float | None = None
    ) -> None:
        """Delete a rule; ``etag`` as in :meth:`update_rule`."""
        request = pb.DeleteRateLimitRequest(id=rule_id, etag=etag)
        await self._call(self._rules.DeleteRateLimit, request, timeout_s)

    async def rule(
        self,
        rule_id: str = "",
        *,
        endpoint: str = "",
        identifier_type: str = "",
        timeout_s: float | None = None,
    ) -> pb.RateLimit:
        """Return one rule, by its id or by its endpoint and identifier type."""
        request = pb.GetRateLimitRequest(
            id=rule_id, endpoint=endpoint, identifier_type=identifier_type
        )
        return await self._call(self._rules.GetRateLimit, request, timeout_s)

    async def list_rules(
        self, request: pb.ListRateLimitsRequest, *, timeout_s: float | None = None
    ) -> pb.ListRateLimitsResponse:
        """Return one page of rules."""
        return await self._call(self._rules.ListRateLimits, request, timeout_s)

    async def rules(
        self,
        *,
        endpoint: str = "",
        identifier_type: str = "",
        unused: bool = False,
        timeout_s: float | None = None,
    ) -> AsyncIterator[pb.RateLimit]:
        """Yield the rules that match, page by page; empty filters match all. The deadline is that of one page.

        ``unused``: only those that have judged no check on the node since it started.
        """
        request = pb.ListRateLimitsRequest(
            endpoint=endpoint,
            identifier_type=identifier_type,
            page_size=MAX_PAGE_SIZE,
            unused=unused,
        )
        while True:
            page = await self.list_rules(request, timeout_s=timeout_s)
            for rule in page.rate_limits:
                yield rule
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def apply_rules(
        self,
        rules: Iterable[pb.RateLimit],
        *,
        prune: bool = False,
        dry_run: bool = False,
        revision: int = 0,
        timeout_s: float | None = None,
    ) -> pb.ApplyRateLimitsResponse:
        """Bring the rules to a whole set in one transaction, and return what changed.

        ``prune`` deletes the others; with ``dry_run`` nothing is changed. If a rule was changed after ``revision``, or
        has another ``etag`` than one that is sent, the node answers ABORTED.
        """
        request = pb.ApplyRateLimitsRequest(
            rate_limits=rules, prune=prune, dry_run=dry_run, revision=revision
        )
        return await self._call(self._rules.ApplyRateLimits, request, timeout_s)

    async def revert_rules(
        self,
        as_of: int,
        *,
        dry_run: bool = False,
        revision: int = 0,
        timeout_s: float | None = None,
    ) -> pb.ApplyRateLimitsResponse:
        """Bring the rules back to what they were at the revision ``as_of``; the rest as in :meth:`apply_rules`."""
        request = pb.ApplyRateLimitsRequest(as_of=as_of, dry_run=dry_run, revision=revision)
        return await self._call(self._rules.ApplyRateLimits, request, timeout_s)

    async def assign(
        self, assignment: pb.Assignment, *, timeout_s: float | None = None
    ) -> pb.Assignment:
        """Assign an identity to a plan, in the place of what it had; return the assignment with its etag."""
        request = pb.AssignPlanRequest(assignment=assignment)
        return await self._call(self._plans.AssignPlan, request, timeout_s)

    async def assign_all(
        self, assignments: Iterable[pb.Assignment], *, timeout_s: float | None = None
    ) -> Sequence[pb.Assignment]:
        """Assign up to 1,000 identities in one call: all of them, or none; answer i is that of item i."""
        request = pb.BatchAssignPlansRequest(assignments=assignments)
        answer = await self._call(self._plans.BatchAssignPlans, request, timeout_s)
        return answer.assignments

    async def unassign(
        self, identity: pb.Identity, *, etag: str = "", timeout_s: float | None = None
    ) -> None:
        """Remove the assignment of an identity; ``etag`` as in :meth:`update_rule`."""
        request = pb.UnassignPlanRequest(identity=identity, etag=etag)
        await self._call(self._plans.UnassignPlan, request, timeout_s)

    async def assignment(
        self, identity: pb.Identity, *, timeout_s: float | None = None
    ) -> pb.Assignment:
        """Return the assignment of an identity; the node answers NOT_FOUND if it has none."""
        request = pb.GetAssignmentRequest(identity=identity)
        return await self._call(self._plans.GetAssignment, request, timeout_s)

    async def list_assignments(
        self, request: pb.ListAssignmentsRequest, *, timeout_s: float | None = None
    ) -> pb.ListAssignmentsResponse:
        """Return one page of assignments."""
        return await self._call(self._plans.ListAssignments, request, timeout_s)

    async def assignments(
        self,
        *,
        plan: str = "",
        identifier_type: str = "",
        prefix: str = "",
        timeout_s: float | None = None,
    ) -> AsyncIterator[pb.Assignment]:
        """Yield the assignments that match, page by page; empty filters match all. The deadline is that of one page.

        ``prefix`` is how the identifier begins; it needs an ``identifier_type``.
        """
        request = pb.ListAssignmentsRequest(
            plan=plan,
            identifier_type=identifier_type,
            identifier_prefix=prefix,
            page_size=MAX_PAGE_SIZE,
        )
        while True:
            page = await self.list_assignments(request, timeout_s=timeout_s)
            for assignment in page.assignments:
                yield assignment
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def health(self, *, timeout_s: float | None = None) -> pb.HealthResponse:
        """Return the node's health and the measurements behind it."""
        return await self._call(self._node.GetHealthStatus, Empty(), timeout_s)

    async def metrics(
        self, names: Iterable[str] = (), *, timeout_s: float | None = None
    ) -> pb.MetricsResponse:
        """Return the metrics called ``names``, or all metrics without names."""
        return await self._call(self._node.GetMetrics, pb.MetricsRequest(names=names), timeout_s)

    async def explain(
        self, request: pb.RateLimitRequest, *, timeout_s: float | None = None
    ) -> pb.Explanation:
        """Return what a check would be answered, and why; nothing is charged."""
        return await self._call(self._node.ExplainRateLimit, request, timeout_s)

    async def unmatched(self, *, timeout_s: float | None = None) -> Sequence[pb.UnmatchedEndpoint]:
        """Return the endpoints of checks without a rule, of the last minutes; those with the most first."""
        answer = await self._call(self._node.ListUnmatched, pb.ListUnmatchedRequest(), timeout_s)
        return answer.endpoints

    async def reset(
        self,
        identifier: str,
        identifier_type: str,
        endpoint: str,
        *,
        also: Mapping[str, str] = NO_IDENTITIES,
        timeout_s: float | None = None,
    ) -> None:
        """Delete the counters of one identifier, or with ``also`` of one combination, on one endpoint.

        ``**`` is the bucket over all endpoints; the type ``all``, with an empty identifier, that of everybody.
        """
        request = pb.ResetRequest(
            identifier=identifier,
            identifier_type=identifier_type,
            endpoint=endpoint,
            also=identities_of(also),
        )
        await self._call(self._node.ResetRateLimit, request, timeout_s)

    async def _call(
        self, method: grpc.aio.UnaryUnaryMultiCallable[Q, A], request: Q, timeout_s: float | None
    ) -> A:
        deadline_s = self._timeout_s if timeout_s is None else valid_timeout_s(timeout_s)
        return await method(request, timeout=deadline_s, metadata=self._metadata)
