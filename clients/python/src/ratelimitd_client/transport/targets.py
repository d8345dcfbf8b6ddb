"""Targets in gRPC's notation: which are valid, which the client can connect to itself, and their addresses.

These are ``host:port``, ``dns:///host:port``, ``ipv4:`` and ``ipv6:`` with one address or several, ``unix:path`` and
``unix:///path``. gRPC supports more. gRPC's default port is 443, where no node listens, so the port is required here.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

MAX_PORT: Final = 65_535

_IPV4: Final = 4
_IPV6: Final = 6

MAX_ADDRESSES: Final = 100
"""Limit for one name; each address gets a connection."""

_SCHEME: Final = re.compile(r"(dns|ipv4|ipv6|unix):(.*)", re.DOTALL)
_HOST_AND_PORT: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+)):([0-9]{1,5})")

_OTHER_SCHEMES: Final = re.compile(
    r"(?:google-c2p|unix-abstract|xds):/*[^/].*", re.DOTALL | re.IGNORECASE
)
"""Further schemes of gRPC for Python, whose targets are not validated here."""

_NAME_SERVER: Final = re.compile(r"dns:(?://[^/]*)?/")
_ZONE: Final = re.compile(r"%[^\]]+(?=\])")


@dataclass(frozen=True, slots=True)
class Address:
    """A numeric host with a port, or the path of a socket."""

    host: str = ""
    port: int = 0
    path: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """A target that the client can connect to itself.

    Attributes:
        authority: the ``:authority`` of calls.
        server_name: the name that the certificate must have.
        fixed: the addresses, if no look-up is needed.
        name: otherwise the name to look up.
        port: the port for the addresses of ``name``.
    """

    authority: str
    server_name: str
    fixed: tuple[Address, ...] = ()
    name: str = ""
    port: int = 0

    async def addresses(self, loop: asyncio.AbstractEventLoop) -> Sequence[Address]:
        """Return the addresses, looked up unless they are fixed.

        Raises:
            OSError: the name cannot be resolved.
        """
        if self.fixed:
            return self.fixed
        found = await loop.getaddrinfo(self.name, self.port, type=socket.SOCK_STREAM)
        unique = dict.fromkeys(Address(str(end[0]), self.port) for *_, end in found)
        return list(unique)[:MAX_ADDRESSES]


def require_target(target: str) -> None:
    """Validate a target. With a wrong one, every check would be let through.

    Raises:
        ValueError: it is not valid. The message does not contain it, since a URL may hold a password.
        TypeError: it is not text.
    """
    given: object = target
    if not isinstance(given, str):
        message = f"target must be text such as limiter.internal:9090, not {type(given).__name__}"
        raise TypeError(message)
    if parse(target) is None and not _is_for_grpc(target):
        message = (
            f"target must be host:port with a port of 1 to {MAX_PORT}, such as limiter.internal:9090, without http://;"
            " or a gRPC name such as dns:///limiter.internal:9090 or unix:/run/node.sock"
        )
        raise ValueError(message)


def _is_for_grpc(target: str) -> bool:
    """Whether only gRPC can read the target: another scheme, a name server, a zone, or upper case."""
    if _OTHER_SCHEMES.fullmatch(target):
        return True
    scheme, colon, rest = target.partition(":")
    plain = _NAME_SERVER.sub("dns:", f"{scheme.lower()}{colon}{rest}")
    return parse(_ZONE.sub("", plain)) is not None


def parse(target: str) -> Target | None:
    """Return the meaning of a target, or ``None`` if it is not valid or only gRPC can read it."""
    matched = _SCHEME.fullmatch(target)
    scheme, rest = matched.groups() if matched else ("dns", target)
    if scheme == "unix":
        path = rest.removeprefix("//") if rest.startswith("///") else rest
        known = bool(path) and not path.startswith("//")
        return Target("localhost", "localhost", (Address(path=path),)) if known else None
    if scheme == "dns":
        return _named(rest.removeprefix("///"))
    return _listed(rest, _IPV4 if scheme == "ipv4" else _IPV6)


def _named(rest: str) -> Target | None:
    found = _host_and_port(rest)
    if found is None:
        return None
    host, port = found
    if _version(host):
        return Target(rest, host, (Address(host, port),))
    # No certificate has a name with the dot of a fully qualified one.
    return Target(rest, host.removesuffix("."), name=host, port=port)


def _listed(rest: str, version: int) -> Target | None:
    parts = rest.removeprefix("///").split(",")
    addresses = []
    for part in parts:
        found = _host_and_port(part)
        if found is None or _version(found[0]) != version:
            return None
        addresses.append(Address(*found))
    return Target(parts[0], addresses[0].host, tuple(dict.fromkeys(addresses))[:MAX_ADDRESSES])


def _host_and_port(text: str) -> tuple[str, int] | None:
    matched = _HOST_AND_PORT.fullmatch(text)
    if matched is None:
        return None
    bracketed, plain, digits = matched.groups()
    port = int(digits)
    if not 1 <= port <= MAX_PORT or (bracketed and _version(bracketed) != _IPV6):
        return None
    return bracketed or plain, port


def _version(host: str) -> int:
    """Return 4 or 6, or 0 for a name."""
    try:
        return ipaddress.ip_address(host).version
    except ValueError:
        return 0
