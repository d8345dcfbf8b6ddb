"""Rules, health and metrics for asyncio: the calls of :mod:`ratelimitd_client.node_client` that are no checks.

Never decides anything: an answer is the node's, an error is ``grpc.aio.AioRpcError`` as gRPC raised it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TypeVar

import grpc.aio
from google.protobuf.empty_pb2 import Empty
from google.protobuf.field_mask_pb2 import FieldMask

from ratelimitd_client.channel import authorization
from ratelimitd_client.node_client import DEFAULT_TIMEOUT_S, MAX_PAGE_SIZE
from ratelimiter.v1 import ratelimiter_pb2 as pb
from ratelimiter.v1 import ratelimiter_pb2_grpc as stubs

Q = TypeVar("Q")
A = TypeVar("A")


class AsyncNodeClient:
    """A node over a channel that somebody else opens and closes.

    Args:
        channel: see :func:`ratelimitd_client.open_async_channel`.
        token: the bearer token of a role, sent with every call.
        timeout_s: deadline of every call in seconds; each method takes its own as well.

    Every method raises ``grpc.aio.AioRpcError``.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        token: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._metadata = authorization(token)
        self._timeout_s = timeout_s
        self._rules = stubs.RateLimiterConfigStub(channel)
        self._node = stubs.RateLimiterHealthStub(channel)

    async def create_rule(
        self, rule: pb.RateLimit, *, timeout_s: float | None = None
    ) -> pb.RateLimit:
        """Store a new rule; returns it with its id and etag."""
        return await self._call(
            self._rules.CreateRateLimit, pb.CreateRateLimitRequest(rate_limit=rule), timeout_s
        )

    async def update_rule(
        self,
        rule: pb.RateLimit,
        fields: Sequence[str] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> pb.RateLimit:
        """Change the rule ``rule.id``: exactly ``fields``, or the whole rule without them.

        An ``etag`` in ``rule`` must still be the rule's own, else the node answers ABORTED.
        """
        mask = None if fields is None else FieldMask(paths=fields)
        return await self._call(
            self._rules.UpdateRateLimit,
            pb.UpdateRateLimitRequest(rate_limit=rule, update_mask=mask),
            timeout_s,
        )

    async def delete_rule(
        self, rule_id: str, *, etag: str = "", timeout_s: float | None = None
    ) -> None:
        """Delete a rule; ``etag`` as in :meth:`update_rule`."""
        await self._call(
            self._rules.DeleteRateLimit, pb.DeleteRateLimitRequest(id=rule_id, etag=etag), timeout_s
        )

    async def list_rules(
        self, request: pb.ListRateLimitsRequest, *, timeout_s: float | None = None
    ) -> pb.ListRateLimitsResponse:
        """Return one page of rules."""
        return await self._call(self._rules.ListRateLimits, request, timeout_s)

    async def rules(
        self, *, endpoint: str = "", identifier_type: str = "", timeout_s: float | None = None
    ) -> AsyncIterator[pb.RateLimit]:
        """Yield every rule that matches, page by page; empty filters match all. The deadline is that of one page."""
        request = pb.ListRateLimitsRequest(
            endpoint=endpoint, identifier_type=identifier_type, page_size=MAX_PAGE_SIZE
        )
        while True:
            page = await self.list_rules(request, timeout_s=timeout_s)
            for rule in page.rate_limits:
                yield rule
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def health(self, *, timeout_s: float | None = None) -> pb.HealthResponse:
        """Return the node's health and the measurements behind it."""
        return await self._call(self._node.GetHealthStatus, Empty(), timeout_s)

    async def metrics(
        self, names: Iterable[str] = (), *, timeout_s: float | None = None
    ) -> pb.MetricsResponse:
        """Return the metrics called ``names``, all of them without names."""
        return await self._call(self._node.GetMetrics, pb.MetricsRequest(names=names), timeout_s)

    async def reset(
        self,
        identifier: str,
        identifier_type: str,
        endpoint: str,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Forget what one identifier has spent on one endpoint."""
        request = pb.ResetRequest(
            identifier=identifier, identifier_type=identifier_type, endpoint=endpoint
        )
        await self._call(self._node.ResetRateLimit, request, timeout_s)

    async def _call(
        self, method: grpc.aio.UnaryUnaryMultiCallable[Q, A], question: Q, timeout_s: float | None
    ) -> A:
        deadline_s = self._timeout_s if timeout_s is None else timeout_s
        return await method(question, timeout=deadline_s, metadata=self._metadata)
