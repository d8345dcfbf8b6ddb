"""The HTTP fields RateLimit-Policy and RateLimit of draft-ietf-httpapi-ratelimit-headers-11. Pure. See ADR 0030.

The partition key (``pk``) is never sent: an identifier may be a secret. The unit (``qu``) is its default, requests.
"""

from __future__ import annotations


def ratelimit_headers(
    policy: str,
    *,
    limit: int,
    window_s: int,
    remaining: int,
    allowed: bool,
    reset_s: int,
    retry_after_s: int,
) -> dict[str, str]:
    """Return both fields for one decision. ``policy`` is printable ASCII without quotes and backslashes.

    ``reset_s``: seconds until the whole limit is free again. The effective window ``t`` of a denial ends with
    ``Retry-After``, when the same check would pass; that of an allowed check when the whole limit is free again.
    """
    name = f'"{policy}"'
    return {
        "RateLimit-Policy": f"{name};q={limit};w={window_s}",
        "RateLimit": f"{name};r={remaining};t={reset_s if allowed else retry_after_s}",
    }
