"""Client for `ratelimitd`. The generated messages are in the package `ratelimiter.v1`."""

from ratelimitd_client.channel import Tls, open_channel
from ratelimitd_client.client import RateLimiterClient

__all__ = ["RateLimiterClient", "Tls", "open_channel"]

__version__ = "0.1.0"
