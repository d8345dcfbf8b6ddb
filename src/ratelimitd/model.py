"""The values that the layers exchange: rules, checks and decisions.

Does no I/O and reads no clock. Every type is immutable, so a check in flight may keep values of a rule book that is
being replaced.
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
"""Identities of one check: each identity and each combination may add a bucket to look up."""

MAX_TIME_US: Final = 2**53 - 1
"""Latest supported time, in µs since the Unix epoch (the year 2255); exact in a double, as the Lua scripts require."""

US_PER_S: Final = 1_000_000
US_PER_MS: Final = 1_000

MAX_WAIT_MS: Final = 60_000
"""Longest wait after which a check may be allowed to proceed; a bucket's last spend may be that far in the future."""

ALLOWED: Final = True
DENIED: Final = False

GLOBAL_ENDPOINT: Final = "*"
"""The endpoint of a rule that is the default for every endpoint without a rule of its own."""

EVERY_ENDPOINT: Final = "**"
"""The endpoint of a rule with one bucket for all endpoints; it applies in addition to their own rules."""

EVERYBODY: Final = "all"
"""The identifier type of a rule with one bucket for all callers."""

DEFAULT_LIMIT: Final = "default"
"""The name of a rule's first limit unless it is given another."""

NO_RULE_REMAINING: Final = INT32_MAX
"""``remaining`` when no rule applies (ADR 0001)."""


UNLIMITED_PLAN: Final = "unlimited"
"""The plan whose identities are not limited and not charged."""

BLOCKED_PLAN: Final = "blocked"
"""The plan whose identities are denied every check."""

RESERVED_PLANS: Final = (UNLIMITED_PLAN, BLOCKED_PLAN)
"""Plan names that no rule may use."""


class Algorithm(enum.StrEnum):
    """The algorithms of the contract, by the name they have on the wire."""

    TOKEN_BUCKET = "token_bucket"
    SLIDING_WINDOW = "sliding_window"
    FIXED_WINDOW = "fixed_window"
    CONCURRENCY = "concurrency"


class Enforcement(enum.StrEnum):
    """Whether a limit denies the checks that exceed it or only counts them."""

    ENFORCE = "enforce"
    OBSERVE = "observe"


class Period(enum.StrEnum):
    """The length of a calendar window: its wire name in lower case. A week begins on Monday."""

    DAY = "day"
    WEEK = "week"
    MONTH = "month"


NOMINAL_SECONDS: Final[Mapping[Period, int]] = MappingProxyType(
    {Period.DAY: 86_400, Period.WEEK: 604_800, Period.MONTH: 2_592_000}
)
"""``window_seconds`` of a calendar window, whose real length varies."""


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
"""The form of an identifier type that a node may declare."""


def types_within(identifier_type: str) -> tuple[str, ...]:
    """Return the types of the identities that share a bucket: several for a product, none for ``all``."""
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
    """Whether a rule applies to a check, or why it does not; the numbers are those of the contract's ``Match``."""

    JUDGES = 1
    DISABLED = 2
    OVERRIDDEN = 3
    NOT_NAMED = 4
    PASSED_OVER = 5


