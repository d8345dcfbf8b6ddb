"""The transports there are, by the value of the setting TRANSPORT. Nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from ratelimitd.rpc.grpcio_server import GrpcioServer
from ratelimitd.rpc.native_server import NativeServer

TRANSPORTS: Final[Mapping[str, type[GrpcioServer | NativeServer]]] = MappingProxyType(
    {"native": NativeServer, "grpcio": GrpcioServer}
)
"""Each is a :class:`ratelimitd.rpc.interface.Server`, made in the same way."""
