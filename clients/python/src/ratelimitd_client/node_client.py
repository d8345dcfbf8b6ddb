"""One method for each RPC of a node, messages in and out.

Never decides anything: an answer is the node's, an error is ``grpc.RpcError`` as gRPC raised it. What an application
asks before it serves a request is :class:`ratelimitd_client.RateLimiterClient`, which also answers when no node does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Final, Self, TypeVar

import grpc
from google.protobuf.empty_pb2 import Empty
from google.protobuf.field_mask_pb2 import FieldMask

from ratelimitd_client.channel import Tls, authorization, open_channel
from ratelimiter.v1 import ratelimiter_pb2 as pb
from ratelimiter.v1 import ratelimiter_pb2_grpc as stubs

Q = TypeVar("Q")
A = TypeVar("A")

DEFAULT_TIMEOUT_S: Final = 1.0
"""Deadline of a call unless told otherwise: enough to connect first."""

MAX_PAGE_SIZE: Final = 1000
"""Most rules a node returns in one page."""


class NodeClient:
    """A connection to a node. Close it, or use it as a context manager; safe to share between threads.

    Args:
        target: ``host:port`` of the node, or any gRPC name.
        tls: see :class:`Tls`; ``None`` speaks plaintext, and then a token can be read on the wire.
        token: the bearer token of a role, sent with every call.
        timeout_s: deadline of every call in seconds; each method takes its own as well.
        channel: an open channel to use instead; its owner closes it.

    Raises:
        ValueError, TypeError: an argument is not valid.

    Every method raises ``grpc.RpcError``.
    """

    def __init__(
        self,
        target: str = "127.0.0.1:9090",
        *,
        tls: Tls | None = None,
        token: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        channel: grpc.Channel | None = None,
    ) -> None:
        self._metadata = authorization(token)
        self._timeout_s = timeout_s
        self._owns_channel = channel is None
        self._channel = open_channel(target, tls=tls) if channel is None else channel
        self._checks = stubs.RateLimiterStub(self._channel)
        self._rules = stubs.RateLimiterConfigStub(self._channel)
        self._node = stubs.RateLimiterHealthStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel, unless the caller brought it."""
        if self._owns_channel:
            self._channel.close()

    def check(
        self,
        identifier: str,
        identifier_type: str,
        endpoint: str,
        *,
        cost: int = 1,
        timestamp: int = 0,
        peek: bool = False,
        timeout_s: float | None = None,
    ) -> pb.RateLimitResponse:
        """Ask whether a request may proceed, and spend ``cost`` tokens if so (none with ``peek``).

        ``timestamp`` is the caller's Unix time in s, ms, µs or ns; 0 leaves time to the node.
        """
        request = pb.RateLimitRequest(
            identifier=identifier,
            identifier_type=identifier_type,
            endpoint=endpoint,
            tokens_requested=cost,
            timestamp=timestamp,
            peek=peek,
        )
        return self._call(self._checks.CheckRateLimit, request, timeout_s)

    def check_batch(
        self, requests: Iterable[pb.RateLimitRequest], *, timeout_s: float | None = None
    ) -> Sequence[pb.RateLimitResponse]:
        """Ask up to 1,000 checks in one call; answer i is that of request i."""
        return self._call(
            self._checks.CheckRateLimitBatch, pb.BatchRateLimitRequest(requests=requests), timeout_s
        ).responses

    def create_rule(self, rule: pb.RateLimit, *, timeout_s: float | None = None) -> pb.RateLimit:
        """Store a new rule; returns it with its id and etag."""
        return self._call(
            self._rules.CreateRateLimit, pb.CreateRateLimitRequest(rate_limit=rule), timeout_s
        )

    def update_rule(
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
        return self._call(
            self._rules.UpdateRateLimit,
            pb.UpdateRateLimitRequest(rate_limit=rule, update_mask=mask),
            timeout_s,
        )

    def delete_rule(self, rule_id: str, *, etag: str = "", timeout_s: float | None = None) -> None:
        """Delete a rule; ``etag`` as in :meth:`update_rule`."""
        self._call(
            self._rules.DeleteRateLimit, pb.DeleteRateLimitRequest(id=rule_id, etag=etag), timeout_s
        )

    def list_rules(
        self, request: pb.ListRateLimitsRequest, *, timeout_s: float | None = None
    ) -> pb.ListRateLimitsResponse:
        """Return one page of rules."""
        return self._call(self._rules.ListRateLimits, request, timeout_s)

    def rules(
        self, *, endpoint: str = "", identifier_type: str = "", timeout_s: float | None = None
    ) -> Iterator[pb.RateLimit]:
        """Yield every rule that matches, page by page; empty filters match all. The deadline is that of one page."""
        request = pb.ListRateLimitsRequest(
            endpoint=endpoint, identifier_type=identifier_type, page_size=MAX_PAGE_SIZE
        )
        while True:
            page = self.list_rules(request, timeout_s=timeout_s)
            yield from page.rate_limits
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def health(self, *, timeout_s: float | None = None) -> pb.HealthResponse:
        """Return the node's health and the measurements behind it."""
        return self._call(self._node.GetHealthStatus, Empty(), timeout_s)

    def metrics(
        self, names: Iterable[str] = (), *, timeout_s: float | None = None
    ) -> pb.MetricsResponse:
        """Return the metrics called ``names``, all of them without names."""
        return self._call(self._node.GetMetrics, pb.MetricsRequest(names=names), timeout_s)

    def reset(
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
        self._call(self._node.ResetRateLimit, request, timeout_s)

    def _call(
        self, method: grpc.UnaryUnaryMultiCallable[Q, A], question: Q, timeout_s: float | None
    ) -> A:
        deadline_s = self._timeout_s if timeout_s is None else timeout_s
        return method(question, timeout=deadline_s, metadata=self._metadata)
