"""The error tree. ``services/errors.py`` maps it to gRPC statuses.

Denials and fail-open answers are values (:class:`ratelimitd.model.Decision`), not errors. No message contains an
identifier, a token or another secret.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class RateLimitdError(Exception):
    """Root of the errors that this package raises."""


class SettingsError(RateLimitdError):
    """A setting is wrong or unknown; the message names it. The node does not start."""


class StartupError(RateLimitdError):
    """The node cannot start (port taken, state directory in use, database not writable); the message is one line."""


class TraceInvalidError(RateLimitdError):
    """A trace file is truncated, altered, foreign or of another version; the message names the file and the byte."""


class FieldViolation(NamedTuple):
    """One invalid field of a message: its path in the contract, and the error."""

    field: str
    description: str


MAX_VIOLATIONS: Final = 16
"""Violations that a message names; the others are only counted."""


class InvalidInputError(RateLimitdError):
    """A caller's input is malformed. Nothing was changed and nothing was charged."""

    def __init__(self, *violations: FieldViolation) -> None:
        named = [f"{field}: {description}" for field, description in violations[:MAX_VIOLATIONS]]
        if more := len(violations) - len(named):
            named.append(f"{more} more")
        super().__init__("; ".join(named))
        self.violations = violations


class CheckInvalidError(InvalidInputError):
    """A check or reset request is malformed."""


class RuleInvalidError(InvalidInputError):
    """A rule, or a request about rules, is malformed; the message names every invalid field."""


class RuleNotFoundError(RateLimitdError):
    """No rule has the id, or the endpoint and identifier type; ``name`` is the id or the endpoint."""

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
    """The store has reached its maximum of rules; delete one first."""


class RuleConflictError(RateLimitdError):
    """The rule was changed meanwhile, so that the etag does not match."""


class RuleBookConflictError(RuleConflictError):
    """The rules were changed since a complete set was prepared; the message names the field that does not match."""


class AssignmentNotFoundError(RateLimitdError):
    """The identity is assigned to no plan."""

    def __init__(self) -> None:
        super().__init__("the identity is assigned to no plan")


class AssignmentConflictError(RateLimitdError):
    """The assignment was changed meanwhile, so that the etag does not match."""


class AssignmentsFullError(RateLimitdError):
    """The store has reached its maximum of assignments; remove one first."""


class HoldEndedError(RateLimitdError):
    """A hold ended before it was settled or extended."""

    def __init__(self, field: str = "hold") -> None:
        super().__init__(
            f"{field}: the hold has expired; its tokens stay charged, and its slots are free"
        )


class HoldSettledError(RateLimitdError):
    """A settled hold is to be settled with another number of tokens (field ``actual``) or extended (``hold``)."""

    def __init__(self, field: str = "actual") -> None:
        how = "" if field == "hold" else ", with another number of tokens"
        super().__init__(f"{field}: the hold was settled before{how}")


class HoldsFullError(RateLimitdError):
    """A bucket, or the node, has reached its maximum of holds."""


class StoreUnavailableError(RateLimitdError):
    """A store cannot be reached or cannot write; callers see the message, which contains no SQL and no values.

    Counts as a failure for the circuit breaker if the shared state raises it.
    """


class StoreSlowError(StoreUnavailableError):
    """A store did not answer in time. It may have executed the request, and may answer the next one."""


class SchemaOlderError(StoreUnavailableError):
    """The rule database has the tables of an older release."""


class StoreMisconfiguredError(StoreUnavailableError):
    """A store rejects the node until a password, a permission or a setting is corrected."""


class StoreClusterDownError(StoreUnavailableError):
    """A server of a Cluster waits until the Cluster is whole again, usually for a failover of another server."""


class StoreMovingError(StoreUnavailableError):
    """Keys of a command are being moved to another server; nothing was executed. One command per key works."""


class BreakerOpenError(StoreUnavailableError):
    """The circuit breaker is open: the shared state is not called for another ``retry_after_us`` µs."""

    def __init__(self, retry_after_us: int) -> None:
        super().__init__("the circuit breaker of the shared state is open")
        self.retry_after_us = retry_after_us


class StoreOverloadedError(RateLimitdError):
    """The maximum of concurrent requests to a store is reached.

    Says nothing about the store's health, so it never counts for the circuit breaker.
    """


class StoreCorruptError(RateLimitdError):
    """A store returned data in a foreign format. Never counts for the circuit breaker."""


def printable(text: str) -> str:
    """Return ``text`` on one line without terminal control characters: a file or another machine may have sent it."""
    return "".join(
        char if char.isprintable() else " " if char.isspace() else "\N{REPLACEMENT CHARACTER}"
        for char in text
    )
