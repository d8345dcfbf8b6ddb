"""The RateLimiterPlans service: assigns identities to plans, and removes and lists assignments.

A write is answered once it is stored and visible to this node's look-ups, as with rules. Errors and logs never contain
an identifier. See ADR 0050.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from ratelimitd.errors import FieldViolation, InvalidInputError
from ratelimitd.rpc.interface import Call, Methods
from ratelimitd.rules.assignments import MAX_IDENTIFIER_BYTES, Assignment, violations
from ratelimitd.rules.store import AssignmentQuery, AssignmentStore
from ratelimitd.rules.validation import NAME, choice_of
from ratelimitd.services.config import (
    DEFAULT_PAGE_SIZE,
    MAX_PAGE_SIZE,
    Feed,
    page_token,
    position_of,
)
from ratelimitd.services.convert import Identities, identity_of
from ratelimitd.services.wire import EMPTY, WireAssignment, parse, text_of
from ratelimiter.v1 import ratelimiter_pb2

SERVICE: Final = "ratelimiter.v1.RateLimiterPlans"

MAX_BATCH: Final = 1_000
"""Assignments of one batch: at most 1.4 MB, and one transaction of about 100 ms that blocks other writes."""


class PlansService:
    """Handlers of the assignments.

    ``actor`` returns the actor of a call for the audit trail. ``identities`` are those that checks may name.
    ``page_key`` returns the key of page tokens, ``now_s`` the node's time in Unix seconds.
    """

    def __init__(
        self,
        store: AssignmentStore,
        feed: Feed,
        actor: Callable[[Call], str],
        *,
        identities: Identities,
        page_key: Callable[[], Awaitable[bytes]],
        now_s: Callable[[], float],
    ) -> None:
        self._store = store
        self._feed = feed
        self._actor = actor
        self._identities = identities
        self._page_key = page_key
        self._now_s = now_s

    def methods(self) -> Methods:
        """Return the handlers by path."""
        return Methods(
            unary={
                f"/{SERVICE}/AssignPlan": self.assign_plan,
                f"/{SERVICE}/UnassignPlan": self.unassign_plan,
                f"/{SERVICE}/GetAssignment": self.get_assignment,
                f"/{SERVICE}/ListAssignments": self.list_assignments,
                f"/{SERVICE}/BatchAssignPlans": self.batch_assign_plans,
            }
        )

    async def assign_plan(self, data: bytes, call: Call) -> bytes:
        """Assign a plan to an identity, replacing any other."""
        wanted = self._assignment_of(
            parse(ratelimiter_pb2.AssignPlanRequest, data).assignment, "assignment."
        )
        [assigned] = await self._store.assign_all([wanted], self._actor(call))
        await self._feed.notify()
        return message_of(assigned).SerializeToString()

    async def unassign_plan(self, data: bytes, call: Call) -> bytes:
        """Remove the assignment of an identity."""
        message = parse(ratelimiter_pb2.UnassignPlanRequest, data)
        identity = identity_of(message.identity, self._identities, "identity.")
        await self._store.unassign(identity, text_of(message.etag), self._actor(call))
        await self._feed.notify()
        return EMPTY

    async def get_assignment(self, data: bytes, _call: Call) -> bytes:
        """Return the assignment of an identity."""
        message = parse(ratelimiter_pb2.GetAssignmentRequest, data)
        identity = identity_of(message.identity, self._identities, "identity.")
        return message_of(await self._store.assignment(identity)).SerializeToString()

    async def batch_assign_plans(self, data: bytes, call: Call) -> bytes:
        """Assign plans to all identities of a batch, or to none."""
        wanted = self._batch_of(parse(ratelimiter_pb2.BatchAssignPlansRequest, data).assignments)
        assigned = await self._store.assign_all(wanted, self._actor(call))
        await self._feed.notify()
        return ratelimiter_pb2.BatchAssignPlansResponse(
            assignments=map(message_of, assigned)
        ).SerializeToString()

    async def list_assignments(self, data: bytes, _call: Call) -> bytes:
        """Return one page of the assignments, ordered by identifier type, then the bytes of the identifier."""
        message = parse(ratelimiter_pb2.ListAssignmentsRequest, data)
        query, size = self._query_of(message)
        bound = ("assignments", query.plan, query.identifier_type, query.prefix.hex())
        token = text_of(message.page_token)
        after = None
        if token:
            name, identifier_type = position_of(token, bound, await self._page_key())
            after = identifier_type, bytes.fromhex(name)
        # One more than requested shows whether there is a next page.
        found = await self._store.assignments(query, after, size + 1)
        answer = ratelimiter_pb2.ListAssignmentsResponse(assignments=map(message_of, found[:size]))
        if len(found) > size:
            last = found[size - 1]
            position = last.identifier.hex(), last.identifier_type
            answer.next_page_token = page_token(position, bound, await self._page_key())
        return answer.SerializeToString()

    def _assignment_of(self, message: WireAssignment, path: str) -> Assignment:
        """Return a requested assignment.

        Raises:
            InvalidInputError: names every violated field.
        """
        plan, expire_time, note = text_of(message.plan), message.expire_time, text_of(message.note)
        wrong = [
            FieldViolation(path + field, description)
            for field, description in violations(plan, expire_time, note, self._now_s())
        ]
        try:
            identity = identity_of(message.identity, self._identities, f"{path}identity.")
        except InvalidInputError as error:
            raise InvalidInputError(*error.violations, *wrong) from None
        if wrong:
            raise InvalidInputError(*wrong)
        return Assignment(*identity, plan, expire_time, note, text_of(message.etag))

    def _batch_of(self, messages: Sequence[WireAssignment]) -> Sequence[Assignment]:
        """Return the assignments of a batch.

        Raises:
            InvalidInputError: names every violated field of every item.
        """
        if not 0 < len(messages) <= MAX_BATCH:
            raise InvalidInputError(FieldViolation("assignments", f"must be 1 to {MAX_BATCH}"))
        found: dict[tuple[str, bytes], Assignment] = {}
        wrong: list[FieldViolation] = []
        for index, message in enumerate(messages):
            path = f"assignments[{index}]."
            try:
                assignment = self._assignment_of(message, path)
            except InvalidInputError as error:
                wrong += error.violations
                continue
            if assignment.identity in found:
                wrong.append(FieldViolation(f"{path}identity", "must differ from those before"))
            found[assignment.identity] = assignment
        if wrong:
            raise InvalidInputError(*wrong)
        return list(found.values())

    def _query_of(self, message: Any) -> tuple[AssignmentQuery, int]:
        """Return the filters and the page size, as for a listing of rules."""
        kind, plan = message.identifier_type, text_of(message.plan)
        wrong = []
        if plan and NAME.fullmatch(plan) is None:
            wrong.append(FieldViolation("plan", "must be the name of a plan, or empty"))
        if kind and kind not in self._identities.types:
            named = choice_of(self._identities.types.values())
            wrong.append(FieldViolation("identifier_type", f"must be one of {named}, or empty"))
        if message.identifier_prefix and not kind:
            wrong.append(FieldViolation("identifier_type", "must be set for a prefix"))
        if len(message.identifier_prefix) > MAX_IDENTIFIER_BYTES:
            text = f"must be at most {MAX_IDENTIFIER_BYTES} bytes"
            wrong.append(FieldViolation("identifier_prefix", text))
        if message.page_size < 0:
            wrong.append(FieldViolation("page_size", "must not be negative"))
        if wrong:
            raise InvalidInputError(*wrong)
        size = min(message.page_size, MAX_PAGE_SIZE) or DEFAULT_PAGE_SIZE
        return AssignmentQuery(plan, text_of(kind), message.identifier_prefix), size


def message_of(assignment: Assignment) -> ratelimiter_pb2.Assignment:
    """Return the contract's message of an assignment."""
    identifier_type, identifier, plan, expire_time, note, etag = assignment
    return ratelimiter_pb2.Assignment(
        identity=ratelimiter_pb2.Identity(
            # A row that bypassed the service may have invalid text here.
            identifier_type=identifier_type,
            identifier=identifier.decode(errors="replace"),
        ),
        plan=plan,
        expire_time=expire_time,
        note=note,
        etag=etag,
    )
