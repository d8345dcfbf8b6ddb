"""Opens the gRPC channel to a node: keepalive, message sizes and TLS in one place, for every kind of client.

Never sends a call and never reads a file: certificates come as PEM bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import grpc

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
    """
    arguments = list({**CHANNEL_OPTIONS, **(options or {})}.items())
    if tls is None:
        return grpc.insecure_channel(target, options=arguments)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=tls.ca, private_key=tls.key, certificate_chain=tls.cert
    )
    return grpc.secure_channel(target, credentials, options=arguments)
