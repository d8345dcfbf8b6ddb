"""The options of a middleware, the same for all frameworks, validated when they are created.

``R`` is the request that your functions take: the scope of ASGI, the request of aiohttp, Flask and Django.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeVar, get_args

from ratelimitd_client.decision import Decision, OnUnavailable, Reason
from ratelimitd_client.middleware.identity import Identities, Identity
from ratelimitd_client.middleware.marks import VALID_COST, is_valid_cost
from ratelimitd_client.middleware.request_info import is_valid_endpoint
from ratelimitd_client.observers import Observer, is_observer
from ratelimitd_wire.addresses import ClientAddresses
from ratelimitd_wire.ratelimit_headers import NEWEST_REVISION

R = TypeVar("R", contravariant=True)  # noqa: PLC0105 - the request

OnError = Literal["allow", "raise"]

_ANY_DECISION: Final = Decision(True, 1, 0, 0, Reason.NO_RULE)  # noqa: FBT003 - allowed


# Without slots, which Python 3.11 cannot have together with Options[Request](…).
@dataclass(frozen=True, kw_only=True)
class Options(Generic[R]):
    """How requests are counted and answered.

    Args:
        identify: returns who a request is counted for, or ``None`` to use the user that the framework knows, the API
            key, or the address. In a middleware for asyncio it may be a coroutine function.
        identities: returns who else a request is counted for, each of another type: identifiers by their type, or
            ``Identity`` objects. Empty ones, and those of the type that the request is counted for already, are left
            out. It may be a coroutine function where ``identify`` may. If it fails, the request is counted without.
        api_key_header: name of a header whose value is an API key. Use it only where the key was verified before: an
            unknown key is a new identity.
        trusted_proxies: see :class:`ClientAddresses`.
        forwarded_header: header to which those proxies append the address of their peer.
        ipv6_prefix: see :class:`ClientAddresses`.
        anonymous: identity of requests that have none, such as over a Unix socket without a trusted proxy; with
            ``None`` they are let through with a warning.
        on_error: effect of an exception in one of your functions: ``"allow"`` lets the request through with a warning
            (of ``identities``: counts it without them), ``"raise"`` passes it to the framework, which answers 500.
        on_unavailable: effect of a check that no node has answered, or of an error of the limiter: ``"allow"`` lets the
            request through, ``"deny"`` answers 503; ``None``: as the client says.
        observer: is told of every decision as the middleware makes it; see :mod:`ratelimitd_client.observers`.
        endpoint: returns what a request is counted under, or ``None`` to use the route template.
        unmatched: endpoint of requests that no route matches; with ``None`` they are let through unchecked.
        with_method: put the method before the route template: ``GET /orders/{id}``.
        exempt: endpoints, without a method, whose requests are not checked.
        cost: tokens that a request spends, or a function that returns them; with 0 it is not checked.
        headers: add ``RateLimit`` and ``RateLimit-Policy`` to answers, also of allowed requests.
        headers_revision: the revision of the draft they follow: ``draft-11``, ``draft-7`` or ``draft-6``.
        x_ratelimit: also add ``X-RateLimit-Limit``, ``-Remaining`` and ``-Reset``.
        policy: the name of the limit in these headers.
        denied_text: the text of an answer to a request over its limit, or a function of the decision that returns the
            text of any denial.

    Raises:
        ValueError, TypeError: an option is not valid; the message names it.
    """

    identify: Callable[[R], Identity | Awaitable[Identity | None] | None] | None = None
    identities: Callable[[R], Identities | Awaitable[Identities | None] | None] | None = None
    api_key_header: str | None = None
    trusted_proxies: Collection[str] = ()
    forwarded_header: str = "X-Forwarded-For"
    ipv6_prefix: int = 64
    anonymous: Identity | None = None
    on_error: OnError = "allow"
    on_unavailable: OnUnavailable | None = None
    observer: Observer | None = None
    endpoint: Callable[[R], str | None] | None = None
    unmatched: str | None = "unmatched"
    with_method: bool = False
    exempt: Collection[str] = ()
    cost: int | Callable[[R], int] = 1
    headers: bool = True
    headers_revision: str = NEWEST_REVISION
    x_ratelimit: bool = False
    policy: str = "default"
    denied_text: str | Callable[[Decision], str] | None = None

    def __post_init__(self) -> None:
        for name, (is_valid, what) in _VALID.items():
            if not is_valid(getattr(self, name)):
                message = f"{name} must be {what}"
                raise ValueError(message)
        self.client_addresses()
        _ANY_DECISION.headers(policy=self.policy, revision=self.headers_revision)

    def client_addresses(self) -> ClientAddresses:
        """Return what finds the address of a caller."""
        return ClientAddresses(self.trusted_proxies, ipv6_prefix=self.ipv6_prefix)


def _is_function_or_none(value: object) -> bool:
    return value is None or callable(value)


def _is_header_name(value: object) -> bool:
    return (
        isinstance(value, str)
        and value.isascii()
        and value.replace("-", "").replace("_", "").isalnum()
    )


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _are_texts(value: object) -> bool:
    # An iterator would be empty when it is read again.
    return (
        isinstance(value, Collection)
        and not isinstance(value, str | bytes)
        and all(isinstance(text, str) for text in value)
    )


def _answers_at_once(value: object) -> bool:
    return callable(value) and not inspect.iscoroutinefunction(value)


_VALID: Final[Mapping[str, tuple[Callable[[object], bool], str]]] = {
    "identify": (_is_function_or_none, "a function"),
    "identities": (_is_function_or_none, "a function"),
    "api_key_header": (lambda name: name is None or _is_header_name(name), "the name of a header"),
    "forwarded_header": (_is_header_name, "the name of a header"),
    "trusted_proxies": (_are_texts, "a sequence of strings, not one string"),
    "ipv6_prefix": (lambda bits: isinstance(bits, int), "a whole number"),
    "anonymous": (
        lambda value: value is None or (isinstance(value, Identity) and not value.is_empty),
        "an Identity that is not empty",
    ),
    "on_error": (lambda value: value in get_args(OnError), '"allow" or "raise"'),
    "on_unavailable": (
        lambda value: value is None or value in get_args(OnUnavailable),
        '"allow", "deny" or None',
    ),
    "observer": (
        lambda value: value is None or is_observer(value),
        "an Observer whose method decided is not a coroutine function",
    ),
    "endpoint": (
        lambda value: value is None or _answers_at_once(value),
        "a function that is not a coroutine",
    ),
    "unmatched": (lambda text: text is None or is_valid_endpoint(text), "a valid endpoint"),
    "with_method": (_is_bool, "True or False"),
    "exempt": (_are_texts, "a sequence of strings, not one string"),
    "cost": (is_valid_cost, VALID_COST),
    "headers": (_is_bool, "True or False"),
    "x_ratelimit": (_is_bool, "True or False"),
    "policy": (lambda name: isinstance(name, str), "a text"),
    "denied_text": (
        lambda text: text is None or isinstance(text, str) or _answers_at_once(text),
        "a string, or a function that is not a coroutine",
    ),
}
"""Validity and description of each option, except those that other constructors validate."""
