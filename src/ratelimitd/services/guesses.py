"""Slows token guesses: after too many wrong tokens from an address, calls are refused before their token is compared.

All interfaces of the node share one table. A call without a token is not a guess, nor is a valid token without the
role. See ADR 0044.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Final

from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2

from ratelimitd.algorithms import token_bucket
from ratelimitd.counters import CheckStats
from ratelimitd.model import Algorithm, IdentifierType, Rule
from ratelimitd.rpc.interface import Call, StatusCode
from ratelimitd.services.errors import rich_error
from ratelimitd_wire.addresses import ClientAddresses

MAX_GUESSES: Final = 600
"""Wrong tokens per address: in a burst, and per minute. A fleet with an old token needs some."""

SPARE: Final = 100
"""Guesses reserved for connections without a wrong token, so that honest callers behind an attacker's address can still
connect."""

LOGIN_COST: Final = 50
"""Cost of a wrong token in the login form: allows ten in a burst, then one every five seconds."""

MAX_ADDRESSES: Final = 10_000
MAX_CONNECTIONS: Final = 10_000
"""Cached addresses and connections; the oldest are evicted first. About 6 MB when full."""

_WRONG: Final = b""
"""Marks a connection that sent a wrong token; no token has this key."""

_RULE: Final = Rule(
    "",
    "",
    IdentifierType.IP,
    limit=MAX_GUESSES,
    window_seconds=60,
    algorithm=Algorithm.TOKEN_BUCKET,
)


class TokenGuesses:
    """Counts wrong tokens by address: IPv4, the /64 of IPv6, or all peers of Unix sockets together.

    Args:
        now_us: the node's clock.
        trusted_proxies: addresses and networks of proxies whose X-Forwarded-For counts, ``unix`` for Unix sockets.
    """

    def __init__(
        self, stats: CheckStats, now_us: Callable[[], int], trusted_proxies: Iterable[str] = ()
    ) -> None:
        self._counts = stats.token_guesses
        self._now_us = now_us
        proxies = tuple(trusted_proxies)
        self._has_proxies = bool(proxies)
        self._addresses = ClientAddresses(proxies)
        self._spent: OrderedDict[str, Any] = OrderedDict()
        """Address → state of its token bucket."""
        self._connections: OrderedDict[str, bytes] = OrderedDict()
        """Peer with its port → key of its last right token, or ``_WRONG``. Excludes connections of proxies."""

    def admit(self, call: Call, key: bytes, cost: int) -> bool:
        """Admit the token of ``call`` to the comparison; ``key`` is the secret key under which it is looked up.

        Returns whether it was the last right token of the connection. Only that one is always admitted: otherwise a
        holder of one token could guess others without limit.

        Raises:
            RpcError: RESOURCE_EXHAUSTED, with the delay until the next guess.
        """
        known = self._connections.get(call.peer)
        if known == key:
            return True
        state = self._spent.get(self._address(call))
        if state is None:
            return False
        spare = SPARE if known == _WRONG else 0
        outcome = token_bucket.decide(state, _RULE, self._now_us(), cost + spare)
        if not outcome[0]:
            self._counts["refused"] += 1
            retry = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=outcome[3]))
            message = "too many wrong tokens came from this address"
            raise rich_error(StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_WRONG_TOKENS", message, retry)
        return False

    def right(self, call: Call, key: bytes) -> None:
        """Record the right token of a connection, unless it sent a wrong one before."""
        if self._connections.get(call.peer) != _WRONG and self._has_port(call):
            self._remember(call.peer, key)

    def wrong(self, call: Call, cost: int) -> None:
        """Record a wrong token, and charge it to its address."""
        self._counts["wrong"] += 1
        if self._has_port(call):
            self._remember(call.peer, _WRONG)
        address = self._address(call)
        state, now_us = self._spent.pop(address, None), self._now_us()
        self._spent[address] = token_bucket.decide(state, _RULE, now_us, cost)[5]
        if len(self._spent) > MAX_ADDRESSES:
            self._spent.popitem(last=False)

    def _remember(self, peer: str, key: bytes) -> None:
        self._connections[peer] = key
        if len(self._connections) > MAX_CONNECTIONS:
            self._connections.popitem(last=False)

    def _has_port(self, call: Call) -> bool:
        """Return whether the peer identifies one connection of one caller: not behind a proxy or a Unix socket."""
        forwarded = self._has_proxies and call.values("x-forwarded-for")
        return not forwarded and call.peer.startswith("ip")

    def _address(self, call: Call) -> str:
        scheme, _, host = call.peer.partition(":")
        if scheme == "unknown":
            return scheme  # a peer that has left: it must not pass for a proxy on a Unix socket
        peer = host if scheme.startswith("ip") else ""
        forwarded_for = call.values("x-forwarded-for") if self._has_proxies else ()
        return self._addresses.of(peer, forwarded_for) or scheme
