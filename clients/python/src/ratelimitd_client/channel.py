"""Opens the gRPC channel to a node: keepalive, message sizes, TLS and the token in one place, for every kind of client.

Never sends a call and never reads a file: certificates come as PEM bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import grpc
import grpc.aio

from ratelimitd_client.targets import require_target

KEEPALIVE_MS: Final = 10_000
"""Ping interval, with or without calls. Nodes welcome it; another gRPC server may close such a connection."""

KEEPALIVE_TIMEOUT_MS: Final = 5_000
"""How long an unanswered ping may take before the connection counts as dead, so that the next call opens a new one."""

MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
"""Largest message in either direction; the node has the same limit."""

CHANNEL_OPTIONS: Final[Mapping[str, int]] = {
    "grpc.keepalive_time_ms": KEEPALIVE_MS,
    "grpc.keepalive_timeout_ms": KEEPALIVE_TIMEOUT_MS,
    "grpc.keepalive_permit_without_calls": 1,
    # Otherwise gRPC stops pinging after two pings without data, and a dead idle connection is found by the next check.
    "grpc.http2.max_pings_without_data": 0,
    "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
    "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
    # A node is an internal address: the proxy that `http_proxy` names for the way out must not see its traffic.
    "grpc.enable_http_proxy": 0,
    # A caller whose node comes back must not sit out gRPC's default back-off of up to two minutes.
    "grpc.max_reconnect_backoff_ms": 5_000,
}

CHECKING_OPTIONS: Final[Mapping[str, int | str]] = {
    # All nodes behind one DNS name are asked in turn, and one that is down is passed over.
    "grpc.lb_policy_name": "round_robin",
    # A node that comes back is found within a second: connecting is begun again that soon, and given up that soon.
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 500,
    "grpc.min_reconnect_backoff_ms": 1_000,
    # Connections are shared among the channels of a process, also with those that its parent had before it forked.
    "grpc.use_local_subchannel_pool": 1,
}
"""Of the clients that are asked before requests are served, on top of ``CHANNEL_OPTIONS``."""

Metadata = tuple[tuple[str, str], ...]

_BEARER_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*")
"""The characters of RFC 6750 section 2.1."""


@dataclass(frozen=True, slots=True, repr=False)
class Tls:
    """TLS material, each part the bytes of a PEM file.

    ``ca`` verifies the node (``None``: the roots that gRPC ships); ``cert`` and ``key`` are this client's own, for
    mTLS, given together or not at all.

    Raises:
        ValueError: one of ``cert`` and ``key`` is missing.
    """

    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            message = "cert and key are given together or not at all"
            raise ValueError(message)


def open_channel(
    target: str, *, tls: Tls | None = None, options: Mapping[str, int | str] | None = None
) -> grpc.Channel:
    """Return a channel to ``target``; it connects with its first call.

    Args:
        target: ``host:port`` or any gRPC name, such as ``dns:///limiter.internal:9090``.
        tls: ``None`` speaks plaintext.
        options: gRPC channel options that are added to ``CHANNEL_OPTIONS`` or replace them.

    Raises:
        ValueError, TypeError: no node has this target.
    """
    require_target(target)
    arguments = _arguments(options)
    if tls is None:
        return grpc.insecure_channel(target, options=arguments)
    return grpc.secure_channel(target, _credentials(tls), options=arguments)


def open_async_channel(
    target: str, *, tls: Tls | None = None, options: Mapping[str, int | str] | None = None
) -> grpc.aio.Channel:
    """As :func:`open_channel`, for the event loop that is running."""
    require_target(target)
    arguments = _arguments(options)
    if tls is None:
        return grpc.aio.insecure_channel(target, options=arguments)
    return grpc.aio.secure_channel(target, _credentials(tls), options=arguments)


def authorization(token: str | None) -> Metadata:
    """The metadata of every call.

    Raises:
        ValueError: no HTTP header can carry the token; its text is not in the message.
    """
    if not token:
        return ()
    if _BEARER_TOKEN.fullmatch(token) is None:
        message = "a bearer token is made of letters, digits and -._~+/, with = at the end"
        raise ValueError(message)
    return (("authorization", f"Bearer {token}"),)


def _arguments(options: Mapping[str, int | str] | None) -> list[tuple[str, int | str]]:
    return list({**CHANNEL_OPTIONS, **(options or {})}.items())


def _credentials(tls: Tls) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        root_certificates=tls.ca, private_key=tls.key, certificate_chain=tls.cert
    )
