"""The values that travel between the layers: rules, checks and decisions.

Never does I/O and never reads a clock. Every type here is immutable, so a value that was handed out can be shared
between a check in flight and a rule book that is being replaced.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

INT32_MAX: Final = 2**31 - 1
"""Largest value of the contract's int32 fields: limit, window_seconds, tokens_requested, retry_after_seconds."""

MAX_IDENTITIES: Final = 8
"""Identities of one check: each may be one more bucket to look up, and so may their combinations."""

MAX_TIME_US: Final = 2**53 - 1
"""Latest instant that is handled, in µs since the Unix epoch (the year 2255): exact in a double, for the Lua twins."""

US_PER_S: Final = 1_000_000
US_PER_MS: Final = 1_000

MAX_WAIT_MS: Final = 60_000
"""Longest time that a check may be allowed ahead: as long may a bucket's last spend be in the future."""

ALLOWED: Final = True
DENIED: Final = False

GLOBAL_ENDPOINT: Final = "*"
"""The endpoint of a rule that is the default for every endpoint without a rule of its own."""

EVERY_ENDPOINT: Final = "**"
"""The endpoint of a rule with one bucket over all endpoints, which is judged beside their own rules."""

EVERYBODY: Final = "all"
"""The identifier type of a rule with one bucket for all callers."""

DEFAULT_LIMIT: Final = "default"
"""The name of a rule's first limit, if it was given none."""

NO_RULE_REMAINING: Final = INT32_MAX
"""What ``remaining`` says when no rule applies (ADR 0001)."""


UNLIMITED_PLAN: Final = "unlimited"
"""The plan whose identities are allowed everything, and charged nothing."""

BLOCKED_PLAN: Final = "blocked"
"""The plan whose identities are denied every check."""

RESERVED_PLANS: Final = (UNLIMITED_PLAN, BLOCKED_PLAN)
"""Plans that no rule names."""


class Algorithm(enum.StrEnum):
    """The algorithms of the contract, by the name they have on the wire."""

    TOKEN_BUCKET = "token_bucket"
    SLIDING_WINDOW = "sliding_window"
    FIXED_WINDOW = "fixed_window"
    CONCURRENCY = "concurrency"


class Enforcement(enum.StrEnum):
    """What a limit does with a check that it denies: deny it, or only count it."""

    ENFORCE = "enforce"
    OBSERVE = "observe"


class Period(enum.StrEnum):
    """What a calendar window is, by the lower case of its name on the wire. A week begins on Monday."""

    DAY = "day"
    WEEK = "week"
    MONTH = "month"


NOMINAL_SECONDS: Final[Mapping[Period, int]] = MappingProxyType(
    {Period.DAY: 86_400, Period.WEEK: 604_800, Period.MONTH: 2_592_000}
)
"""What ``window_seconds`` says of a calendar window, whose length differs."""


class Calendar(NamedTuple):
    """The windows of a limit: the days, weeks or months of an IANA time zone.

    A month begins on its ``anchor_day``, 1 to 31, or on its last day if it is too short.
    """

    period: Period
    time_zone: str
    anchor_day: int = 1


class IdentifierType(enum.StrEnum):
    """The identifier types of the contract, by the name they have on the wire. A node may declare more."""

    USER = "user"
    IP = "ip"
    API_KEY = "api_key"


TYPE_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")
"""An identifier type that a node may declare."""


def types_within(identifier_type: str) -> tuple[str, ...]:
    """Return the types of the identities that a bucket of a type is for: several of a product, none of ``all``."""
    return () if identifier_type == EVERYBODY else tuple(identifier_type.split("+"))


class Reason(enum.IntEnum):
    """Why a check was answered as it was; the numbers are those of the contract's ``Reason``."""

    WITHIN_LIMIT = 1
    LIMIT_EXCEEDED = 2
    COST_EXCEEDS_LIMIT = 3
    NO_RULE = 4
    FAIL_OPEN_BREAKER = 5
    FAIL_OPEN_ERROR = 6
    INVALID_REQUEST = 7
    UNLIMITED = 8
    BLOCKED = 9


