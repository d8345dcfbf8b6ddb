"""The transports there are, by the value of the setting TRANSPORT, and what they count. Nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ratelimitd.http2.errors import Cause
from ratelimitd.rpc.interface import TransportError

if TYPE_CHECKING:
    from ratelimitd.rpc.grpcio_server import GrpcioServer
    from ratelimitd.rpc.server import NativeServer

TRANSPORTS: Final = ("native", "grpcio")
"""The default first."""

CAUSES: Final = frozenset(map(str, (*Cause, *TransportError))) - {Cause.PEER_RESET, Cause.OWNER}
"""Why a transport ends a call, a stream or a connection that it counts as lost: the closed set. Missing are a caller
that gave up, for its call counts as cancelled, and the node itself on its way out."""


def server_of(name: str) -> type[GrpcioServer | NativeServer]:
    """Return the class of a transport's server: a :class:`ratelimitd.rpc.interface.Server`, each made in the same way.

    ``name`` is one of :data:`TRANSPORTS`. Only what is asked for is imported: a node that speaks gRPC itself starts
    without Google's library.
    """
    if name == "grpcio":
        from ratelimitd.rpc.grpcio_server import GrpcioServer  # noqa: PLC0415

        return GrpcioServer
    from ratelimitd.rpc.server import NativeServer  # noqa: PLC0415

    return NativeServer
