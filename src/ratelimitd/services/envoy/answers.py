"""What Envoy is answered: decisions on its descriptors, and the header fields that it adds to its response. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ratelimitd.limit_fields import policy_fields
from ratelimitd.model import US_PER_S, Decision
from ratelimitd.services.envoy.messages import Response

STANDARD_FIELDS: Final = "standard"
ALL_FIELDS: Final = "all"
NO_FIELDS: Final = "none"

_UNITS: Final = {
    1: Response.RateLimit.SECOND,
    60: Response.RateLimit.MINUTE,
    3_600: Response.RateLimit.HOUR,
    86_400: Response.RateLimit.DAY,
    604_800: Response.RateLimit.WEEK,
}
"""Windows that Envoy has a name for. It counts a month as no fixed number of seconds, so no window is one."""


def answer_of(decisions: Sequence[Decision], now_us: int, fields: str) -> bytes:
    """The answer to a request whose descriptors were decided so; ``fields`` says which header fields go with it.

    Statuses are in the order of the descriptors, and one that is denied denies the request.
    """
    response = Response()
    denied = any(not decision.allowed for decision in decisions)
    response.overall_code = Response.OVER_LIMIT if denied else Response.OK
    for decision in decisions:
        _write_status(response.statuses.add(), decision, now_us)
    for name, value in _fields(_deciding(decisions), now_us, fields).items():
        response.response_headers_to_add.add(key=name.encode(), value=value.encode())
    answer: bytes = response.SerializeToString()
    return answer


def _write_status(status: Any, decision: Decision, now_us: int) -> None:
    status.code = Response.OK if decision.allowed else Response.OVER_LIMIT
    rule = decision.rule
    if rule is not None:
        status.current_limit.requests_per_unit = rule.limit
        status.current_limit.unit = _UNITS.get(rule.window_seconds, Response.RateLimit.UNKNOWN)
        status.current_limit.name = rule.id.encode()
        status.limit_remaining = decision.remaining
        status.duration_until_reset.seconds = _reset_s(decision, now_us)


def _deciding(decisions: Sequence[Decision]) -> Decision:
    """The decision that the caller is to heed: the denial that lasts longest, else the limit with the least left."""
    return max(
        decisions,
        key=lambda decision: (
            not decision.allowed,
            decision.retry_after,
            decision.rule is not None,
            -decision.remaining,
        ),
    )


def _fields(decision: Decision, now_us: int, fields: str) -> dict[str, str]:
    found: dict[str, str] = {}
    if fields == NO_FIELDS:
        return found
    if not decision.allowed:
        found["Retry-After"] = str(decision.retry_after)
    rule = decision.rule
    if rule is None:
        return found
    reset_s = _reset_s(decision, now_us)
    found |= policy_fields(
        rule.id,
        limit=rule.limit,
        window_s=rule.window_seconds,
        remaining=decision.remaining,
        allowed=decision.allowed,
        reset_s=reset_s,
        retry_after_s=decision.retry_after,
    )
    if fields == ALL_FIELDS:
        found["X-RateLimit-Limit"] = str(rule.limit)
        found["X-RateLimit-Remaining"] = str(decision.remaining)
        found["X-RateLimit-Reset"] = str(reset_s)
    return found


def _reset_s(decision: Decision, now_us: int) -> int:
    """Seconds until the whole limit is free again."""
    return max(0, -(-(decision.reset_time * US_PER_S - now_us) // US_PER_S))