class Match(enum.IntEnum):
    """Whether a rule judges a check, or why it does not; the numbers are those of the contract's ``Match``."""

    JUDGES = 1
    DISABLED = 2
    OVERRIDDEN = 3
    NOT_NAMED = 4
    PASSED_OVER = 5


# Finding a member in its class costs 100 ns; a check needs one of these.
WITHIN_LIMIT: Final = Reason.WITHIN_LIMIT
LIMIT_EXCEEDED: Final = Reason.LIMIT_EXCEEDED
COST_EXCEEDS_LIMIT: Final = Reason.COST_EXCEEDS_LIMIT
CONCURRENCY: Final = Algorithm.CONCURRENCY


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One validated limit: so many tokens per window, by one algorithm.

    ``limit`` is in tokens per window, ``window_seconds`` in seconds, both 1 to 2^31−1. ``name`` is unique in its rule.
    A limit that only observes has its own bucket, which is charged as if it enforced, and denies nothing.
    ``revision`` is the book's revision at which its rule was last changed. ``burst`` is the capacity of a token bucket
    in tokens, 0 = ``limit``. The windows of a fixed window with a ``calendar`` are that one's, and ``window_seconds``
    says their nominal length.

    Derived are ``window_us``, ``capacity``, the most tokens at once, and ``full_after_s``, the seconds after which a
    bucket that is not used equals a fresh one.
    """

    limit: int
    window_seconds: int
    algorithm: Algorithm
    name: str = DEFAULT_LIMIT
    enforcement: Enforcement = Enforcement.ENFORCE
    revision: int = 0
    burst: int = 0
    calendar: Calendar | None = None
    window_us: int = field(init=False, repr=False, compare=False)
    capacity: int = field(init=False, repr=False, compare=False)
    full_after_s: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        full_after_s = self.window_seconds
        if self.burst:
            full_after_s = -(-self.burst * full_after_s // self.limit)
        object.__setattr__(self, "window_us", self.window_seconds * US_PER_S)
        object.__setattr__(self, "capacity", self.burst or self.limit)
        object.__setattr__(self, "full_after_s", full_after_s)


class Plan(NamedTuple):
    """Limits that take the place of a rule's own for the identities assigned to the plan of this name."""

    name: str
    limits: tuple[Limit, ...]


@dataclass(frozen=True, slots=True)
class Rule(Limit):
    """One validated rule: what holds for an endpoint and an identifier type.

    ``identifier_type`` is one that requests name, a product such as ``ip+user``, in byte order, or ``all``. A rule is
    its first limit; ``more`` are the others. ``plans`` are in the order of their names. ``etag`` changes with every
    edit.
    """

    id: str
    endpoint: str
    identifier_type: str
    _: KW_ONLY
    enabled: bool = True
    etag: str = ""
    more: tuple[Limit, ...] = ()
    plans: tuple[Plan, ...] = ()

    @property
    def limits(self) -> tuple[Limit, ...]:
        """All limits, in the rule's order, without those of plans."""
        return (self, *self.more)

    @property
    def limits_of_all_plans(self) -> tuple[Limit, ...]:
        """All limits, then those of each plan."""
        return (*self.limits, *(limit for plan in self.plans for limit in plan.limits))

    def limits_of(self, plan: str) -> tuple[Limit, ...]:
        """Return the limits of a plan; the rule's own if it does not name the plan."""
        return next((one.limits for one in self.plans if one.name == plan), self.limits)

    def plan_among(self, assigned: Mapping[str, str]) -> str:
        """Return the plan whose limits judge a check; empty for the rule's own.

        ``assigned`` has the plans of the check's identities, by their types. Of a product it is the first plan, in the
        order of the types, that the rule names or that is ``unlimited``.
        """
        for kind in types_within(self.identifier_type) if assigned else ():
            plan = assigned.get(kind)
            if plan == UNLIMITED_PLAN or any(one.name == plan for one in self.plans):
                return plan or ""
        return ""

    @property
    def has_list(self) -> bool:
        """Whether the rule is more than its first limit, without a name, a burst or a calendar, and enforced."""
        return (
            bool(self.more)
            or self.burst > 0
            or self.calendar is not None
            or self.name != DEFAULT_LIMIT
            or self.enforcement is not Enforcement.ENFORCE
        )


