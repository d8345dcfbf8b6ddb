"""Calls the services for pages: the methods that gRPC callers use, with the visitor's credentials.

Never accesses a store or a limiter: the services handle roles, validation, audit trail and errors. See ADR 0028.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from starlette.requests import Request

from ratelimitd.errors import FieldViolation
from ratelimitd.model import Rule
from ratelimitd.rpc.interface import Methods, RpcError, StatusCode
from ratelimitd.web.api.http_call import settled
from ratelimitd.web.api.json_api import CHECK_METHOD
from ratelimitd.web.pages.page_base import Frame
from ratelimitd.web.pages.rule_form import RuleForm, form_errors
from ratelimiter.v1 import ratelimiter_pb2

CONFIG: Final = "/ratelimiter.v1.RateLimiterConfig"
PLANS: Final = "/ratelimiter.v1.RateLimiterPlans"
EXPLAIN_METHOD: Final = "/ratelimiter.v1.RateLimiterHealth/ExplainRateLimit"
RESET_METHOD: Final = "/ratelimiter.v1.RateLimiterHealth/ResetRateLimit"

HTTP_STATUS: Final[Mapping[StatusCode, int]] = MappingProxyType(
    {
        StatusCode.INVALID_ARGUMENT: 422,
        StatusCode.NOT_FOUND: 404,
        StatusCode.ALREADY_EXISTS: 409,
        StatusCode.ABORTED: 409,
        StatusCode.PERMISSION_DENIED: 403,
        StatusCode.UNAUTHENTICATED: 401,
        StatusCode.RESOURCE_EXHAUSTED: 429,
        StatusCode.UNAVAILABLE: 503,
    }
)
"""HTTP status of a page with an error; 500 for other codes."""


class Rejected(Exception):  # noqa: N818 -- an answer, not a failure
    """A service refused; nothing was changed. ``fields`` maps fields to their errors."""

    def __init__(self, code: StatusCode, message: str, fields: Mapping[str, str]) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.fields = fields

    @property
    def status(self) -> int:
        """HTTP status of a page with this error."""
        return HTTP_STATUS.get(self.code, 500)


RateLimitOf = Callable[[Rule], ratelimiter_pb2.RateLimit]
"""Converts a rule to the contract's message, as the services do."""


class ServiceCalls:
    """The calls of the pages."""

    def __init__(self, methods: Methods, frame: Frame, rate_limit_of: RateLimitOf) -> None:
        self._methods = methods
        self._frame = frame
        self._rate_limit_of = rate_limit_of

    async def create(self, request: Request, form: RuleForm) -> str:
        """Store a new rule; return its id.

        Raises:
            Rejected: it was not stored. All methods raise it.
        """
        rate_limit = self._rate_limit_of(replace(form.checked(), etag=""))
        message = ratelimiter_pb2.CreateRateLimitRequest(rate_limit=rate_limit)
        answer = await self._ask(request, f"{CONFIG}/CreateRateLimit", message)
        return ratelimiter_pb2.RateLimit.FromString(answer).id

    async def update(self, request: Request, rule_id: str, form: RuleForm, etag: str) -> None:
        """Replace a rule, if ``etag`` is its current one."""
        rate_limit = self._rate_limit_of(replace(form.checked(), id=rule_id, etag=etag))
        message = ratelimiter_pb2.UpdateRateLimitRequest(rate_limit=rate_limit)
        await self._ask(request, f"{CONFIG}/UpdateRateLimit", message)

    async def delete(self, request: Request, rule_id: str, etag: str) -> None:
        """Delete a rule, if ``etag`` is its current one."""
        message = ratelimiter_pb2.DeleteRateLimitRequest(id=rule_id, etag=etag)
        await self._ask(request, f"{CONFIG}/DeleteRateLimit", message)

    async def revert(
        self, request: Request, to: int, *, dry_run: bool = False, since: int = 0
    ) -> ratelimiter_pb2.ApplyRateLimitsResponse:
        """Restore the rules of the revision ``to``, unless one was changed after ``since``; 0 = unconditionally."""
        message = ratelimiter_pb2.ApplyRateLimitsRequest(as_of=to, dry_run=dry_run, revision=since)
        answer = await self._ask(request, f"{CONFIG}/ApplyRateLimits", message)
        return ratelimiter_pb2.ApplyRateLimitsResponse.FromString(answer)

    async def check(
        self, request: Request, message: ratelimiter_pb2.RateLimitRequest
    ) -> ratelimiter_pb2.RateLimitResponse:
        """Check a request."""
        answer = await self._ask(request, CHECK_METHOD, message)
        return ratelimiter_pb2.RateLimitResponse.FromString(answer)

    async def explain(
        self, request: Request, message: ratelimiter_pb2.RateLimitRequest
    ) -> ratelimiter_pb2.Explanation:
        """Return what a check would be answered, and why; spends nothing."""
        answer = await self._ask(request, EXPLAIN_METHOD, message)
        return ratelimiter_pb2.Explanation.FromString(answer)

    async def assign(self, request: Request, assignment: ratelimiter_pb2.Assignment) -> None:
        """Assign an identity to a plan."""
        message = ratelimiter_pb2.AssignPlanRequest(assignment=assignment)
        await self._ask(request, f"{PLANS}/AssignPlan", message)

    async def unassign(
        self, request: Request, identity: ratelimiter_pb2.Identity, etag: str
    ) -> None:
        """Remove an assignment, if ``etag`` is its current one."""
        message = ratelimiter_pb2.UnassignPlanRequest(identity=identity, etag=etag)
        await self._ask(request, f"{PLANS}/UnassignPlan", message)

    async def assignments(
        self, request: Request, message: ratelimiter_pb2.ListAssignmentsRequest
    ) -> ratelimiter_pb2.ListAssignmentsResponse:
        """Return a page of assignments."""
        answer = await self._ask(request, f"{PLANS}/ListAssignments", message)
        return ratelimiter_pb2.ListAssignmentsResponse.FromString(answer)

    async def reset(self, request: Request, message: ratelimiter_pb2.ResetRequest) -> None:
        """Reset an identifier."""
        await self._ask(request, RESET_METHOD, message)

    async def _ask(self, request: Request, method: str, message: Message) -> bytes:
        call = self._frame.call(request, method)
        try:
            return await settled(self._methods.unary[method](message.SerializeToString(), call))
        except RpcError as error:
            raise _rejected(error) from None


def _rejected(error: RpcError) -> Rejected:
    violations: list[FieldViolation] = []
    for detail in status_pb2.Status.FromString(error.details).details:
        request = error_details_pb2.BadRequest()
        if detail.Unpack(request):
            violations += (
                FieldViolation(one.field, one.description) for one in request.field_violations
            )
    return Rejected(error.code, error.message, form_errors(violations))
