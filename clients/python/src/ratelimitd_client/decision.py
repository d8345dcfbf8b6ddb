"""Decisions, of the node or of the client itself, and the HTTP headers that describe them. Pure."""

from __future__ import annotations

import enum
import math
from functools import lru_cache
from typing import Final, Literal, NamedTuple, get_args

from ratelimitd_wire.ratelimit_headers import NEWEST_REVISION, REVISIONS, ratelimit_headers
from ratelimiter.v1 import ratelimiter_pb2 as pb


class Reason(enum.StrEnum):
    """The cause of a decision. The first nine are those of the contract, the others are the client's own."""

    WITHIN_LIMIT = "WITHIN_LIMIT"
    LIMIT_EXCEEDED = "LIMIT_EXCEEDED"
    COST_EXCEEDS_LIMIT = "COST_EXCEEDS_LIMIT"
    NO_RULE = "NO_RULE"
    FAIL_OPEN_BREAKER = "FAIL_OPEN_BREAKER"
    FAIL_OPEN_ERROR = "FAIL_OPEN_ERROR"
    INVALID_REQUEST = "INVALID_REQUEST"
    UNLIMITED = "UNLIMITED"
    """An identity is assigned to the plan ``unlimited``."""
    BLOCKED = "BLOCKED"
    """An identity is assigned to the plan ``blocked``."""
    OTHER = "OTHER"
    """A reason of a newer node; use ``allowed``."""
    NO_ANSWER = "NO_ANSWER"
    """Of the client, as ``on_unavailable`` says: no usable answer came in time."""
    NOT_ASKED = "NOT_ASKED"
    """Of the client, as ``on_unavailable`` says: it made no call, because its breaker is not closed."""


_REASONS: Final = {
    number: Reason(name) for name, number in pb.Reason.items() if name in Reason.__members__
}

_OTHER: Final = Reason.OTHER

_new: Final = tuple.__new__

OnUnavailable = Literal["allow", "deny"]
"""What the client answers to a check that no node has answered."""

_BY_CLIENT: Final = frozenset({Reason.NO_ANSWER, Reason.NOT_ASKED})
_UNCHECKED: Final = _BY_CLIENT | {Reason.FAIL_OPEN_BREAKER, Reason.FAIL_OPEN_ERROR}

FAIL_OPEN_REMAINING: Final = 1
"""``remaining_tokens`` of a check that was let through unchecked, by a node or by the client."""

UNAVAILABLE_RETRY_S: Final = 1
"""``retry_after_seconds`` of a check that the client denied: within it a service that returns is used again."""


POLICY_CACHE_SIZE: Final = 64
"""Cached names of policies; an application has one or a few."""


class LimitStatus(NamedTuple):
    """What one of several limits says about a check. The fields are those of the contract."""

    rule_id: str
    name: str
    identifier_type: str
    allowed: bool
    remaining_tokens: int
    reset_time: int
    retry_after_seconds: int
    limit: int
    window_seconds: int
    observed: bool
    """It only observes, and denies nothing."""
    plan: str = ""
    """The plan that the limit is of; empty for the rule's own limits."""
    reason: Reason = Reason.OTHER
    """``COST_EXCEEDS_LIMIT``: no delay makes the check pass."""


class Decision(NamedTuple):
    """The answer to one check; ``allowed`` decides. The fields are those of the contract."""

    allowed: bool
    remaining_tokens: int
    reset_time: int
    """Unix seconds at which the whole limit is free again if nothing more is spent; 0 if no rule decided."""
    retry_after_seconds: int
    reason: Reason
    limit: int = 0
    window_seconds: int = 0
    rule_id: str = ""
    error: str = ""
    """The cause of ``INVALID_REQUEST``; the result of the call for ``NO_ANSWER``: the name of a gRPC status;
    ``TOO_MANY_HOLDS`` where that is what ``LIMIT_EXCEEDED`` is about."""
    decided_at_s: float = 0.0
    """When the answer came, by the caller's clock, in Unix seconds."""
    limit_name: str = ""
    """The name of the limit that decided."""
    limits: tuple[LimitStatus, ...] = ()
    """All limits that were judged, the deciding one first; empty if that was the only one."""
    wait_ms: int = 0
    """How long the caller had to wait before it may proceed; the client has waited when it returns this."""
    plan: str = ""
    """The plan whose limit decided, ``unlimited`` or ``blocked``; empty for a rule's own limits."""

    @property
    def fail_open(self) -> bool:
        """Whether the check was let through unchecked, by the node or by the client."""
        return self.allowed and self.reason in _UNCHECKED

    @property
    def fail_closed(self) -> bool:
        """Whether the check was denied unchecked, by the node or by the client: no limit was exceeded."""
        return not self.allowed and self.reason in _UNCHECKED

    @property
    def reset_after_seconds(self) -> int:
        """Seconds from the answer until the whole limit is free again; at most the window."""
        # The caller's clock may differ from the node's: values that no algorithm returns are clamped.
        ahead_s = math.ceil(self.reset_time - self.decided_at_s)
        least_s = 0 if self.allowed else self.retry_after_seconds
        return max(least_s, min(ahead_s, self.window_seconds))

    def if_unavailable(self, on_unavailable: OnUnavailable) -> Decision:
        """Return what ``on_unavailable`` demands in place of a decision that the client made; a node's is unchanged."""
        if self.reason not in _BY_CLIENT:
            return self
        return unchecked(self.reason, self.error, self.decided_at_s, on_unavailable)

    def headers(
        self,
        *,
        x_ratelimit: bool = False,
        policy: str = "default",
        revision: str = NEWEST_REVISION,
    ) -> dict[str, str]:
        """Return the HTTP headers that describe the decision to the client of the application.

        ``Retry-After`` on denials only; ``RateLimit`` and ``RateLimit-Policy`` of draft-ietf-httpapi-ratelimit-headers
        if a rule decided, under the name ``policy``, in the form of ``revision`` (``draft-11``, ``draft-7`` or
        ``draft-6``); with ``x_ratelimit`` also ``X-RateLimit-Limit``, ``-Remaining`` and ``-Reset``, the last in
        Unix seconds.

        Raises:
            ValueError: ``policy`` is not printable ASCII without quotes and backslashes; ``revision`` is unknown.
        """
        _require_valid(policy, revision)
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