Identity: TypeAlias = tuple[str, bytes]
"""An identifier type that requests name, and an identifier."""


class Check(NamedTuple):
    """One validated question.

    ``identifier`` is the canonical UTF-8 text (1 to 256 bytes; an ``ip`` in the form of :mod:`ipaddress`); ``cost`` is
    at least 1 token; ``timestamp`` is the caller's, as sent (0 = none; its unit follows from its magnitude, ADR 0005);
    ``peek`` asks without spending. ``also`` are further identities that the request counts for, each type once.
    ``max_wait_ms`` is how long the caller would wait to be allowed, at most ``MAX_WAIT_MS``.
    """

    identifier: bytes
    identifier_type: str
    endpoint: str
    cost: int = 1
    timestamp: int = 0
    peek: bool = False
    also: tuple[Identity, ...] = ()
    max_wait_ms: int = 0


Outcome: TypeAlias = tuple[bool, int, int, int, Reason, tuple[int, ...] | bytes | None]
"""What an algorithm says about one check: (allowed, remaining, reset_time, retry_after, reason, state).

``remaining`` is in whole tokens; ``reset_time`` in Unix seconds, rounded up; ``retry_after`` in seconds from the
check's own timestamp, at most ``INT32_MAX``. ``state`` is what the bucket holds from now on: after a denial the
very object that was given. A bare tuple, because that is made and taken apart in 0.05 µs, and a NamedTuple in 0.3.
"""


class LimitStatus(NamedTuple):
    """What one of several limits says about a check. Units as in :data:`Outcome`."""

    allowed: bool
    remaining: int
    reset_time: int
    retry_after: int
    reason: Reason
    rule: Rule
    limit: Limit | None
    plan: str = ""
    """That the limit is of; ``unlimited`` without a limit: the rule was passed over."""


class LookedAt(NamedTuple):
    """A rule that was looked at for a check, and what its limits say if it judges, those of ``plan`` or its own."""

    rule: Rule
    match: Match
    limits: tuple[LimitStatus, ...] = ()
    plan: str = ""


class NearRule(NamedTuple):
    """A rule whose endpoint is nearly that of a check without a rule; ``why`` says in words what differs."""

    rule: Rule
    why: str


class InFlight(NamedTuple):
    """Holds in flight on one limit, and the tokens that they hold."""

    rule: Rule
    name: str
    holds: int
    tokens: int


class AssignedPlan(NamedTuple):
    """The plan that an identity of a check is assigned to, until ``expire_time`` in Unix seconds, 0 = for good."""

    identifier_type: str
    plan: str
    expire_time: int


class Decision(NamedTuple):
    """The answer to one check, with the rule and the limit that decided, ``None`` when none did.

    ``limits`` are all that were judged, the deciding one first; empty when that was the only one. Units as in
    :data:`Outcome`. After ``wait_ms`` the caller may proceed; the other fields are as of then.
    """

    allowed: bool
    remaining: int
    reset_time: int
    retry_after: int
    reason: Reason
    rule: Rule | None = None
    limit: Limit | None = None
    limits: tuple[LimitStatus, ...] = ()
    wait_ms: int = 0
    plan: str = ""
    """That the limit is of, ``unlimited`` or ``blocked``; empty for the rule's own limits."""


class Explained(NamedTuple):
    """What a check would be answered, the rules that were looked at, and the plans of its identities.

    ``nearest`` are rules that the check may have meant, if its endpoint has none of its own.
    """

    decision: Decision
    looked_at: tuple[LookedAt, ...]
    plans: tuple[AssignedPlan, ...]
    nearest: tuple[NearRule, ...] = ()
