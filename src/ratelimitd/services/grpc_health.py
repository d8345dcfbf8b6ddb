"""The standard health service, ``grpc.health.v1``: whether this node is ready for calls.

All services of a node have the same status. A DEGRADED node stays SERVING: it still answers every check, so a balancer
must not remove it. The node sets the status when it starts and drains.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from typing import Final

from grpc_health.v1 import health_pb2

from ratelimitd.rpc.interface import Call, Methods, StatusCode
from ratelimitd.services.errors import rich_error
from ratelimitd.services.wire_format import parsed

SERVICE: Final = "grpc.health.v1.Health"

WHOLE_NODE: Final = ""
"""The service name that stands for the node itself."""

_Response = health_pb2.HealthCheckResponse
# The stubs of the package do not have List yet.
_ListRequest = health_pb2.HealthListRequest  # type: ignore[attr-defined]
_ListResponse = health_pb2.HealthListResponse  # type: ignore[attr-defined]


class GrpcHealthService:
    """Handlers of Check, List and Watch for the node ("") and for each of ``service_names``.

    Starts as NOT_SERVING, until :meth:`set_serving`; :meth:`drain` is final.
    """

    def __init__(self, service_names: Collection[str]) -> None:
        self._names = frozenset(service_names) | {WHOLE_NODE}
        self._serving = False
        self._draining = False
        self._changed = asyncio.Event()

    @property
    def serving(self) -> bool:
        """Whether the status is SERVING."""
        return self._serving and not self._draining

    def methods(self) -> Methods:
        """Return the handlers by path."""
        return Methods(
            unary={f"/{SERVICE}/Check": self.check, f"/{SERVICE}/List": self.list_all},
            server_stream={f"/{SERVICE}/Watch": self.watch},
        )

    def set_serving(self) -> None:
        """Set the status to SERVING; has no effect after :meth:`drain`."""
        self._serving = True
        self._wake_watchers()

    def drain(self) -> None:
        """Set the status to NOT_SERVING for good, so that balancers send new calls elsewhere."""
        self._draining = True
        self._wake_watchers()

    def check(self, data: bytes, _call: Call) -> bytes:
        """Return the status of one service.

        Raises:
            RpcError: NOT_FOUND for an unknown service, as the health protocol requires.
        """
        name = _service_of(data)
        if name not in self._names:
            raise rich_error(StatusCode.NOT_FOUND, "SERVICE_UNKNOWN", "no such service")
        return _Response(status=self._status(name)).SerializeToString()

    def list_all(self, data: bytes, _call: Call) -> bytes:
        """Return the status of the node and each of its services."""
        parsed(_ListRequest, data)
        statuses = {name: _Response(status=self._status(name)) for name in self._names}
        answer: bytes = _ListResponse(statuses=statuses).SerializeToString()
        return answer

    async def watch(self, data: bytes, _call: Call) -> AsyncIterator[bytes]:
        """Yield the status now and after every change. An unknown service is SERVICE_UNKNOWN."""
        name = _service_of(data)
        sent: int | None = None
        while True:
            changed = self._changed
            status = self._status(name)
            if status != sent:
                sent = status
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
    return parsed(health_pb2.HealthCheckRequest, data).service