@lru_cache(POLICY_CACHE_SIZE)
def _require_valid(policy: str, revision: str) -> None:
    """Raise ValueError for a policy name that needs escapes in a header, or an unknown revision."""
    if not (policy.isascii() and policy.isprintable()) or '"' in policy or "\\" in policy:
        message = "the name of a policy is printable ASCII without quotes and backslashes"
        raise ValueError(message)
    if revision not in REVISIONS:
        message = f"the revision of the RateLimit headers is one of {', '.join(REVISIONS)}"
        raise ValueError(message)


MAX_LIMITS: Final = 512
"""Limits of a decision; further ones are left out, because each takes 10 to 20 µs."""

MAX_BATCH_LIMITS: Final = 16_384
"""Likewise of the decisions of a batch. Where its answer may have more, the shares are equal: 16 for each of 1,000
checks."""


def decision_of(
    answer: pb.RateLimitResponse, now_s: float, max_limits: int = MAX_LIMITS
) -> Decision:
    """Return the decision of a node's answer, with at most so many limits."""
    # As NamedTuple's own constructor, in two thirds of its time: runs for every check.
    return _new(
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
            answer.limit_name,
            tuple(map(_status_of, answer.limits[:max_limits])) if answer.limits else (),
            answer.wait_ms,
            answer.plan,
        ),
    )


def _status_of(status: pb.LimitStatus) -> LimitStatus:
    return LimitStatus(
        rule_id=status.rule_id,
        name=status.name,
        identifier_type=status.identifier_type,
        allowed=status.allowed,
        remaining_tokens=status.remaining_tokens,
        reset_time=status.reset_time,
        retry_after_seconds=status.retry_after_seconds,
        limit=status.limit,
        window_seconds=status.window_seconds,
        observed=status.enforcement == pb.OBSERVE,
        reason=_REASONS.get(status.reason, _OTHER),
        plan=status.plan,
    )


def require_on_unavailable(value: object) -> None:
    """Raise ValueError for what is no :data:`OnUnavailable`."""
    if value not in get_args(OnUnavailable):
        message = 'on_unavailable must be "allow" or "deny"'
        raise ValueError(message)


def unchecked(
    reason: Reason, why: str, now_s: float, on_unavailable: OnUnavailable = "allow"
) -> Decision:
    """Return the client's own decision on a check that no node has answered."""
    allowed = on_unavailable == "allow"
    remaining, retry_s = (FAIL_OPEN_REMAINING, 0) if allowed else (0, UNAVAILABLE_RETRY_S)
    return Decision(allowed, remaining, 0, retry_s, reason, error=why, decided_at_s=now_s)


TOO_MANY_HOLDS: Final = "TOO_MANY_HOLDS"
"""The node's reason of a hold beyond the most that may be in flight: its status does not tell it from overload."""


def too_many_holds(now_s: float) -> Decision:
    """Return the denial of a hold beyond the most that may be in flight; any of them may end within the delay."""
    return Decision(
        False,  # noqa: FBT003 - not allowed
        0,
        0,
        UNAVAILABLE_RETRY_S,
        Reason.LIMIT_EXCEEDED,
        error=TOO_MANY_HOLDS,
        decided_at_s=now_s,
    )


def refused(why: str, now_s: float) -> Decision:
    """Return the denial of a single check that the node rejected as malformed, as it answers in a batch."""
    return Decision(False, 0, 0, 0, Reason.INVALID_REQUEST, error=why, decided_at_s=now_s)  # noqa: FBT003 - not allowed
