"""``POST /v1/check``: a check whose answer can be forwarded: 429 when denied, with the fields HTTP has for limits."""

from __future__ import annotations

import math
from collections.abc import Callable

from starlette.responses import Response

from ratelimitd.limit_fields import policy_fields
from ratelimitd.web.connect import ConnectJson
from ratelimitd.web.protocols import Types
from ratelimiter.v1 import ratelimiter_pb2

DENIED = 429


class HttpCheck(ConnectJson):
    """Asks as Connect does. ``now_s`` is Unix time, the node's."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s

    async def answer(self, message: bytes, types: Types) -> Response:
        """200 or 429, by the decision in the body; also what was let through unchecked is 200."""
        response = await super().answer(message, types)
        decision = ratelimiter_pb2.RateLimitResponse.FromString(message)
        response.headers.update(limit_fields(decision, self._now_s()))
        if not decision.allowed:
            response.status_code = DENIED
        return response


def limit_fields(decision: ratelimiter_pb2.RateLimitResponse, now_s: float) -> dict[str, str]:
    """The fields for a decision: of the rule, if one decided, and when to try again, if it was denied."""
    fields = {}
    retry_after_s = decision.retry_after_seconds
    if not decision.allowed:
        fields["Retry-After"] = str(retry_after_s)
    if decision.rule_id:
        # The check may have been judged at its caller's time, which may be far from ours.
        reset_s = min(max(0, math.ceil(decision.reset_time - now_s)), decision.window_seconds)
        fields |= policy_fields(
            decision.rule_id,
            limit=decision.limit,
            window_s=decision.window_seconds,
            remaining=decision.remaining_tokens,
            allowed=decision.allowed,
            reset_s=reset_s,
            retry_after_s=retry_after_s,
        )
    return fields
