"""Client for `ratelimitd`. The generated messages are in the package `ratelimiter.v1`."""

__version__ = "0.1.0"
