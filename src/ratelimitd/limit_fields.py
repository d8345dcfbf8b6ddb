"""The HTTP fields that tell a caller's own client of a limit, as all answers of this service spell them. Pure.

``RateLimit-Policy`` and ``RateLimit`` are those of draft-ietf-httpapi-ratelimit-headers-11: a rule is a policy, called
by its id. Who is limited is not told (``pk``), for an identifier may be a secret. See ADR 0030.
"""

from __future__ import annotations


def policy_fields(
    rule_id: str,
    *,
    limit: int,
    window_s: int,
    remaining: int,
    allowed: bool,
    reset_s: int,
    retry_after_s: int,
) -> dict[str, str]:
    """The fields of the rule that decided; ``reset_s`` is until the whole limit is free again.

    The effective window ``t`` of a denial ends when the same check would pass, and so not after ``Retry-After``;
    otherwise when the whole limit is free again, for whoever spends no more than ``r`` until then is not denied.
    """
    policy = f'"{rule_id}"'  # a UUID: nothing in it is to be escaped
    return {
        "RateLimit-Policy": f"{policy};q={limit};w={window_s}",
        "RateLimit": f"{policy};r={remaining};t={reset_s if allowed else retry_after_s}",
    }
