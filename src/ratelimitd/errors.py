"""The error tree. ``services/errors.py`` maps it to statuses of gRPC.

A denial and a fail-open answer are values (:class:`ratelimitd.model.Decision`), never errors. No message ever holds an
identifier, a token or another secret.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class RateLimitdError(Exception):
    """Root of the errors that this package raises."""


class SettingsError(RateLimitdError):
    """A setting is wrong or unknown; the message names it. The node does not start."""


class StartupError(RateLimitdError):
    """The node cannot start (port taken, state directory in use, database not writable); one line says why."""


class TraceInvalidError(RateLimitdError):
    """A trace is none, or is cut, altered or of another version; the message names the file and the byte."""


class FieldViolation(NamedTuple):
    """One violated field of a message: its path in the contract and what is wrong with it."""

    field: str
    description: str


MAX_VIOLATIONS: Final = 16
"""Violations that a message names; of further ones it tells the number."""


class InvalidInputError(RateLimitdError):
    """What a caller sent is malformed. Nothing was changed and nothing was charged."""

    def __init__(self, *violations: FieldViolation) -> None:
        named = [f"{field}: {description}" for field, description in violations[:MAX_VIOLATIONS]]
        if more := len(violations) - len(named):
            named.append(f"{more} more")
        super().__init__("; ".join(named))
        self.violations = violations


class CheckInvalidError(InvalidInputError):
    """A check or reset request is malformed."""


class RuleInvalidError(InvalidInputError):
    """A rule, or a request about rules, is malformed; every violated field is named at once."""


class RuleNotFoundError(RateLimitdError):
    """No rule has this id, or this endpoint and identifier type; ``name`` is the id or the endpoint."""

    def __init__(self, name: str, identifier_type: str = "") -> None:
        super().__init__(
            f"no rule is for the endpoint {name!r} and the identifier type {identifier_type}"
            if identifier_type
            else f"no rule has the id {name!r}"
        )
        self.name = name


class RuleExistsError(RateLimitdError):
    """A rule with the same id, or the same endpoint and identifier type, exists."""


class RulesFullError(RateLimitdError):
    """The store holds as many rules as it takes; delete one first."""


class RuleConflictError(RateLimitdError):
    """The etag is not that of the rule, which was changed meanwhile."""


class RuleBookConflictError(RuleConflictError):
    """The rules are not those that a whole set was made for; the message names the field that says so."""


class AssignmentNotFoundError(RateLimitdError):
    """The identity is assigned to no plan."""

    def __init__(self) -> None:
        super().__init__("the identity is assigned to no plan")


class AssignmentConflictError(RateLimitdError):
    """An etag is not that of the assignment, which was changed meanwhile."""


class AssignmentsFullError(RateLimitdError):
    """The store holds as many assignments as it takes; remove one first."""


class HoldEndedError(RateLimitdError):
    """The time of a hold was over before it was settled or extended."""

    def __init__(self, field: str = "hold") -> None:
        super().__init__(
            f"{field}: its time is over; what it held stays charged, and its slots are free"
        )


class HoldSettledError(RateLimitdError):
    """A settled hold was settled with other tokens (field ``actual``), or extended (``hold``)."""

    def __init__(self, field: str = "actual") -> None:
        how = "" if field == "hold" else ", with another number of tokens"
        super().__init__(f"{field}: the hold was settled before{how}")


class HoldsFullError(RateLimitdError):
    """A bucket, or the node, has as many holds as it may have."""


class StoreUnavailableError(RateLimitdError):
    """A store cannot be reached or cannot write now; the message, without SQL or values, is shown to the caller.

    Counts for the circuit breaker when the shared state raises it.
    """


class StoreSlowError(StoreUnavailableError):
    """A store has not answered in time, and may have done what it was asked. It may be back the next moment."""


class StoreMisconfiguredError(StoreUnavailableError):
    """A store refuses the node until a password, a permission or a setting is corrected."""


class StoreMovingError(StoreUnavailableError):
    """Keys of a command are being moved to another server: nothing was run. A command for each key works."""


class BreakerOpenError(StoreUnavailableError):
    """The circuit breaker is open: the shared state is not asked. ``retry_after_us`` is the time until it is again."""

    def __init__(self, retry_after_us: int) -> None:
        super().__init__("the circuit breaker of the shared state is open")
        self.retry_after_us = retry_after_us


class StoreOverloadedError(RateLimitdError):
    """As many requests to a store are under way as may be.

    Says nothing about the store: never counts for the circuit breaker.
    """


class StoreCorruptError(RateLimitdError):
    """A store answered with something that is not ours. Never counts for the circuit breaker."""


def printable(text: str) -> str:
    """``text`` in one line and without characters that drive a terminal: it may come from a file or another machine."""
    return "".join(
        char if char.isprintable() else " " if char.isspace() else "\N{REPLACEMENT CHARACTER}"
        for char in text
    )
