"""A standalone gRPC rate limiter."""

__version__ = "0.1.0"
