"""Calls the services for pages: the methods that gRPC callers use, with the visitor's credentials.

Never accesses a store or a limiter: the services handle roles, validation, audit trail and errors. See ADR 0028.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, TypeVar

from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from starlette.requests import Request

from ratelimitd.errors import FieldViolation
from ratelimitd.rpc.interface import Methods, RpcError, StatusCode
from ratelimitd.web.api import connect
from ratelimitd.web.api.http_call import settled
from ratelimitd.web.pages.page_base import Frame
from ratelimitd.web.pages.rule_form import form_errors

CONFIG: Final = "/ratelimiter.v1.RateLimiterConfig"
PLANS: Final = "/ratelimiter.v1.RateLimiterPlans"
HEALTH: Final = "/ratelimiter.v1.RateLimiterHealth"

AnswerT = TypeVar("AnswerT", bound=Message)

HTTP_STATUS: Final[Mapping[StatusCode, int]] = MappingProxyType(
    {**connect.HTTP_STATUS, StatusCode.INVALID_ARGUMENT: 422}
)
"""HTTP status of a page with an error."""


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
        return HTTP_STATUS[self.code]


class ServiceCalls:
    """The calls of the pages."""

    def __init__(self, methods: Methods, frame: Frame) -> None:
        self._methods = methods
        self._frame = frame

    async def ask(
        self, request: Request, method: str, message: Message, answer: type[AnswerT]
    ) -> AnswerT:
        """Call a method by its path; return its answer, a message of the class ``answer``.

        Raises:
            Rejected: the service refused.
        """
        call = self._frame.call(request, method)
        try:
            data = await settled(self._methods.unary[method](message.SerializeToString(), call))
        except RpcError as error:
            raise _rejected(error) from None
        return answer.FromString(data)


def _rejected(error: RpcError) -> Rejected:
    violations: list[FieldViolation] = []
    for detail in status_pb2.Status.FromString(error.details).details:
        request = error_details_pb2.BadRequest()
        if detail.Unpack(request):
            violations += (
                FieldViolation(one.field, one.description) for one in request.field_violations
            )
    return Rejected(error.code, error.message, form_errors(violations))
