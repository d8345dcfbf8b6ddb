"""What a request is counted under: a valid endpoint, of which there are only so many.

Pure. A node has a bucket for each endpoint of an identity. So nothing that a caller can make up – a path, a method of
its own – becomes one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from ratelimitd_client.check import MAX_ENDPOINT_CHARS, Check

REMEMBERED: Final = 1_024
"""How many endpoints are remembered as valid or not."""

OTHER_METHOD: Final = "OTHER"

METHODS: Final = {
    # A HEAD request is answered by what answers GET.
    "HEAD": "GET",
    **{
        name: name
        for name in (
            "GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "QUERY", "TRACE", "CONNECT",
        )
    },
}  # fmt: skip
"""The methods that a standard knows, and what each is counted as."""


def with_method(method: str, route: str) -> str:
    """The endpoint of one method of a route; methods that no standard knows are one."""
    return f"{METHODS.get(method, OTHER_METHOD)} {route}"


def is_valid_endpoint(text: object) -> bool:
    """Whether a check can have this endpoint."""
    return isinstance(text, str) and len(text) <= MAX_ENDPOINT_CHARS and _is_valid(text)


@lru_cache(REMEMBERED)
def _is_valid(text: str) -> bool:
    try:
        Check("-", "user", text)
    except ValueError:
        return False
    return True
