"""Whose address a request came from: the peer's, or what proxies say of it that are trusted by name.

Pure. A header counts only when a trusted proxy sent it, and is read from its right end: that is where the proxy wrote,
and what stands further left came from the caller. Work is bounded, whatever a header holds. See ADR 0035.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final

UNIX: Final = "unix"
"""Trusted proxy entry for peers of a Unix socket, which have no address."""

MAX_HOPS: Final = 32
"""Most proxies in a row that are looked at."""
MAX_HOP_CHARS: Final = 64
"""Longest text that may be an address, with brackets, zone and port."""
MAX_LINE_CHARS: Final = MAX_HOPS * MAX_HOP_CHARS
"""How much of a header's line is looked at, from its end."""
REMEMBERED: Final = 4_096
"""How many texts are remembered with their address: reading one takes longer than all the rest."""

IPV6_BITS: Final = 128
MAPPED: Final = ipaddress.IPv6Network("::ffff:0:0/96")
"""IPv4 addresses as IPv6 writes them; here they are IPv4 addresses."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class ClientAddresses:
    """Finds the address of a caller.

    Args:
        trusted_proxies: addresses and networks (``10.0.0.0/8``) of your own proxies, and ``"unix"`` for those that
            connect to a Unix socket. Empty: no header ever counts.
        ipv6_prefix: how many bits of an IPv6 address tell callers apart; 128 for all of them. A site is given 64
            bits to choose from as it likes, so that a limit on single addresses would be none.

    Raises:
        ValueError, TypeError: an argument is not valid; the text names it.
    """

    __slots__ = ("_cut_bits", "_networks", "_trusts_unix")

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
        """The address of the caller, or ``None`` if the peer has none.

        The peer's, unless that is a trusted proxy. Then the last one in ``forwarded_for`` that is no trusted proxy;
        what is no address ends the search, and the last that was trustworthy is the answer.

        Args:
            peer: who is connected, as the server says; ``None`` or empty for a Unix socket.
            forwarded_for: the values of X-Forwarded-For, one for each line of it, in order.
        """
        address = address_of(peer) if peer else None
        if self._trusts_unix if not peer else self._is_trusted(address):
            for hop in _from_the_right(forwarded_for):
                found = address_of(hop)
                if found is None:
                    break
                address = found
                if not self._is_trusted(found):
                    break
        return None if address is None else self._text(address)

    def _is_trusted(self, address: Address | None) -> bool:
        return address is not None and any(address in network for network in self._networks)

    def _text(self, address: Address) -> str:
        if address.version == 6 and self._cut_bits:  # noqa: PLR2004 - of IP
            kept = int(address) >> self._cut_bits << self._cut_bits
            return str(ipaddress.IPv6Address(kept))
        return str(address)


def address_of(text: str) -> Address | None:
    """The address in a text, without brackets, zone and port; IPv4 in IPv6 is IPv4. ``None`` if it is none."""
    return _address_of(text) if len(text) <= MAX_HOP_CHARS else None


@lru_cache(REMEMBERED)
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
    """The hops of a header, the nearest first; at most ``MAX_HOPS``."""
    left = MAX_HOPS
    for line in reversed(lines):
        # Where the line is cut, the first hop is not whole; it is the 33rd, or one that is no address.
        hops = line[-MAX_LINE_CHARS:].split(",")
        for hop in reversed(hops):
            if not left:
                return
            left -= 1
            yield hop
