"""Maps errors to gRPC statuses and rich details, by one table.

No error reaches a caller as UNKNOWN, with a traceback or with the name of a class. Details follow google.rpc: every
error has an ``ErrorInfo`` with a stable reason. See ADR 0010.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from typing import Final, NamedTuple

from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from ratelimitd.counters import CheckStats
from ratelimitd.errors import (
    MAX_VIOLATIONS,
    AssignmentConflictError,
    AssignmentNotFoundError,
    AssignmentsFullError,
    FieldViolation,
    HoldEndedError,
    HoldSettledError,
    HoldsFullError,
    InvalidInputError,
    RateLimitdError,
    RuleBookConflictError,
    RuleConflictError,
    RuleExistsError,
    RuleNotFoundError,
    RulesFullError,
    StoreCorruptError,
    StoreOverloadedError,
    StoreUnavailableError,
)
from ratelimitd.rpc.interface import RpcError, StatusCode

DOMAIN: Final = "ratelimitd"
"""The domain of every ``ErrorInfo`` reason."""

RULE_RESOURCE: Final = "ratelimiter.v1.RateLimit"
"""Type of a rule in ``ResourceInfo``."""

RETRY_DELAY_S: Final = 1
"""Delay before a retry after UNAVAILABLE; the store is probed about that often."""

MAX_TEXT_CHARS: Final = 120
MAX_MESSAGE_CHARS: Final = 360
"""Characters of each violation, and of the message: trailers hold all of it, and clients limit them to 8 KiB."""

_log = logging.getLogger(__name__)


class ErrorStatus(NamedTuple):
    """One row of the table. ``message`` is a fixed text; if empty, the error's own, which contains no secret."""

    code: StatusCode
    reason: str
    message: str = ""


ERROR_STATUS: Final[Mapping[type, ErrorStatus]] = {
    InvalidInputError: ErrorStatus(StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
    RuleNotFoundError: ErrorStatus(StatusCode.NOT_FOUND, "RULE_NOT_FOUND"),
    RuleExistsError: ErrorStatus(StatusCode.ALREADY_EXISTS, "RULE_EXISTS"),
    RulesFullError: ErrorStatus(StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_RULES"),
    RuleConflictError: ErrorStatus(
        StatusCode.ABORTED, "ETAG_MISMATCH", "the etag is not the rule's: read the rule again"
    ),
    RuleBookConflictError: ErrorStatus(StatusCode.ABORTED, "ETAG_MISMATCH"),
    AssignmentNotFoundError: ErrorStatus(StatusCode.NOT_FOUND, "ASSIGNMENT_NOT_FOUND"),
    AssignmentConflictError: ErrorStatus(
        StatusCode.ABORTED,
        "ETAG_MISMATCH",
        "the etag is not the assignment's: read the assignment again",
    ),
    AssignmentsFullError: ErrorStatus(StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_ASSIGNMENTS"),
    HoldEndedError: ErrorStatus(StatusCode.FAILED_PRECONDITION, "HOLD_ENDED"),
    HoldSettledError: ErrorStatus(StatusCode.FAILED_PRECONDITION, "HOLD_SETTLED"),
    HoldsFullError: ErrorStatus(StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_HOLDS"),
    StoreUnavailableError: ErrorStatus(StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE"),
    StoreOverloadedError: ErrorStatus(StatusCode.UNAVAILABLE, "STORE_OVERLOADED"),
    StoreCorruptError: ErrorStatus(
        StatusCode.INTERNAL, "STORE_CORRUPT", "the store holds something unreadable"
    ),
}
"""Every error that may reach a caller; a subclass counts as its nearest parent in the table."""

UNEXPECTED: Final = ErrorStatus(StatusCode.INTERNAL, "INTERNAL", "unexpected error")
"""All other errors: defects, reported in the log and not to the caller."""


def rpc_error(error: RateLimitdError) -> RpcError:
    """Return the status and details of an error."""
    row = _row(type(error))
    message = row.message or _clipped(str(error), MAX_MESSAGE_CHARS)
    return rich_error(row.code, row.reason, message, *_details(error, message))


def rich_error(code: StatusCode, reason: str, message: str, *details: Message) -> RpcError:
    """Return an error with ``ErrorInfo`` and further ``google.rpc`` details."""
    status = status_pb2.Status(code=code, message=message)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN))
    for detail in details:
        status.details.add().Pack(detail)
    return RpcError(code, message, status.SerializeToString())


class ErrorEdge:
    """Converts every exception of a handler to an ``RpcError``.

    Defects and unavailable stores are logged; the log limits repetitions to one a second.
    """

    def __init__(self, stats: CheckStats) -> None:
        self._stats = stats

    def translate(self, error: Exception, method: str) -> RpcError:
        """Return the error with which the call of ``method`` ends."""
        if isinstance(error, RpcError):
            return error
        if isinstance(error, RateLimitdError) and _row(type(error)) is not UNEXPECTED:
            if isinstance(error, StoreUnavailableError):
                _log.warning("a call of %s was answered UNAVAILABLE: %s", method, error)
            return rpc_error(error)
        self._stats.unexpected_total += 1
        # The log shows its type and traceback, without its text, which may quote an identifier or a token.
        _log.error("unexpected error in %s", method, exc_info=error)
        return rich_error(*UNEXPECTED)

    async def awaited(self, answer: Awaitable[bytes], method: str) -> bytes:
        """Await the answer of a handler."""
        try:
            return await answer
        except Exception as error:  # noqa: BLE001 -- the edge: nothing may leave but an RpcError
            raise self.translate(error, method) from None

    async def streamed(self, answers: AsyncIterator[bytes], method: str) -> AsyncIterator[bytes]:
        """Yield the answers of a streaming handler."""
        try:
            async for answer in answers:
                yield answer
        except Exception as error:  # noqa: BLE001 -- as above
            raise self.translate(error, method) from None


def _row(error_type: type[RateLimitdError]) -> ErrorStatus:
    rows = (ERROR_STATUS[parent] for parent in error_type.__mro__ if parent in ERROR_STATUS)
    return next(rows, UNEXPECTED)


def _details(error: RateLimitdError, message: str) -> Iterator[Message]:
    if isinstance(error, InvalidInputError):
        yield _bad_request(error.violations)
    elif isinstance(error, RuleNotFoundError):
        yield error_details_pb2.ResourceInfo(
            resource_type=RULE_RESOURCE, resource_name=error.name, description=message
        )
    elif isinstance(error, RuleExistsError):
        yield error_details_pb2.ResourceInfo(resource_type=RULE_RESOURCE, description=message)
    elif isinstance(error, StoreUnavailableError):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.seconds = RETRY_DELAY_S
        yield retry


def _bad_request(violations: tuple[FieldViolation, ...]) -> error_details_pb2.BadRequest:
    detail = error_details_pb2.BadRequest()
    for violation in violations[:MAX_VIOLATIONS]:
        detail.field_violations.add(
            field=_clipped(violation.field, MAX_TEXT_CHARS),
            description=_clipped(violation.description, MAX_TEXT_CHARS),
        )
    return detail


def _clipped(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
