"""Middleware: an API is protected in three lines. One module for each framework; importing this one loads none of them.

What the modules share is in this package, and knows no framework. See docs/middleware.md of the repository.
"""

from ratelimitd_client.middleware.identity import Identity
from ratelimitd_client.middleware.limited import limited
from ratelimitd_client.middleware.options import Options

__all__ = ["Identity", "Options", "limited"]
