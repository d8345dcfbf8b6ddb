"""The address of a caller behind proxies. Pure.

X-Forwarded-For counts only if a trusted proxy sent it. It is read from its right end, which the proxy wrote; entries
further left are the caller's. The work is bounded for any header.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final

UNIX: Final = "unix"
"""Entry of ``trusted_proxies`` for peers of a Unix socket, which have no address."""

MAX_HOPS: Final = 32
"""Longest chain of proxies that is read."""
MAX_HOP_CHARS: Final = 64
"""Longest text of an address, including brackets, zone and port."""
MAX_LINE_CHARS: Final = MAX_HOPS * MAX_HOP_CHARS
"""Longest part of a header line that is read, from its end."""
ADDRESS_CACHE_SIZE: Final = 4_096
"""Cached texts with their addresses: parsing one costs more than all other work here."""

IPV6_BITS: Final = 128
MAPPED: Final = ipaddress.IPv6Network("::ffff:0:0/96")
"""IPv4 addresses in IPv6 notation; they count as IPv4 addresses."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class ClientAddresses:
    """Finds the address of a caller.

    Args:
        trusted_proxies: addresses and networks (``10.0.0.0/8``) of your own proxies, and ``"unix"`` for those that
            connect to a Unix socket. If empty, no header counts.
        ipv6_prefix: number of bits of an IPv6 address that identify a caller. A site may vary the other 64 bits
            freely, which would evade a limit on whole addresses.

    Raises:
        ValueError, TypeError: an argument is not valid; the message names it.
    """

    def __init__(self, trusted_proxies: Iterable[str] = (), *, ipv6_prefix: int = 64) -> None:
        if isinstance(trusted_proxies, str):
            message = "trusted_proxies must be several texts, not one"
            raise TypeError(message)
        if not 1 <= ipv6_prefix <= IPV6_BITS:
            message = f"ipv6_prefix must be 1 to {IPV6_BITS}"
            raise ValueError(message)
        named = list(trusted_proxies)
        self._trusts_unix = UNIX in named
        self._networks = [_network(text) for text in named if text != UNIX]
        self._cut_bits = IPV6_BITS - ipv6_prefix

    def of(self, peer: str | None, forwarded_for: Sequence[str] = ()) -> str | None:
        """Return the address of the caller, or ``None`` if the peer has none.

        This is the address of the peer. If the peer is a trusted proxy, it is the last entry of ``forwarded_for`` that
        is not a trusted proxy. An entry that is not an address ends the search at the last trusted one.

        Args:
            peer: address of the peer; ``None`` or empty for a Unix socket.
            forwarded_for: the values of X-Forwarded-For, one per line, in order.
        """
        address = address_of(peer) if peer else None
        if self.trusts(peer):
            for hop in _from_the_right(forwarded_for):
                found = address_of(hop)
                if found is None:
                    break
                address = found
                if not self._is_trusted(found):
                    break
        if address is None:
            return None
        if address.version == 6 and self._cut_bits:
            return str(ipaddress.IPv6Address(int(address) >> self._cut_bits << self._cut_bits))
        return str(address)

    def trusts(self, peer: str | None) -> bool:
        """Return whether the peer is a trusted proxy; ``None`` or empty for a Unix socket."""
        return self._is_trusted(address_of(peer)) if peer else self._trusts_unix

    def _is_trusted(self, address: Address | None) -> bool:
        return address is not None and any(address in network for network in self._networks)


def address_of(text: str) -> Address | None:
    """Return the address in a text, without brackets, zone and port, or ``None``. IPv4-mapped ones become IPv4."""
    return _address_of(text) if len(text) <= MAX_HOP_CHARS else None


@lru_cache(ADDRESS_CACHE_SIZE)
def _address_of(text: str) -> Address | None:
    bare = text.strip(' \t"')
    if bare.startswith("["):
        bare = bare[1:].partition("]")[0]
    elif bare.count(":") == 1:
        bare = bare.partition(":")[0]
    try:
        address = ipaddress.ip_address(bare.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address if mapped is None else mapped


def _network(text: object) -> Network:
    try:
        network = ipaddress.ip_network(text, strict=False) if isinstance(text, str) else None
    except ValueError:
        network = None
    if network is None:
        message = f"trusted_proxies must be IP addresses, networks or {UNIX!r}, not {text!r}"
        raise ValueError(message)
    if isinstance(network, ipaddress.IPv6Network) and network.subnet_of(MAPPED):
        first = ipaddress.IPv4Address(network.network_address.packed[-4:])
        return ipaddress.IPv4Network((first, network.prefixlen - MAPPED.prefixlen))
    return network


def _from_the_right(lines: Sequence[str]) -> Iterator[str]:
    """Yield the hops of a header, the nearest first; at most ``MAX_HOPS``."""
    left = MAX_HOPS
    for line in reversed(lines):
        # Cutting may leave an incomplete first hop, which is the 33rd or not an address.
        hops = line[-MAX_LINE_CHARS:].split(",")
        for hop in reversed(hops):
            if not left:
                return
            left -= 1
            yield hop
