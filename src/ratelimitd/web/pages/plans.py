"""``/plans``: the plan of each identity, with a search and forms to assign and unassign.

Identifiers appear in forms only, never in addresses, which remain in histories and logs. Therefore searches and further
pages are forms, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from heapq import nsmallest
from typing import Any, Final, NamedTuple, Self
from urllib.parse import unquote

from google.protobuf.empty_pb2 import Empty
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from ratelimitd.model import RESERVED_PLANS, IdentifierType
from ratelimitd.rpc.interface import StatusCode
from ratelimitd.rules.assignments import expire_time_of
from ratelimitd.web.pages.page_base import NO_ETAG, PLANS, Fields, Frame, Rejected
from ratelimiter.v1 import ratelimiter_pb2

PAGE_ASSIGNMENTS: Final = 50
MAX_OFFERED: Final = 200
MAX_UNNAMED: Final = 10

DONE: Final = {
    "assigned": "The plan was assigned. It holds from now on.",
    "unassigned": "The assignment was removed.",
}
"""Messages after a write."""

STALE: Final = "This assignment was changed meanwhile, so nothing was stored."

_SEARCH_FIELDS: Final = ("plan", "identifier_type", "identifier_prefix", "page_token")


def _search(fields: Mapping[str, str]) -> ratelimiter_pb2.ListAssignmentsRequest:
    """Return the request to the service for a search."""
    given = {name: fields.get(name, "") for name in _SEARCH_FIELDS}
    return ratelimiter_pb2.ListAssignmentsRequest(**given, page_size=PAGE_ASSIGNMENTS)


class AssignForm(NamedTuple):
    """An assignment as typed."""

    identifier_type: str = IdentifierType.USER
    identifier: str = ""
    plan: str = ""
    expires: str = ""
    note: str = ""
    etag: str = ""

    @classmethod
    def of_fields(cls, fields: Fields) -> Self:
        """Return the assignment in the fields of a form."""
        return cls(**{name: fields.get(name, "") for name in cls._fields})

    @property
    def identity(self) -> ratelimiter_pb2.Identity:
        """Return the identity to assign."""
        return ratelimiter_pb2.Identity(
            identifier_type=self.identifier_type, identifier=self.identifier
        )


class PlansPage:
    """The endpoints of the page."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._parts = frame.parts

    def routes(self) -> list[BaseRoute]:
        """Return their routes."""
        reading, posting = self._frame.reading, self._frame.posting
        return [
            Route("/plans", reading(self.show)),
            Route("/plans", posting(self.search), methods=["POST"]),
            Route("/plans/assign", posting(self.assign), methods=["POST"]),
            Route("/plans/unassign", posting(self.unassign), methods=["POST"]),
        ]

    async def show(self, request: Request) -> Response:
        """Show the first page of assignments and the forms; ``plan`` and ``identifier_type`` of the address select."""
        given = request.query_params
        selected = {name: given.get(name, "") for name in ("plan", "identifier_type")}
        done = DONE.get(given.get("done", ""), "")
        return await self._page(request, _search(selected), done=done)

    async def search(self, request: Request, fields: Fields) -> Response:
        """Show a page of search results."""
        return await self._page(request, _search(fields))

    async def assign(self, request: Request, fields: Fields) -> Response:
        """Assign an identity."""
        form, errors = AssignForm.of_fields(fields), {}
        try:
            expire_time = expire_time_of(form.expires.strip(), self._parts.now_s())
        except ValueError as error:
            # The service refuses the time, too, and reports other errors.
            expire_time, errors = -1, {"expire_time": str(error)}
        try:
            assignment = ratelimiter_pb2.Assignment(
                identity=form.identity,
                plan=form.plan.strip(),
                expire_time=expire_time,
                note=form.note,
            )
            message = ratelimiter_pb2.AssignPlanRequest(assignment=assignment)
            await self._frame.ask(
                request, f"{PLANS}/AssignPlan", message, ratelimiter_pb2.Assignment
            )
        except Rejected as error:
            problem = "" if error.fields else error.message
            return await self._page(
                request,
                _search({}),
                form,
                errors={**error.fields, **errors},
                problem=problem,
                status_code=error.status,
            )
        return RedirectResponse("/plans?done=assigned", 303)

    async def unassign(self, request: Request, fields: Fields) -> Response:
        """Ask for confirmation; unassign an identity once confirmed, if it has not changed meanwhile."""
        # Escaped there, because browsers replace control characters in the fields of forms.
        form = AssignForm.of_fields({**fields, "identifier": unquote(fields.get("identifier", ""))})
        if fields.get("step") != "store":
            return self._frame.page(request, "unassign.html", form=form)
        message = ratelimiter_pb2.UnassignPlanRequest(
            identity=form.identity, etag=form.etag or NO_ETAG
        )
        try:
            await self._frame.ask(request, f"{PLANS}/UnassignPlan", message, Empty)
        except Rejected as error:
            problem = STALE if error.code is StatusCode.ABORTED else error.message
            return await self._page(request, _search({}), problem=problem, status_code=error.status)
        return RedirectResponse("/plans?done=unassigned", 303)

    async def _page(  # noqa: PLR0917 -- all of them are what is shown
        self,
        request: Request,
        search: ratelimiter_pb2.ListAssignmentsRequest,
        form: AssignForm | None = None,
        problem: str = "",
        status_code: int = 200,
        **context: Any,
    ) -> Response:
        found, search_errors = ratelimiter_pb2.ListAssignmentsResponse(), {}
        try:
            found = await self._frame.ask(
                request, f"{PLANS}/ListAssignments", search, ratelimiter_pb2.ListAssignmentsResponse
            )
        except Rejected as error:
            search_errors = dict(error.fields)
            # The token of a later page has no field on the page.
            is_shown = search_errors and "page_token" not in search_errors
            problem = problem or ("" if is_shown else error.message)
            status_code = max(status_code, error.status)
        return self._frame.page(
            request,
            "plans.html",
            status_code=status_code,
            search=search,
            search_errors=search_errors,
            found=found.assignments,
            later=found.next_page_token,
            form=form or AssignForm(),
            problem=problem,
            total=len(self._parts.assignments),
            plans=sorted({*RESERVED_PLANS, *nsmallest(MAX_OFFERED, self._named_plans())}),
            **self._unnamed(),
            undeclared=sorted(self._parts.assignments.types.keys() - set(self._parts.types)),
            types=self._parts.types,
            **context,
        )

    def _named_plans(self) -> Collection[str]:
        book = self._parts.book()
        return () if book is None else book.plans

    def _unnamed(self) -> Mapping[str, Any]:
        """Return the assigned plans that no rule names, and the first of them with the number of their assignments."""
        held = self._parts.assignments.plans
        unnamed = held.keys() - {*RESERVED_PLANS, *self._named_plans()}
        first = [(plan, held[plan]) for plan in nsmallest(MAX_UNNAMED, unnamed)]
        return {"unnamed": unnamed, "first_unnamed": first}
