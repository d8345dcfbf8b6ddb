"""Who is at the other end of a socket: an address in gRPC's spelling, and the names of a verified certificate."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import Any

from ratelimitd.rpc.call_head import Peer


def peer_of(transport: asyncio.BaseTransport) -> Peer:
    """The peer of a connection."""
    sock: socket.socket | None = transport.get_extra_info("socket")
    ssl_object = transport.get_extra_info("ssl_object")
    certificate = None if ssl_object is None else ssl_object.getpeercert()
    address = address_of(
        None if sock is None else sock.family, transport.get_extra_info("peername")
    )
    return Peer(address, sans_of(certificate or {}))


def address_of(family: int | None, name: Any) -> str:
    """``ipv4:127.0.0.1:50000``, ``ipv6:[::1]:50000`` or ``unix:``; ``name`` is what the socket says.

    An IPv4 peer of a socket that listens for both is one of IPv4. A peer that is gone already has no name, and must
    not pass for one on this host.
    """
    if family == socket.AF_UNIX:
        return "unix:"
    if not name:
        return "unknown:"
    if family == socket.AF_INET:
        return f"ipv4:{name[0]}:{name[1]}"
    mapped = ipaddress.IPv6Address(name[0]).ipv4_mapped
    return f"ipv6:[{name[0]}]:{name[1]}" if mapped is None else f"ipv4:{mapped}:{name[1]}"


def sans_of(certificate: dict[str, Any]) -> tuple[str, ...]:
    """The subject alternative names of a certificate as :mod:`ssl` tells it, of whatever kind."""
    return tuple(name for _, name in certificate.get("subjectAltName", ()) if isinstance(name, str))
