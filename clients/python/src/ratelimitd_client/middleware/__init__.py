"""Middleware that checks the requests of an application. One module per framework; importing this one loads none.

The other modules are what they share. See docs/middleware.md of the repository.
"""

from ratelimitd_client.middleware.identity import Identity
from ratelimitd_client.middleware.marks import limited
from ratelimitd_client.middleware.options import Options

__all__ = ["Identity", "Options", "limited"]
