"""gRPC channels to a node: keepalive, message sizes, TLS and the token, for every kind of client."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, Self, TypeVar

import grpc
import grpc.aio

from ratelimitd_client.check import require_text, valid_timeout_s
from ratelimitd_client.transport.targets import require_target
from ratelimitd_client.transport.tls import Tls, bytes_of, require_tls
from ratelimiter.v1 import ratelimiter_pb2_grpc as stubs

KEEPALIVE_MS: Final = 10_000
"""Ping interval, with or without calls. Nodes accept it; another gRPC server may close such a connection."""

KEEPALIVE_TIMEOUT_MS: Final = 5_000
"""Time without an answer to a ping after which the connection counts as dead, and the next call opens another."""

MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
"""Largest message in either direction; the node has the same limit."""

CHANNEL_OPTIONS: Final[Mapping[str, int]] = {
    "grpc.keepalive_time_ms": KEEPALIVE_MS,
    "grpc.keepalive_timeout_ms": KEEPALIVE_TIMEOUT_MS,
    "grpc.keepalive_permit_without_calls": 1,
    # By default gRPC stops after two pings without data, and the next check would find the dead connection.
    "grpc.http2.max_pings_without_data": 0,
    "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
    "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
    # A node is an internal address: the proxy that `http_proxy` names must not see its traffic.
    "grpc.enable_http_proxy": 0,
    # gRPC's default is two minutes, too long after a node has come back.
    "grpc.max_reconnect_backoff_ms": 5_000,
}

CHECKING_OPTIONS: Final[Mapping[str, int | str]] = {
    # Uses the addresses of a name in turn, without those that are down.
    "grpc.lb_policy_name": "round_robin",
    # Attempts to connect are repeated and given up so soon that a node that comes back is found within a second.
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 500,
    "grpc.min_reconnect_backoff_ms": 1_000,
    # By default the channels of a process share connections, also with those that its parent opened before a fork.
    "grpc.use_local_subchannel_pool": 1,
}
"""Added to ``CHANNEL_OPTIONS`` by the clients that check requests."""

DEFAULT_NODE_TIMEOUT_S: Final = 1.0
"""Default deadline of a node client's calls: enough to connect first."""

Metadata = tuple[tuple[str, str], ...]

ChannelT = TypeVar("ChannelT", grpc.Channel, grpc.aio.Channel)

_BEARER_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*")
"""The characters of RFC 6750 section 2.1."""


def open_channel(
    target: str, *, tls: Tls | None = None, options: Mapping[str, int | str] | None = None
) -> grpc.Channel:
    """Return a channel to ``target``; it connects with its first call.

    Args:
        target: ``host:port`` or any gRPC name, such as ``dns:///limiter.internal:9090``.
        tls: ``None`` speaks plaintext.
        options: gRPC channel options, added to ``CHANNEL_OPTIONS`` or replacing them.

    Raises:
        ValueError, TypeError: ``target`` or ``tls`` is not valid.
    """
    opened: grpc.Channel = _open(grpc, target, tls, options)
    return opened


def open_async_channel(
    target: str, *, tls: Tls | None = None, options: Mapping[str, int | str] | None = None
) -> grpc.aio.Channel:
    """As :func:`open_channel`, for the running event loop."""
    opened: grpc.aio.Channel = _open(grpc.aio, target, tls, options)
    return opened


def _open(
    library: Any, target: str, tls: Tls | None, options: Mapping[str, int | str] | None
) -> Any:
    """Return a channel of ``grpc`` or ``grpc.aio``."""
    require_target(target)
    require_tls(tls)
    arguments = [*{**CHANNEL_OPTIONS, **(options or {})}.items()]
    if tls is None:
        return library.insecure_channel(target, options=arguments)
    read = tls.read()
    parts = map(bytes_of, (read.ca, read.key, read.cert))
    credentials = grpc.ssl_channel_credentials(*parts)
    return library.secure_channel(target, credentials, options=arguments)


class RenewedChannel(Generic[ChannelT]):
    """A channel that is opened again when the files of its TLS material have changed: gRPC does not read them.

    Attributes:
        channel: the open one.
    """

    def __init__(self, open_with: Callable[[Tls | None], ChannelT], tls: Tls | None) -> None:
        self._open_with: Callable[[Tls | None], ChannelT] = open_with
        self._tls = tls
        self._read = None if tls is None else tls.read()
        self.channel: ChannelT = open_with(self._read)

    def renew(self) -> bool:
        """Return whether the channel was opened again; gRPC closes the former one after its calls in flight."""
        if self._tls is None or (read := self._tls.read()) is self._read:
            return False
        self._read, self.channel = read, self._open_with(read)
        return True


def authorization(token: str | None) -> Metadata:
    """Return the metadata of every call.

    Raises:
        ValueError: the token is not valid in an HTTP header. The message does not contain it.
        TypeError: it is not text.
    """
    if not token:
        return ()
    require_text("token", token)
    if _BEARER_TOKEN.fullmatch(token) is None:
        message = "a bearer token is made of letters, digits and -._~+/, with = at the end"
        raise ValueError(message)
    return (("authorization", f"Bearer {token}"),)


class NodeChannel:
    """A channel with the stubs of a node, and what every call sends. Threads may share it."""

    def __init__(
        self,
        target: str = "127.0.0.1:9090",
        *,
        tls: Tls | None = None,
        token: str | None = None,
        timeout_s: float = DEFAULT_NODE_TIMEOUT_S,
        channel: grpc.Channel | None = None,
    ) -> None:
        """Open a channel, which connects with its first call.

        Args:
            target: ``host:port`` of the node, or any gRPC name.
            tls: see :class:`Tls`; ``None`` sends plaintext, the token included.
            token: bearer token of a role, sent with every call.
            timeout_s: default deadline of a call in seconds.
            channel: an open channel to use instead; its owner closes it.

        Raises:
            ValueError, TypeError: an argument is not valid.
        """
        self._metadata = authorization(token)
        self._timeout_s = valid_timeout_s(timeout_s)
        self._owns_channel = channel is None
        self._channel = open_channel(target, tls=tls) if channel is None else channel
        self._checks = stubs.RateLimiterStub(self._channel)
        self._rules = stubs.RateLimiterConfigStub(self._channel)
        self._plans = stubs.RateLimiterPlansStub(self._channel)
        self._holds = stubs.RateLimiterHoldsStub(self._channel)
        self._node = stubs.RateLimiterHealthStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel, unless the caller supplied it."""
        if self._owns_channel:
            self._channel.close()


class AsyncNodeChannel:
    """As :class:`NodeChannel`, over a channel that the caller opens and closes."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        token: str | None = None,
        timeout_s: float = DEFAULT_NODE_TIMEOUT_S,
    ) -> None:
        """Use an open channel.

        Args:
            channel: see :func:`open_async_channel`.
            token: bearer token of a role, sent with every call.
            timeout_s: default deadline of a call in seconds.

        Raises:
            ValueError, TypeError: an argument is not valid.
        """
        self._metadata = authorization(token)
        self._timeout_s = valid_timeout_s(timeout_s)
        self._checks = stubs.RateLimiterStub(channel)
        self._rules = stubs.RateLimiterConfigStub(channel)
        self._plans = stubs.RateLimiterPlansStub(channel)
        self._holds = stubs.RateLimiterHoldsStub(channel)
        self._node = stubs.RateLimiterHealthStub(channel)
