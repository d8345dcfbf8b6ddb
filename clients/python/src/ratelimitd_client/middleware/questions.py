"""From a request to what is asked about it: who, what, and how much.

Never asks anybody, and never catches what a user's function raises: that is the guard's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, NamedTuple

from ratelimitd_client.check import MAX_COST
from ratelimitd_client.middleware.arrival import RequestInfo
from ratelimitd_client.middleware.endpoint import is_valid_endpoint, with_method
from ratelimitd_client.middleware.identity import IdentifierType, Identity
from ratelimitd_client.middleware.limited import mark_of
from ratelimitd_client.middleware.options import Options, R


class Place(NamedTuple):
    """What is asked, but for the identity."""

    endpoint: str
    cost: int
    identifier_type: IdentifierType | None


class Questions(Generic[R]):
    """Turns requests into what is asked about them, as the options say."""

    __slots__ = ("_addresses", "_api_key_header", "_exempt", "_forwarded_header", "_options")

    def __init__(self, options: Options[R]) -> None:
        self._options: Final = options
        self._addresses = options.client_addresses()
        self._exempt = frozenset(options.exempt)
        self._forwarded_header = options.forwarded_header.lower()
        self._api_key_header = (options.api_key_header or "").lower()

    def place(self, request: R, arrival: RequestInfo) -> Place | None:
        """What the request is counted under and what it spends; ``None`` if it is not checked.

        Raises:
            TypeError, ValueError: a function for the cost returned something else.
            Exception: whatever a user's function raises.
        """
        options = self._options
        mark = mark_of(arrival.view, arrival.method)
        if mark.exempt:
            return None
        endpoint = mark.endpoint
        if endpoint is None and options.endpoint is not None:
            endpoint = options.endpoint(request)
        if (arrival.route if endpoint is None else endpoint) in self._exempt:
            return None
        if endpoint is None and arrival.route is not None:
            endpoint = arrival.route
            if options.with_method:
                endpoint = with_method(arrival.method, endpoint)
        if endpoint is None or not is_valid_endpoint(endpoint):
            endpoint = options.unmatched
            if endpoint is None or endpoint in self._exempt:
                return None
        cost = _cost(options.cost if mark.cost is None else mark.cost, request)
        return Place(endpoint, cost, mark.identifier_type) if cost else None

    def is_answered(self, given: object, wanted: IdentifierType | None) -> bool:
        """Whether what the user's function returned says alone who the request is counted for."""
        if not isinstance(given, Identity) or given.is_nobody:
            return False
        return wanted is None or given.identifier_type == wanted

    def identity(
        self, given: object, arrival: RequestInfo, wanted: IdentifierType | None
    ) -> Identity | None:
        """Who the request is counted for: the first of the wanted type, else the first at all.

        Args:
            given: what the user's function returned, ``None`` if there is none.
            arrival: the request.
            wanted: the type of identifier that the view asks for.

        Raises:
            TypeError: ``given`` is neither an identity nor ``None``.
            Exception: whatever a user's function raises.
        """
        if not (given is None or isinstance(given, Identity)):
            message = f"identify must return an Identity or None, not {type(given).__name__}"
            raise TypeError(message)
        # By far the most.
        if self.is_answered(given, wanted):
            return given
        first = None
        for identity in self._identities(given, arrival):
            if wanted is None or identity.identifier_type == wanted:
                return identity
            first = first or identity
        return first or self._options.anonymous

    def _identities(self, given: Identity | None, arrival: RequestInfo) -> Iterator[Identity]:
        if given is not None and not given.is_nobody:
            yield given
        if user := arrival.user():
            yield Identity(user, "user")
        if self._api_key_header:
            keys = arrival.header(self._api_key_header)
            # With two of them it is not known which one was verified; servers and proxies may have joined their lines.
            if len(keys) == 1 and keys[0].strip() and "," not in keys[0]:
                yield Identity(keys[0], "api_key")
        if address := self._addresses.of(arrival.peer, arrival.header(self._forwarded_header)):
            yield Identity(address, "ip")


def _cost(cost: int | Callable[[Any], int], request: object) -> int:
    if not callable(cost):
        return cost
    asked: object = cost(request)
    if not isinstance(asked, int) or isinstance(asked, bool):
        message = f"cost must be a whole number, not {type(asked).__name__}"
        raise TypeError(message)
    if asked < 0:
        message = "cost must be at least 0"
        raise ValueError(message)
    return min(asked, MAX_COST)
