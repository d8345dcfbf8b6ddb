"""Client for `ratelimitd`. The generated messages are in the package `ratelimiter.v1`."""

from ratelimitd_client.async_client import AsyncRateLimiter, AsyncRateLimiterClient
from ratelimitd_client.async_hold import AsyncHold
from ratelimitd_client.async_node_client import AsyncNodeClient
from ratelimitd_client.check import Check
from ratelimitd_client.client import RateLimiter, RateLimiterClient
from ratelimitd_client.decision import Decision, LimitStatus, Reason
from ratelimitd_client.hold import Hold
from ratelimitd_client.node_client import NodeClient
from ratelimitd_client.observers import Counts, Observer
from ratelimitd_client.transport.grpc_channel import open_async_channel, open_channel
from ratelimitd_client.transport.tls import Tls

__all__ = [
    "AsyncHold",
    "AsyncNodeClient",
    "AsyncRateLimiter",
    "AsyncRateLimiterClient",
    "Check",
    "Counts",
    "Decision",
    "Hold",
    "LimitStatus",
    "NodeClient",
    "Observer",
    "RateLimiter",
    "RateLimiterClient",
    "Reason",
    "Tls",
    "open_async_channel",
    "open_channel",
]

__version__ = "0.1.0"
