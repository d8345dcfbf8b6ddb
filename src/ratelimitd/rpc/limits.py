"""What one node grants its callers, whatever the transport; each bound says why. Holds, never enforces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
"""The specification's bound on messages, both ways."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportLimits:
    """The bounds of one server. Times in the unit of the name."""

    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_concurrent_rpcs: int = 1_000
    """Unary calls in progress; more are answered RESOURCE_EXHAUSTED."""
    max_streams: int = 1_000
    """Calls that last (health watches, reflection), counted apart: idle watchers must not use up the room of checks."""
    max_streams_per_connection: int = 256
    """Unlimited by default, which makes a flood of resets on one connection cost ten times the CPU (measured)."""
    min_ping_interval_ms: int = 5_000
    """Callers ping every 10 s, with or without calls; half of that forgives jitter. The default, 5 min, closes them."""
    keepalive_interval_ms: int = 60_000
    keepalive_timeout_ms: int = 20_000
    """Finds callers that vanished without a word."""
    stall_timeout_ms: int = 20_000
    """How long a peer may owe what everything waits for: its preface, the rest of a frame or of a header block, room
    for answers."""
    request_timeout_ms: int = 60_000
    """From the head of a call with one message to its end: the largest message at 70 KB/s. Withholding the rest
    of many requests must not keep others from the room for them."""
    max_connection_age_ms: int = 3_600_000
    """Behind a balancer of connections, old ones must end for a new node to get its share. grpc adds ±10 %."""
    max_connection_age_grace_ms: int = 60_000
    max_connections: int = 10_000
    """At about 10 KiB each while idle. More are closed as soon as they come."""
    max_request_bytes_per_connection: int = 16 * 1024 * 1024
    """Messages that wait for their rest, or for the end of their call: four of the largest."""
    max_request_bytes: int = 256 * 1024 * 1024
    """The same over all connections. Flow control bounds what is unread; these two bound what was read too early."""
    max_open_requests: int = 10_000
    """Over all connections, those that still arrive among them: each may hold a header list of 16 KiB, and a
    connection's share times the number of connections would be 40 GB."""
    max_unread_bytes: int = 256 * 1024 * 1024
    """Answers that peers do not take, over all connections: above it, connections that hold more than their share end.
    What one may hold times the number of connections would be 40 GB, too."""
