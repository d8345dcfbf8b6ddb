"""What a client answers: a decision, the node's or its own, and the HTTP headers that tell of it.

Pure. Nothing here asks anybody.
"""

from __future__ import annotations

import enum
import math
from functools import lru_cache
from typing import Final, NamedTuple

from ratelimitd_wire.ratelimit_headers import NEWEST_REVISION, REVISIONS, ratelimit_headers
from ratelimiter.v1 import ratelimiter_pb2 as pb


class Reason(enum.StrEnum):
    """Why a decision is as it is. The first seven are the contract's, the rest are the client's own."""

    WITHIN_LIMIT = "WITHIN_LIMIT"
    LIMIT_EXCEEDED = "LIMIT_EXCEEDED"
    COST_EXCEEDS_LIMIT = "COST_EXCEEDS_LIMIT"
    NO_RULE = "NO_RULE"
    FAIL_OPEN_BREAKER = "FAIL_OPEN_BREAKER"
    FAIL_OPEN_ERROR = "FAIL_OPEN_ERROR"
    INVALID_REQUEST = "INVALID_REQUEST"
    OTHER = "OTHER"
    """A reason of a newer node: go by ``allowed``."""
    NO_ANSWER = "NO_ANSWER"
    """Allowed by the client: it asked, and had no usable answer in time."""
    NOT_ASKED = "NOT_ASKED"
    """Allowed by the client: earlier checks had no answer, so that it did not wait for one to this."""


_REASONS: Final = {
    number: Reason(name) for name, number in pb.Reason.items() if name in Reason.__members__
}

_OTHER: Final = Reason.OTHER

_FAIL_OPEN: Final = frozenset(
    {Reason.FAIL_OPEN_BREAKER, Reason.FAIL_OPEN_ERROR, Reason.NO_ANSWER, Reason.NOT_ASKED}
)

FAIL_OPEN_REMAINING: Final = 1
"""What a node says that is left when it lets a check through unchecked; the client says the same."""


KEPT_NAMES: Final = 64
"""How many names of policies are kept with their quotes: an application has one or a few."""


class Decision(NamedTuple):
    """The answer to one check; go by ``allowed``. The fields are the contract's."""

    allowed: bool
    remaining_tokens: int
    reset_time: int
    """Unix seconds at which the whole limit is free again if nothing more is spent; 0 where no rule decided."""
    retry_after_seconds: int
    reason: Reason
    limit: int = 0
    window_seconds: int = 0
    rule_id: str = ""
    error: str = ""
    """Of ``INVALID_REQUEST`` what is wrong, of ``NO_ANSWER`` what came instead: a gRPC status by its name."""
    decided_at_s: float = 0.0
    """When the answer came, by the caller's clock, in Unix seconds."""

    @property
    def fail_open(self) -> bool:
        """Whether it was let through without having been checked, by the node or by this client."""
        return self.allowed and self.reason in _FAIL_OPEN

    @property
    def reset_after_seconds(self) -> int:
        """From the answer on, seconds until the whole limit is free again: never more than the window."""
        # No clock of a caller agrees with the node's to the second; what no algorithm can answer is cut off.
        ahead_s = math.ceil(self.reset_time - self.decided_at_s)
        least_s = 0 if self.allowed else self.retry_after_seconds
        return max(least_s, min(ahead_s, self.window_seconds))

    def headers(
        self,
        *,
        x_ratelimit: bool = False,
        policy: str = "default",
        revision: str = NEWEST_REVISION,
    ) -> dict[str, str]:
        """Return the HTTP headers that tell the caller's own client of this decision.

        ``Retry-After`` on denials only; ``RateLimit`` and ``RateLimit-Policy`` of draft-ietf-httpapi-ratelimit-headers
        if a rule decided, under the name ``policy``, in the form of ``revision`` (``draft-11``, ``draft-7`` or
        ``draft-6``); with ``x_ratelimit`` also ``X-RateLimit-Limit``, ``-Remaining`` and ``-Reset``, the last in
        Unix seconds.

        Raises:
            ValueError: ``policy`` is not printable ASCII without quotes and backslashes; ``revision`` is unknown.
        """
        _demand_name(policy)
        if revision not in REVISIONS:
            message = f"the revision of the RateLimit headers is one of {', '.join(REVISIONS)}"
            raise ValueError(message)
        headers: dict[str, str] = {}
        if not self.allowed and self.retry_after_seconds > 0:
            headers["Retry-After"] = str(self.retry_after_seconds)
        if self.limit:
            headers |= ratelimit_headers(
                policy,
                limit=self.limit,
                window_s=self.window_seconds,
                remaining=self.remaining_tokens,
                allowed=self.allowed,
                reset_s=self.reset_after_seconds,
                retry_after_s=self.retry_after_seconds,
                revision=revision,
            )
            if x_ratelimit:
                headers["X-RateLimit-Limit"] = str(self.limit)
                headers["X-RateLimit-Remaining"] = str(self.remaining_tokens)
                headers["X-RateLimit-Reset"] = str(self.reset_time)
        return headers


@lru_cache(KEPT_NAMES)
def _demand_name(policy: str) -> None:
    """See that the name of a policy needs no escapes in a header.

    Raises:
        ValueError: it does.
    """
    if not (policy.isascii() and policy.isprintable()) or '"' in policy or "\\" in policy:
        message = "the name of a policy is printable ASCII without quotes and backslashes"
        raise ValueError(message)


def decision_of(answer: pb.RateLimitResponse, now_s: float) -> Decision:
    """The decision that a node's answer holds."""
    # As NamedTuple's own constructor does it, in two thirds of the time: it is made for every check.
    return tuple.__new__(
        Decision,
        (
            answer.allowed,
            answer.remaining_tokens,
            answer.reset_time,
            answer.retry_after_seconds,
            _REASONS.get(answer.reason, _OTHER),
            answer.limit,
            answer.window_seconds,
            answer.rule_id,
            answer.error,
            now_s,
        ),
    )


def let_through(reason: Reason, why: str, now_s: float) -> Decision:
    """The client's own answer, when there is no other."""
    return Decision(True, FAIL_OPEN_REMAINING, 0, 0, reason, error=why, decided_at_s=now_s)  # noqa: FBT003 - allowed


def refused(why: str, now_s: float) -> Decision:
    """What a node says in a batch of a check that it calls malformed, for one that was sent alone."""
    return Decision(False, 0, 0, 0, Reason.INVALID_REQUEST, error=why, decided_at_s=now_s)  # noqa: FBT003 - not allowed