# Looking up an enum member costs 100 ns, and every check needs one.
WITHIN_LIMIT: Final = Reason.WITHIN_LIMIT
LIMIT_EXCEEDED: Final = Reason.LIMIT_EXCEEDED
COST_EXCEEDS_LIMIT: Final = Reason.COST_EXCEEDS_LIMIT
CONCURRENCY: Final = Algorithm.CONCURRENCY


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One validated limit: tokens per window, enforced by one algorithm.

    ``limit`` is in tokens per window, ``window_seconds`` in seconds, both 1 to 2^31−1. ``name`` is unique in its rule.
    An observing limit charges its own bucket like an enforced one, and denies nothing. ``revision`` is the book's
    revision at which its rule was last changed. ``burst`` is the capacity of a token bucket in tokens, 0 = ``limit``.
    A fixed window may follow a ``calendar``; ``window_seconds`` is then the nominal length.

    Derived are ``window_us``, ``capacity`` (the most tokens at once), ``capacity_units`` (the same in the units of a
    token bucket, of which a token has ``window_us``), and ``full_after_s`` (the seconds after which an unused bucket
    equals a fresh one).
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
    capacity_units: int = field(init=False, repr=False, compare=False)
    full_after_s: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        full_after_s = self.window_seconds
        if self.burst:
            full_after_s = -(-self.burst * full_after_s // self.limit)
        object.__setattr__(self, "window_us", self.window_seconds * US_PER_S)
        object.__setattr__(self, "capacity", self.burst or self.limit)
        object.__setattr__(self, "capacity_units", self.capacity * self.window_us)
        object.__setattr__(self, "full_after_s", full_after_s)


class Plan(NamedTuple):
    """Limits that replace a rule's own for the identities assigned to the plan ``name``."""

    name: str
    limits: tuple[Limit, ...]


@dataclass(frozen=True, slots=True)
class Rule(Limit):
    """One validated rule: the limits of an endpoint and an identifier type.

    ``identifier_type`` is a type that requests use, a product such as ``ip+user`` in byte order, or ``all``. The rule
    itself is its first limit; ``more`` are the others. ``plans`` are sorted by name. ``etag`` changes with every edit.
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
        """The rule's own limits, in order."""
        return (self, *self.more)

    @property
    def limits_of_all_plans(self) -> tuple[Limit, ...]:
        """The rule's own limits, then those of each plan."""
        return (*self.limits, *(limit for plan in self.plans for limit in plan.limits))

    def limits_of(self, plan: str) -> tuple[Limit, ...]:
        """Return the limits of a plan; the rule's own if it does not name the plan."""
        return next((one.limits for one in self.plans if one.name == plan), self.limits)

    def plan_among(self, assigned: Mapping[str, str]) -> str:
        """Return the plan whose limits judge a check; empty for the rule's own.

        ``assigned`` maps the types of the check's identities to their plans. The first type of a product whose plan the
        rule names or is ``unlimited`` decides.
        """
        for kind in types_within(self.identifier_type) if assigned else ():
            plan = assigned.get(kind)
            if plan == UNLIMITED_PLAN or any(one.name == plan for one in self.plans):
                return plan or ""
        return ""

    @property
    def has_list(self) -> bool:
        """Whether the rule is more than one enforced limit without a name, a burst or a calendar."""
        return (
            bool(self.more)
            or self.burst > 0
            or self.calendar is not None
            or self.name != DEFAULT_LIMIT
            or self.enforcement is not Enforcement.ENFORCE
        )


Identity: TypeAlias = tuple[str, bytes]
"""(identifier type that requests use, identifier)."""


class Check(NamedTuple):
    """One validated check.

    ``identifier`` is the canonical UTF-8 text (1 to 256 bytes; an ``ip`` in the form of :mod:`ipaddress`); ``cost`` is
    at least 1 token; ``timestamp`` is the caller's, as sent (0 = none; its unit follows from its magnitude, ADR 0005);
    ``peek`` judges without charging. ``also`` are further identities that the request counts for, one of each type.
    ``max_wait_ms`` is the longest time that the caller would wait to be allowed, at most ``MAX_WAIT_MS``.
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
"""An algorithm's answer to one check: (allowed, remaining, reset_time, retry_after, reason, state).

``remaining`` is in whole tokens; ``reset_time`` in Unix seconds, rounded up; ``retry_after`` in seconds from the
check's own timestamp, at most ``INT32_MAX``. ``state`` is the bucket's new state; after a denial it is the same
object as the given one. A bare tuple is built and unpacked in 0.05 µs, a NamedTuple in 0.3.
"""


class LimitStatus(NamedTuple):
    """The answer of one of several limits to a check. Units as in :data:`Outcome`."""

    allowed: bool
    remaining: int
    reset_time: int
    retry_after: int
    reason: Reason
    rule: Rule
    limit: Limit | None
    plan: str = ""
    """The limit's plan; ``unlimited``, without a limit, if the rule was passed over."""


class ConsideredRule(NamedTuple):
    """A rule considered for a check and, if it applies, the answers of its limits: its own, or those of ``plan``."""

    rule: Rule
    match: Match
    limits: tuple[LimitStatus, ...] = ()
    plan: str = ""


class NearRule(NamedTuple):
    """A rule whose endpoint is close to that of a check without a rule; ``why`` describes the difference."""

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
    """The answer to one check, with the deciding rule and limit, ``None`` without one.

    ``limits`` are the answers of all limits, the deciding one first; empty if there is only one. Units as in
    :data:`Outcome`. The caller may proceed after ``wait_ms``; the other fields describe that time.
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
    """The limit's plan, ``unlimited`` or ``blocked``; empty for the rule's own limits."""


class Explained(NamedTuple):
    """The answer that a check would get, the rules considered, and the plans of its identities.

    ``nearest`` are rules with similar endpoints, if the check's endpoint has no rule of its own.
    """

    decision: Decision
    considered: tuple[ConsideredRule, ...]
    plans: tuple[AssignedPlan, ...]
    nearest: tuple[NearRule, ...] = ()
