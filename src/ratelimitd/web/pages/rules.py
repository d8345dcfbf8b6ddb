"""The pages of the rules: the table with its search, and the forms to create, edit, switch and delete a rule.

Each write has a preview and applies only to the version previewed. Stores nothing itself:
the services do so. See ADR 0028.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from google.protobuf.empty_pb2 import Empty
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from ratelimitd.model import EVERYBODY, Algorithm, IdentifierType, Rule, types_within
from ratelimitd.rpc.interface import StatusCode
from ratelimitd.rules.book import RuleBook
from ratelimitd.rules.validation import types_beside
from ratelimitd.web.pages.audit import AuditTrail
from ratelimitd.web.pages.overview import SPAN_WORDS
from ratelimitd.web.pages.page_base import CONFIG, NO_ETAG, Endpoint, Fields, Frame, Rejected
from ratelimitd.web.pages.rule_changes import consequences, differences
from ratelimitd.web.pages.rule_form import PERIODS, RuleForm
from ratelimitd.web.pages.rule_search import STATES, RuleQuery, search
from ratelimitd.web.pages.traffic_view import SORT_WORDS, traffic_of, view_of_rule
from ratelimiter.v1 import ratelimiter_pb2

CHOICES: Final[Mapping[str, Any]] = {
    "algorithms": tuple(Algorithm),
    "periods": ("", *PERIODS),
    "states": STATES,
}

DONE: Final[Mapping[str, str]] = {
    "created": "The rule was created. It holds from now on.",
    "stored": "The change was stored. It holds from now on.",
    "deleted": "The rule was deleted.",
}
"""Messages after a write."""

TAKEN: Final = "another rule has this endpoint and identifier type"
STALE: Final = "This rule was changed meanwhile, so nothing was stored."
GONE: Final = "This rule was deleted meanwhile, so nothing was stored. Sending the form again creates a new rule."


class RulesPages:
    """The endpoints of the pages."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._parts = frame.parts
        self._trail = AuditTrail(frame.parts.audit)

    def routes(self) -> list[BaseRoute]:
        """Return their routes."""
        reading, posting, of_rule = self._frame.reading, self._frame.posting, self._of_rule
        return [
            Route("/rules", reading(self.table)),
            Route("/rules/new", reading(self.new)),
            Route("/rules/new", posting(self.create), methods=["POST"]),
            Route("/rules/{id}", of_rule(self.show)),
            Route("/rules/{id}", posting(self.edit), methods=["POST"]),
            Route("/rules/{id}/switch", of_rule(self.preview_switch)),
            Route("/rules/{id}/promote", of_rule(self.preview_promotion)),
            Route("/rules/{id}/delete", of_rule(self.preview_delete)),
            Route("/rules/{id}/delete", posting(self.delete), methods=["POST"]),
        ]

    async def table(self, request: Request) -> Response:
        """Show a page of the rules that match the search."""
        query = RuleQuery.of_parameters(request.query_params)
        book = self._current_book()
        found = await search(book, query, self._parts.rule_traffic.of)
        await self._parts.live.refresh()
        overview = self._parts.live.overview()
        return self._frame.page(
            request,
            "rules.html",
            query=query,
            found=found,
            traffic={
                rule.id: traffic_of(rule.id, self._parts.rule_traffic, overview)
                for rule in found.rules
            },
            sorts=SORT_WORDS,
            revision=book.revision,
            loaded=self._parts.book() is not None,
            done=DONE.get(request.query_params.get("done", ""), ""),
            types=sorted({*self._parts.types, *book.types}),
            **CHOICES,
        )

    def _of_rule(self, endpoint: Callable[[Request, Rule], Awaitable[Response]]) -> Endpoint:
        """Wrap ``endpoint`` for visitors who may read; it receives the rule that the address names."""

        async def found(request: Request) -> Response:
            rule = self._rule(request)
            return self._missing(request) if rule is None else await endpoint(request, rule)

        return self._frame.reading(found)

    async def new(self, request: Request) -> Response:
        """Show the empty form; parameters of the address fill it, for links from elsewhere."""
        given = request.query_params
        form = RuleForm(
            endpoint=given.get("endpoint", ""),
            identifier_type=given.get("identifier_type", IdentifierType.USER),
        )
        return self._form(request, form)

    async def create(self, request: Request, fields: Fields) -> Response:
        """Handle the form of a new rule: edit it again, show its preview, or store it."""
        return await self._handle(request, fields, RuleForm.of_fields(fields), None)

    async def show(self, request: Request, rule: Rule) -> Response:
        """Show the form of a rule and its history."""
        await self._parts.live.refresh()
        span = request.query_params.get("range", "")
        overview = self._parts.live.overview()
        return self._form(
            request,
            RuleForm.of_rule(rule),
            rule=rule,
            history=await self._trail.page(rule.id, None),
            done=DONE.get(request.query_params.get("done", ""), ""),
            traffic=view_of_rule(rule.id, span, self._parts.rule_traffic, overview),
            spans=SPAN_WORDS,
        )

    async def edit(self, request: Request, fields: Fields) -> Response:
        """Handle the form of a rule like :meth:`create`, but only for the version it was made from."""
        form, etag = RuleForm.of_fields(fields), fields.get("etag", "")
        rule = self._rule(request)
        if rule is None or rule.etag != etag:
            # This node may not have the change yet, or still have the old rule: the database is authoritative.
            rule = await self._trail.stored(request.path_params["id"]) or rule
        if rule is None or rule.etag != etag:
            return await self._outdated(request, form, rule)
        return await self._handle(request, fields, form, rule)

    async def preview_switch(self, request: Request, rule: Rule) -> Response:
        """Show the preview of enabling or disabling the rule."""
        form = RuleForm.of_rule(rule)._replace(enabled=not rule.enabled)
        return self._preview(request, form, rule, form.checked())

    async def preview_promotion(self, request: Request, rule: Rule) -> Response:
        """Show the preview of enforcing an observed limit in place of the first; the address names it."""
        form = RuleForm.promoting(rule, request.query_params.get("limit", ""))
        if form is None:
            text = "This rule has no observed limit with this name."
            return self._frame.message(request, "There is no such limit", text, 404)
        return self._preview(request, form, rule, form.checked())

    async def preview_delete(self, request: Request, rule: Rule) -> Response:
        """Show the preview of deleting the rule."""
        return self._preview(request, RuleForm.of_rule(rule), rule, None)

    async def delete(self, request: Request, fields: Fields) -> Response:
        """Delete the rule, if it is still the previewed version."""
        rule_id = request.path_params["id"]
        etag = fields.get("etag") or NO_ETAG
        message = ratelimiter_pb2.DeleteRateLimitRequest(id=rule_id, etag=etag)
        try:
            await self._frame.ask(request, f"{CONFIG}/DeleteRateLimit", message, Empty)
        except Rejected as error:
            rule = await self._trail.stored(rule_id) or self._rule(request)
            if rule is None or error.code is StatusCode.NOT_FOUND:
                return self._missing(request)
            problem = STALE if error.code is StatusCode.ABORTED else error.message
            return self._preview(request, RuleForm.of_rule(rule), rule, None, problem, error.status)
        return RedirectResponse("/rules?done=deleted", 303)

    def _current_book(self) -> RuleBook:
        return self._parts.book() or RuleBook.empty()

    def _rule(self, request: Request) -> Rule | None:
        return self._current_book().get(request.path_params["id"])

    def _errors(self, form: RuleForm, rule: Rule | None) -> dict[str, str]:
        """Return the errors of the fields, including an existing rule of the same place, as far as this node knows.

        ``rule`` is the edited rule, which may keep a type that is no longer declared.
        """
        if errors := form.errors(types_beside(self._parts.types, rule)):
            return errors
        wanted = form.checked()
        for other in self._current_book().candidates(wanted.endpoint, wanted.identifier_type):
            if other.endpoint == wanted.endpoint and (rule is None or other.id != rule.id):
                return {"endpoint": TAKEN}
        return {}

    async def _handle(
        self, request: Request, fields: Fields, form: RuleForm, rule: Rule | None
    ) -> Response:
        """Do the requested step with the form of a new rule or of ``rule``; a form with errors is shown again."""
        step = fields.get("step")
        if step == "edit":
            return self._form(request, form, rule=rule)
        if errors := self._errors(form, rule):
            return self._form(request, form, rule=rule, errors=errors, status_code=422)
        wanted = form.checked()
        if step != "store":
            return self._preview(request, form, rule, wanted)
        answer = ratelimiter_pb2.RateLimit
        try:
            if rule is None:
                rate_limit = self._parts.rate_limit_of(replace(wanted, etag=""))
                create = ratelimiter_pb2.CreateRateLimitRequest(rate_limit=rate_limit)
                made = await self._frame.ask(request, f"{CONFIG}/CreateRateLimit", create, answer)
                return RedirectResponse(f"/rules/{made.id}?done=created", 303)
            rate_limit = self._parts.rate_limit_of(replace(wanted, id=rule.id, etag=rule.etag))
            update = ratelimiter_pb2.UpdateRateLimitRequest(rate_limit=rate_limit)
            await self._frame.ask(request, f"{CONFIG}/UpdateRateLimit", update, answer)
        except Rejected as error:
            return await self._refused(request, form, rule, error)
        return RedirectResponse(f"/rules/{rule.id}?done=stored", 303)

    def _form(
        self,
        request: Request,
        form: RuleForm,
        *,
        rule: Rule | None = None,
        status_code: int = 200,
        **context: Any,
    ) -> Response:
        """Return the form of a new rule or of ``rule``."""
        return self._frame.page(
            request,
            "rule_form.html",
            status_code=status_code,
            form=form,
            rule=rule,
            etag=rule.etag if rule else "",
            address=f"/rules/{rule.id}" if rule else "/rules/new",
            **{"history": None, "traffic": None, **context},
            types=(*self._parts.types, EVERYBODY),
            undeclared=[
                kind for kind in types_within(rule.identifier_type) if kind not in self._parts.types
            ]
            if rule
            else [],
            **CHOICES,
        )

    def _preview(  # noqa: PLR0917 -- all of them are what is shown
        self,
        request: Request,
        form: RuleForm,
        before: Rule | None,
        after: Rule | None,
        problem: str = "",
        status_code: int = 200,
    ) -> Response:
        """Return the preview, with the form that stores the change."""
        address = f"/rules/{before.id}" if before else "/rules/new"
        return self._frame.page(
            request,
            "rule_preview.html",
            status_code=status_code,
            form=form,
            before=before,
            after=after,
            problem=problem,
            etag=before.etag if before else "",
            address=address if after else f"{address}/delete",
            differences=differences(before, after),
            consequences=consequences(before, after, self._current_book()),
        )

    async def _refused(
        self, request: Request, form: RuleForm, rule: Rule | None, error: Rejected
    ) -> Response:
        """Return the form with the errors of the service, or the page for a rule that changed meanwhile."""
        if rule and error.code is StatusCode.NOT_FOUND:
            return await self._outdated(request, form, None)
        if rule and error.code is StatusCode.ABORTED:
            # Old changes may have been deleted from the trail: fall back to this node's version.
            return await self._outdated(request, form, await self._trail.stored(rule.id) or rule)
        errors = dict(error.fields)
        if error.code is StatusCode.ALREADY_EXISTS:
            errors["endpoint"] = TAKEN
        return self._form(
            request,
            form,
            rule=rule,
            errors=errors,
            problem="" if errors else error.message,
            status_code=error.status,
        )

    async def _outdated(self, request: Request, form: RuleForm, stored: Rule | None) -> Response:
        """Return the typed rule beside its current version."""
        if stored is None:
            return self._form(request, form, problem=GONE, status_code=409)
        latest = await self._trail.page(stored.id, None)
        errors = form.errors()
        return self._frame.page(
            request,
            "rule_conflict.html",
            status_code=409,
            form=form,
            stored=stored,
            stored_form=RuleForm.of_rule(stored),
            latest=latest.changes[0] if latest.changes else None,
            differences=None if errors else differences(stored, form.checked()),
        )

    def _missing(self, request: Request) -> Response:
        text = "It was deleted, or never existed. The list of changes shows which."
        return self._frame.message(request, "There is no such rule", text, 404)
