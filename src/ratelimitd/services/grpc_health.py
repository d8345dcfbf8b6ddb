"""The standard health service, ``grpc.health.v1``: is this node ready for calls?

All services of a node share one answer. DEGRADED is none of its business: such a node still answers every check, and
a balancer must not take it out. Never measures anything; the node sets the status when it starts and drains.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2

from ratelimitd.rpc.interface import Call, Methods, StatusCode
from ratelimitd.services.errors import rich_error
from ratelimitd.services.wire_format import no_message

SERVICE: Final = "grpc.health.v1.Health"

WHOLE_NODE: Final = ""
"""The service name that stands for the node itself."""

_M = TypeVar("_M", bound=Message)
_Response = health_pb2.HealthCheckResponse
# The stubs of the package do not know List yet.
_ListRequest = health_pb2.HealthListRequest  # type: ignore[attr-defined]
_ListResponse = health_pb2.HealthListResponse  # type: ignore[attr-defined]


class GrpcHealthService:
    """Handlers of Check, List and Watch for the node ("") and for each of ``service_names``.

    Starts as NOT_SERVING; :meth:`set_serving` says when the node is ready, :meth:`drain` ends that for good.
    """

    def __init__(self, service_names: Collection[str]) -> None:
        self._names = frozenset(service_names) | {WHOLE_NODE}
        self._serving = False
        self._draining = False
        self._changed = asyncio.Event()

    @property
    def serving(self) -> bool:
        """Whether the node says SERVING."""
        return self._serving and not self._draining

    def methods(self) -> Methods:
        """The handlers by path."""
        return Methods(
            unary={f"/{SERVICE}/Check": self.check, f"/{SERVICE}/List": self.list_all},
            server_stream={f"/{SERVICE}/Watch": self.watch},
        )

    def set_serving(self) -> None:
        """Say that the node is ready; without effect once it drains."""
        self._serving = True
        self._wake_watchers()

    def drain(self) -> None:
        """Say NOT_SERVING from now on, so that balancers send new calls elsewhere."""
        self._draining = True
        self._wake_watchers()

    def check(self, data: bytes, _call: Call) -> bytes:
        """Answer once.

        Raises:
            RpcError: NOT_FOUND for a service this node does not have, as the health protocol demands.
        """
        name = _service_of(data)
        if name not in self._names:
            raise rich_error(StatusCode.NOT_FOUND, "SERVICE_UNKNOWN", "no such service")
        return _Response(status=self._status(name)).SerializeToString()

    def list_all(self, data: bytes, _call: Call) -> bytes:
        """Answer once for the node and every service of it."""
        _parse(_ListRequest, data)
        statuses = {name: _Response(status=self._status(name)) for name in self._names}
        answer: bytes = _ListResponse(statuses=statuses).SerializeToString()
        return answer

    async def watch(self, data: bytes, _call: Call) -> AsyncIterator[bytes]:
        """Answer now and after every change, until the caller leaves. An unknown service is SERVICE_UNKNOWN."""
        name = _service_of(data)
        told: int | None = None
        while True:
            changed = self._changed
            status = self._status(name)
            if status != told:
                told = status
                yield _Response(status=status).SerializeToString()
            await changed.wait()

    def _status(self, name: str) -> int:
        if name not in self._names:
            return _Response.SERVICE_UNKNOWN
        return _Response.SERVING if self.serving else _Response.NOT_SERVING

    def _wake_watchers(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _service_of(data: bytes) -> str:
    return _parse(health_pb2.HealthCheckRequest, data).service


def _parse(message_type: type[_M], data: bytes) -> _M:
    try:
        return message_type.FromString(data)
    except DecodeError:
        raise no_message(message_type) from None
