"""HTTP fields of draft-ietf-httpapi-ratelimit-headers, in three of its revisions. Pure. See ADR 0030.

The partition key (``pk``) is never sent: an identifier may be a secret. The unit (``qu``) is its default, requests.
"""

from __future__ import annotations

from typing import Final

NEWEST_REVISION: Final = "draft-11"
REVISIONS: Final = (NEWEST_REVISION, "draft-7", "draft-6")
"""Revisions 8 to 11 share one form; revision 7 has one field without a name, revision 6 has three fields."""


def ratelimit_headers(
    policy: str,
    *,
    limit: int,
    window_s: int,
    remaining: int,
    allowed: bool,
    reset_s: int,
    retry_after_s: int,
    revision: str = NEWEST_REVISION,
) -> dict[str, str]:
    """Return the fields for one decision. ``policy`` is printable ASCII without quotes and backslashes.

    ``reset_s`` is the number of seconds until the whole limit is free again. The effective window ``t`` (``reset`` in
    older revisions) of a denial ends with ``Retry-After``, when the same check would pass; that of an allowed check
    when the whole limit is free again. ``revision`` is one of ``REVISIONS``.
    """
    ends_s = reset_s if allowed else retry_after_s
    if revision == "draft-6":
        return {
            "RateLimit-Policy": f"{limit};w={window_s}",
            "RateLimit-Limit": str(limit),
            "RateLimit-Remaining": str(remaining),
            "RateLimit-Reset": str(ends_s),
        }
    if revision == "draft-7":
        return {
            "RateLimit-Policy": f"{limit};w={window_s}",
            "RateLimit": f"limit={limit}, remaining={remaining}, reset={ends_s}",
        }
    return {
        "RateLimit-Policy": f'"{policy}";q={limit};w={window_s}',
        "RateLimit": f'"{policy}";r={remaining};t={ends_s}',
    }
